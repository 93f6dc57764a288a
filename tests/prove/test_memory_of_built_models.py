"""The memory of models that cast, move and read numbers while they are built.

It is known without a step, and the same as without that.
"""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from surefoot import Loss, RunSpec
from surefoot.components.data.sources.arrays import Arrays
from surefoot.core.errors import InputError
from surefoot.train.preflight.predicted import predict


def with_rates(model: nn.Module) -> nn.Module:
    model.rates = [each.item() for each in torch.linspace(0, 0.1, 3)]  # type: ignore[assignment]
    return model


def with_numbers_of_numpy(model: nn.Module) -> nn.Module:
    model.steps = torch.arange(3).numpy().tolist()  # type: ignore[assignment]
    return model


def with_a_choice(model: nn.Module) -> nn.Module:
    return model if bool((torch.linspace(0, 1, 3) < 2).all()) else nn.Identity()


BUILT: dict[str, Any] = {
    "moved": lambda model: model.to("cpu"),
    "cast": lambda model: model.float(),
    "cast there and back": lambda model: model.bfloat16().float(),
    "cast by dtype": lambda model: model.to(torch.float32),
    "lr_multipliers": with_rates,
    "numbers of numpy": with_numbers_of_numpy,
    "a choice by numbers": with_a_choice,
    "a copy": copy.deepcopy,
    "weights loaded": lambda model: (model.load_state_dict(model.state_dict()), model)[1],
}


class Plain:
    def __init__(self, build: Any = lambda model: model) -> None:
        self.build = build

    def model(self) -> nn.Module:
        built: nn.Module = self.build(
            nn.Sequential(nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 64))
        )
        return built

    def data(self, split: str) -> Arrays:
        return Arrays(torch.randn(64, 64, generator=torch.Generator().manual_seed(0)))

    def forward(self, model: nn.Module, batch: Any) -> Tensor:
        output: Tensor = model(batch[0])
        return output

    def loss(self, output: Tensor, batch: Any) -> Loss:
        return Loss.sum(output.square().sum(), count=len(output))


SPEC = RunSpec(train={"length": "4 steps", "batch": 16, "threads": 1})


@pytest.mark.parametrize("kind", BUILT)
def test_the_memory_of_a_model_does_not_depend_on_how_it_was_built(kind: str) -> None:
    assert predict(SPEC, Plain(BUILT[kind])).terms == predict(SPEC, Plain()).terms


def test_a_model_that_cannot_be_built_says_why() -> None:
    def broken(model: nn.Module) -> nn.Module:
        raise ValueError("no such width")

    with pytest.raises(InputError, match="no such width"):
        predict(SPEC, Plain(broken))
