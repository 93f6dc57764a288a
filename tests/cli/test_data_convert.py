"""Tests of `surefoot data convert`.

What is written is what was read, in the same bytes whoever is killed meanwhile; nothing else is
touched.
"""

from __future__ import annotations

import hashlib
import json
import multiprocessing
import os
import shutil
import signal
import tarfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from surefoot.components.data import Arrays, ImageFolder, Iterated, Tars, as_source
from surefoot.components.data.blocks import Order
from surefoot.components.data.disk import Folder, Samples, ShardNaming, convert, of_arrays
from surefoot.components.data.disk import files as on_disk
from surefoot.components.data.disk.convert import PROGRESS
from surefoot.components.data.tars.audit import audit
from surefoot.core.errors import DataError, StorageError
from tests.cli.conftest import Command
from tests.components.test_index import look

TASK = """
import torch

from surefoot.components.data import Tokens


class Pairs(torch.utils.data.Dataset):
    def __init__(self, n, draws):
        self.n, self.draws = n, draws

    def __len__(self):
        return self.n

    def __getitem__(self, i):
        noise = torch.rand(()) if self.draws else torch.tensor(0.5)
        box = {"a": torch.full((2,), float(i)), "b": torch.tensor([i])}
        x = torch.arange(4) * noise
        return {"text": f"sample {i}", "label": i % 3, "weights": box, "ids": [i, i + 1], "x": x}


class Task:
    def __init__(self, draws: bool = False, n: int = 20):
        self.draws, self.n = draws, n

    def model(self): ...
    def forward(self, model, batch): ...
    def loss(self, output, batch): ...

    def data(self, split):
        return Pairs(self.n if split == "train" else 4, self.draws)
"""


@pytest.fixture
def images(tmp_path: Path) -> Path:
    """Two classes of 12 images, of which one has a name that a tar would not take."""
    from PIL import Image

    rng = np.random.default_rng(0)
    for name in ("cat", "dog"):
        (tmp_path / "images" / name).mkdir(parents=True)
        for number in range(12):
            pixels = rng.integers(0, 255, (8, 9, 3), dtype=np.uint8)
            Image.fromarray(pixels).save(tmp_path / "images" / name / f"{number} (a.b).png")
    return tmp_path / "images"


@pytest.fixture
def arrays(tmp_path: Path) -> dict[str, Path]:
    np.save(tmp_path / "x.npy", np.random.default_rng(0).random((60, 3, 4)).astype("float32"))
    np.save(tmp_path / "y.npy", np.arange(60) % 7)
    return {"image": tmp_path / "x.npy", "label": tmp_path / "y.npy"}


def digests(folder: Path) -> dict[str, str]:
    """Return the bytes of all that is written there, but for what is ours alone.

    The index holds times, and the progress file goes along.
    """
    return {
        path.name: hashlib.sha256(path.read_bytes()).hexdigest()
        for path in folder.iterdir()
        if path.suffix != ".index"
    }


def tars_of(folder: Path) -> list[Path]:
    return sorted(folder.glob("*.tar"))


def test_an_image_folder_becomes_tars_that_hold_its_very_bytes(
    images: Path, tmp_path: Path, surefoot: Command
) -> None:
    row = surefoot("data", "convert", images, "out", "--shard-size", "12 KiB", "--json").row
    out = tmp_path / "out"
    assert row["samples"] == 24
    assert row["parts"] == {"image": "png", "label": "cls"}
    assert len(tars_of(out)) > 2
    assert max(path.stat().st_size for path in tars_of(out)) <= 12 << 10
    assert json.loads((out / "classes.json").read_text()) == {"0": "cat", "1": "dog"}
    files = (out / "files.txt").read_text().splitlines()
    source, tars = (
        ImageFolder(images),
        Tars(tars_of(out), cache=tmp_path / "cache", image="png", label="cls"),
    )
    ids = np.arange(24)
    read, want = tars.read(ids), source.read(ids)
    assert torch.equal(read["image"], want["images"])
    assert torch.equal(read["label"], want["labels"])
    number = 0
    for path in tars_of(out):
        with tarfile.open(path) as archive:
            for member in archive.getmembers():
                assert (member.mtime, member.uid, member.gid, member.mode, member.uname) == (
                    0,
                    0,
                    0,
                    0o644,
                    "",
                )
                if member.name.endswith(".png"):
                    held = archive.extractfile(member)
                    assert held is not None
                    assert held.read() == (images / files[number]).read_bytes()
                    number += 1
    assert number == 24


