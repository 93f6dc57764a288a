"""Records that cannot be read: left out one by one where the spec says so, the same ones whoever reads them, each of them told."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import NamedTuple

import numpy as np

from surefoot.contract.task import Batch, Source
from surefoot.core.errors import BadRecordError, DataError


class Bad(NamedTuple):
    """A sample that cannot be read, and the words of whoever tried."""

    sample: int
    reason: str


class Read(NamedTuple):
    """A batch without the samples in `bad`; None where no sample is left."""

    batch: Batch
    bad: tuple[Bad, ...] = ()

    @property
    def whole(self) -> Batch:
        """The batch. Raises DataError where no sample is left."""
        if self.batch is None:
            raise DataError(
                f"none of {len(self.bad)} samples can be read, the last one {self.bad[-1].reason}", hint="is this the right data?"
            )
        return self.batch

    def kept(self, ids: np.ndarray) -> np.ndarray:
        """Those of `ids` that are in the batch."""
        return ids[~np.isin(ids, [each.sample for each in self.bad])] if self.bad else ids


def read_sound(source: Source, ids: np.ndarray) -> Read:
    """Read those of `ids` that can be read. Raises OSError of a disk or a network, which says nothing of a record, and MemoryError."""
    try:
        return Read(source.read(ids.copy()))
    except Exception as error:  # noqa: BLE001 - whatever a decoder raises
        _raise_unless_of_a_record(error)
    bad = tuple(found for each in ids.tolist() if (found := _try(source, each)) is not None)
    left = Read(None, bad).kept(ids)
    return Read(source.read(left.copy()) if len(left) else None, bad)


def _try(source: Source, sample: int) -> Bad | None:
    try:
        source.read(np.array([sample], dtype=np.int64))
    except Exception as error:  # noqa: BLE001 - the same
        _raise_unless_of_a_record(error)
        return Bad(sample, f"{getattr(error, 'message', None) or f'{type(error).__name__}: {error}'}")
    return None


def _raise_unless_of_a_record(error: Exception) -> None:
    if isinstance(error, MemoryError) or (isinstance(error, OSError) and error.errno is not None):
        raise error


class Sound:
    """A source whose batches have no sample that cannot be read; raises DataError for one of none. For what looks at a few samples."""

    def __init__(self, source: Source) -> None:
        self.guarantee, self.digest, self._source = source.guarantee, source.digest, source

    def __len__(self) -> int:
        return len(self._source)

    def read(self, ids: np.ndarray) -> Batch:
        return read_sound(self._source, ids).whole

    def describe(self) -> str:
        return self._source.describe()


class BadRecords:
    """The bad records of a set of `num_samples`, of which a share may be left out: rounded up, so that one may be of any set."""

    def __init__(self, num_samples: int, share: float) -> None:
        self.limit = math.ceil(share * num_samples)
        self._num_samples, self._share = num_samples, share
        self.found: dict[int, str] = {}

    def add(self, bad: Iterable[Bad]) -> list[Bad]:
        """Count what was found; gives what was not known before. Raises BadRecordError for more than may be left out."""
        fresh = [each for each in bad if each.sample not in self.found]
        self.found.update(fresh)
        if len(self.found) > self.limit:
            last = fresh[-1]
            raise BadRecordError(
                f"{len(self.found):,} of {self._num_samples:,} samples cannot be read, the last one sample {last.sample}: {last.reason}",
                hint=f"data.max_bad = {self._share:g} allows {self.limit:,}; surefoot data check names them all",
            )
        return fresh

    def state(self) -> list[list[int | str]]:
        """What a checkpoint holds."""
        return [[sample, reason] for sample, reason in sorted(self.found.items())]

    def restore(self, state: Iterable[Iterable[int | str]]) -> None:
        """Know again what was found up to a checkpoint."""
        self.found = {int(sample): str(reason) for sample, reason in state}
