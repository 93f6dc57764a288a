"""One fact, one number: where the time of a run on a slow disk went, and its throughput.

They are the same wherever they are told.
"""

from __future__ import annotations

import json
import os
import re
import time
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F

import surefoot
from surefoot.cli.look import past, side_by_side
from surefoot.components.observe.console import result_rows
from surefoot.contract import events, ledger
from surefoot.contract.events import Committed, Ended, Fault
from surefoot.contract.task import Loss
from surefoot.control.diagnose import find_goodput, find_phases
from surefoot.control.diagnose.attempts import PARTS
from surefoot.core.units import format_throughput
from surefoot.train.resume.disk_trouble import SaveRhythm
from surefoot.train.run import Run, drive
from tests.control.test_attempts import ended, started, steps
from tests.train.small import Small, call, records, spec

SLOW_S = 0.05  # of an fsync, of which a save has about eight


@pytest.fixture
def slow_disk(monkeypatch: pytest.MonkeyPatch) -> dict[str, float]:
    """Gives the seconds that the fsyncs of each file took, by its name."""
    fsync, took_s = os.fsync, dict[str, float]()

    def slow(descriptor: int) -> None:
        started_s = time.perf_counter()
        time.sleep(SLOW_S)
        fsync(descriptor)
        name = Path(os.readlink(f"/proc/self/fd/{descriptor}")).name
        took_s[name] = took_s.get(name, 0.0) + time.perf_counter() - started_s

    monkeypatch.setattr(os, "fsync", slow)
    return took_s


class Pairs(Small):
    """A task whose loss counts something else than samples."""

    unit = "tokens"

    def loss(self, output: Any, batch: Any) -> Loss:
        return Loss.sum(F.cross_entropy(output, batch[1], reduction="sum"), 2 * len(batch[1]))


def train(
    folder: Path,
    *,
    background: bool = True,
    every: str = "2 steps",
    length: int = 10,
    task: Any = None,
) -> Run:
    how = spec(length, checkpoint={"every": every, "background": background})
    with Run(how, task or Small(), folder=folder, quiet=True) as run:
        drive(run)
    return run


@pytest.mark.parametrize("background", [False, True])
def test_why_and_show_tell_the_same_of_a_slow_disk(
    background: bool, slow_disk: dict[str, float], tmp_path: Path
) -> None:
    run = train(tmp_path / "a", background=background)
    every = records(run.folder)
    shown, account = find_phases(every), find_goodput(every)
    assert shown is not None
    seconds = {each.name: each.total_s for each in shown.phases}
    assert account.save_s == pytest.approx(seconds["checkpoint"])
    assert account.evaluate_s == pytest.approx(seconds["evaluation"])
    assert account.productive_s == pytest.approx(
        shown.total_s - seconds["checkpoint"] - seconds["evaluation"]
    )
    end = every[-1]
    assert isinstance(end, Ended)
    assert (
        account.total_s == pytest.approx(end.elapsed_s, rel=0.01) == account.attempts[0].elapsed_s
    )
    assert account.save_s / account.total_s > 0.5
    waited_s = sum(event.waited_s for event in every if isinstance(event, Committed))
    # the rest: the log and the ledger, which are synced before
    synced_s = slow_disk[events.FILE] + slow_disk[ledger.FILE]
    assert waited_s + synced_s == pytest.approx(account.save_s, rel=0.15)


def test_the_parts_of_an_attempt_that_was_killed_are_those_of_its_records(
    slow_disk: None, tmp_path: Path
) -> None:
    run = train(tmp_path / "a")
    log = run.folder / events.FILE
    log.write_text("".join(log.read_text().splitlines(keepends=True)[:-3]))
    every = records(run.folder)
    shown, account = find_phases(every), find_goodput(every)
    assert shown is not None
    assert account.save_s == pytest.approx(
        next(each.total_s for each in shown.phases if each.name == "checkpoint")
    )
    parts = [getattr(account, f"{name}_s") for name in PARTS]
    assert account.total_s == pytest.approx(sum(parts))
    assert past.read(run.folder).elapsed_s == account.attempts[-1].elapsed_s


