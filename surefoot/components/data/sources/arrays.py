"""Source of the rows of tensors, numpy arrays, memory maps and .npy files."""

from __future__ import annotations

import hashlib
import mmap
import tokenize
import warnings
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from surefoot.components.data.order import check_ids
from surefoot.contract.task import Batch, Guarantee
from surefoot.core.errors import DataError

ArrayLike = Tensor | np.ndarray
# types of the same size whose rows torch can select
SIGNED = {torch.uint16: torch.int16, torch.uint32: torch.int32, torch.uint64: torch.int64}
# rows hashed of each array: enough to distinguish two sets without reading a whole memory map
DIGEST_SAMPLES = 256
# what numpy raises
NO_NPY = (
    ValueError,
    SyntaxError,
    TypeError,
    EOFError,
    OverflowError,
    RecursionError,
    tokenize.TokenError,
)


def as_tensor(array: ArrayLike, what: str = "an array") -> Tensor:
    """Return the array as a tensor, without a copy; `what` names the array in errors.

    Raises DataError for a dtype that torch does not support, masked values, a nested, sparse or
    meta tensor, a data frame with several dtypes, and columns of pandas that have missing values
    or are not numbers.
    """
    if isinstance(array, Tensor):
        if array.is_nested:
            raise DataError(
                f"{what} is a nested tensor", hint="pad it: torch.nested.to_padded_tensor(x, 0.0)"
            )
        if array.is_meta:
            raise DataError(f"{what} is a tensor on the meta device", hint="create it on the CPU")
        if array.layout is not torch.strided:
            raise DataError(f"{what} is a tensor of {array.layout}", hint="pass x.to_dense()")
        return array.detach() if array.requires_grad else array
    if isinstance(array, Mapping):
        raise DataError(
            f"{what} is a {type(array).__name__}", hint="give its arrays by name: Arrays(**arrays)"
        )
    if np.ma.is_masked(array):
        raise DataError(
            f"{what} has masked values, but tensors have none", hint="fill them first: x.filled(0)"
        )
    held = _values_of_pandas(array, what) if is_pandas(array) else np.asarray(array)
    with warnings.catch_warnings():
        # torch warns of read-only arrays; a source never writes into them
        warnings.simplefilter("ignore", UserWarning)
        try:
            return torch.from_numpy(held)
        except (TypeError, ValueError) as error:
            told = f"{what} of {held.dtype} {held.shape} cannot become a tensor: {error}"
            raise DataError(told, hint=_hint_for(held)) from None


def is_pandas(given: Any) -> bool:
    """Return whether `given` is a data frame or a series of pandas, whose `[...]` takes labels."""
    return hasattr(given, "iloc") and hasattr(given, "to_numpy") and not isinstance(given, type)


def _values_of_pandas(given: Any, what: str) -> np.ndarray:
    """Return the values of a data frame or a series by position, in its own dtype."""
    kinds = dict.fromkeys(given.dtypes if hasattr(given, "columns") else [given.dtype])
    if len(kinds) > 1:
        raise DataError(
            f"a data frame with columns of the dtypes {', '.join(sorted(map(str, kinds)))} "
            "is not one array",
            hint=(
                "give its columns by name: "
                "Arrays(**{name: frame[name].to_numpy() for name in frame})"
            ),
        )
    for kind in kinds:
        is_extension = not isinstance(kind, np.dtype)
        if is_extension and bool(np.any(given.isna().to_numpy())):
            raise DataError(
                f"{what} of the dtype {kind} has missing values, but tensors have none",
                hint="fill them first, for example with column.fillna(0), or drop their rows",
            )
        target = getattr(kind, "numpy_dtype", None)
        values = given.to_numpy() if target is None else given.to_numpy(dtype=target)
        if values.dtype.kind in "OSUVmM":
            raise DataError(
                f"{what} of the dtype {kind} cannot become a tensor",
                hint=_hint_for_column(str(kind)),
            )
        return np.asarray(values)
    raise DataError(f"{what} is a data frame without columns", hint="give 1 column or more")


def _hint_for_column(kind: str) -> str:
    """Return how to convert a column of pandas of the dtype `kind` to numbers."""
    if kind.startswith(("datetime", "timedelta", "period", "timestamp", "duration")):
        return "give times as numbers: column.astype('int64')"
    if kind == "category":
        return "give the numbers of the categories: column.cat.codes"
    return (
        "give numbers: column.astype('float32') if each value is one, or for words "
        "column.astype('category').cat.codes"
    )


def _hint_for(array: np.ndarray) -> str:
    """Return a hint for an array whose dtype, byte order or strides torch does not support."""
    if array.dtype.kind in "mM":
        return "give times as numbers: x.astype('int64')"
    if array.dtype.kind in "OSUV":
        return "give numbers: x.astype('float32'), without missing values"
    if not array.dtype.isnative:
        return "convert it to the native byte order: x.astype(x.dtype.newbyteorder('='))"
    return (
        "copy it: x.copy()"
        if min(array.strides, default=0) < 0
        else "copy it as numbers: x.astype('float64')"
    )