def test_the_tars_are_read_by_their_headers_alone(arrays: dict[str, Path], tmp_path: Path) -> None:
    made = convert(of_arrays(arrays), tmp_path / "out", ShardNaming(shard_bytes=30 << 10))
    for each in made.shards:
        found = look(tmp_path / "out" / each.name)
        assert found is not None
        assert len(found) == each.samples + 1


def test_arrays_come_back_as_they_were(
    arrays: dict[str, Path], tmp_path: Path, surefoot: Command
) -> None:
    words = [f"{name}={path}" for name, path in arrays.items()]
    answer = surefoot("data", "convert", *words, "out", "--shard-size", "30 KiB")
    assert answer.code == 0
    assert 'image="npy", label="cls")' in answer.out
    tars = Tars(tars_of(tmp_path / "out"), cache=tmp_path / "cache", image="npy", label="cls")
    batch = tars.read(np.arange(60))
    assert np.array_equal(batch["image"], np.load(arrays["image"]))
    assert np.array_equal(batch["label"], np.load(arrays["label"]))


def test_numbers_that_are_no_classes_are_arrays(tmp_path: Path) -> None:
    np.save(tmp_path / "y.npy", np.array([-100, 5, 10**12]))
    made = of_arrays({"label": tmp_path / "y.npy"})
    assert made.parts == {"label": "npy"}
    convert(made, tmp_path / "out", ShardNaming())
    read = Tars(tars_of(tmp_path / "out"), cache=tmp_path / "cache", label="npy").read(np.arange(3))
    assert read["label"].tolist() == [-100, 5, 10**12]


def test_whatever_a_task_gives_comes_back_part_by_part(tmp_path: Path, surefoot: Command) -> None:
    (tmp_path / "mine.py").write_text(TASK)
    answer = surefoot("data", "convert", "mine.py:Task", "out", "--split", "train")
    assert answer.code == 0, answer.err
    row = surefoot("data", "convert", "mine.py:Task", "out", "--json").row
    assert row["kept"] == 1
    parts = row["parts"]
    assert parts == {
        "text": "txt",
        "label": "cls",
        "weights": "safetensors",
        "ids": "json",
        "x": "npy",
    }
    read = Tars(tars_of(tmp_path / "out"), cache=tmp_path / "cache", **parts).read(
        np.array([0, 7, 19])
    )
    assert read["text"] == ["sample 0", "sample 7", "sample 19"]
    assert read["label"].tolist() == [0, 1, 1]
    assert [each["a"].tolist() for each in read["weights"]] == [[0, 0], [7, 7], [19, 19]]
    assert read["ids"] == [[0, 1], [7, 8], [19, 20]]
    assert read["x"].tolist() == [[0, 0.5, 1, 1.5]] * 3
    assert (
        surefoot("data", "convert", "mine.py:Task", "other", "--split", "test", "--json").row[
            "samples"
        ]
        == 4
    )


def test_a_form_can_be_chosen(arrays: dict[str, Path], tmp_path: Path, surefoot: Command) -> None:
    word = f"label={arrays['label']}"
    assert surefoot("data", "convert", word, "out", "--as", "label=npy", "--json").row["parts"] == {
        "label": "npy"
    }
    answer = surefoot("data", "convert", word, "b", "--as", "label=png")
    assert answer.code == 2
    assert "label as png is not possible" in answer.err
    assert not (tmp_path / "b").exists()


