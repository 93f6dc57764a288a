"""Tests of every type and nesting that Arrow has, and of every array.

Right in its own dtype, or refused with the name of the column.
"""

from __future__ import annotations

import datetime
import decimal
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from surefoot.components.data.sources.arrays import Arrays
from surefoot.components.data.sources.tables import Table
from surefoot.core.errors import DataError

pa = pytest.importorskip("pyarrow")
pq = pytest.importorskip("pyarrow.parquet")

BOTH = np.array([0, 1])


def write(path: Path, columns: dict[str, Any]) -> Path:
    """An Arrow file: it holds types that Parquet has not."""
    table = pa.table(columns)
    with pa.OSFile(str(path), "wb") as sink, pa.ipc.new_file(sink, table.schema) as out:
        out.write_table(table)
    return path


def tensor_shaped() -> Any:
    kind = pa.fixed_shape_tensor(pa.float32(), [2, 3], permutation=[1, 0])
    stored = pa.array([range(6), range(6, 12)], pa.list_(pa.float32(), 6))
    return pa.ExtensionArray.from_storage(kind, stored)


def in_runs() -> Any:
    return pa.RunEndEncodedArray.from_arrays([1, 2], pa.array([0.5, 1.5], pa.float32()))


def either() -> Any:
    return pa.UnionArray.from_sparse(
        pa.array([0, 0], pa.int8()), [pa.array([0.5, 1.5], pa.float32()), pa.array([1, 2])]
    )


NESTED = [[[1, 2], [3, 4]], [[5, 6], [7, 8]]]
GRID = {
    np.dtype(name): torch.tensor(NESTED).numpy().astype(name)
    for name in ("float32", "float16", "int8", "uint16", "bool")
}
NUMBERS: dict[str, tuple[Any, Any]] = {
    **{
        f"lists of lists of {kind}": (
            lambda kind=kind, values=values: pa.array(
                values.tolist(), pa.list_(pa.list_(pa.from_numpy_dtype(kind)))
            ),
            values,
        )
        for kind, values in GRID.items()
    },
    "large lists of large lists": (
        lambda: pa.array(NESTED, pa.large_list(pa.large_list(pa.float32()))),
        np.array(NESTED, np.float32),
    ),
    "fixed lists of lists": (
        lambda: pa.array(NESTED, pa.list_(pa.list_(pa.int16()), 2)),
        np.array(NESTED, np.int16),
    ),
    "lists of fixed lists": (
        lambda: pa.array(NESTED, pa.list_(pa.list_(pa.float64(), 2))),
        np.array(NESTED, np.float64),
    ),
    "views of lists": (
        lambda: pa.array([[1, 2], [3, 4]], pa.list_view(pa.float32())),
        np.array([[1, 2], [3, 4]], np.float32),
    ),
    "lists of a dictionary": (
        lambda: pa.ListArray.from_arrays(
            [0, 2, 4], pa.array([1, 2, 2, 1], pa.float32()).dictionary_encode()
        ),
        np.array([[1, 2], [2, 1]], np.float32),
    ),
    "empty lists of lists": (
        lambda: pa.array([[], []], pa.list_(pa.list_(pa.float32()))),
        np.zeros((2, 0, 0), np.float32),
    ),
    "a dictionary of float32": (
        lambda: pa.array([0.5, 1.5], pa.float32()).dictionary_encode(),
        np.array([0.5, 1.5], np.float32),
    ),
    "runs of float32": (in_runs, np.array([0.5, 1.5], np.float32)),
    "a union": (either, np.array([0.5, 1.5], np.float32)),
    "a tensor of a fixed shape": (
        tensor_shaped,
        np.arange(12, dtype=np.float32).reshape(2, 2, 3).transpose(0, 2, 1),
    ),
    "float16": (
        lambda: pa.array(np.array([0.5, 1.5], np.float16)),
        np.array([0.5, 1.5], np.float16),
    ),
    "truth values": (lambda: pa.array([True, False]), np.array([True, False])),
    "whole numbers of 8 bits": (lambda: pa.array([3, 250], pa.uint8()), np.array([3, 250])),
    "a dictionary of whole numbers": (
        lambda: pa.array([7, 9]).dictionary_encode(),
        np.array([7, 9]),
    ),
}
DAY = datetime.date(2026, 1, 2)
NOON = datetime.datetime(2026, 1, 2, 12)  # noqa: DTZ001 - as a column without a zone gives it
VALUES: dict[str, tuple[Any, list[Any]]] = {
    "views of strings": (lambda: pa.array(["a", "b"], pa.string_view()), ["a", "b"]),
    "large strings": (lambda: pa.array(["a", "b"], pa.large_string()), ["a", "b"]),
    "a dictionary of strings": (lambda: pa.array(["a", "b"]).dictionary_encode(), ["a", "b"]),
    "dates": (lambda: pa.array([DAY, DAY]), [DAY, DAY]),
    "times": (lambda: pa.array([NOON, NOON], pa.timestamp("us")), [NOON, NOON]),
    "decimals": (lambda: pa.array([decimal.Decimal("1.25")] * 2), [decimal.Decimal("1.25")] * 2),
    "structs": (
        lambda: pa.array([{"a": 1, "b": None}, {"a": 2, "b": "x"}]),
        [{"a": 1, "b": None}, {"a": 2, "b": "x"}],
    ),
    "maps": (
        lambda: pa.array([[(1, 2)], [(3, 4)]], pa.map_(pa.int32(), pa.int32())),
        [[(1, 2)], [(3, 4)]],
    ),
    "lists of strings": (lambda: pa.array([["a"], ["b", "c"]]), [["a"], ["b", "c"]]),
    "lists of structs": (lambda: pa.array([[{"a": 1}], []]), [[{"a": 1}], []]),
}
MISSING: dict[str, Any] = {
    "a number": lambda: pa.array([1, None]),
    "a truth value": lambda: pa.array([True, None]),
    "a value of a dictionary": lambda: pa.array(["a", None]).dictionary_encode(),
    "a list": lambda: pa.array([[1.0], None]),
    "a number of a list": lambda: pa.array([[1], [None]]),
    "a number of a list of lists": lambda: pa.array(
        [[[1.0, 2.0]], [[1.0, None]]], pa.list_(pa.list_(pa.float32()))
    ),
    "a list of a list": lambda: pa.array([[[1.0]], [None]], pa.list_(pa.list_(pa.float32()))),
    "a number of a fixed list of lists": lambda: pa.array(
        [[[1, 2]], [[1, None]]], pa.list_(pa.list_(pa.int8(), 2), 1)
    ),
    "a text of a list of lists": lambda: pa.array([[["a"]], [["a", None]]]),
    "a number of ragged lists": lambda: pa.array([[[1]], [[1, 2], [None]]]),
    "a value in runs": lambda: pa.RunEndEncodedArray.from_arrays(
        [1, 2], pa.array([0.5, None], pa.float32())
    ),
}


