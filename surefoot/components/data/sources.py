"""Sources: samples by number out of arrays, memory maps, token streams, torch datasets and iterables."""

from __future__ import annotations

import hashlib
import time
import warnings
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, cast

import numpy as np
import torch
from torch import Tensor

from surefoot.contract.task import Batch, Guarantee, Source
from surefoot.core.errors import DataError

ArrayLike = Tensor | np.ndarray
DIGEST_SAMPLES = 256  # rows hashed of each array: enough to tell two sets apart without reading a memory map whole


def _as_tensor(array: ArrayLike) -> Tensor:
    if isinstance(array, Tensor):
        return array
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # torch warns of read-only arrays; a source never writes into them
        return torch.from_numpy(np.asarray(array))


class Arrays:
    """Rows of equally long arrays: `Arrays(images, labels)` reads tuples, `Arrays(images=..., labels=...)` dicts.

    Tensors, numpy arrays and memory maps; a row is a sample. Raises DataError for none or unequal lengths.
    """

    guarantee: Guarantee = "proven"

    def __init__(self, *arrays: ArrayLike, **named: ArrayLike) -> None:
        if bool(arrays) == bool(named):
            raise DataError("Arrays takes arrays either by position or by name", hint="Arrays(images=x, labels=y)")
        self._names = tuple(named) or None
        self._tensors = [_as_tensor(array) for array in (named.values() if named else arrays)]
        lengths = {len(tensor) for tensor in self._tensors}
        if len(lengths) != 1 or lengths == {0}:
            shapes = ", ".join(str(tuple(tensor.shape)) for tensor in self._tensors)
            raise DataError(f"arrays of shapes {shapes} are no set of samples", hint="give arrays of one length, at least 1")
        self._length = lengths.pop()
        self.digest = self._digest()

    def _digest(self) -> str:
        digest = hashlib.sha256(repr(self._names).encode())
        rows = np.unique(np.linspace(0, self._length - 1, DIGEST_SAMPLES).astype(np.int64))
        for tensor in self._tensors:
            digest.update(f"{tuple(tensor.shape)}{tensor.dtype}".encode())
            digest.update(tensor[torch.from_numpy(rows)].contiguous().view(torch.uint8).numpy().tobytes())
        return digest.hexdigest()

    def __len__(self) -> int:
        return self._length

    def read(self, ids: np.ndarray) -> Batch:
        rows = torch.from_numpy(ids)
        read = [tensor.index_select(0, rows) for tensor in self._tensors]
        return dict(zip(self._names, read, strict=True)) if self._names else tuple(read)

    def describe(self) -> str:
        names = self._names or tuple(str(number) for number in range(len(self._tensors)))
        parts = (f"{name} {tuple(tensor.shape)} {tensor.dtype}" for name, tensor in zip(names, self._tensors, strict=True))
        return f"{self._length:,} samples: {', '.join(parts)}"


