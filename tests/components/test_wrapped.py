"""What others made: datasets that read several items at once, and what is given in place of a source."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import MappingProxyType
from typing import Any

import numpy as np
import pytest
import torch

from surefoot.components import data
from surefoot.components.data import Arrays, ImageFolder, Synthetic, Tars, Tokens, TorchDataset, as_source
from surefoot.components.data.tars import source as of_tars
from surefoot.contract.task import Source
from surefoot.core.errors import DataError
from tests.components.test_image_folders import write_folder
from tests.components.test_tars import PARTS, write_set


class Batched:
    """As Hugging Face's datasets: items one by one or many at once, and a fingerprint."""

    def __init__(self, fingerprint: Any = "abc", short: bool = False) -> None:
        self._fingerprint, self.calls, self.short = fingerprint, 0, short

    def __len__(self) -> int:
        return 10

    def __getitem__(self, key: int) -> dict[str, int]:
        raise AssertionError("one by one")

    def __getitems__(self, keys: list[int]) -> list[dict[str, int]]:
        assert all(type(key) is int for key in keys)
        self.calls += 1
        return [{"x": key * key} for key in keys[: -1 if self.short else None]]


def test_a_dataset_that_reads_many_at_once_is_asked_once_a_batch() -> None:
    dataset = Batched()
    source = as_source(dataset)
    assert source.read(np.array([3, 9, 3]))["x"].tolist() == [9, 81, 9]
    assert dataset.calls == 1
    with pytest.raises(DataError, match="sample -1 was asked for"):
        source.read(np.array([-1]))
    with pytest.raises(DataError, match="gave 1 items for 2 numbers"):
        TorchDataset(Batched(short=True)).read(np.array([1, 2]))


def test_the_digest_of_a_dataset_is_its_fingerprint_where_it_has_one() -> None:
    one, same, other, without = (TorchDataset(Batched(mark)).digest for mark in ("abc", "abc", "abd", None))
    assert one == same
    assert len({one, other, without}) == 3


def test_a_dataset_of_hugging_face_is_read_by_batches_and_known_by_its_fingerprint() -> None:
    datasets = pytest.importorskip("datasets", reason="the package datasets is not installed")
    made = datasets.Dataset.from_dict({"x": list(range(20)), "y": [number * 0.5 for number in range(20)]})
    source = as_source(made)
    batch = source.read(np.array([19, 0, 7]))
    assert batch["x"].tolist() == [19, 0, 7]
    assert batch["y"].tolist() == [9.5, 0.0, 3.5]
    changed = as_source(made.map(lambda row: {"x": row["x"] + 1}, load_from_cache_file=False))
    assert changed.digest != source.digest == as_source(made).digest
    with pytest.raises(DataError, match=r"whose 'train' is a Dataset\nhint: return the one split"):
        as_source(datasets.DatasetDict(train=made))


@pytest.mark.parametrize(
    ("given", "says", "hint"),
    [
        ("data/train.bin", "a str", "TokenFile"), (Path("data"), "Path, which is no source", "ImageFolder"), (3, "a int", "give a Source"),
        (None, "NoneType", "return a source"), (Arrays, "type, which", "not the class itself"), (b"abc", "a bytes", "frombuffer"),
        ({}, "an empty dict", "by name"), ({"x": [1, 2]}, "whose 'x' is a list", "a tensor or an array"),
        ({0: torch.zeros(2)}, "the key 0", "a list of samples"), ([], "list is empty", "1 sample or more"),
    ],
)  # fmt: skip
def test_what_is_no_source_is_answered_with_what_to_give(given: Any, says: str, hint: str) -> None:
    with pytest.raises(DataError, match=says) as caught:
        as_source(given)
    assert hint in str(caught.value.hint)


def test_a_source_that_lacks_a_part_is_told_which() -> None:
    class Half:
        guarantee = "proven"

        def read(self, ids: np.ndarray) -> Any: ...

    with pytest.raises(DataError, match="a source also has digest, describe, __len__"):
        as_source(Half())


def test_the_class_of_a_source_is_none() -> None:
    class Whole:
        guarantee, digest = "proven", "mine"

        def __len__(self) -> int: ...

        def read(self, ids: np.ndarray) -> Any: ...

        def describe(self) -> str: ...

    whole = Whole()
    assert as_source(whole) is whole
    with pytest.raises(DataError, match=r"hint: give an object of that class"):
        as_source(Whole)


def test_what_was_a_source_is_one_still() -> None:
    assert isinstance(as_source(MappingProxyType({"x": torch.zeros(3)})), Arrays)
    assert isinstance(as_source([1, 2, 3]), TorchDataset)
    source = Synthetic(3)
    assert as_source(source) is source


def test_every_source_says_whether_threads_may_read_it_at_once() -> None:
    sources = [each for name in data.__all__ if isinstance(each := getattr(data, name), type) and hasattr(each, "guarantee")]
    assert len(sources) >= 11
    assert {each.__name__ for each in sources if not each.thread_safe} == {"Iterated", "TarStream", "TorchDataset"}
    assert all(isinstance(each.thread_safe, bool) for each in sources)


def is_read_alike_by_many(source: Source) -> bool:
    """Whether eight threads together read what one reads alone."""
    batches = [np.random.default_rng(number).integers(0, len(source), size=6) for number in range(120)]
    expected = [source.read(ids) for ids in batches]
    with ThreadPoolExecutor(8) as pool:
        for alone, together in zip(expected, pool.map(source.read, batches), strict=True):
            for name, values in alone.items():
                if not (torch.equal(together[name], values) if isinstance(values, torch.Tensor) else len(together[name]) == 6):
                    return False
    return True


def test_threads_read_tars_at_once_though_few_of_them_stay_open(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(of_tars, "MOST_OPEN", 1)
    parts = {name: PARTS[name] for name in ("image", "label", "vector")}
    source = Tars(write_set(tmp_path, shards=6), cache=tmp_path / "cache", **parts)
    assert is_read_alike_by_many(source)
    assert count_open(tmp_path) == 1
    del source
    assert count_open(tmp_path) == 0


def count_open(folder: Path) -> int:
    """The tars below a folder that this process holds open."""
    held = [path.readlink() for path in Path("/proc/self/fd").iterdir() if path.is_symlink()]
    return sum(str(path).startswith(str(folder)) and path.suffix == ".tar" for path in held)


def test_threads_read_windows_and_packed_documents_at_once() -> None:
    ids = np.arange(5000, dtype=np.uint16)
    assert is_read_alike_by_many(Tokens(ids, 17))
    assert is_read_alike_by_many(data.Packed(ids, np.arange(0, 5000, 13), 32))
    assert is_read_alike_by_many(data.Texts(ids, np.arange(0, 5000, 13), together=3))


def test_images_read_by_threads_are_those_of_one(tmp_path: Path) -> None:
    assert is_read_alike_by_many(ImageFolder(write_folder(tmp_path)))
