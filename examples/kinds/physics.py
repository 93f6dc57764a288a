"""A physics-informed network: u'' = -sin x between 0 and pi (Raissi et al., 2019).

With u = 0 at both ends the solution is sin x.

python examples/kinds/physics.py
surefoot train examples/kinds/physics.py:Equation --steps 40

`forward` differentiates twice, also in evaluation. The ends do not depend on the batch: a fixed
term counts once a step.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn

from surefoot import Loss, Run, RunSpec, Term
from surefoot.data import Arrays
from surefoot.metrics import Mean, mean_of

Batch = dict[str, Tensor]
SPEC = RunSpec(
    optim={"name": "adam", "lr": 5e-3, "weight_decay": 0.0},
    train={"length": "500 steps", "batch": 32},
    evaluate={"every": "250 steps"},
)


class Equation:
    def model(self) -> nn.Module:
        return nn.Sequential(
            nn.Linear(1, 32), nn.Tanh(), nn.Linear(32, 32), nn.Tanh(), nn.Linear(32, 1)
        )

    def data(self, split: str) -> Arrays:
        draws = torch.Generator().manual_seed(int(split == "test"))
        return Arrays(x=math.pi * torch.rand(256, 1, generator=draws))

    def forward(self, model: nn.Module, batch: Batch) -> Batch:
        with torch.enable_grad():
            x = batch["x"].detach().requires_grad_()
            u = model(x)
            (slope,) = torch.autograd.grad(u.sum(), x, create_graph=True)
            (bend,) = torch.autograd.grad(slope.sum(), x, create_graph=True)
        return {
            "u": u,
            "residual": bend + x.detach().sin(),
            "ends": model(x.new_tensor([[0.0], [math.pi]])),
        }

    def loss(self, output: Batch, batch: Batch) -> Loss:
        return Loss(
            Term("equation", output["residual"].square().sum(), len(batch["x"])),
            Term("ends", output["ends"].square().sum(), 2, weight=10.0, fixed=True),
        )

    def counts(self, batch: Batch) -> dict[str, int]:
        return {"equation": len(batch["x"])}

    def metrics(self, output: Batch, batch: Batch) -> dict[str, Mean]:
        return {
            "off the solution": mean_of(
                (output["u"] - batch["x"].sin()).abs().sum(), len(batch["x"])
            )
        }


def main(folder: str | None = None) -> Run:
    with Run(SPEC, Equation(), folder=folder) as run:
        for _ in run.steps():
            if run.evaluation_due:
                run.evaluate()
    return run


if __name__ == "__main__":
    main()
