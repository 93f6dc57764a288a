"""What others made as sources: datasets that are read by number, and iterables of whole batches."""

from __future__ import annotations

import copy
import hashlib
from collections import deque
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, cast

import numpy as np
import torch
from torch import Tensor

from surefoot.components.data.sources.arrays import ArrayLike, Arrays
from surefoot.components.data.sources.asked import check_asked
from surefoot.contract.task import Batch, Guarantee, Source
from surefoot.core.errors import DataError

KEPT_STATES = 16


class TorchDataset:
    """Any map-style dataset, its items joined by torch's own `default_collate` unless `collate` is given.

    One that reads several items at once (`__getitems__`, as Hugging Face's do) is asked for a batch at a time. Its digest is its
    own fingerprint where it has one (`_fingerprint`, Hugging Face again), its type and length elsewhere.
    """

    guarantee: Guarantee = "proven"
    thread_safe = False  # the dataset is the user's

    def __init__(self, dataset: Any, collate: Any = None) -> None:
        if not hasattr(dataset, "__getitem__") or not hasattr(dataset, "__len__"):
            raise DataError(f"{type(dataset).__name__} has no length or cannot be indexed", hint="wrap an iterable with Iterated")
        if len(dataset) == 0:
            raise DataError(f"the {type(dataset).__name__} is empty", hint="give 1 sample or more")
        self._dataset = dataset
        self._collate = collate or torch.utils.data.default_collate
        self._read_many = getattr(dataset, "__getitems__", None)
        fingerprint = getattr(dataset, "_fingerprint", None)
        known = fingerprint if isinstance(fingerprint, str) else f"{type(dataset).__qualname__} {len(dataset)}"
        self.digest = hashlib.sha256(known.encode()).hexdigest()

    def __len__(self) -> int:
        return len(self._dataset)

    def read(self, ids: np.ndarray) -> Batch:
        check_asked(ids, len(self))
        numbers = ids.tolist()
        items = [self._dataset[number] for number in numbers] if self._read_many is None else self._read_many(numbers)
        if len(items) != len(numbers):
            raise DataError(
                f"{type(self._dataset).__name__}.__getitems__ gave {len(items)} items for {len(numbers)} numbers",
                hint="give a list with one item for each number, in their order",
            )
        return self._collate(items)

    def describe(self) -> str:
        return f"{len(self):,} samples of {type(self._dataset).__name__}"


class Iterated:
    """An iterable or a DataLoader of whole batches; sample i is batch i, so it is trained with `batch = 1`, unshuffled.

    It can only be read forwards: to go on at batch k the first k are drawn again (*replayed*), which is right only if the
    iterable gives the same batches each time. Raises DataError when it ends before `num_batches`.

    One with `state_dict` and `load_state_dict` (torchdata's StatefulDataLoader) is put where it was instead; that outlives the process
    where the task's `state()` names this source. The states after the last batches are kept, since what reads ahead is ahead of training.
    """

    guarantee: Guarantee = "replayed"
    thread_safe = False

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
        self._has_state = all(callable(getattr(iterable, part, None)) for part in ("state_dict", "load_state_dict"))
        self._states: deque[tuple[int, Any]] = deque(maxlen=KEPT_STATES)  # how many batches were drawn, and the state after them
        self.digest = hashlib.sha256(f"{type(iterable).__qualname__} {length}".encode()).hexdigest()

    def __len__(self) -> int:
        return self._num_batches

    def read(self, ids: np.ndarray) -> Batch:
        if len(ids) != 1:
            raise DataError(f"an iterable gives whole batches, {len(ids)} were asked for at once", hint="set train.batch = 1")
        wanted = int(ids[0])
        if self._iterator is None or wanted < self._next:
            self._iterator = self._begin(wanted)
        for batch in self._iterator:
            self._next += 1
            if self._has_state:
                self._states.append((self._next, copy.deepcopy(self._iterable.state_dict())))  # type: ignore[attr-defined]
            if self._next == wanted + 1:
                return batch
        raise DataError(
            f"the iterable ended after {self._next} batches of {self._num_batches}", hint="give the right num_batches"
        )

    def describe(self) -> str:
        return f"{self._num_batches:,} batches of {type(self._iterable).__name__}, replayed to go on"

    def state_dict(self) -> dict[str, Any]:
        """The states after the last batches that were drawn; empty where the iterable has none."""
        return {"states": [list(each) for each in self._states]}

    def load_state_dict(self, held: Mapping[str, Any]) -> None:
        self._iterator = None
        self._states = deque(((int(drawn), state) for drawn, state in held["states"]), maxlen=KEPT_STATES)

    def _begin(self, wanted: int) -> Iterator[Batch]:
        """At the last state before batch `wanted`, else anew."""
        while self._states and self._states[-1][0] > wanted:
            self._states.pop()
        self._next = 0
        if self._states:
            self._next, state = self._states[-1]
            self._iterable.load_state_dict(copy.deepcopy(state))  # type: ignore[attr-defined]
        return iter(self._iterable)


