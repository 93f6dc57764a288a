"""Every second of a run is in one part, and a killed attempt is told with what it cost."""

from __future__ import annotations

import json
import os
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from surefoot.cli.look import why
from surefoot.contract import events
from surefoot.contract.runlock import LockOwner, RunLock
from surefoot.control.diagnose import find_goodput, find_health
from surefoot.control.launch.decide import ExitKind, RankFailure
from surefoot.control.launch.elastic import AttemptEnd
from surefoot.control.launch.record import record_fault
from surefoot.control.plan import advise_interval
from surefoot.core import flight
from tests.train.small import call

STARTED: dict[str, Any] = {
    "spec_id": "x",
    "spec": {},
    "task": "t",
    "code_digest": "0",
    "data": {},
    "versions": {},
    "machine": {},
    "place": {},
    "variables": {},
    "command": (),
    "commit": None,
    "seed": 0,
    "num_parameters": 1,
    "total_steps": 30,
    "steps_per_epoch": 10,
}


def started(generation: int, time_s: float, first_step: int = 1) -> events.Started:
    return events.Started(generation=generation, time_s=time_s, first_step=first_step, **STARTED)


def steps(generation: int, time_s: float, step: int, elapsed_s: float) -> events.Step:
    return events.Step(
        generation=generation,
        time_s=time_s,
        step=step,
        epoch=0.0,
        num_steps=10,
        loss=1.0,
        terms={},
        gradient_norm=None,
        learning_rates={},
        num_applied=10,
        num_samples=10,
        num_items=10,
        elapsed_s=elapsed_s,
        waiting_s=0.0,
        samples_per_s=None,
        items_per_s=None,
        peak_bytes=None,
    )


def committed(generation: int, time_s: float, step: int, waited_s: float) -> events.Committed:
    return events.Committed(
        generation=generation,
        time_s=time_s,
        step=step,
        folder="",
        num_bytes=1,
        elapsed_s=2.0,
        waited_s=waited_s,
    )


def ended(generation: int, time_s: float, step: int) -> events.Ended:
    return events.Ended(
        generation=generation,
        time_s=time_s,
        step=step,
        outcome="finished",
        cause="done",
        exit_code=0,
        elapsed_s=1.0,
        num_samples=1,
        samples_per_s=None,
        peak_bytes=None,
    )


KILLED_ONCE = [
    started(1, 100.0),
    steps(1, 110.0, 10, 9.0),
    committed(1, 110.5, 10, 1.0),
    steps(1, 120.0, 20, 9.0),  # killed: 11 to 20 are lost
    started(2, 150.0, first_step=11),
    steps(2, 160.0, 20, 9.0),
    committed(2, 160.0, 20, 1.0),
    steps(2, 170.0, 30, 9.0),
    ended(2, 171.0, 30),
]


def test_the_parts_add_up_to_the_total_and_rework_is_what_the_kill_cost() -> None:
    found = find_goodput(KILLED_ONCE)
    assert found.total_s == 71.0
    assert (found.rework_s, found.down_s, found.save_s) == (9.0, 30.0, 2.0)
    assert found.productive_s == 27.0 - 2.0
    assert (
        found.productive_s
        + found.evaluate_s
        + found.save_s
        + found.rework_s
        + found.down_s
        + found.other_s
        == found.total_s
    )
    assert [(each.outcome, each.num_redone, each.last_step) for each in found.attempts] == [
        ("killed", 10, 20),
        ("finished", 0, 30),
    ]
    assert (found.num_failures, found.between_failures_s) == (1, 41.0)


@pytest.mark.parametrize(
    ("generation", "held", "outcome", "cause"),
    [
        (2, True, "running", "not yet: process 7 on "),
        (2, False, "killed", "no end was recorded"),
        (3, True, "killed", "no end was recorded"),  # an attempt that has no record yet
    ],
)
def test_the_last_attempt_of_a_run_that_is_running_was_not_killed(
    generation: int, held: bool, outcome: str, cause: str
) -> None:
    events = KILLED_ONCE[:-1]
    owner = LockOwner(
        is_held=held, generation=generation, process=7, host=None, boot=None, since_s=145.0
    )
    first, last = find_goodput(events, find_health(owner, events, now_s=171.0)).attempts
    assert first.outcome == "killed"
    assert last.outcome == outcome
    assert last.cause.startswith(cause)


