"""Traversal of the tensors in a batch, or in the inputs or outputs of a module."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from torch import Tensor


def find_tensors(value: Any) -> Iterator[Tensor]:
    """Yield every tensor in nested tuples, lists, mappings and dataclasses, in order."""
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, Mapping):
        yield from find_tensors(tuple(value.values()))
    elif isinstance(value, tuple | list):
        for each in value:
            yield from find_tensors(each)
    elif dataclasses.is_dataclass(value) and not isinstance(value, type):
        yield from find_tensors([getattr(value, each.name) for each in dataclasses.fields(value)])


def map_tensors(
    value: Any,
    change: Callable[[Tensor], Tensor],
    other: Callable[[Any], Any] = lambda part: part,
) -> Any:
    """Return a copy of nested tuples, lists and dicts whose tensors are replaced by `change`.

    Every other value inside is replaced by `other`.
    """
    if isinstance(value, Tensor):
        return change(value)
    if isinstance(value, dict):
        return {key: map_tensors(part, change, other) for key, part in value.items()}
    if isinstance(value, tuple | list):
        parts = [map_tensors(part, change, other) for part in value]
        made: Any = type(value)
        return made(*parts) if hasattr(value, "_fields") else made(parts)
    return other(value)
