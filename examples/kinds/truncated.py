"""Truncated backpropagation through time.

A recurrent network reads long streams in windows and keeps its state between them.

python examples/kinds/truncated.py
surefoot train examples/kinds/truncated.py:Echo --steps 40

Each row of a batch continues the same row of the batch before (`data.shuffle = false`). The state
of each row is the task's own state, which checkpoints hold; on several ranks each rank has that of
its own rows.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from surefoot import Loss, Run, RunSpec
from surefoot.data import Arrays
from surefoot.metrics import Mean, accuracy

# without the state, the first three answers of a window are guesses: accuracy 0.81
ROWS, WINDOW, WINDOWS, DELAY = 16, 8, 20, 3
Batch = dict[str, Tensor]
SPEC = RunSpec(
    optim={"name": "adam", "lr": 1e-2, "weight_decay": 0.0},
    train={"length": "25 epochs", "batch": ROWS},
    data={"shuffle": False},
    evaluate={"every": "5 epochs"},
)


class Memory(nn.Module):
    def __init__(self, width: int = 32) -> None:
        super().__init__()
        self.cell, self.head = nn.GRU(2, width, batch_first=True), nn.Linear(width, 2)
        self.state = torch.zeros(ROWS, width)

    def forward(self, bits: Tensor, row: Tensor, begins: Tensor) -> Tensor:
        before = self.state[row.cpu()].to(bits.device) * ~begins[:, None]
        out, last = self.cell(F.one_hot(bits, 2).float(), before[None])
        self.state[row.cpu()] = last[0].detach().cpu()  # gradients end at the window
        return self.head(out)


class Echo:
    """Say the bit that was heard three bits ago."""

    state_on_ranks = {"hidden": "per_rank"}  # noqa: RUF012 - never changed

    def model(self) -> nn.Module:
        self.memory = Memory()
        return self.memory

    def state(self) -> dict[str, Tensor]:
        return {"hidden": self.memory.state}

    def data(self, split: str) -> Arrays:
        draws = torch.Generator().manual_seed(int(split == "test"))
        bits = torch.randint(2, (ROWS, DELAY + WINDOWS * WINDOW), generator=draws)
        heard, asked = (
            each.unflatten(1, (WINDOWS, WINDOW)).transpose(0, 1).flatten(0, 1)
            for each in (bits[:, DELAY:], bits[:, :-DELAY])
        )
        number = torch.arange(ROWS * WINDOWS)
        return Arrays(bits=heard, asked=asked, row=number % ROWS, begins=number < ROWS)

    def forward(self, model: nn.Module, batch: Batch) -> Tensor:
        return model(batch["bits"], batch["row"], batch["begins"])

    def loss(self, output: Tensor, batch: Batch) -> Loss:
        return Loss.sum(
            F.cross_entropy(output.flatten(0, 1), batch["asked"].flatten(), reduction="sum"),
            count=batch["asked"].numel(),
        )

    def metrics(self, output: Tensor, batch: Batch) -> dict[str, Mean]:
        return {"accuracy": accuracy(output.flatten(0, 1), batch["asked"].flatten())}


def main(folder: str | None = None) -> Run:
    with Run(SPEC, Echo(), folder=folder) as run:
        for _ in run.steps():
            if run.evaluation_due:
                run.evaluate()
    return run


if __name__ == "__main__":
    main()