def test_a_killed_attempt_came_as_far_as_any_record_shows_and_up_to_a_record_further() -> None:
    events = [
        started(1, 100.0),
        steps(1, 110.0, 10, 9.0),
        committed(1, 110.5, 14, 1.0),
        started(2, 150.0, first_step=11),
        steps(2, 160.0, 20, 9.0),
        ended(2, 171.0, 20),
    ]
    first, second = find_goodput(events).attempts
    assert (first.last_step, first.num_redone, first.num_unrecorded) == (14, 4, 9)
    assert "SIGKILL" in first.cause
    assert second.num_unrecorded == 0
    assert why._row(first)[2:4] == ["14 to 23", "4 to 13"]


@pytest.mark.parametrize(
    ("save_s", "between_s"), [(0.0, 10.0), (1.0, 0.0), (float("nan"), 1.0), (1.0, float("inf"))]
)
def test_nothing_is_advised_where_nothing_can_be_weighed(save_s: float, between_s: float) -> None:
    assert advise_interval(save_s, between_s) is None


def test_no_save_is_advised_before_the_one_before_it_is_written() -> None:
    advice = advise_interval(40e-6, 30.0, write_s=0.08)
    assert advice is not None
    assert advice.interval_s == 0.08  # the root of both is 49 ms
    assert advice.lost_share == pytest.approx(40e-6 / 0.08 + 0.04 / 30)


def test_why_tells_the_kill_and_the_interval(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / events.FILE).write_text("".join(event.as_line() for event in KILLED_ONCE))
    assert call(monkeypatch, "why", str(tmp_path)) == 0
    told = capsys.readouterr().out
    assert "killed" in told
    assert "repeated" in told
    assert "save every" in told
    assert call(monkeypatch, "why", str(tmp_path), "--json") == 0
    row = json.loads(capsys.readouterr().out)
    assert row["goodput"] == pytest.approx(25 / 71)
    assert row["advice"]["interval_s"] == pytest.approx((2 * 1.0 * 41.0) ** 0.5)


def fault(generation: int, time_s: float, name: str, detail: str) -> events.Fault:
    return events.Fault(
        generation=generation,
        time_s=time_s,
        step=20,
        fault=name,
        rank=1,
        host="h",
        action="all ranks were ended",
        detail=detail,
    )


HUNG = "rank 1 of 2 has not come: rank 1 is in step 20, at task.py:12 in loss"


