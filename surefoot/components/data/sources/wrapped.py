"""Sources that wrap datasets and loaders of other libraries."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Mapping
from typing import Any, cast

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import Subset

from surefoot.components.data.in_place import find_arrays
from surefoot.components.data.loader.streams import SeededIds, read_states
from surefoot.components.data.order import check_ids
from surefoot.components.data.sources.arrays import ArrayLike, Arrays, is_pandas
from surefoot.components.data.sources.batch_digest import digest_of_content
from surefoot.components.data.sources.iterated import Iterated
from surefoot.contract.task import Batch, Guarantee, Source
from surefoot.core.errors import DataError, SurefootError


class TorchDataset:
    """Source that wraps a map-style dataset of torch, and collates its items into batches.

    If the dataset has a method `__getitems__`, like those of Hugging Face, it is called once per
    batch. The digest is computed from the `_fingerprint` of the dataset, if it has one (those of
    Hugging Face do), otherwise from its type and length. `content_digest` is a digest of the data
    that the dataset has in memory.

    Args:
        dataset: Object with `__getitem__` and `__len__`.
        collate: Function of a list of items that returns a batch; None for torch's
            `default_collate`.

    Raises:
        DataError: For a dataset that is empty, has no length or cannot be indexed by number.
    """

    guarantee: Guarantee = "proven"
    thread_safe = False  # the user's dataset may not be

    def __init__(self, dataset: Any, collate: Any = None) -> None:
        is_stream = isinstance(dataset, torch.utils.data.IterableDataset)
        if is_stream or not hasattr(dataset, "__getitem__") or not hasattr(dataset, "__len__"):
            raise DataError(
                f"{type(dataset).__name__} has no length or cannot be indexed",
                hint="wrap an iterable with Iterated",
            )
        if is_pandas(dataset):
            raise DataError(
                f"{type(dataset).__name__} of pandas is indexed by label, not by number",
                hint="return it from data(split) of the task as it is, or use Arrays",
            )
        if len(dataset) == 0:
            raise DataError(f"the {type(dataset).__name__} is empty", hint="give 1 sample or more")
        self._dataset, self._own_collate = without_nesting(dataset), collate
        self._has_drawn = False  # from the global random states
        fingerprint = getattr(dataset, "_fingerprint", None)
        known = (
            fingerprint
            if isinstance(fingerprint, str)
            else f"{type(dataset).__qualname__} {len(dataset)}"
        )
        self.digest = hashlib.sha256(known.encode()).hexdigest()
        self.content_digest = digest_of_content(dataset)

    def __len__(self) -> int:
        return len(self._dataset)

    def read(self, ids: np.ndarray) -> Batch:
        numbers = check_ids(ids, len(self)).tolist()
        return self.collate(self._read_items(numbers), numbers)

    def seeded(self, key: int) -> Source:
        """Return the source for one epoch, whose random draws depend on `key` and the sample.

        They do not depend on the other samples of the microbatch. Those of the collate function
        depend on its first sample.
        """
        return cast(Source, SeededReads(self, key))

    def read_seeded(self, ids: np.ndarray, key: int) -> Batch:
        """Read samples with the draws that `seeded` describes. Sets the global random states.

        The states are seeded for each sample once the dataset has drawn from them.
        """
        numbers = check_ids(ids, len(self)).tolist()
        return self.collate(self.samples_of(numbers, key), numbers)

    @property
    def dataset(self) -> Any:
        """The dataset, without a `Subset` inside a `Subset`."""
        return self._dataset

    @property
    def own_collate(self) -> Callable[[list[Any]], Batch] | None:
        """The given collate function, or None."""
        own: Callable[[list[Any]], Batch] | None = self._own_collate
        return own

    @property
    def collates(self) -> bool:
        """True if a collate function was given."""
        return self._own_collate is not None

    def samples_of(self, numbers: list[int], key: int) -> list[Any]:
        """Read samples as `read_seeded` does, and seed the random states to collate them."""
        items, wanted = None, SeededIds(numbers, key)
        if not self._has_drawn:
            before = read_states()
            items = self._read_items(numbers)
            self._has_drawn = read_states() != before
        wanted.seed()
        if self._has_drawn or items is None:
            items = self._read_items(wanted)
            wanted.seed()
        return items

    def _read_items(self, numbers: list[int]) -> list[Any]:
        items = read_items(self._dataset, numbers)
        if len(items) != len(numbers):
            raise DataError(
                (
                    f"{type(self._dataset).__name__}.__getitems__ returned {len(items)} items "
                    f"for {len(numbers)} numbers"
                ),
                hint="return a list with one item for each number, in the same order",
            )
        return items

    def collate(self, items: list[Any], numbers: list[int]) -> Batch:
        """Return the items of the samples `numbers` as a batch.

        Raises DataError, with these numbers, if the collate function fails.
        """
        collate = self._own_collate or torch.utils.data.default_collate
        try:
            return collate(items)
        except (SurefootError, MemoryError, OSError):
            raise
        except Exception as error:
            name = getattr(collate, "__qualname__", type(collate).__qualname__)
            raise DataError(
                f"{name} failed for the samples {_describe_shapes(items, numbers)}: "
                f"{type(error).__name__}: {error}",
                hint="add the method collate(samples) to the task: it returns a batch from a list "
                "of samples, such as a padded one"
                if self._own_collate is None
                else "check the collate function with these samples; --traceback shows its line",
            ) from error

    def describe(self) -> str:
        return f"{len(self):,} samples of {type(self._dataset).__name__}"


class SeededReads:
    """Source of datasets in an epoch: what they draw depends on `key` and the sample.

    `source` reads the samples of all epochs by `read_seeded`.
    """

    def __init__(self, source: Any, key: int) -> None:
        self._source, self._key = source, key

    def read(self, ids: np.ndarray) -> Batch:
        batch: Batch = self._source.read_seeded(ids, self._key)
        return batch

    def __len__(self) -> int:
        return len(self._source)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._source, name)


def read_items(dataset: Any, ids: list[Any]) -> list[Any]:
    """Read the samples of a map-style dataset, with one call if it has `__getitems__`."""
    many = getattr(dataset, "__getitems__", None)
    return list(many(ids)) if many is not None else [dataset[each] for each in ids]


def _describe_shapes(items: list[Any], numbers: list[int]) -> str:
    """Return the first of `numbers`, with the shapes of the tensors and arrays in their items."""
    shapes = (
        " ".join(str(tuple(each.shape)) for each in find_arrays(item)) or type(item).__name__
        for item in items
    )
    shown = [f"{number}: {shape}" for number, shape in zip(numbers[:SHOWN], shapes, strict=False)]
    return ", ".join([*shown, *["..."] * (len(numbers) > SHOWN)])


def without_nesting(dataset: Any) -> Any:
    """Return a `Subset` of a `Subset` as one, which draws for each sample by itself.

    `__getitems__` of an outer one reads all indices before the first sample.
    """
    while type(dataset) is Subset and type(dataset.dataset) is Subset:
        inner = dataset.dataset
        dataset = Subset(inner.dataset, [inner.indices[each] for each in dataset.indices])
    return dataset


SHOWN = 8  # samples in a message
SOURCE_HAS = ("guarantee", "digest", "read", "describe")
INSTEAD = {  # what is often given instead of a source, and a hint
    str: (
        "give a source that reads it: TokenFile(path, length), ImageFolder(path), "
        "Tars([path], image='jpg'), Table(path, x='column')"
    ),
    bytes: "give its numbers: Tokens(numpy.frombuffer(data, 'uint8'), length)",
    type: "give an object of that class, not the class itself",
    type(None): "return a source from data(split) for every split",
}


def as_source(given: Any, collate: Callable[[list[Any]], Batch] | None = None) -> Source:
    """Convert the value that a task's `data` returned to a source.

    A source is returned unchanged. Tensors, arrays, series and data frames of pandas (also in a
    tuple or a dict), a map-style dataset or an iterable of batches are wrapped. Rows of pandas are
    read by position, whatever their index.

    Args:
        given: The value.
        collate: Function from a list of samples of a map-style dataset to a batch; None for torch's
            `default_collate`.

    Raises:
        DataError: For anything else.
    """
    if isinstance(given, Source) and not isinstance(given, type):
        takes = collate is not None and hasattr(type(given), "with_collate")
        return cast(Any, given).with_collate(collate) if takes else given
    if (arrays := _as_arrays(given)) is not None:
        return arrays
    # an IterableDataset may have a length, and no items
    if isinstance(given, torch.utils.data.DataLoader | torch.utils.data.IterableDataset):
        return Iterated(given)
    if not isinstance(given, tuple(INSTEAD)) and not hasattr(given, "__fspath__"):
        if hasattr(given, "__getitem__") and hasattr(given, "__len__"):
            return TorchDataset(given, collate)
        if isinstance(given, Iterable):
            return Iterated(given)
    raise DataError(
        (
            f"data() of the task returned {given!r:.80}, a {type(given).__name__}, which is "
            "not a source of samples"
        ),
        hint=_hint_source(given),
    )


def _as_arrays(given: Any) -> Arrays | None:
    """Return tensors, arrays, series and frames as a source; None for other values."""
    if isinstance(given, torch.utils.data.Subset) and is_pandas(given.dataset):
        given = cast(Any, given.dataset).iloc[list(given.indices)]
    if is_pandas(given) and hasattr(given, "columns"):
        return _source_of_frame(given)
    if _is_array(given):
        return Arrays(given)
    if isinstance(given, tuple) and given and all(map(_is_array, given)):
        return Arrays(*given)
    _check_samples(given)
    if isinstance(given, dict) or (
        isinstance(given, Mapping) and all(map(_is_array, given.values()))
    ):
        return Arrays(**_check_mapping(given))
    return None


def _is_array(given: Any) -> bool:
    return isinstance(given, (Tensor, np.ndarray)) or is_pandas(given)


def _source_of_frame(frame: Any) -> Arrays:
    """Return the source of the rows of a data frame of pandas.

    Its batches are dicts by the names of the columns, or tuples if the columns are only numbered.
    Raises DataError for columns of one name, and for names that are not text.
    """
    names = list(frame.columns)
    columns = [frame.iloc[:, number] for number in range(len(names))]
    if names and names == list(range(len(names))):
        return Arrays(*columns)
    named = dict(zip(names, columns, strict=True))
    if len(named) < len(names):
        twice = next(name for name in names if names.count(name) > 1)
        raise DataError(
            f"data() of the task returned a data frame with several columns {twice!r}",
            hint="give each column its own name, or return frame.to_numpy() for whole rows",
        )
    other = [name for name in names if not isinstance(name, str)]
    if other:
        raise DataError(
            f"data() of the task returned a data frame with the column {other[0]!r}, whose name "
            f"is a {type(other[0]).__name__}",
            hint="name the columns with text: frame.columns = [str(name) for name in frame]",
        )
    return Arrays(**_check_mapping(named))


def _check_samples(given: Any) -> None:
    """Raise DataError for columns of data that would be read as if each were a sample."""
    if isinstance(given, (list, tuple)):
        arrays = [part for part in given[:2] if _is_array(part)]
        is_mixed = isinstance(given, tuple) and 0 < len(arrays) < len(given[:2])
        if is_mixed or any(map(is_pandas, arrays)):
            kinds = ", ".join(type(part).__name__ for part in given[:4])
            raise DataError(
                f"data() of the task returned a {type(given).__name__} of {kinds}, whose parts "
                "would be its samples",
                hint="return a tuple of tensors or arrays, each with one row per sample",
            )
    elif hasattr(given, "schema") and hasattr(given, "to_pydict"):  # of Apache Arrow
        raise DataError(
            f"data() of the task returned a {type(given).__name__} of Arrow, which gives columns, "
            "not rows, by number",
            hint="return its columns: "
            "{name: table[name].to_numpy() for name in table.schema.names}",
        )


def _hint_source(given: Any) -> str:
    """Return what to give in place of a value that is not a source."""
    if hasattr(given, "__fspath__"):
        return INSTEAD[str]
    for kind, hint in INSTEAD.items():
        if isinstance(given, kind):
            return hint
    if callable(getattr(given, "read", None)):
        missing = [name for name in (*SOURCE_HAS, "__len__") if not hasattr(given, name)]
        return f"a source also has {', '.join(missing)}"
    return "give a Source, tensors, a map-style dataset or an iterable of batches"


def _check_mapping(given: Mapping[Any, Any]) -> Mapping[str, ArrayLike]:
    """Return `given` if it is a mapping from names to arrays.

    Raises DataError otherwise, for example for a dict of splits or of lists.
    """
    if not given:
        raise DataError(
            "data() of the task returned an empty dict",
            hint="give its arrays by name: {'images': x, 'labels': y}",
        )
    for name, part in given.items():
        if not isinstance(name, str):
            raise DataError(
                f"data() of the task returned a dict with the key {name!r}",
                hint="return a dict with names (str) as keys, or a list of samples",
            )
        if not _is_array(part):
            hint = (
                f"return the requested split: given[{name!r}]"
                if hasattr(part, "__getitems__")
                else "make each a tensor or an array"
            )
            raise DataError(
                (
                    f"data() of the task returned a {type(given).__name__} whose {name!r} is a "
                    f"{type(part).__name__}"
                ),
                hint=hint,
            )
    return cast(Mapping[str, ArrayLike], given)
