"""Sources read what they were given, by number."""

from __future__ import annotations

import math
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from surefoot.components.data.sources.arrays import Arrays
from surefoot.components.data.sources.iterated import Iterated
from surefoot.components.data.sources.synthetic import Synthetic
from surefoot.components.data.sources.tokens import Tokens
from surefoot.components.data.sources.wrapped import TorchDataset, as_source
from surefoot.core.errors import DataError


def test_arrays_read_rows_as_tuples_or_dicts() -> None:
    x, y = torch.arange(12.0).reshape(6, 2), np.arange(6)
    rows = np.array([4, 0])
    assert torch.equal(Arrays(x, y).read(rows)[0], x[[4, 0]])
    assert Arrays(images=x, labels=y).read(rows)["labels"].tolist() == [4, 0]


def test_a_memory_map_is_read_by_position_without_being_copied(tmp_path: Path) -> None:
    path = tmp_path / "big.bin"
    np.arange(1_000_000, dtype=np.int32).reshape(-1, 10).tofile(path)
    source = Arrays(np.memmap(path, dtype=np.int32, mode="r", shape=(100_000, 10)))
    assert source.read(np.array([99_999]))[0][0, -1] == 999_999


@pytest.mark.parametrize("arrays", [(torch.zeros(3), torch.zeros(4)), (torch.zeros(0),), ()])
def test_arrays_that_are_no_set_are_refused(arrays: tuple[torch.Tensor, ...]) -> None:
    with pytest.raises(DataError, match=r"Arrays|do not have one length|hold no sample"):
        Arrays(*arrays)


@pytest.mark.parametrize(
    "ids",
    [[2, 0], (2, 0), torch.tensor([2, 0]), np.array([2, 0], np.uint8), range(2, -1, -2)],
    ids=lambda ids: type(ids).__name__,
)
def test_samples_are_read_by_any_sequence_of_integers(ids: Any) -> None:
    assert Arrays(torch.arange(3)).read(ids)[0].tolist() == [2, 0]
    assert len(Arrays(torch.arange(3)).read(ids[:0])[0]) == 0


@pytest.mark.parametrize("ids", [1, [0.5], [True, False, True], [[0, 1]], ["0"]], ids=str)
def test_what_does_not_number_samples_is_refused(ids: Any) -> None:
    with pytest.raises(DataError, match="of dtype"):
        Arrays(torch.arange(3)).read(ids)


def test_a_dict_of_arrays_is_told_how_it_is_given() -> None:
    arrays: Any = {"x": torch.arange(3)}
    with pytest.raises(DataError) as caught:
        Arrays(arrays)
    assert caught.value.hint == "give its arrays by name: Arrays(**arrays)"
    assert Arrays(**arrays).read(np.array([1]))["x"].tolist() == [1]


def test_the_digest_tells_two_sets_apart() -> None:
    one, other = torch.arange(100), torch.arange(100)
    other[50] = -1
    assert Arrays(one).digest == Arrays(one.clone()).digest != Arrays(other).digest


def test_every_token_but_the_first_is_a_target_once() -> None:
    source = Tokens(torch.arange(100, 123), length=5)
    batch = source.read(np.arange(len(source)))
    targets = batch["targets"].flatten()
    assert targets[targets != -100].tolist() == list(range(101, 123))
    assert torch.equal(
        (batch["targets"] - batch["inputs"])[:-1], torch.ones(4, 5, dtype=torch.int64)
    )


@pytest.mark.parametrize(
    ("ids", "length"), [(torch.arange(1), 5), (torch.arange(10), 0), (torch.zeros(2, 2), 3)]
)
def test_a_stream_without_anything_to_predict_is_refused(ids: torch.Tensor, length: int) -> None:
    with pytest.raises(DataError):
        Tokens(ids, length)


def test_an_iterable_is_replayed_to_go_back_and_refuses_to_end_early() -> None:
    source = Iterated([torch.full((2,), float(k)) for k in range(4)])
    assert [float(source.read(np.array([k]))[0]) for k in (2, 0, 3)] == [2.0, 0.0, 3.0]
    assert source.guarantee == "replayed"
    with pytest.raises(DataError, match="ended after 4"):
        Iterated([torch.zeros(1)] * 4, num_batches=6).read(np.array([5]))
    with pytest.raises(DataError, match="read only once"):
        Iterated(iter([torch.zeros(1)] * 4), num_batches=4)


