"""Ranks that hold a part each.

The numbers of one process, commits that any layout loads, and traffic that is split.
"""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from surefoot.cli.operate import difference
from surefoot.components import checkpoint
from surefoot.components.data import consumed
from surefoot.components.parallel.shard.parts import cut_rows
from surefoot.contract import commits, manifest
from surefoot.contract.spec import RunSpec
from surefoot.contract.state import master_of, part_of
from surefoot.core.flight import Kind
from surefoot.train.run import Run
from tests.world.ranks import run_ranks
from tests.world.test_run import Sentences, apart, spec

pytestmark = pytest.mark.usefixtures("loaded_for_shards")

LAYOUTS = {
    "stage 1 on 2": (2, {"shard": 2, "zero_stage": 1}),
    "stage 1 on 3": (3, {"shard": 3, "zero_stage": 1}),
    "stage 2 on 2": (2, {"shard": 2, "zero_stage": 2}),
    "stage 3 on 3": (3, {"shard": 3, "zero_stage": 3}),
    "stage 3 on 2": (2, {"shard": 2}),
    "stage 1 on 2 x 2": (4, {"shard": 2, "zero_stage": 1, "replicate": 2}),
    "stage 3 on 2 x 2": (4, {"shard": 2, "zero_stage": 3}),
}


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Sequential(nn.Linear(8, 5), nn.Tanh(), nn.Linear(5, 8), nn.Dropout(0.2))

    def forward(self, hidden: Tensor) -> Tensor:
        made: Tensor = hidden + self.inner(hidden)
        return made


class Stack(nn.Module):
    """Blocks, a norm with statistics, a head that is tied, and fewer rows than ranks.

    Something is frozen, and something nobody uses.
    """

    def __init__(self) -> None:
        super().__init__()
        self.table, self.norm = nn.Embedding(11, 8), nn.BatchNorm1d(8)
        self.blocks = nn.ModuleList([Block(), Block()])
        self.frozen, self.unused = nn.Linear(8, 8), nn.Linear(8, 8)
        self.scale = nn.Parameter(torch.ones(1, 8))
        self.head = nn.Linear(8, 11, bias=False)
        self.head.weight = self.table.weight
        self.frozen.requires_grad_(requires_grad=False)

    def forward(self, words: Tensor) -> Tensor:
        hidden = self.norm(self.table(words).flatten(0, 1)) * self.scale
        for block in self.blocks:
            hidden = block(hidden)
        made: Tensor = self.head(hidden + self.frozen(hidden))
        return made


class Stacked(Sentences):
    def model(self) -> nn.Module:
        torch.manual_seed(5)
        return Stack().double()

    def forward(self, model: Any, batch: dict[str, Tensor]) -> Tensor:
        made: Tensor = model(batch["words"])
        return made


class Half(Stacked):
    """What is frozen has no master: one process would store it in bf16 alone."""

    def model(self) -> nn.Module:
        return super().model().float()


AVERAGED = {"optim": {"name": "adamw", "lr": 0.01, "clip": 0.5, "ema": 0.9}}


def sharded(layout: dict[str, Any], **tables: dict[str, Any]) -> RunSpec:
    return spec(layout={"check_every": "2 steps", **layout}, **AVERAGED, **tables)


def final_weights(folder: Path, step: int) -> dict[str, Tensor]:
    """The whole weights of a commit, whoever wrote it."""
    return checkpoint.Commit(folder, step).read(checkpoint.MODEL)


def worst(one: dict[str, Tensor], other: dict[str, Tensor]) -> float:
    assert one.keys() == other.keys()
    return max(float((one[name].double() - other[name].double()).abs().max()) for name in one)


def followed(folder: Path, given: RunSpec, most: int | None = None) -> dict[str, Any]:
    """Losses, norms and score of a run on this rank, and what it held and sent."""
    losses, norms, score = list[Any](), list[Any](), None
    with Run(given, Stacked(), folder=folder, quiet=True) as run:
        for report in run.steps():
            losses.append(report.loss)
            norms.append(report.gradient_norm)
            if run.evaluation_due:
                score = run.evaluate().value
            if most is not None and report.step == most:
                raise KeyboardInterrupt
        steps, samples = run.step, run.num_samples
    return {
        "losses": losses,
        "norms": norms,
        "score": score,
        "step": steps,
        "num_samples": samples,
        "state": {},
    }


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> Any:
    folder = tmp_path_factory.mktemp("alone") / "run"
    return {**followed(folder, spec(**AVERAGED)), "weights": final_weights(folder, 13)}


