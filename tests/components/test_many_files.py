"""Several sources or files as one: `Concat`, and lists and patterns of files."""

from __future__ import annotations

import pickle
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from PIL import Image
from torch.utils.data import DataLoader, TensorDataset

from surefoot import Loss, Run, RunSpec
from surefoot.core.errors import DataError
from surefoot.core.place import find_files
from surefoot.data import Arrays, Concat, ImageFolder, Iterated, Table, TokenFile, Tokens
from surefoot.train.run import drive

A, B, C = (torch.randn(count, 3) for count in (5, 1, 7))
EVERY = torch.cat([A, B, C])


def test_samples_are_numbered_through_all_sources() -> None:
    source = Concat([Arrays(x=A), {"x": B}, Arrays(x=C)])
    ids = np.array([12, 0, 5, 4, 6, 12, 1])
    assert len(source) == 13
    assert torch.equal(source.read(ids)["x"], EVERY[torch.from_numpy(ids)])
    assert torch.equal(source.read(np.array([5]))["x"], B)
    assert source.read(np.array([], dtype=np.int64))["x"].shape == (0, 3)
    with pytest.raises(DataError, match="sample 13 was requested"):
        source.read(np.array([13]))
    assert Concat([Arrays(x=A), Arrays(x=B)]).digest != Concat([Arrays(x=B), Arrays(x=A)]).digest
    assert source.thread_safe
    assert Concat([source, Arrays(x=B)]).read(np.array([13]))["x"].tolist() == B.tolist()


class Fields:
    """A source of batches of several kinds of fields."""

    guarantee, digest = "proven", "fields"

    def __init__(self, start: int, count: int) -> None:
        self.start, self.count = start, count

    def __len__(self) -> int:
        return self.count

    def read(self, ids: np.ndarray) -> Any:
        numbers = torch.from_numpy(ids) + self.start
        texts = [f"text {each}" for each in numbers.tolist()]
        return {"pair": (numbers, numbers[:, None].double()), "texts": texts}

    def describe(self) -> str:
        return "fields"


class Pair(NamedTuple):
    x: torch.Tensor
    y: torch.Tensor


@pytest.mark.parametrize("kind", [list, tuple, Pair._make])
def test_fields_in_a_list_or_a_named_tuple_are_fields(kind: Any) -> None:
    class Two(Fields):
        def read(self, ids: np.ndarray) -> Any:
            numbers = torch.from_numpy(ids) + self.start
            return kind((numbers, numbers[:, None]))

    source = Concat([Two(0, 5), Two(5, 5)])
    batch = source.read(np.array([1, 8, 0, 9]))
    assert type(batch) is type(source.read(np.array([1])))
    assert batch[0].tolist() == [1, 8, 0, 9]
    assert batch[1].tolist() == [[1], [8], [0], [9]]


@pytest.mark.parametrize("count", [1, 2, 3])
def test_a_list_of_samples_stays_one(count: int) -> None:
    class Images(Fields):
        def read(self, ids: np.ndarray) -> Any:
            return [torch.full((3, 2), float(each + self.start)) for each in ids]

    batch = Concat([Images(0, 5), Images(5, 5)]).read(
        np.concatenate([np.arange(count), np.arange(5, 5 + count)])
    )
    assert [each.shape for each in batch] == [(3, 2)] * (2 * count)
    assert [int(each[0, 0]) for each in batch] == [*range(count), *range(5, 5 + count)]


def test_a_source_whose_first_sample_is_broken_is_joined() -> None:
    class Broken(Fields):
        def read(self, ids: np.ndarray) -> Any:
            if 0 in ids:
                raise OSError("broken")
            return super().read(ids)

    joined = Concat([Fields(0, 3), Broken(3, 4)])
    assert joined.read(np.array([0, 5]))["texts"] == ["text 0", "text 5"]
    with pytest.raises(OSError, match="broken"):
        joined.read(np.array([0, 3]))


def test_tuples_dicts_and_lists_keep_their_order() -> None:
    batch = Concat([Fields(0, 3), Fields(3, 4)]).read(np.array([6, 0, 3, 2]))
    assert batch["texts"] == ["text 6", "text 0", "text 3", "text 2"]
    assert batch["pair"][0].tolist() == [6, 0, 3, 2]
    assert batch["pair"][1].dtype == torch.float64


