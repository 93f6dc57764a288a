"""Tests of `workers = "auto"`: how many workers a run gets, and the cause of a wait."""

from __future__ import annotations

import re
from typing import Any

import pytest

from surefoot.components.data.loader import crew
from surefoot.components.data.loader.batches import LoaderNotice, LoaderSettings
from surefoot.components.data.loader.pilot import WorkerTuner
from tests.components.loading import Counting, Numbers, Unsafe
from tests.components.test_loader import STEPS, expected, loader, nothing_stays, rows, same

__all__ = ["expected", "nothing_stays"]  # fixtures


def test_workers_are_threads_where_two_of_them_are_faster(
    expected: list[list[Any]], monkeypatch: pytest.MonkeyPatch
) -> None:
    # the fastest of many: one in a row of them is not held up by what else runs
    monkeypatch.setattr(crew, "ROUNDS", 12)
    made = {
        each: loader(each, LoaderSettings(workers=1)).kind
        for each in (Numbers(0.1), Counting(), Unsafe(0.1))
    }
    assert list(made.values()) == ["thread", "process", "process"]
    assert loader(Unsafe(), LoaderSettings(workers=1, kind="thread")).kind == "thread"


class Steps:
    """A run whose reading takes `read_s` of one core, and its computing `compute_s`."""

    def __init__(self, read_s: float, compute_s: float) -> None:
        self.read_s, self.compute_s = read_s, compute_s

    def times(self, workers: int) -> tuple[float, float]:
        if not workers:
            return self.read_s + self.compute_s, self.read_s
        step_s = max(self.compute_s, self.read_s / workers)
        return step_s, step_s - self.compute_s


@pytest.mark.parametrize(
    ("read_s", "compute_s", "most", "found"),
    [
        (0.001, 0.2, 8, 0),  # it hardly waits: no worker is worth it
        (0.05, 0.2, 8, 1),  # one hides all
        (0.3, 0.2, 8, 2),
        (0.7, 0.2, 8, 4),
        (5.0, 0.2, 8, 8),
        (5.0, 0.2, 3, 3),
        (0.2, 0.2, 1, 1),
        (0.5, 1e-4, 8, 8),
        (0.2, 0.2, 0, 0),
    ],
)
def test_the_cheapest_number_of_workers_is_found_with_which_no_step_waits(
    read_s: float, compute_s: float, most: int, found: int
) -> None:
    pilot, run = WorkerTuner(most), Steps(read_s, compute_s)
    for _ in range(500):
        pilot.add(*run.times(pilot.workers))
    assert pilot.is_done
    assert pilot.workers == found
    assert f"{found} worker{'s' * (found != 1)} for the data" in pilot.describe()


def test_workers_that_bring_nothing_are_let_go() -> None:
    """Where steps and workers want the same cores."""
    pilot = WorkerTuner(8)
    for _ in range(500):
        pilot.add(0.1 if not pilot.workers else 0.12, 0.03)
    assert pilot.is_done
    assert pilot.workers == 0


def test_a_run_that_waits_is_told_so_once_with_the_cause(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("surefoot.components.data.loader.loader.STARVES_AFTER_S", 0.05)
    monkeypatch.setattr("surefoot.components.data.loader.loader.STARVES_AFTER_STEPS", 5)
    told = list[LoaderNotice]()
    reading = loader(Numbers(0.05))  # far longer than a busy machine makes what else a step does
    reading.tell = told.append
    for number in range(1, STEPS + 1):
        reading.take(number)
    assert [each.kind for each in told] == ["starving"]
    assert "% of their time" in told[0].what
    read, augment = (int(each) for each in re.findall(r"(?:read|augment) (\d+)%", told[0].what))
    assert read > 2 * augment
    assert "tune-loader" in told[0].then


def test_workers_are_found_while_a_run_goes_on(
    monkeypatch: pytest.MonkeyPatch, expected: list[list[Any]]
) -> None:
    monkeypatch.setattr("surefoot.components.data.loader.pilot.MIN_S", 0.0)
    monkeypatch.setattr("surefoot.components.data.loader.pilot.MIN_STEPS", 3)
    monkeypatch.setattr("surefoot.components.data.loader.pilot.SKIPPED_STEPS", 1)
    told = list[LoaderNotice]()
    # far longer than a busy machine makes a step
    reading = loader(Numbers(0.02), LoaderSettings(most=4))
    reading.tell = told.append
    assert all(
        same(rows(reading.take(number)), expected[number - 1]) for number in range(1, STEPS + 1)
    )
    found = reading.settings.workers
    reading.close()
    assert [each.kind for each in told] == ["tuned"]
    # which number is best depends on the machine and its load, and no batch does
    tried = {int(workers): float(ms) for workers, ms in re.findall(r"(\d): (\S+) ms", told[0].what)}
    assert list(tried) == [0, 1, 2, 4][: len(tried)]
    assert len(tried) >= 2  # steps waited for data without a worker
    assert tried[found] <= 1.04 * min(tried.values())  # 3 %, and the digits that are printed