class Tokens:
    """Windows of `length` tokens out of one stream: inputs (B, T) and the next tokens as targets (B, T), int64.

    Every token but the first is a target once; the last window is padded with target -100 (and input 0).
    Raises DataError for a stream of fewer than two tokens or a length under 1.
    """

    guarantee: Guarantee = "proven"
    IGNORED = -100

    def __init__(self, ids: ArrayLike, length: int) -> None:
        self._ids = _as_tensor(ids)
        if self._ids.ndim != 1 or len(self._ids) < 2:
            raise DataError(
                f"a token stream of shape {tuple(self._ids.shape)} has nothing to predict", hint="give 2 tokens or more"
            )
        if length < 1:
            raise DataError(f"a window of {length} tokens is none", hint="use a length of 1 or more")
        self._window = torch.arange(length + 1)
        self._length = length
        self.tokens_per_sample = length
        self.digest = hashlib.sha256(self._ids.contiguous().view(torch.uint8).numpy().tobytes()).hexdigest()

    def __len__(self) -> int:
        return -(-(len(self._ids) - 1) // self._length)

    def read(self, ids: np.ndarray) -> dict[str, Tensor]:
        positions = torch.from_numpy(ids)[:, None] * self._length + self._window
        last = len(self._ids) - 1
        windows = self._ids[positions.clamp(max=last)].long()
        inputs, targets = windows[:, :-1], windows[:, 1:]
        if int(positions[:, -1].max()) > last:
            inputs = inputs.masked_fill(positions[:, :-1] >= last, 0)
            targets = targets.masked_fill(positions[:, 1:] > last, self.IGNORED)
        return {"inputs": inputs, "targets": targets}

    def describe(self) -> str:
        return f"{len(self._ids):,} tokens in {len(self):,} windows of {self._length}"


class TorchDataset:
    """Any map-style torch dataset, its items joined by torch's own `default_collate` unless `collate` is given."""

    guarantee: Guarantee = "proven"

    def __init__(self, dataset: Any, collate: Any = None) -> None:
        if not hasattr(dataset, "__getitem__") or not hasattr(dataset, "__len__"):
            raise DataError(f"{type(dataset).__name__} has no length or cannot be indexed", hint="wrap an iterable with Iterated")
        self._dataset = dataset
        self._collate = collate or torch.utils.data.default_collate
        self.digest = hashlib.sha256(f"{type(dataset).__qualname__} {len(dataset)}".encode()).hexdigest()

    def __len__(self) -> int:
        return len(self._dataset)

    def read(self, ids: np.ndarray) -> Batch:
        return self._collate([self._dataset[int(number)] for number in ids])

    def describe(self) -> str:
        return f"{len(self):,} samples of {type(self._dataset).__name__}"


class Iterated:
    """An iterable or a DataLoader of whole batches; sample i is batch i, so it is trained with `batch = 1`, unshuffled.

    It can only be read forwards: to go on at batch k the first k are drawn again (*replayed*), which is right only if the
    iterable gives the same batches each time. Raises DataError when it ends before `num_batches`.
    """

    guarantee: Guarantee = "replayed"

    def __init__(self, iterable: Iterable[Batch], num_batches: int | None = None) -> None:
        length = num_batches if num_batches is not None else _length_of(iterable)
        if isinstance(iterable, Iterator):
            raise DataError(
                f"a {type(iterable).__name__} can be read only once",
                hint="give something that starts anew each time it is iterated",
            )
        self._iterable = iterable
        self._num_batches = length
        self._iterator: Iterator[Batch] | None = None
        self._next = 0
        self.digest = hashlib.sha256(f"{type(iterable).__qualname__} {length}".encode()).hexdigest()

    def __len__(self) -> int:
        return self._num_batches

    def read(self, ids: np.ndarray) -> Batch:
        if len(ids) != 1:
            raise DataError(f"an iterable gives whole batches, {len(ids)} were asked for at once", hint="set train.batch = 1")
        wanted = int(ids[0])
        if self._iterator is None or wanted < self._next:
            self._iterator, self._next = iter(self._iterable), 0
        for batch in self._iterator:
            self._next += 1
            if self._next == wanted + 1:
                return batch
        raise DataError(
            f"the iterable ended after {self._next} batches of {self._num_batches}", hint="give the right num_batches"
        )

    def describe(self) -> str:
        return f"{self._num_batches:,} batches of {type(self._iterable).__name__}, replayed to go on"


def _length_of(iterable: Any) -> int:
    try:
        return len(iterable)
    except TypeError:
        raise DataError(f"{type(iterable).__name__} has no length", hint="Iterated(iterable, num_batches=...)") from None


class Synthetic:
    """Images of pure arithmetic with an adjustable delay and size, for labs and tests.

    Sample i is `shape` float32 values hashed from (seed, i), its label i modulo `num_classes`; `delay_s` seconds are slept per sample.
    """

    guarantee: Guarantee = "proven"

    def __init__(
        self, num_samples: int, *, shape: Sequence[int] = (3, 32, 32), num_classes: int = 10, delay_s: float = 0.0, seed: int = 0
    ) -> None:
        if num_samples < 1 or delay_s < 0:
            raise DataError(
                f"{num_samples} samples with a delay of {delay_s} s are no set", hint="use 1 or more, and 0 s or more"
            )
        self._num_samples, self._shape, self._num_classes = num_samples, tuple(shape), num_classes
        self._delay_s, self._seed = delay_s, seed
        self.digest = hashlib.sha256(f"{num_samples} {self._shape} {num_classes} {seed}".encode()).hexdigest()

    def __len__(self) -> int:
        return self._num_samples

    def read(self, ids: np.ndarray) -> dict[str, Tensor]:
        if self._delay_s:
            time.sleep(self._delay_s * len(ids))
        images = np.empty((len(ids), *self._shape), dtype=np.float32)
        for row, number in enumerate(ids):
            images[row] = np.random.default_rng((self._seed, int(number))).random(self._shape, dtype=np.float32)
        return {"images": torch.from_numpy(images), "labels": torch.from_numpy(ids % self._num_classes)}

    def describe(self) -> str:
        return f"{self._num_samples:,} synthetic samples of {self._shape}, {self._delay_s} s each"


def as_source(given: Any) -> Source:
    """Make a source of whatever a task's `data` gave: a source as it is, tensors, a map dataset, an iterable of batches.

    Raises DataError for anything else.
    """
    if isinstance(given, Source):
        return given
    if isinstance(given, (Tensor, np.ndarray)):
        return Arrays(given)
    if isinstance(given, tuple) and given and all(isinstance(part, (Tensor, np.ndarray)) for part in given):
        return Arrays(*given)
    if isinstance(given, Mapping) and given and all(isinstance(part, (Tensor, np.ndarray)) for part in given.values()):
        return Arrays(**cast(Mapping[str, ArrayLike], given))
    if isinstance(given, torch.utils.data.DataLoader):
        return Iterated(given)
    if hasattr(given, "__getitem__") and hasattr(given, "__len__"):
        return TorchDataset(given)
    if isinstance(given, Iterable):
        return Iterated(given)
    raise DataError(
        f"a task's data gave a {type(given).__name__}, which is no source of samples",
        hint="give a Source, tensors, a map-style dataset or an iterable of batches",
    )