def test_bytes_depend_on_the_samples_alone(arrays: dict[str, Path], tmp_path: Path) -> None:
    for name in ("a", "b"):
        convert(of_arrays(arrays), tmp_path / name, ShardNaming(shard_bytes=20 << 10))
        os.utime(arrays["image"])  # another time of change is another source, not other bytes
    one, other = digests(tmp_path / "a"), digests(tmp_path / "b")
    assert {name: one[name] for name in one if name != PROGRESS} == {
        name: other[name] for name in other if name != PROGRESS
    }


def test_shuffled_tars_have_the_order_of_a_runs_first_epoch(
    arrays: dict[str, Path], tmp_path: Path
) -> None:
    convert(of_arrays(arrays), tmp_path / "out", ShardNaming(shard_bytes=20 << 10, shuffle=3))
    tars = Tars(tars_of(tmp_path / "out"), cache=tmp_path / "cache", image="npy")
    order = Order(60, 3).ids(0, 0, 60)
    assert np.array_equal(tars.read(np.arange(60))["image"], np.load(arrays["image"])[order])
    with tarfile.open(tars_of(tmp_path / "out")[0]) as archive:
        assert archive.getnames()[0] == f"{order[0]:06}.npy"


def _killed(arrays: dict[str, Path], out: Path, after: int) -> None:
    """In a process that kills itself when so many samples are written."""
    seen = 0

    def tell(done: int) -> None:
        nonlocal seen
        seen += done
        if seen >= after:
            os.kill(os.getpid(), signal.SIGKILL)

    convert(of_arrays(arrays), out, ShardNaming(shard_bytes=10 << 10, shuffle=1), tell=tell)


def test_tars_of_a_process_killed_again_and_again_are_those_of_one_that_was_not(
    arrays: dict[str, Path], tmp_path: Path, surefoot: Command
) -> None:
    out, layout = tmp_path / "killed", ShardNaming(shard_bytes=10 << 10, shuffle=1)
    made = convert(of_arrays(arrays), tmp_path / "whole", layout)
    assert len(made.shards) > 8
    for after in (1, 3, 17, 18, 40, 59, 60):
        process = multiprocessing.get_context("fork").Process(
            target=_killed, args=(arrays, out, after)
        )
        process.start()
        process.join()
        assert process.exitcode == -signal.SIGKILL
        assert list(out.glob(".*.draft"))  # in the middle of a tar
    inodes = {path.name: path.stat().st_ino for path in tars_of(out)}
    resumed = convert(of_arrays(arrays), out, layout)
    assert resumed.kept >= len(made.shards) - 2
    assert digests(out) == digests(tmp_path / "whole")
    # none was written again
    assert {path.name: path.stat().st_ino for path in tars_of(out)}.items() >= inodes.items()
    assert not list(out.glob(".*.draft"))
    listed = dict(line.split("  ")[::-1] for line in (out / "SHA256SUMS").read_text().splitlines())
    assert listed == {
        name: digest for name, digest in digests(out).items() if name.endswith(".tar")
    }


def test_it_goes_on_wherever_the_progress_file_ends(
    arrays: dict[str, Path], tmp_path: Path
) -> None:
    out, layout = tmp_path / "out", ShardNaming(shard_bytes=20 << 10)
    convert(of_arrays(arrays), out, layout)
    whole, progress = digests(out), (out / PROGRESS).read_bytes()
    lines = progress.splitlines(keepends=True)
    # renamed before its line was written, a line that is cut
    for content in (b"".join(lines[:-1]), progress[:-9], lines[0], b""):
        (out / PROGRESS).write_bytes(content)
        for path in [*tars_of(out)[content.count(b"\n") :], out / "SHA256SUMS"]:
            path.unlink()
        if not content:
            for path in tars_of(out):
                path.unlink()
        convert(of_arrays(arrays), out, layout)
        assert digests(out) == whole