@pytest.mark.quick("stage 2 on 2")
@pytest.mark.parametrize("name", LAYOUTS)
def test_ranks_that_hold_a_part_train_to_the_numbers_of_one_process(
    name: str, alone: Any, tmp_path: Path
) -> None:
    """Texts of unlike length, a short last batch, ranks without one, clipping, dropout, BatchNorm.

    And averages, and tied, frozen and unused weights.
    """
    num_ranks, layout = LAYOUTS[name]
    found = run_ranks(
        num_ranks, lambda rank: followed(tmp_path / "run", sharded(layout)), tmp_path / "ranks"
    )
    assert all("losses" in each for each in found), found
    assert max(apart(alone, each) for each in found) < 1e-10
    assert all(each == found[0] for each in found)
    assert abs(found[0]["score"] - alone["score"]) < 1e-12
    assert worst(final_weights(tmp_path / "run", 13), alone["weights"]) < 1e-10
    checked = consumed.check(tmp_path / "run")
    assert checked.holds, checked.faults
    made = commits.check(manifest.step_folder(tmp_path / "run", 13))
    assert made.layout["world_size"] == num_ranks


@pytest.mark.slow
def test_a_commit_of_any_layout_goes_on_under_any_other(alone: Any, tmp_path: Path) -> None:
    """Optimizer and averages too.

    The same run is left and taken up by other ranks, and ends with the weights of one process.
    """
    order: list[tuple[int, dict[str, Any]]] = [
        (2, {"shard": 2, "zero_stage": 3}),
        (1, {}),
        (3, {"shard": 3, "zero_stage": 1}),
        (4, {"shard": 2, "zero_stage": 2}),
        (2, {"shard": 2, "zero_stage": 1}),
        (2, {}),
        (3, {"shard": 3, "zero_stage": 3}),
    ]
    averaged = {**AVERAGED, "checkpoint": {"every": "1 step", "keep": 9}}
    folder = tmp_path / "run"
    losses: list[Any] = []
    for turn, (num_ranks, layout) in enumerate(order):
        most = 2 * turn + 2 if turn + 1 < len(order) else None
        given = spec(layout={"replicate": None, **layout}, **averaged)
        found = run_ranks(
            num_ranks,
            lambda rank, given=given, most=most: train_until(folder, given, most),
            tmp_path / f"ranks{turn}",
        )
        assert all("losses" in each for each in found), (turn, found)
        assert all(each["losses"] == found[0]["losses"] for each in found)
        losses += found[0]["losses"]
    whole = tmp_path / "whole"
    unbroken = followed(whole, spec(**averaged))
    assert float(np.abs(np.subtract(losses, unbroken["losses"])).max()) < 1e-10
    for file in (checkpoint.MODEL, "weights.safetensors", "optimizer.safetensors"):
        mine, theirs = (
            checkpoint.Commit(folder, 13).read(file),
            checkpoint.Commit(whole, 13).read(file),
        )
        assert worst(mine, theirs) < 1e-10
    assert consumed.check(folder).holds
    pair = [checkpoint.Commit(each, 13).folder for each in (folder, whole)]
    assert (pair[0] / "optimizer.rank-00002.safetensors").exists()
    # as one tensor each, though the rows of one commit are in three files
    found, _ = difference.compare(*pair)
    unlike = [
        each for each in found if each.file.endswith(".safetensors") and "random" not in each.name
    ]
    assert 0 < len(unlike) < 99
    assert all(each.max_abs is not None and each.max_abs < 1e-10 for each in unlike), unlike


def train_until(folder: Path, given: RunSpec, most: int | None) -> Any:
    losses: list[Any] = []
    try:
        with Run(given, Stacked(), folder=folder, quiet=True) as run:
            for report in run.steps():
                losses.append(report.loss)
                if most is not None and report.step == most:
                    run.save()
                    raise KeyboardInterrupt
    except KeyboardInterrupt:
        pass
    return {"losses": losses}


