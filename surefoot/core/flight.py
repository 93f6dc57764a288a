"""What a rank does, told to whoever launched it, in memory that both have: a few numbers, written without waiting, read at any time.

The launcher makes one file of memory for each rank, and another that takes the stacks of its threads when it is asked by
`core.signals.STACKS_SIGNAL`.
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
RANGE = "ranks: "  # what ranks do together is called so in a trace, and what follows
KEPT = 16  # collectives of which kind and size are remembered
NUM_BYTES = 64 + 8 * KEPT
BUSY = -2  # in the place of a microbatch
ROW = struct.Struct("<6q")  # step, microbatch, collectives begun, kind of the last, its bytes, when it was begun (0: it is over)
FIELD = struct.Struct("<q")
STEP, MICROBATCH, COUNT, KIND, SIZE, SINCE = range(0, 48, 8)
RECALL, RECALLED = 48, 0x7265_6361_6C6C  # where a launcher writes that it ends the ranks to begin them anew, and what
DISMISSED = 0x6469_736D_6973  # written in the same place: the rank is to end itself at once
RECENT = struct.Struct(f"<{KEPT}q")  # of collective n in place n % KEPT: its size times 16 and its kind


class Kind(IntEnum):
    """What ranks do together."""

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
            Kind.NONE: "nothing", Kind.SUM: "a sum", Kind.WAIT: "the sum of gradients", Kind.LARGEST: "a maximum",
            Kind.GATHER: "a gathering", Kind.COPY: "a copy from one rank",
            Kind.SCATTER: "a sum in pieces", Kind.SWAP: "an exchange of pieces", Kind.SEND: "a message",
        }[self]  # fmt: skip

    def range(self, num_bytes: int) -> str:
        """What it is called in a trace."""
        return f"{RANGE}{self.words} of {num_bytes} bytes"


@dataclass(frozen=True)
class Record:
    """Where a rank is: its `step` and `microbatch`, its `count`-th collective, and how long it has been in that one, or None.

    `recent` holds kind and bytes of the newest collectives by their number; bytes are -1 where ranks may differ in them.
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
        """Whether it saves, or does something else that only one rank does."""
        return self.microbatch == BUSY


class Seen(NamedTuple):
    """One rank as its launcher sees it: its record, the letter of its state (proc(5)), its stack, innermost frame first, and the file that
    it waits for, as `read of /data/part.tar`."""

    rank: int
    record: Record
    state: str
    stack: tuple[str, ...] = ()
    file: str = ""


class Flight:
    """The writing end, in the rank; `files` are the descriptors of its record and of the stacks that it writes when asked."""

    def __init__(self, descriptor: int, stacks: int = -1) -> None:
        self.files = (descriptor, stacks)
        self._map = mmap.mmap(descriptor, NUM_BYTES)
        self._count = 0

    def step(self, number: int) -> None:
        """A step begins."""
        ROW.pack_into(self._map, 0, number, -1, self._count, 0, 0, 0)

    def microbatch(self, number: int) -> None:
        """A pass of this step begins."""
        FIELD.pack_into(self._map, MICROBATCH, number)

    @contextmanager
    def busy(self) -> Iterator[None]:
        """This rank does what the others do not, and may take its time over it."""
        FIELD.pack_into(self._map, MICROBATCH, BUSY)
        try:
            yield
        finally:
            FIELD.pack_into(self._map, MICROBATCH, -1)

    def during(self, kind: Kind, num_bytes: int, job: Callable[[], Result], *, is_of_all: bool = True) -> Result:
        """Do what all ranks do together, or (`is_of_all`) those of an axis, which may hold more than those of another.

        Where it ends in an error the record stays as it is: whoever looks on sees in what.
        """
        self._count += 1
        FIELD.pack_into(self._map, COUNT, self._count)
        FIELD.pack_into(self._map, KIND, kind)
        FIELD.pack_into(self._map, SIZE, num_bytes)
        FIELD.pack_into(self._map, ROW.size + 16 + 8 * (self._count % KEPT), (num_bytes if is_of_all else -1) * 16 + kind)
        FIELD.pack_into(self._map, SINCE, time.monotonic_ns())
        result = job()
        FIELD.pack_into(self._map, SINCE, 0)
        return result


def make_file(name: str) -> int:
    """A file of memory that lives as long as somebody has it open; gives its descriptor."""
    descriptor = open_nameless(name)
    os.ftruncate(descriptor, NUM_BYTES)
    return descriptor


def recall(descriptor: int) -> None:
    """Tell a rank that it will be ended to begin anew: its end is not that of the run."""
    os.pwrite(descriptor, FIELD.pack(RECALLED), RECALL)


def is_recalled(descriptor: int | None) -> bool:
    """Whether this rank's launcher told it so; False where nobody looks on."""
    return _is_written(descriptor, RECALLED)


def dismiss(descriptor: int) -> None:
    """Tell a rank to end itself at once, as a lost rank does: it, or another one, keeps the others waiting."""
    os.pwrite(descriptor, FIELD.pack(DISMISSED), RECALL)


def is_dismissed(descriptor: int) -> bool:
    """Whether this rank was told so."""
    return _is_written(descriptor, DISMISSED)


def _is_written(descriptor: int | None, value: int) -> bool:
    if descriptor is None:
        return False
    try:
        return os.pread(descriptor, FIELD.size, RECALL) == FIELD.pack(value)
    except OSError:  # a process that a rank began has its variables, and not its files
        return False


def open_nameless(name: str) -> int:
    """A file of memory, or one that has no name any more; gives its descriptor. `name` is for those who look at a process from outside."""
    if hasattr(os, "memfd_create"):
        return os.memfd_create(name)
    with tempfile.TemporaryFile() as file:
        return os.dup(file.fileno())


def read(descriptor: int) -> Record:
    """What a rank wrote last."""
    step, microbatch, count, kind, num_bytes, since_ns = ROW.unpack_from(content := os.pread(descriptor, NUM_BYTES, 0))
    waits_s = (time.monotonic_ns() - since_ns) / 1e9 if since_ns else None
    kept = RECENT.unpack_from(content, ROW.size + 16)
    recent = {
        each: (Kind(kept[each % KEPT] % 16), kept[each % KEPT] // 16) for each in range(max(1, count - KEPT + 1), count + 1)
    }
    return Record(step, microbatch, count, Kind(kind), num_bytes, waits_s, recent)