def test_an_attempt_that_the_supervisor_ended_for_a_hang_names_the_hang(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    log = [started(1, 100.0), steps(1, 110.0, 10, 9.0), fault(1, 120.0, "hang", HUNG)]
    first = find_goodput(log).attempts[0]
    assert (first.outcome, first.cause) == ("hang", HUNG)
    (tmp_path / events.FILE).write_text("".join(event.as_line() for event in log))
    for verb in (["why"], ["show"], ["show", "--health"]):
        call(monkeypatch, *verb, str(tmp_path))
        assert HUNG in capsys.readouterr().out


def test_the_fault_of_another_attempt_says_nothing_of_one_without_an_end() -> None:
    log = [started(1, 100.0), steps(1, 110.0, 10, 9.0), fault(2, 120.0, "hang", HUNG)]
    assert find_goodput(log).attempts[0].outcome == "killed"


def test_a_run_that_lost_a_rank_names_the_error_of_that_rank(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    lost = replace(ended(1, 111.0, 10), outcome="failed", cause="rank 1 has exited", exit_code=8)
    mine = replace(lost, cause="ValueError: boom (task.py:24)", exit_code=3)
    other = tmp_path / "ranks" / "1"
    other.mkdir(parents=True)
    log = [started(1, 100.0), steps(1, 110.0, 10, 9.0)]
    (tmp_path / events.FILE).write_text("".join(each.as_line() for each in [*log, lost]))
    (other / events.FILE).write_text("".join(each.as_line() for each in [*log, mine]))
    for verb in (["why"], ["show"], ["show", "--health"]):
        call(monkeypatch, *verb, str(tmp_path))
        assert "rank 1: ValueError: boom (task.py:24)" in capsys.readouterr().out


def test_a_single_attempt_that_failed_is_a_failure() -> None:
    end = replace(ended(1, 111.0, 10), outcome="failed", cause="loss is NaN", exit_code=5)
    log = [started(1, 100.0), steps(1, 110.0, 10, 9.0)]
    assert find_goodput([*log, end]).num_failures == 1
    assert find_goodput([*log, ended(1, 111.0, 10)]).num_failures == 0


def test_the_cost_of_a_save_is_the_mean_over_all_saves() -> None:
    log = [started(1, 100.0), *(committed(1, 101.0 + s, s, w) for s, w in enumerate((0, 0, 3)))]
    assert find_goodput(log).mean_save_s == 1.0


def test_a_supervisor_records_a_hang_in_the_log_of_the_attempt_that_hung(tmp_path: Path) -> None:
    with RunLock(tmp_path):
        line = started(1, 100.0).as_line()
        (tmp_path / events.FILE).write_text(line + '{"torn')
    end = AttemptEnd(8, RankFailure(ExitKind.HUNG, 1, 1, HUNG), step=20)
    said: list[str] = []
    record_fault(tmp_path, end, after=1, say=said.append)
    assert (tmp_path / events.FILE).read_text() == line + '{"torn'  # of an older attempt
    record_fault(tmp_path, end, after=0, say=said.append)
    found = list(events.read(tmp_path, events.Fault))
    assert [(each.fault, each.rank, each.step, each.detail) for each in found] == [
        ("hang", 1, 20, HUNG)
    ]
    assert said == []


@pytest.mark.parametrize(
    ("generation", "is_open", "num_faults"),
    [(2, False, 1), (1, False, 0), (3, False, 0), (2, True, 0)],
)
def test_a_hang_is_recorded_only_for_the_newest_attempt_once_nobody_writes_the_run(
    generation: int, is_open: bool, num_faults: int, tmp_path: Path
) -> None:
    with RunLock(tmp_path):
        pass
    lock = RunLock(tmp_path)
    log = started(1, 100.0).as_line() + started(2, 200.0).as_line()
    (tmp_path / events.FILE).write_text(log + '{"torn')
    if not is_open:
        lock.release()
    end = AttemptEnd(8, RankFailure(ExitKind.HUNG, 1, 1, HUNG), step=20)
    said: list[str] = []
    record_fault(tmp_path, end, after=generation - 1, say=said.append, generation=generation)
    lock.release()
    assert [each.generation for each in events.read(tmp_path, events.Fault)] == [2] * num_faults
    assert (tmp_path / events.FILE).read_text().startswith(log)
    assert len(said) == is_open


@pytest.mark.parametrize("name", ["run", "a b", "läufe/ü", "two\nlines", "x" * 3000])
def test_a_rank_records_the_run_folder_that_it_writes(name: str) -> None:
    descriptor = flight.make_file("test")
    record = flight.Flight(descriptor)
    assert flight.read_run(descriptor) is None
    for folder, generation in ((Path("/longer than the second") / name, 12), (Path("/") / name, 3)):
        record.run(folder, generation)
        assert flight.read_run(descriptor) == (folder, generation)
    record.step(7)
    assert flight.read(descriptor).step == 7
    os.close(descriptor)


def test_a_supervisor_writes_through_no_link(tmp_path: Path) -> None:
    run, target = tmp_path / "run", tmp_path / "target"
    run.mkdir()
    with RunLock(run):
        target.write_text(started(1, 100.0).as_line())
        (run / events.FILE).symlink_to(target)
    said: list[str] = []
    end = AttemptEnd(8, RankFailure(ExitKind.HUNG, 1, 1, HUNG))
    record_fault(run, end, after=0, say=said.append)
    assert target.read_text() == started(1, 100.0).as_line()
    assert len(said) == 1
