"""Tests of `surefoot data stage`.

What is copied is what was there, whoever is killed meanwhile, and nothing else is touched or taken
for it.
"""

from __future__ import annotations

import hashlib
import multiprocessing
import os
import shutil
import signal
from pathlib import Path

import numpy as np
import psutil
import pytest

from surefoot.components.data.disk import files as on_disk
from surefoot.components.data.disk.devices import cached_share, drop_cached, find_device, read_speed
from surefoot.components.data.disk.stage import stage
from surefoot.components.data.tars.source import Tars
from tests.cli.conftest import Command
from tests.components.test_index import write_tar


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    made = tmp_path / "slow"
    made.mkdir()
    for shard in range(4):
        members = [
            (f"{number}.cls", str(number).encode())
            for number in range(100 * shard, 100 * shard + 30)
        ]
        write_tar(made / f"{shard}.tar", members)
    return made


def digests(folder: Path) -> dict[str, str]:
    return {
        path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in folder.glob("*.tar")
    }


def write_sums(folder: Path) -> None:
    (folder / "SHA256SUMS").write_text(
        "".join(f"{digest}  {name}\n" for name, digest in digests(folder).items())
    )


def test_copies_are_the_same_and_are_read_the_same(
    folder: Path, tmp_path: Path, surefoot: Command
) -> None:
    (folder / "classes.json").write_text("{}")
    before = {path.name: path.read_bytes() for path in folder.iterdir()}
    row = surefoot("data", "stage", "slow", "fast/tars", "--json").row
    dest = tmp_path / "fast" / "tars"
    assert (row["tars"], row["samples"], row["kept"], row["checked"]) == (4, 120, 0, 0)
    assert digests(dest) == digests(folder)
    assert (dest / "classes.json").read_text() == "{}"
    assert {path.name: path.read_bytes() for path in folder.iterdir()} == before
    listed = dict(line.split("  ")[::-1] for line in (dest / "SHA256SUMS").read_text().splitlines())
    assert {name: listed[name] for name in digests(dest)} == digests(dest)
    assert not list(dest.glob(".*.draft"))
    cache = tmp_path / "cache"
    tars = Tars(sorted(dest.glob("*.tar")), cache=cache, cls="cls")
    assert tars.index.place.parent == dest
    assert not cache.exists()  # the index beside them was taken
    want = Tars(sorted(folder.glob("*.tar")), cache=cache, cls="cls").read(np.arange(120))["cls"]
    assert tars.read(np.arange(120))["cls"].tolist() == want.tolist()


def test_the_answer_tells_where_and_how_fast(folder: Path, surefoot: Command) -> None:
    write_sums(folder)
    answer = surefoot("data", "stage", "slow", "fast")
    assert answer.code == 0
    assert "B/s" in answer.out
    assert "120 samples in 4 tars" in answer.out
    assert "all digests were known before" in answer.out
    row = surefoot("data", "stage", "slow", "fast", "--json").row
    assert (row["kept"], row["copied_bytes"]) == (4, 0)
    for side in ("before", "after"):
        assert row[side]["bytes_per_s"] > 0
        assert row[side]["num_bytes"] == sum(path.stat().st_size for path in folder.glob("*.tar"))


@pytest.mark.parametrize("known", ["index", "list"])
def test_a_tar_that_is_not_what_its_digest_says_is_not_staged(
    known: str, folder: Path, tmp_path: Path, surefoot: Command
) -> None:
    if known == "index":
        assert surefoot("data", "index", "slow").code == 0
    else:
        write_sums(folder)
    path = folder / "2.tar"
    if known == "index":  # with the same stamp: the index is still of these very files
        (index,) = folder.glob("*.index")
        old = digests(folder)["2.tar"].encode()
        index.write_bytes(index.read_bytes().replace(old, b"0" * 64))
    else:
        path.write_bytes(path.read_bytes().replace(b"200.cls", b"299.cls"))
    answer = surefoot("data", "stage", "slow", "fast")
    assert answer.code == 2
    assert "2.tar has the SHA-256" in answer.err
    assert sorted(
        path.name for path in (tmp_path / "fast").glob("*tar*") if path.suffix != ".draft"
    ) == ["0.tar", "1.tar"]
    assert not list((tmp_path / "fast").glob(".*.draft"))


def _killed(folder: Path, dest: Path, after: int) -> None:
    seen = 0

    def tell(done: int) -> None:
        nonlocal seen
        seen += 1
        if seen >= after:
            os.kill(os.getpid(), signal.SIGKILL)

    stage(sorted(folder.glob("*.tar")), dest, tell=tell)


def test_a_copy_that_was_killed_is_gone_on_with(
    folder: Path, tmp_path: Path, surefoot: Command
) -> None:
    dest = tmp_path / "fast"
    for after in (1, 2, 4):
        process = multiprocessing.get_context("fork").Process(
            target=_killed, args=(folder, dest, after)
        )
        process.start()
        process.join()
        assert process.exitcode == -signal.SIGKILL
        assert digests(dest).items() <= digests(folder).items()  # whole, or not there by its name
        assert len(digests(dest)) == after - 1
    inodes = {path.name: path.stat().st_ino for path in dest.glob("*.tar")}
    row = surefoot("data", "stage", "slow", "fast", "--json").row
    assert row["kept"] == 3
    assert digests(dest) == digests(folder)
    assert {name: (dest / name).stat().st_ino for name in inodes} == inodes
    assert not list(dest.glob(".*.draft"))


