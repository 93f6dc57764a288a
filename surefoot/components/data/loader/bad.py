"""Unreadable samples, which are left out and reported if the run spec allows it.

Which samples are left out does not depend on the worker that reads them.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import NamedTuple

import numpy as np

from surefoot.contract.task import Batch, Source
from surefoot.core.errors import BadRecordError, DataError


class UnreadableSample(NamedTuple):
    """Number of a sample that cannot be read, and the error message."""

    sample: int
    reason: str


class ReadResult(NamedTuple):
    """Batch of the samples that could be read, and the unreadable samples in `bad`.

    `batch` is None if no sample could be read.
    """

    batch: Batch
    bad: tuple[UnreadableSample, ...] = ()

    @property
    def whole(self) -> Batch:
        """Batch of the readable samples. Raises DataError if there is none."""
        if self.batch is None:
            raise DataError(
                (
                    f"none of {len(self.bad)} samples can be read; the last error: "
                    f"{self.bad[-1].reason}"
                ),
                hint="check that this is the right data",
            )
        return self.batch

    def readable_ids(self, ids: np.ndarray) -> np.ndarray:
        """Return `ids` without the unreadable samples."""
        return ids[~np.isin(ids, [each.sample for each in self.bad])] if self.bad else ids


def read_sound(source: Source, ids: np.ndarray) -> ReadResult:
    """Read the samples `ids`, and leave out those that cannot be read.

    Raises MemoryError, and OSError of a disk or a network, since neither indicates a bad sample.
    """
    try:
        return ReadResult(source.read(ids.copy()))
    except Exception as error:  # noqa: BLE001 - a decoder can raise anything
        _raise_unless_of_a_record(error)
    bad = tuple(found for each in ids.tolist() if (found := _try_read(source, each)) is not None)
    left = ReadResult(None, bad).readable_ids(ids)
    return ReadResult(source.read(left.copy()) if len(left) else None, bad)


def _try_read(source: Source, sample: int) -> UnreadableSample | None:
    try:
        source.read(np.array([sample], dtype=np.int64))
    except Exception as error:  # noqa: BLE001 - a decoder can raise anything
        _raise_unless_of_a_record(error)
        return UnreadableSample(
            sample, f"{getattr(error, 'message', None) or f'{type(error).__name__}: {error}'}"
        )
    return None


def _raise_unless_of_a_record(error: Exception) -> None:
    if isinstance(error, MemoryError) or (isinstance(error, OSError) and error.errno is not None):
        raise error


class Sound:
    """Source that leaves unreadable samples out of its batches, for checks of a few samples.

    Reading raises DataError if none of the requested samples can be read.
    """

    def __init__(self, source: Source) -> None:
        self.guarantee, self.digest, self._source = source.guarantee, source.digest, source

    def __len__(self) -> int:
        return len(self._source)

    def read(self, ids: np.ndarray) -> Batch:
        return read_sound(self._source, ids).whole

    def describe(self) -> str:
        return self._source.describe()


class BadRecords:
    """Unreadable samples found in a data set, of which a limited share may be left out.

    The limit is `share * num_samples`, rounded up, so that any positive share allows one sample.
    """

    def __init__(self, num_samples: int, share: float) -> None:
        self.limit = math.ceil(share * num_samples)
        self._num_samples, self._share = num_samples, share
        self.found: dict[int, str] = {}

    def add(self, bad: Iterable[UnreadableSample]) -> list[UnreadableSample]:
        """Record unreadable samples; return those that were not recorded before.

        Raises BadRecordError if more samples are recorded than may be left out.
        """
        fresh = [each for each in bad if each.sample not in self.found]
        self.found.update(fresh)
        if len(self.found) > self.limit:
            last = fresh[-1]
            raise BadRecordError(
                f"{len(self.found):,} of {self._num_samples:,} samples cannot be read, "
                f"the last one sample {last.sample}: {last.reason}",
                hint=(
                    f"data.max_bad = {self._share:g} allows {self.limit:,}; surefoot data "
                    "check lists all of them"
                ),
            )
        return fresh

    def state(self) -> list[list[int | str]]:
        """Return the recorded samples for a checkpoint, as lists [sample, reason]."""
        return [[sample, reason] for sample, reason in sorted(self.found.items())]

    def restore(self, state: Iterable[Iterable[int | str]]) -> None:
        """Restore the recorded samples from the value that `state` returned."""
        self.found = {int(sample): str(reason) for sample, reason in state}
