"""Stragglers in the newest attempt of a run: ranks for which the other ranks waited."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from surefoot.contract.events import Event, Fault, Step
from surefoot.control.diagnose.phases import newest_attempt, number_of
from surefoot.core.ranks.stragglers import Pace

FAULT = "straggler"


@dataclass(frozen=True, kw_only=True)
class StragglerWait:
    """Waiting that one rank caused during an attempt.

    `num_last` is the number of steps that this rank finished last. `waited_s` is the sum over these
    steps of the median time that the other ranks waited. `pace` has the rank's mean times and
    counts per step.
    """

    rank: int
    num_last: int
    waited_s: float
    pace: Pace

    def as_row(self) -> dict[str, Any]:
        return {
            "rank": self.rank,
            "num_last": self.num_last,
            "waited_s": self.waited_s,
            "pace": self.pace._asdict(),
        }


@dataclass(frozen=True, kw_only=True)
class Waits:
    """Waiting that each rank caused in an attempt of `num_steps` steps, and reported stragglers."""

    num_steps: int
    ranks: tuple[StragglerWait, ...]
    named: tuple[tuple[int, str], ...]  # (step, description and advice)

    def as_row(self) -> dict[str, Any]:
        return {
            "num_steps": self.num_steps,
            "ranks": [each.as_row() for each in self.ranks],
            "named": [{"step": step, "words": words} for step, words in self.named],
        }


def find_waits(events: Iterable[Event]) -> Waits | None:
    """Return the waiting that each rank caused in the newest attempt of a run.

    Return None for a run of one rank, and if no waiting was recorded. `events` must be in the order
    in which they were written.
    """
    attempt = newest_attempt(events)
    rows = [event.ranks for event in attempt if isinstance(event, Step) and event.ranks]
    size = min(
        (len(row.get(name, ())) for row in rows for name in ("last", "waited_s", *Pace._fields)),
        default=0,
    )
    if size < 2:
        return None
    sums = {
        name: [sum(number_of(row[name][rank]) for row in rows) for rank in range(size)]
        for name in ("last", "waited_s", *Pace._fields)
    }
    num_steps = round(sum(sums["last"]))
    if num_steps < 1:
        return None
    ranks = [
        StragglerWait(
            rank=rank,
            num_last=round(sums["last"][rank]),
            waited_s=sums["waited_s"][rank],
            pace=Pace(*(sums[name][rank] / num_steps for name in Pace._fields)),
        )
        for rank in range(size)
    ]
    named = [
        (event.step, f"{event.detail}; {event.action.removeprefix('the run continues; ')}")
        for event in attempt
        if isinstance(event, Fault) and event.fault == FAULT
    ]
    return Waits(num_steps=num_steps, ranks=tuple(ranks), named=tuple(named))
