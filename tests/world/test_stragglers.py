"""A rank that the others wait for, in real runs.

Named, with its reason, in the records and on the terminal.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from surefoot.components.data.sources.arrays import Arrays
from surefoot.contract import events
from surefoot.contract.spec import RunSpec
from surefoot.contract.task import Loss
from surefoot.core import place
from surefoot.core.ranks.stragglers import Pace
from surefoot.runtime.comm.group import Group
from surefoot.train.run import Run
from surefoot.train.step.pace import Paces
from tests.train.small import faults_of, records
from tests.world.ranks import run_ranks

# on every rank: what 3 in 10 of it is, no busy machine adds to one rank in nearly every step
PASS_S = 0.1
NUM_STEPS, SLOW_FROM = 32, 8


class Slowed:
    """Rows of 6 words, of which rank 1 gets as many as `words`.

    Its passes, its data and its loop take so much longer, from a step on.
    """

    def __init__(self, pass_s: float = 0.0, data_s: float = 0.0, words: int = 4) -> None:
        self._is_slow, self._pass_s, self._data_s, self._words = (
            place.here().rank == 1,
            pass_s,
            data_s,
            words,
        )
        self._num_passes = self._num_reads = 0

    def model(self) -> nn.Module:
        torch.manual_seed(0)
        return nn.Linear(6, 1)

    def data(self, split: str) -> Any:
        rows = torch.zeros(32, 6)
        rows[:, :4] = 1.0
        # the second half of each batch is that of rank 1
        rows[np.arange(32) % 8 >= 4, 4 : self._words] = 1.0
        return Late(self, rows=rows) if split == "train" else Arrays(rows=rows)

    def wait_for_data(self) -> None:
        self._num_reads += 1
        time.sleep(self._data_s * (self._is_slow and self._num_reads > SLOW_FROM))

    def forward(self, model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
        self._num_passes += 1
        longer_s = self._pass_s * (self._is_slow and self._num_passes > SLOW_FROM)
        words = float(batch["rows"].count_nonzero() / len(batch["rows"]))
        time.sleep((PASS_S + longer_s) * words / 4)
        made: Tensor = model(batch["rows"])
        return made

    def loss(self, output: Tensor, batch: dict[str, Tensor]) -> Loss:
        return Loss.sum(output.square().sum(), int(batch["rows"].count_nonzero()))


class Late(Arrays):
    """Samples for which a task waits."""

    def __init__(self, task: Slowed, **arrays: Tensor) -> None:
        super().__init__(**arrays)
        self._task = task

    def read(self, ids: np.ndarray) -> Any:
        self._task.wait_for_data()
        return super().read(ids)


def spec(**tables: dict[str, Any]) -> RunSpec:
    stated: dict[str, dict[str, Any]] = {
        "train": {"length": f"{NUM_STEPS} steps", "batch": 8, "threads": 1},
        "optim": {"name": "sgd", "lr": 0.001},
        "data": {"shuffle": False},
        "evaluate": {"every": "1000 steps"},
        "checkpoint": {"every": "1000 steps"},
        "observe": {"tensorboard": False, "every": "8 steps"},
    }
    return RunSpec(
        **{
            name: {**stated.get(name, {}), **tables.get(name, {})}
            for name in stated.keys() | tables.keys()
        }
    )


def train(
    folder: Path, make: Callable[[], Slowed], after_step_s: float, num_steps: int
) -> list[float]:
    """The losses of each step, until a fault is recorded.

    Rank 1 sleeps after each of its steps from `SLOW_FROM` on.
    """
    losses = []
    with Run(
        spec(train={"length": f"{num_steps} steps"}), make(), folder=folder, quiet=True
    ) as run:
        for report in run.steps():
            losses.append(report.loss)
            time.sleep(after_step_s * (run.group.rank == 1 and report.step > SLOW_FROM))
            if (
                run.group.rank == 0
                and report.step >= NUM_STEPS
                and any(isinstance(each, events.Fault) for each in events.read(folder))
            ):
                run.stop("the rank is named")
    return losses


def communicating_s(home: Path) -> float:
    """How long a rank waited for others in a step.

    The median of records while rank 1 was slowed.
    """
    slowed = [
        each
        for each in events.read(home)
        if isinstance(each, events.Step) and each.step > SLOW_FROM
    ]
    return median(each.phases["communication"] / each.num_steps for each in slowed)


@pytest.mark.quick("data", "compute")
@pytest.mark.parametrize(
    ("made", "after_step_s", "words"),
    [
        pytest.param({"pass_s": 0.3 * PASS_S}, 0.0, "for just as much work", id="compute"),
        pytest.param({"data_s": 0.3 * PASS_S}, 0.0, "it waits for data", id="data"),
        pytest.param({"words": 6}, 0.0, "1.5 times as many items", id="work"),
        pytest.param({}, 0.3 * PASS_S, "between two steps, the others", id="loop"),
        pytest.param({}, 0.0, None, id="even"),
    ],
)
def test_a_rank_that_is_slowed_is_named_with_its_reason(
    made: dict[str, Any], after_step_s: float, words: str | None, tmp_path: Path
) -> None:
    """Within 20 steps, as tests/core/test_stragglers.py holds it to.

    Later only where other processes slow the ranks by as much.
    """
    most = NUM_STEPS if words is None else 12 * NUM_STEPS
    found = run_ranks(
        2,
        lambda rank: train(tmp_path / "run", lambda: Slowed(**made), after_step_s, most),
        tmp_path / "ranks",
    )
    assert found[0] == found[1]
    faults = faults_of(tmp_path / "run")
    if words is None:
        assert faults == []
    else:
        (fault,) = faults
        assert fault.fault == "straggler"
        assert fault.detail.startswith("the other ranks wait for rank 1 in ")
        assert words in fault.detail
    waits_s = [
        communicating_s(home) for home in (tmp_path / "run", tmp_path / "run" / "ranks" / "1")
    ]
    # told apart from the backward pass, which it follows
    assert words is None or waits_s[0] - waits_s[1] > 0.15 * PASS_S
    rows = [each.ranks for each in records(tmp_path / "run") if isinstance(each, events.Step)]
    # of the last step nobody hears
    assert sum(sum(row["last"]) for row in rows if row) == len(found[0]) - 1
    assert not any(
        each.ranks
        for each in events.read(tmp_path / "run" / "ranks" / "1")
        if isinstance(each, events.Step)
    )
    assert set(rows[-1]) == {"last", "waited_s", *Pace._fields}
    late = median(
        row["waited_s"][1] / sum(row["last"]) for row in rows[1:] if row and sum(row["last"])
    )
    assert late < 0.1 * PASS_S if words is None else 0.15 * PASS_S < late < PASS_S


class Timer:
    """An event of a device that counts what was done on it until then."""

    done_s = 0.0

    def record(self) -> None:
        self.at_s = Timer.done_s

    def elapsed_time(self, later: Any) -> float:
        return (later.at_s - self.at_s) * 1e3


def test_of_a_device_the_passes_are_timed_by_its_events_and_the_waits_of_the_host_are_not() -> None:
    paces = Paces(Group(0, 2, torch.device("cuda")), Timer)
    for _ in range(2):
        paces.begin()
        paces.ready(4, [{"rows": torch.zeros(4, 6), "more": (torch.zeros(3), "no tensor")}])
        Timer.done_s += 0.25
        paces.end_passes()
        Timer.done_s += 1.0  # what the other rank takes longer
        paces.count([{"loss": (0.0, 12.0, 1.0)}, {}])
        paces.end()
    row = paces.row()
    assert row[1] == pytest.approx(0.25)
    assert row[3:] == [4.0, 12.0, 27.0, *[0.0] * 6]
    assert Paces(Group(), Timer).row() == []
