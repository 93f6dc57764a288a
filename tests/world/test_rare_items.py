"""Batches in which no item counts, on one rank or on all.

Every rank decides alike, and trains to the numbers of one process.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from surefoot.components import checkpoint
from surefoot.contract.task import Loss
from surefoot.train.run import Run
from tests.train.small import faults_of
from tests.world.ranks import run_ranks
from tests.world.test_run import spec
from tests.world.test_shard import Stacked

pytestmark = pytest.mark.usefixtures("loaded_for_shards")

STEPS, BATCH = 6, 4
# a step that has no item, and those of which one rank has none
EMPTY, ON_ONE = 3, {2: slice(0, 2), 5: slice(2, 4)}


class Masked(Stacked):
    """Steps without an item on any rank, and such with items on one rank alone.

    By the place in the batch, as data are not shuffled.
    """

    is_constant = False

    augment = None

    def loss(self, output: Tensor, batch: dict[str, Tensor]) -> Loss:
        there = batch["there"].repeat_interleave(batch["words"].shape[1])
        if self.is_constant and not there.any():
            return Loss.sum(torch.zeros((), dtype=output.dtype), 0)
        labels = torch.where(there, batch["words"].flatten(), -100)
        return Loss.sum(
            F.cross_entropy(output, labels, ignore_index=-100, reduction="sum"),
            count=int(there.sum()),
        )

    def data(self, split: str) -> Any:
        whole = super().data(split)
        return With(whole)

    def metrics(self, output: Tensor, batch: dict[str, Tensor]) -> dict[str, Any]:
        return {}


class With:
    """A source with one more field: whether the item of a sample counts."""

    guarantee = "proven"

    def __init__(self, source: Any) -> None:
        self._source, self.digest = source, source.digest

    def __len__(self) -> int:
        return STEPS * BATCH

    def read(self, ids: Any) -> dict[str, Tensor]:
        found = dict(self._source.read(ids))
        steps, places = torch.from_numpy(ids) // BATCH + 1, torch.from_numpy(ids) % BATCH
        there = steps != EMPTY
        for step, gone in ON_ONE.items():
            there &= ~((steps == step) & (places >= gone.start) & (places < gone.stop))
        return {**found, "there": there}

    def describe(self) -> str:
        return "words of which some do not count"


class Constant(Masked):
    is_constant = True


def followed(folder: Path, task: Any, layout: dict[str, Any]) -> dict[str, Any]:
    given = spec(
        layout=layout,
        train={"length": f"{STEPS} steps", "batch": BATCH, "microbatch": 2},
        data={"shuffle": False},
        evaluate={"every": "9 epochs"},
    )
    with Run(given, task, folder=folder, quiet=True) as run:
        rows = [[report.applied, report.loss] for report in run.steps()]
    return {"rows": rows, "skipped": run.num_skipped, "outcome": run.outcome}


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, Any]]:
    """A run of one process, and what it said."""
    folder = tmp_path_factory.mktemp("alone")
    return folder, followed(folder, Masked(), {})


@pytest.mark.quick("Masked-layout0", "Masked-layout2", "Constant-layout5")
@pytest.mark.parametrize(
    ("kind", "layout"),
    [
        *(
            (Masked, layout)
            for layout in ({}, *({"shard": 2, "zero_stage": stage} for stage in (1, 2, 3)))
        ),
        (Constant, {}),
        (Constant, {"shard": 2, "zero_stage": 1}),
    ],
)
def test_ranks_skip_what_has_no_item_on_any_of_them_and_train_on_what_one_has(
    kind: Any, layout: dict[str, Any], alone: tuple[Path, dict[str, Any]], tmp_path: Path
) -> None:
    found = run_ranks(
        2, lambda rank: followed(tmp_path / "run", kind(), layout), tmp_path / "ranks"
    )
    assert all("rows" in each for each in found), found
    for each in found:
        assert [row[0] for row in each["rows"]] == [
            number != EMPTY for number in range(1, STEPS + 1)
        ]
        assert each["skipped"] == 1
        assert each["outcome"] == "finished"
        for (_, loss), (_, expected) in zip(each["rows"], alone[1]["rows"], strict=True):
            assert loss == expected or abs(loss - expected) < 1e-9
    faults = faults_of(tmp_path / "run")
    assert [(each.step, each.fault) for each in faults] == [(EMPTY, "no-items")]
    mine, theirs = (
        checkpoint.Commit(folder, STEPS).read(checkpoint.MODEL)
        for folder in (alone[0], tmp_path / "run")
    )
    assert all(torch.allclose(mine[name], theirs[name], rtol=0, atol=1e-9) for name in mine)
