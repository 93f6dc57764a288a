"""The attempts at a run: how each ended, what was lost and done again, and which share of the time counted in the end.

Every second from the first record to the last is in one part of a Goodput. What an attempt did after the last commit that the next one
went on from is *rework*; the time between the last sign of one attempt and the first of the next is *down*, start-up included.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from statistics import median

from surefoot.contract.events import Committed, Ended, Evaluated, Event, Started, Step

KILLED = "killed"


@dataclass(frozen=True, kw_only=True)
class Attempt:
    """One attempt: where it began and came to, how it ended ("killed" where it did not say), how many of its steps were done again."""

    generation: int
    first_step: int
    last_step: int
    outcome: str
    cause: str
    num_redone: int
    began_s: float
    last_s: float


@dataclass(frozen=True, kw_only=True)
class Goodput:
    """Where the seconds of a run went, over all attempts; they add up to `total_s`. `save_s` is what the training stood still for."""

    attempts: tuple[Attempt, ...]
    total_s: float
    productive_s: float
    evaluate_s: float
    save_s: float
    rework_s: float
    down_s: float
    other_s: float
    median_save_s: float | None
    median_write_s: float | None

    @property
    def parts(self) -> dict[str, float]:
        """What the seconds went to, in words."""
        return {
            "productive": self.productive_s, "evaluation": self.evaluate_s, "waiting for saves": self.save_s,
            "done again": self.rework_s, "down and starting": self.down_s, "other": self.other_s,
        }  # fmt: skip

    @property
    def share(self) -> float | None:
        """Productive over total time."""
        return self.productive_s / self.total_s if self.total_s > 0 else None

    @property
    def num_failures(self) -> int:
        """Attempts that another one had to follow."""
        return len(self.attempts) - 1

    @property
    def between_failures_s(self) -> float | None:
        """Mean time between failures; None without one."""
        return (self.total_s - self.down_s) / self.num_failures if self.num_failures else None


def find_goodput(events: Iterable[Event]) -> Goodput:
    """Read every record of a run, overruled ones too, in the order written.."""
    groups: list[list[Event]] = []
    for event in events:
        if isinstance(event, Started):
            groups.append([event])
        elif groups:
            groups[-1].append(event)
    nexts = [*(_first_step(group) for group in groups[1:]), None]
    attempts = tuple(_attempt(group, after) for group, after in zip(groups, nexts, strict=True))
    total_s = attempts[-1].last_s - attempts[0].began_s if attempts else 0.0
    down_s = sum(max(0.0, late.began_s - early.last_s) for early, late in pairwise(attempts))
    productive_s = evaluate_s = save_s = rework_s = 0.0
    for group, after in zip(groups, nexts, strict=True):
        for event in group:
            is_redone = after is not None and getattr(event, "step", 0) >= after
            if isinstance(event, Step | Evaluated) and is_redone:
                rework_s += event.elapsed_s
            elif isinstance(event, Step):
                productive_s += event.elapsed_s
            elif isinstance(event, Evaluated):
                evaluate_s += event.elapsed_s
            elif isinstance(event, Committed):
                save_s += event.waited_s
    productive_s = max(0.0, productive_s - save_s)  # a save that is waited for falls into the steps around it
    saves = [event for group in groups for event in group if isinstance(event, Committed)]
    known_s = productive_s + evaluate_s + save_s + rework_s + down_s
    return Goodput(
        attempts=attempts, total_s=total_s, productive_s=productive_s, evaluate_s=evaluate_s, save_s=save_s, rework_s=rework_s,
        down_s=down_s, other_s=total_s - known_s, median_save_s=median([each.waited_s for each in saves]) if saves else None,
        median_write_s=median([each.elapsed_s for each in saves]) if saves else None,
    )  # fmt: skip


def _first_step(group: Sequence[Event]) -> int:
    started = group[0]
    return started.first_step if isinstance(started, Started) else 1


def _attempt(group: Sequence[Event], after: int | None) -> Attempt:
    started, last = group[0], group[-1]
    first = _first_step(group)
    came_to = max((event.step for event in group if isinstance(event, Step | Ended)), default=first - 1)
    return Attempt(
        generation=started.generation, first_step=first, last_step=came_to,
        outcome=last.outcome if isinstance(last, Ended) else KILLED,
        cause=last.cause if isinstance(last, Ended) else "no end was recorded",
        num_redone=0 if after is None else max(0, came_to - after + 1), began_s=started.time_s, last_s=last.time_s,
    )  # fmt: skip
