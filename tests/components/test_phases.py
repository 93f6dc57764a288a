"""Tests of the clock that is switched.

What it counts, why a step stood out, and how a device that works beside the host is timed.
"""

from __future__ import annotations

import gc
import sys
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import nn

from surefoot.components.profiler.phases.clock import (
    BACKWARD,
    CHECKPOINT,
    DATA,
    EVALUATION,
    FORWARD,
    LOGGING,
    ON_DEVICE,
    OPTIMIZER,
    OTHER,
    PhaseClock,
    count_compiled,
)
from surefoot.components.profiler.phases.device_line import DeviceLine
from surefoot.components.profiler.phases.tally import MAX_SAMPLED, MAX_STEPS, Tally
from surefoot.contract.events import PHASES
from surefoot.contract.state import Timing

MS = 1_000_000
CPU = torch.device("cpu")


def test_the_phases_tile_the_time_between_the_first_switch_and_the_last_to_the_nanosecond() -> None:
    clock = PhaseClock(CPU)
    began_ns = clock.switch(DATA)
    before = clock._tally.spent_ns[OTHER]
    for phase in (FORWARD, BACKWARD, FORWARD, OPTIMIZER, LOGGING):
        clock.switch(phase)
    with clock.within(EVALUATION), clock.within(CHECKPOINT):
        pass
    ended_ns = clock.switch(OTHER)
    assert sum(clock._tally.spent_ns) - before == ended_ns - began_ns
    assert set(clock.take().phases) == {
        "data",
        "forward",
        "backward",
        "optimizer",
        "logging",
        "evaluation",
        "checkpoint",
        "other",
    }


def test_a_phase_inside_another_ends_with_its_block_and_the_other_goes_on_whatever_happens() -> (
    None
):
    clock = PhaseClock(CPU)
    clock.switch(EVALUATION)
    with pytest.raises(ZeroDivisionError), clock.within(LOGGING):
        raise ZeroDivisionError
    assert clock._phase == EVALUATION


@dataclass
class Steps:
    """Steps put into a tally by hand: so many milliseconds a phase."""

    now_ns: int = 0
    collecting_ns: int = 0
    num_compiled: int = 5  # in this process, before
    number: int = 0

    def __post_init__(self) -> None:
        self.tally = Tally(len(PHASES), lambda: self.num_compiled)

    def do(self, **milliseconds: float) -> None:
        for name, spent in milliseconds.items():
            self.tally.spent_ns[PHASES.index(name)] += round(spent * MS)
            self.now_ns += round(spent * MS)
        self.number += 1
        self.tally.end_step(self.number, self.now_ns, self.collecting_ns)

    def take(self) -> Timing:
        return self.tally.take()

    def usual(self, count: int = 10) -> None:
        for _ in range(count):
            self.do(data=1, forward=4, backward=4, optimizer=1)


def cause_of(steps: Steps) -> list[tuple[int, str]]:
    return [(row["step"], row["cause"]) for row in steps.take().outliers]


@pytest.mark.parametrize(
    "phase", ["data", "forward", "checkpoint", "evaluation", "logging", "other"]
)
def test_a_slow_step_is_told_with_the_phase_that_grew(phase: str) -> None:
    steps = Steps()
    steps.usual()
    assert cause_of(steps) == []
    steps.usual(3)
    steps.do(**({"data": 1, "forward": 4, "backward": 4, "optimizer": 1} | {phase: 60}))
    steps.usual(3)
    assert cause_of(steps) == [(14, phase)]


def test_a_slow_step_in_which_garbage_was_collected_or_something_compiled_is_told_so() -> None:
    steps = Steps()
    steps.usual()
    steps.take()
    steps.collecting_ns += 30 * MS
    steps.do(forward=50)
    steps.collecting_ns += 5 * MS  # not what made it slow
    steps.do(forward=50)
    assert cause_of(steps) == [(11, "garbage collection"), (12, "forward")]
    steps.num_compiled += 1
    steps.do(forward=50)
    steps.do(data=50)
    assert cause_of(steps) == [(13, "compile"), (14, "data")]
    steps.do(forward=50)
    assert cause_of(steps) == [(15, "forward")]


def test_a_step_that_is_longer_by_less_than_a_millisecond_is_noise() -> None:
    steps = Steps()
    for _ in range(10):
        steps.do(forward=0.1)
    steps.take()
    steps.do(forward=1)
    steps.do(forward=1.2)
    assert cause_of(steps) == [(12, "forward")]


def test_steps_that_stay_longer_are_the_usual_ones_after_a_window() -> None:
    steps = Steps()
    for _ in range(5):
        steps.usual()
        assert cause_of(steps) == []
    for _ in range(10):
        steps.do(forward=100)
    assert len(cause_of(steps)) == 10
    for _ in range(9):
        steps.do(forward=100)
    steps.do(data=500)
    assert cause_of(steps) == [(70, "data")]
    assert steps.tally.total().step_s.count(0.1) == 19


@pytest.mark.parametrize(
    ("first", "num_compiled", "told"), [(200, 0, "first step"), (200, 1, "compile"), (12, 0, None)]
)
def test_the_first_step_is_judged_once_it_is_known_what_is_usual(
    first: float, num_compiled: int, told: str | None
) -> None:
    steps = Steps()
    steps.num_compiled += num_compiled
    steps.do(forward=first)
    assert cause_of(steps) == []
    steps.usual()
    assert cause_of(steps) == ([(1, told)] if told else [])


