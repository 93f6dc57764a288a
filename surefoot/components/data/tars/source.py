"""Samples of tars by number, wherever they stand: one read each by the index of the tars, in any order."""

# B batch, H height, W width, C channels

from __future__ import annotations

import io
import os
import struct
import tarfile
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from surefoot.components.data.remote import Remote
from surefoot.components.data.tars import decoders
from surefoot.components.data.tars.far import find_remote, open_remote
from surefoot.components.data.tars.headers import EXTENDED, FILES, says_little
from surefoot.components.data.tars.index import Index, Tell, open_index
from surefoot.components.data.tars.shards import BLOCK, Sample, complete, split_name
from surefoot.contract.task import Guarantee
from surefoot.core.errors import DataError
from surefoot.core.place import cache_folder, whole_path
from surefoot.core.process.forked import make_lock

MOST_OPEN = 64  # shards at a time
HEADER = struct.Struct("100s 24x 12s 20x c 100x 5s 83x c")  # name, size, kind, magic, first of the prefix
KINDS = frozenset(bytes([kind]) for kind in FILES + EXTENDED)
SEVEN = ord("7")
Transform = Callable[[dict[str, Any]], dict[str, Any]]


class Tars:
    """Tars of the WebDataset layout: `Tars(paths, image="jpg", label="cls")` reads dicts of batches, {"image": ..., "label": ...}.

    Each name stands for an extension, decoded as `decoders.decode` says. Arrays of one shape become one tensor, numbers an int64 tensor
    (B,), all else a list. `transform` is called on each sample's dict, before: to bring images to one size. Nothing is extracted; the
    index lies below `cache` (default $XDG_CACHE_HOME/surefoot), and so do the shards of URLs, for which a `Remote` says more. `tell`
    hears how far its making is. Raises DataError for bad shards, a sample that lacks a part, parts that are damaged, and arrays of
    several shapes.
    """

    guarantee: Guarantee = "proven"
    thread_safe = True
    _lock: threading.Lock

    def __init__(
        self, paths: Remote | str | Path | Sequence[str | Path], *, cache: str | Path | None = None, transform: Transform | None = None,
        tell: Tell | None = None, **parts: str,
    ) -> None:  # fmt: skip
        if not parts:
            raise DataError("Tars is told of no part to read", hint='Tars(paths, image="jpg", label="cls")')
        self.parts, self.transform = parts, transform
        below = whole_path(cache) if cache else cache_folder() / "tars"
        self._remote = remote = find_remote(paths, cache)
        named = [paths] if isinstance(paths, str | Path) else paths
        self.index: Index = (
            open_index([whole_path(path) for path in named], below, tell=tell)  # type: ignore[union-attr]
            if remote is None
            else open_remote(remote, tell=tell)
        )
        self.digest = self.index.digest
        self._paths = [
            self.index.folder / shard.name for shard in self.index.shards
        ]  # made once: it takes as long as reading one
        self._open: OrderedDict[int, Descriptor] = OrderedDict()  # of each shard that is open, the one used last at the end
        make_lock(self)

    def __len__(self) -> int:
        return len(self.index)

    def read(self, ids: np.ndarray) -> dict[str, Tensor | list[Any]]:
        if len(ids) == 0:
            raise DataError("no sample is asked for", hint="give one number or more")
        samples = [self.sample(*place) for place in zip(*map(np.ndarray.tolist, self.index.locate(ids)), strict=True)]
        return make_batch(samples, self.parts, self.transform)

    @property
    def shard_sizes(self) -> list[int]:
        """The samples of each shard, in the order of their numbers."""
        return [shard.num_samples for shard in self.index.shards]

    def expect(self, chunks: np.ndarray) -> None:
        """Samples are going to be asked for in this order, (chunks, 2): shards that lie elsewhere are fetched before."""
        if self._remote is not None:
            shards, _, _ = self.index.locate(chunks.ravel())
            self._remote.expect(list(dict.fromkeys(shards.tolist())))

    def explain(self, ids: np.ndarray) -> dict[str, float]:
        """The seconds that reading, decoding and the transform of these samples take."""
        marks = [time.perf_counter()]
        samples = [self.sample(*place) for place in zip(*map(np.ndarray.tolist, self.index.locate(ids)), strict=True)]
        marks.append(time.perf_counter())
        wanted = _find_decoders(self.parts)
        rows = [_decode(sample, wanted) for sample in samples]
        marks.append(time.perf_counter())
        if self.transform is not None:
            for row in rows:
                self.transform(row)
        marks.append(time.perf_counter())
        return dict(zip(("read", "decode", "transform"), np.diff(marks).tolist(), strict=True))

    def sample(self, shard: int, first: int, count: int) -> Sample:
        """The sample that lies at these bytes of a shard. Raises DataError where another one, or none, lies there by now."""
        path = self._paths[shard]
        try:
            held = self._descriptor(shard, path)
            content = os.pread(held.number, count, first)
        except OSError as error:
            raise DataError(
                f"{path} cannot be read: {error.strerror}", hint="is the disk sound, and the file still there?"
            ) from None
        if len(content) < count:
            raise DataError(
                f"{path} is shorter than when it was indexed: it ends at byte {first + len(content):,}",
                hint="copy the shard again",
            )
        return read_sample(path, content)

    def describe(self) -> str:
        size = sum(shard.num_bytes for shard in self.index.shards)
        names = ", ".join(f"{name} ({extension})" for name, extension in self.parts.items())
        return f"{len(self):,} samples in {len(self.index.shards)} tars of {size / 1e9:.3g} GB: {names}"

    def _descriptor(self, shard: int, path: Path) -> Descriptor:
        with self._lock:
            if (held := self._open.get(shard)) is not None:
                self._open.move_to_end(shard)
                return held
            while len(self._open) >= self.index.most_open(MOST_OPEN):
                self._open.popitem(last=False)
        opened = Descriptor(self.index.open(shard))  # which fetches one that lies elsewhere, while other threads read on
        if os.fstat(opened.number).st_size != self.index.shards[shard].num_bytes:
            raise DataError(f"{path} is not what it was when it was indexed", hint="leave shards alone while they are read")
        with self._lock:
            opened = self._open.setdefault(shard, opened)
            while len(self._open) > self.index.most_open(MOST_OPEN):  # several threads opened one at once
                self._open.popitem(last=False)
            return opened

    def __getstate__(self) -> dict[str, Any]:  # another process opens its own
        return {name: value for name, value in self.__dict__.items() if name not in ("_open", "_lock")}

    def __setstate__(self, held: dict[str, Any]) -> None:
        self.__dict__ |= {**held, "_open": OrderedDict()}
        make_lock(self)


