"""Tars read sequentially, for data without random access.

Such data are pipes, sockets, and remote shards larger than the disk. Nothing is indexed or stored
on disk.
"""

# B batch

from __future__ import annotations

import hashlib
import threading
from collections import OrderedDict
from collections.abc import Callable, Sequence
from copy import copy
from functools import partial
from pathlib import Path
from typing import Any, BinaryIO, cast

import numpy as np
from torch import Tensor

from surefoot.components.data.order import check_ids
from surefoot.components.data.remote.shards import Remote
from surefoot.components.data.tars.shards import Sample, read_spans
from surefoot.components.data.tars.source import Transform, decode_parts, make_batch
from surefoot.contract.task import Guarantee
from surefoot.core.errors import DataError
from surefoot.core.place import whole_path
from surefoot.core.process.forked import call_in_children

Opener = Callable[[], BinaryIO]


class TarStream:
    """Source of samples in tars that are read sequentially.

    Example: `TarStream(openers, counts, image="jpg", label="cls")`. Samples that are read before
    they are requested stay in memory. To resume in the middle of a shard, the shard is read again
    from its beginning (the guarantee is *replayed*).

    Args:
        shards: The shards: a `Remote`, or a sequence of paths, functions that open a shard (each
            time it is read), or file objects that can be read once, such as `sys.stdin.buffer`.
        counts: Number of samples of each shard.
        window: Number of shards that are open at a time. It is the `window` of the `BlockShuffle`
            if the samples are read in that order, and 1 if they are read sequentially.
        transform: Function of the dict of each sample, called before batching.
        **parts: Extension of the member to read for each name in the batch, as in `Tars`.

    Raises:
        DataError: For a shard whose number of samples is not its count, for a shard that
            `read_shard` rejects, and if a file object would have to be read a second time.
    """

    guarantee: Guarantee = "replayed"
    thread_safe = False

    def __init__(
        self,
        shards: Sequence[Opener | BinaryIO | str | Path] | Remote,
        counts: Sequence[int],
        *,
        window: int = 1,
        transform: Transform | None = None,
        **parts: str,
    ) -> None:
        given: list[Any] = list(range(len(shards))) if isinstance(shards, Remote) else list(shards)
        if len(given) != len(counts) or not given or min(counts) < 1 or window < 1 or not parts:
            raise DataError(
                f"a TarStream of {len(given)} shards, with counts {list(counts)[:8]}, "
                f"window {window} and {len(parts)} parts is not possible",
                hint=(
                    "give a count of 1 or more for each shard, and a part: "
                    'TarStream([opener], [1000], label="cls")'
                ),
            )
        self.window, self.parts, self.transform = window, parts, transform
        if isinstance(shards, Remote):
            self._set_shards(
                [partial(shards.stream, number) for number in given], counts, list(shards.names)
            )
        else:
            names = [str(Path(each)) if isinstance(each, str | Path) else None for each in given]
            self._set_shards([_opener(each) for each in given], counts, names)
        self._reading: OrderedDict[int, _Forwards] = OrderedDict()
        self._lock = threading.Lock()
        call_in_children(self, TarStream._open_own)

    def _set_shards(
        self, openers: Sequence[Opener], counts: Sequence[int], names: Sequence[str | None]
    ) -> None:
        self._openers, self.counts, self._given_names = openers, list(counts), names
        self._names = [name or f"stream-{number}" for number, name in enumerate(names)]
        self._ends = np.cumsum(self.counts)
        self.digest = hashlib.sha256(
            f"{self.counts} {self.parts} {self._names}".encode()
        ).hexdigest()

    def __len__(self) -> int:
        return int(self._ends[-1])

    def read(self, ids: np.ndarray) -> dict[str, Tensor | list[Any]]:
        ids = check_ids(ids, len(self))
        shards = np.searchsorted(self._ends, ids, side="right").tolist()
        with self._lock:  # a stream has one reader
            samples = [
                self._take(shard, int(number - self._ends[shard]) + self.counts[shard])
                for number, shard in zip(ids, shards, strict=True)
            ]
        return make_batch(decode_parts(samples, self.parts), samples, self.transform)

    def part(self, part: int, parts: int) -> TarStream:
        """Return the stream for reader `part` of `parts` readers (ranks times workers).

        Every shard belongs to exactly one reader. Raises DataError for fewer shards than readers.
        """
        if not 0 <= part < parts <= len(self.counts):
            raise DataError(
                f"part {part} of {parts} is not possible with {len(self.counts)} shards",
                hint="use at most as many readers as shards, numbered from 0",
            )
        made = copy(self)
        own = slice(part, None, parts)
        made._set_shards(self._openers[own], self.counts[own], self._given_names[own])
        return made

    def describe(self) -> str:
        names = ", ".join(f"{name} ({extension})" for name, extension in self.parts.items())
        return (
            f"{len(self):,} samples streamed from {len(self.counts)} tars: {names}; "
            "replayed to resume"
        )

    def _take(self, shard: int, place: int) -> Sample:
        reading = self._reading.get(shard)
        if reading is None or not reading.has(place):
            name = Path(self._names[shard])
            try:
                file = self._openers[shard]()
            except OSError as error:
                why, hint = (
                    error.strerror or error,
                    "check that it exists, and your permission to read it",
                )
                raise DataError(f"{name} cannot be opened: {why}", hint=hint) from None
            reading = self._reading[shard] = _Forwards(name, file, self.counts[shard])
        self._reading.move_to_end(shard)
        while len(self._reading) > self.window:
            self._reading.popitem(last=False)
        sample = reading.take(place)
        if reading.is_spent:
            del self._reading[shard]
        return sample

    def __getstate__(self) -> dict[str, Any]:  # another process opens the shards itself
        return {**self.__dict__, "_reading": OrderedDict(), "_lock": None}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state, _lock=threading.Lock())
        call_in_children(self, TarStream._open_own)

    def _open_own(self) -> None:
        """Forget open shards in a forked process, so that it opens them again.

        Otherwise, both processes would share the file positions. File objects that can be read only
        once stay open.
        """
        once = [
            (shard, each)
            for shard, each in self._reading.items()
            if isinstance(self._openers[shard], _SingleReadFile)
        ]
        self._reading, self._lock = OrderedDict(once), threading.Lock()