@pytest.mark.parametrize("name", ["mine.tar", "2.tar", "SHA256SUMS"])
def test_nothing_of_anothers_is_overwritten(
    name: str, folder: Path, tmp_path: Path, surefoot: Command
) -> None:
    (tmp_path / "fast").mkdir()
    (tmp_path / "fast" / name).write_text("mine")
    answer = surefoot("data", "stage", "slow", "fast")
    assert answer.code == 2
    assert (f"{name} exists already" if name == "2.tar" else f"holds {name}") in answer.err
    assert (tmp_path / "fast" / name).read_text() == "mine"


def test_bad_input_is_told_in_words(
    folder: Path, tmp_path: Path, surefoot: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "other").mkdir()
    shutil.copy(folder / "0.tar", tmp_path / "other" / "0.tar")
    (tmp_path / "file").write_text("")
    (tmp_path / "empty").mkdir()
    cases = {
        ("none", "fast"): "none is missing",
        ("empty", "fast"): "empty contains no tar",
        ("slow", "slow"): "slow is the folder of the tars",
        ("slow", "file"): "file is a file",
        ("slow", "other", "fast"): "the shards are in 2 folders",
        ("slow/0.tar", "slow/0.tar", "fast"): "0.tar is given twice",
        ("http://localhost/0.tar", "fast"): "is a URL",
    }
    for words, says in cases.items():
        answer = surefoot("data", "stage", *words)
        assert answer.code == 2, (words, answer.err)
        assert says in answer.err, words
        assert not (tmp_path / "fast").exists(), words
    usage = shutil.disk_usage(tmp_path)
    monkeypatch.setattr(on_disk.shutil, "disk_usage", lambda path: usage._replace(free=1_100_000))
    answer = surefoot("data", "stage", "slow", "fast")
    assert answer.code == 2
    assert "are needed" in answer.err
    assert not (tmp_path / "fast").exists()


MOUNTS = """/dev/vda / ext4 rw 0 0
tmpfs /mem tmpfs rw 0 0
/dev/sda1 /spins xfs rw 0 0
/dev/sdb /solid xfs rw 0 0
/dev/nvme0n1p2 /spins/fast\\040one ext4 rw 0 0
server:/x /far nfs4 rw 0 0
/dev/nvme1n1 /pool btrfs rw 0 0
"""


def test_a_device_is_told_by_the_nearest_mount_and_its_disk(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(psutil, "PROCFS_PATH", str(tmp_path))
    (tmp_path / "self").mkdir()
    (tmp_path / "self" / "mounts").write_text(MOUNTS)
    blocks = tmp_path / "blocks"
    blocks.mkdir()
    for place, spins in (("vda", 1), ("sda/sda1", 1), ("sdb", 0), ("nvme0n1/nvme0n1p2", 0)):
        disk = tmp_path / "disks" / place
        disk.mkdir(parents=True)
        queue = (disk if "/" not in place else disk.parent) / "queue"
        queue.mkdir()
        (queue / "rotational").write_text(f"{spins}\n")
        (blocks / disk.name).symlink_to(disk)
    wanted = {
        "/a/b": "virtual disk",
        "/mem/x": "memory",
        "/memory": "virtual disk",
        "/spins/x": "HDD",
        "/solid": "SSD",
        "/spins/fast one/x": "NVMe",
        "/far/x": "network",
        "/pool/x": "NVMe",
    }
    found = {place: find_device(Path(place), blocks=blocks).kind for place in wanted}
    assert found == wanted
    assert str(find_device(Path("/far/x"), blocks=blocks)) == "network (nfs4 on server:/x)"
    (tmp_path / "self" / "mounts").write_text("")
    unknown = find_device(Path("/x"))
    assert (unknown.kind, str(unknown)) == (None, "a device of unknown kind")


def test_what_was_dropped_is_not_in_memory_and_a_read_brings_it_back(tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_bytes(bytes(4 << 20))
    if not drop_cached([path]) and find_device(path).kind not in (
        "virtual disk",
        "HDD",
        "SSD",
        "NVMe",
    ):
        pytest.skip("this system keeps its files in memory")
    assert cached_share(path) == 0.0
    path.read_bytes()
    assert cached_share(path) == 1.0
    speed = read_speed([path], most_bytes=3 << 20, most_s=10.0)
    assert speed.cold
    assert speed.num_bytes == 3 << 20


def test_files_in_memory_are_not_called_cold() -> None:
    if find_device(Path("/dev/shm")).kind != "memory" or not os.access("/dev/shm", os.W_OK):
        pytest.skip("there is no folder in memory")
    path = Path(f"/dev/shm/surefoot-test-{os.getpid()}")
    try:
        path.write_bytes(bytes(1 << 20))
        assert not read_speed([path], most_bytes=1 << 20, most_s=1.0).cold
    finally:
        path.unlink()
