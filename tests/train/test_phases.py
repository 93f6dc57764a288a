"""Where the time of a run goes.

Delays are found where they were put, and the phases add up to the wall time.
"""

from __future__ import annotations

import gc
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import surefoot
from surefoot.cli.look import past, story
from surefoot.components.profiler.phases.clock import PhaseClock
from surefoot.contract import events
from surefoot.contract.events import PHASES, Ended, Step
from surefoot.contract.task import Loss, Update
from surefoot.core.errors import InputError
from surefoot.train.run import Run
from tests.train.delays import NUM_STEPS, PLACES, tell_planted, wait
from tests.train.small import Small, records, spec


@pytest.mark.quick("data", "loss", "checkpoint")
@pytest.mark.parametrize("where", PLACES)
def test_a_delay_is_found_in_the_phase_that_it_was_put_into(where: str, tmp_path: Path) -> None:
    told = tell_planted(where, tmp_path)
    assert len(told.plant.spent_s) == NUM_STEPS // 2
    # all of the delay is in its phase, and the phases add up to the wall time: see below
    assert min(told.own_s.values()) >= 0


@pytest.mark.quick("backward", "evaluation", "other")
@pytest.mark.parametrize("where", PLACES)
def test_a_delay_that_is_told_elsewhere_is_in_no_other_phase(where: str, tmp_path: Path) -> None:
    told = tell_planted(where, tmp_path, aside=True)
    assert len(told.plant.spent_s) == NUM_STEPS // 2
    assert min(told.own_s.values()) >= 0
    for step in told.without:
        assert told.aside_s[step] >= told.plant.size_of(step)


class Bracket:
    """Wall time by a clock of the test's own, around the run's clock.

    Its start and its last reading.

    A busy machine may stop the run between any two readings of a clock: what is asserted holds for
    any such stop.
    """

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self._of: dict[str, tuple[float, float]] = {}
        self._before_start_s = self._last_s = time.perf_counter()
        # the last one is called before a Run reads when it started
        for name in ("start", "take", "listen_to_collections"):
            patch.setattr(PhaseClock, name, self._around(name, getattr(PhaseClock, name)))

    def _around(self, name: str, method: Any) -> Any:
        def call(*given: Any) -> Any:
            before_s = time.perf_counter()
            if name == "start":
                self._before_start_s = self._last_s
            self._last_s = before_s
            result = method(*given)
            self._of[name] = before_s, time.perf_counter()
            return result

        return call

    def holds(self, total_s: float) -> bool:
        """Whether `total_s` lies between the shortest and the longest that it can be.

        No busy machine changes these.
        """
        start, take = self._of["start"], self._of["take"]
        return take[0] - start[1] <= total_s <= take[1] - start[0]

    def holds_elapsed(self, elapsed_s: float, done_s: float) -> bool:
        """The same between two readings around those, the last of them before `done_s`."""
        return (
            self._of["take"][0] - self._of["start"][1] <= elapsed_s <= done_s - self._before_start_s
        )


@pytest.fixture
def wall(monkeypatch: pytest.MonkeyPatch) -> Bracket:
    return Bracket(monkeypatch)


class Adversarial(Small):
    """Two updates of one step, each over its own half of the network."""

    def updates(self, model: Any) -> Sequence[Update]:
        def loss(model: Any, batch: Any) -> Loss:
            return self.loss(self.forward(model, batch), batch)

        return [
            Update("first", loss, list(model[0].parameters())),
            Update(
                "second",
                loss,
                list(model[4].parameters()),
                optimizer=torch.optim.Adagrad(model[4].parameters()),
                every=2,
            ),
        ]


KINDS: dict[str, tuple[Small, dict[str, dict[str, Any]]]] = {
    "plain": (Small(), {}),
    "saved and evaluated": (
        Small(norm=True),
        {"checkpoint": {"every": "40 steps"}, "evaluate": {"every": "50 steps"}},
    ),
    "saved at once": (Small(), {"checkpoint": {"every": "40 steps", "background": False}}),
    "microbatches and an average": (
        Small(dropout=0.1),
        {"train": {"microbatch": 2}, "optim": {"ema": 0.9}},
    ),
    "several updates": (Adversarial(), {"evaluate": {"every": "50 steps"}}),
}


@pytest.mark.quick("saved and evaluated", "microbatches and an average", "several updates")
@pytest.mark.parametrize("kind", KINDS)
def test_the_phases_add_up_to_the_wall_time(kind: str, tmp_path: Path, wall: Bracket) -> None:
    task, tables = KINDS[kind]
    with Run(spec(200, **tables), task, folder=tmp_path, quiet=True) as run:
        for report in run.steps():
            if run.evaluation_due:
                run.evaluate()
            if report.step == 100:
                wait(0.2)
    done_s = time.perf_counter()
    phases = run.summary["phases"]
    assert wall.holds(sum(phases.values()))
    assert wall.holds_elapsed(run.summary["elapsed_s"], done_s)
    assert sum(phases.values()) <= run.summary["elapsed_s"] + 1e-6
    assert (
        {"data", "forward", "backward", "optimizer", "logging", "checkpoint", "evaluation", "other"}
        <= set(phases)
        <= set(PHASES)
    )
    assert phases["other"] >= 0.2
    recorded = [event for event in records(tmp_path) if isinstance(event, Step)]
    assert sum(len(event.step_s) for event in recorded) == 200
    for name in PHASES:  # what is behind the last record of steps is in the whole alone
        assert (
            sum(event.phases.get(name, 0.0) for event in recorded) <= phases.get(name, 0.0) + 1e-9
        )


