"""Hugging Face Accelerate: the loop stays the user's.

Backward, clipping and the optimizer's step go through the Accelerator.
"""

from __future__ import annotations

from accelerate import Accelerator
from torch.optim import AdamW

from benchmarks.step_cost.models import CLIP, LEARNING_RATE, READ_EVERY, Workload, mean_loss
from benchmarks.step_cost.watch import Watch, main


def train(workload: Workload, watch: Watch, folder: str) -> None:
    accelerator = Accelerator(cpu=True)
    plain, batches = workload.model(), workload.batches()
    model, optimizer = accelerator.prepare(
        plain, AdamW(plain.parameters(), lr=LEARNING_RATE, fused=True)
    )
    losses = []
    for step in range(watch.total):
        inputs, targets = batches[step % len(batches)]
        optimizer.zero_grad()
        loss = mean_loss(model(inputs), targets)
        accelerator.backward(loss)
        accelerator.clip_grad_norm_(model.parameters(), CLIP)
        optimizer.step()
        if step % READ_EVERY == 0:
            losses.append(loss.item())
        watch.tick(plain, loss)


if __name__ == "__main__":
    main(train, ("accelerate",))