@pytest.mark.parametrize(
    ("other", "what"),
    [
        (Arrays(x=A.double()), "rows of (3,) torch.float32, rows of (3,) torch.float64"),
        (Arrays(x=torch.ones(2, 4)), "rows of (3,) torch.float32, rows of (4,)"),
        (Arrays(y=A), "the fields x, the fields y"),
        (Arrays(A), "the fields x, a tuple of 1"),
    ],
    ids=["dtype", "shape", "names", "structure"],
)
def test_batches_that_differ_are_described(other: Any, what: str) -> None:
    with pytest.raises(DataError) as caught:
        Concat([Arrays(x=A), other])
    assert what in caught.value.message


@pytest.mark.parametrize(
    ("given", "what"),
    [
        ([], "no source"),
        ([Iterated([torch.ones(2)])], "cannot be one of several"),
        ([DataLoader(TensorDataset(A))], "cannot be one of several"),
        ([TensorDataset(A)], "5 samples of TensorDataset cannot be one"),
        ([3], "not a source of samples"),
    ],
    ids=["none", "iterable", "loader", "dataset", "number"],
)
def test_what_cannot_be_joined_is_refused(given: Any, what: str) -> None:
    with pytest.raises(DataError, match=what):
        Concat(given)


def test_images_of_other_classes_are_refused(tmp_path: Path) -> None:
    for name in ("one/cat", "one/dog", "two/cat", "two/dog", "three/cow", "three/dog"):
        (tmp_path / name).mkdir(parents=True)
        Image.new("RGB", (4, 4), (9, 8, 7)).save(tmp_path / name / "1.png")
    one, two, three = (ImageFolder(tmp_path / name) for name in ("one", "two", "three"))
    joined = Concat([one, two])
    assert joined.classes == ("cat", "dog")
    assert joined.read(np.array([3, 0]))["labels"].tolist() == [1, 0]
    with pytest.raises(DataError, match="different classes"):
        Concat([one, three])


class Fit:
    def __init__(self, joined: bool) -> None:
        self.joined = joined

    def model(self) -> torch.nn.Module:
        return torch.nn.Linear(3, 1)

    def data(self, split: str) -> Any:
        return Concat([Arrays(A), Arrays(B), Arrays(C)]) if self.joined else Arrays(EVERY)

    def forward(self, model: torch.nn.Module, batch: Any) -> torch.Tensor:
        output: torch.Tensor = model(batch[0])
        return output

    def loss(self, output: torch.Tensor, batch: Any) -> Loss:
        return Loss.sum((output - batch[0].sum(1, keepdim=True)).square().sum(), len(output))


@pytest.mark.parametrize("workers", [0, 2])
def test_a_run_over_joined_sources_has_the_bits_of_one(workers: int, tmp_path: Path) -> None:
    spec = RunSpec(
        train={"length": "9 steps", "batch": 4, "threads": 1},
        loader={"workers": workers},
        checkpoint={"every": "1 steps", "background": False},
        observe={"tensorboard": False},
    )
    found = []
    for joined in (False, True):
        folder = tmp_path / str(joined)
        for leave_at in (4, None) if joined else (None,):
            with Run(spec, Fit(joined), folder=folder, quiet=True) as run:
                if leave_at is None:
                    drive(run)
                else:
                    next(each for each in run.steps() if each.step == leave_at)
                    run.save()
            found.append([each.tolist() for each in run.model.parameters()])
    assert found[0] == found[-1]


# ---- files


def write_tokens(folder: Path, counts: dict[str, int]) -> dict[str, np.ndarray]:
    made = {}
    for number, (name, count) in enumerate(counts.items()):
        made[name] = np.arange(1000 * number, 1000 * number + count, dtype=np.uint16)
        made[name].tofile(folder / name)
    return made


def test_token_files_are_a_list_or_a_pattern(tmp_path: Path) -> None:
    ids = write_tokens(tmp_path, {"train_2.bin": 33, "train_1.bin": 20, "val.bin": 9})
    source = TokenFile(tmp_path / "train_*.bin", 8)
    assert [each.name for each in source.paths] == ["train_1.bin", "train_2.bin"]
    windows = [Tokens(ids[name], 8) for name in ("train_1.bin", "train_2.bin")]
    assert len(source) == sum(map(len, windows)) == 3 + 4
    batch = source.read(np.array([3, 0, 2]))
    assert batch["inputs"][0].tolist() == [*range(8)]
    assert batch["inputs"][1].tolist() == [*range(1000, 1008)]
    assert batch["targets"][2].tolist() == [1017, 1018, 1019, *[-100] * 5]
    named = TokenFile([tmp_path / "train_1.bin", str(tmp_path / "train_2.bin")], 8)
    assert named.digest == source.digest
    assert TokenFile([*reversed(source.paths)], 8).digest != source.digest
    again = pickle.loads(pickle.dumps(source))
    assert again.digest == source.digest
    assert again.tokens_per_sample == 8
    assert TokenFile(tmp_path / "val.bin", 8).digest == Tokens(ids["val.bin"], 8).digest


