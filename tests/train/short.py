"""A run in a process of its own that has little memory once it has begun.

Allocations fail for real.
"""

from __future__ import annotations

import resource
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from surefoot import Loss, Run, RunSpec
from surefoot.components.data.sources.arrays import Arrays
from surefoot.core.errors import SurefootError
from surefoot.train.run import drive

MIB = 1 << 20
MORE_THAN_ANY = 1 << 48  # numbers
SAMPLES, TOKENS, WIDTH = 32, 512, 64  # a tensor of 16 samples takes 2 MiB


class Wide(torch.autograd.Function):
    """What takes `mib` for each sample in its backward pass."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, mib: int) -> Tensor:
        ctx.mib = mib
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        torch.empty(len(grad) * ctx.mib * MIB // 4, device=grad.device)
        return grad, None


class Deep(nn.Module):
    """Blocks with dropout and statistics over the batch.

    In the middle it is greedy, forward or backward.
    """

    def __init__(self, forward_mib: int, backward_mib: int) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Dropout(0.1)) for _ in range(4)
        )
        self.norm, self.head = nn.BatchNorm1d(WIDTH), nn.Linear(WIDTH, 3)
        self.forward_mib, self.backward_mib = forward_mib, backward_mib

    def forward(self, x_BTD: Tensor) -> Tensor:
        x_BTD = self.norm(x_BTD.mT).mT
        for number, block in enumerate(self.blocks):
            x_BTD = block(x_BTD)
            if number == 1 and self.training:
                torch.empty(len(x_BTD) * self.forward_mib * MIB // 4, device=x_BTD.device)
                x_BTD = Wide.apply(x_BTD, self.backward_mib)  # type: ignore[no-untyped-call]
        return self.head(x_BTD.mean(1))


class Moving(torch.optim.SGD):
    """Moves the first weight, and then wants more memory than there is."""

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        with torch.no_grad():
            self.param_groups[0]["params"][0].add_(1.0)
        torch.empty(MORE_THAN_ANY)


class Greedy:
    """A task that takes so many MiB for each sample.

    It takes too much in its update where `moves`, and in large batches where `evaluates`.
    """

    def __init__(
        self,
        forward_mib: int = 0,
        backward_mib: int = 0,
        moves: bool = False,
        evaluates: bool = False,
    ) -> None:
        self.forward_mib, self.backward_mib, self.moves, self.evaluates = (
            forward_mib,
            backward_mib,
            moves,
            evaluates,
        )

    def model(self) -> nn.Module:
        return Deep(self.forward_mib, self.backward_mib)

    def data(self, split: str) -> Arrays:
        draws = torch.Generator().manual_seed(int(split == "train"))
        return Arrays(
            torch.randn(SAMPLES, TOKENS, WIDTH, generator=draws), torch.arange(SAMPLES) % 3
        )

    def augment(self, batch: Any, keys: Any) -> Any:
        shift = float(np.random.rand())  # noqa: NPY002 - where a user's own code may draw
        return batch[0] + 0.01 * torch.randn_like(batch[0]) + shift, batch[1]

    def forward(self, model: nn.Module, batch: Any) -> Tensor:
        if self.evaluates and len(batch[0]) > 16:
            torch.empty(MORE_THAN_ANY)
        output: Tensor = model(batch[0])
        return output

    def loss(self, output: Tensor, batch: Any) -> Loss:
        return Loss.sum(
            nn.functional.cross_entropy(output, batch[1], reduction="sum"), len(batch[1])
        )

    def optimizer(self, groups: Any) -> torch.optim.Optimizer:
        return (Moving if self.moves else torch.optim.SGD)(groups, lr=0.1)


def limit(headroom_bytes: int) -> None:
    """From now on the address space of this process may grow by so much."""
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    resource.setrlimit(
        resource.RLIMIT_AS,
        (pages * resource.getpagesize() + headroom_bytes, resource.RLIM_INFINITY),
    )


def train_short(tables: dict[str, Any], folder: Path, headroom_mib: int) -> dict[str, Any]:
    """Train in this process, which keeps the limit.

    Gives what its error says, or the digests of its state at the end.
    """
    told: dict[str, Any] = {"exit_code": 0}
    try:
        with Run(RunSpec(**tables), folder=folder, quiet=True) as run:
            limit(headroom_mib * MIB)
            drive(run)
            told["digests"] = run.state_digests()
    except SurefootError as error:
        told = {"message": error.message, "hint": error.hint, "exit_code": error.exit_code}
    return told
