"""`ledger.bin` of a user-written loop: the samples of each batch that the loop consumed.

It is read and checked without torch. The user's loader chooses the order, so there is no plan, and
the ids of the samples are stored, 4 bytes each. A header of 256 bytes holds the guarantees of an
epoch.

A row describes one batch: (step, generation, epoch, index in the epoch, number of ids), the ids,
and the CRC-32 of both. If the data do not identify the samples of a batch, the row has no ids. A
step that consumed no batch (a second step on the same batch) has a row without ids, whose index is
NO_BATCH. Rows of the previous release have no CRC, and a loop that it started continues with such
rows. In the names of this module, an epoch is called a pass.
"""

from __future__ import annotations

import json
import os
import struct
import zlib
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from itertools import pairwise
from pathlib import Path
from typing import BinaryIO, NamedTuple

from surefoot.contract import events
from surefoot.contract.ledger import (
    FILE,
    HEADER_BYTES,
    AppendOnlyFile,
    LedgerFault,
    consumed,
    find_other_data,
    read_faults,
)
from surefoot.contract.run_folder import files
from surefoot.core.errors import RunFolderError

FORMAT, PREVIOUS_FORMAT = "loop 2", "loop 1"
HEAD, CHECKSUM = struct.Struct("<IIIII"), struct.Struct("<I")
ID_BYTES = 4
MAX_IDS = 1 << 32
NO_BATCH = (1 << 32) - 1  # the index in a row of a step that consumed no batch


@dataclass(frozen=True, kw_only=True)
class LoopGuarantee:
    """Guarantees of a user's data loader about an epoch.

    `samples` is the size of the data set, None if unknown. `once` is True if an epoch has no sample
    twice, `all` if a complete epoch has every sample. With `digests`, the samples of a batch are
    not known, and a digest of the batch, as four 32-bit numbers, is stored instead of their ids.
    """

    samples: int | None = None
    once: bool = False
    all: bool = False
    digests: bool = False


class Batch(NamedTuple):
    """Batch of a loop, and the step and attempt that consumed it.

    `generation` is the number of the attempt. `number_of_pass` is the number of the epoch and
    `place` the index of the batch in it, both from 0. `ids` is empty if the samples are not known.
    """

    step: int
    generation: int
    number_of_pass: int
    place: int
    ids: tuple[int, ...]


class DamagedBytes(NamedTuple):
    """Range of bytes in the file that is not a valid row.

    `step` is the step of the last valid row before it, 0 if there is none.
    """

    start: int
    end: int
    step: int


@dataclass(frozen=True, kw_only=True)
class LoopConsumed:
    """Result of checking a loop's ledger.

    `attempts` are the numbers of the attempts. `num_overruled` is the number of batches that a
    later attempt read again. `num_passes` is the number of epochs, complete or not.
    """

    promise: LoopGuarantee
    last: int
    attempts: tuple[int, ...]
    num_batches: int
    num_overruled: int
    num_samples: int
    num_passes: int
    num_compared: int  # overruled batches that were compared with the batches read in their place
    faults: tuple[LedgerFault, ...]

    @property
    def holds(self) -> bool:
        return not self.faults


class LoopLedger:
    """Writer of a loop's ledger.

    Raises StorageError if writing fails, RunFolderError if the file was written for different data.
    """

    def __init__(self, folder: Path, promise: LoopGuarantee, generation: int) -> None:
        path, self._generation = folder / FILE, generation
        header = (
            json.dumps({"surefoot ledger": FORMAT, **asdict(promise)})
            .encode()
            .ljust(HEADER_BYTES - 1)
            + b"\n"
        )
        self._file = AppendOnlyFile(
            path, header, lambda size: max((end for _, end in _scan(folder)), default=HEADER_BYTES)
        )
        found = read_promise(folder)
        if replace(found, digests=promise.digests) != promise:
            raise RunFolderError(
                f"{path} was written for other data: {found}, now {promise}",
                hint="give another folder",
            )
        # a ledger that was started without digests or checksums stays without
        self._leaves_out = promise.digests and not found.digests
        with files.open_file(folder, FILE) as file:
            self._has_checksums = _has_checksums(file)

    def add(self, step: int, number_of_pass: int, place: int, ids: Sequence[int]) -> None:
        ids = () if self._leaves_out else ids
        row = HEAD.pack(step, self._generation, number_of_pass, place, len(ids))
        row += struct.pack(f"<{len(ids)}I", *ids)
        self._file.add(row + CHECKSUM.pack(zlib.crc32(row)) if self._has_checksums else row)

    def sync(self) -> None:
        self._file.sync()

    def close(self) -> None:
        self._file.close()


def is_loop_run(folder: Path) -> bool:
    """Return whether the ledger of a run is that of a user-written loop."""
    try:
        with files.open_file(folder, FILE) as file:
            row = json.loads(file.read(HEADER_BYTES))
        return row["surefoot ledger"] in (FORMAT, PREVIOUS_FORMAT)
    except (OSError, ValueError, KeyError, TypeError):
        return False