def test_documents_of_several_files_are_packed_by_file(tmp_path: Path) -> None:
    for number, lengths in enumerate(((3, 4), (5,))):
        stream = np.concatenate([[*range(1, length), 0] for length in lengths])
        stream.astype(np.uint16).tofile(tmp_path / f"{number}.bin")
        np.save(tmp_path / f"{number}.npy", np.cumsum([0, *lengths[:-1]]))
    by_end = TokenFile(tmp_path / "?.bin", 8, end=0)
    by_offsets = TokenFile(tmp_path / "?.bin", 8, offsets=tmp_path / "?.npy")
    both = [each.read(np.arange(len(each)))["inputs"].tolist() for each in (by_end, by_offsets)]
    assert both[0] == both[1]
    assert len(by_end) == 2
    with pytest.raises(DataError, match="2 token files and 1 files of offsets"):
        TokenFile(tmp_path / "?.bin", 8, offsets=tmp_path / "0.npy")


@pytest.mark.parametrize(("magic", "dtype"), [(20240520, "uint16"), (20240801, "uint32")])
def test_the_header_of_llm_c_is_no_token(magic: int, dtype: str, tmp_path: Path) -> None:
    ids, header = np.arange(40).astype(dtype), np.zeros(256, dtype="<i4")
    header[:3] = magic, 1, len(ids)
    path = tmp_path / "fineweb_train_000001.bin"
    path.write_bytes(header.tobytes() + ids.tobytes())
    source = TokenFile(path, 8, dtype=dtype)
    assert source.digest == Tokens(ids, 8).digest
    assert source.read(np.array([0]))["inputs"][0].tolist() == [*range(8)]
    with pytest.raises(DataError, match="header") as caught:
        TokenFile(path, 8, dtype="uint32" if dtype == "uint16" else "uint16")
    assert caught.value.hint == f'give dtype="{dtype}"'
    for count in (0, -5):
        header[2] = count
        path.write_bytes(header.tobytes())
        with pytest.raises(DataError, match=f"its header says {count} tokens"):
            TokenFile(path, 8, dtype=dtype)
    header[2] = len(ids)
    path.write_bytes(header.tobytes() + ids.tobytes()[:-4])
    with pytest.raises(DataError, match="its header says 40 tokens"):
        TokenFile(path, 8, dtype=dtype)


def test_tables_take_a_pattern(tmp_path: Path) -> None:
    parquet = pytest.importorskip("pyarrow.parquet")
    import pyarrow

    for number in (0, 1):
        parquet.write_table(pyarrow.table({"a": [number, 7]}), tmp_path / f"part-{number}.parquet")
    source = Table(tmp_path / "part-*.parquet", x="a")
    assert source.read(np.array([2, 0, 3]))["x"].tolist() == [1, 0, 7]


def test_a_pattern_names_the_files_that_a_shell_would(tmp_path: Path) -> None:
    folder = tmp_path / "data [1]"
    (folder / "a").mkdir(parents=True)
    for name in ("x_2.bin", "x_1.bin", ".x_0.bin", "a/x_3.bin", "odd*.bin"):
        (folder / name).write_bytes(b"12")

    def names(*given: Any) -> list[str]:
        return [str(each.relative_to(folder)) for each in find_files(*given)]

    assert names(folder / "x_*.bin") == ["x_1.bin", "x_2.bin"]
    assert names(folder / "*" / "x_?.bin") == ["a/x_3.bin"]
    assert names(folder / "**" / "x_*.bin") == ["a/x_3.bin", "x_1.bin", "x_2.bin"]
    assert names(folder / "odd*.bin") == ["odd*.bin"]
    assert names([folder / "x_2.bin", folder / "x_1*"]) == ["x_2.bin", "x_1.bin"]
    assert names(folder / "absent.bin") == ["absent.bin"]
    for wrong in (folder / "y_*.bin", folder / "absent" / "*.bin"):
        with pytest.raises(DataError, match="no file matches"):
            find_files(wrong)
