"""The same bits on 1, 2 and 4 ranks, where the spec asks for it."""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from surefoot.components import checkpoint
from surefoot.contract import manifest
from surefoot.contract.spec import RunSpec
from surefoot.core.errors import SpecError
from surefoot.train.run import Run
from tests.world.ranks import run_ranks
from tests.world.test_run import Counted, Sentences, spec


class Narrow(Sentences):
    """In fp32, where a different order of sums shows."""

    def model(self) -> nn.Module:
        return super().model().float()


class NarrowCounted(Counted):
    def model(self) -> nn.Module:
        return super().model().float()


class Sometimes(Narrow):
    """A parameter that some microbatches use, and most virtual ranks do not."""

    def forward(self, model: Any, batch: dict[str, Tensor]) -> Tensor:
        made = super().forward(model, batch)
        return (
            made + model["unused"](made[:, :8]).sum() * 1e-3
            if int(batch["words"].sum()) % 3 == 0
            else made
        )


def exactly(size: int = 4, **tables: dict[str, Any]) -> RunSpec:
    return spec(layout={"virtual_ranks": size, "check_every": "1 step"}, **tables)


def digest(folder: Path) -> str:
    """Of every tensor of the newest commit: weights, statistics, moments.

    Rank 0 writes it, and only the end of all ranks says when.
    """
    commit = checkpoint.Commit(folder, manifest.steps(folder)[-1])
    held = {
        f"{file}/{name}": tensor
        for file in commit.names("")
        for name, tensor in commit.read(file).items()
        if "random" not in name
    }
    taken = hashlib.sha256()
    for name in sorted(held):
        taken.update(name.encode())
        taken.update(checkpoint.as_buffer(held[name].contiguous()))
    return taken.hexdigest()


def bits(folder: Path, task: Any, given: RunSpec, most: int | None = None) -> list[Any]:
    told: list[Any] = []
    try:
        with Run(given, task, folder=folder, quiet=True) as run:
            for report in run.steps():
                told.append(
                    [float(report.loss or 0.0).hex(), float(report.gradient_norm or 0.0).hex()]
                )
                if run.evaluation_due:
                    told.append(float(run.evaluate().value or 0.0).hex())
                if report.step == most:
                    run.save()
                    raise KeyboardInterrupt
    except KeyboardInterrupt:
        pass
    return told


@pytest.mark.quick("NarrowCounted-tables1")
@pytest.mark.parametrize(
    ("task", "tables"),
    [
        (Narrow, {}),  # microbatches of 2: 4 a step, 2 in the short last one
        (NarrowCounted, {"train": {"microbatch": 1}}),
        # 6 microbatches, unlike numbers
        pytest.param(Sometimes, {"train": {"batch": 12}}, marks=pytest.mark.slow),
        pytest.param(
            Narrow,
            {"train": {"microbatch": None}, "precision": {"compute": "bf16"}},
            marks=pytest.mark.slow,
        ),
    ],
)
def test_losses_norms_scores_weights_and_moments_have_the_same_bits_on_1_2_and_4_ranks(
    task: Any, tables: Any, tmp_path: Path
) -> None:
    tables = {**tables, "train": {**tables.get("train", {}), "length": "7 steps"}}
    given = exactly(**tables)
    found = [
        run_ranks(
            count,
            lambda rank, count=count: bits(tmp_path / f"run{count}", task(), given),
            tmp_path / f"ranks{count}",
        )
        for count in (1, 2, 4)
    ]
    assert all(isinstance(each, list) for every in found for each in every), found
    assert len({str(each) for every in found for each in every}) == 1
    assert len({digest(tmp_path / f"run{count}") for count in (1, 2, 4)}) == 1
    plain = spec(**tables)
    run_ranks(1, lambda rank: bits(tmp_path / "plain", task(), plain), tmp_path / "one")
    # a different order of sums does show
    assert digest(tmp_path / "plain") != digest(tmp_path / "run1")


def test_a_run_that_other_numbers_of_ranks_take_up_ends_with_the_bits_of_the_unbroken_one(
    tmp_path: Path,
) -> None:
    given = exactly(checkpoint={"every": "1 step"}, train={"length": "7 steps"})
    for turn, (count, most) in enumerate(((4, 2), (1, 5), (2, None))):
        found = run_ranks(
            count,
            lambda rank, most=most: bits(tmp_path / "run", Narrow(), given, most),
            tmp_path / f"ranks{turn}",
        )
        assert all(isinstance(each, list) for each in found), found
    run_ranks(1, lambda rank: bits(tmp_path / "whole", Narrow(), given), tmp_path / "one")
    assert digest(tmp_path / "run") == digest(tmp_path / "whole")


class Counting(Narrow):
    def model(self) -> nn.Module:
        model: Any = super().model()
        model["drop"].register_buffer("seen", torch.zeros(()))
        return model  # type: ignore[no-any-return]

    def forward(self, model: Any, batch: dict[str, Tensor]) -> Tensor:
        model["drop"].seen += len(batch["words"])
        return super().forward(model, batch)


@pytest.mark.parametrize(
    ("task", "count", "tables", "words"),
    [
        (Narrow, 3, {}, "layout.virtual_ranks is 4, but there are 3 ranks"),
        (
            Narrow,
            2,
            {"train": {"threads": None}},
            "train.threads is None, and layout.virtual_ranks is 4",
        ),
        (
            Narrow,
            2,
            {"layout": {"shard": 2, "zero_stage": 1}},
            "layout.shard is 2, and layout.virtual_ranks is 4",
        ),
        (
            Narrow,
            2,
            {"layout": {"compress": "bf16"}},
            "layout.compress is 'bf16', and layout.virtual_ranks is 4",
        ),
        (Counting, 1, {}, "Dropout.seen changes in a pass"),
    ],
)
def test_what_would_not_have_the_same_bits_is_refused(
    task: Any, count: int, tables: Any, words: str, tmp_path: Path
) -> None:
    layout = {"virtual_ranks": 4, **tables.get("layout", {})}
    given = spec(**{**tables, "layout": layout})
    found = run_ranks(count, lambda rank: bits(tmp_path / "run", task(), given), tmp_path / "ranks")
    assert words in found[0]["error"], found[0]


def test_virtual_ranks_are_a_power_of_two() -> None:
    with pytest.raises(SpecError, match="power of two"):
        exactly(3)