def read_promise(folder: Path) -> LoopGuarantee:
    """Return the guarantees in the header of a loop's ledger.

    Raises RunFolderError if the header is damaged.
    """
    try:
        with files.open_file(folder, FILE) as file:
            row = json.loads(file.read(HEADER_BYTES))
        del row["surefoot ledger"]
        return LoopGuarantee(**row)
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise RunFolderError(f"{folder / FILE} is not a ledger of a loop: {error}") from None


def read(folder: Path, damaged: list[DamagedBytes] | None = None) -> Iterator[Batch]:
    """Return an iterator over the batches in the order written.

    A partial row at the end (after a kill) is left out. Damaged rows are left out and added to
    `damaged`; reading continues at the next row with a valid checksum. In a file without checksums,
    reading ends at a row that exceeds the file.
    """
    return (row for row, _ in _scan(folder, damaged))


def _scan(folder: Path, damaged: list[DamagedBytes] | None = None) -> Iterator[tuple[Batch, int]]:
    """Yield each batch, and the position in the file at which its row ends."""
    with files.open_file(folder, FILE) as file:
        has_checksums = _has_checksums(file)
        size, at, step = file.seek(0, os.SEEK_END), HEADER_BYTES, 0
        while at < size:
            if (found := _read_row(file, at, size, has_checksums)) is not None:
                yield found
                step, at = found[0].step, found[1]
                continue
            later = range(at + ID_BYTES, size - HEAD.size, ID_BYTES) if has_checksums else ()
            behind = next((each for each in later if _read_row(file, each, size, True)), None)
            if behind is None:
                return  # a part of a row
            if damaged is not None:
                damaged.append(DamagedBytes(at, behind, step))
            at = behind


def _has_checksums(file: BinaryIO) -> bool:
    return f'"{PREVIOUS_FORMAT}"'.encode() not in file.read(HEADER_BYTES)


def _read_row(file: BinaryIO, at: int, size: int, has_checksums: bool) -> tuple[Batch, int] | None:
    """Return the row at position `at`, and where it ends; None if it is partial or damaged."""
    file.seek(at)
    head = file.read(HEAD.size)
    if len(head) < HEAD.size:
        return None
    step, generation, number_of_pass, place, count = HEAD.unpack(head)
    end = at + HEAD.size + ID_BYTES * count + CHECKSUM.size * has_checksums
    if step == 0 or end > size:  # zeros of a power cut
        return None
    ids = file.read(ID_BYTES * count)
    if has_checksums and file.read(CHECKSUM.size) != CHECKSUM.pack(zlib.crc32(head + ids)):
        return None
    row = Batch(step, generation, number_of_pass, place, struct.unpack(f"<{count}I", ids))
    return row, end


def check(run: Path) -> LoopConsumed:
    """Read the ledger of `run` and check which batches and samples were consumed.

    Raises RunFolderError if its header is damaged; damaged rows are faults in the result.
    """
    promise = read_promise(run)
    damaged: list[DamagedBytes] = []
    rows = list(read(run, damaged))
    kept, overruled = consumed(rows)
    batches = [row for row in kept if row.place != NO_BATCH]
    num_compared, others = _read_again(rows, batches)
    recorded = read_faults(run)
    return LoopConsumed(
        promise=promise,
        last=kept[-1].step if kept else 0,
        attempts=tuple(sorted({row.generation for row in rows} - {0})),
        num_batches=len(batches),
        num_overruled=overruled,
        num_samples=0 if promise.digests else sum(len(batch.ids) for batch in kept),
        num_passes=len({batch.number_of_pass for batch in batches}),
        num_compared=num_compared,
        faults=(
            *map(_make_damage_fault, damaged),
            *_places(kept),
            *_samples(batches, promise),
            *others,
            *find_other_data(recorded),
            *_find_read_ahead(recorded, batches),
        ),
    )


def _find_read_ahead(faults: Sequence[events.Fault], batches: Sequence[Batch]) -> list[LedgerFault]:
    """Return a fault for each resume in mid-epoch of a loop that read batches ahead of its steps.

    Such a resume may leave out or repeat batches. The ledger cannot show this, because it holds the
    batches as they were read.
    """
    noticed = {each.generation for each in faults if each.fault == "read-ahead"}
    return [
        LedgerFault(
            "read ahead",
            row.step,
            f"attempt {row.generation} resumed in epoch {row.number_of_pass + 1:,}, and the loop "
            "reads ahead: batches that it had read may be left out or repeated",
        )
        for before, row in pairwise(batches)
        if row.generation != before.generation
        and row.number_of_pass == before.number_of_pass
        and noticed & {row.generation, before.generation}
    ]


