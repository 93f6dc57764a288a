"""Tars read forwards, for what cannot be sought: pipes, sockets, remote shards larger than the disk. Nothing is indexed or kept on disk."""

# B batch

from __future__ import annotations

import hashlib
import threading
from collections import OrderedDict
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
from torch import Tensor

from surefoot.components.data.remote import Remote
from surefoot.components.data.tars.shards import Sample, read_spans
from surefoot.components.data.tars.source import Transform, make_batch
from surefoot.contract.task import Guarantee
from surefoot.core.errors import DataError
from surefoot.core.place import whole_path
from surefoot.core.process.forked import call_in_children

Opener = Callable[[], BinaryIO]


class TarStream:
    """Tars read from their beginnings: `TarStream(openers, counts, image="jpg", label="cls")`, parts as in `Tars`.

    A shard is a path, a function that opens it anew, or a file object that can be read once, such as `sys.stdin.buffer`; or all are a
    `Remote`. `counts` says how many samples each holds. `window` of them are read at a time; what is read over is kept in memory until
    it is asked for, so give `BlockShuffle`'s window for its order, and 1 for samples in a row. To go on in the middle, a shard is read
    again up to there (*replayed*). Raises DataError for a shard that holds another number of samples, what `read_shard` refuses, and
    a second reading of what can be read once.
    """

    guarantee: Guarantee = "replayed"
    thread_safe = False

    def __init__(
        self, shards: Sequence[Opener | BinaryIO | str | Path] | Remote, counts: Sequence[int], *, window: int = 1,
        transform: Transform | None = None, **parts: str,
    ) -> None:  # fmt: skip
        given: list[Any] = (
            [_OfRemote(shards, number) for number in range(len(shards))] if isinstance(shards, Remote) else list(shards)
        )
        if len(given) != len(counts) or not given or min(counts) < 1 or window < 1 or not parts:
            raise DataError(
                f"{len(given)} shards of {list(counts)[:8]} samples, {window} at a time, with {len(parts)} parts, are no stream",
                hint='give a count of 1 or more for each shard, and a part: TarStream([opener], [1000], label="cls")',
            )
        self.shards, self.counts, self.window, self.parts, self.transform = given, list(counts), window, parts, transform
        self._openers = [each if callable(each) else _Once(each) if hasattr(each, "read") else whole_path(each) for each in given]
        self._ends = np.cumsum(self.counts)
        self.digest = _digest(self.counts, parts, given)
        self._reading: OrderedDict[int, _Forwards] = OrderedDict()
        self._lock = threading.Lock()
        call_in_children(self, TarStream._open_own)

    def __len__(self) -> int:
        return int(self._ends[-1])

    def read(self, ids: np.ndarray) -> dict[str, Tensor | list[Any]]:
        if len(ids) == 0 or not 0 <= int(ids.min()) <= int(ids.max()) < len(self):
            raise DataError(
                f"samples are numbered 0 to {len(self) - 1:,}, and others are asked for: {ids}"[:200], hint="give such numbers"
            )
        shards = np.searchsorted(self._ends, ids, side="right").tolist()
        with self._lock:  # one stream, one reader
            samples = [
                self._take(shard, int(number - self._ends[shard]) + self.counts[shard])
                for number, shard in zip(ids, shards, strict=True)
            ]
        return make_batch(samples, self.parts, self.transform)

    def part(self, part: int, parts: int) -> TarStream:
        """The stream of one of `parts` readers (ranks times workers): every shard is in one of them, none in two.

        Raises DataError for fewer shards than readers.
        """
        if not 0 <= part < parts <= len(self.shards):
            raise DataError(
                f"part {part} of {parts} of {len(self.shards)} shards is none",
                hint="use as many readers as shards at most, from 0",
            )
        shards, counts = self._openers[part::parts], self.counts[part::parts]
        made = TarStream(shards, counts, window=self.window, transform=self.transform, **self.parts)
        made.digest = _digest(counts, self.parts, self.shards[part::parts])  # by the names that were given
        return made

    def describe(self) -> str:
        names = ", ".join(f"{name} ({extension})" for name, extension in self.parts.items())
        return f"{len(self):,} samples streamed from {len(self.shards)} tars: {names}; replayed to go on"

    def _take(self, shard: int, place: int) -> Sample:
        reading = self._reading.get(shard)
        if reading is None or not reading.has(place):
            opener = self._openers[shard]
            name = Path(_name(opener, shard))
            reading = self._reading[shard] = _Forwards(name, _open(opener, name), self.counts[shard])
        self._reading.move_to_end(shard)
        while len(self._reading) > self.window:
            self._reading.popitem(last=False)
        sample = reading.take(place)
        if reading.is_spent:
            del self._reading[shard]
        return sample

    def __getstate__(self) -> dict[str, Any]:  # another process opens its own
        return {**self.__dict__, "_reading": OrderedDict(), "_lock": None}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state, _lock=threading.Lock())
        call_in_children(self, TarStream._open_own)

    def _open_own(self) -> None:
        """Open shards anew in a forked process: in a file that both read, each would move the place of the other."""
        once = [(shard, each) for shard, each in self._reading.items() if isinstance(self._openers[shard], _Once)]
        self._reading, self._lock = OrderedDict(once), threading.Lock()


