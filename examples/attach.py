"""A plain PyTorch loop, as anybody writes it, with three lines of surefoot added: they are marked.

python examples/attach.py
surefoot show runs/attached
surefoot verify --command "python examples/attach.py out" --state out     # does it?

The loop keeps its loader, optimizer and schedule. What is added counts, times, records and saves,
and names the cause of the end; the same script, started again after a kill, goes on to the same
bits.
"""

from __future__ import annotations

import sys

import torch
import torch.nn.functional as F
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import DataLoader, TensorDataset, random_split

import surefoot


def main(folder: str = "runs/attached", epochs: int = 8) -> float:
    torch.manual_seed(0)
    pixels, labels = load_digits(return_X_y=True)
    digits = TensorDataset(torch.from_numpy(pixels).float() / 16, torch.from_numpy(labels))
    train, test = random_split(digits, [0.8, 0.2])
    loader = DataLoader(train, batch_size=64, shuffle=True)

    model = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10))
    optimizer = torch.optim.AdamW(model.parameters(), lr=5e-3)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=epochs * len(loader))

    keeping = {"folder": folder, "state": {"schedule": schedule}, "save": "50 steps"}
    with surefoot.attach(model=model, optimizer=optimizer, data=loader, **keeping) as run:  # 1
        for _ in range(run.first_pass, epochs):
            for pixels, labels in run.batches():  # 2: was `in loader`
                loss = F.cross_entropy(model(pixels), labels)
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
                schedule.step()
                run.step_done(loss)  # 3

    with torch.no_grad():
        hits = sum(
            (model(pixels).argmax(-1) == labels).sum().item()
            for pixels, labels in DataLoader(test, batch_size=64)
        )
    print(f"accuracy {hits / len(test):.1%}, recorded in {run.folder}")
    return hits / len(test)


if __name__ == "__main__":
    main(*sys.argv[1:])
