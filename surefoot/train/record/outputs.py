"""Model outputs for the samples of a split, collected as arrays with one row per sample."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from surefoot.components.precision.policy import HALVES
from surefoot.core.errors import TaskError

SHAPE = "{}.shape"  # name of the array with the shape of each row, if the shapes differ
WHAT = "return a tensor whose first dimension is the batch's, or a tuple, list or dict of them"


class Outputs:
    """Collector of the outputs of batches, as one array per tensor.

    `arrays` returns the arrays, `left_out` holds the reason for each output without rows. A single
    tensor is named `output`. In nested tuples, lists and dicts a tensor is named by its keys and
    positions, such as `hidden.0`. Detectors return a list with one entry per sample; the arrays
    then have the names of the tensors in an entry. Rows of different shapes are padded with zeros,
    and the array `NAME.shape` holds the shape of each row.
    """

    def __init__(self) -> None:
        self._rows: dict[str, list[Tensor]] = {}  # each part is (samples, ...)
        self._num_samples = 0
        self.left_out: dict[str, str] = {}

    def add(self, made: Any, num_samples: int | None) -> None:
        """Add the output of a batch. Raises TaskError if no tensor has a row for each sample."""
        leaves = dict(_leaves(made, "", num_samples))
        size = num_samples if num_samples is not None else _first_size(leaves)
        kept = {}
        for name, value in leaves.items():
            if (why := _reason_against(value, size)) is None:
                kept[name] = [_to_plain(each) for each in _parts(value)]
            else:
                self.left_out[name] = why
        if not kept:
            raise TaskError(_describe_none(made, leaves, self.left_out), hint=_hint(leaves, size))
        for name, parts in kept.items():
            self._rows.setdefault(name, []).extend(parts)
        self._num_samples += size

    def is_ambiguous(self, size: int) -> bool:
        """Return whether a dimension other than the first has `size` entries, like the batch."""
        return any(size in part.shape[1:] for parts in self._rows.values() for part in parts)

    def check_num_rows(self, made: Any, fewer: int) -> None:
        """Raise TaskError if an output for `fewer` samples does not have `fewer` rows."""
        for name, value in _leaves(made, "", fewer):
            if (
                name in self._rows
                and isinstance(value, Tensor)
                and value.ndim
                and (rows := int(value.size(0))) != fewer
            ):
                raise TaskError(
                    f"{name!r} has shape {tuple(value.shape)} for {fewer} samples: its dimension "
                    f"0 has {rows} rows, not {fewer}",
                    hint=_hint({name: value}, fewer),
                )

    def arrays(self) -> dict[str, np.ndarray]:
        """Return the arrays by name.

        Raises TaskError if a tensor is missing for a batch, or if its number of dimensions varies.
        """
        found: dict[str, np.ndarray] = {}
        for name, parts in self._rows.items():
            if (rows := sum(map(len, parts))) != self._num_samples:
                raise TaskError(
                    f"forward returned {name!r} for {rows:,} of {self._num_samples:,} samples",
                    hint=f"for every batch, {WHAT}",
                )
            ndims = sorted({part.ndim for part in parts})
            if len(ndims) > 1:
                raise TaskError(
                    f"{name!r} has {ndims[0]} dimensions in one batch and {ndims[-1]} in another",
                    hint=f"for every batch, {WHAT}",
                )
            if len({part.shape[1:] for part in parts}) == 1:
                found[name] = np.ascontiguousarray(torch.cat(parts).numpy())
                continue
            found[name] = torch.cat([_pad(part, parts) for part in parts]).numpy()
            shapes = [
                np.tile(np.array(part.shape[1:], dtype=np.int64), (len(part), 1)) for part in parts
            ]
            found[SHAPE.format(name)] = np.concatenate(shapes)
        return found


def _leaves(made: Any, name: str, size: int | None) -> Iterator[tuple[str, Any]]:
    """Yield each leaf of an output with its name; a list with a tensor per sample is one leaf."""
    if (
        isinstance(made, list)
        and size is not None
        and len(made) == size
        and _are_samples(made, size)
    ):
        if isinstance(made[0], Mapping):
            yield from (
                (f"{name}.{key}" if name else str(key), [one[key] for one in made])
                for key in made[0]
            )
        else:
            yield name or "output", list(made)
        return
    pairs = (
        made.items()
        if hasattr(made, "items")
        else enumerate(made)
        if isinstance(made, tuple | list)
        else None
    )
    if pairs is None:
        yield name or "output", made
        return
    for key, value in pairs:
        yield from _leaves(value, f"{name}.{key}" if name else str(key), size)


def _are_samples(made: list[Any], size: int) -> bool:
    """Return whether the list `made` of `size` entries has one entry per sample.

    Otherwise its entries are tensors of whole batches.
    """
    if all(isinstance(one, Mapping) for one in made):
        return all(
            one.keys() == made[0].keys()
            and all(isinstance(value, Tensor) for value in one.values())
            for one in made
        )
    return all(isinstance(one, Tensor) for one in made) and not all(
        one.ndim and len(one) == size for one in made
    )


def _first_size(leaves: Mapping[str, Any]) -> int:
    sized = [
        value
        for value in leaves.values()
        if isinstance(value, list) or (isinstance(value, Tensor) and value.ndim)
    ]
    return len(sized[0]) if sized else 0


def _reason_against(value: Any, size: int) -> str | None:
    """Return why `value` does not have a row for each of `size` samples; None if it has."""
    if isinstance(value, list):
        return None
    if not isinstance(value, Tensor):
        return f"of type {type(value).__name__}"
    if not value.ndim:
        return "a tensor without dimensions"
    if (rows := int(value.size(0))) == size:
        return None
    others = (
        [str(dim) for dim, length in enumerate(value.shape) if length == size]
        if not value.is_nested
        else []
    )
    where = f", and its dimension {' or '.join(others)} is the batch's" if others else ""
    return (
        f"of shape {tuple(value.shape)}: dimension 0 has "
        f"{rows} rows for a batch of {size} samples{where}"
    )


def _describe_none(made: Any, leaves: Mapping[str, Any], left_out: Mapping[str, str]) -> str:
    if any(isinstance(value, Tensor) and value.ndim for value in leaves.values()):
        return "forward must return one row for each sample: " + "; ".join(
            f"{name!r} is {left_out[name]}" for name in leaves
        )
    return f"forward returned a {type(made).__name__} without a row for each sample"


def _hint(leaves: Mapping[str, Any], size: int) -> str:
    for value in leaves.values():
        if isinstance(value, Tensor) and size in value.shape[1:]:
            dim = value.shape.index(size, 1)
            return f"return it with the batch first: output.movedim({dim}, 0)"
    return WHAT


def _parts(value: Tensor | list[Tensor]) -> Sequence[Tensor]:
    """Return the rows of a list or a nested tensor separately; a plain tensor is one part."""
    if isinstance(value, list) or value.is_nested:
        return [row.unsqueeze(0) for row in (value if isinstance(value, list) else value.unbind())]
    return [value]


def _to_plain(value: Tensor) -> Tensor:
    value = value.detach().cpu()
    value = value.to_dense() if value.layout != torch.strided else value
    return value.float() if value.dtype in HALVES.values() else value


def _pad(part: Tensor, parts: Sequence[Tensor]) -> Tensor:
    """Return `part` padded with zeros at the end to the largest sizes in `parts`."""
    most = [max(lengths) for lengths in zip(*(each.shape[1:] for each in parts), strict=True)]
    made = part.new_zeros(len(part), *most)
    made[(slice(None), *(slice(length) for length in part.shape[1:]))] = part
    return made