def test_a_shard_that_is_damaged_or_gone_is_written_again(
    arrays: dict[str, Path], tmp_path: Path, surefoot: Command
) -> None:
    words = [
        "data",
        "convert",
        *(f"{name}={path}" for name, path in arrays.items()),
        "out",
        "--shard-size",
        "20 KiB",
    ]
    assert surefoot(*words).code == 0
    whole = digests(tmp_path / "out")
    first, second, *_ = tars_of(tmp_path / "out")
    first.write_bytes(first.read_bytes()[:-1] + b"x")
    second.unlink()
    answer = surefoot(*words)
    assert answer.code == 0
    assert f"{first.name} is damaged" in answer.err
    assert digests(tmp_path / "out") == whole
    second.unlink()
    answer = surefoot(*words)
    assert f"{second.name} is missing" in answer.err
    assert digests(tmp_path / "out") == whole


@pytest.mark.parametrize(
    ("change", "words", "says"),
    [
        ("source", (), "from another source"),
        ("", ("--shard-size", "11 KiB"), "shard_bytes 20480, not 11264"),
        ("", ("--shuffle", "1"), "shuffle None, not 1"),
        ("", ("--name", "other"), "name out, not other"),
        ("version", (), "by another version"),
        ("damage", (), "is damaged"),
        ("tar", (), "out holds mine.tar, which belongs to another data set"),
    ],
)
def test_a_folder_of_another_conversion_is_left_alone(
    change: str,
    words: tuple[str, ...],
    says: str,
    arrays: dict[str, Path],
    tmp_path: Path,
    surefoot: Command,
) -> None:
    command = [
        "data",
        "convert",
        *(f"{name}={path}" for name, path in arrays.items()),
        "out",
        "--no-index",
    ]
    assert surefoot(*command, "--shard-size", "20 KiB").code == 0
    out = tmp_path / "out"
    if change == "source":
        np.save(arrays["image"], np.zeros((60, 3, 4), "float32"))
    elif change == "tar":
        (out / "mine.tar").write_bytes(b"mine")
    elif change:
        old, new = (
            (b"convert 1", b"convert 0") if change == "version" else (b'"settings"', b'"nothing"')
        )
        (out / PROGRESS).write_bytes((out / PROGRESS).read_bytes().replace(old, new))
    before = digests(out)
    answer = surefoot(
        *command,
        *(words or ("--shard-size", "20 KiB")),
        *(() if "--shard-size" in words else ("--shard-size", "20 KiB")),
    )
    assert answer.code == 2
    assert says in answer.err
    assert digests(out) == before


@pytest.mark.parametrize("name", ["mine.tar", "SHA256SUMS", "classes.json"])
def test_nothing_of_anothers_is_overwritten(
    name: str, images: Path, tmp_path: Path, surefoot: Command
) -> None:
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / name).write_text("mine")
    answer = surefoot("data", "convert", images, "out")
    assert answer.code == 2
    assert f"out holds {name}" in answer.err
    assert [path.read_text() for path in (tmp_path / "out").iterdir()] == ["mine"]


def test_bad_input_is_told_in_words_before_anything_is_written(
    arrays: dict[str, Path], tmp_path: Path, surefoot: Command
) -> None:
    (tmp_path / "mine.py").write_text(TASK)
    (tmp_path / "text.npy").write_text("no array")
    (tmp_path / "empty").mkdir()
    (tmp_path / "file").write_text("")
    x, y = (str(path) for path in arrays.values())
    cases = {
        ("none.npy", "out"): "none.npy is not a valid source",
        ("empty", "out"): "empty contains no class folder",
        ("image=none.npy", "out"): "none.npy cannot be read",
        ("image=text.npy", "out"): "cannot be mapped as a .npy file",
        (f"image={x}", f"image={y}", "out"): "has no name, or a name that is already used",
        (f"image={x}", "empty", "out"): "is not a valid source",
        (f"im age={x}", "out"): "a part has the name 'im age'",
        (f"image={x}", "out", "--shard-size", "5"): "is not a size in bytes",
        (f"image={x}", "out", "--shard-size", "1 KiB"): "tars of 1,024 bytes are too small",
        (f"image={x}", "out", "--name", "a/b"): "tars cannot have the name 'a/b'",
        (f"image={x}", "file"): "the folder file cannot be created: it is a file",
        ("mine.py:Other", "out"): "has no class 'Other'",
        ("mine.py:Task", "out", "--set", "task.draws=true"): "other values each time it is read",
        ("empty", "out", "--as", "x=npy"): "--as sets the format of arrays",
    }
    for words, says in cases.items():
        answer = surefoot("data", "convert", *words)
        assert answer.code == 2, (words, answer.err)
        assert says in answer.err, words
        assert not (tmp_path / "out").exists(), words


