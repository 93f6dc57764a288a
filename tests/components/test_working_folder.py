"""A source that is built with a relative path reads that file for good.

Wherever the process goes later, and so do its copies.
"""

from __future__ import annotations

import io
import os
import pickle
import tarfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

from surefoot.components.data.sources.arrays import Arrays
from surefoot.components.data.sources.images import ImageFolder
from surefoot.components.data.sources.packed import TokenFile
from surefoot.components.data.sources.tables import Table
from surefoot.components.data.sources.tensors import Safetensors
from surefoot.components.data.tars.source import Tars
from surefoot.components.data.tars.stream import TarStream
from surefoot.components.profiler.tracing.window import Profiler
from surefoot.tasks.cifar10 import Cifar10
from surefoot.tasks.pycorpus import PyCorpus
from surefoot.tasks.wikitext2 import WikiText2


def write_tar(path: str) -> None:
    with tarfile.open(path, "w") as tar:
        for number in range(4):
            info = tarfile.TarInfo(f"{number:04}.cls")
            info.size = len(content := str(number).encode())
            tar.addfile(info, io.BytesIO(content))


def make_images() -> ImageFolder:
    image = pytest.importorskip("PIL.Image")
    for number, name in enumerate(("cat", "dog")):
        Path("images", name).mkdir(parents=True)
        image.new("RGB", (2, 2), (number, 0, 0)).save(f"images/{name}/1.png")
    return ImageFolder("images")


def make_table() -> Table:
    arrow = pytest.importorskip("pyarrow")
    parquet = pytest.importorskip("pyarrow.parquet")
    parquet.write_table(arrow.table({"x": [1, 2, 3]}), "a.parquet")
    return Table("a.parquet", x="x")


def make_tars() -> Tars:
    write_tar("a.tar")
    return Tars(["a.tar"], cache="cache", label="cls")


def make_stream() -> TarStream:
    write_tar("a.tar")
    return TarStream(["a.tar"], [4], label="cls")


def make_parts() -> TarStream:
    write_tar("a.tar")
    write_tar("b.tar")
    return TarStream(["a.tar", "b.tar"], [4, 4], label="cls")


def make_tokens() -> TokenFile:
    np.arange(40, dtype=np.uint16).tofile("a.bin")
    np.save("offsets.npy", np.array([0, 10, 40]))
    return TokenFile("a.bin", 8, offsets="offsets.npy")


def make_safetensors() -> Safetensors:
    save_file({"x": torch.arange(4.0)}, "a.safetensors")
    return Safetensors("a.safetensors")


def make_arrays() -> Arrays:
    np.save("x.npy", np.arange(4.0))
    return Arrays.of_files(x="x.npy")


MAKERS = (
    make_images,
    make_table,
    make_tars,
    make_stream,
    make_tokens,
    make_safetensors,
    make_arrays,
)


def as_it_is(source: Any) -> Any:
    return source


def sent(source: Any) -> Any:
    return pickle.loads(pickle.dumps(source))


@pytest.fixture
def moved(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[], None]:
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path)
    return lambda: os.chdir("elsewhere")


@pytest.mark.parametrize("copied", [as_it_is, sent], ids=["the source", "in another process"])
@pytest.mark.parametrize("make", MAKERS, ids=lambda make: str(make.__name__).removeprefix("make_"))
def test_a_source_reads_its_files_from_another_working_folder(
    make: Callable[[], Any], copied: Callable[[Any], Any], moved: Callable[[], None]
) -> None:
    source = make()
    digest, ids = source.digest, np.arange(len(source))
    moved()
    found = copied(source)
    assert (found.digest, len(found)) == (digest, len(ids))
    assert found.read(ids)


def test_a_part_of_a_stream_is_that_of_the_folder_of_its_stream(moved: Callable[[], None]) -> None:
    source = make_parts()
    digests = [source.part(number, 2).digest for number in range(2)]
    # by the name that was given, as in runs that are there
    assert digests[0] == TarStream(["a.tar"], [4], label="cls").digest
    moved()
    assert [source.part(number, 2).digest for number in range(2)] == digests
    assert source.part(1, 2).read(np.arange(4))["label"].tolist() == [0, 1, 2, 3]  # type: ignore[union-attr]


def test_a_task_and_a_profile_stay_in_the_folder_that_was_named(
    moved: Callable[[], None], tmp_path: Path
) -> None:
    tasks = (Cifar10(folder="set", cache="cache"), PyCorpus(folder="set"), WikiText2(folder="set"))
    tracer = Profiler(torch.nn.Linear(1, 1), "profile")
    moved()
    assert [str(task.folder) for task in tasks] == [str(tmp_path / "set")] * 3
    assert tasks[0].cache == tmp_path / "cache"
    assert tracer.folder == tmp_path / "profile"
