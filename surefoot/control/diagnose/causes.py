"""Causes of the ends of attempts, from the logs of all ranks and of the supervisor.

A rank whose peer has failed records only that it lost a rank. The original error is in the log of
the failed rank, or in the `Fault` that the supervisor recorded.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace

from surefoot.contract.events import ATTEMPT_FAULTS, Ended, Event, Fault
from surefoot.core.errors import LostRank


def find_fault(attempt: Sequence[Event]) -> Fault | None:
    """Return the fault that the supervisor recorded as the end of an attempt; None without one.

    `attempt` has the records of the attempt, from its start.
    """
    for event in reversed(attempt):
        if (
            isinstance(event, Fault)
            and event.fault in ATTEMPT_FAULTS
            and event.generation == attempt[0].generation
        ):
            return event
    return None


def with_first_causes(
    events: Iterable[Event], read_ends: Callable[[], Mapping[int, Iterable[Ended]]]
) -> list[Event]:
    """Return `events`, with the original error in each end that only reports a lost rank.

    Args:
        events: records of rank 0.
        read_ends: returns the `Ended` records of each other rank; called only if they are needed.
    """
    every = list(events)
    if not any(_is_loss(event) for event in every):
        return every
    causes = {
        event.generation: event.detail
        for event in every
        if isinstance(event, Fault) and event.fault in ATTEMPT_FAULTS
    }
    ends = [
        (end.time_s, rank, end)
        for rank, found in read_ends().items()
        for end in found
        if end.outcome == "failed" and not _is_loss(end)
    ]
    for _, rank, end in sorted(ends, key=lambda each: each[:2], reverse=True):
        causes[end.generation] = f"rank {rank}: {end.cause}"
    return [
        replace(event, cause=causes[event.generation])
        if isinstance(event, Ended) and _is_loss(event) and event.generation in causes
        else event
        for event in every
    ]


def _is_loss(event: Event) -> bool:
    return isinstance(event, Ended) and event.exit_code == LostRank.exit_code
