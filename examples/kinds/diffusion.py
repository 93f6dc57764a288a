"""Diffusion: a network learns to find the noise in points of a ring (Ho, Jain and Abbeel, 2020).

Then it draws new points.

python examples/kinds/diffusion.py
surefoot train examples/kinds/diffusion.py:Diffusion --steps 40

Time and noise are drawn for each sample in `augment`: they do not depend on microbatches or ranks.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn

from surefoot import Loss, Run, RunSpec
from surefoot.data import Arrays, Keys
from surefoot.metrics import Mean, mean_of

STEPS = 50  # of the noise
# the share of the signal's variance after each of them
KEPT = torch.cumprod(1 - torch.linspace(1e-3, 0.2, STEPS), 0)
SPEC = RunSpec(
    optim={"name": "adam", "lr": 3e-3, "weight_decay": 0.0},
    train={"length": "600 steps", "batch": 128},
    evaluate={"every": "300 steps"},
)


class Diffusion:
    def model(self) -> nn.Module:
        return nn.Sequential(
            nn.Linear(3, 64), nn.SiLU(), nn.Linear(64, 64), nn.SiLU(), nn.Linear(64, 2)
        )

    def data(self, split: str) -> Arrays:
        draws = torch.Generator().manual_seed(int(split == "test"))
        angle = 2 * math.pi * torch.rand(1024, generator=draws)
        time, noise = (
            torch.randint(STEPS, (1024,), generator=draws),
            torch.randn(1024, 2, generator=draws),
        )
        return Arrays(points=torch.stack([angle.cos(), angle.sin()], 1), time=time, noise=noise)

    def augment(self, batch: dict[str, Tensor], keys: Keys) -> dict[str, Tensor]:
        return {**batch, "time": keys.integers(0, STEPS)[:, 0], "noise": keys.normal(2, stream=1)}

    def forward(self, model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
        kept = KEPT.to(batch["points"])[batch["time"]][:, None]
        noisy = kept.sqrt() * batch["points"] + (1 - kept).sqrt() * batch["noise"]
        return model(torch.cat([noisy, batch["time"][:, None] / STEPS], 1))

    def loss(self, output: Tensor, batch: dict[str, Tensor]) -> Loss:
        return Loss.sum((output - batch["noise"]).square().sum(), count=output.numel())

    def metrics(self, output: Tensor, batch: dict[str, Tensor]) -> dict[str, Mean]:
        # 1 for a net that says 0
        return {"squared error": mean_of((output - batch["noise"]).square().sum(), output.numel())}


@torch.no_grad()
def sample(model: nn.Module, count: int) -> Tensor:
    """Return `count` new points: from noise back to the data, a step at a time."""
    draws = torch.Generator().manual_seed(0)
    points = torch.randn(count, 2, generator=draws)
    for time in reversed(range(STEPS)):
        before = KEPT[time - 1] if time else torch.ones(())
        noise = model(torch.cat([points, torch.full((count, 1), time / STEPS)], 1))
        clean = ((points - (1 - KEPT[time]).sqrt() * noise) / KEPT[time].sqrt()).clamp(-2, 2)
        # without new noise: Song, Meng and Ermon, 2021
        points = before.sqrt() * clean + (1 - before).sqrt() * noise
    return points


def main(folder: str | None = None) -> Run:
    with Run(SPEC, Diffusion(), folder=folder) as run:
        for _ in run.steps():
            if run.evaluation_due:
                run.evaluate()
        off = (sample(run.model, 500).norm(dim=1) - 1).abs().mean()
        print(f"new points lie {off:.3f} from the ring on average")
    return run


if __name__ == "__main__":
    main()