@pytest.fixture(scope="module")
def columns(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One file with a column of each of these types."""
    made = {name: make() for kinds in (NUMBERS, VALUES) for name, (make, _) in kinds.items()}
    return write(
        tmp_path_factory.mktemp("columns") / "all.arrow",
        made | {name: make() for name, make in MISSING.items()},
    )


@pytest.mark.parametrize("name", NUMBERS)
def test_numbers_of_a_column_are_one_tensor_of_their_own_dtype(name: str, columns: Path) -> None:
    found, wanted = Table(columns, x=name).read(BOTH)["x"], torch.from_numpy(NUMBERS[name][1])
    assert isinstance(found, torch.Tensor)
    assert found.dtype == wanted.dtype
    assert torch.equal(found, wanted)


@pytest.mark.parametrize("name", VALUES)
def test_other_values_of_a_column_are_those_of_python(name: str, columns: Path) -> None:
    assert Table(columns, x=name).read(BOTH)["x"] == VALUES[name][1]


@pytest.mark.parametrize("name", MISSING)
def test_a_value_that_is_missing_is_named_however_deep_it_is(name: str, columns: Path) -> None:
    source = Table(columns, x=name)
    assert source.read(np.array([0]))["x"] is not None
    with pytest.raises(DataError, match=f"row 1 has a null in {name}"):
        source.read(BOTH)


def test_nested_lists_of_parquet_have_their_dtype_and_may_be_written_by_a_transform(
    tmp_path: Path,
) -> None:
    table = pa.table({"x": pa.array(NESTED, pa.list_(pa.list_(pa.float32())))})
    pq.write_table(table, tmp_path / "a.parquet")

    def double(row: dict[str, Any]) -> dict[str, Any]:
        row["x"] *= 2
        return row

    found = Table(tmp_path / "a.parquet", transform=double, x="x").read(BOTH)["x"]
    assert torch.equal(found, 2 * torch.tensor(NESTED, dtype=torch.float32))


def test_columns_without_values_or_of_one_name_are_refused_when_the_source_is_made(
    tmp_path: Path,
) -> None:
    path = write(tmp_path / "a.arrow", {"nothing": pa.nulls(2), "x": [1, 2]})
    with pytest.raises(
        DataError, match=r"column nothing of .*a\.arrow has the type null: it contains no values"
    ):
        Table(path, y="nothing")
    twice = pa.table([pa.array([1]), pa.array([2])], names=["x", "x"])
    pq.write_table(twice, tmp_path / "b.parquet")
    with pytest.raises(DataError, match=r"b\.parquet has 2 columns named x"):
        Table(tmp_path / "b.parquet", y="x")


UNREADABLE: dict[str, tuple[Any, str]] = {
    "nanoseconds": (
        lambda: pa.array([5], pa.int64()).cast(pa.timestamp("ns")),
        "is of the type timestamp",
    ),
    "a year that Python has not": (
        lambda: pa.array([1 << 62], pa.int64()).cast(pa.timestamp("s")),
        "is of the type timestamp",
    ),
    "a zone that nobody knows": (
        lambda: pa.array([5], pa.int64()).cast(pa.timestamp("us", "Mars/X")),
        "is of the type timestamp",
    ),
    "not fit into int64": (
        lambda: pa.array([(1 << 64) - 1], pa.uint64()),
        "is 18446744073709551615, which does not fit into int64",
    ),
    "no text": (
        lambda: pa.array([b"\xff"]).view(pa.string()),
        "is of the type string, which has no Python value",
    ),
    "no image": (lambda: pa.array([b"abc"]), "is not a jpg, png or webp"),
}


@pytest.mark.parametrize("name", UNREADABLE)
def test_a_value_that_a_batch_cannot_hold_is_refused_with_its_row_and_column(
    name: str, tmp_path: Path
) -> None:
    make, says = UNREADABLE[name]
    path = write(tmp_path / "a.arrow", {"the column": make()})
    with pytest.raises(DataError, match=r"a\.arrow: the column of row 0 " + says):
        Table(path, x="the column").read(np.array([0]))


WRONG: dict[str, tuple[Any, str]] = {
    "texts": (lambda: np.array(["a", "b"]), "without missing values"),
    "objects": (lambda: np.array([1, None], dtype=object), "without missing values"),
    "times": (lambda: np.array(["2026-01-02"], dtype="datetime64[D]"), "x.astype('int64')"),
    "a different order of bytes": (lambda: np.arange(3, dtype=">i4"), "newbyteorder('=')"),
    "rows that run backwards": (lambda: np.arange(3)[::-1], "x.copy()"),
    "masked values": (lambda: np.ma.masked_equal([1, 2, 3], 2), "x.filled(0)"),
    "a sparse tensor": (lambda: torch.eye(3).to_sparse(), "x.to_dense()"),
    "a nested tensor": (
        lambda: torch.nested.nested_tensor([torch.ones(2), torch.ones(3)]),
        "to_padded_tensor",
    ),
    "a tensor without numbers": (lambda: torch.empty(3, device="meta"), "on the CPU"),
}


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
@pytest.mark.parametrize("name", WRONG)
def test_arrays_that_no_batch_can_be_read_from_are_refused_with_their_name_and_what_mends_them(
    name: str,
) -> None:
    make, hint = WRONG[name]
    with pytest.raises(DataError, match="array ages ") as refused:
        Arrays(ages=make())
    assert hint in str(refused.value.hint)


def test_the_hints_about_arrays_lead_out() -> None:
    times, swapped = np.array(["2026-01-02"], dtype="datetime64[D]"), np.arange(3, dtype=">i4")
    masked = np.ma.masked_equal([1, 2, 3], 2)
    mended = [
        times.astype("int64"),
        swapped.astype(swapped.dtype.newbyteorder("=")),
        np.arange(3)[::-1].copy(),
        masked.filled(0),
    ]
    assert [len(Arrays(ages=each)) for each in mended] == [1, 3, 3, 3]
