"""Random access to the samples of tars, with one read per sample at its position in an index."""

# B batch, H height, W width, C channels

from __future__ import annotations

import io
import os
import re
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from surefoot.components.data.remote.shards import Remote
from surefoot.components.data.tars import decoders
from surefoot.components.data.tars.far import find_remote, open_remote
from surefoot.components.data.tars.index import Index, Tell, open_index
from surefoot.components.data.tars.shards import BLOCK, Sample, complete, read_spans, split_name
from surefoot.contract.task import Guarantee
from surefoot.core.errors import DataError
from surefoot.core.place import cache_folder, whole_path
from surefoot.core.process.forked import make_lock

MAX_OPEN = 64  # shards at a time
# common header (ustar, POSIX.1-1988) of a regular file or of pax records: name, size and kind
HEADER = re.compile(
    rb"(?=([^\0]{1,99})\0).{124}([0-7]{11})[\0 ].{20}([0\0x]).{100}ustar.{83}\0.{166}", re.DOTALL
)
EXTENDED = b"x"  # pax records about the next member
# pax records that do not concern name or content
RECORD = re.compile(rb"(\d{1,4}) (?:mtime|atime|ctime|uname|gname|comment)=[^\n]*\n")
Transform = Callable[[dict[str, Any]], dict[str, Any]]


