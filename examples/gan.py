"""Two networks against each other: one draws digits, one tells them from real ones.

python examples/gan.py
surefoot train examples/gan.py:Gan --steps 2000

There are two updates a step, which say what is trained. `forward` says what the finished model is
used for, so that it can be evaluated and predicted with.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, Self

import torch
import torch.nn.functional as F
from sklearn.datasets import load_digits
from torch import Tensor, nn

from surefoot import Loss, Run, RunSpec, Term, Update
from surefoot.data import Arrays

NOISE = 16
Batch = dict[str, Tensor]


@dataclass(frozen=True)
class Moments:
    """Sums over real and drawn images, so that batches add up.

    How far apart their means and covariances are.
    """

    count: int
    sums: tuple[Tensor, Tensor]  # (pixels,) of real images, of drawn ones
    squares: tuple[Tensor, Tensor]  # (pixels, pixels)
    better: Literal["higher", "lower"] = "lower"

    @classmethod
    def of(cls, real: Tensor, drawn: Tensor) -> Self:
        pair = (real.double(), drawn.double())
        return cls(
            len(real), (pair[0].sum(0), pair[1].sum(0)), (pair[0].T @ pair[0], pair[1].T @ pair[1])
        )

    def merge(self, other: Moments) -> Moments:
        def add(
            mine: tuple[Tensor, Tensor], theirs: tuple[Tensor, Tensor]
        ) -> tuple[Tensor, Tensor]:
            return mine[0] + theirs[0], mine[1] + theirs[1]

        return Moments(
            self.count + other.count, add(self.sums, other.sums), add(self.squares, other.squares)
        )

    def value(self) -> float | None:
        """Squared distance of the means plus that of the covariances: 0 where both are equal."""
        if not self.count:
            return None
        means = [total / self.count for total in self.sums]
        covariances = [
            square / self.count - torch.outer(m, m)
            for square, m in zip(self.squares, means, strict=True)
        ]
        return float(
            (means[0] - means[1]).square().sum() + (covariances[0] - covariances[1]).square().sum()
        )


class Gan:
    """A generator and a critic of 8 x 8 images, in one module so that they are saved together."""

    def __init__(self, penalty: float = 1.0) -> None:
        self.penalty = penalty

    def model(self) -> nn.Module:
        def net(inputs: int, outputs: int) -> nn.Module:
            return nn.Sequential(
                nn.Linear(inputs, 128),
                nn.LeakyReLU(0.2),
                nn.Linear(128, 128),
                nn.LeakyReLU(0.2),
                nn.Linear(128, outputs),
            )

        return nn.ModuleDict(
            {"generator": nn.Sequential(net(NOISE, 64), nn.Sigmoid()), "critic": net(64, 1)}
        )

    def data(self, split: str) -> Arrays:
        """Images, and the noise of evaluation: part of the data, so that scores can be repeated."""
        images = torch.from_numpy(load_digits().data).float() / 16
        images = images[::5] if split == "test" else images[torch.arange(len(images)) % 5 > 0]
        return Arrays(
            images=images,
            noise=torch.randn(len(images), NOISE, generator=torch.Generator().manual_seed(0)),
        )

    def updates(self, model: nn.ModuleDict) -> list[Update]:
        """The critic with an optimizer of its own, then the generator with the spec's."""
        own = torch.optim.Adam(model["critic"].parameters(), lr=2e-3, betas=(0.0, 0.99))
        return [
            Update("critic", self.critic_loss, model["critic"].parameters(), optimizer=own),
            Update("generator", self.generator_loss, model["generator"].parameters()),
        ]

    def critic_loss(self, model: nn.ModuleDict, batch: Batch) -> Loss:
        """Real or drawn, and a penalty on steepness at real images (R1: Mescheder et al., 2018)."""
        real = batch["images"].detach().requires_grad_()
        drawn = model["generator"](torch.randn(len(real), NOISE, device=real.device)).detach()
        on_real, on_drawn = model["critic"](real), model["critic"](drawn)
        (slope,) = torch.autograd.grad(on_real.sum(), real, create_graph=True)
        told = F.softplus(-on_real).sum() + F.softplus(on_drawn).sum()
        return Loss(
            Term("telling", told, len(real)),
            Term("steepness", slope.square().sum(), len(real), weight=self.penalty),
        )

    def generator_loss(self, model: nn.ModuleDict, batch: Batch) -> Loss:
        drawn = model["generator"](
            torch.randn(len(batch["images"]), NOISE, device=batch["images"].device)
        )
        return Loss.sum(F.softplus(-model["critic"](drawn)).sum(), count=len(drawn))

    def forward(self, model: nn.ModuleDict, batch: Batch) -> Tensor:
        return model["generator"](batch["noise"])

    def metrics(self, output: Tensor, batch: Batch) -> dict[str, Moments]:
        return {"moment distance": Moments.of(batch["images"], output)}


def main(folder: str | None = None) -> Run:
    spec = RunSpec(
        optim={"name": "adam", "lr": 2e-3, "betas": [0.0, 0.99], "weight_decay": 0.0, "clip": 0.0},
        train={"length": "800 steps", "batch": 64},
        evaluate={"every": "200 steps"},
    )
    with Run(spec, Gan(), folder=folder) as run:
        for _ in run.steps():
            if run.evaluation_due:
                run.evaluate()
    return run


if __name__ == "__main__":
    main()
