"""`ledger.bin` of a user-written loop: the samples of each batch as consumed, without a plan.

It is read and checked without torch. The user's loader chooses the order, so the ids themselves are
stored, 4 bytes each. A header of 256 bytes holds what an epoch guarantees. A row is a batch: (step,
generation, epoch, index in the epoch, number of ids), then the ids; there are none where the data
do not identify the samples of a batch, and only the index is known. Names and messages call an
epoch a pass.
"""

from __future__ import annotations

import json
import os
import struct
from array import array
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import BinaryIO, NamedTuple

from surefoot.contract.ledger import FILE, HEADER_BYTES, Appended
from surefoot.contract.run_folder import files
from surefoot.core.errors import RunFolderError

FORMAT = "loop 1"
HEAD = struct.Struct("<IIIII")
ID_BYTES = 4
MOST_IDS = 1 << 32
MOST_ATTEMPTS = 1 << 16  # a larger difference between two rows is damage
# rows that damage may remove at once; rows needed in a sequence to be accepted as rows
NEAR, LONG_CHAIN = 64, 3


@dataclass(frozen=True, kw_only=True)
class LoopGuarantee:
    """Guarantees of an epoch over the data.

    `samples` is the size of the set (None: unknown), `once` that an epoch has no sample twice,
    `all` that a complete epoch has every sample. With `digests` the samples of a batch are not
    known, and a digest of the batch as four 32-bit numbers is stored in place of their ids.
    """

    samples: int | None = None
    once: bool = False
    all: bool = False
    digests: bool = False


class Batch(NamedTuple):
    """A batch of a loop: the step that consumed it, and its index in its epoch.

    Epochs and indices count from 0. `ids` is empty where the samples are not known.
    """

    step: int
    generation: int
    number_of_pass: int
    place: int
    ids: tuple[int, ...]


class DamagedBytes(NamedTuple):
    """Bytes of the file that are not rows, after a row of `step`."""

    start: int
    end: int
    step: int


class LoopFault(NamedTuple):
    """A wrong batch or row.

    `kind` is `lost`, `twice`, `out of order`, `other samples`, `other data` or `damaged`.
    """

    kind: str
    step: int
    told: str


@dataclass(frozen=True, kw_only=True)
class LoopConsumed:
    """Result of checking a loop's ledger.

    `attempts` are the generations; `num_overruled` batches were read again after a kill.
    """

    promise: LoopGuarantee
    last: int
    attempts: tuple[int, ...]
    num_batches: int
    num_overruled: int
    num_samples: int
    num_passes: int
    num_compared: int  # overruled batches that were compared with the batches read in their place
    faults: tuple[LoopFault, ...]

    @property
    def holds(self) -> bool:
        return not self.faults


class LoopLedger:
    """Writer of a loop's ledger.

    Raises StorageError when the disk refuses, RunFolderError when the file is for other data.
    """

    def __init__(self, folder: Path, promise: LoopGuarantee, generation: int) -> None:
        path, self._generation = folder / FILE, generation
        header = (
            json.dumps({"surefoot ledger": FORMAT, **asdict(promise)})
            .encode()
            .ljust(HEADER_BYTES - 1)
            + b"\n"
        )
        self._file = Appended(
            path, header, lambda size: max((end for _, end in _scan(folder)), default=HEADER_BYTES)
        )
        found = read_promise(folder)
        if replace(found, digests=promise.digests) != promise:
            raise RunFolderError(
                f"{path} was written for other data: {found}, now {promise}",
                hint="give another folder",
            )
        # a ledger that was started without digests stays without
        self._leaves_out = promise.digests and not found.digests

    def add(self, step: int, number_of_pass: int, place: int, ids: Sequence[int]) -> None:
        ids = () if self._leaves_out else ids
        head = HEAD.pack(step, self._generation, number_of_pass, place, len(ids))
        self._file.add(head + struct.pack(f"<{len(ids)}I", *ids))

    def sync(self) -> None:
        self._file.sync()

    def close(self) -> None:
        self._file.close()


def is_of_a_loop(folder: Path) -> bool:
    """Return whether a run's ledger is that of a user-written loop."""
    try:
        with files.opened(folder, FILE) as file:
            return bool(json.loads(file.read(HEADER_BYTES))["surefoot ledger"] == FORMAT)
    except (OSError, ValueError, KeyError, TypeError):
        return False


def read_promise(folder: Path) -> LoopGuarantee:
    """Return what the data of a loop guarantee. Raises RunFolderError for a damaged ledger."""
    try:
        with files.opened(folder, FILE) as file:
            row = json.loads(file.read(HEADER_BYTES))
        del row["surefoot ledger"]
        return LoopGuarantee(**row)
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise RunFolderError(f"{folder / FILE} is not a ledger of a loop: {error}") from None


def read(folder: Path, damaged: list[DamagedBytes] | None = None) -> Iterator[Batch]:
    """Return every batch in the order written, without a partial one at the end (after a kill).

    Damaged rows are left out and listed in `damaged`; reading resumes at the next valid row.
    """
    return (row for row, _ in _scan(folder, damaged))


