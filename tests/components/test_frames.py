"""Rows of pandas are read by position, or the data are refused when the source is made."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import Subset

from surefoot.components.data.sources.arrays import Arrays
from surefoot.components.data.sources.tokens import Tokens
from surefoot.components.data.sources.wrapped import TorchDataset, as_source
from surefoot.core.errors import DataError

ROWS = np.array([2, 0])


def columns(batch: Any) -> dict[Any, list[Any]]:
    named = batch if isinstance(batch, dict) else dict(enumerate(batch))
    return {name: part.tolist() for name, part in named.items()}


@pytest.fixture(scope="module")
def pandas() -> Any:
    return pytest.importorskip("pandas")


def shuffled(pandas: Any) -> Any:
    """A frame whose index is not its order, as after `sample(frac=1)` or a split."""
    return pandas.DataFrame(
        {"x": np.arange(4, dtype=np.float32), "y": np.arange(4)}, index=[2, 0, 3, 1]
    )


READ: dict[str, tuple[Callable[[Any], Any], dict[Any, list[Any]]]] = {
    "series": (lambda pandas: pandas.Series([1.0, 2.0, 3.0]), {0: [3.0, 1.0]}),
    "shuffled series": (lambda pandas: shuffled(pandas)["x"], {0: [2.0, 0.0]}),
    "series by letter": (lambda pandas: pandas.Series([4, 5, 6], index=list("abc")), {0: [6, 4]}),
    "series from 5": (lambda pandas: pandas.Series([4, 5, 6], index=[5, 6, 7]), {0: [6, 4]}),
    "series of Int64": (lambda pandas: pandas.Series([4, 5, 6], dtype="Int64"), {0: [6, 4]}),
    "frame": (shuffled, {"x": [2.0, 0.0], "y": [2, 0]}),
    "frame and series": (
        lambda pandas: (shuffled(pandas)[["x"]], shuffled(pandas)["y"]),
        {0: [[2.0], [0.0]], 1: [2, 0]},
    ),
    "array and series": (
        lambda pandas: (np.arange(4.0), shuffled(pandas)["y"]),
        {0: [2.0, 0.0], 1: [2, 0]},
    ),
    "frame and series by name": (
        lambda pandas: {"x": shuffled(pandas)[["x"]], "y": shuffled(pandas)["y"]},
        {"x": [[2.0], [0.0]], "y": [2, 0]},
    ),
    "numbered columns": (
        lambda pandas: pandas.DataFrame(np.arange(6.0).reshape(3, 2)),
        {0: [4.0, 0.0], 1: [5.0, 1.0]},
    ),
    "categories of numbers": (
        lambda pandas: pandas.DataFrame({"x": pandas.Categorical([5, 7, 6])}),
        {"x": [6, 5]},
    ),
    "frame of Int64": (
        lambda pandas: Arrays(pandas.DataFrame({"x": [4, 5, 6], "y": [7, 8, 9]}, dtype="Int64")),
        {0: [[6, 9], [4, 7]]},
    ),
    "subset of a frame": (
        lambda pandas: Subset(shuffled(pandas), [3, 1, 2]),
        {"x": [2.0, 3.0], "y": [2, 3]},
    ),
    "subset of a series": (lambda pandas: Subset(shuffled(pandas)["y"], [3, 1, 2]), {0: [2, 3]}),
}


@pytest.mark.parametrize("name", READ)
def test_rows_of_pandas_are_read_by_position(name: str, pandas: Any) -> None:
    make, expected = READ[name]
    source = as_source(make(pandas))
    assert isinstance(source, Arrays)
    assert columns(source.read(ROWS)) == expected


REFUSED: dict[str, tuple[Callable[[Any], Any], str, str]] = {
    "missing Int64": (
        lambda pandas: pandas.DataFrame({"x": pandas.array([1, None], dtype="Int64")}),
        "x of the dtype Int64 has missing values",
        "fillna",
    ),
    "missing boolean": (
        lambda pandas: pandas.Series([True, None], dtype="boolean"),
        "of the dtype boolean has missing values",
        "fillna",
    ),
    "missing category": (
        lambda pandas: pandas.DataFrame({"x": pandas.Categorical([5, None])}),
        "x of the dtype category has missing values",
        "fillna",
    ),
    "category": (
        lambda pandas: pandas.DataFrame({"x": pandas.Categorical(["cat", "dog"])}),
        "x of the dtype category cannot become a tensor",
        "column.cat.codes",
    ),
    "text": (
        lambda pandas: pandas.DataFrame({"x": ["cat", "dog"]}),
        "cannot become a tensor",
        "column.astype('category').cat.codes",
    ),
    "time": (
        lambda pandas: pandas.Series(pandas.to_datetime(["2020-01-01"])),
        "of the dtype datetime64",
        "column.astype('int64')",
    ),
    "time with a zone": (
        lambda pandas: pandas.Series(pandas.to_datetime(["2020-01-01"]).tz_localize("UTC")),
        "of the dtype datetime64",
        "column.astype('int64')",
    ),
    "columns of one name": (
        lambda pandas: pandas.DataFrame(np.ones((3, 2)), columns=["x", "x"]),
        "several columns 'x'",
        "its own name",
    ),
    "columns of pairs": (
        lambda pandas: pandas.DataFrame(
            np.ones((3, 2)), columns=pandas.MultiIndex.from_tuples([("x", 1), ("x", 2)])
        ),
        r"the column \('x', 1\), whose name is a tuple",
        "str",
    ),
    "list of columns": (
        lambda pandas: [shuffled(pandas)["x"], shuffled(pandas)["y"]],
        "a list of Series, Series, whose parts would be its samples",
        "a tuple of tensors or arrays",
    ),
    "dataset of a series": (
        lambda pandas: TorchDataset(shuffled(pandas)["x"]),
        "indexed by label",
        "Arrays",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_columns_of_pandas_that_are_no_tensors_are_refused_with_a_way_out(
    name: str, pandas: Any
) -> None:
    make, message, way = REFUSED[name]
    with pytest.raises(DataError, match=message) as caught:
        as_source(make(pandas))
    assert way in str(caught.value.hint)


def test_what_the_hints_write_makes_a_source(pandas: Any) -> None:
    words = pandas.Series(["dog", "cat", "dog"])
    times = pandas.Series(pandas.to_datetime(["1970-01-02", "1970-01-03", "1970-01-04"]))
    pairs = pandas.DataFrame(
        np.ones((3, 2)), columns=pandas.MultiIndex.from_tuples([("x", 1), ("x", 2)])
    )
    pairs.columns = [str(name) for name in pairs]
    assert columns(as_source(words.astype("category").cat.codes).read(ROWS)) == {0: [1, 1]}
    assert len(as_source(times.astype("int64"))) == len(as_source(pairs)) == 3
    missing = pandas.Series([1, None, 3], dtype="Int64")
    assert columns(as_source(missing.fillna(0)).read(ROWS)) == {0: [3, 1]}


def test_a_stream_of_pandas_is_read_by_position(pandas: Any) -> None:
    ids = pandas.Series(np.arange(9), index=np.arange(9)[::-1])
    batch = Tokens(ids, 4).read(np.array([1]))
    assert batch["inputs"].tolist() == [[4, 5, 6, 7]]


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ((torch.zeros(5, 4), [0, 1, 2, 1, 0]), "a tuple of Tensor, list"),
        ((torch.zeros(3, 4), (torch.zeros(3), torch.ones(3))), "a tuple of Tensor, tuple"),
        (([0, 1], np.zeros(2)), "a tuple of list, ndarray"),
    ],
)
def test_columns_are_not_taken_for_samples(given: Any, message: str) -> None:
    with pytest.raises(DataError, match=message):
        as_source(given)


@pytest.mark.parametrize("kind", ["table", "record_batch"])
def test_columns_of_arrow_are_not_taken_for_samples(kind: str) -> None:
    arrow: Any = pytest.importorskip("pyarrow")
    table = getattr(arrow, kind)({"x": [1, 2], "y": [3, 4]})
    with pytest.raises(DataError, match="of Arrow, which gives columns"):
        as_source(table)
    # as the hint says
    named = {name: table[name].to_numpy() for name in table.schema.names}
    assert columns(as_source(named).read(np.array([1]))) == {"x": [2], "y": [4]}
