"""Accelerate as its documents say: save_state, then load_state and skip_first_batches to resume.

python accelerate_loop.py out [own]

With `own` the loader has its own generator, so that a new pass over it draws nothing from the
global one.
"""

import shutil
import sys
from pathlib import Path

import torch
from accelerate import Accelerator
from accelerate.utils import DataLoaderConfiguration, set_seed
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

EPOCHS, EVERY = 8, 5


def main(out: Path, has_own: bool) -> None:
    set_seed(0)
    accelerator = Accelerator(
        cpu=True, dataloader_config=DataLoaderConfiguration(use_seedable_sampler=True)
    )
    inputs = torch.randn(96, 6, generator=torch.Generator().manual_seed(1))
    generator = torch.Generator().manual_seed(2) if has_own else None
    loader = DataLoader(
        TensorDataset(inputs, inputs[:, :3].argmax(1)),
        batch_size=8,
        shuffle=True,
        generator=generator,
    )
    model = nn.Sequential(nn.Linear(6, 16), nn.ReLU(), nn.Dropout(0.2), nn.Linear(16, 3))
    model, optimizer, loader = accelerator.prepare(
        model, torch.optim.AdamW(model.parameters(), lr=0.01), loader
    )
    newest = max(out.glob("step-*"), default=None)
    step = 0
    if newest is not None:
        accelerator.load_state(str(newest))
        step = int(newest.name.removeprefix("step-"))
    for epoch in range(step // len(loader), EPOCHS):
        loader.set_epoch(epoch)
        done = step % len(loader)
        for batch, labels in accelerator.skip_first_batches(loader, done) if done else loader:
            loss = nn.functional.cross_entropy(model(batch), labels)
            optimizer.zero_grad()
            accelerator.backward(loss)
            optimizer.step()
            step += 1
            if step % EVERY == 0:
                save(accelerator, out, step)
    save(accelerator, out, step + 1)


def save(accelerator: Accelerator, out: Path, step: int) -> None:
    """Into a folder beside, then by its name: a kill leaves no half one; older ones go."""
    draft = out / "draft"
    shutil.rmtree(draft, ignore_errors=True)
    accelerator.save_state(str(draft))
    draft.rename(out / f"step-{step:06d}")
    for old in sorted(out.glob("step-*"))[:-2]:
        shutil.rmtree(old)


if __name__ == "__main__":
    main(Path(sys.argv[1]), "own" in sys.argv)
