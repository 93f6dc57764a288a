"""Goodput of a run: the share of its time that was productive, and where the rest went.

An *attempt* is one start or resume of the run. Every second from the first record of the run to the
last belongs to one part of a `Goodput`. Steps after the checkpoint from which the next attempt
resumed are trained again; their time is *rework*. The time between the last record of an attempt
and the first record of the next attempt is *down* time, which includes the start-up.

Within an attempt, the times are the sums of its phases (`sum_phases`), which a monotonic clock
measured. `surefoot why` and `surefoot show` therefore print the same shares. Between attempts only
the wall clock is available: if it was set back, the down time is unknown (None).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from statistics import fmean, median

from surefoot.contract.events import (
    CLOSED,
    PHASES,
    Committed,
    Ended,
    Evaluated,
    Event,
    Started,
    Step,
)
from surefoot.control.diagnose.causes import find_fault
from surefoot.control.diagnose.health import DEAD, RUNNING, STUCK, UNKNOWN_STATE, Health
from surefoot.control.diagnose.phases import number_of, sum_phases

KILLED = "killed"
NO_END = (
    "no end was recorded, as after SIGKILL (which the system sends when it lacks memory) or a "
    "loss of power"
)
# outcomes of a newest attempt that has not failed
NO_FAILURE = (*CLOSED, "interrupted", RUNNING, STUCK, UNKNOWN_STATE)
PARTS = ("productive", "evaluate", "save", "rework", "other")
SET_BACK = "n/a (the clock was set back)"


@dataclass(frozen=True, kw_only=True)
class Attempt:
    """Attempt of a run (one start or resume): its steps, and how it ended.

    `num_redone` is the number of its steps that the next attempt repeated. `outcome` is the
    recorded end. If there is none, `outcome` is the fault that the supervisor recorded, such as
    "hang". Without a fault either, it is "killed", or for the newest attempt possibly "running",
    "stuck" or "unknown".

    An attempt without a recorded end may have trained up to `num_unrecorded` steps after its last
    record, which the next attempt repeated too. `began_s` and `last_s` are the Unix times of its
    first and last record.
    """

    generation: int
    first_step: int
    last_step: int
    outcome: str
    cause: str
    num_redone: int
    num_unrecorded: int
    began_s: float
    last_s: float
    elapsed_s: float | None


@dataclass(frozen=True, kw_only=True)
class Goodput:
    """Seconds that a run spent on each activity over all its attempts; the sum is `total_s`.

    `save_s` is the time for which training waited for checkpoints. `median_save_s` and
    `mean_save_s` are this time per checkpoint; `median_write_s` and `mean_write_s` are the time
    until a checkpoint was on disk. `down_s` is None, and not included in `total_s`, if the wall
    clock was set back between two attempts.
    """

    attempts: tuple[Attempt, ...]
    total_s: float
    productive_s: float
    evaluate_s: float
    save_s: float
    rework_s: float
    down_s: float | None
    other_s: float
    median_save_s: float | None
    median_write_s: float | None
    mean_save_s: float | None
    mean_write_s: float | None

    @property
    def parts(self) -> dict[str, float | None]:
        """Seconds of each part, by its name in reports; None for a part that is unknown."""
        return {
            "productive": self.productive_s,
            "evaluation": self.evaluate_s,
            "waiting for saves": self.save_s,
            "done again": self.rework_s,
            "down and starting": self.down_s,
            "other": self.other_s,
        }

    @property
    def share(self) -> float | None:
        """Productive time divided by total time; None if the total time is 0."""
        return self.productive_s / self.total_s if self.total_s > 0 else None

    @property
    def num_failures(self) -> int:
        """Number of attempts that failed or that were followed by a further attempt."""
        has_failed = bool(self.attempts) and self.attempts[-1].outcome not in NO_FAILURE
        return max(0, len(self.attempts) - 1) + has_failed

    @property
    def between_failures_s(self) -> float | None:
        """Mean time between failures in seconds, without down time; None without a failure."""
        return (
            (self.total_s - (self.down_s or 0.0)) / self.num_failures if self.num_failures else None
        )


def find_goodput(events: Iterable[Event], health: Health | None = None) -> Goodput:
    """Compute the goodput of a run from all its records.

    Args:
        events: records in the order in which they were written, including those of steps that a
            later attempt repeated.
        health: state of the run; without it, an attempt that recorded no end counts as killed.
    """
    groups: list[list[Event]] = []
    for event in events:
        if isinstance(event, Started):
            groups.append([event])
        elif groups:
            groups[-1].append(event)
    nexts = [*(_first_step(group) for group in groups[1:]), None]
    accounts = [_account(group, after) for group, after in zip(groups, nexts, strict=True)]
    attempts = [_attempt(*each) for each in zip(groups, nexts, accounts, strict=True)]
    if health is not None and attempts and health.state != DEAD:
        last = attempts[-1]
        # else the process that holds the lock is the next attempt, which has no record yet
        if last.outcome == KILLED and health.began_s == last.began_s:
            attempts[-1] = replace(last, outcome=health.state, cause=health.words)
    downs = [late.began_s - early.last_s for early, late in pairwise(attempts)]
    down_s = None if any(each < 0 for each in downs) else sum(downs)
    sums = {name: sum(each.get(name, 0.0) for each in accounts) for name in PARTS}
    saves = [event for group in groups for event in group if isinstance(event, Committed)]
    return Goodput(
        attempts=tuple(attempts),
        total_s=sum(sums.values()) + (down_s or 0.0),
        productive_s=sums["productive"],
        evaluate_s=sums["evaluate"],
        save_s=sums["save"],
        rework_s=sums["rework"],
        down_s=down_s,
        other_s=sums["other"],
        median_save_s=median([each.waited_s for each in saves]) if saves else None,
        median_write_s=median([each.elapsed_s for each in saves]) if saves else None,
        mean_save_s=fmean([each.waited_s for each in saves]) if saves else None,
        mean_write_s=fmean([each.elapsed_s for each in saves]) if saves else None,
    )


def _account(group: Sequence[Event], after: int | None) -> dict[str, float]:
    """Return the seconds of an attempt for each of `PARTS`; empty if they are unknown.

    Args:
        group: records of the attempt.
        after: first step of the next attempt, which repeats the steps from there; None for the
            newest attempt.
    """
    spent = sum_phases(group)
    if not spent:
        return _account_without_phases(group, after)
    windows = [event for event in group if isinstance(event, Step) and event.phases]
    rework = dict.fromkeys(PHASES, 0.0)
    for event in windows:
        if _is_redone(event, after):
            rework = {name: rework[name] + number_of(event.phases.get(name)) for name in PHASES}
    known = {name: sum(number_of(event.phases.get(name)) for event in windows) for name in PHASES}
    if windows and _is_redone(windows[-1], after):
        # the time after the last record of steps belongs to that record
        rework = {name: rework[name] + max(0.0, spent[name] - known[name]) for name in PHASES}
    kept = {name: max(0.0, spent[name] - rework[name]) for name in PHASES}
    ended = next((event for event in group if isinstance(event, Ended)), None)
    late_s = {"evaluate": 0.0, "other": 0.0, "rework": 0.0}
    if ended is not None:
        late_s["other"] = max(0.0, ended.elapsed_s - sum(spent.values()))
    elif windows:
        late_s = _after_last_window(group, windows[-1], after)
    return {
        "save": kept.pop("checkpoint"),
        "evaluate": kept.pop("evaluation") + late_s["evaluate"],
        "productive": sum(kept.values()),
        "rework": sum(rework.values()) + late_s["rework"],
        "other": late_s["other"],
    }


def _after_last_window(group: Sequence[Event], window: Step, after: int | None) -> dict[str, float]:
    """Return the seconds after the last `Step` record of an attempt that recorded no end.

    They are divided into evaluations, and other time until the last record. If the next attempt
    repeated the last recorded step, the evaluations are rework.

    Args:
        group: records of the attempt.
        window: its last `Step` record.
        after: first step of the next attempt; None for the newest attempt.
    """
    evaluated = [event for event in group[group.index(window) :] if isinstance(event, Evaluated)]
    evaluate_s = sum(event.elapsed_s for event in evaluated)
    other_s = max(0.0, group[-1].time_s - window.time_s - evaluate_s)
    is_redone = _is_redone(window, after)
    return {
        "evaluate": 0.0 if is_redone else evaluate_s,
        "rework": evaluate_s if is_redone else 0.0,
        "other": other_s,
    }


def _account_without_phases(group: Sequence[Event], after: int | None) -> dict[str, float]:
    """Return the seconds of an attempt for each of `PARTS`, from the log of an older version.

    Such a log has no phases, so the wall-clock times of the records are used. The result is empty
    if the clock was set back.
    """
    total_s = group[-1].time_s - group[0].time_s
    sums = dict.fromkeys(PARTS, 0.0)
    for event in group:
        if isinstance(event, Step | Evaluated) and _is_redone(event, after):
            sums["rework"] += event.elapsed_s
        elif isinstance(event, Step):
            sums["productive"] += event.elapsed_s
        elif isinstance(event, Evaluated):
            sums["evaluate"] += event.elapsed_s
        elif isinstance(event, Committed):
            sums["save"] += event.waited_s
    # the times of the steps include the waits for saves
    sums["productive"] = max(0.0, sums["productive"] - sums["save"])
    return {**sums, "other": total_s - sum(sums.values())} if total_s >= 0 else {}


def _is_redone(event: Step | Evaluated, after: int | None) -> bool:
    return after is not None and event.step >= after


def _first_step(group: Sequence[Event]) -> int:
    started = group[0]
    return started.first_step if isinstance(started, Started) else 1


def _attempt(group: Sequence[Event], after: int | None, account: Mapping[str, float]) -> Attempt:
    started, last = group[0], group[-1]
    ended = next((event for event in reversed(group) if isinstance(event, Ended)), None)
    fault = find_fault(group)
    outcome, cause = (KILLED, NO_END) if fault is None else (fault.fault, fault.detail)
    first = _first_step(group)
    came_to = max(
        (event.step for event in group if isinstance(event, Step | Evaluated | Committed | Ended)),
        default=first - 1,
    )
    most_per_record = max(
        (event.num_steps for event in group if isinstance(event, Step)), default=1
    )
    return Attempt(
        generation=started.generation,
        first_step=first,
        last_step=came_to,
        outcome=outcome if ended is None else ended.outcome,
        cause=cause if ended is None else ended.cause,
        num_redone=0 if after is None else max(0, came_to - after + 1),
        num_unrecorded=0 if ended is not None else most_per_record - 1,
        began_s=started.time_s,
        last_s=last.time_s,
        elapsed_s=sum(account.values()) if account else None,
    )