def test_the_throughput_is_the_same_number_in_the_same_units_everywhere(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    run = train(tmp_path / "a", task=Pairs())
    found = past.read(run.folder)
    summary = json.loads(json.dumps(run.summary))
    assert summary["samples_per_s"] == pytest.approx(found.samples_per_s)
    assert (
        summary["items_per_s"]
        == pytest.approx(found.items_per_s)
        == pytest.approx(2 * summary["samples_per_s"])
    )
    said = format_throughput(found.samples_per_s, found.items_per_s, "tokens")
    assert re.fullmatch(r".* samples/s, .* tokens/s", said)
    assert dict(result_rows(summary))["throughput"] == said == found.throughput
    assert dict(side_by_side._outcomes([found]))["throughput"] == [said]
    capsys.readouterr()
    assert call(monkeypatch, "show", str(run.folder)) == 0
    assert said in capsys.readouterr().out


def test_the_throughput_of_a_run_that_was_resumed_is_that_of_all_its_attempts(
    tmp_path: Path,
) -> None:
    how = spec(12, checkpoint={"every": "2 steps", "background": False})
    with (
        pytest.raises(ZeroDivisionError),
        Run(how, Pairs(), folder=tmp_path / "a", quiet=True) as run,
    ):
        for report in run.steps():
            report.step // (report.step - 7)
    with Run(how, Pairs(), folder=tmp_path / "a", quiet=True) as run:
        drive(run)
    found = past.read(run.folder)
    assert found.num_attempts == 2
    assert (
        run.summary["items_per_s"]
        == pytest.approx(found.items_per_s, rel=0.05)
        == 2 * run.summary["samples_per_s"]
    )


def test_an_attached_loop_that_goes_on_counts_the_time_of_the_attempts_before(
    tmp_path: Path,
) -> None:
    model = torch.nn.Linear(4, 1)
    for passes in (1, 2):
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        run = surefoot.attach(
            model=model,
            optimizer=optimizer,
            data=[torch.ones(2, 4)] * 10,
            folder=tmp_path / "a",
            save="5 steps",
        )
        for _ in range(run.first_pass, passes):
            for batch in run.batches():
                time.sleep(0.01)
                run.step_done(model(batch).square().mean())
        run.save()
        run.session.end("stopped")
    end = records(tmp_path / "a")[-1]
    assert isinstance(end, Ended)
    assert end.num_samples == 40
    assert end.samples_per_s is not None
    # ten steps of this attempt took as long as ten of the one before
    assert end.samples_per_s <= 2 / 0.01


# ---- a save that takes longer than its rhythm


@pytest.mark.quick("1 step")
@pytest.mark.parametrize("save", ["1 step", "0.01 s"])
def test_saves_of_an_attached_loop_that_take_longer_than_the_time_between_them_are_told_once(
    save: str, slow_disk: None, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    model = torch.nn.Linear(4, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    data = [torch.ones(2, 4)] * (12 if save == "1 step" else 60)
    loop = surefoot.attach(
        model=model, optimizer=optimizer, data=data, folder=tmp_path / "a", save=save
    )
    for batch in loop.batches():
        time.sleep(0.02 if save.endswith(" s") else 0)
        loop.step_done(model(batch).square().mean())
    loop.close()
    told = [event for event in records(tmp_path / "a") if isinstance(event, Fault)]
    assert [event.fault for event in told] == ["slow-save"]
    assert capsys.readouterr().err.count("a larger save= costs less") == 1


@pytest.mark.quick("True-1 step")
@pytest.mark.parametrize(
    ("background", "every"), [(False, "1 step"), (True, "1 step"), (True, "0.05 s")]
)
def test_saves_that_take_longer_than_the_time_between_them_are_told_once(
    background: bool,
    every: str,
    slow_disk: None,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    how = spec(
        12 if every == "1 step" else 36,
        checkpoint={"every": every, "background": background},
        evaluate={"every": "1000 steps"},
    )
    with Run(how, Small(), folder=tmp_path / "a", quiet=True) as run:
        for _ in run.steps():
            if every.endswith(" s"):
                time.sleep(0.1)
    told = [event for event in records(run.folder) if isinstance(event, Fault)]
    assert [event.fault for event in told] == ["slow-save"]
    assert re.search(
        r"the save after step [\d]+ took .*, but the next one was due after", told[0].detail
    )
    assert "checkpoint.every" in told[0].action
    assert capsys.readouterr().err.count("waits for the disk") == 1


def test_saves_that_are_done_in_time_or_were_asked_for_are_not_told() -> None:
    pace = SaveRhythm(None)
    for step in range(100):
        pace.compare(step, took_s=1.0, period_s=1.5)
        pace.compare(step, took_s=9.0, period_s=None)
    assert pace.take() is None
    pace.start_training_time(is_regular=False)
    assert pace.measure(is_regular=True) is None
    pace.start_training_time(is_regular=True)
    assert pace.measure(is_regular=False) is None
    for step in range(4):
        pace.compare(step, took_s=2.0, period_s=1.5)
    assert pace.take() is not None
    assert pace.take() is None


# ---- a clock that is set back


def test_a_clock_that_was_set_back_gives_no_negative_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    year_s = 315_000_000.0
    within = [started(1, year_s), steps(1, 110.0, 10, 9.0)]
    between = [
        started(1, year_s),
        steps(1, year_s + 10, 10, 9.0),
        started(2, 100.0, 11),
        steps(2, 110.0, 20, 9.0),
        ended(2, 111.0, 20),
    ]
    for name, log in (("within", within), ("between", between)):
        (tmp_path / name).mkdir()
        (tmp_path / name / events.FILE).write_text("".join(event.as_line() for event in log))
        for verb in ("why", "show"):
            assert call(monkeypatch, verb, str(tmp_path / name)) == 0
            assert not re.search(r"-\d[\d.,]* (h|min|s|ms)\b", capsys.readouterr().out)
        assert call(monkeypatch, "why", str(tmp_path / name)) == 0
        assert "n/a (the clock was set back)" in capsys.readouterr().out
        assert call(monkeypatch, "why", str(tmp_path / name), "--json") == 0
        row = json.loads(capsys.readouterr().out)
        assert all(row[f"{part}_s"] >= 0 for part in PARTS)
    assert (row["down_s"], row["total_s"]) == (None, 21.0)
    assert find_goodput(within).attempts[0].elapsed_s is None
    assert find_goodput(between).parts["down and starting"] is None
