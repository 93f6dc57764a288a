"""Diagnosis of stalled ranks: which rank blocks the others, and in which line of code.

The inputs are the flight record (step and collectives), the process state and the stack of each
rank.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace

from surefoot.core.flight import Kind, RankSnapshot
from surefoot.core.process.frames import is_of_library, is_of_surefoot, is_of_torch

EARLY, FIRST_STEPS = 10, 1
TOGETHER = "distributed"  # the part of torch that is in the stack of a rank inside a collective
FRAME = re.compile(r"(?P<file>.*):\d+ in .*")  # as `looking` formats a frame
BY_SIGSTOP = "T"  # state of a stopped process, without those that a debugger pauses for a moment
STATES = {
    BY_SIGSTOP: "it is stopped (SIGSTOP)",
    "t": "it is paused by a debugger",
    "D": "it waits for a disk",
    "Z": "it has ended",
}


@dataclass(frozen=True)
class Hang:
    """Ranks that block the others, with a description in `words`.

    `ranks` is empty if no rank is to blame. `is_unlike` is True if the ranks called different
    collectives: then the code is wrong, and a restart does not help.
    """

    ranks: tuple[int, ...]
    words: str
    is_unlike: bool = False


def is_stalled(rows: Sequence[RankSnapshot], after_s: float) -> bool:
    """Return whether a rank has waited for at least `after_s` seconds in a collective.

    Return False while one rank does work that only one rank does, such as saving, and while all
    `rows` wait for ranks of other hosts to join; a stopped process does neither. Up to the first
    step, which may compile, the limit is `EARLY` times as long.
    """
    if all(
        row.record.kind is Kind.JOIN and row.record.waits_s is not None and row.state != BY_SIGSTOP
        for row in rows
    ):
        return False
    if any(
        row.record.is_busy and row.record.waits_s is None and row.state != BY_SIGSTOP
        for row in rows
    ):
        # a rank that saves but waits in a collective itself does not count as busy
        return False
    return any(
        row.record.waits_s is not None
        and row.record.waits_s >= after_s * (EARLY if row.record.step <= FIRST_STEPS else 1)
        for row in rows
    )


def find_apart(rows: Sequence[RankSnapshot]) -> Hang | None:
    """Return the ranks that were not in the same collective as the others at a crash, or None.

    If ranks call different collectives, a communication library may crash the rank that receives
    unexpected data, whichever rank is at fault.
    """
    if len(rows) < 2:
        return None
    if not any(row.record.waits_s is not None for row in rows):
        own = [row for row in rows if _is_in_own_collective(row)]
        return Hang(tuple(row.rank for row in own), _places(own)) if own else None
    found = find_hang([row._replace(state="S") for row in rows])
    return found if found.ranks else None


def find_hang(rows: Sequence[RankSnapshot]) -> Hang:
    """Return the ranks that cause a stall.

    The first of these cases applies: ranks that called a different collective than most; ranks that
    are not in a collective; ranks whose process is stopped; ranks that are in an earlier
    collective. Otherwise no rank is returned, and the description names the network.
    """
    if (unlike := _find_unlike(rows)) is not None:
        return unlike
    waiting = [row for row in rows if row.record.waits_s is not None]
    furthest = max((row.record.count for row in waiting), default=0)
    behind = [row for row in rows if row.record.waits_s is None]
    if behind:
        # the others passed this collective, so these ranks never called it
        is_own = all(row.state not in STATES and _is_in_own_collective(row) for row in behind)
        return replace(_blame(behind, rows, "has not come"), is_unlike=is_own)
    stopped = [row for row in rows if row.state in STATES]
    if stopped:
        return _blame(stopped, rows, "is in the collective, and does not respond")
    late = [row for row in rows if row.record.count < furthest]
    if late:
        return _blame(
            late,
            rows,
            (
                "waits for data that the others have sent; its network connection is "
                "down, or too slow"
            ),
        )
    where = _line_of(rows[0])
    return Hang(
        (),
        f"all {len(rows)} ranks are in {where}, but it does not end: "
        "the network between them is cut, or too slow",
    )


def _find_unlike(rows: Sequence[RankSnapshot]) -> Hang | None:
    """Return the ranks that called a different collective than most ranks; None without any.

    Only the first collective in which ranks differ is examined. If no collective has a majority,
    for example with two ranks, all ranks that called one are returned.
    """
    for number in sorted(set[int]().union(*(row.record.recent for row in rows))):
        called = {
            row.rank: row.record.recent[number] for row in rows if number in row.record.recent
        }
        (most, count), *others = Counter(called.values()).most_common()
        if not others:
            continue
        apart = tuple(rank for rank, what in called.items() if what != most)
        apart = apart if 2 * count > len(called) else tuple(called)
        told = "; ".join(
            f"rank {row.rank} called {_describe_collective(*called[row.rank])} "
            f"and is {_position_of(row)}"
            for row in rows
            if row.rank in apart
            or (
                row.rank in called
                and len(apart) < len(called)
                and row.rank == min(set(called) - set(apart))
            )
        )
        return Hang(
            apart,
            f"the ranks called different collectives as number {number}: {told}",
            is_unlike=True,
        )
    return None


def _blame(rows: Sequence[RankSnapshot], every: Sequence[RankSnapshot], how: str) -> Hang:
    names = (
        f"rank{'s' * (len(rows) > 1)} {', '.join(str(row.rank) for row in rows)} of {len(every)}"
    )
    other = max(
        (row for row in every if row not in rows),
        key=lambda row: row.record.waits_s or 0.0,
        default=None,
    )
    waited = (
        ""
        if other is None
        else f"rank {other.rank} waits in {_line_of(other)} for {other.record.waits_s or 0:.1f} s; "
    )
    return Hang(tuple(row.rank for row in rows), f"{waited}{names} {how}: {_places(rows[:1])}")


def _places(rows: Sequence[RankSnapshot]) -> str:
    return "; ".join(f"rank {row.rank} is {_position_of(row)}" for row in rows)


def _position_of(row: RankSnapshot) -> str:
    parts = [f"in step {row.record.step}" if row.record.step else "before its first step"]
    if row.record.waits_s is not None:
        parts.append(f"in {_line_of(row)}")
    elif row.record.step and row.record.microbatch >= 0:
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


def _is_in_own_collective(row: RankSnapshot) -> bool:
    return row.record.waits_s is None and any(
        is_of_torch(_file_of(frame), TOGETHER) for frame in row.stack
    )


def _describe_collective(kind: Kind, num_bytes: int) -> str:
    return kind.words if num_bytes < 0 else f"{kind.words} of {num_bytes:,} bytes"


def _line_of(row: RankSnapshot) -> str:
    told = _describe_collective(row.record.kind, row.record.num_bytes)
    return f"{told} (collective {row.record.count})"


def find_frame(stack: Sequence[str]) -> str:
    """Return the innermost stack frame in the user's code, else the innermost frame.

    `stack` has the frames, innermost first, in the form `file.py:31 in loss`.

    >>> task = "/home/me/surefoot/task.py:31 in loss"
    >>> find_frame([f"{re.__file__}:3 in f", task, f"{__file__}:9 in g"])
    '/home/me/surefoot/task.py:31 in loss'
    """
    own = [
        frame
        for frame in stack
        if not is_of_surefoot(_file_of(frame)) and not is_of_library(_file_of(frame))
    ]
    return (own or list(stack))[0]


def _file_of(frame: str) -> str:
    found = FRAME.fullmatch(frame)
    return frame if found is None else found["file"]
