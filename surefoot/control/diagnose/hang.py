"""Which rank holds up the others, and where: from what each of them wrote last, what the system says of it, and its stack."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from surefoot.core.flight import Seen

EARLY, FIRST_STEPS = 10, 1
STATES = {"T": "it is stopped (SIGSTOP)", "t": "it is stopped by a debugger", "D": "it waits for a disk", "Z": "it has ended"}


@dataclass(frozen=True)
class Hang:
    """The ranks that hold up the others, and what is known of them, in words."""

    ranks: tuple[int, ...]
    words: str


def is_stalled(rows: Sequence[Seen], after_s: float) -> bool:
    """Whether a rank has waited so long for others, none of which is busy by itself; ten times as long in steps that compile."""
    if any(row.record.is_busy and row.record.waits_s is None for row in rows):  # one that saves alone waits as the others do
        return False
    return any(
        row.record.waits_s is not None and row.record.waits_s >= after_s * (EARLY if row.record.step <= FIRST_STEPS else 1)
        for row in rows
    )


def find_hang(rows: Sequence[Seen]) -> Hang:
    """Who is to blame for a stall. Those who are in no collective, or in an earlier one; else those who are in another one than most."""
    waiting = [row for row in rows if row.record.waits_s is not None]
    furthest = max((row.record.count for row in waiting), default=0)
    behind = [row for row in rows if row.record.waits_s is None or row.record.count < furthest]
    if behind:
        return _blame(behind, rows, "has not come")
    kinds = Counter((row.record.kind, row.record.num_bytes) for row in rows)
    (common, _), *others = kinds.most_common()
    if others:
        apart = [row for row in rows if (row.record.kind, row.record.num_bytes) != common]
        return _blame(apart, rows, "does something else")
    stopped = [row for row in rows if row.state in STATES]
    if stopped:
        return _blame(stopped, rows, "is there, and does not answer")
    where = _where(rows[0])
    return Hang((), f"all {len(rows)} ranks are in {where}, and it does not end: the network between them is cut, or too slow")


def _blame(rows: Sequence[Seen], every: Sequence[Seen], how: str) -> Hang:
    first = rows[0]
    names = f"rank{'s' * (len(rows) > 1)} {', '.join(str(row.rank) for row in rows)} of {len(every)}"
    other = max((row for row in every if row not in rows), key=lambda row: row.record.waits_s or 0.0, default=None)
    waited = "" if other is None else f"rank {other.rank} waits in {_where(other)} for {other.record.waits_s or 0:.1f} s; "
    return Hang(tuple(row.rank for row in rows), f"{waited}{names} {how}: rank {first.rank} is {_place(first)}")


def _place(row: Seen) -> str:
    parts = [f"in step {row.record.step}"]
    if row.record.waits_s is not None:
        parts.append(f"in {_where(row)}")
    elif row.record.microbatch >= 0:
        parts.append(f"microbatch {row.record.microbatch}")
    if row.state in STATES:
        parts.append(STATES[row.state])
    if row.stack:
        parts.append(f"at {find_frame(row.stack)}")
    return ", ".join(parts)


def _where(row: Seen) -> str:
    return f"{row.record.kind.words} of {row.record.num_bytes:,} bytes (collective {row.record.count})"


def find_frame(stack: Sequence[str]) -> str:
    """The innermost frame of the user's own, else the innermost one. A frame is `file.py:31 in loss`.

    >>> find_frame(["/lib/python3.11/site-packages/torch/nn.py:3 in f", "/home/me/task.py:31 in loss", "/src/surefoot/train/run.py:9 in g"])
    '/home/me/task.py:31 in loss'
    """
    own = [
        frame for frame in stack if not any(part in frame for part in ("site-packages", "/surefoot/", "/lib/python", "<frozen"))
    ]
    return (own or list(stack))[0]