def _length_of(iterable: Any) -> int:
    try:
        return len(iterable)
    except TypeError:
        raise DataError(f"{type(iterable).__name__} has no length", hint="Iterated(iterable, num_batches=...)") from None


SOURCE_HAS = ("guarantee", "digest", "read", "describe")
INSTEAD = {  # what is often given in place of a source, and what to give
    str: "name what reads it: TokenFile(path, length), ImageFolder(path), Tars([path], image='jpg'), Table(path, x='column')",
    bytes: "give its numbers: Tokens(numpy.frombuffer(data, 'uint8'), length)",
    type: "give an object of that class, not the class itself",
    type(None): "return a source from data(split) for every split that is asked for",
}


def as_source(given: Any) -> Source:
    """Make a source of whatever a task's `data` gave: a source as it is, tensors, a map dataset, an iterable of batches.

    Raises DataError for anything else.
    """
    if isinstance(given, Source) and not isinstance(given, type):
        return given
    if isinstance(given, (Tensor, np.ndarray)):
        return Arrays(given)
    if isinstance(given, tuple) and given and all(isinstance(part, (Tensor, np.ndarray)) for part in given):
        return Arrays(*given)
    if isinstance(given, dict) or (
        isinstance(given, Mapping) and all(isinstance(part, (Tensor, np.ndarray)) for part in given.values())
    ):
        return Arrays(**_checked(given))
    if isinstance(given, torch.utils.data.DataLoader):
        return Iterated(given)
    refuse = isinstance(given, tuple(INSTEAD)) or hasattr(given, "__fspath__")
    if not refuse and hasattr(given, "__getitem__") and hasattr(given, "__len__"):
        return TorchDataset(given)
    if not refuse and isinstance(given, Iterable):
        return Iterated(given)
    missing = [name for name in SOURCE_HAS if not hasattr(given, name)]
    hint = next((hint for kind, hint in INSTEAD.items() if isinstance(given, kind)), None)
    if hasattr(given, "__fspath__"):
        hint = INSTEAD[str]
    elif hint is None and callable(getattr(given, "read", None)):
        hint = f"a source also has {', '.join([*missing, '__len__'] if not hasattr(given, '__len__') else missing)}"
    raise DataError(
        f"a task's data gave {given!r:.80}, a {type(given).__name__}, which is no source of samples",
        hint=hint or "give a Source, tensors, a map-style dataset or an iterable of batches",
    )


def _checked(given: Mapping[Any, Any]) -> Mapping[str, ArrayLike]:
    """A mapping whose values are arrays. A dict of splits, or of lists, is what is often given instead."""
    if not given:
        raise DataError("a task's data gave an empty dict", hint="give its arrays by name: {'images': x, 'labels': y}")
    for name, part in given.items():
        if not isinstance(name, str):
            raise DataError(f"a task's data gave a dict with the key {name!r}", hint="give a list of samples, or arrays by name")
        if not isinstance(part, (Tensor, np.ndarray)):
            hint = f"return the one split: given[{name!r}]" if hasattr(part, "__getitems__") else "make each a tensor or an array"
            raise DataError(f"a task's data gave a {type(given).__name__} whose {name!r} is a {type(part).__name__}", hint=hint)
    return cast(Mapping[str, ArrayLike], given)
