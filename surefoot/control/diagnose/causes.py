"""The cause with which an attempt ended, from the logs of all ranks and from the supervisor.

A rank that loses another rank records that loss. The error is in the log of the other rank, or in
the `fault` that the supervisor recorded.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace

from surefoot.contract.events import ATTEMPT_FAULTS, Ended, Event, Fault
from surefoot.core.errors import LostRank


def find_fault(attempt: Sequence[Event]) -> Fault | None:
    """Return the fault with which the supervisor recorded the end of an attempt, or None.

    `attempt` holds the records from its start on.
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
    """Return `events` in which an end by a lost rank has the cause for which that rank was lost.

    Args:
        events: records of rank 0.
        read_ends: returns the ends that each other rank recorded; called only if they are needed.
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