class Tars:
    """Source of samples in tars of the WebDataset layout, read in any order.

    Example: the batches of `Tars(paths, image="jpg", label="cls")` are {"image": ..., "label":
    ...}. Arrays of equal shape become one tensor, integers an int64 tensor (B,), and all other
    values a list. Nothing is extracted to disk.

    Args:
        paths: One tar or several, by path or URL; or a `Remote`, which has more options for URLs.
        cache: Folder of the index, and of downloaded shards (default: $XDG_CACHE_HOME/surefoot).
        transform: Function of the dict of each sample, called before batching, for example to bring
            images to one size.
        tell: Function that is called while the index is built, with (bytes indexed so far, bytes to
            index), or for remote tars with (shards done, all shards).
        **parts: Extension of the member to read for each name in the batch. `decoders.decode`
            describes the decoded values.

    Raises:
        DataError: For shards that are damaged or missing, a sample that lacks a member, members
            that are damaged, and arrays of different shapes.
    """

    guarantee: Guarantee = "proven"
    thread_safe = True
    _lock: threading.Lock

    def __init__(
        self,
        paths: Remote | str | Path | Sequence[str | Path],
        *,
        cache: str | Path | None = None,
        transform: Transform | None = None,
        tell: Tell | None = None,
        **parts: str,
    ) -> None:
        if not parts:
            raise DataError(
                "Tars needs at least one part to read", hint='Tars(paths, image="jpg", label="cls")'
            )
        self.parts, self.transform = parts, transform
        below = whole_path(cache) if cache else cache_folder() / "tars"
        self._remote = remote = find_remote(paths, cache)
        named: Any = [paths] if isinstance(paths, str | Path) else paths
        self.index: Index = (
            open_index([whole_path(path) for path in named], below, tell=tell)
            if remote is None
            else open_remote(remote, tell=tell)
        )
        self.digest = self.index.digest
        # made once: it takes as long as reading a sample
        self._paths = [self.index.folder / shard.name for shard in self.index.shards]
        # the descriptor of each open shard, the most recently used last
        self._open: OrderedDict[int, Descriptor] = OrderedDict()
        make_lock(self)

    def __len__(self) -> int:
        return len(self.index)

    def read(self, ids: np.ndarray) -> dict[str, Tensor | list[Any]]:
        samples = self._fetch(ids)
        return make_batch(decode_parts(samples, self.parts), samples, self.transform)

    @property
    def shard_sizes(self) -> list[int]:
        """Number of samples in each shard, with the shards sorted by name."""
        return [shard.num_samples for shard in self.index.shards]

    def expect(self, chunks: np.ndarray) -> None:
        """Announce the order of the next reads, so that remote shards are downloaded in advance.

        `chunks` (chunks, 2) has the first and the last sample of each chunk, in reading order.
        """
        if self._remote is not None:
            shards, _, _ = self.index.locate(chunks.ravel())
            self._remote.expect(list(dict.fromkeys(shards.tolist())))

    def explain(self, ids: np.ndarray) -> dict[str, float]:
        """Return the seconds that reading, decoding and transforming these samples take."""
        return time_stages(
            lambda: self._fetch(ids),
            lambda samples: decode_parts(samples, self.parts),
            self.transform,
        )

    def _fetch(self, ids: np.ndarray) -> list[Sample]:
        places = zip(*map(np.ndarray.tolist, self.index.locate(ids)), strict=True)
        return [self.sample(*place) for place in places]

    def sample(self, shard: int, first: int, count: int) -> Sample:
        """Read the sample that is stored in `count` bytes of a shard, starting at byte `first`.

        Raises DataError if the shard has changed, so that these bytes are not one sample.
        """
        path = self._paths[shard]
        try:
            held = self._descriptor(shard, path)
            content = os.pread(held.number, count, first)
        except OSError as error:
            raise DataError(
                f"{path} cannot be read: {error.strerror}",
                hint="check that the file still exists, and the disk",
            ) from None
        if len(content) < count:
            raise DataError(
                f"{path} is shorter than when it was indexed: "
                f"it ends at byte {first + len(content):,}",
                hint="copy the shard again",
            )
        return read_sample(path, content)

    def describe(self) -> str:
        size = sum(shard.num_bytes for shard in self.index.shards)
        names = ", ".join(f"{name} ({extension})" for name, extension in self.parts.items())
        return (
            f"{len(self):,} samples in {len(self.index.shards)} tars of {size / 1e9:.3g} GB: "
            f"{names}"
        )

    def _descriptor(self, shard: int, path: Path) -> Descriptor:
        with self._lock:
            if (held := self._open.get(shard)) is not None:
                self._open.move_to_end(shard)
                return held
            while len(self._open) >= self.index.most_open(MAX_OPEN):
                self._open.popitem(last=False)
        # downloads a remote shard, while other threads continue to read
        opened = Descriptor(self.index.open(shard))
        if os.fstat(opened.number).st_size != self.index.shards[shard].num_bytes:
            raise DataError(
                f"{path} differs from the file that was indexed",
                hint="do not change shards while they are read",
            )
        with self._lock:
            opened = self._open.setdefault(shard, opened)
            # several threads opened a shard at once
            while len(self._open) > self.index.most_open(MAX_OPEN):
                self._open.popitem(last=False)
            return opened

    def __getstate__(self) -> dict[str, Any]:  # another process opens the shards itself
        return {
            name: value for name, value in self.__dict__.items() if name not in ("_open", "_lock")
        }

    def __setstate__(self, held: dict[str, Any]) -> None:
        self.__dict__ |= {**held, "_open": OrderedDict()}
        make_lock(self)


class Descriptor:
    """File descriptor that is closed when its object is no longer referenced.

    A thread can thus continue to read a shard that another thread has removed from the open shards.
    """

    def __init__(self, number: int) -> None:
        self.number = number

    def __del__(self) -> None:
        os.close(self.number)


def make_batch(
    rows: Iterable[dict[str, Any]], samples: list[Sample], transform: Transform | None
) -> dict[str, Tensor | list[Any]]:
    """Apply `transform` to each decoded row, and collate the rows into a batch.

    `samples` are the samples of the rows, named in errors. Raises DataError if there are none.
    """
    if not samples:
        raise DataError("no sample is requested", hint="give one sample number or more")
    rows = [row if transform is None else transform(row) for row in rows]
    return {name: join(name, [row[name] for row in rows], samples) for name in rows[0]}


