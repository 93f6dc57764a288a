"""WGAN with gradient penalty.

A critic measures how far drawn points are from real ones (Gulrajani et al., 2017).

python examples/kinds/wgan.py
surefoot train examples/kinds/wgan.py:Wgan --steps 40

The critic is updated in every step, the generator in every fifth one. The gradient of the critic
with respect to its input is a part of its loss, so the backward pass goes through a backward pass.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn

from surefoot import Loss, Run, RunSpec, Term, Update
from surefoot.data import Arrays, Keys
from surefoot.metrics import Mean, mean_of

NOISE, PENALTY = 4, 0.1  # the weight that its authors use for points in a plane
Batch = dict[str, Tensor]
SPEC = RunSpec(
    optim={"name": "adam", "lr": 1e-3, "betas": [0.0, 0.9], "weight_decay": 0.0, "clip": 0.0},
    train={"length": "800 steps", "batch": 64},
    evaluate={"every": "400 steps", "batch": 1024},
)


class Wgan:
    """Points of a ring; the noise comes with the data, drawn anew for each sample and epoch."""

    def model(self) -> nn.Module:
        def net(inputs: int, outputs: int) -> nn.Module:
            first, second = nn.Linear(inputs, 64), nn.Linear(64, 64)
            return nn.Sequential(first, nn.ReLU(), second, nn.ReLU(), nn.Linear(64, outputs))

        return nn.ModuleDict({"generator": net(NOISE, 2), "critic": net(2, 1)})

    def data(self, split: str) -> Arrays:
        draws = torch.Generator().manual_seed(int(split == "test"))
        angle = 2 * math.pi * torch.rand(1024, generator=draws)
        noise = torch.randn(1024, NOISE, generator=draws)
        between = torch.rand(1024, 1, generator=draws)
        return Arrays(real=torch.stack([angle.cos(), angle.sin()], 1), noise=noise, between=between)

    def augment(self, batch: Batch, keys: Keys) -> Batch:
        return {**batch, "noise": keys.normal(NOISE), "between": keys.uniform(stream=1)}

    def updates(self, model: nn.ModuleDict) -> list[Update]:
        return [
            Update("critic", self.critic_loss, model["critic"].parameters()),
            Update("generator", self.generator_loss, model["generator"].parameters(), every=5),
        ]

    def critic_loss(self, model: nn.ModuleDict, batch: Batch) -> Loss:
        real, drawn = batch["real"], model["generator"](batch["noise"]).detach()
        mixed = torch.lerp(real, drawn, batch["between"]).requires_grad_()
        (slope,) = torch.autograd.grad(model["critic"](mixed).sum(), mixed, create_graph=True)
        apart = (model["critic"](drawn) - model["critic"](real)).sum()
        penalty = (slope.norm(dim=1) - 1).square().sum()
        weighted = Term("penalty", penalty, len(real), weight=PENALTY)
        return Loss(Term("apart", apart, len(real)), weighted)

    def generator_loss(self, model: nn.ModuleDict, batch: Batch) -> Loss:
        drawn = model["generator"](batch["noise"])
        return Loss.sum(-model["critic"](drawn).sum(), count=len(drawn))

    def counts(self, batch: Batch) -> dict[str, int]:
        return dict.fromkeys(("apart", "penalty", "loss"), len(batch["real"]))

    def forward(self, model: nn.ModuleDict, batch: Batch) -> Tensor:
        return model["generator"](batch["noise"])

    def metrics(self, output: Tensor, batch: Batch) -> dict[str, Mean]:
        off = (output.norm(dim=1) - 1).abs()
        return {"distance from the ring": mean_of(off.sum(), len(output))}


def main(folder: str | None = None) -> Run:
    with Run(SPEC, Wgan(), folder=folder) as run:
        for _ in run.steps():
            if run.evaluation_due:
                run.evaluate()
    return run


if __name__ == "__main__":
    main()
