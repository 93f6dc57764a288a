"""Detection of in-place writes to batches that share memory with the data."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
from torch import Tensor

MAX_DEPTH = 12  # nesting of objects
MAX_OBJECTS = 1_000_000  # objects that are searched for tensors
# searches for the memory of a batch: a collate function copies all batches, but the first may be a
# check's copy
MAX_SEARCHES = 3
HINT = (
    "write x = x * 2 instead of x.mul_(2), x *= 2 or x[...] = 2, or let the data return "
    "copies: x.clone()"
)


def describe(who: str) -> str:
    """Return the message that `who` has changed the data by an in-place write to a batch."""
    return (
        f"{who} changes its batch in place, and the batch shares memory with the data: "
        "each epoch reads other values"
    )


class Versions:
    """Version counters of the tensors in a batch, recorded at construction.

    PyTorch increments the counter of a tensor at each in-place write, even through a view.
    """

    def __init__(self, batch: Any) -> None:
        self._before = [
            (each, each._version)
            for each in find_arrays(batch)
            if isinstance(each, Tensor) and not each.is_inference()
        ]

    def have_changed(self) -> bool:
        return any(tensor._version != before for tensor, before in self._before)


class InPlaceWriteCheck:
    """Check of a training loop for in-place writes to batches that share memory with `data`.

    `lend` records a batch before the loop uses it. Afterwards, `was_data_changed` returns True if
    the loop wrote to this batch and the batch is stored in the memory of `data`; it returns True
    only once. A check takes some microseconds and reads no values. Only the first `num_looks`
    batches are checked.
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
    """Yield each tensor and array in the containers and attributes of an object, once."""
    seen, waiting = set[int](), [(held, 0)]
    while waiting and len(seen) < MAX_OBJECTS:
        each, depth = waiting.pop()
        if isinstance(each, str | bytes | int | float | None) or id(each) in seen:
            continue
        seen.add(id(each))
        if isinstance(each, Tensor | np.ndarray):
            yield each
        elif depth < MAX_DEPTH:
            parts = (
                each.values()
                if isinstance(each, Mapping)
                else each
                if isinstance(each, list | tuple)
                else _attributes(each)
            )
            waiting += [(part, depth + 1) for part in parts]


def share_memory(batch: Any, data: Any) -> bool:
    """Return whether a CPU tensor or array in `batch` shares memory with one in `data`."""
    wanted = [found for each in find_arrays(batch) if (found := _bounds(each)) is not None]
    return bool(wanted) and any(
        (held := _bounds(each)) is not None
        and any(begin < held[1] and held[0] < end for begin, end in wanted)
        for each in find_arrays(data)
    )


def _attributes(each: Any) -> list[Any]:
    return list(getattr(each, "__dict__", {}).values()) if not isinstance(each, type) else []


def _bounds(each: Tensor | np.ndarray) -> tuple[int, int] | None:
    """Return the first and the end address of the memory behind a tensor or an array.

    Returns None if this memory is not on the CPU.
    """
    if isinstance(each, np.ndarray):
        while isinstance(each.base, np.ndarray):
            each = each.base
        return each.ctypes.data, each.ctypes.data + each.nbytes
    try:
        storage = each.untyped_storage()
        return (
            (storage.data_ptr(), storage.data_ptr() + storage.nbytes())
            if each.device.type == "cpu"
            else None
        )
    except (RuntimeError, NotImplementedError):  # a sparse tensor, or a class without storage
        return None
