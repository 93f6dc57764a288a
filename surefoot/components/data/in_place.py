"""Whether a forward pass writes into its batch, and whether the batch is stored in the memory of the data that it was read from."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
from torch import Tensor

MAX_DEPTH = 12  # of objects in one another
MAX_OBJECTS = 1_000_000  # that are looked through for tensors
MAX_SEARCHES = 3  # for the memory of a batch: a collate function copies all batches, but the first may be a check's copy
HINT = "write x = x * 2 instead of x.mul_(2), x *= 2 or x[...] = 2, or let the data give copies: x.clone()"


def describe(who: str) -> str:
    """Return what to report where `who` writes into the data."""
    return f"{who} writes into its batch in place, and the batch is the data's own memory: each epoch reads other values"


class Versions:
    """The tensors of a batch as they are when this is made: torch counts how often each is written to, also through views of it."""

    def __init__(self, batch: Any) -> None:
        self._before = [
            (each, each._version) for each in find_arrays(batch) if isinstance(each, Tensor) and not each.is_inference()
        ]

    def have_changed(self) -> bool:
        return any(tensor._version != before for tensor, before in self._before)


class Lent:
    """Batches that are given to a loop: `was_data_changed` returns once, when they come back, whether `data` were written to in them.

    Each look costs some microseconds, and no byte is read: the first `num_looks` batches are looked at.
    """

    def __init__(self, data: Any, num_looks: int = 100) -> None:
        self._data, self._num_left, self._num_searches = data, num_looks, MAX_SEARCHES
        self._lent: list[tuple[Any, Versions]] = []

    def lend(self, batch: Any) -> None:
        if self._num_left > 0:
            self._num_left -= 1
            self._lent.append((batch, Versions(batch)))

    def was_data_changed(self) -> bool:
        lent, self._lent = self._lent, []
        written = [batch for batch, versions in lent if versions.have_changed()]
        if not written:
            return False
        is_shared, self._num_searches = share_memory(written, self._data), self._num_searches - 1
        if is_shared or not self._num_searches:
            self._num_left = 0
        return is_shared


def find_arrays(held: Any) -> Iterator[Tensor | np.ndarray]:
    """Yield the tensors and arrays that are in containers or attributes of an object, each once."""
    seen, waiting = set[int](), [(held, 0)]
    while waiting and len(seen) < MAX_OBJECTS:
        each, depth = waiting.pop()
        if isinstance(each, str | bytes | int | float | None) or id(each) in seen:
            continue
        seen.add(id(each))
        if isinstance(each, Tensor | np.ndarray):
            yield each
        elif depth < MAX_DEPTH:
            parts = each.values() if isinstance(each, Mapping) else each if isinstance(each, list | tuple) else _attributes(each)
            waiting += [(part, depth + 1) for part in parts]


def share_memory(batch: Any, data: Any) -> bool:
    """Whether a tensor of `batch`, on a CPU, is stored in a tensor or an array that `data` hold."""
    wanted = [found for each in find_arrays(batch) if (found := _bounds(each)) is not None]
    return bool(wanted) and any(
        (held := _bounds(each)) is not None and any(begin < held[1] and held[0] < end for begin, end in wanted)
        for each in find_arrays(data)
    )


def _attributes(each: Any) -> list[Any]:
    return list(getattr(each, "__dict__", {}).values()) if not isinstance(each, type) else []


def _bounds(each: Tensor | np.ndarray) -> tuple[int, int] | None:
    """The first byte of what holds it, and the byte behind the last one."""
    if isinstance(each, np.ndarray):
        while isinstance(each.base, np.ndarray):
            each = each.base
        return each.ctypes.data, each.ctypes.data + each.nbytes
    try:
        storage = each.untyped_storage()
        return (storage.data_ptr(), storage.data_ptr() + storage.nbytes()) if each.device.type == "cpu" else None
    except (RuntimeError, NotImplementedError):  # a sparse tensor, or one of a class without storage
        return None