def test_whatever_a_task_gives_becomes_a_source() -> None:
    class Squares(torch.utils.data.Dataset):  # type: ignore[type-arg]
        def __len__(self) -> int:
            return 5

        def __getitem__(self, index: int) -> int:
            return index * index

    assert isinstance(as_source(Squares()), TorchDataset)
    assert as_source(Squares()).read(np.array([3, 2])).tolist() == [9, 4]
    assert isinstance(as_source((torch.zeros(3), np.zeros(3))), Arrays)
    assert isinstance(as_source({"x": torch.zeros(3)}), Arrays)
    assert isinstance(as_source(torch.utils.data.DataLoader(Squares(), batch_size=2)), Iterated)
    with pytest.raises(DataError, match="not a source of samples"):
        as_source(3)


def test_a_synthetic_source_waits_as_long_as_it_was_told() -> None:
    source = Synthetic(100, shape=(1, 4, 4), delay_s=0.002)
    started_s = time.monotonic()
    source.read(np.arange(50))
    assert time.monotonic() - started_s >= 0.1
    same = Synthetic(100, shape=(1, 4, 4)).read(np.array([7]))
    assert torch.equal(same["images"], source.read(np.array([7]))["images"])
    assert same["labels"].tolist() == [7]


@pytest.mark.parametrize(
    "kind",
    [
        "bool",
        "uint8",
        "uint16",
        "uint32",
        "uint64",
        "int8",
        "int64",
        "float16",
        "float32",
        "float64",
        "complex64",
    ],
)
@pytest.mark.parametrize("shape", [(8,), (8, 3), (8, 2, 2)])
def test_arrays_of_every_dtype_are_read_as_they_are(kind: str, shape: tuple[int, ...]) -> None:
    array = np.arange(math.prod(shape)).reshape(shape).astype(kind)
    (read,) = Arrays(array).read(np.array([3, 1, 3]))
    assert read.dtype == torch.from_numpy(array).dtype
    assert np.array_equal(read.numpy(), array[[3, 1, 3]])


def test_the_largest_numbers_of_an_unsigned_array_stay_what_they_are() -> None:
    largest = (
        np.array([0, 2**16 - 1], np.uint16),
        np.array([0, 2**32 - 1], np.uint32),
        np.array([0, 2**64 - 1], np.uint64),
    )
    read = Arrays(*largest).read(np.array([1]))
    assert [int(each.numpy()[0]) for each in read] == [2**16 - 1, 2**32 - 1, 2**64 - 1]


def test_a_frame_is_read_by_its_columns() -> None:
    pandas = pytest.importorskip("pandas")
    frame = pandas.DataFrame({"x": np.arange(4, dtype=np.float32), "y": np.arange(4)})
    batch = as_source(frame).read(np.array([2, 0]))
    assert batch["x"].tolist() == [2.0, 0.0]
    assert batch["x"].dtype == torch.float32
    assert batch["y"].dtype == torch.int64
    with pytest.raises(
        DataError, match="a data frame with columns of the dtypes float32, int64 is not one array"
    ) as caught:
        Arrays(x=frame)
    # as the hint says
    assert Arrays(**{name: frame[name].to_numpy() for name in frame}).read(np.array([1]))[
        "y"
    ].tolist() == [1]
    assert "to_numpy()" in str(caught.value.hint)
    with pytest.raises(DataError, match="cannot become a tensor"):
        as_source(pandas.DataFrame({"text": ["a", "b"]}))


ROWS = {
    "1-D": torch.arange(5),
    "2-D": torch.arange(10.0).reshape(5, 2),
    "3-D": torch.arange(30.0).reshape(5, 3, 2),
    "transposed": torch.arange(10.0).reshape(2, 5).t(),
    "every second row": torch.arange(20.0).reshape(10, 2)[::2],
    "expanded": torch.ones(1, 3).expand(5, 3),
    "uint16": np.arange(5, dtype=np.uint16),
    "bool": torch.ones(5, 2, dtype=torch.bool),
    "float8": torch.ones(5, 2).to(torch.float8_e4m3fn),
    "without elements": torch.ones(5, 0),
}


@pytest.mark.parametrize("rows", ROWS.values(), ids=ROWS)
def test_a_number_outside_of_the_rows_is_named_for_every_layout(rows: Any) -> None:
    source = Arrays(rows)
    for wrong in (5, -1, 2**62, -(2**63)):
        with pytest.raises(DataError, match=f"sample {wrong:,} was requested"):
            source.read(np.array([0, wrong]))
    assert len(source.read(np.array([4, 0, 4]))[0]) == 3
