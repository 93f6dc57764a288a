"""`ledger.bin`: which samples each step consumed, 16 bytes a step, appended; read and held against the plan without torch.

A header of 256 bytes says the plan: the order is arithmetic, so a step's samples follow from it. A row is (step, generation, checksum
of the samples' ids in the order they were read). Rows reach the disk before the commit of their step does.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import json
import os
import struct
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, NamedTuple

from surefoot.contract.commits import sync_folder
from surefoot.contract.run_folder import files
from surefoot.core.errors import RunFolderError, StorageError, hint_unread, hint_unwritten
from surefoot.core.place import close_in_children

FILE = "ledger.bin"
BAD_FILE = f".bad-{FILE}"
FORMAT = 1
HEADER_BYTES = 256
LARGEST = 2**63
ROW = struct.Struct("<IIQ")
MOST_HELD_BYTES = 4096 * ROW.size  # held back at most: a kill loses them together with the steps that they belong to


@dataclass(frozen=True, kw_only=True)
class Plan:
    """What decides which samples a step consumes: `samples` in the set, their order's `seed` and `shuffle`, the batch and its ramp.

    With a `window` so many runs of `chunk` samples are shuffled at a time.
    """

    samples: int
    seed: int
    shuffle: bool
    batch: int
    drop_last: bool
    ramp: tuple[tuple[int, int], ...] = ()
    chunk: int = 0
    window: int = 0


class Row(NamedTuple):
    step: int
    generation: int
    checksum: int


def checksum(ids: Any) -> int:
    """Of the ids of a step's samples (int64 array), in the order they were read."""
    return int.from_bytes(hashlib.blake2b(ids.data, digest_size=8).digest(), "little")


class Appended:
    """A file that begins with a header and is only appended to: what `add` was given is on disk once `sync` returns.

    `end_of(size)` says where the last whole row ends: a killed attempt may leave a part of one. Raises StorageError.
    """

    def __init__(self, path: Path, header: bytes, end_of: Callable[[int], int]) -> None:
        self._path, self._descriptor = path, -1
        close_in_children(self)
        self._rows, self._num_written = bytearray(), 0  # since the last sync; so many bytes of them stand in the file
        self._is_spoiled = False
        try:
            self._descriptor = files.open_descriptor(path.parent, path.name, os.O_RDWR | os.O_APPEND | os.O_CREAT)
            size = os.fstat(self._descriptor).st_size
            if size < HEADER_BYTES:
                os.ftruncate(self._descriptor, 0)
                self._append(self._descriptor, header)
            else:
                os.ftruncate(self._descriptor, end_of(size))
            self.num_synced = os.fstat(self._descriptor).st_size
        except OSError as error:
            raise StorageError(f"{path} cannot be written: {error.strerror}", hint=hint_unwritten(error)) from error

    def add(self, rows: bytes) -> None:
        self._rows += rows
        if len(self._rows) - self._num_written >= MOST_HELD_BYTES:
            with contextlib.suppress(OSError):  # kept until `sync`, which says so
                self._flush()

    def sync(self) -> None:
        try:
            if self._is_spoiled:
                self._write_anew()
            else:
                self._flush()
                self._is_spoiled = True
                os.fsync(self._descriptor)
                self._is_spoiled = False
        except OSError as error:
            raise StorageError(f"{self._path} cannot be written: {error.strerror}", hint=hint_unwritten(error)) from error
        self.num_synced += len(self._rows)
        self._rows, self._num_written = bytearray(), 0

    def _flush(self) -> None:
        """Write the rows; what the disk refuses is taken back whole, and tried again with the next."""
        if len(self._rows) == self._num_written:
            return
        size = os.fstat(self._descriptor).st_size
        try:
            self._append(self._descriptor, self._rows[self._num_written :])
        except OSError:
            os.ftruncate(self._descriptor, size)
            raise
        self._num_written = len(self._rows)

    def _write_anew(self) -> None:
        """After a failed fsync the next one says nothing of what that was to write: another file takes the place of this one."""
        draft = self._path.with_name(f".{FILE}.draft")
        draft.unlink(missing_ok=True)
        descriptor = files.open_descriptor(draft.parent, draft.name, os.O_RDWR | os.O_APPEND | os.O_CREAT | os.O_EXCL)
        try:
            self._append(descriptor, os.pread(self._descriptor, self.num_synced, 0) + self._rows)
            os.fsync(descriptor)
            draft.replace(self._path)
        except BaseException:
            os.close(descriptor)
            draft.unlink(missing_ok=True)
            raise
        os.close(self._descriptor)
        self._descriptor, self._is_spoiled, self._num_written = descriptor, False, len(self._rows)
        sync_folder(self._path.parent)

    @staticmethod
    def _append(descriptor: int, data: bytes | bytearray) -> None:
        done = 0
        while done < len(data):
            done += os.write(descriptor, data[done:])

    def close(self) -> None:
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1