def test_of_a_long_window_and_of_a_long_run_so_many_steps_are_kept_and_evenly() -> None:
    steps = Steps()
    for _ in range(3 * MAX_STEPS):
        steps.do(forward=1)
    assert len(steps.take().step_s) == MAX_STEPS
    for number in range(MAX_SAMPLED * 3):
        steps.do(forward=1 + number % 7)
        if number % 10 == 9:
            steps.take()
    kept = steps.tally.total().step_s
    assert MAX_SAMPLED / 2 < len(kept) <= MAX_SAMPLED
    for length in range(1, 8):
        assert kept[2000:].count(length / 1000) == pytest.approx((len(kept) - 2000) / 7, rel=0.1)


def test_collections_are_heard_until_they_are_not_listened_to_any_more() -> None:
    clock = PhaseClock(CPU)
    before = list(gc.callbacks)
    stop = clock.listen_to_collections()
    gc.collect()
    heard_ns = clock._collecting_ns
    stop()
    stop()
    gc.collect()
    assert 0 < heard_ns == clock._collecting_ns
    assert gc.callbacks == before


def test_what_is_compiled_is_counted_and_without_the_private_counter_nothing_is(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    before = count_compiled()
    compiled: Any = torch.compile(nn.Linear(3, 2), backend="eager")
    compiled(torch.ones(2, 3))
    compiled(torch.ones(2, 3))
    assert count_compiled() == before + 1
    monkeypatch.delattr(sys.modules["torch._dynamo.utils"], "counters")
    assert count_compiled() == 0


# ---- a device that works beside the host


class Device:
    """One stream: work is done in order, and a mark when all before it is done."""

    def __init__(self) -> None:
        self.now_ms = self.free_ms = 0.0

    def host(self, milliseconds: float) -> None:
        self.now_ms += milliseconds

    def launch(self, milliseconds: float) -> None:
        self.free_ms = max(self.free_ms, self.now_ms) + milliseconds

    def make_event(self) -> Event:
        return Event(self)


class Event:
    def __init__(self, device: Device) -> None:
        self._device, self.at_ms = device, 0.0

    def record(self) -> None:
        self.at_ms = max(self._device.now_ms, self._device.free_ms)

    def synchronize(self) -> None:
        self._device.now_ms = max(self._device.now_ms, self.at_ms)

    def elapsed_time(self, later: Event) -> float:
        return later.at_ms - self.at_ms


class Line:
    """A device line driven as the clock drives it, by the simulated host's time."""

    def __init__(self) -> None:
        self.device = Device()
        self.line = DeviceLine(self.device.make_event, ON_DEVICE)
        self.tally, self.phase, self.since_ms, self.number = (
            Tally(len(PHASES), lambda: 0),
            OTHER,
            0.0,
            0,
        )
        self.line.start(0)

    def switch(self, phase: int, *, host: float = 0.0, device: float = 0.0) -> None:
        """Begin `phase`, in which the host spends so many milliseconds and launches so many."""
        self.line.switch(self.phase, phase, round((self.device.now_ms - self.since_ms) * MS))
        self.phase, self.since_ms = phase, self.device.now_ms
        self.device.launch(device)
        self.device.host(host)

    def step(
        self,
        *,
        data: float = 0.0,
        forward: float = 0.0,
        backward: float = 0.0,
        optimizer: float = 0.0,
    ) -> None:
        self.switch(DATA, host=data)
        self.switch(FORWARD, host=0.1, device=forward)
        self.switch(BACKWARD, host=0.1, device=backward)
        self.switch(OPTIMIZER, host=0.1, device=optimizer)
        self.switch(OTHER)
        self.number += 1
        self.line.end_step(self.number, 0)

    def read(self) -> dict[str, float]:
        self.switch(self.phase)
        self.line.wait()
        self.switch(self.phase)
        self.line.read(self.tally, round(self.device.now_ms * MS))
        spent = {name: ns / MS for name, ns in zip(PHASES, self.tally.spent_ns, strict=True) if ns}
        assert sum(spent.values()) == pytest.approx(self.device.now_ms)
        return spent


def test_a_kernel_that_outlasts_its_launch_counts_where_it_was_launched() -> None:
    line = Line()
    line.step(forward=50, backward=100, optimizer=5)
    line.switch(LOGGING, host=1)
    # the host's logging was hidden behind it
    assert line.read() == pytest.approx({"forward": 50, "backward": 100, "optimizer": 5})


def test_reading_data_counts_only_as_far_as_the_device_stood_still_for_it() -> None:
    line = Line()
    line.step(data=3, forward=10, backward=10, optimizer=10)
    # 30 ms of work were waiting, 0.3 of them passed while launching
    line.step(data=50, forward=10, backward=10, optimizer=10)
    spent = line.read()
    assert spent["data"] == pytest.approx(3 + 50 - 29.7)
    assert spent["forward"] == pytest.approx(20)
    timing = line.tally.take()
    assert timing.step_s == pytest.approx((0.033, 0.0503))


def test_a_device_that_waits_for_launches_counts_them_where_they_are() -> None:
    line = Line()
    line.step(data=3)
    assert line.read() == pytest.approx(
        {"data": 3, "forward": 0.1, "backward": 0.1, "optimizer": 0.1}
    )


def test_work_that_the_reader_launches_between_two_steps_counts_as_the_readers() -> None:
    line = Line()
    line.step(forward=1)
    line.switch(OTHER, host=0.5, device=40)
    line.step(forward=1)
    assert line.read()["other"] == pytest.approx(40)


def test_marks_are_used_again_and_windows_follow_each_other_without_a_gap() -> None:
    line = Line()
    for _ in range(5):
        line.step(data=1, forward=2, backward=2, optimizer=1)
        line.read()
    assert len(line.line._events) == 6  # one at the window's begin, four a step, one at its end
    line.switch(FORWARD, host=1, device=7)  # a window that ends inside a phase
    assert line.read()["forward"] == pytest.approx(5 * 2 + 7)
    line.switch(OTHER, host=2)
    line.read()
