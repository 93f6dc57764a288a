"""Unreadable records: left out one by one if the spec allows it, and each of them reported.

The records left out do not depend on the worker that reads them.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import NamedTuple

import numpy as np

from surefoot.contract.task import Batch, Source
from surefoot.core.errors import BadRecordError, DataError


class UnreadableSample(NamedTuple):
    """Sample that cannot be read, and the error message of the attempt."""

    sample: int
    reason: str


class ReadResult(NamedTuple):
    """Batch without the samples in `bad`; `batch` is None if no sample is left."""

    batch: Batch
    bad: tuple[UnreadableSample, ...] = ()

    @property
    def whole(self) -> Batch:
        """The batch. Raises DataError if no sample is left."""
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
        """Return the `ids` whose samples are in the batch."""
        return ids[~np.isin(ids, [each.sample for each in self.bad])] if self.bad else ids


def read_sound(source: Source, ids: np.ndarray) -> ReadResult:
    """Read those of `ids` that can be read.

    Raises MemoryError, and OSError of a disk or a network, since neither indicates a bad record.
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

    Raises DataError for a batch of which no sample is left.
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
    """Unreadable records of `num_samples`, of which a share may be left out.

    The limit is rounded up, so that with a positive share any data set may have one such record.
    """

    def __init__(self, num_samples: int, share: float) -> None:
        self.limit = math.ceil(share * num_samples)
        self._num_samples, self._share = num_samples, share
        self.found: dict[int, str] = {}

    def add(self, bad: Iterable[UnreadableSample]) -> list[UnreadableSample]:
        """Record unreadable samples; return those that were not known before.

        Raises BadRecordError if there are more than may be left out.
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
        """Return the records as a checkpoint holds them."""
        return [[sample, reason] for sample, reason in sorted(self.found.items())]

    def restore(self, state: Iterable[Iterable[int | str]]) -> None:
        """Restore the records that a checkpoint holds."""
        self.found = {int(sample): str(reason) for sample, reason in state}
