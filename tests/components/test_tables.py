"""Tests of Parquet and Arrow files.

Any row by number, few groups in memory, and what is missing or of no known kind has a name.
"""

from __future__ import annotations

import pickle
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from surefoot.components.data.sources import tables
from surefoot.components.data.sources.tables import Table
from surefoot.contract.task import Source
from surefoot.core.errors import DataError, MissingExtra
from tests.components.test_tars import image

pa = pytest.importorskip("pyarrow")
pq = pytest.importorskip("pyarrow.parquet")
feather = pytest.importorskip("pyarrow.feather")


def rows(start: int, count: int) -> Any:
    numbers = range(start, start + count)
    return pa.table(
        {
            "label": pa.array(numbers, pa.int32()),
            "score": pa.array([number / 2 for number in numbers], pa.float32()),
            "exact": pa.array([number / 3 for number in numbers], pa.float64()),
            "is_odd": [number % 2 == 1 for number in numbers],
            "text": [f"text {number}" for number in numbers],
            "vector": pa.array(
                [[number, number + 1] for number in numbers], pa.list_(pa.float32())
            ),
            "fixed": pa.array(
                [[number, number + 1] for number in numbers], pa.list_(pa.int16(), 2)
            ),
            "ragged": [list(range(number % 3 + 1)) for number in numbers],
            "grid": [[[number, 0], [0, 1]] for number in numbers],
            "png": [image(color=number) for number in numbers],
            "picture": [
                {"bytes": image("JPEG", color=number), "path": "x.jpg"} for number in numbers
            ],
        }
    )


COLUMNS = {
    name: name
    for name in (
        "label",
        "score",
        "exact",
        "is_odd",
        "text",
        "vector",
        "fixed",
        "grid",
        "png",
        "picture",
    )
}


def write_parquet(path: Path, start: int) -> None:
    pq.write_table(rows(start, 25), path, row_group_size=10)


def write_feather(path: Path, start: int) -> None:
    feather.write_feather(rows(start, 25), str(path), chunksize=10)


def write_ipc(path: Path, start: int) -> None:
    with pa.OSFile(str(path), "wb") as sink, pa.ipc.new_file(sink, rows(0, 1).schema) as out:
        out.write_table(rows(start, 25), max_chunksize=10)


def write_stream(path: Path, start: int) -> None:
    with pa.OSFile(str(path), "wb") as sink, pa.ipc.new_stream(sink, rows(0, 1).schema) as out:
        out.write_table(rows(start, 25), max_chunksize=10)


WRITERS = {
    "parquet": write_parquet,
    "feather": write_feather,
    "ipc": write_ipc,
    "stream": write_stream,
}


@pytest.mark.parametrize("kind", WRITERS)
def test_every_kind_of_column_comes_back_in_the_order_asked_for(kind: str, tmp_path: Path) -> None:
    paths = [tmp_path / f"{number}.{kind}" for number in range(2)]
    for number, path in enumerate(paths):
        WRITERS[kind](path, 25 * number)
    source = Table(paths, **COLUMNS)
    assert isinstance(source, Source)
    ids = np.array([49, 0, 25, 24, 10, 10])
    batch = source.read(ids)
    numbers = torch.from_numpy(ids)
    assert len(source) == 50
    assert torch.equal(batch["label"], numbers)
    assert torch.equal(batch["score"], numbers.float() / 2)
    assert torch.equal(
        batch["exact"], torch.tensor([number / 3 for number in ids.tolist()], dtype=torch.float64)
    )
    assert torch.equal(batch["is_odd"], numbers % 2 == 1)
    assert batch["text"] == [f"text {number}" for number in ids]
    assert torch.equal(batch["vector"], torch.stack([numbers, numbers + 1], 1).float())
    assert torch.equal(batch["fixed"], torch.stack([numbers, numbers + 1], 1).short())
    assert batch["grid"].shape == (6, 2, 2)
    assert batch["png"][:, 0, 0, 0].tolist() == ids.tolist()
    assert batch["picture"].shape == (6, 4, 5, 3)
    assert "50 rows in 6 groups of 2 files" in source.describe()
    again = pickle.loads(pickle.dumps(source))
    assert again.digest == source.digest
    assert torch.equal(again.read(ids)["label"], numbers)


def test_few_groups_are_in_memory_and_one_that_is_there_is_not_read_again(tmp_path: Path) -> None:
    write_parquet(tmp_path / "a.parquet", 0)
    source = Table(tmp_path / "a.parquet", label="label", cache_bytes=1)
    reads = []
    file = source._files[0]
    counted = tables.OpenTable(
        file.path, file.types, file.rows, lambda group: (reads.append(group), file.read(group))[1]
    )
    source._groups = [(counted, group) for _, group in source._groups]
    for ids in ([0, 9], [3], [10, 0], [12], [24]):
        source.read(np.array(ids))
        assert len(source._cache) == 1
    assert reads == [0, 1, 2]
    source._cache_bytes = 1 << 20
    for number in (0, 10, 20, 1, 11, 21):
        source.read(np.array([number]))
    assert reads == [0, 1, 2, 0, 1]


def test_several_threads_read_the_same(tmp_path: Path) -> None:
    write_parquet(tmp_path / "a.parquet", 0)
    source = Table(tmp_path / "a.parquet", label="label", text="text", cache_bytes=1)
    batches = [np.random.default_rng(number).integers(0, 25, size=8) for number in range(64)]
    with ThreadPoolExecutor(4) as pool:
        read = list(pool.map(source.read, batches))
    assert [batch["label"].tolist() for batch in read] == [ids.tolist() for ids in batches]


