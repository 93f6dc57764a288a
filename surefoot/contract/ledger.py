"""`ledger.bin`: a record of the samples that each step consumed, 16 bytes per step, append-only.

It is read and checked without torch. The header of 256 bytes holds the plan, from which the samples
of each step can be computed. A row holds the step, the generation (the number of the attempt that
wrote it), and a checksum of the samples' ids in the order they were read. Rows reach the disk
before the checkpoint of their step.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import json
import os
import shlex
import struct
from collections.abc import Callable, Iterable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple, Protocol, TypeVar

from surefoot.contract import events
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
# buffered at most: a kill loses these rows together with the steps that they belong to
MAX_BUFFERED_BYTES = 4096 * ROW.size
MAX_HEADER_BYTES = 256 * HEADER_BYTES  # a damaged one may have no end
MAX_WAITING = 64  # steps whose samples wait to be hashed


@dataclass(frozen=True, kw_only=True)
class Plan:
    """Values that determine which samples a step consumes.

    `samples` is the size of the data set; `seed` and `shuffle` determine the order. `ramp` lists
    (samples seen, batch size from there on) of a batch size that grows. If `window` is not 0, the
    data are divided into chunks of `chunk` samples, and the samples of `window` chunks are shuffled
    together. `mixture` describes a mixture of sources; `samples` is then the length of an epoch.
    """

    samples: int
    seed: int
    shuffle: bool
    batch: int
    drop_last: bool
    ramp: tuple[tuple[int, int], ...] = ()
    chunk: int = 0
    window: int = 0
    mixture: str = ""


class Row(NamedTuple):
    step: int
    generation: int
    checksum: int


class LedgerEntry(Protocol):
    """Row of a ledger: what the attempt number `generation` consumed in a step."""

    @property
    def step(self) -> int: ...

    @property
    def generation(self) -> int: ...


Entry = TypeVar("Entry", bound=LedgerEntry)


class LedgerFault(NamedTuple):
    """Fault in a ledger: a row, or a missing row, that deviates from what was planned.

    `kind` is `lost`, `left` (by a loop, before the end of an epoch), `twice`, `out of order`,
    `other samples`, `other data`, `read ahead` or `damaged`. `told` describes the fault.
    """

    kind: str
    step: int
    told: str


def checksum(ids: Any) -> int:
    """Return a checksum of the ids of a step's samples (int64 array, in reading order)."""
    return int.from_bytes(hashlib.blake2b(ids.data, digest_size=8).digest(), "little")


class AppendOnlyFile:
    """Append-only file with a header; rows that were passed to `add` are on disk after `sync`.

    A killed attempt may leave a partial row, which is cut off when the file is opened:
    `end_of(size)` returns the end of the last complete row of a file of `size` bytes. The
    constructor and `sync` raise StorageError if writing fails.
    """

    def __init__(self, path: Path, header: bytes, end_of: Callable[[int], int]) -> None:
        self._path, self._descriptor = path, -1
        close_in_children(self)
        # rows since the last sync, and how many of their bytes are in the file
        self._rows, self._num_written = bytearray(), 0
        self._is_spoiled = False
        try:
            self._descriptor = files.open_descriptor(
                path.parent, path.name, os.O_RDWR | os.O_APPEND | os.O_CREAT
            )
            size = os.fstat(self._descriptor).st_size
            if size < HEADER_BYTES:
                os.ftruncate(self._descriptor, 0)
                self._append(self._descriptor, header)
            else:
                os.ftruncate(self._descriptor, end_of(size))
            self.num_synced = os.fstat(self._descriptor).st_size
        except OSError as error:
            raise StorageError(
                f"{path} cannot be written: {error.strerror}", hint=hint_unwritten(error)
            ) from error

    def add(self, rows: bytes) -> None:
        self._rows += rows
        if len(self._rows) - self._num_written >= MAX_BUFFERED_BYTES:
            with contextlib.suppress(OSError):
                # the rows are kept until `sync`, which reports the error
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
            raise StorageError(
                f"{self._path} cannot be written: {error.strerror}", hint=hint_unwritten(error)
            ) from error
        self.num_synced += len(self._rows)
        self._rows, self._num_written = bytearray(), 0

    def _flush(self) -> None:
        """Write the buffered rows to the file.

        After an error the file is truncated to its previous size, and the rows stay in the buffer.
        """
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
        """Replace the file by a new one that has the synced content and the buffered rows.

        This is for use after a failed fsync: a second fsync would not report the data that was
        lost.
        """
        draft = self._path.with_name(f".{FILE}.draft")
        draft.unlink(missing_ok=True)
        descriptor = files.open_descriptor(
            draft.parent, draft.name, os.O_RDWR | os.O_APPEND | os.O_CREAT | os.O_EXCL
        )
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
    """Writer of a run's ledger.

    A ledger with a damaged header is renamed and replaced by an empty one, so its rows count as
    lost. Raises StorageError if writing fails, RunFolderError if the file has a different plan.
    """

    def __init__(self, folder: Path, plan: Plan, generation: int) -> None:
        self._folder, self._generation = folder, generation
        # steps whose samples are hashed together: between other work, a hash takes ten times longer
        self._waiting: list[tuple[int, Any]] = []
        _set_damaged_aside(folder)
        header = _header(plan)
        exists = (folder / FILE).is_file() and (folder / FILE).stat().st_size >= HEADER_BYTES
        self._header_bytes = count_header_bytes(folder) if exists else len(header)
        self._file = AppendOnlyFile(
            folder / FILE, header, lambda size: size - (size - self._header_bytes) % ROW.size
        )
        if (found := read_plan(folder)) != plan:
            raise RunFolderError(
                f"{folder / FILE} was written for a different plan: {found}, now {plan}",
                hint="give another --run folder",
            )

    def add(self, step: int, ids: Any) -> None:
        """Add the row of a step; `ids` must not change afterwards."""
        self._waiting.append((step, ids))
        if len(self._waiting) == MAX_WAITING:
            self._add_waiting()

    def _add_waiting(self) -> None:
        rows = [ROW.pack(step, self._generation, checksum(ids)) for step, ids in self._waiting]
        self._file.add(b"".join(rows))
        self._waiting.clear()

    def count_lost(self, step: int) -> int:
        """Return how many rows are missing if the run resumes after `step`.

        A row is written before the checkpoint of its step, so only damage can remove it.
        """
        return max(
            0,
            step
            - read_after(self._folder)
            - (self._file.num_synced - self._header_bytes) // ROW.size,
        )

    def sync(self) -> None:
        """Write the added rows to disk."""
        self._add_waiting()
        self._file.sync()

    def close(self) -> None:
        self._file.close()


