"""The tensors inside the inputs or outputs of a module: in tuples, lists, mappings and
dataclasses."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping
from typing import Any

from torch import Tensor


def find_tensors(value: Any) -> Iterator[Tensor]:
    """Yield every tensor in `value`, at any depth, in order."""
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, Mapping):
        yield from find_tensors(tuple(value.values()))
    elif isinstance(value, tuple | list):
        for each in value:
            yield from find_tensors(each)
    elif dataclasses.is_dataclass(value) and not isinstance(value, type):
        yield from find_tensors([getattr(value, each.name) for each in dataclasses.fields(value)])