class Ledger:
    """Appends to a run's ledger; one whose header is damaged is set aside, and its rows count as lost.

    Raises StorageError when the disk refuses, RunFolderError when the file is of another plan.
    """

    def __init__(self, folder: Path, plan: Plan, generation: int) -> None:
        self._folder, self._generation = folder, generation
        _set_damaged_aside(folder)
        self._file = Appended(folder / FILE, _header(plan), lambda size: size - (size - HEADER_BYTES) % ROW.size)
        if (found := read_plan(folder)) != plan:
            raise RunFolderError(f"{folder / FILE} is of another plan: {found}, now {plan}", hint="give another --run folder")

    def add(self, step: int, ids: Any) -> None:
        self._file.add(ROW.pack(step, self._generation, checksum(ids)))

    def count_lost(self, step: int) -> int:
        """How many rows a run that stands after `step` has lost: one that was written before its commit was is gone by damage alone."""
        return max(0, step - read_after(self._folder) - (self._file.num_synced - HEADER_BYTES) // ROW.size)

    def sync(self) -> None:
        """Everything added is on disk once this returns."""
        self._file.sync()

    def close(self) -> None:
        self._file.close()


def _header(plan: Plan, after: int = 0) -> bytes:
    row = {"surefoot ledger": FORMAT, **asdict(plan), **({"after": after} if after else {})}
    if not plan.ramp:
        del row["ramp"]  # so that an older surefoot reads what it knows
    if not plan.window:
        del row["chunk"], row["window"]
    text = json.dumps(row, separators=(",", ":") if plan.ramp else None).encode()
    if len(text) >= HEADER_BYTES:
        raise RunFolderError(f"the plan of the ledger is too long: {text.decode()}", hint="use fewer entries in train.ramp")
    return text.ljust(HEADER_BYTES - 1) + b"\n"


def begin_fork(parent: Path, folder: Path, plan: Plan, step: int) -> None:
    """Begin the ledger of a fork after `step`: with what its history consumed, as attempt 0, where that went by the same plan.

    Where the plan is another the ledger says that it begins after `step`. Raises StorageError when the disk refuses, RunFolderError
    where the parent has no ledger that can be read.
    """
    is_same = read_plan(parent) == plan
    begins = read_after(parent) if is_same else step
    rows = [ROW.pack(row.step, 0, row.checksum) for row in consumed(read(parent))[0] if row.step <= step] if is_same else []
    path = folder / FILE
    try:
        with os.fdopen(files.open_descriptor(folder, FILE, os.O_RDWR | os.O_CREAT | os.O_EXCL), "r+b") as file:
            file.write(_header(plan, begins) + b"".join(rows))
            file.flush()
            os.fsync(file.fileno())
    except OSError as error:
        raise StorageError(f"{path} cannot be written: {error.strerror}", hint=hint_unwritten(error)) from error


def read_plan(folder: Path) -> Plan:
    """The plan of a run's ledger. Raises RunFolderError for a folder without one, or one that is damaged."""
    return _read_header(folder)[0]


def read_after(folder: Path) -> int:
    """The step after which a ledger begins: 0, but for a fork that goes on by another plan. Raises RunFolderError."""
    return _read_header(folder)[1]


def _read_header(folder: Path) -> tuple[Plan, int]:
    path = folder / FILE
    try:
        with files.opened(folder, FILE) as file:
            found = _parse(file.read(HEADER_BYTES), path)
    except OSError as error:
        if error.errno == errno.EINVAL:
            raise RunFolderError(f"{path} is no ledger, but a pipe, a folder or a device", hint="move it away") from None
        is_gone = isinstance(error, FileNotFoundError | NotADirectoryError)
        hint = "surefoot runs lists the runs below a folder" if is_gone else hint_unread(error)
        raise RunFolderError(f"{path} cannot be read: {error.strerror}", hint=hint) from None
    if isinstance(found, str):
        raise RunFolderError(
            f"{path} is no ledger: {found}", hint="an unfinished run sets it aside when it goes on: surefoot resume RUN"
        )
    return found


def _parse(header: bytes, path: Path) -> tuple[Plan, int] | str:
    """What a header says, or what is wrong with it. Raises RunFolderError for another format."""
    try:
        row = json.loads(header)
        if row.pop("surefoot ledger") != FORMAT:
            raise RunFolderError(f"{path} is of another format", hint="use a newer surefoot")
        after = row.pop("after", 0)
        plan = Plan(**{**row, "ramp": tuple((samples, batch) for samples, batch in row.get("ramp", ()))})
        wrong = _find_no_number(plan, after)
        if wrong is not None:
            return wrong
        if min(plan.chunk, plan.window) < bool(plan.chunk or plan.window):
            return "it plans a window of no samples"
        return (plan, after) if min(plan.samples, plan.batch) >= 1 and after >= 0 else "it plans no samples"
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        return str(error)


def _find_no_number(plan: Plan, after: object) -> str | None:
    """What of a header is of another type than `_header` writes, in words: JSON also has 14e7, "8" and null."""
    numbers = {
        "samples": plan.samples,
        "seed": plan.seed,
        "batch": plan.batch,
        "after": after,
        "chunk": plan.chunk,
        "window": plan.window,
    }
    numbers |= {f"ramp[{i}][{j}]": value for i, stage in enumerate(plan.ramp) for j, value in enumerate(stage)}
    for name, value in numbers.items():
        if type(value) is not int or abs(value) >= LARGEST:
            return f"{name} is {str(value)[:40]}, which is no whole number of 64 bits"
    for name, truth in {"shuffle": plan.shuffle, "drop_last": plan.drop_last}.items():
        if type(truth) is not bool:
            return f"{name} is {str(truth)[:40]}, which is neither true nor false"
    return None


def _set_damaged_aside(folder: Path) -> None:
    path = folder / FILE
    header = b""
    if path.is_file():
        with files.opened(folder, FILE) as file:
            header = file.read(HEADER_BYTES)
    is_whole = len(header) == HEADER_BYTES  # a kill leaves a part of the first write
    if is_whole and isinstance(_parse(header, path), str):
        path.replace(folder / BAD_FILE)


def read(folder: Path) -> Iterator[Row]:
    """Every row in the order written; half a row at the end, which a kill leaves, and zeros, which a power cut leaves, are left out."""
    with files.opened(folder, FILE) as file:
        file.seek(HEADER_BYTES)
        while len(data := file.read(ROW.size * 4096)) >= ROW.size:
            yield from (Row(*fields) for fields in ROW.iter_unpack(data[: len(data) // ROW.size * ROW.size]) if fields[0])


def consumed(rows: Iterator[Row]) -> tuple[list[Row], int]:
    """The rows that count, and how many were overruled: an attempt that went back to step n takes over from there."""
    kept: list[Row] = []
    overruled = 0
    for row in rows:
        if kept and row.generation > kept[-1].generation:
            while kept and kept[-1].step >= row.step:
                kept.pop()
                overruled += 1
        kept.append(row)
    return kept, overruled
