"""Flight record of a rank: a few numbers in memory shared with its launcher.

The rank writes them without waiting, and the launcher reads them at any time. The launcher makes
one in-memory file for the record of each rank, and another for the stacks of its threads, which the
rank writes on `core.process.signals.STACKS_SIGNAL`.
"""

from __future__ import annotations

import mmap
import os
import struct
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from enum import IntEnum
from typing import NamedTuple, TypeVar

Result = TypeVar("Result")
RANGE = "ranks: "  # prefix of the name of a collective in a trace
KEPT = 16  # number of the newest collectives whose kind and size are recorded
NUM_BYTES = 64 + 8 * KEPT
BUSY = -2  # value of the microbatch while a rank is busy alone
# step, microbatch, collectives started, kind of the last, its bytes, its start (0: it has ended)
ROW = struct.Struct("<6q")
FIELD = struct.Struct("<q")
STEP, MICROBATCH, COUNT, KIND, SIZE, SINCE = range(0, 48, 8)
# where a launcher writes that it restarts the ranks, and the value
RECALL, RECALLED = 48, 0x7265_6361_6C6C
DISMISSED = 0x6469_736D_6973  # value at the same offset: the rank must end itself at once
RECENT = struct.Struct(f"<{KEPT}q")  # collective n at index n % KEPT: its size * 16 + its kind


class Kind(IntEnum):
    """Kinds of collectives."""

    NONE = 0
    SUM = 1
    WAIT = 2
    LARGEST = 3
    GATHER = 4
    COPY = 5
    SCATTER = 6
    SWAP = 7
    SEND = 8

    @property
    def words(self) -> str:
        return {
            Kind.NONE: "nothing",
            Kind.SUM: "a sum",
            Kind.WAIT: "the sum of gradients",
            Kind.LARGEST: "a maximum",
            Kind.GATHER: "a gathering",
            Kind.COPY: "a copy from one rank",
            Kind.SCATTER: "a sum in pieces",
            Kind.SWAP: "an exchange of pieces",
            Kind.SEND: "a message",
        }[self]

    def range(self, num_bytes: int) -> str:
        """Return the name of the collective in a trace."""
        return f"{RANGE}{self.words} of {num_bytes} bytes"


@dataclass(frozen=True)
class Record:
    """State of a rank: its step, its microbatch and its collective.

    `count` is the number of collectives started, `waits_s` the seconds in the current collective,
    None outside of one. `recent` maps the numbers of the newest collectives to their kind and
    bytes; bytes are -1 where they may differ between ranks.
    """

    step: int
    microbatch: int
    count: int
    kind: Kind
    num_bytes: int
    waits_s: float | None
    recent: Mapping[int, tuple[Kind, int]] = field(default_factory=dict)

    @property
    def is_busy(self) -> bool:
        """True if the rank saves, or does something else that only one rank does."""
        return self.microbatch == BUSY


class RankSnapshot(NamedTuple):
    """Observation of one rank by its launcher.

    It holds the flight record, the letter of the process state (proc(5)), the stack, innermost
    frame first, and the file that the rank waits for, such as `read of /data/part.tar`.
    """

    rank: int
    record: Record
    state: str
    stack: tuple[str, ...] = ()
    file: str = ""


class Flight:
    """The writing end of a flight record, in the rank.

    `files` are the descriptors of the record and of the stacks.
    """

    def __init__(self, descriptor: int, stacks: int = -1) -> None:
        self.files = (descriptor, stacks)
        self._map = mmap.mmap(descriptor, NUM_BYTES)
        self._count = 0

    def step(self, number: int) -> None:
        """Record that a step starts."""
        ROW.pack_into(self._map, 0, number, -1, self._count, 0, 0, 0)

    def microbatch(self, number: int) -> None:
        """Record that the forward and backward pass of a microbatch starts."""
        FIELD.pack_into(self._map, MICROBATCH, number)

    @contextmanager
    def busy(self) -> Iterator[None]:
        """Record that this rank works alone inside the block, and may make the others wait."""
        FIELD.pack_into(self._map, MICROBATCH, BUSY)
        try:
            yield
        finally:
            FIELD.pack_into(self._map, MICROBATCH, -1)

    def during(
        self, kind: Kind, num_bytes: int, job: Callable[[], Result], *, is_of_all: bool = True
    ) -> Result:
        """Run `job`, a collective, and record it.

        With `is_of_all` False only the ranks of an axis take part, and sizes may differ between
        them. If `job` raises, the record is left as it is, so that it shows the failed collective.
        """
        self._count += 1
        FIELD.pack_into(self._map, COUNT, self._count)
        FIELD.pack_into(self._map, KIND, kind)
        FIELD.pack_into(self._map, SIZE, num_bytes)
        FIELD.pack_into(
            self._map,
            ROW.size + 16 + 8 * (self._count % KEPT),
            (num_bytes if is_of_all else -1) * 16 + kind,
        )
        FIELD.pack_into(self._map, SINCE, time.monotonic_ns())
        result = job()
        FIELD.pack_into(self._map, SINCE, 0)
        return result


def make_file(name: str) -> int:
    """Make an in-memory file that lives as long as a process has it open; return its descriptor."""
    descriptor = open_nameless(name)
    os.ftruncate(descriptor, NUM_BYTES)
    return descriptor


def request_restart(descriptor: int) -> None:
    """Tell a rank that its end will be a restart, not the end of the run."""
    os.pwrite(descriptor, FIELD.pack(RECALLED), RECALL)


def is_recalled(descriptor: int | None) -> bool:
    """Return whether the launcher announced a restart; False without a launcher."""
    return _is_written(descriptor, RECALLED)


def dismiss(descriptor: int) -> None:
    """Make a rank end itself at once as a lost rank: it, or another rank, blocks the others."""
    os.pwrite(descriptor, FIELD.pack(DISMISSED), RECALL)


def is_dismissed(descriptor: int) -> bool:
    """Return whether the launcher has requested that this rank end itself."""
    return _is_written(descriptor, DISMISSED)


def _is_written(descriptor: int | None, value: int) -> bool:
    if descriptor is None:
        return False
    try:
        return os.pread(descriptor, FIELD.size, RECALL) == FIELD.pack(value)
    except OSError:  # a child process of a rank has its environment, and not its files
        return False


def open_nameless(name: str) -> int:
    """Return the descriptor of an in-memory file, or of a temporary file without a name.

    `name` is shown by tools that inspect the process.
    """
    if hasattr(os, "memfd_create"):
        return os.memfd_create(name)
    with tempfile.TemporaryFile() as file:
        return os.dup(file.fileno())


def read(descriptor: int) -> Record:
    """Return the flight record in a file."""
    step, microbatch, count, kind, num_bytes, since_ns = ROW.unpack_from(
        content := os.pread(descriptor, NUM_BYTES, 0)
    )
    waits_s = (time.monotonic_ns() - since_ns) / 1e9 if since_ns else None
    kept = RECENT.unpack_from(content, ROW.size + 16)
    recent = {
        each: (Kind(kept[each % KEPT] % 16), kept[each % KEPT] // 16)
        for each in range(max(1, count - KEPT + 1), count + 1)
    }
    return Record(step, microbatch, count, Kind(kind), num_bytes, waits_s, recent)