@pytest.mark.parametrize("num_ranks", [2, 3, 4, 7])
def test_rows_are_cut_by_bytes_and_every_row_is_somebody_s(num_ranks: int) -> None:
    rng = np.random.default_rng(num_ranks)
    for _ in range(50):
        tensors = [
            (int(rows), int(width))
            for rows, width in zip(rng.integers(0, 40, 6), rng.integers(1, 90, 6), strict=True)
        ]
        cuts = cut_rows(tensors, num_ranks)
        for (rows, _), mine in zip(tensors, cuts, strict=True):
            assert list(itertools.chain.from_iterable(mine)) == list(range(rows))
        sizes = [
            sum(len(mine[rank]) * width for (_, width), mine in zip(tensors, cuts, strict=True))
            for rank in range(num_ranks)
        ]
        widest = max(width for _, width in tensors)
        assert max(sizes) - min(sizes) <= 2 * widest
    assert cut_rows([(1, 100)], 3) == [[range(0), range(1), range(1, 1)]]  # fewer rows than ranks


@pytest.mark.quick("1-1", "3-2")
@pytest.mark.parametrize(("stage", "gathers"), [(1, 1), (2, 1), (3, 2)])
def test_a_step_sends_what_its_stage_says_however_many_microbatches_stage_1_has(
    stage: int, gathers: int, tmp_path: Path
) -> None:
    """A sum in parts of all gradients, and weights gathered once.

    Those that are let go between the passes are gathered twice.
    """

    def job(rank: int, microbatch: int) -> Any:
        given = sharded(
            {"shard": 2, "zero_stage": stage},
            train={"microbatch": microbatch, "length": "5 steps"},
            checkpoint={"every": "never"},
        )
        with Run(given, Stacked(), folder=tmp_path / f"run{microbatch}", quiet=True) as run:
            steps = run.steps()
            next(steps)
            ranks = run.assembly.engine.steps.collectives.ranks
            assert ranks is not None
            assert ranks.sharded is not None
            traffic = ranks.sharded.group.traffic
            before = dict(traffic)
            next(steps)
            sent = [traffic[kind] - before.get(kind, 0) for kind in (Kind.SCATTER, Kind.GATHER)]
            held = {
                name: master_of(each)
                for name, each in run.model.named_parameters()
                if each.requires_grad
            }
            numbers = [each.numel() for each in held.values()]
            state = sum(
                value.numel()
                for update in run.assembly.updates
                for _, kept in update.guarded.states()
                for value in kept.values()
            )
            run.stop("seen")
            for _ in steps:
                pass
        return [
            *sent,
            sum(numbers),
            state,
            [None if (part := part_of(each)) is None else part.start for each in held.values()],
        ]

    found = run_ranks(2, lambda rank: job(rank, 4), tmp_path / "ranks")
    assert all(isinstance(each, list) for each in found), found
    model = Stack().double()
    trained = sum(each.numel() for each in model.parameters() if each.requires_grad)
    in_blocks = 8 * sum(each.numel() for each in model.blocks.parameters())
    used = 8 * (trained - sum(each.numel() for each in model.unused.parameters()))
    every = 8 * (trained if stage == 1 else sum(each.numel() for each in model.parameters()))
    for scattered, gathered, *_ in found:
        # rows of 1, 5 and 11 are filled up
        assert (8 * trained if stage == 1 else used) <= scattered <= 1.35 * 8 * trained
        assert (
            every + (gathers - 1) * in_blocks
            <= gathered
            <= 1.35 * (every + (gathers - 1) * in_blocks)
        )
    assert found[0][2] + found[1][2] == trained  # each number is moved by one rank
    # and its moments are kept there alone, beside counters
    assert 2 * trained <= found[0][3] + found[1][3] <= 2 * trained + 2 * 40
    assert max(each[2] for each in found) <= 0.6 * trained
    if stage == 1:
        again = run_ranks(2, lambda rank: job(rank, 1), tmp_path / "again")
        assert [each[:2] for each in again] == [each[:2] for each in found]


def test_a_bit_that_flips_in_one_copy_of_a_split_model_is_named(tmp_path: Path) -> None:
    def job(rank: int) -> Any:
        given = spec(
            layout={"shard": 2, "zero_stage": 2, "check_every": "2 steps"},
            checkpoint={"every": "never"},
        )
        with Run(given, Stacked(), folder=tmp_path / "run", quiet=True) as run:
            for report in run.steps():
                if rank == 3 and report.step == 3:
                    held = (
                        master_of(run.model.get_parameter("table.weight"))
                        .detach()
                        .view(torch.int64)
                    )
                    held.view(-1)[7] ^= 1
        return None

    found = run_ranks(4, job, tmp_path / "ranks")
    assert "the weights of rank 3 of 4 differ from those of rank 1: " in found[3]["error"]
    assert "the weights of rank 3 of 4 differ from those of rank 1: " in found[1]["error"]
    assert all(each["kind"] in ("LostRank", "NumbersError") for each in found), found