def _make_damage_fault(damage: DamagedBytes) -> LedgerFault:
    return LedgerFault(
        "damaged",
        damage.step,
        f"bytes {damage.start:,} to {damage.end:,} of {FILE}, "
        f"after a row of step {damage.step:,}, are damaged",
    )


def begin_fork(parent: Path, folder: Path, step: int) -> None:
    """Write the first rows of the ledger of a loop that is forked from `parent` after `step`.

    They are the batches of the parent up to `step`, as attempt 0. Raises StorageError.
    """
    rows = [batch for batch in consumed(read(parent))[0] if batch.step <= step]
    file = LoopLedger(folder, read_promise(parent), 0)
    for row in rows:
        file.add(row.step, row.number_of_pass, row.place, row.ids)
    file.sync()
    file.close()


def find_sample(run: Path, sample: int) -> list[Batch]:
    """Return the batches that contained `sample`, without those that a later attempt replaced.

    Raises RunFolderError if the data set has no such sample, or the samples of batches are not
    known.
    """
    samples = read_promise(run).samples
    if sample < 0 or samples is None or sample >= samples:
        told = (
            "the loader does not report which samples a batch holds"
            if samples is None
            else f"the data set has {samples:,} samples, counted from 0"
        )
        raise RunFolderError(f"there is no sample {sample}", hint=told)
    return [batch for batch in consumed(read(run))[0] if sample in batch.ids]


def _read_again(rows: list[Batch], kept: list[Batch]) -> tuple[int, list[LedgerFault]]:
    """Compare the batches that were replaced with the batches that a later attempt read instead.

    Returns the number of comparisons, and a fault for each difference.
    """
    final = {(batch.number_of_pass, batch.place): batch for batch in kept}
    again = [(batch, final.get((batch.number_of_pass, batch.place))) for batch in rows]
    pairs = [
        (batch, now)
        for batch, now in again
        if now is not None and now is not batch and batch.ids and now.ids
    ]
    others = {now: batch for batch, now in pairs if batch.ids != now.ids}
    return len(pairs), [
        LedgerFault(
            "other samples",
            now.step,
            f"batch {now.place + 1:,} of epoch {now.number_of_pass + 1:,} held other samples in "
            f"attempt {batch.generation} "
            f"than in attempt {now.generation}",
        )
        for now, batch in others.items()
    ]


def _places(kept: list[Batch]) -> Iterator[LedgerFault]:
    """Yield a fault for each batch that is not the next of its epoch, and for each skipped step.

    An epoch that ends early is not a fault, nor are several batches in one step.
    """
    step, number, place = 0, 0, -1
    for batch in kept:
        expected = (number, place + 1) if batch.number_of_pass == number else (number + 1, 0)
        if batch.place == NO_BATCH:
            expected = (batch.number_of_pass, batch.place)
        if (batch.number_of_pass, batch.place) != expected:
            at = f"batch {batch.place + 1:,} of epoch {batch.number_of_pass + 1:,}"
            kind = "lost" if (batch.number_of_pass, batch.place) > expected else "twice"
            yield LedgerFault(
                kind,
                batch.step,
                f"step {batch.step:,} read {at} where batch {expected[1] + 1:,} of "
                f"epoch {expected[0] + 1:,} was next",
            )
        elif not step <= batch.step <= step + 1:
            kind = "lost" if batch.step > step + 1 else "out of order"
            yield LedgerFault(kind, batch.step, f"step {batch.step:,} follows step {step:,}")
        step = batch.step
        if batch.place != NO_BATCH:
            number, place = batch.number_of_pass, batch.place


def _samples(kept: list[Batch], promise: LoopGuarantee) -> Iterator[LedgerFault]:
    """Yield a fault for each sample that an epoch has twice, and for each epoch that lacks samples.

    Samples can be missing only in a complete epoch: one after which the next epoch started. If
    whole batches at its end are missing, the loop has left it, as by `break`.
    """
    if not promise.once:
        return
    passes: dict[int, list[Batch]] = {}
    for batch in kept:
        passes.setdefault(batch.number_of_pass, []).append(batch)
    for number, batches in passes.items():
        counts = Counter(sample for batch in batches for sample in batch.ids)
        last = batches[-1].step
        for sample, count in counts.items():
            if count > 1:
                told = f"epoch {number + 1:,} consumed sample {sample:,} {count} times"
                yield LedgerFault("twice", last, told)
        is_whole = number + 1 in passes
        if promise.all and is_whole and promise.samples is not None:
            num_missing = promise.samples - len(counts)
            sizes = {len(batch.ids) for batch in batches}
            was_left = len(sizes) == 1 and num_missing >= max(sizes)  # whole batches are missing
            if num_missing > 0:
                told = f"epoch {number + 1:,} left out {num_missing:,} samples"
                yield LedgerFault("left" if was_left else "lost", last, told)
