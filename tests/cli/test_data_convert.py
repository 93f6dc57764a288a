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
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from surefoot.components.data.blocks import Order
from surefoot.components.data.disk import files as on_disk
from surefoot.components.data.disk.convert import SETTINGS, ShardNaming, convert
from surefoot.components.data.sources.images import ImageFolder
from surefoot.components.data.tars.audit import audit
from surefoot.components.data.tars.source import Tars
from surefoot.core.errors import DataError, StorageError
from tests.cli.conftest import Command
from tests.components.test_index import look

SMALL = ShardNaming(shard_bytes=20 << 10)


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
    row = surefoot("data", "convert", images, "out", "--shard-size", "20 KiB", "--json").row
    out = tmp_path / "out"
    assert row["samples"] == 24
    assert row["parts"] == {"image": "png", "label": "cls"}
    assert len(tars_of(out)) > 2
    assert max(path.stat().st_size for path in tars_of(out)) <= 20 << 10
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


def test_the_tars_are_read_by_their_headers_alone(images: Path, tmp_path: Path) -> None:
    made = convert(ImageFolder(images), tmp_path / "out", SMALL)
    assert len(made.index.shards) > 1
    for each in made.index.shards:
        found = look(tmp_path / "out" / each.name)
        assert found is not None
        assert len(found) == each.num_samples + 1


def test_images_of_several_formats_are_a_part_each(images: Path, tmp_path: Path) -> None:
    shutil.copy(images / "cat" / "0 (a.b).png", images / "cat" / "0.jpg")
    made = convert(ImageFolder(images), tmp_path / "out", SMALL)
    assert made.parts == {"jpg": "jpg", "png": "png", "label": "cls"}


def test_bytes_depend_on_the_images_alone(images: Path, tmp_path: Path) -> None:
    for name in ("a", "b"):
        convert(ImageFolder(images), tmp_path / name, SMALL)
        os.utime(images / "cat" / "0 (a.b).png")
    a, b = digests(tmp_path / "a"), digests(tmp_path / "b")
    assert a.pop(SETTINGS) != b.pop(SETTINGS)
    assert a == b


def test_shuffled_tars_have_the_order_of_a_runs_first_epoch(images: Path, tmp_path: Path) -> None:
    layout = ShardNaming(shard_bytes=20 << 10, shuffle=3)
    convert(ImageFolder(images), tmp_path / "out", layout)
    tars = Tars(tars_of(tmp_path / "out"), cache=tmp_path / "cache", image="png")
    order = Order(24, 3).ids(0, 0, 24)
    want = ImageFolder(images).read(order)["images"]
    assert torch.equal(torch.as_tensor(tars.read(np.arange(24))["image"]), torch.as_tensor(want))
    with tarfile.open(tars_of(tmp_path / "out")[0]) as archive:
        assert archive.getnames()[0] == f"{order[0]:06}.png"


class Killing(ImageFolder):
    """An image folder whose process kills itself when so many images have been read."""

    left = 0

    def content(self, number: int) -> Any:
        self.left -= 1
        if self.left < 0:
            os.kill(os.getpid(), signal.SIGKILL)
        return super().content(number)


def _killed(images: Path, out: Path, after: int) -> None:
    source = Killing(images)
    source.left = after
    convert(source, out, ShardNaming(shard_bytes=20 << 10, shuffle=1))


def test_tars_of_a_process_killed_again_and_again_are_those_of_one_that_was_not(
    images: Path, tmp_path: Path
) -> None:
    out, layout = tmp_path / "killed", ShardNaming(shard_bytes=20 << 10, shuffle=1)
    convert(ImageFolder(images), tmp_path / "whole", layout)
    for after in (1, 5, 12, 4):
        process = multiprocessing.get_context("fork").Process(
            target=_killed, args=(images, out, after)
        )
        process.start()
        process.join()
        assert process.exitcode == -signal.SIGKILL
        assert list(out.glob(".*.draft"))  # in the middle of a tar
    inodes = {path.name: path.stat().st_ino for path in tars_of(out)}
    assert inodes
    assert convert(ImageFolder(images), out, layout).kept == len(inodes)
    assert digests(out) == digests(tmp_path / "whole")
    # none was written again
    assert {path.name: path.stat().st_ino for path in tars_of(out)}.items() >= inodes.items()
    assert not list(out.glob(".*.draft"))
    listed = dict(line.split("  ")[::-1] for line in (out / "SHA256SUMS").read_text().splitlines())
    written = digests(out)
    assert listed == {name: written[name] for name in written if name[0] not in ".S"}


