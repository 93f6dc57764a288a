"""Time of an attempt by phase, such as the forward pass, and statistics of its step times."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean, quantiles, stdev
from typing import Any

from surefoot.contract.events import PHASES, Ended, Event, Started, Step

MAX_OUTLIERS = 10


@dataclass(frozen=True, kw_only=True)
class Spread:
    """Statistics of seconds per step: mean, standard deviation, minimum, percentiles, maximum."""

    mean_s: float
    sd_s: float | None
    min_s: float
    p50_s: float
    p95_s: float
    p99_s: float
    max_s: float


@dataclass(frozen=True, kw_only=True)
class Phase:
    """Time of one phase of training, such as the forward pass, in an attempt.

    `share` is relative to the sum of all phases. `a_step` has statistics of the seconds per step.
    They are computed from the means of the records, each of which covers several steps.
    """

    name: str
    total_s: float
    share: float
    a_step: Spread | None


@dataclass(frozen=True, kw_only=True)
class Phases:
    """Time of an attempt by phase.

    `total_s` is the sum of all phases. `wall_s` is the duration by an independent clock; None if
    the attempt recorded no end. `step` has statistics of the step times, `outliers` the slowest
    steps, and `causes` the number of slow steps by cause.
    """

    phases: tuple[Phase, ...]
    total_s: float
    wall_s: float | None
    num_steps: int
    step: Spread | None
    outliers: tuple[Mapping[str, Any], ...]
    causes: Mapping[str, int]

    @property
    def coverage(self) -> float | None:
        """Sum of all phases divided by the wall time; None if the wall time is unknown."""
        return self.total_s / self.wall_s if self.wall_s else None

    def as_row(self) -> dict[str, Any]:
        return {
            "total_s": self.total_s,
            "wall_s": self.wall_s,
            "coverage": self.coverage,
            "num_steps": self.num_steps,
            "phases": {
                each.name: {
                    "total_s": each.total_s,
                    "share": each.share,
                    "a_step": _row(each.a_step),
                }
                for each in self.phases
            },
            "step": _row(self.step),
            "outliers": list(self.outliers),
            "causes": dict(self.causes),
        }


def newest_attempt(events: Iterable[Event]) -> list[Event]:
    """Return the records of the newest attempt (start or resume of the run), in their order.

    If `events` has no `Started` record, return all of them.
    """
    attempt: list[Event] = []
    for event in events:
        if isinstance(event, Started):
            attempt.clear()
        attempt.append(event)
    return attempt


def sum_phases(attempt: Sequence[Event]) -> dict[str, float]:
    """Return the seconds of each phase of one attempt.

    They cover the whole attempt if its end is recorded, otherwise the time until its last `Step`
    record. The result is empty if the records have no phases, as in logs of older versions. Every
    report of the time by phase uses this function.
    """
    steps = [event for event in attempt if isinstance(event, Step) and event.phases]
    # the last evaluation and checkpoint come after the last record of steps
    whole = _phases_of_attempt(attempt)
    sums = {
        name: number_of(whole.get(name))
        if whole
        else sum(number_of(event.phases.get(name)) for event in steps)
        for name in PHASES
    }
    return sums if sum(sums.values()) > 0 else {}


def _phases_of_attempt(attempt: Sequence[Event]) -> Mapping[str, Any]:
    """Return the phases of a whole attempt from its `Ended` record; empty without one."""
    ended = next((event for event in attempt if isinstance(event, Ended)), None)
    phases = ended.summary.get("phases") if ended is not None else None
    return phases if isinstance(phases, Mapping) else {}


def find_phases(events: Iterable[Event]) -> Phases | None:
    """Return the time by phase of the newest attempt of a run.

    Return None if its records have no phases, as in logs of older versions. `events` must be in the
    order in which they were written.
    """
    attempt = newest_attempt(events)
    steps = [event for event in attempt if isinstance(event, Step) and event.phases]
    ended = next((event for event in attempt if isinstance(event, Ended)), None)
    sums = sum_phases(attempt)
    if not sums:
        return None
    total_s = sum(sums.values())
    every = [number_of(each) for event in steps for each in event.step_s]
    outliers = [_outlier(row) for event in steps for row in event.outliers]
    told = tuple(
        Phase(
            name=name,
            total_s=seconds,
            share=seconds / total_s,
            a_step=_spread(_seconds_per_step(steps, name)),
        )
        for name, seconds in sums.items()
        if seconds
    )
    return Phases(
        phases=told,
        total_s=total_s,
        wall_s=ended.elapsed_s if ended is not None and _phases_of_attempt(attempt) else None,
        num_steps=sum(event.num_steps for event in steps),
        step=_spread(every),
        outliers=tuple(sorted(outliers, key=lambda row: -row["elapsed_s"])[:MAX_OUTLIERS]),
        causes=dict(Counter(row["cause"] for row in outliers).most_common()),
    )


def _seconds_per_step(steps: Sequence[Step], name: str) -> list[float]:
    return [
        number_of(event.phases.get(name)) / event.num_steps
        for event in steps
        if event.num_steps > 0
    ]


def _spread(values: Sequence[float]) -> Spread | None:
    if not values:
        return None
    below = quantiles(values, n=100, method="inclusive") if len(values) > 1 else [values[0]] * 99
    return Spread(
        mean_s=fmean(values),
        sd_s=stdev(values) if len(values) > 1 else None,
        min_s=min(values),
        p50_s=below[49],
        p95_s=below[94],
        p99_s=below[98],
        max_s=max(values),
    )


def _row(spread: Spread | None) -> dict[str, float | None] | None:
    return None if spread is None else dict(vars(spread))


def _outlier(row: Mapping[str, Any]) -> dict[str, Any]:
    return {
        "step": int(number_of(row.get("step"))),
        "elapsed_s": number_of(row.get("elapsed_s")),
        "cause": str(row.get("cause", "")),
    }


def number_of(value: Any) -> float:
    """Convert a value from an untrusted file to a positive float; return 0 for anything else."""
    is_number = isinstance(value, int | float) and not isinstance(value, bool) and 0 < value < 1e300
    return float(value) if is_number else 0.0