def test_a_transform_is_given_each_row(tmp_path: Path) -> None:
    write_parquet(tmp_path / "a.parquet", 0)
    source = Table(
        tmp_path / "a.parquet", transform=lambda row: {"length": len(row["text"])}, text="text"
    )
    assert source.read(np.array([0, 10]))["length"].tolist() == [6, 7]


def test_the_digest_tells_other_contents_columns_and_orders_apart(tmp_path: Path) -> None:
    write_parquet(tmp_path / "a.parquet", 0)
    write_parquet(tmp_path / "b.parquet", 1)
    a, b = tmp_path / "a.parquet", tmp_path / "b.parquet"
    made = [
        Table(a, x="label"),
        Table(b, x="label"),
        Table([a, b], x="label"),
        Table([b, a], x="label"),
        Table(a, x="score"),
    ]
    assert len({source.digest for source in made}) == 5
    assert Table(a, x="label").digest == made[0].digest


def test_what_is_no_table_is_refused_in_words(tmp_path: Path) -> None:
    write_parquet(tmp_path / "a.parquet", 0)
    whole = (tmp_path / "a.parquet").read_bytes()
    unread = r"b\.parquet cannot be read as Parquet or Arrow"
    for content, words in (
        (b"", r"b\.parquet is empty"),
        (b"x", "a text file, not Parquet or Arrow"),
        (b"PAR1", unread),
        (whole[:-100], unread),
        (b"ARROW1xx" + whole, unread),
        (b"\xff" * 100, unread),
        (b"id,label\n1,2\n", "a text file, not Parquet or Arrow"),
    ):
        (tmp_path / "b.parquet").write_bytes(content)
        with pytest.raises(DataError, match=words):
            Table(tmp_path / "b.parquet", x="label")
    with pytest.raises(DataError, match="No such file"):
        Table(tmp_path / "missing.parquet", x="label")
    with pytest.raises(DataError, match="has no column labels\nhint: it has label, score"):
        Table(tmp_path / "a.parquet", x="labels")
    with pytest.raises(DataError, match="needs a file and a column"):
        Table(tmp_path / "a.parquet")
    pq.write_table(pa.table({"label": ["a"]}), tmp_path / "c.parquet")
    with pytest.raises(DataError, match=r"c\.parquet has label string, .*has label int32"):
        Table([tmp_path / "a.parquet", tmp_path / "c.parquet"], x="label")
    pq.write_table(pa.table({"label": pa.array([], pa.int32())}), tmp_path / "d.parquet")
    with pytest.raises(DataError, match="contain no rows"):
        Table(tmp_path / "d.parquet", x="label")
    with pytest.raises(DataError, match="sample -1 was requested"):
        Table(tmp_path / "a.parquet", x="label").read(np.array([-1]))


def test_a_value_that_is_missing_or_no_image_is_named_with_its_row(tmp_path: Path) -> None:
    path = tmp_path / "a.parquet"
    pq.write_table(
        pa.table(
            {
                "n": [1, None],
                "b": [b"abc", image()[:45]],
                "s": [{"bytes": None}, {"bytes": image()}],
            }
        ),
        path,
    )
    for columns, number, says in (
        ({"n": "n"}, 1, r"a\.parquet: row 1 has a null in n"),
        ({"b": "b"}, 0, "b of row 0 is not a jpg, png or webp"),
        ({"b": "b"}, 1, r"row 1\.b\.png is a damaged PNG"),
        ({"s": "s"}, 0, "row 0 has a null in s"),
    ):
        with pytest.raises(DataError, match=says):
            Table(path, **columns).read(np.array([number]))


def test_damage_inside_a_group_ends_with_the_file_s_name(tmp_path: Path) -> None:
    path = tmp_path / "a.parquet"
    pq.write_table(rows(0, 25), path, row_group_size=10, write_page_checksum=True)
    whole = bytearray(path.read_bytes())
    whole[4:2000] = bytes(1996)
    path.write_bytes(whole)
    with pytest.raises(DataError, match=r"a\.parquet cannot be read"):
        Table(path, **COLUMNS).read(np.array([0]))


def test_lists_of_several_lengths_are_refused_and_those_of_one_length_are_a_tensor(
    tmp_path: Path,
) -> None:
    write_parquet(tmp_path / "a.parquet", 0)
    source = Table(tmp_path / "a.parquet", ragged="ragged")
    assert source.read(np.array([1, 4]))["ragged"].tolist() == [[0, 1], [0, 1]]
    with pytest.raises(
        DataError, match=r"ragged is int64 \(2,\) in row 1 and int64 \(3,\) in row 2"
    ):
        source.read(np.array([1, 2]))
    pq.write_table(pa.table({"v": [[1, None]]}), tmp_path / "b.parquet")
    with pytest.raises(DataError, match="row 0 has a null in v"):
        Table(tmp_path / "b.parquet", v="v").read(np.array([0]))


def test_without_pyarrow_the_extra_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_parquet(tmp_path / "a.parquet", 0)
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    with pytest.raises(MissingExtra, match=r"surefoot\[arrow\]"):
        Table(tmp_path / "a.parquet", x="label")