def test_a_slow_step_is_told_with_its_cause_in_the_records_in_the_closing_lines_and_by_show(
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    request: pytest.FixtureRequest,
    wall: Bracket,
) -> None:
    gc.disable()  # on a busy machine Python's own collections make other steps slow
    request.addfinalizer(gc.enable)
    with Run(
        spec(60, evaluate={"every": "1000 steps"}), Small(), folder=tmp_path, quiet=True
    ) as run:
        for report in run.steps():
            if report.step == 20:
                wait(0.3)
            if report.step == 30:
                began_s = time.perf_counter()
                while time.perf_counter() - began_s < 0.4:
                    gc.collect()
    done_s = time.perf_counter()
    told = {row["step"]: row["cause"] for row in run.summary["outliers"]}
    assert (told[21], told[31]) == ("other", "garbage collection")
    story.print_summary(past.read(tmp_path))
    said = capsys.readouterr().out
    assert "slow step 31: " in said
    assert ": garbage collection\n" in said
    time_row = story.as_row(past.read(tmp_path))["time"]
    assert wall.holds_elapsed(time_row["total_s"] / time_row["coverage"], done_s)
    assert time_row["coverage"] <= 1 + 1e-6
    assert time_row["total_s"] == pytest.approx(
        sum(each["total_s"] for each in time_row["phases"].values())
    )
    assert time_row["causes"]["garbage collection"] == 1
    assert sum(each["share"] for each in time_row["phases"].values()) == pytest.approx(1)
    assert time_row["step"]["p50_s"] <= time_row["step"]["p95_s"] <= time_row["step"]["max_s"]


def test_a_killed_run_and_a_log_of_an_older_version_are_told_as_far_as_they_go(
    tmp_path: Path,
) -> None:
    with Run(spec(20), Small(), folder=tmp_path, quiet=True) as run:
        for _ in run.steps():
            pass
    lines = (tmp_path / events.FILE).read_text().splitlines(keepends=True)
    (tmp_path / events.FILE).write_text("".join(lines[:-1]))
    killed = past.read(tmp_path).phases
    assert killed is not None
    assert (killed.wall_s, killed.coverage, killed.num_steps) == (None, None, 20)
    old = [
        line.partition(', "phases"')[0] + "}\n" if '"kind": "step"' in line else line
        for line in lines[:-1]
    ]
    (tmp_path / events.FILE).write_text("".join(old))
    before = past.read(tmp_path)
    assert len(before.steps) == 3
    assert before.phases is None
    assert story.as_row(before)["time"] is None


def test_a_loop_of_ones_own_is_timed_by_the_phases_that_it_names(
    tmp_path: Path, wall: Bracket
) -> None:
    model = nn.Linear(4, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    spent_s = 0.0

    def slow() -> Any:
        nonlocal spent_s
        for _ in range(20):
            spent_s += wait(0.005)
            yield torch.ones(3, 4), torch.zeros(3, dtype=torch.int64)

    with surefoot.attach(
        model=model, optimizer=optimizer, data=slow(), folder=tmp_path / "run"
    ) as run:
        for inputs, targets in run.batches():
            with run.phase("forward"):
                named_s = wait(0.01)
                loss = F.cross_entropy(model(inputs), targets)
            with run.phase("backward"):
                loss.backward()
            with run.phase("optimizer"):
                optimizer.step()
            run.step_done(loss)
        with pytest.raises(InputError, match="there is no phase 'forwards'"):
            run.phase("forwards")
    done_s = time.perf_counter()
    ended = records(tmp_path / "run")[-1]
    assert isinstance(ended, Ended)
    phases = ended.summary["phases"]
    assert wall.holds(sum(phases.values()))
    assert wall.holds_elapsed(ended.elapsed_s, done_s)
    assert phases["data"] >= spent_s >= 0.1
    assert phases["forward"] >= 20 * 0.01
    assert named_s >= 0.01
    assert {"backward", "optimizer", "checkpoint", "logging", "other"} <= set(phases)
    assert sum(phases.values()) <= ended.elapsed_s + 1e-6


def test_tensorboard_shows_the_shares_of_the_phases(tmp_path: Path) -> None:
    accumulators = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    with Run(spec(20, observe={"tensorboard": True}), Small(), folder=tmp_path, quiet=True) as run:
        for _ in run.steps():
            pass
    board = accumulators.EventAccumulator(str(tmp_path / "tensorboard"))
    board.Reload()
    tags = [tag for tag in board.Tags()["scalars"] if tag.startswith("phases/")]
    assert {"phases/forward", "phases/backward", "phases/data"} <= set(tags)
    assert sum(board.Scalars(tag)[0].value for tag in tags) == pytest.approx(1, rel=1e-5)
