"""The supervisor's view of its ranks: their flight records, process states and stacks."""

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
    """Functions that judge what the supervisor observes of its ranks.

    `is_stalled` returns whether ranks have waited too long, `tell` describes which ranks block the
    others, `hint` is the advice once all are ended. `blame` returns the blocking ranks: an empty
    tuple where the network is at fault, None if the ranks called different collectives, which a
    restart does not mend. `tell_apart` describes the ranks that did something else when one rank
    ended inside a collective; "" for none.
    """

    is_stalled: Callable[[Sequence[RankSnapshot]], bool]
    tell: Callable[[Sequence[RankSnapshot]], str]
    tell_apart: Callable[[Sequence[RankSnapshot]], str] = lambda rows: ""
    blame: Callable[[Sequence[RankSnapshot]], tuple[int, ...] | None] = lambda rows: ()
    hint: str = "the same command resumes after the newest checkpoint"


class RankFiles(NamedTuple):
    """Two in-memory files that a rank writes: its flight record and its stacks."""

    flight: int
    stacks: int

    @classmethod
    def make(cls, rank: int) -> RankFiles:
        """Make the two files of a rank; other processes do not inherit them."""
        return cls(
            flight.make_file(f"surefoot-flight-{rank}"), flight.make_file(f"surefoot-stacks-{rank}")
        )

    def close(self) -> None:
        for each in self:
            os.close(each)


def snapshot_ranks(pids: Mapping[int, int], told: Sequence[RankFiles]) -> list[RankSnapshot]:
    """Return the current state of every rank; `pids` maps a rank to its process id."""
    return [
        RankSnapshot(rank, flight.read(told[rank].flight), state_of(pid))
        for rank, pid in pids.items()
    ]


def with_stacks(
    rows: Sequence[RankSnapshot], pids: Mapping[int, int], told: Sequence[RankFiles]
) -> list[RankSnapshot]:
    """Return `rows` with the stacks of the ranks that can be asked for them.

    A stopped process handles no signal, and a rank that has not joined has no handler yet. A row
    also names the file that the rank waits for, if the rank was in the same call on it before and
    after.
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
    """Wait until every file was written to and then unchanged for `STACK_S`.

    Returns after `MAX_STACK_S` at the latest.
    """
    begun_s = since_s = now_s = time.monotonic()
    before = [0] * len(files)
    while now_s - begun_s < MAX_STACK_S and not (all(before) and now_s - since_s >= STACK_S):
        time.sleep(STACK_S / 10)
        sizes, now_s = [os.fstat(each).st_size for each in files], time.monotonic()
        if sizes != before:
            before, since_s = sizes, now_s


def with_last_stacks(rows: Sequence[RankSnapshot], told: Sequence[RankFiles]) -> list[RankSnapshot]:
    """Return `rows` with the last stacks that the ranks wrote, for instance at a fatal signal."""
    return [
        row._replace(
            stack=parse_stacks(os.pread(told[row.rank].stacks, 1 << 16, 0).decode(errors="replace"))
        )
        for row in rows
    ]


def parse_stacks(text: str) -> tuple[str, ...]:
    """Return the frames, innermost first, of the thread that takes steps, else of the first thread.

    `text` is the output of faulthandler.

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
    """Return the letter of a process state (proc(5)), such as R, S or D; "?" if unknown."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except (OSError, IndexError):
        return "?"
