"""What the supervisor sees of its ranks from outside: their flight records, what the system says of them, and their stacks."""

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
from surefoot.core.flight import Seen
from surefoot.core.process.frames import is_of_surefoot
from surefoot.core.signals import STACKS_SIGNAL

STACK_S, LONGEST_STACK_S = 0.3, 5.0  # for a rank to write its stack; on a busy machine it takes longer
FRAME = re.compile(r'  File "(?P<file>[^"]*)", line (?P<line>\d+) in (?P<name>.*)')
STOPPED = "tT"
LOOP = "train"  # the part of surefoot that is in the stack of the thread that takes the steps
ESCAPED = re.compile(r"\\(?:x[0-9a-f]{2}|u[0-9a-f]{4}|U[0-9a-f]{8})")  # how faulthandler writes what is not ASCII


class Judge(NamedTuple):
    """What is made of it: whether ranks have been kept waiting for too long, who does that, in words, and what to do once all are ended.

    `blame` gives who does that, by rank: nobody where it is the network, None where ranks did not call the same, which no other attempt
    mends. `tell_apart` is shown how far each of them had come when one ended in what they do together: who did something else, "" for
    nobody.
    """

    is_stalled: Callable[[Sequence[Seen]], bool]
    tell: Callable[[Sequence[Seen]], str]
    tell_apart: Callable[[Sequence[Seen]], str] = lambda rows: ""
    blame: Callable[[Sequence[Seen]], tuple[int, ...] | None] = lambda rows: ()
    hint: str = "the same command goes on after the newest commit"


class Told(NamedTuple):
    """Two files of memory that a rank writes: its flight record, and its stacks."""

    flight: int
    stacks: int

    @classmethod
    def make(cls, rank: int) -> Told:
        """New ones; other processes do not inherit them."""
        return cls(flight.make_file(f"surefoot-flight-{rank}"), flight.make_file(f"surefoot-stacks-{rank}"))

    def close(self) -> None:
        for each in self:
            os.close(each)


def look(pids: Mapping[int, int], told: Sequence[Told]) -> list[Seen]:
    """Every rank as it is now; `pids` are theirs by rank."""
    return [Seen(rank, flight.read(told[rank].flight), state_of(pid)) for rank, pid in pids.items()]


def with_stacks(rows: Sequence[Seen], pids: Mapping[int, int], told: Sequence[Told]) -> list[Seen]:
    """The same with the stacks of those that can be asked: who is stopped hears nothing, who has not joined knows no signal.

    And with the file that a rank waits for, where it is in one call on it for all of that time.
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
    for row in as_left(rows, told):
        still = {wait.asked for wait in find_waits(pids[row.rank])}
        file = next((wait.words for wait in waits[row.rank] if wait.asked in still), "")
        found.append(row._replace(file=file))
    return found


def _wait_for_stacks(files: Sequence[int]) -> None:
    """Return once every file has been written to and stayed as it is for `STACK_S`, at the latest after `LONGEST_STACK_S`."""
    begun_s = since_s = now_s = time.monotonic()
    before = [0] * len(files)
    while now_s - begun_s < LONGEST_STACK_S and not (all(before) and now_s - since_s >= STACK_S):
        time.sleep(STACK_S / 10)
        sizes, now_s = [os.fstat(each).st_size for each in files], time.monotonic()
        if sizes != before:
            before, since_s = sizes, now_s


def as_left(rows: Sequence[Seen], told: Sequence[Told]) -> list[Seen]:
    """The same with the stacks that they wrote last: of those that a signal ended, where it found them."""
    return [
        row._replace(stack=parse_stacks(os.pread(told[row.rank].stacks, 1 << 16, 0).decode(errors="replace"))) for row in rows
    ]


def parse_stacks(text: str) -> tuple[str, ...]:
    """The frames, innermost first, of the thread that takes steps, else of the first one; `text` is what faulthandler writes.

    >>> parse_stacks('Current thread 0x1 (most recent call first):\\n  File "a.py", line 3 in f\\n  File "b.py", line 9 in g\\n')
    ('a.py:3 in f', 'b.py:9 in g')
    """
    plain = ESCAPED.sub(lambda found: found[0].encode().decode("unicode_escape"), text)
    blocks = [list(FRAME.finditer(block)) for block in re.split(r"(?:Current t|T)hread 0x", plain)[1:]]
    stepping = [block for block in blocks if any(is_of_surefoot(found["file"], LOOP) for found in block)]
    chosen = (*stepping, *blocks, ())[0]
    return tuple(f"{found['file']}:{found['line']} in {found['name']}" for found in chosen)


def state_of(pid: int) -> str:
    """The letter of a process's state (proc(5)): R, S, D, T, Z; "?" where it cannot be read."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except (OSError, IndexError):
        return "?"
