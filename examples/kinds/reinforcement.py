"""Reinforcement learning: an actor and a critic learn to balance a pole on a cart.

The cart and its pole are those of Barto, Sutton and Anderson, 1983.

python examples/kinds/reinforcement.py
surefoot train examples/kinds/reinforcement.py:Balance --steps 40

A sample is an episode: where it starts, and a random number for each action. The loss plays the
episodes with the weights of the step.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from surefoot import Loss, Run, RunSpec
from surefoot.data import Arrays, Keys
from surefoot.metrics import Mean, mean_of

HORIZON, GAMMA = 60, 0.97
Batch = dict[str, Tensor]
SPEC = RunSpec(
    optim={"name": "adam", "lr": 1e-2, "weight_decay": 0.0},
    train={"length": "80 steps", "batch": 32},
    evaluate={"every": "40 steps"},
)


def move(state: Tensor, right: Tensor) -> Tensor:
    """The states (B, 4) after 0.02 s of a push of 10 N: place, speed, angle, angular speed."""
    _, v, a, w = state.unbind(1)
    push = (20.0 * right - 10.0 + 0.05 * w.square() * a.sin()) / 1.1
    turn = (9.8 * a.sin() - a.cos() * push) / (0.5 * (4 / 3 - 0.1 * a.cos().square() / 1.1))
    change = torch.stack([v, push - 0.05 * turn * a.cos() / 1.1, w, turn], 1)
    return state + 0.02 * change


class Balance:
    def model(self) -> nn.Module:
        def net() -> nn.Module:
            return nn.Sequential(nn.Linear(4, 32), nn.Tanh(), nn.Linear(32, 1))

        return nn.ModuleDict({"actor": net(), "critic": net()})

    def data(self, split: str) -> Arrays:
        draws = torch.Generator().manual_seed(int(split == "test"))
        start = 0.1 * torch.rand(640, 4, generator=draws) - 0.05
        return Arrays(start=start, draws=torch.rand(640, HORIZON, generator=draws))

    def augment(self, batch: Batch, keys: Keys) -> Batch:
        return {**batch, "draws": keys.uniform(HORIZON)}

    def forward(self, model: nn.ModuleDict, batch: Batch) -> Batch:
        """Play the episodes, then look at each state with gradients; all of shape (B, T)."""
        state, rows = batch["start"], []
        stands = torch.ones(len(state), device=state.device)
        with torch.no_grad():
            for draw in batch["draws"].unbind(1):
                right = (draw < model["actor"](state)[:, 0].sigmoid()).float()
                rows.append((state, right, stands))
                state = move(state, right)
                stands = stands * (state[:, 0].abs() < 2.4) * (state[:, 2].abs() < 0.2)
        states, right, stands = (torch.stack(each, 1) for each in zip(*rows, strict=True))
        logits, values = model["actor"](states)[..., 0], model["critic"](states)[..., 0]
        return {"logits": logits, "values": values, "right": right, "stands": stands}

    def loss(self, output: Batch, batch: Batch) -> Loss:
        stands, to_come = output["stands"], torch.zeros_like(output["stands"])
        # the reward is 1 for each state in which the pole stands
        for time in reversed(range(HORIZON)):
            later = to_come[:, time + 1] if time + 1 < HORIZON else 0
            to_come[:, time] = stands[:, time] * (1 + GAMMA * later)
        better = to_come - output["values"] * stands
        logits, right = output["logits"], output["right"]
        surprise = F.binary_cross_entropy_with_logits(logits, right, reduction="none")
        actor = (surprise * better.detach() * stands).sum()
        return Loss.sum(actor + 0.5 * (better / 10).square().sum(), count=stands.sum())

    def metrics(self, output: Batch, batch: Batch) -> dict[str, Mean]:
        stands = output["stands"]
        return {"steps balanced": mean_of(stands.sum(), len(stands), better="higher")}


def main(folder: str | None = None) -> Run:
    with Run(SPEC, Balance(), folder=folder) as run:
        for _ in run.steps():
            if run.evaluation_due:
                run.evaluate()
    return run


if __name__ == "__main__":
    main()