def time_stages(
    fetch: Callable[[], list[Sample]],
    decode: Callable[[list[Sample]], Iterable[dict[str, Any]]],
    transform: Transform | None,
) -> dict[str, float]:
    """Measure the seconds that the stages `read`, `decode` and `transform` take."""
    marks = [time.perf_counter()]
    samples = fetch()
    marks.append(time.perf_counter())
    rows = list(decode(samples))
    marks.append(time.perf_counter())
    if transform is not None:
        for row in rows:
            transform(row)
    marks.append(time.perf_counter())
    return dict(zip(("read", "decode", "transform"), np.diff(marks).tolist(), strict=True))


def decode_parts(samples: list[Sample], parts: dict[str, str]) -> Iterator[dict[str, Any]]:
    """Yield the decoded members of each sample, as a dict with the names in the batch as keys.

    `parts` maps these names to extensions. Raises DataError for a missing member.
    """
    wanted = [
        (name, extension, decoders.find_decoder(extension)) for name, extension in parts.items()
    ]
    for sample in samples:
        try:
            yield {name: decoder(sample, extension) for name, extension, decoder in wanted}
        except KeyError:
            complete(sample, list(parts.values()))
            raise


def read_sample(path: Path, content: bytes) -> Sample:
    """Parse the bytes of one sample in a tar, headers included.

    `path` names the tar in errors. Raises DataError if `content` is not exactly one sample.
    """
    sample = _read_common(path, content)
    if sample is not None:
        return sample
    try:
        ((sample, _, _),) = read_spans(path, file=io.BytesIO(content + bytes(BLOCK)))
    except (DataError, ValueError):  # damaged, or not one sample
        raise DataError(
            f"{path} differs from the file that was indexed",
            hint="do not change shards while they are read",
        ) from None
    return sample


def _read_common(path: Path, content: bytes) -> Sample | None:
    """Return the sample in `content` if its headers have the most common form, otherwise None.

    For such headers, this is faster than tarfile.
    """
    sample, at = None, 0
    while (header := HEADER.match(content, at)) is not None:
        name, size, kind = header.groups()
        first = at + BLOCK
        last = first + int(size, 8)
        at = last + -last % BLOCK
        if kind == EXTENDED:
            if not is_ignorable_pax(content[first:last]):
                return None
            continue
        key, extension = split_name(name.decode("ascii", "replace"))
        sample = sample or Sample(path, key)
        if sample.key != key or extension in sample.parts:
            return None
        sample.parts[extension] = content[first:last]
    return sample if at == len(content) else None


def is_ignorable_pax(records: bytes) -> bool:
    """Return whether pax records are valid, and leave name, size and type of the file unchanged."""
    at = 0
    while at < len(records):
        found = RECORD.match(records, at)
        if found is None or found.end() - at != int(found[1]):
            return False
        at = found.end()
    return True


def join(name: str, values: list[Any], samples: list[Sample]) -> Tensor | list[Any]:
    """Collate the values that the samples of a batch have for one name.

    Arrays become one tensor, integers an int64 tensor (B,), and all other values a list. Raises
    DataError for arrays of different shapes or dtypes.
    """
    if all(type(value) is int and -(1 << 63) <= value < 1 << 63 for value in values):
        return torch.tensor(values)
    if not all(isinstance(value, Tensor | np.ndarray) for value in values):
        return values
    arrays = [np.asarray(value) for value in values]
    kinds = {(each.shape, each.dtype) for each in arrays}
    # strings, times, rows, long doubles
    if any(dtype.kind not in "biufc" or dtype.char in "gG" for _, dtype in kinds):
        return values
    if len(kinds) > 1:
        first = arrays[0]
        other = next(
            number
            for number, each in enumerate(arrays)
            if (each.shape, each.dtype) != (first.shape, first.dtype)
        )
        raise DataError(
            f"{name} is {first.dtype} {first.shape} in {samples[0].key} and {arrays[other].dtype} "
            f"{arrays[other].shape} in {samples[other].key} of {samples[other].shard}",
            hint="bring them to one shape with transform=",
        )
    # takes half the time of np.stack
    whole = np.concatenate(arrays) if arrays[0].ndim else np.array(arrays)
    return torch.from_numpy(whole.reshape(len(arrays), *arrays[0].shape))