class Descriptor:
    """A file that is open while anyone holds this: a thread may still read a shard that another one put out of the list."""

    def __init__(self, number: int) -> None:
        self.number = number

    def __del__(self) -> None:
        os.close(self.number)


def make_batch(samples: list[Sample], parts: dict[str, str], transform: Transform | None) -> dict[str, Tensor | list[Any]]:
    """The batch of whole samples: each part decoded, each sample changed by `transform`, all joined as `Tars` tells."""
    wanted = _find_decoders(parts)
    decoded = (_decode(sample, wanted) for sample in samples)
    rows = [row if transform is None else transform(row) for row in decoded]
    return {name: join(name, [row[name] for row in rows], samples) for name in rows[0]}


Wanted = list[tuple[str, str, decoders.Decoder]]


def _find_decoders(parts: dict[str, str]) -> Wanted:
    return [(name, extension, decoders.find_decoder(extension)) for name, extension in parts.items()]


def _decode(sample: Sample, wanted: Wanted) -> dict[str, Any]:
    try:
        return {name: decoder(sample, extension) for name, extension, decoder in wanted}
    except KeyError:
        complete(sample, [extension for _, extension, _ in wanted])
        raise


def read_sample(path: Path, content: bytes) -> Sample:
    """The one sample whose members, headers and all, are `content`. Raises DataError where they are none."""
    sample, at, end = None, 0, len(content)
    while at + BLOCK <= end:
        name, size, kind, magic, prefix = HEADER.unpack_from(content, at)
        digits = size.rstrip(b"\0 ")
        if magic != b"ustar" or prefix != b"\0" or name[-1] or kind not in KINDS or not digits.isdigit() or max(digits) > SEVEN:
            return _read_slowly(path, content)
        first = at + BLOCK
        last = first + int(digits, 8)
        if kind != EXTENDED:
            sample = _add(path, sample, name[: name.index(0)].decode("ascii", "replace"), content[first:last])
        elif not says_little(content[first:last]):
            return _read_slowly(path, content)
        at = last + -last % BLOCK
    if sample is None or at != end:
        raise DataError(f"{path} is not what it was when it was indexed", hint="leave shards alone while they are read")
    return sample


def _add(path: Path, sample: Sample | None, name: str, content: bytes) -> Sample:
    key, extension = split_name(name)
    if sample is None:
        return Sample(path, key, {extension: content})
    if sample.key != key or extension in sample.parts:
        raise DataError(
            f"{path} is not what it was when it was indexed: {name} follows {sample.key}",
            hint="leave shards alone while they are read",
        )
    sample.parts[extension] = content
    return sample


def _read_slowly(path: Path, content: bytes) -> Sample:
    """The same by tarfile, for names and sizes that do not stand in one header."""
    sample = None
    try:
        with tarfile.open(fileobj=io.BytesIO(content), mode="r:") as archive:
            for member in archive:
                opened = archive.extractfile(member)
                sample = _add(path, sample, member.name, opened.read() if opened is not None else b"")
    except (tarfile.TarError, ValueError, OverflowError):  # the others are tarfile's own, of headers that say nonsense
        sample = None
    if sample is None:
        raise DataError(f"{path} is not what it was when it was indexed", hint="leave shards alone while they are read")
    return sample


def join(name: str, values: list[Any], samples: list[Sample]) -> Tensor | list[Any]:
    """A part of the samples of a batch: arrays as one tensor, whole numbers int64 (B,), all else a list.

    Raises DataError for arrays of two shapes.
    """
    if all(type(value) is int and -(1 << 63) <= value < 1 << 63 for value in values):
        return torch.tensor(values)
    if not all(isinstance(value, Tensor | np.ndarray) for value in values):
        return values
    arrays = [np.asarray(value) for value in values]
    kinds = {(each.shape, each.dtype) for each in arrays}
    if any(dtype.kind not in "biufc" or dtype.char in "gG" for _, dtype in kinds):  # strings, times, rows, long doubles
        return values
    if len(kinds) > 1:
        first = arrays[0]
        other = next(number for number, each in enumerate(arrays) if (each.shape, each.dtype) != (first.shape, first.dtype))
        raise DataError(
            f"{name} is {first.dtype} {first.shape} in {samples[0].key} and {arrays[other].dtype} {arrays[other].shape} in "
            f"{samples[other].key} of {samples[other].shard}",
            hint="bring them to one shape with transform=",
        )
    whole = np.concatenate(arrays) if arrays[0].ndim else np.array(arrays)  # half the time of np.stack
    return torch.from_numpy(whole.reshape(len(arrays), *arrays[0].shape))
