"""Inspection of ranks by their supervisor: flight records, process states and stacks."""

from __future__ import annotations

import contextlib
import os
import re
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from surefoot.control.launch.blocked import find_waits
from surefoot.core import flight
from surefoot.core.flight import RankSnapshot
from surefoot.core.process.frames import is_of_surefoot
from surefoot.core.process.signals import STACKS_SIGNAL

# seconds for a rank to write its stack; a busy machine needs longer
STACK_S, MAX_STACK_S = 0.3, 5.0
FRAME = re.compile(r'  File "(?P<file>[^"]*)", line (?P<line>\d+) in (?P<name>.*)')
STOPPED = "tT"
LOOP = "train"  # the part of surefoot in the stack of the thread that takes the steps
# how faulthandler writes non-ASCII characters
ESCAPED = re.compile(r"\\(?:x[0-9a-f]{2}|u[0-9a-f]{4}|U[0-9a-f]{8})")


class Judge(NamedTuple):
    """Functions with which a supervisor detects and explains a stall of its ranks.

    `is_stalled` returns whether ranks have waited too long. `tell` describes the ranks that block
    the others. `blame` returns these ranks: an empty tuple if the network is at fault, and None if
    the ranks called different collectives, which a restart does not correct. `tell_apart` describes
    the ranks that were not in the same collective as the others when a rank crashed; "" if there
    are none. `hint` is the advice to print after all ranks have ended.
    """

    is_stalled: Callable[[Sequence[RankSnapshot]], bool]
    tell: Callable[[Sequence[RankSnapshot]], str]
    tell_apart: Callable[[Sequence[RankSnapshot]], str] = lambda rows: ""
    blame: Callable[[Sequence[RankSnapshot]], tuple[int, ...] | None] = lambda rows: ()
    hint: str = "the same command resumes after the newest checkpoint"


class RankFiles(NamedTuple):
    """Descriptors of two in-memory files that a rank writes: its flight record and its stacks.

    The flight record has the current step and the collectives of the rank.
    """

    flight: int
    stacks: int

    @classmethod
    def make(cls, rank: int) -> RankFiles:
        """Create the two files of a rank; other processes do not inherit their descriptors."""
        return cls(
            flight.make_file(f"surefoot-flight-{rank}"), flight.make_file(f"surefoot-stacks-{rank}")
        )

    def close(self) -> None:
        for each in self:
            os.close(each)


def snapshot_ranks(pids: Mapping[int, int], told: Sequence[RankFiles]) -> list[RankSnapshot]:
    """Return the current state of the ranks in `pids`, which maps ranks to process ids."""
    return [
        RankSnapshot(rank, flight.read(told[rank].flight), state_of(pid))
        for rank, pid in pids.items()
    ]


def with_stacks(
    rows: Sequence[RankSnapshot], pids: Mapping[int, int], told: Sequence[RankFiles]
) -> list[RankSnapshot]:
    """Return `rows` with the current stack of each rank, and the file for which it waits.

    A signal requests the stack. A stopped process does not handle it, and a rank that has not
    joined the group has no handler yet; their stacks are the last ones that they wrote. A file is
    set only if the rank was in the same system call on it before and after the request.

    Args:
        rows: state of each rank.
        pids: process id of each rank.
        told: files of each rank, by rank.
    """
    asked = [row for row in rows if row.state not in STOPPED and row.record.count]
    waits = {row.rank: find_waits(pids[row.rank]) for row in rows}
    for row in asked:
        os.ftruncate(told[row.rank].stacks, 0)
        os.lseek(told[row.rank].stacks, 0, os.SEEK_SET)
        with contextlib.suppress(ProcessLookupError):
            os.kill(pids[row.rank], STACKS_SIGNAL)
    if asked:
        _wait_for_stacks([told[row.rank].stacks for row in asked])
    found = []
    for row in with_last_stacks(rows, told):
        still = {wait.asked for wait in find_waits(pids[row.rank])}
        file = next((wait.words for wait in waits[row.rank] if wait.asked in still), "")
        found.append(row._replace(file=file))
    return found


def _wait_for_stacks(files: Sequence[int]) -> None:
    """Wait until every file has content and has not changed for `STACK_S` seconds.

    The wait takes at most `MAX_STACK_S` seconds. `files` are file descriptors.
    """
    begun_s = since_s = now_s = time.monotonic()
    before = [0] * len(files)
    while now_s - begun_s < MAX_STACK_S and not (all(before) and now_s - since_s >= STACK_S):
        time.sleep(STACK_S / 10)
        sizes, now_s = [os.fstat(each).st_size for each in files], time.monotonic()
        if sizes != before:
            before, since_s = sizes, now_s


def with_last_stacks(rows: Sequence[RankSnapshot], told: Sequence[RankFiles]) -> list[RankSnapshot]:
    """Return `rows` with the last stacks that the ranks wrote, for example at a fatal signal."""
    return [
        row._replace(
            stack=parse_stacks(os.pread(told[row.rank].stacks, 1 << 16, 0).decode(errors="replace"))
        )
        for row in rows
    ]


def parse_stacks(text: str) -> tuple[str, ...]:
    """Parse the output of faulthandler; return the frames of one thread, innermost first.

    It is the thread that runs the training steps; if there is none, the first thread.

    >>> stack = '  File "a.py", line 3 in f\\n  File "b.py", line 9 in g\\n'
    >>> parse_stacks("Current thread 0x1 (most recent call first):\\n" + stack)
    ('a.py:3 in f', 'b.py:9 in g')
    """
    plain = ESCAPED.sub(lambda found: found[0].encode().decode("unicode_escape"), text)
    blocks = [
        list(FRAME.finditer(block)) for block in re.split(r"(?:Current t|T)hread 0x", plain)[1:]
    ]
    stepping = [
        block for block in blocks if any(is_of_surefoot(found["file"], LOOP) for found in block)
    ]
    chosen = (*stepping, *blocks, ())[0]
    return tuple(f"{found['file']}:{found['line']} in {found['name']}" for found in chosen)


def state_of(pid: int) -> str:
    """Return the state of a process as a letter of proc(5), such as R, S or D; "?" if unknown."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except (OSError, IndexError):
        return "?"
