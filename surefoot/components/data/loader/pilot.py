"""Search for the smallest number of workers with which steps do not wait for data.

The search takes place before a run or during it, and starts with 0 workers. If steps wait for data
more than 2 % of the time, the next larger number is tried, as long as steps become shorter. The
best number is used. The samples are the same with any number of workers, so that the search does
not change results.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

# limits of the search: more workers cost more memory than they gain; few cores may wait for a slow
# disk
MAX_WORKERS, MIN_TRIED = 8, 4
ENOUGH = 0.02  # share of a step spent waiting that needs no further worker
GAIN = 0.03  # relative to the step: a smaller gain may be noise
SKIPPED_STEPS = 3  # after a change: workers start, caches fill
MIN_STEPS, MIN_S = 10, 1.0  # measured for each number of workers
PAUSES = 5.0  # times the median step: a longer step contains other work
STARVES = 0.2  # share of the time spent waiting that is reported
STARVES_AFTER_STEPS, STARVES_AFTER_S = 50, 5.0


@dataclass(frozen=True)
class WorkerTiming:
    """Timing of steps with `workers` workers.

    `step_s` is the median time of a step, and `waiting` the share of the time spent waiting for
    data.
    """

    workers: int
    step_s: float
    waiting: float

    def describe_waiting(self, costs: Mapping[str, float], num_samples: int) -> str:
        """Return a text about how long steps wait for data, and what reading takes.

        `costs` has the seconds of each part of reading `num_samples` samples.
        """
        what = (
            f"steps wait for data {self.waiting:.0%} of their time, "
            f"{self.waiting * self.step_s * 1e3:.3g} ms of {self.step_s * 1e3:.3g} ms, "
            f"with {self.workers} worker{'s' * (self.workers != 1)}"
        )
        total_s = sum(costs.values())
        if not total_s:
            return what
        causes = ", ".join(
            f"{name} {cost / total_s:.0%}"
            for name, cost in sorted(costs.items(), key=lambda each: -each[1])
        )
        return f"{what}; reading {num_samples:,} samples takes {total_s * 1e3:.3g} ms: {causes}"


class StepTimings:
    """Recorded times of steps, without the first 3, in which workers start and caches fill."""

    def __init__(self) -> None:
        self._skipped = SKIPPED_STEPS
        self._steps: list[tuple[float, float]] = []
        self._total_s = 0.0

    def add(self, step_s: float, waiting_s: float) -> None:
        if self._skipped:
            self._skipped -= 1
        else:
            self._steps.append((step_s, waiting_s))
            self._total_s += step_s

    def is_enough(self, steps: int, seconds: float) -> bool:
        return len(self._steps) >= steps and self._total_s >= seconds

    def seen(self, workers: int) -> WorkerTiming:
        middle_s = statistics.median(step for step, _ in self._steps)
        # no evaluation, no checkpoint
        usual = [each for each in self._steps if each[0] <= PAUSES * middle_s]
        total_s, waiting_s = map(sum, zip(*usual, strict=True))
        return WorkerTiming(workers, middle_s, waiting_s / total_s if total_s else 0.0)


def find_most(cores: int) -> int:
    """Return the largest number of workers that is worth trying with `cores` CPU cores."""
    return min(MAX_WORKERS, max(cores, MIN_TRIED))


def numbers(most: int) -> Iterator[int]:
    """Yield the numbers of workers to try: 0, 1, 2, 4, and so on, up to `most`."""
    yield 0
    number = 1
    while number < most:
        yield number
        number *= 2
    if most:
        yield most


class WorkerTuner:
    """Search for the best number of workers.

    `workers` is the number to measure next or, when `is_done` is True, the best number. A run calls
    `add` after each step; a benchmark calls `record` with a measurement of many steps.
    """

    def __init__(self, most: int) -> None:
        self._left = list(numbers(most))
        self.workers = self._left.pop(0)
        self.tried: list[WorkerTiming] = []
        self.is_done = False
        self._watch = StepTimings()

    def add(self, step_s: float, waiting_s: float) -> int | None:
        """Record a step; return the new number of workers to use, or None if it does not change."""
        self._watch.add(step_s, waiting_s)
        if self.is_done or not self._watch.is_enough(MIN_STEPS, MIN_S):
            return None
        seen = self._watch.seen(self.workers)
        self._watch = StepTimings()
        return self.record(seen)

    def record(self, seen: WorkerTiming) -> int | None:
        """Record a measurement with `workers` workers; return what `add` returns."""
        shortest_s = min((each.step_s for each in self.tried), default=math.inf)
        self.tried.append(seen)
        # a single worker may gain little even if two read twice as fast
        brings = seen.step_s < shortest_s * (1 - GAIN) or self.workers == 1
        if brings and seen.waiting > ENOUGH and self._left:
            self.workers = self._left.pop(0)
            return self.workers
        self.is_done = True
        enough_s = min(each.step_s for each in self.tried) * (1 + GAIN)
        before, self.workers = (
            self.workers,
            next(each.workers for each in self.tried if each.step_s <= enough_s),
        )
        return self.workers if self.workers != before else None

    def describe(self) -> str:
        """Return a text with the result and the measurements."""
        tried = "; ".join(
            f"{each.workers}: {each.step_s * 1e3:.3g} ms a step, {each.waiting:.0%} waiting"
            for each in self.tried
        )
        return f"{self.workers} worker{'s' * (self.workers != 1)} for the data ({tried})"
