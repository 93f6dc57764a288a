"""A pattern may mean a tied weight, or a module that stands in two places, by any of its names."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from surefoot.components.memory.blocks import find_blocks
from surefoot.components.optim.groups import build_groups, find_trained, freeze
from surefoot.components.precision.keep import keep_in_fp32
from surefoot.core.errors import SpecError
from surefoot.train.run import Run
from tests.train.small import Small, spec


class Tied(nn.Module):
    """An embedding whose weight is the head's, and a layer that stands in two places."""

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(3, 4)
        self.inner = nn.Linear(4, 4)
        self.again = self.inner
        self.head = nn.Linear(4, 3, bias=False)
        self.head.weight = self.words.weight

    def forward(self, x: Tensor) -> Tensor:
        output: Tensor = self.head(self.again(torch.relu(self.inner(x))))
        return output


class TiedTask(Small):
    def model(self) -> nn.Module:
        return Tied()


def groups(**patterns: Any) -> list[dict[str, Any]]:
    return build_groups(find_trained(Tied()), weight_decay=0.1, **patterns)


def find_rate(name: str, made: list[dict[str, Any]]) -> tuple[float, float]:
    return next((group["weight_decay"], group["rate"]) for group in made if name in group["names"])


USES: dict[str, Callable[[], bool]] = {
    "no_decay": lambda: find_rate("inner.weight", groups(no_decay=["again.*"])) == (0.0, 1.0),
    "lr_multipliers": lambda: (
        find_rate("words.weight", groups(lr_multipliers={"head.*": 0.5})) == (0.0, 0.5)
    ),
    "the last of the rates": lambda: (
        find_rate("inner.weight", groups(lr_multipliers={"inner.*": 2.0, "again.weight": 0.5}))
        == (0.1, 0.5)
    ),
    "freeze": lambda: freeze(Tied(), ["head.weight"]) == ["words.weight"],
    "freeze a layer": lambda: freeze(Tied(), ["again.*"]) == ["inner.weight", "inner.bias"],
    "blocks": lambda: [*find_blocks(Tied(), ["again"])] == ["inner"],
    "keep in fp32": lambda: [*keep_in_fp32(Tied(), ["again"])] == ["again"],
}


@pytest.mark.parametrize("use", USES)
def test_a_pattern_matches_the_second_name_of_a_tied_weight(use: str) -> None:
    assert USES[use]()


def test_a_pattern_that_matches_no_name_is_refused_with_all_names() -> None:
    with pytest.raises(SpecError, match=r"'haed\.\*' matches no parameter") as refused:
        groups(no_decay=["haed.*"])
    assert refused.value.hint is not None
    assert "head.weight" in refused.value.hint


def test_a_run_freezes_and_scales_a_tied_weight_by_its_second_name(tmp_path: Path) -> None:
    how = spec(2, optim={"freeze": ["head.*"], "lr_multipliers": {"again.*": 0.0}, "name": "sgd"})
    with Run(how, TiedTask(), folder=tmp_path / "run", quiet=True) as run:
        before = {name: each.clone() for name, each in run.model.named_parameters()}
        for _ in run.steps():
            pass
        assert all(torch.equal(each, before[name]) for name, each in run.model.named_parameters())
        assert not run.model.words.weight.requires_grad
