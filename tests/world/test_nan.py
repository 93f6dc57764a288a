"""A number that is none, on one rank.

In its data, its loss, a gradient, its optimizer's state, or the statistics of its BatchNorm.

All ranks decide the same, and nothing that is not finite is ever committed. What a step computes is
skipped by all of them; what a rank holds ends the run, with the rank and the tensor.
"""

from __future__ import annotations

import hashlib
import importlib
import math
import os
import random
import shutil
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from surefoot.components import checkpoint
from surefoot.contract import manifest
from surefoot.contract.task import Loss
from surefoot.core import place
from surefoot.core.errors import NumbersError
from surefoot.train.run import Run
from tests.world.launched import forked
from tests.world.ranks import run_ranks
from tests.world.test_run import spec
from tests.world.test_shard import Stacked

pytestmark = pytest.mark.usefixtures("loaded_for_shards")

FEW, MANY, LARGE_SEED = 6, 300, 10_000
STEPS = 6
COMPUTED, HELD = ("data", "loss", "gradient"), ("state", "buffer")
LAYOUTS: list[dict[str, Any]] = [{}, *({"shard": 2, "zero_stage": stage} for stage in (1, 2, 3))]


class Spoiled(Stacked):
    """Something of `kind` is no number on rank `guilty`, in step `at`."""

    run: Any = None

    def __init__(self, kind: str, guilty: int, at: int) -> None:
        self.kind, self.guilty, self.at = kind, guilty, at

    def is_now(self, kind: str) -> bool:
        is_step = self.run is not None and self.run.step == self.at - 1 and torch.is_grad_enabled()
        return is_step and self.kind == kind and place.here().rank == self.guilty

    def forward(self, model: Any, batch: dict[str, Tensor]) -> Tensor:
        if self.is_now("buffer"):
            model.norm.running_var[3] = math.nan
        output = super().forward(model, batch)
        if self.is_now("gradient"):
            output.register_hook(lambda gradient: gradient * math.inf)
        return output * math.nan if self.is_now("data") else output

    def loss(self, output: Tensor, batch: dict[str, Tensor]) -> Loss:
        made = super().loss(output, batch)
        return (
            Loss.sum(made.terms[0].total + math.nan, made.terms[0].count)
            if self.is_now("loss")
            else made
        )

    def spoil_state(self, kept: Any) -> None:
        """The square of a gradient kept of the first tensor of which this rank has some."""
        if (
            self.kind == "state"
            and self.run.step == self.at - 1
            and place.here().rank == self.guilty
        ):
            rows = [state["exp_avg_sq"] for _, state in kept if state["exp_avg_sq"].numel()]
            rows[0].view(-1)[0] = math.nan


def followed(folder: Path, task: Spoiled, layout: dict[str, Any]) -> dict[str, Any]:
    """A rank's decision in each step, the digest of its last state, and what ended it before."""
    decided, error = list[Any](), None
    given = spec(
        layout=layout,
        train={"length": f"{STEPS} steps"},
        evaluate={"every": "9 epochs"},
        stability={"max_skips": 20},
        checkpoint={"keep": 9},
    )
    try:
        with Run(given, task, folder=folder, quiet=True) as run:
            task.run = run
            task.spoil_state(run.assembly.engine.steps.updates[0].guarded.states())
            for report in run.steps():
                decided.append([report.applied, repr(report.loss), repr(report.gradient_norm)])
                task.spoil_state(run.assembly.engine.steps.updates[0].guarded.states())
            held = b"".join(each.detach().numpy().tobytes() for each in run.model.buffers())
            if layout.get("zero_stage", 1) == 1:
                held += b"".join(each.detach().numpy().tobytes() for each in run.model.parameters())
        return {"decided": decided, "digest": hashlib.sha256(held).hexdigest(), "error": None}
    except NumbersError as raised:
        error = str(raised)
    return {"decided": decided, "digest": "", "error": error}


def trial(seed: int, folder: Path, *, is_first: bool = False) -> None:
    """One rank has no number in a step: the first one, or any after it."""
    draws = random.Random(seed)
    kind, layout = (*COMPUTED, *HELD)[seed % 5], LAYOUTS[seed // 5 % 4]
    num_ranks = 2 if layout else draws.choice((2, 3))
    guilty, at, check = (
        draws.randrange(num_ranks),
        draws.randrange(2, STEPS),
        draws.choice(("2 steps", "100 steps")),
    )
    # between two saves: rank 0's own would see it before all ranks do, and end with that
    if kind == "state":
        at = (at - 2) // 3 * 3 + 2
    at = 1 if is_first else at
    told = (
        f"seed {seed}: {kind} on rank {guilty} of {num_ranks} in step {at}, {layout}, "
        f"held side by side every {check}"
    )
    job = lambda rank: followed(  # noqa: E731
        folder / "run", Spoiled(kind, guilty, at), {"check_every": check, **layout}
    )
    found = run_ranks(num_ranks, job, folder / "ranks")
    assert all("decided" in each for each in found), (told, found)
    assert all(
        each["decided"] == found[0]["decided"] and each["digest"] == found[0]["digest"]
        for each in found
    ), (told, found)
    if kind in COMPUTED:
        assert [number for number, row in enumerate(found[0]["decided"], 1) if not row[0]] == [
            at
        ], (told, found)
        assert len(found[0]["decided"]) == STEPS, (told, found)
    else:
        said = [each["error"] or "" for each in found]
        assert all("not finite" in each or "differ from those of" in each for each in said), (
            told,
            found,
        )
    committed = manifest.steps(folder / "run")
    # that of step 3 is copied beside step 4, with what was spoiled before it
    assert committed or at <= 4, told
    for step in committed:
        held = checkpoint.Commit(folder / "run", step).read("")
        assert all(
            torch.isfinite(each).all() for each in held.values() if each.is_floating_point()
        ), (told, step)


def trials(seeds: Iterable[int], folder: Path, *, is_first: bool = False) -> int:
    """In a process that has loaded what each rank of stages 2 and 3 would load for two seconds."""
    importlib.import_module("torch._dynamo")
    for seed in seeds:
        trial(seed, folder / str(seed), is_first=is_first)
        shutil.rmtree(folder / str(seed))
    return 0


@pytest.mark.parametrize(
    "seeds",
    [range(FEW), pytest.param(range(LARGE_SEED, LARGE_SEED + MANY), marks=pytest.mark.faults)],
    ids=len,
)
def test_what_is_no_number_on_one_rank_is_answered_by_all_alike_and_never_committed(
    seeds: range, tmp_path: Path
) -> None:
    pid = forked(lambda: trials(seeds, tmp_path))
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0


def test_what_is_no_number_in_the_first_step_is_skipped_by_all(tmp_path: Path) -> None:
    seeds = (0, 12)  # data on ranks that hold copies, and a gradient under stage 2
    pid = forked(lambda: trials(seeds, tmp_path, is_first=True))
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
