"""Which rank holds up the others, and where: from what each of them wrote last, what the system says of it, and its stack."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace

from surefoot.core.flight import Kind, Seen
from surefoot.core.process.frames import is_of_library, is_of_surefoot, is_of_torch

EARLY, FIRST_STEPS = 10, 1
TOGETHER = "distributed"  # the part of torch that is in the stack of who calls a collective
FRAME = re.compile(r"(?P<file>.*):\d+ in .*")  # as `looking` writes it
STATES = {"T": "it is stopped (SIGSTOP)", "t": "it is stopped by a debugger", "D": "it waits for a disk", "Z": "it has ended"}


@dataclass(frozen=True)
class Hang:
    """The ranks that hold up the others, and what is known of them, in words; `is_unlike` where they do not do what the others do, which
    is the code, and no other attempt mends it."""

    ranks: tuple[int, ...]
    words: str
    is_unlike: bool = False


def is_stalled(rows: Sequence[Seen], after_s: float) -> bool:
    """Whether a rank has waited so long for others, none of which is busy by itself; ten times as long in steps that compile."""
    if any(row.record.is_busy and row.record.waits_s is None for row in rows):  # one that saves alone waits as the others do
        return False
    return any(
        row.record.waits_s is not None and row.record.waits_s >= after_s * (EARLY if row.record.step <= FIRST_STEPS else 1)
        for row in rows
    )


def find_apart(rows: Sequence[Seen]) -> Hang | None:
    """Who had come to something else than the others when one of them ended in what they do together; None where nobody had.

    A library that sums what one rank sends with what another does not expect ends the process that gets it, whoever is to blame.
    """
    if len(rows) < 2:
        return None
    if not any(row.record.waits_s is not None for row in rows):
        own = [row for row in rows if _is_in_own_collective(row)]
        return Hang(tuple(row.rank for row in own), _places(own)) if own else None
    found = find_hang([row._replace(state="S") for row in rows])
    return found if found.ranks else None


def find_hang(rows: Sequence[Seen]) -> Hang:
    """Who is to blame for a stall: those who called another collective than most; those who are in none, or in an earlier one; else the
    network."""
    if (unlike := _find_unlike(rows)) is not None:
        return unlike
    waiting = [row for row in rows if row.record.waits_s is not None]
    furthest = max((row.record.count for row in waiting), default=0)
    behind = [row for row in rows if row.record.waits_s is None]
    if behind:
        # the others have come past this, so that they never called it
        is_own = all(row.state not in STATES and _is_in_own_collective(row) for row in behind)
        return replace(_blame(behind, rows, "has not come"), is_unlike=is_own)
    stopped = [row for row in rows if row.state in STATES]
    if stopped:
        return _blame(stopped, rows, "is there, and does not answer")
    late = [row for row in rows if row.record.count < furthest]
    if late:
        return _blame(late, rows, "waits for what the others have sent; the network to it is cut, or too slow")
    where = _where(rows[0])
    return Hang((), f"all {len(rows)} ranks are in {where}, and it does not end: the network between them is cut, or too slow")


def _find_unlike(rows: Sequence[Seen]) -> Hang | None:
    """The first collective that ranks did not call alike: those who called another one than most; of two ranks it may be either."""
    for number in sorted(set[int]().union(*(row.record.recent for row in rows))):
        called = {row.rank: row.record.recent[number] for row in rows if number in row.record.recent}
        (most, count), *others = Counter(called.values()).most_common()
        if not others:
            continue
        apart = tuple(rank for rank, what in called.items() if what != most)
        apart = apart if 2 * count > len(called) else tuple(called)
        told = "; ".join(
            f"rank {row.rank} called {_called(*called[row.rank])} and is {_place(row)}"
            for row in rows
            if row.rank in apart
            or (row.rank in called and len(apart) < len(called) and row.rank == min(set(called) - set(apart)))
        )
        return Hang(apart, f"the ranks did not call collective {number} alike: {told}", is_unlike=True)
    return None


def _blame(rows: Sequence[Seen], every: Sequence[Seen], how: str) -> Hang:
    names = f"rank{'s' * (len(rows) > 1)} {', '.join(str(row.rank) for row in rows)} of {len(every)}"
    other = max((row for row in every if row not in rows), key=lambda row: row.record.waits_s or 0.0, default=None)
    waited = "" if other is None else f"rank {other.rank} waits in {_where(other)} for {other.record.waits_s or 0:.1f} s; "
    return Hang(tuple(row.rank for row in rows), f"{waited}{names} {how}: {_places(rows[:1])}")


def _places(rows: Sequence[Seen]) -> str:
    return "; ".join(f"rank {row.rank} is {_place(row)}" for row in rows)


def _place(row: Seen) -> str:
    parts = [f"in step {row.record.step}"]
    if row.record.waits_s is not None:
        parts.append(f"in {_where(row)}")
    elif row.record.microbatch >= 0:
        parts.append(f"microbatch {row.record.microbatch}")
    if row.file:
        parts.append(f"it waits for a disk or a file ({row.file})")
    elif row.state in STATES:
        parts.append(STATES[row.state])
    if _is_in_own_collective(row):
        parts.append("in a collective that the task calls itself")
    if row.stack:
        parts.append(f"at {find_frame(row.stack)}")
    return ", ".join(parts)


def _is_in_own_collective(row: Seen) -> bool:
    return row.record.waits_s is None and any(is_of_torch(_file_of(frame), TOGETHER) for frame in row.stack)


def _called(kind: Kind, num_bytes: int) -> str:
    return kind.words if num_bytes < 0 else f"{kind.words} of {num_bytes:,} bytes"


def _where(row: Seen) -> str:
    return f"{row.record.kind.words} of {row.record.num_bytes:,} bytes (collective {row.record.count})"


def find_frame(stack: Sequence[str]) -> str:
    """The innermost frame of the user's own, else the innermost one. A frame is `file.py:31 in loss`.

    >>> find_frame([f"{re.__file__}:3 in f", "/home/me/surefoot/task.py:31 in loss", f"{__file__}:9 in g"])
    '/home/me/surefoot/task.py:31 in loss'
    """
    own = [frame for frame in stack if not is_of_surefoot(_file_of(frame)) and not is_of_library(_file_of(frame))]
    return (own or list(stack))[0]


def _file_of(frame: str) -> str:
    found = FRAME.fullmatch(frame)
    return frame if found is None else found["file"]