def _scan(folder: Path, damaged: list[DamagedBytes] | None = None) -> Iterator[tuple[Batch, int]]:
    """Yield every batch, and the position in the file where its row ends."""
    with files.opened(folder, FILE) as file:
        size, at, before = file.seek(0, os.SEEK_END), HEADER_BYTES, None
        while at < size:
            row = _read_head(file, at, size)
            end = at if row is None else at + _num_bytes(row)
            behind = None if row is None else _read_head(file, end, size)
            if row is None or (end < size and (behind is None or not _follows(row, behind))):
                found = _find_row(file, at + ID_BYTES, size, before)
                if found is None and row is None:
                    return  # a part of a row
                if found is not None and _is_damaged(file, (at, end, found), size, row, before):
                    if damaged is not None:
                        damaged.append(
                            DamagedBytes(at, found, 0 if before is None else before.step)
                        )
                    at = found
                    continue
            if row is None:
                return
            file.seek(at + HEAD.size)
            before = row._replace(ids=tuple(array("I", file.read(ID_BYTES * len(row.ids)))))
            yield before, end
            at = end


def _num_bytes(batch: Batch) -> int:
    return HEAD.size + ID_BYTES * len(batch.ids)


def _read_head(file: BinaryIO, at: int, size: int) -> Batch | None:
    """Return the row at a position in the file, without its ids; None for no row or a partial one.

    Its `ids` are a range of the same length.
    """
    file.seek(at)
    head = file.read(HEAD.size)
    if len(head) < HEAD.size:
        return None
    step, generation, number_of_pass, place, count = HEAD.unpack(head)
    if step == 0 or ID_BYTES * count > size - at - HEAD.size:
        return None
    return Batch(step, generation, number_of_pass, place, range(count))  # type: ignore[arg-type]


def _follows(row: Batch, behind: Batch) -> bool:
    """Return whether a loop writes `behind` directly after `row`.

    That is the next batch, or a batch of a later attempt, which may go back.
    """
    here, after = (row.number_of_pass, row.place + 1), (row.number_of_pass + 1, 0)
    found = behind.number_of_pass, behind.place
    if behind.generation != row.generation:
        is_later = row.generation < behind.generation < row.generation + MOST_ATTEMPTS
        return is_later and behind.step <= row.step + 1 and (found <= here or found == after)
    return found in (here, after) and row.step <= behind.step <= row.step + 1


def _count_chain(file: BinaryIO, at: int, size: int) -> tuple[int, bool]:
    """Return the number of consecutive rows from `at`, and whether the file ends there.

    Counts up to LONG_CHAIN.
    """
    row, num_rows = _read_head(file, at, size), 0
    while row is not None:
        num_rows, at = num_rows + 1, at + _num_bytes(row)
        behind = _read_head(file, at, size)
        if at == size or num_rows == LONG_CHAIN:
            return num_rows, at == size
        row = behind if behind is not None and _follows(row, behind) else None
    return num_rows, False


def _goes_on(file: BinaryIO, at: int, size: int) -> bool:
    """Return whether valid rows follow at a position, whatever precedes it.

    A loop may really have left out a batch.
    """
    num_rows, is_last = _count_chain(file, at, size)
    return num_rows == LONG_CHAIN or is_last


def _find_row(file: BinaryIO, start: int, size: int, before: Batch | None) -> int | None:
    """Return the position of the next row that is confirmed by the rows after it, or None."""
    for at in range(start, size - HEAD.size + 1, ID_BYTES):
        row = _read_head(file, at, size)
        if row is not None and _is_near(before, row):
            num_rows, is_last = _count_chain(file, at, size)
            # ids may look like a row
            is_certain = num_rows > 1 or (
                before is not None and row.generation == before.generation
            )
            if num_rows == LONG_CHAIN or (is_last and is_certain):
                return at
    return None


def _is_near(before: Batch | None, row: Batch) -> bool:
    """Return whether a row may come a few rows after `before`; None is the start of the file."""
    if before is None:
        return (
            row.generation < MOST_ATTEMPTS
            and row.step <= NEAR
            and row.number_of_pass == 0
            and row.place <= NEAR
        )
    if row.generation != before.generation:
        return (
            before.generation < row.generation < before.generation + NEAR
            and row.step <= before.step + NEAR
        )
    is_same = (
        row.number_of_pass == before.number_of_pass
        and before.place < row.place <= before.place + NEAR
    )
    is_next = row.number_of_pass == before.number_of_pass + 1 and row.place <= NEAR
    return before.step <= row.step <= before.step + NEAR and (is_same or is_next)


def _is_damaged(
    file: BinaryIO, places: tuple[int, int, int], size: int, row: Batch | None, before: Batch | None
) -> bool:
    """Return whether a row is damaged.

    `places` are the position of the row, its stated end, and the position where another row was
    found.
    """
    at, end, found = places
    if row is None or found == end:
        return row is None
    if _goes_on(file, end, size):
        # a loop may really have left out a batch; but no row contains the next one
        inside = _read_head(file, found, size)
        return found < end and inside is not None and _follows(row, inside)
    is_as_before = before is not None and found - at == _num_bytes(before)
    return found < end or found - end < HEAD.size or is_as_before