class _Forwards:
    """One shard while it is read: samples that were read over and not asked for yet wait in memory."""

    def __init__(self, name: Path, file: BinaryIO, count: int) -> None:
        self._name, self._count, self._next = name, count, 0
        self._samples = read_spans(name, file=file)
        self._waiting: dict[int, Sample] = {}

    def has(self, place: int) -> bool:
        """Whether the sample is still to come."""
        return place >= self._next or place in self._waiting

    @property
    def is_spent(self) -> bool:
        return self._next == self._count and not self._waiting

    def take(self, place: int) -> Sample:
        while self._next <= place:
            found = next(self._samples, None)
            if found is None:
                raise DataError(
                    f"{self._name} ended after {self._next:,} samples of {self._count:,}", hint="give the right counts"
                )
            self._waiting[self._next] = found[0]
            self._next += 1
            if self._next == self._count and next(self._samples, None) is not None:
                raise DataError(
                    f"{self._name} holds more than {self._count:,} samples", hint="give the right counts: none may be lost"
                )
        return self._waiting.pop(place)


class _Once:
    """A file object that cannot be opened again."""

    def __init__(self, file: BinaryIO) -> None:
        self._file: BinaryIO | None = file

    def __call__(self) -> BinaryIO:
        file, self._file = self._file, None
        if file is None:
            raise DataError(
                "a stream that can be read once was read, and is asked for again",
                hint="give a function that opens it anew, to train for several epochs or to go on in the middle",
            )
        return file


class _OfRemote:
    """A shard of a `Remote`, streamed."""

    def __init__(self, remote: Remote, number: int) -> None:
        self.remote, self.number = remote, number

    def __call__(self) -> BinaryIO:
        return self.remote.stream(self.number)


def _digest(counts: Sequence[int], parts: dict[str, str], shards: Sequence[Any]) -> str:
    text = f"{list(counts)} {parts} {[_name(each, number) for number, each in enumerate(shards)]}"
    return hashlib.sha256(text.encode()).hexdigest()


def _name(shard: Any, number: int) -> str:
    if isinstance(shard, _OfRemote):
        return shard.remote.names[shard.number]
    return str(Path(shard)) if isinstance(shard, str | Path) else f"stream-{number}"


def _open(opener: Any, name: Path) -> BinaryIO:
    try:
        file: BinaryIO = opener.open("rb") if isinstance(opener, Path) else opener()
    except OSError as error:
        raise DataError(
            f"{name} cannot be opened: {error.strerror or error}", hint="check that it is there and who may read it"
        ) from None
    return file