def _header(plan: Plan, after: int = 0) -> bytes:
    row = {"surefoot ledger": FORMAT, **asdict(plan), **({"after": after} if after else {})}
    if not plan.ramp:
        del row["ramp"]  # so that an older surefoot can read the header
    if not plan.window:
        del row["chunk"], row["window"]
    if not plan.mixture:
        del row["mixture"]
    text = json.dumps(row, separators=(",", ":") if plan.ramp else None).encode()
    if len(text) >= MAX_HEADER_BYTES:
        raise RunFolderError(
            f"the plan of the ledger has {len(text):,} bytes, {MAX_HEADER_BYTES:,} are possible",
            hint="use fewer entries in train.ramp, or fewer changes of a mixture",
        )
    return text.ljust(len(text) // HEADER_BYTES * HEADER_BYTES + HEADER_BYTES - 1) + b"\n"


def _read_header_bytes(file: BinaryIO) -> bytes:
    """Read the header: as many blocks as it takes until one ends a line."""
    header, block = b"", file.read(HEADER_BYTES)
    while len(block) == HEADER_BYTES:
        header += block
        if block.endswith(b"\n") or len(header) == MAX_HEADER_BYTES:
            return header
        block = file.read(HEADER_BYTES)
    return header + block


def count_header_bytes(folder: Path) -> int:
    """Return the size of the header of the ledger in a run folder."""
    with files.open_file(folder, FILE) as file:
        return len(_read_header_bytes(file))


def begin_fork(parent: Path, folder: Path, plan: Plan, step: int) -> None:
    """Write the first rows of the ledger of a run that is forked from `parent` after `step`.

    They are the rows of the parent up to `step`, as attempt 0. If the fork has a different plan,
    the ledger is empty and records that it starts after `step`. Raises StorageError if writing
    fails, RunFolderError if the parent has no readable ledger.
    """
    is_same = read_plan(parent) == plan
    begins = read_after(parent) if is_same else step
    rows = (
        [
            ROW.pack(row.step, 0, row.checksum)
            for row in consumed(read(parent))[0]
            if row.step <= step
        ]
        if is_same
        else []
    )
    path = folder / FILE
    try:
        with os.fdopen(
            files.open_descriptor(folder, FILE, os.O_RDWR | os.O_CREAT | os.O_EXCL), "r+b"
        ) as file:
            file.write(_header(plan, begins) + b"".join(rows))
            file.flush()
            os.fsync(file.fileno())
    except OSError as error:
        raise StorageError(
            f"{path} cannot be written: {error.strerror}", hint=hint_unwritten(error)
        ) from error


def read_plan(folder: Path) -> Plan:
    """Return the plan of a run's ledger. Raises RunFolderError if it is missing or damaged."""
    return _read_header(folder)[0]


def read_after(folder: Path) -> int:
    """Return the step after which a ledger starts: 0, except for a fork with a different plan.

    Raises RunFolderError if the ledger is missing or damaged.
    """
    return _read_header(folder)[1]


def _read_header(folder: Path) -> tuple[Plan, int]:
    path = folder / FILE
    try:
        with files.open_file(folder, FILE) as file:
            found = _parse(_read_header_bytes(file), path)
    except OSError as error:
        if error.errno == errno.EINVAL:
            raise RunFolderError(
                f"{path} must be a regular file; it is a pipe, a folder or a device",
                hint="move it away",
            ) from None
        if isinstance(error, FileNotFoundError):
            raise RunFolderError(
                f"{path} is missing, so it is not known which samples the run consumed",
                hint="copy the file from a backup of the run folder; or start a new run from the "
                f"weights alone: surefoot resume {shlex.quote(str(folder))} --fork NEW "
                "--weights-only",
            ) from None
        raise RunFolderError(
            f"{path} cannot be read: {error.strerror}", hint=hint_unread(error)
        ) from None
    if isinstance(found, str):
        raise RunFolderError(
            f"{path} is not a ledger: {found}",
            hint=(
                "an unfinished run sets the file aside when it resumes: surefoot resume "
                f"{shlex.quote(str(folder))}"
            ),
        )
    return found


def _parse(header: bytes, path: Path) -> tuple[Plan, int] | str:
    """Return the plan of a header and the step after which its ledger starts, or an error text.

    Raises RunFolderError if the header has a different format version.
    """
    try:
        row = json.loads(header)
        if row.pop("surefoot ledger") != FORMAT:
            raise RunFolderError(
                f"{path} was written in a format that this release does not read",
                hint="use a newer surefoot",
            )
        after = row.pop("after", 0)
        plan = Plan(
            **{**row, "ramp": tuple((samples, batch) for samples, batch in row.get("ramp", ()))}
        )
        wrong = _find_no_number(plan, after)
        if wrong is not None:
            return wrong
        if min(plan.chunk, plan.window) < bool(plan.chunk or plan.window):
            return "its plan has a shuffle window of 0 samples"
        return (
            (plan, after)
            if min(plan.samples, plan.batch) >= 1 and after >= 0
            else "its plan has 0 samples"
        )
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        return str(error)


def _find_no_number(plan: Plan, after: object) -> str | None:
    """Return a description of the first value in a header that has a wrong type, or None.

    A damaged header may be valid JSON, but have 14e7, "8" or null in place of an integer.
    """
    numbers = {
        "samples": plan.samples,
        "seed": plan.seed,
        "batch": plan.batch,
        "after": after,
        "chunk": plan.chunk,
        "window": plan.window,
    }
    numbers |= {
        f"ramp[{i}][{j}]": value
        for i, stage in enumerate(plan.ramp)
        for j, value in enumerate(stage)
    }
    for name, value in numbers.items():
        if type(value) is not int or abs(value) >= LARGEST:
            return f"{name} is {str(value)[:40]}, which is no 64-bit integer"
    if type(plan.mixture) is not str:
        return f"mixture is {str(plan.mixture)[:40]}, which is no text"
    for name, truth in {"shuffle": plan.shuffle, "drop_last": plan.drop_last}.items():
        if type(truth) is not bool:
            return f"{name} is {str(truth)[:40]}, which is neither true nor false"
    return None


def _set_damaged_aside(folder: Path) -> None:
    path = folder / FILE
    header = b""
    if path.is_file():
        with files.open_file(folder, FILE) as file:
            header = _read_header_bytes(file)
    is_whole = len(header) >= HEADER_BYTES  # a kill may leave a part of the first write
    if is_whole and isinstance(_parse(header, path), str):
        path.replace(folder / BAD_FILE)


def read(folder: Path) -> Iterator[Row]:
    """Yield every row in the order written.

    A partial row at the end (after a kill) and rows of zeros (after a power cut) are left out.
    """
    with files.open_file(folder, FILE) as file:
        _read_header_bytes(file)
        while len(data := file.read(ROW.size * 4096)) >= ROW.size:
            yield from (
                Row(*fields)
                for fields in ROW.iter_unpack(data[: len(data) // ROW.size * ROW.size])
                if fields[0]
            )


def consumed(rows: Iterable[Entry]) -> tuple[list[Entry], int]:
    """Return the rows that are still valid, and the number of rows that were replaced.

    An attempt that resumes at an earlier step replaces the rows of earlier attempts from that step
    on.
    """
    kept: list[Entry] = []
    overruled = 0
    for row in rows:
        while kept and row.generation > kept[-1].generation and kept[-1].step >= row.step:
            kept.pop()
            overruled += 1
        kept.append(row)
    return kept, overruled


def read_faults(run: Path) -> list[events.Fault]:
    """Return the faults that the log of a run records; none if the folder has no log."""
    if not (run / events.FILE).is_file():
        return []
    return [each for each in events.read(run, events.Fault) if isinstance(each, events.Fault)]


def find_other_data(faults: Iterable[events.Fault]) -> list[LedgerFault]:
    """Return a fault for each resume at which, according to the log, the data had changed.

    The ledger holds only the numbers of samples, so it cannot show that the samples themselves
    changed.
    """
    return [
        LedgerFault(
            "other data",
            each.step,
            f"attempt {each.generation} resumed after step {each.step:,}: {each.detail}",
        )
        for each in faults
        if each.fault == "other-data"
    ]