def test_a_disk_without_room_is_told_before_and_a_full_one_with_what_to_do(
    arrays: dict[str, Path], tmp_path: Path, surefoot: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    words = ["data", "convert", f"image={arrays['image']}", "out", "--shard-size", "10 KiB"]
    usage = shutil.disk_usage(tmp_path)
    with monkeypatch.context() as patch:
        patch.setattr(on_disk.shutil, "disk_usage", lambda path: usage._replace(free=1_100_000))
        answer = surefoot(*words)
    assert answer.code == 2
    assert "out has" not in answer.out
    assert "of free space, and 60 KiB are needed" in answer.err
    assert not (tmp_path / "out").exists()

    def refuse(draft: Any, path: Any) -> None:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(Path, "replace", refuse)
        answer = surefoot(*words)
    assert answer.code == StorageError.exit_code
    assert "the same command continues from there" in answer.err
    assert not list((tmp_path / "out").glob(".*.draft"))
    assert surefoot(*words).code == 0


def test_two_processes_do_not_write_into_one_folder(
    arrays: dict[str, Path], tmp_path: Path
) -> None:
    out, tried = tmp_path / "out", []

    def tell(done: int) -> None:
        if not tried:
            tried.append(1)
            with pytest.raises(DataError, match="another process is writing into"):
                convert(of_arrays(arrays), out, ShardNaming())

    convert(of_arrays(arrays), out, ShardNaming(), tell=tell)
    assert tried


def test_sources_without_rows_and_values_without_a_form_are_refused(tmp_path: Path) -> None:
    batches = [torch.zeros(4, 2), torch.zeros(4, 2)]
    with pytest.raises(DataError, match="and one row was requested"):
        Samples(Iterated(batches))
    with pytest.raises(DataError, match="cannot be written"):
        Samples(Arrays(x=torch.zeros(3, 2, dtype=torch.bfloat16)))
    with pytest.raises(
        DataError,
        match=r"label of sample 1 is -1, which is not a class number\nhint: .*--as label=npy",
    ):
        Samples(Arrays(label=torch.tensor([1, -1])))
    rows = Iterated([{"x": torch.full((1, 2), float(number))} for number in range(6)])
    with pytest.raises(DataError, match="cannot be shuffled"):
        convert(Samples(rows), tmp_path / "out", ShardNaming(shuffle=1))
    convert(Samples(rows), tmp_path / "out", ShardNaming())
    read = Tars(tars_of(tmp_path / "out"), cache=tmp_path / "cache", x="npy").read(np.arange(6))
    assert read["x"][:, 0].tolist() == [0, 1, 2, 3, 4, 5]


def test_every_part_is_sound_by_the_check_of_tars(images: Path, tmp_path: Path) -> None:
    convert(Folder(images), tmp_path / "out", ShardNaming(shard_bytes=12 << 10))
    found = audit(tars_of(tmp_path / "out"))
    assert (found.num_samples, found.bad) == (24, [])
    pairs = as_source((torch.rand(5, 2), torch.arange(5)))
    made = Samples(pairs)
    convert(made, tmp_path / "pairs", ShardNaming())
    assert made.parts == {"0": "npy", "1": "cls"}
    assert audit(tars_of(tmp_path / "pairs")).bad == []
