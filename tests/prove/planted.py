"""Tasks for rungs: an honest one, and others that are wrong in one way each.

The loss, the time or both of a wrong one look well.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from surefoot.components.data.sources.arrays import Arrays
from surefoot.components.metrics import Mean, accuracy
from surefoot.contract.task import Loss

SAMPLES, INPUTS, CLASSES = 1024, 32, 8


class Honest:
    """Classes that a hidden matrix decides.

    `waste` passes of a forward that nobody uses make a step slower, `spare` does nothing.
    """

    def __init__(self, waste: int = 1, spare: int = 0) -> None:
        self.waste, self.spare = waste, spare

    def model(self) -> nn.Module:
        return nn.Sequential(
            nn.Linear(INPUTS, 128),
            nn.ReLU(),
            nn.Linear(128, 128),
            nn.ReLU(),
            nn.Linear(128, CLASSES),
        )

    def data(self, split: str) -> Arrays:
        generator = torch.Generator().manual_seed(7)
        hidden = torch.randn(INPUTS, CLASSES, generator=generator)
        x = torch.randn(SAMPLES + 256, INPUTS, generator=generator)
        chosen = x[:SAMPLES] if split == "train" else x[SAMPLES:]
        return Arrays(chosen, (chosen @ hidden).argmax(1))

    def forward(self, model: nn.Module, batch: Any) -> Tensor:
        for _ in range(10 * self.waste if model.training else 0):
            model(batch[0])
        output: Tensor = model(batch[0])
        return output

    def loss(self, output: Tensor, batch: Any) -> Loss:
        return Loss.sum(F.cross_entropy(output, batch[1], reduction="sum"), len(batch[1]))

    def metrics(self, output: Tensor, batch: Any) -> dict[str, Mean]:
        return {"accuracy": accuracy(output, batch[1])}


class WrongGradient(Honest):
    """Faster, its loss is right, and one slice of one gradient is always zero."""

    def __init__(self, waste: int = 0, slice_: int = 5) -> None:
        super().__init__(waste)
        self.slice_ = slice_

    def model(self) -> nn.Module:
        model = super().model()
        weight: nn.Parameter = model[2].weight  # type: ignore[index]

        def zero(gradient: Tensor) -> Tensor:
            gradient = gradient.clone()
            gradient[self.slice_] = 0.0
            return gradient

        weight.register_hook(zero)
        return model


class ShortGradient(Honest):
    """One gradient is 3 % too short: no slice of it points elsewhere, and the loss is right."""

    def model(self) -> nn.Module:
        model = super().model()
        weight: nn.Parameter = model[2].weight  # type: ignore[index]
        weight.register_hook(lambda gradient: 0.97 * gradient)
        return model


class Crashes(Honest):
    """Ends in the middle of its third step."""

    def __init__(self, waste: int = 0) -> None:
        super().__init__(waste)
        self.now = 0

    def forward(self, model: nn.Module, batch: Any) -> Tensor:
        self.now += model.training
        if self.now == 3:
            raise ValueError("planted")
        return super().forward(model, batch)


class HalfBatch(Honest):
    """Faster, since it looks at every second sample; with `admits` its loss counts them so."""

    def __init__(self, waste: int = 1, admits: bool = True) -> None:
        super().__init__(waste)
        self.admits = admits

    def forward(self, model: nn.Module, batch: Any) -> Tensor:
        return super().forward(model, (batch[0][::2] if model.training else batch[0],))

    def loss(self, output: Tensor, batch: Any) -> Loss:
        labels = batch[1] if len(output) == len(batch[1]) else batch[1][::2]
        total = F.cross_entropy(output, labels, reduction="sum")
        return (
            Loss.sum(total, len(labels))
            if self.admits
            else Loss.sum(total * len(batch[1]) / len(labels), len(batch[1]))
        )


class Lazy(torch.optim.SGD):
    """Updates at its first call and then at every eighth."""

    num_calls = 0

    def step(self, closure: Any = None) -> None:
        if self.num_calls % 8 == 0:
            super().step(closure)
        self.num_calls += 1


class Diligent(Honest):
    """Trains with SGD of its own."""

    def optimizer(self, groups: list[dict[str, Any]]) -> torch.optim.Optimizer:
        return torch.optim.SGD(groups, lr=0.05)


class SkipsUpdates(Honest):
    """The same SGD, which leaves out most of its updates and tells nobody."""

    def optimizer(self, groups: list[dict[str, Any]]) -> torch.optim.Optimizer:
        return Lazy(groups, lr=0.05)


class Norms(Honest):
    """With BatchNorm, whose statistics are those of a microbatch."""

    def model(self) -> nn.Module:
        return nn.Sequential(
            nn.Linear(INPUTS, 128), nn.BatchNorm1d(128), nn.ReLU(), nn.Linear(128, CLASSES)
        )


class Bounded(Honest):
    """Gives probabilities near 0 and 1, and its loss refuses what is out of their range.

    A last place more would leave it.
    """

    def model(self) -> nn.Module:
        model = nn.Sequential(nn.Linear(INPUTS, 16), nn.Linear(16, 1), nn.Sigmoid())
        for layer in (model[0], model[1]):
            nn.init.normal_(layer.weight)  # type: ignore[arg-type]
        return model

    def loss(self, output: Tensor, batch: Any) -> Loss:
        return Loss.sum(
            F.binary_cross_entropy(output[:, 0].float(), (batch[1] > 3).float(), reduction="sum"),
            len(batch[1]),
        )

    def metrics(self, output: Tensor, batch: Any) -> dict[str, Mean]:
        return {}


class Strict(Bounded):
    """Refuses what is off the least that its own model can give."""

    def model(self) -> nn.Module:
        return nn.Sequential(nn.Linear(INPUTS, 1), nn.Hardtanh(1.5, 2.0))

    def loss(self, output: Tensor, batch: Any) -> Loss:
        if output.min() < 1.5:
            raise ValueError("planted")
        return Loss.sum(output.float().sum(), len(batch[1]))
