"""CTC: signals of unequal length are read as texts of unequal length (Graves et al., 2006).

It is not known what stands where.

python examples/kinds/ctc.py
surefoot train examples/kinds/ctc.py:Reading --steps 40
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from surefoot import Loss, Run, RunSpec
from surefoot.data import Arrays
from surefoot.metrics import Mean, mean_of

LETTERS, LONGEST = 5, 5  # letters 1 to 5, 0 is the blank
TIMES = 4 * LONGEST
Batch = dict[str, Tensor]
SPEC = RunSpec(
    optim={"name": "adam", "lr": 5e-3, "weight_decay": 0.0},
    train={"length": "12 epochs", "batch": 32},
    evaluate={"every": "6 epochs"},
)


class Reader(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.over_time = nn.GRU(LETTERS, 32, batch_first=True, bidirectional=True)
        self.head = nn.Linear(64, LETTERS + 1)

    def forward(self, signal: Tensor) -> Tensor:
        return self.head(self.over_time(signal)[0])


class Reading:
    def model(self) -> nn.Module:
        return Reader()

    def data(self, split: str) -> Arrays:
        """Each letter lasts for 2 to 4 times.

        The signal is its one-hot vector with noise, padded with noise.
        """
        count = {"train": 800, "test": 200}[split]
        draws = torch.Generator().manual_seed(int(split == "test"))
        steps = torch.randint(1, LETTERS, (count, LONGEST), generator=draws)
        letters = steps.cumsum(1) % LETTERS + 1  # none twice in a row
        num_letters = torch.randint(2, LONGEST + 1, (count,), generator=draws)
        lasts = torch.randint(2, 5, (count, LONGEST), generator=draws)
        lasts *= torch.arange(LONGEST) < num_letters[:, None]
        signal = 0.3 * torch.randn(count, TIMES, LETTERS, generator=draws)
        for row, (which, last) in enumerate(zip(letters, lasts, strict=True)):
            at_times = (which - 1).repeat_interleave(last)
            signal[row, : int(last.sum())] += F.one_hot(at_times, LETTERS)
        return Arrays(signal=signal, times=lasts.sum(1), letters=letters, num_letters=num_letters)

    def forward(self, model: nn.Module, batch: Batch) -> Tensor:
        return model(batch["signal"]).log_softmax(2)

    def loss(self, output: Tensor, batch: Batch) -> Loss:
        lengths = batch["times"], batch["num_letters"]
        total = F.ctc_loss(output.transpose(0, 1), batch["letters"], *lengths, reduction="sum")
        return Loss.sum(total, count=batch["num_letters"].sum())

    def metrics(self, output: Tensor, batch: Batch) -> dict[str, Mean]:
        right = 0
        for row, time, letters, number in zip(
            output, batch["times"], batch["letters"], batch["num_letters"], strict=True
        ):
            best = row[:time].argmax(1).unique_consecutive()
            right += int(best[best > 0].tolist() == letters[:number].tolist())
        return {"texts read right": mean_of(right, len(output), better="higher")}


def main(folder: str | None = None) -> Run:
    with Run(SPEC, Reading(), folder=folder) as run:
        for _ in run.steps():
            if run.evaluation_due:
                run.evaluate()
    return run


if __name__ == "__main__":
    main()