def _flip_a_bit(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[700] ^= 1
    path.write_bytes(content)


@pytest.mark.parametrize(
    "damage",
    [
        Path.unlink,
        lambda path: path.write_bytes(path.read_bytes()[:-1]),
        lambda path: path.write_bytes(bytes(path.stat().st_size)),
        _flip_a_bit,
    ],
    ids=["gone", "cut", "zeroed", "flipped"],
)
def test_a_tar_that_changed_between_two_commands_is_written_again(
    damage: Callable[[Path], object], images: Path, tmp_path: Path, surefoot: Command
) -> None:
    words = ["data", "convert", "images", "out", "--shard-size", "20 KiB"]
    assert surefoot(*words).code == 0
    whole = digests(tmp_path / "out")
    damage(tars_of(tmp_path / "out")[1])
    assert surefoot(*words, "--json").row["kept"] == len(tars_of(tmp_path / "out")) - 1
    now = digests(tmp_path / "out")
    assert now.pop(SETTINGS) != whole.pop(SETTINGS)  # the digest of the new tar is appended
    assert now == whole


@pytest.mark.parametrize("left", [0, 1, -1], ids=["empty", "half a line", "half a digest"])
def test_a_tar_whose_digest_was_not_recorded_is_written_again(
    left: int, images: Path, tmp_path: Path, surefoot: Command
) -> None:
    words = ["data", "convert", "images", "out", "--shard-size", "20 KiB"]
    assert surefoot(*words).code == 0
    whole = digests(tmp_path / "out")
    record = tmp_path / "out" / SETTINGS
    record.write_bytes(record.read_bytes()[:left])
    kept = 0 if left >= 0 else len(tars_of(tmp_path / "out")) - 1
    assert surefoot(*words, "--json").row["kept"] == kept
    assert digests(tmp_path / "out") == whole


@pytest.mark.parametrize(
    ("change", "words", "says"),
    [
        ("source", (), "from other images or with other settings"),
        ("", ("--shard-size", "21 KiB"), "from other images or with other settings"),
        ("", ("--shuffle", "1"), "from other images or with other settings"),
        ("", ("--name", "other"), "from other images or with other settings"),
        ("tar", (), "out holds mine.tar, which belongs to another data set"),
    ],
)
def test_a_folder_of_another_conversion_is_left_alone(
    change: str,
    words: tuple[str, ...],
    says: str,
    images: Path,
    tmp_path: Path,
    surefoot: Command,
) -> None:
    command = ["data", "convert", "images", "out", "--shard-size", "20 KiB"]
    assert surefoot(*command).code == 0
    out = tmp_path / "out"
    if change == "source":
        (images / "dog" / "0 (a.b).png").touch()
    elif change == "tar":
        (out / "mine.tar").write_bytes(b"mine")
    before = digests(out)
    answer = surefoot(*command, *words)
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
    images: Path, tmp_path: Path, surefoot: Command
) -> None:
    (tmp_path / "empty").mkdir()
    (tmp_path / "file").write_text("")
    cases = {
        ("none", "out"): "none cannot be read",
        ("empty", "out"): "empty contains no class folder",
        ("images", "out", "--shard-size", "5"): "is not a size in bytes",
        ("images", "out", "--shard-size", "1 KiB"): "tars of 1,024 bytes are too small",
        ("images", "out", "--name", "a/b"): "tars cannot have the name 'a/b'",
        ("images", "file"): "the folder file cannot be created: it is a file",
    }
    for words, says in cases.items():
        answer = surefoot("data", "convert", *words)
        assert answer.code == 2, (words, answer.err)
        assert says in answer.err, words
        assert not (tmp_path / "out").exists(), words


def test_a_disk_without_room_is_told_before_and_a_full_one_with_what_to_do(
    images: Path, tmp_path: Path, surefoot: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    words = ["data", "convert", "images", "out", "--shard-size", "20 KiB"]
    usage = shutil.disk_usage(tmp_path)
    with monkeypatch.context() as patch:
        patch.setattr(on_disk.shutil, "disk_usage", lambda path: usage._replace(free=1_070_000))
        answer = surefoot(*words)
    assert answer.code == 2
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


def test_two_processes_do_not_write_into_one_folder(images: Path, tmp_path: Path) -> None:
    out, tried = tmp_path / "out", []

    def tell(done: int) -> None:
        if not tried:
            tried.append(1)
            with pytest.raises(DataError, match="another process is writing into"):
                convert(ImageFolder(images), out, ShardNaming())

    convert(ImageFolder(images), out, ShardNaming(), tell=tell)
    assert tried


def test_every_part_is_sound_by_the_check_of_tars(images: Path, tmp_path: Path) -> None:
    convert(ImageFolder(images), tmp_path / "out", SMALL)
    found = audit(tars_of(tmp_path / "out"))
    assert (found.num_samples, found.bad) == (24, [])
