"""State of a run, such as running, stuck or dead, from its lock, its records and the clock.

A process holds the lock of its run until the process ends. On the host of the run, and in any
container on it, the lock therefore shows whether the run is running. On a different host, a free
lock proves nothing: without a recorded end, the state is "unknown". A run is "stuck" if its lock is
held, but no record was written for much longer than the longest time between two of its records.
"""

from __future__ import annotations

import socket
import time
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

from surefoot.contract import runlock
from surefoot.contract.events import Ended, Event, Started
from surefoot.control.diagnose.causes import find_fault
from surefoot.core.units import UNKNOWN, format_seconds

RUNNING, STUCK, DEAD, UNKNOWN_STATE = "running", "stuck", "dead", "unknown"
IN_ORDER = (RUNNING, "finished", "stopped")  # the states that need no action
# minimum: the first evaluation of a run may take longer than anything before it
STUCK_AFTER_S = 300.0
STUCK_FACTOR = 5.0  # times the longest time between two records
LOCK_STATES = {True: "held", False: "free", None: UNKNOWN_STATE}


@dataclass(frozen=True, kw_only=True)
class Health:
    """State of a run, and the facts from which it was derived.

    `lock` is True if a process holds the run's lock, and None if this is unknown. `age_s` is the
    age of the last record in seconds, and None if the clock was set back. `cause` is the cause that
    the supervisor recorded for the end of the newest attempt; "" if there is none. `began_s` and
    `last_s` are Unix times.
    """

    state: str
    lock: bool | None
    process: int | None
    host: str | None
    began_s: float
    last_s: float
    age_s: float | None
    stuck_after_s: float
    cause: str = ""

    @property
    def is_in_order(self) -> bool:
        """True if the run is running, or if it finished or was stopped as intended."""
        return self.state in IN_ORDER

    def as_row(self) -> dict[str, Any]:
        """Return the state as a JSON-compatible dict; times are Unix times in seconds.

        `last_record_age_s` is None if the clock was set back.
        """
        return {
            "state": self.state,
            "lock": LOCK_STATES[self.lock],
            "process": self.process,
            "host": self.host,
            "attempt_began_s": self.began_s,
            "last_record_s": self.last_s,
            "last_record_age_s": self.age_s,
            "stuck_after_s": self.stuck_after_s,
        }

    @property
    def words(self) -> str:
        """Sentence on the state of a run whose end is not recorded."""
        age = (
            UNKNOWN + " (the clock was set back)"
            if self.age_s is None
            else f"{format_seconds(self.age_s)} old"
        )
        process = (
            f"process {self.process if self.process is not None else UNKNOWN} on "
            f"{self.host or UNKNOWN}"
        )
        if self.state == RUNNING:
            return f"not yet: {process} is running it; the last record is {age}"
        if self.state == STUCK:
            limit = format_seconds(self.stuck_after_s)
            return (
                f"not yet, but it is stuck: {process} holds run.lock, "
                f"and the last record is {age} (the limit is {limit})"
            )
        if self.state == DEAD and self.cause:
            return f"{self.cause}; all ranks were ended; the last record is {age}"
        if self.state == DEAD:
            return (
                "no end is recorded and no process holds run.lock: it was killed; "
                f"the last record is {age}"
            )
        return (
            f"no end is recorded; {process} took run.lock, "
            f"and only that host can tell whether it is running; the last record is {age}"
        )


def find_health(
    owner: runlock.LockOwner,
    events: Sequence[Event],
    *,
    stuck_after_s: float | None = None,
    now_s: float | None = None,
) -> Health:
    """Determine the state of a run from its lock and its records.

    Args:
        owner: the lock, as `runlock.find_owner` read it before the records were read.
        events: all records of the run, at least one `Started` among them.
        stuck_after_s: seconds without a new record after which a running run is stuck; by default
            derived from the records.
        now_s: current Unix time in seconds, for tests.
    """
    start = max(index for index, event in enumerate(events) if isinstance(event, Started))
    started, last_s = events[start], events[-1].time_s
    assert isinstance(started, Started)
    ended = next((event for event in reversed(events[start:]) if isinstance(event, Ended)), None)
    lock = owner.is_held
    if owner.generation is not None and started.generation > owner.generation:
        lock = True  # the run started after the lock was read and before the records were
    recorded = started.place.get("host")
    host = owner.host or (recorded if isinstance(recorded, str) else None)
    is_local = host in (None, socket.gethostname()) or (
        owner.boot is not None and owner.boot == runlock.read_boot_id()
    )
    if not lock and not is_local:
        lock = None  # this kernel does not know the locks of another host
    # the process that holds the lock is the next attempt, which has no record yet
    is_next = (
        owner.generation is not None and owner.generation > started.generation and lock is True
    )
    limit_s = stuck_after_s if stuck_after_s is not None else _limit_s(events)
    newest_s = max(last_s, owner.since_s or 0.0) if is_next else last_s
    now_s = time.time() if now_s is None else now_s
    age_s = now_s - newest_s if now_s >= newest_s else None
    if ended is not None and not is_next:
        state = ended.outcome
    elif lock is None:
        state = UNKNOWN_STATE
    else:
        state = DEAD if not lock else STUCK if age_s is not None and age_s > limit_s else RUNNING
    return Health(
        state=state,
        lock=lock,
        process=owner.process,
        host=host,
        last_s=last_s,
        age_s=age_s,
        stuck_after_s=limit_s,
        began_s=newest_s if is_next else started.time_s,
        cause="" if is_next or (fault := find_fault(events[start:])) is None else fault.detail,
    )


def _limit_s(events: Sequence[Event]) -> float:
    """Return the seconds without a new record after which a running run counts as stuck.

    They are `STUCK_FACTOR` times the longest time between two records of an attempt, but at least
    `STUCK_AFTER_S`.
    """
    gaps = [
        late.time_s - early.time_s
        for early, late in pairwise(events)
        if not isinstance(late, Started)
    ]
    return max(STUCK_AFTER_S, STUCK_FACTOR * max(gaps, default=0.0))