def open_npy(path: str | Path) -> np.ndarray:
    """Return the array of a .npy file as a read-only memory map.

    Raises DataError for a file that is missing, truncated, not in .npy format, or contains Python
    objects.
    """
    given = Path(path).expanduser()
    try:
        return np.lib.format.open_memmap(given, mode="r")
    except OSError as error:
        raise DataError(
            f"{given} cannot be read: {error.strerror or error}",
            hint="check the name, and your permission to read the file",
        ) from None
    except NO_NPY as error:
        hint = "write numbers with numpy.save, and copy the file again if it is truncated"
        if given.suffix == ".npz":
            hint = f'read its arrays into memory: Arrays(**numpy.load("{given}"))'
        raise DataError(f"{given} cannot be mapped as a .npy file: {error}", hint=hint) from None


@contextmanager
def without_readahead(array: ArrayLike) -> Iterator[None]:
    """Disable read-ahead for a memory map inside the block.

    With read-ahead, the system could read up to 8 MiB for each requested row of a large map.
    """
    held: Any = array
    while isinstance(held, np.ndarray):
        held = held.base
    if not isinstance(held, mmap.mmap):
        yield
        return
    held.madvise(mmap.MADV_RANDOM)
    try:
        yield
    finally:
        held.madvise(mmap.MADV_NORMAL)


class Arrays:
    """Source of the rows of equally long tensors, numpy arrays or memory maps.

    Args:
        *arrays: Arrays by position, whose batches are tuples: `Arrays(images, labels)`.
        **named: Arrays by name, whose batches are dicts: `Arrays(images=..., labels=...)`.

    Raises:
        DataError: If the arrays are empty or have different lengths, or if some are given by
            position and some by name.
    """

    guarantee: Guarantee = "proven"
    thread_safe = True
    _keeps_ids = True  # `read` does not change them

    def __init__(self, *arrays: ArrayLike, **named: ArrayLike) -> None:
        if bool(arrays) == bool(named):
            raise DataError(
                "Arrays takes arrays either by position or by name",
                hint="Arrays(images=x, labels=y)",
            )
        self._names = tuple(named) or None
        given = list(named.values() if named else arrays)
        called = [f"array {name}" for name in named] or [
            f"array {number}" for number in range(len(given))
        ]
        self._tensors = [as_tensor(array, what) for array, what in zip(given, called, strict=True)]
        self._has_unsigned = any(tensor.dtype in SIGNED for tensor in self._tensors)
        lengths = {len(tensor) if tensor.ndim else 0 for tensor in self._tensors}
        if len(lengths) != 1 or lengths == {0}:
            shapes = ", ".join(str(tuple(tensor.shape)) for tensor in self._tensors)
            raise DataError(
                f"arrays of shapes {shapes} hold no sample"
                if lengths == {0}
                else f"arrays of shapes {shapes} do not have one length",
                hint="pass arrays of one length, at least 1",
            )
        self._length = lengths.pop()
        self._has_elements = all(tensor.numel() for tensor in self._tensors)
        with ExitStack() as stack:
            for array in given:
                stack.enter_context(without_readahead(array))
            self.digest = self._digest()

    @classmethod
    def of_files(cls, *paths: str | Path, **named: str | Path) -> Arrays:
        """Create a source of the rows of .npy files, which are memory-mapped.

        Example: `Arrays.of_files(images="x.npy", labels="y.npy")`. Raises what `open_npy` raises.
        """
        return cls(*map(open_npy, paths), **{name: open_npy(path) for name, path in named.items()})

    def _digest(self) -> str:
        digest = hashlib.sha256(repr(self._names).encode())
        rows = np.unique(np.linspace(0, self._length - 1, DIGEST_SAMPLES).astype(np.int64))
        for tensor in self._tensors:
            digest.update(f"{tuple(tensor.shape)}{tensor.dtype}".encode())
            digest.update(
                tensor[torch.from_numpy(rows)].contiguous().view(torch.uint8).numpy().tobytes()
            )
        return digest.hexdigest()

    def __len__(self) -> int:
        return self._length

    def read(self, ids: np.ndarray) -> Batch:
        try:  # torch finds a number outside of the rows without the cost of `check_ids`
            is_plain = type(ids) is np.ndarray and ids.ndim == 1 and self._has_elements
            read = self._select_rows(ids) if is_plain else None
        except (IndexError, RuntimeError, TypeError, ValueError):
            read = None
        if read is None:
            read = self._select_rows(check_ids(ids, self._length))
        return dict(zip(self._names, read, strict=True)) if self._names else tuple(read)

    def _select_rows(self, ids: np.ndarray) -> list[Tensor]:
        rows = torch.from_numpy(ids)
        select = _select if self._has_unsigned else Tensor.index_select
        return [select(tensor, 0, rows) for tensor in self._tensors]

    def describe(self) -> str:
        names = self._names or tuple(str(number) for number in range(len(self._tensors)))
        parts = (
            f"{name} {tuple(tensor.shape)} {tensor.dtype}"
            for name, tensor in zip(names, self._tensors, strict=True)
        )
        return f"{self._length:,} samples: {', '.join(parts)}"


def _select(tensor: Tensor, dim: int, rows: Tensor) -> Tensor:
    signed = SIGNED.get(tensor.dtype)
    return (
        tensor.index_select(dim, rows)
        if signed is None
        else tensor.view(signed).index_select(dim, rows).view(tensor.dtype)
    )