def consumed(batches: Iterator[Batch]) -> tuple[list[Batch], int]:
    """Return the batches that count, and how many were overruled.

    An attempt that went back to step n overrules the batches from step n on.
    """
    kept: list[Batch] = []
    overruled = 0
    for batch in batches:
        while kept and batch.generation > kept[-1].generation and kept[-1].step >= batch.step:
            kept.pop()
            overruled += 1
        kept.append(batch)
    return kept, overruled


def check(run: Path) -> LoopConsumed:
    """Read the ledger of `run` and check what was consumed.

    Raises RunFolderError if it is damaged.
    """
    promise = read_promise(run)
    damaged: list[DamagedBytes] = []
    rows = list(read(run, damaged))
    kept, overruled = consumed(iter(rows))
    num_compared, others = _read_again(rows, kept)
    return LoopConsumed(
        promise=promise,
        last=kept[-1].step if kept else 0,
        attempts=tuple(sorted({row.generation for row in rows} - {0})),
        num_batches=len(kept),
        num_overruled=overruled,
        num_samples=0 if promise.digests else sum(len(batch.ids) for batch in kept),
        num_passes=len({batch.number_of_pass for batch in kept}),
        num_compared=num_compared,
        faults=(*map(_told_of_damage, damaged), *_places(kept), *_samples(kept, promise), *others),
    )


def _told_of_damage(damage: DamagedBytes) -> LoopFault:
    return LoopFault(
        "damaged",
        damage.step,
        f"bytes {damage.start:,} to {damage.end:,} of {FILE}, "
        f"after a row of step {damage.step:,}, are damaged",
    )


def begin_fork(parent: Path, folder: Path, step: int) -> None:
    """Write the ledger that a fork after `step` starts with: its parent's batches, as attempt 0.

    Raises StorageError.
    """
    rows = [batch for batch in consumed(read(parent))[0] if batch.step <= step]
    file = LoopLedger(folder, read_promise(parent), 0)
    for row in rows:
        file.add(row.step, row.number_of_pass, row.place, row.ids)
    file.sync()
    file.close()


def find_sample(run: Path, sample: int) -> list[Batch]:
    """Return the batches that held `sample` and were not overruled.

    Raises RunFolderError for a sample that the set does not have.
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


def _read_again(rows: list[Batch], kept: list[Batch]) -> tuple[int, list[LoopFault]]:
    """Compare the overruled batches with those read in their place.

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
        LoopFault(
            "other samples",
            now.step,
            f"batch {now.place + 1:,} of epoch {now.number_of_pass + 1:,} held other samples in "
            f"attempt {batch.generation} "
            f"than in attempt {now.generation}",
        )
        for now, batch in others.items()
    ]


def _places(kept: list[Batch]) -> Iterator[LoopFault]:
    """Yield a fault for each batch that is not the next of its epoch, and for each skipped step.

    An epoch may be left before its end, and a step may hold several batches.
    """
    step, number, place = 0, 0, -1
    for batch in kept:
        expected = (number, place + 1) if batch.number_of_pass == number else (number + 1, 0)
        if (batch.number_of_pass, batch.place) != expected:
            at = f"batch {batch.place + 1:,} of epoch {batch.number_of_pass + 1:,}"
            kind = "lost" if (batch.number_of_pass, batch.place) > expected else "twice"
            yield LoopFault(
                kind,
                batch.step,
                f"step {batch.step:,} read {at} where batch {expected[1] + 1:,} of "
                f"epoch {expected[0] + 1:,} was next",
            )
        elif not step <= batch.step <= step + 1:
            kind = "lost" if batch.step > step + 1 else "out of order"
            yield LoopFault(kind, batch.step, f"step {batch.step:,} follows step {step:,}")
        step, number, place = batch.step, batch.number_of_pass, batch.place


def _samples(kept: list[Batch], promise: LoopGuarantee) -> Iterator[LoopFault]:
    """Yield a fault for each sample that an epoch has twice, and for samples that it left out.

    Samples can be missing only in a complete epoch: one after which the next epoch started.
    """
    if not promise.once:
        return
    passes: dict[int, Counter[int]] = {}
    last: dict[int, int] = {}
    for batch in kept:
        passes.setdefault(batch.number_of_pass, Counter()).update(batch.ids)
        last[batch.number_of_pass] = batch.step
    for number, counts in passes.items():
        for sample, count in counts.items():
            if count > 1:
                yield LoopFault(
                    "twice",
                    last[number],
                    f"epoch {number + 1:,} consumed sample {sample:,} {count} times",
                )
        is_whole = number + 1 in passes
        if (
            promise.all
            and is_whole
            and promise.samples is not None
            and len(counts) < promise.samples
        ):
            yield LoopFault(
                "lost",
                last[number],
                f"epoch {number + 1:,} left out {promise.samples - len(counts):,} samples",
            )
