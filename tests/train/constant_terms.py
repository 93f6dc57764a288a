"""Tasks in which a term of the loss is a constant in some batches, and the plain loop over them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from surefoot import Loss, Run, RunSpec, Term
from surefoot.components.data.sources.arrays import Arrays

SAMPLES, BATCH, STEPS, LR = 24, 8, 6, 0.1


class Boxes:
    """Classes of images, and boxes that the images from `first` to `first` + 8 do not have.

    Each term counts the images.
    """

    def __init__(self, first: int = 8) -> None:
        self.first = first

    def model(self) -> nn.Module:
        torch.manual_seed(0)
        return nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 3))

    def data(self, split: str) -> Arrays:
        draw = torch.Generator().manual_seed(0)
        has_boxes = torch.ones(SAMPLES)
        has_boxes[self.first : self.first + BATCH] = 0
        return Arrays(
            torch.randn(SAMPLES, 4, generator=draw),
            torch.randint(0, 3, (SAMPLES,), generator=draw),
            has_boxes,
        )

    def blocks(self, model: Any) -> list[nn.Module]:
        return [model[0], model[2]]

    def counts(self, batch: Any) -> dict[str, int]:
        return dict.fromkeys(("class", "boxes"), len(batch[0]))

    def forward(self, model: nn.Module, batch: Any) -> Tensor:
        output: Tensor = model(batch[0])
        return output

    def classes(self, output: Tensor, batch: Any) -> Tensor:
        return F.cross_entropy(output, batch[1], reduction="sum")

    def boxes(self, output: Tensor, batch: Any) -> Tensor:
        there = batch[2] > 0
        return output[there].square().sum() if there.any() else torch.zeros(())

    def loss(self, output: Tensor, batch: Any) -> Loss:
        many = len(batch[0])
        return Loss(
            Term("class", self.classes(output, batch), many),
            Term("boxes", self.boxes(output, batch), many),
        )


class First(Boxes):
    """The constant is the first term, and another dtype."""

    def loss(self, output: Tensor, batch: Any) -> Loss:
        one, other = super().loss(output, batch).terms
        if not other.total.requires_grad:
            other = Term("boxes", other.total.double(), other.count)
        return Loss(other, one)


class Reference(Boxes):
    """The term is computed from frozen values: a number other than 0."""

    def boxes(self, output: Tensor, batch: Any) -> Tensor:
        total = output.square().sum()
        return total if (batch[2] > 0).any() else total.detach()


class Warmed(Boxes):
    """A divergence with the weight 0 at times, which is not computed then, once a step."""

    def boxes(self, output: Tensor, batch: Any) -> Tensor:
        return super().boxes(output, batch) * 0.5

    def loss(self, output: Tensor, batch: Any) -> Loss:
        one, other = super().loss(output, batch).terms
        return Loss(one, other, Term("divergence", torch.tensor(0.25), 1, fixed=True))


class Only(Boxes):
    """One term: some microbatches of a batch have boxes, the others are constants."""

    def __init__(self) -> None:
        super().__init__(4)

    def counts(self, batch: Any) -> int:
        return len(batch[0])

    def loss(self, output: Tensor, batch: Any) -> Loss:
        return Loss.sum(self.boxes(output, batch), len(batch[0]))


KINDS = (Boxes, First, Reference, Warmed, Only)


def spec(microbatch: int | None = None, **tables: Any) -> RunSpec:
    return RunSpec(
        train={"length": f"{STEPS} steps", "batch": BATCH, "microbatch": microbatch, "threads": 1},
        data={"shuffle": False},
        optim={"name": "sgd", "momentum": 0.0, "lr": LR, "weight_decay": 0.0, "clip": 0.0},
        schedule={"name": "constant"},
        observe={"tensorboard": False},
        evaluate={"every": "99 steps"},
        **tables,
    )


def train(folder: Path, task: Boxes, stated: RunSpec) -> dict[str, Any]:
    """The losses of each step and the weights after the last."""
    with Run(stated, task, folder=folder, quiet=True) as run:
        losses = [report.loss for report in run.steps()]
        held: dict[str, Any] = {name: each.detach() for name, each in run.model.named_parameters()}
        whole = {
            name: each.full_tensor() if hasattr(each, "full_tensor") else each
            for name, each in held.items()
        }
        return {"losses": losses, "weights": {name: each.tolist() for name, each in whole.items()}}


def plain(task: Boxes) -> dict[str, Any]:
    """A plain loop: the mean of each term over the batch, added."""
    model, data, losses = task.model(), task.data("train"), []
    optimizer = torch.optim.SGD(model.parameters(), lr=LR)
    for step in range(STEPS):
        start = BATCH * step % SAMPLES
        batch = data.read(torch.arange(start, start + BATCH).numpy())
        terms = task.loss(task.forward(model, batch), batch).terms
        loss = sum((term.weight * term.total / term.count for term in terms), torch.zeros(()))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return {
        "losses": losses,
        "weights": {name: each.tolist() for name, each in model.named_parameters()},
    }


def assert_alike(found: dict[str, Any], expected: dict[str, Any]) -> None:
    torch.testing.assert_close(
        torch.tensor(found["losses"]), torch.tensor(expected["losses"]), rtol=1e-5, atol=1e-6
    )
    for name, weights in expected["weights"].items():
        torch.testing.assert_close(
            torch.tensor(found["weights"][name]), torch.tensor(weights), rtol=1e-4, atol=1e-6
        )
