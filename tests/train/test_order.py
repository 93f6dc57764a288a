"""What is switched on together: recomputation, then compilation block by block.

With accumulation, formats and the average beside them.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from surefoot.components.compiler.regions import compile_regions
from surefoot.train.record import compiling
from surefoot.train.run import Run
from tests.train.small import Small, spec
from tests.world.ranks import run_ranks

CHOICES: dict[str, tuple[dict[str, dict[str, Any]], ...]] = {
    "recompute": ({}, {"memory": {"activation_checkpointing": "full"}}),
    "compile": ({}, {"compile": {"what": "blocks", "on_failure": "stop"}}),
    "accumulate": ({}, {"train": {"microbatch": 2}}),
    "update": ({}, {"optim": {"ema": 0.9, "clip": 0.01}}),
}


@pytest.fixture(autouse=True)
def _anew(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Graphs are captured, differentiated and cut as always, and run by torch's own kernels.

    Making code takes tens of seconds.
    """
    monkeypatch.setattr(
        compiling, "compile_regions", functools.partial(compile_regions, backend="aot_eager")
    )
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


class Blocks(Small):
    def model(self) -> nn.Module:
        blocks = [nn.Sequential(nn.Linear(16, 16), nn.LayerNorm(16), nn.Tanh()) for _ in range(3)]
        return nn.Sequential(nn.Linear(4, 16), *blocks, nn.Linear(16, 3))


def losses(folder: Path, parts: tuple[dict[str, dict[str, Any]], ...]) -> list[float]:
    tables: dict[str, dict[str, Any]] = {"optim": {"name": "sgd", "lr": 0.1}}
    for part in parts:
        for table, keys in part.items():
            tables[table] = {**tables.get(table, {}), **keys}
    with Run(spec(4, **tables), Blocks(), folder=folder, quiet=True) as run:
        return [float(report.loss or 0.0) for report in run.steps()]


def combine(
    folder: Path, layout: dict[str, Any], most: tuple[int, ...] = (1, 1, 1, 1)
) -> dict[tuple[int, ...], list[float]]:
    """The losses of each combination of what `most` allows."""
    found = {}
    for numbers in itertools.product(*(range(1 + each) for each in most)):
        parts = tuple(CHOICES[name][number] for name, number in zip(CHOICES, numbers, strict=True))
        found[numbers] = losses(folder / "".join(map(str, numbers)), (*parts, {"layout": layout}))
    return found


@pytest.mark.slow
def test_every_combination_trains_with_the_losses_of_the_plain_step(tmp_path: Path) -> None:
    """Of four things, each of which leaves the numbers alone, all sixteen combinations.

    Clipping and the average move them alike.
    """
    found = combine(tmp_path, {})
    for numbers, mine in found.items():
        assert mine == pytest.approx(found[0, 0, 0, numbers[3]], rel=1e-5), numbers
    # what is compared is no constant
    assert found[0, 0, 0, 0] != pytest.approx(found[0, 0, 0, 1], rel=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("layout", "most"),
    [
        pytest.param({"replicate": 2}, (1, 1, 1, 1), id="replicate"),
        pytest.param(
            {"shard": 2, "zero_stage": 1}, (1, 1, 1, 1), id="stage 1", marks=pytest.mark.slow
        ),
        # which refuse to compile
        pytest.param(
            {"shard": 2, "zero_stage": 2}, (1, 0, 1, 1), id="stage 2", marks=pytest.mark.slow
        ),
        pytest.param({"shard": 2, "zero_stage": 3}, (1, 0, 1, 1), id="stage 3"),
    ],
)
def test_on_two_ranks_every_combination_has_the_losses_of_one_process(
    layout: dict[str, Any], most: tuple[int, ...], tmp_path: Path
) -> None:
    def job(rank: int) -> Any:
        return [
            [numbers, each] for numbers, each in combine(tmp_path / "runs", layout, most).items()
        ]

    plain = {
        update: losses(tmp_path / f"plain{update}", (CHOICES["update"][update],))
        for update in (0, 1)
    }
    for found in run_ranks(2, job, tmp_path / "ranks"):
        assert isinstance(found, list), found
        for numbers, mine in found:
            assert mine == pytest.approx(plain[numbers[3]], rel=1e-5), numbers
