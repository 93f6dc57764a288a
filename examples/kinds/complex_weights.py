"""Complex parameters: an unknown filter is learned as its complex response at each frequency.

python examples/kinds/complex_weights.py
surefoot train examples/kinds/complex_weights.py:Filter --steps 40
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from surefoot import Loss, Run, RunSpec
from surefoot.data import Arrays
from surefoot.metrics import Mean, mean_of

LENGTH = 32
Batch = tuple[Tensor, Tensor]
SPEC = RunSpec(
    optim={"name": "adam", "lr": 2e-2, "weight_decay": 0.0},
    train={"length": "10 epochs", "batch": 32},
    evaluate={"every": "5 epochs"},
)


class Response(nn.Module):
    """Multiplies the spectrum of a signal by complex weights, and adds a real offset."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(LENGTH // 2 + 1, dtype=torch.complex64))
        self.offset = nn.Parameter(torch.zeros(()))

    def forward(self, signal: Tensor) -> Tensor:
        return torch.fft.irfft(torch.fft.rfft(signal) * self.weight, n=LENGTH) + self.offset


class Filter:
    def model(self) -> nn.Module:
        return Response()

    def data(self, split: str) -> Arrays:
        draws = torch.Generator().manual_seed(int(split == "test"))
        signal = torch.randn(800, LENGTH, generator=draws)
        heard = 0.6 * signal - 0.5 * signal.roll(3, 1) + 0.2 * signal.roll(7, 1) + 0.3
        return Arrays(signal, heard)

    def forward(self, model: nn.Module, batch: Batch) -> Tensor:
        return model(batch[0])

    def loss(self, output: Tensor, batch: Batch) -> Loss:
        return Loss.sum((output - batch[1]).square().sum(), count=output.numel())

    def metrics(self, output: Tensor, batch: Batch) -> dict[str, Mean]:
        return {"squared error": mean_of((output - batch[1]).square().sum(), output.numel())}


def main(folder: str | None = None) -> Run:
    with Run(SPEC, Filter(), folder=folder) as run:
        for _ in run.steps():
            if run.evaluation_due:
                run.evaluate()
    return run


if __name__ == "__main__":
    main()
