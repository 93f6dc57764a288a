"""A whole training loop of your own out of single components: no Run, no Task, no spec.

python examples/plain_loop.py runs/mine
python examples/plain_loop.py runs/mine     # again: goes on from the last commit

Copy it and change it.
Data in a seekable order, bf16 compute, warm-up and cosine, accumulation, clipping and a guard
against non-finite steps, a meter, commits of all that is needed to go on: weights, optimizer,
random states. Order, augmentation and schedule are functions of the step alone. So a loop that goes
on ends with the same bits as one that was never stopped.
"""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from sklearn.datasets import load_digits
from torch import Tensor, nn

from surefoot import StepReport, checkpoint
from surefoot.data import Arrays, Feed, Keys, Order
from surefoot.metrics import accuracy
from surefoot.observe import Meter
from surefoot.optim import GuardedUpdate, build_groups, find_trained
from surefoot.precision import compute_context
from surefoot.schedules import cosine, warmup

SEED, EPOCHS, BATCH, MICROBATCH = 0, 8, 64, 32
WARMUP_STEPS, REPORT_EVERY, COMMIT_EVERY = 20, 40, 40
DEVICE = torch.device("cpu")


def read_digits(split: str) -> Arrays:
    pixels, labels = load_digits(return_X_y=True)
    is_test = np.arange(len(labels)) % 5 == 0
    chosen = is_test if split == "test" else ~is_test
    return Arrays(pixels[chosen].reshape(-1, 1, 8, 8).astype("float32") / 16, labels[chosen])


def build_model() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(1, 16, 3, padding=1),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Conv2d(16, 32, 3, padding=1),
        nn.ReLU(),
        nn.Flatten(),
        nn.Dropout(0.1),
        nn.Linear(32 * 16, 10),
    )


def shift(images: Tensor, keys: Keys) -> Tensor:
    """Move each image up to one pixel down and right.

    Where to depends on (seed, epoch, sample), not on who asks, or when.
    """
    down, right = keys.integers(0, 2, 2).T
    rows = (torch.arange(8) - down[:, None]).clamp(min=0)
    columns = (torch.arange(8) - right[:, None]).clamp(min=0)
    return images[
        torch.arange(len(images))[:, None, None], 0, rows[:, :, None], columns[:, None, :]
    ].unsqueeze(1)


def evaluate(model: nn.Module, source: Arrays) -> float:
    model.eval()
    with torch.no_grad():
        images, labels = source.read(np.arange(len(source)))
        share = accuracy(model(images), labels).value() or 0.0
    model.train()
    return share


def main(folder: Path, stop_after: int | None = None) -> float:
    torch.manual_seed(SEED)
    train, test = read_digits("train"), read_digits("test")
    feed = Feed(train, Order(len(train), SEED), batch=BATCH, microbatch=MICROBATCH)
    total_steps = EPOCHS * feed.steps_per_epoch

    model = build_model()
    groups = build_groups(find_trained(model), weight_decay=1e-4)  # norms and biases do not decay
    optimizer = torch.optim.SGD(groups, lr=0.3, momentum=0.7, fused=True)
    compute = compute_context("bf16", DEVICE)

    def curve(step: int) -> float:
        return warmup(step, WARMUP_STEPS) * cosine(step, total_steps)

    update = GuardedUpdate([optimizer], clip=1.0, curve=curve)
    # the newest that is whole, every byte checked
    restored = checkpoint.load(folder, {"model": model, "update": update})
    first = restored.step if restored else 0
    if first:
        print(f"resuming after step {first}")
        checkpoint.retain(folder, keep=2)  # a kill may have come between a commit and this

    meter = Meter()
    for step in range(first, min(total_steps, stop_after or total_steps)):
        window = feed.window(step)  # found at once, at any step
        torch.manual_seed(SEED << 32 | step)  # dropout, too, is a function of the step
        update.clear_gradients()
        loss_sum = torch.zeros(())
        for ids in feed.microbatches(window):
            images, labels = train.read(ids)
            images = shift(images, Keys(SEED, window.epoch, ids))
            with compute():
                loss = F.cross_entropy(model(images), labels, reduction="sum")
            loss.backward()
            loss_sum += loss.detach()
        count = len(window.ids)
        # the sum over all microbatches, divided once; clipped; skipped if not finite
        norm, applied = update.step_if_finite(1 / count)

        report = StepReport(
            step=step + 1,
            epoch=feed.epoch_of(step + 1),
            num_samples=count,
            learning_rate=optimizer.param_groups[0]["lr"],
            totals={"loss": (loss_sum, count, 1.0)},
            norm=norm,
            was_applied=applied,
        )
        meter.add(report)
        if report.step % REPORT_EVERY == 0 and (seen := meter.take()):
            print(
                f"step {seen.step}  loss {seen.loss:.3f}  rate {seen.learning_rate:.3g}  "
                f"{seen.samples_per_s:,.0f} samples/s"
            )
        if report.step % COMMIT_EVERY == 0 or report.step == total_steps:
            # there whole, or not at all
            checkpoint.save(folder, report.step, {"model": model, "update": update})
            checkpoint.retain(folder, keep=2)

    share = evaluate(model, test)
    print(f"accuracy {share:.1%}")
    return share


if __name__ == "__main__":
    main(Path(sys.argv[1] if len(sys.argv) > 1 else "runs/plain"))