class _Forwards:
    """Sequential reader of one shard; samples read before they are requested are buffered."""

    def __init__(self, name: Path, file: BinaryIO, count: int) -> None:
        self._name, self._count, self._next = name, count, 0
        self._samples = read_spans(name, file=file)
        self._waiting: dict[int, Sample] = {}

    def has(self, place: int) -> bool:
        """Return whether sample `place` can be returned without reopening the shard."""
        return place >= self._next or place in self._waiting

    @property
    def is_spent(self) -> bool:
        return self._next == self._count and not self._waiting

    def take(self, place: int) -> Sample:
        while self._next <= place:
            found = next(self._samples, None)
            if found is None:
                raise DataError(
                    f"{self._name} ended after {self._next:,} samples of {self._count:,}",
                    hint="give the right counts",
                )
            self._waiting[self._next] = found[0]
            self._next += 1
            if self._next == self._count and next(self._samples, None) is not None:
                raise DataError(
                    f"{self._name} contains more than {self._count:,} samples",
                    hint="give the right counts, so that no sample is left out",
                )
        return self._waiting.pop(place)


class _SingleReadFile:
    """Opener of a file object that can be read only once; a second call raises DataError."""

    def __init__(self, file: BinaryIO) -> None:
        self._file: BinaryIO | None = file

    def __call__(self) -> BinaryIO:
        file, self._file = self._file, None
        if file is None:
            raise DataError(
                "a file object that can be read only once was requested again",
                hint=(
                    "give a function that opens it again, to train for several epochs or to resume "
                    "in the middle of one"
                ),
            )
        return file


def _opener(shard: Any) -> Opener:
    """Return a function that opens the shard, which is such a function, a file object or a path."""
    if hasattr(shard, "read"):
        return _SingleReadFile(shard)
    return cast(Opener, shard if callable(shard) else partial(whole_path(shard).open, "rb"))
