"""Flight record of a rank: its step, microbatch and collectives, readable by its launcher.

The record is in shared memory. The rank writes it without waiting, and the launcher reads it at any
time, even if the rank hangs. For each rank the launcher makes two in-memory files: one for the
record, and one for the stacks of the rank's threads. The rank writes the stacks when it receives
the signal `core.process.signals.STACKS_SIGNAL`.
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
from pathlib import Path
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
    """Type of a collective operation."""

    NONE = 0
    SUM = 1
    WAIT = 2
    LARGEST = 3
    GATHER = 4
    COPY = 5
    SCATTER = 6
    SWAP = 7
    SEND = 8
    JOIN = 9

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
            Kind.JOIN: "the connection of all ranks",
        }[self]

    def range(self, num_bytes: int) -> str:
        """Return the name of a collective of this type and size in a profiler trace."""
        return f"{RANGE}{self.words} of {num_bytes} bytes"


@dataclass(frozen=True)
class Record:
    """Content of a flight record: the step, the microbatch and the newest collective of a rank.

    `count` is the number of collectives that the rank has started; `kind` and `num_bytes` are those
    of the newest. `waits_s` is the time since the current collective started, in seconds; None if
    the rank is in none. `recent` maps the numbers of the newest collectives to their kind and
    bytes. The bytes are -1 if they may differ between ranks.
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
        """True if the rank does something that only one rank does, such as saving a checkpoint."""
        return self.microbatch == BUSY


class RankSnapshot(NamedTuple):
    """State of one rank as its launcher sees it.

    `record` is the flight record of the rank, `state` the letter of its process state (proc(5)),
    `stack` its stack with the innermost frame first, and `file` the file that it waits for, such as
    `read of /data/part.tar`.
    """

    rank: int
    record: Record
    state: str
    stack: tuple[str, ...] = ()
    file: str = ""


class Flight:
    """Writer of a flight record, in the rank itself.

    `files` are the descriptors of the record and of the file for stacks, which is -1 for none.
    """

    def __init__(self, descriptor: int, stacks: int = -1) -> None:
        self.files = (descriptor, stacks)
        self._map = mmap.mmap(descriptor, NUM_BYTES)
        self._count = 0

    def step(self, number: int) -> None:
        """Record that step `number` starts."""
        ROW.pack_into(self._map, 0, number, -1, self._count, 0, 0, 0)

    def run(self, folder: Path, generation: int) -> None:
        """Record the run folder that this rank writes, and the generation of this attempt."""
        os.ftruncate(self.files[0], NUM_BYTES)  # cuts off the folder of an earlier run
        os.pwrite(self.files[0], FIELD.pack(generation) + os.fsencode(folder), NUM_BYTES)

    def microbatch(self, number: int) -> None:
        """Record that the forward and backward pass of microbatch `number` starts."""
        FIELD.pack_into(self._map, MICROBATCH, number)

    @contextmanager
    def busy(self) -> Iterator[None]:
        """Record that, inside the block, this rank works alone and the others may wait for it."""
        FIELD.pack_into(self._map, MICROBATCH, BUSY)
        try:
            yield
        finally:
            FIELD.pack_into(self._map, MICROBATCH, -1)

    def during(
        self, kind: Kind, num_bytes: int, job: Callable[[], Result], *, is_of_all: bool = True
    ) -> Result:
        """Record the start of a collective, run it by calling `job`, and record its end.

        Returns the result of `job`. If `job` raises, the end is not recorded, so that the record
        shows the failed collective. `is_of_all` is False for a collective among the ranks of one
        mesh axis; its size may differ between ranks.
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
    """Make the in-memory file of a flight record, and return its descriptor.

    The file exists as long as a process has it open.
    """
    descriptor = open_nameless(name)
    os.ftruncate(descriptor, NUM_BYTES)
    return descriptor


def request_restart(descriptor: int) -> None:
    """Announce to a rank that it will be ended in order to restart, and that the run continues.

    `descriptor` is that of the rank's flight record.
    """
    os.pwrite(descriptor, FIELD.pack(RECALLED), RECALL)


def is_recalled(descriptor: int | None) -> bool:
    """Return whether the launcher announced a restart, by `request_restart`.

    False if there is no launcher (`descriptor` is None).
    """
    return _is_written(descriptor, RECALLED)


def dismiss(descriptor: int) -> None:
    """Request that a rank end itself at once, because it or a different rank blocks the others.

    The rank ends with the exit code of LostRank. `descriptor` is that of its flight record.
    """
    os.pwrite(descriptor, FIELD.pack(DISMISSED), RECALL)


def is_dismissed(descriptor: int) -> bool:
    """Return whether the launcher has requested, by `dismiss`, that this rank end itself."""
    return _is_written(descriptor, DISMISSED)


def _is_written(descriptor: int | None, value: int) -> bool:
    if descriptor is None:
        return False
    try:
        return os.pread(descriptor, FIELD.size, RECALL) == FIELD.pack(value)
    except OSError:  # a child process of a rank has its environment, and not its files
        return False


def open_nameless(name: str) -> int:
    """Return the descriptor of a new in-memory file, or of a temporary file without a name.

    Tools that inspect the process show `name`.
    """
    if hasattr(os, "memfd_create"):
        return os.memfd_create(name)
    with tempfile.TemporaryFile() as file:
        return os.dup(file.fileno())


def read_run(descriptor: int) -> tuple[Path, int] | None:
    """Return the run folder that a rank writes, and the generation of the attempt.

    None if the rank has not recorded them.
    """
    content = os.pread(descriptor, os.fstat(descriptor).st_size, NUM_BYTES)
    if len(content) <= FIELD.size:
        return None
    return Path(os.fsdecode(content[FIELD.size :])), FIELD.unpack_from(content)[0]


def read(descriptor: int) -> Record:
    """Return the flight record in the file with this descriptor."""
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
