"""Tests of remote shards.

What is trained on is what the digest says, whatever breaks on the way; the cache keeps its bound,
and is shared.
"""

from __future__ import annotations

import hashlib
import io
import os
import pickle
import random
import socket
import tarfile
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from multiprocessing import get_context
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import BinaryIO

import numpy as np
import pytest

from surefoot.components.data import Tars
from surefoot.components.data.remote import Remote, fetch, shards
from surefoot.components.data.remote.cache import Cache
from surefoot.components.data.remote.fetch import RetryPolicy
from surefoot.components.data.tars.index import open_index
from surefoot.core.errors import DataError
from tests.components.server import Asked, Served, Short, serving
from tests.components.store_server import serving_store

pytest.importorskip("fsspec")
pytest.importorskip("aiohttp")

SHARDS, SAMPLES = 6, 4
QUICK = RetryPolicy(tries=4, first_wait_s=0.01, longest_wait_s=0.02, request_s=2.0)


def make_tar(shard: int, samples: int = SAMPLES) -> bytes:
    out = io.BytesIO()
    with tarfile.open(fileobj=out, mode="w") as archive:
        for number in range(shard * samples, (shard + 1) * samples):
            for extension, content in (
                ("cls", b"%d" % number),
                ("txt", random.Random(number).randbytes(600).hex().encode()),
            ):
                member = tarfile.TarInfo(f"{number:04d}.{extension}")
                member.size = len(content)
                archive.addfile(member, io.BytesIO(content))
    return out.getvalue()


CONTENT = {f"/d/s-{shard:02d}.tar": make_tar(shard) for shard in range(SHARDS)}
SIZE = len(CONTENT["/d/s-00.tar"])
DIGESTS = {
    path.rpartition("/")[2]: hashlib.sha256(content).hexdigest()
    for path, content in CONTENT.items()
}
URL = "/d/s-{00..05}.tar"


@pytest.fixture
def served() -> Iterator[Served]:
    with serving(dict(CONTENT)) as made:
        yield made


@pytest.fixture(autouse=True)
def small_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fetch, "PIECE_BYTES", 4096)


def remote(served: Served, folder: Path, **how: object) -> Remote:
    how = {"cache_bytes": "1 GiB", "ahead": 0, "patience": QUICK, "digests": DIGESTS} | how
    return Remote(served.url + URL, cache=folder, **how)  # type: ignore[arg-type]


def read(source: Remote, number: int = 0) -> bytes:
    descriptor = source.open(number)
    try:
        return os.pread(descriptor, 1 << 20, 0)
    finally:
        os.close(descriptor)


def files(folder: Path, pattern: str = "*/*.tar") -> list[Path]:
    return sorted(folder.glob(pattern))


def drafts(folder: Path) -> list[Path]:
    return files(folder, "*/.draft-*")


# what is read


def test_samples_of_urls_are_those_of_the_files_in_any_order(
    served: Served, tmp_path: Path
) -> None:
    local = tmp_path / "local"
    local.mkdir()
    for path, content in CONTENT.items():
        (local / Path(path).name).write_bytes(content)
    ids = np.random.default_rng(0).permutation(SHARDS * SAMPLES)
    expected = Tars(sorted(local.iterdir()), cache=tmp_path / "a", label="cls", text="txt")
    found = Tars(remote(served, tmp_path / "b"), label="cls", text="txt")
    assert found.digest == expected.digest
    one, other = found.read(ids), expected.read(ids)
    assert one["label"].tolist() == other["label"].tolist() == ids.tolist()
    assert one["text"] == other["text"]


def test_more_shards_than_the_cache_holds_are_right_and_the_bound_is_kept(
    served: Served, tmp_path: Path
) -> None:
    source = Tars(remote(served, tmp_path, cache_bytes=int(2.5 * SIZE)), label="cls")
    order = np.random.default_rng(1)
    for _ in range(3):
        ids = order.permutation(SHARDS * SAMPLES)
        assert source.read(ids)["label"].tolist() == ids.tolist()
        assert sum(path.stat().st_size for path in files(tmp_path)) <= 2.5 * SIZE
    assert len(files(tmp_path)) == 2


def test_the_shard_used_longest_ago_goes_and_one_in_use_never(
    served: Served, tmp_path: Path
) -> None:
    source = remote(served, tmp_path, cache_bytes=3 * SIZE)
    for number in (0, 1, 2, 0):
        read(source, number)
        time.sleep(0.01)
    read(source, 3)
    assert [path.name for path in files(tmp_path)] == ["s-00.tar", "s-02.tar", "s-03.tar"]
    held = source.open(2)
    for number in (4, 5, 1, 0):
        read(source, number)
        assert source.path(2).exists()
    os.close(held)


def test_a_cache_all_in_use_is_told_and_not_overrun(served: Served, tmp_path: Path) -> None:
    source = remote(served, tmp_path, cache_bytes=2 * SIZE)
    held = [source.open(0), source.open(1)]
    with pytest.raises(DataError, match=r"has no room for s-02\.tar"):
        source.cache.open(source.path(2), SIZE, lambda file: None, wait_s=0.1)
    assert not drafts(tmp_path)
    os.close(held[0])
    assert read(source, 2) == CONTENT["/d/s-02.tar"]
    os.close(held[1])
    with pytest.raises(DataError, match="and the cache holds 1 KiB"):
        read(remote(served, tmp_path / "small", cache_bytes="1 KiB"))


def test_the_next_shards_are_fetched_meanwhile_in_the_order_told(
    served: Served, tmp_path: Path
) -> None:
    source = remote(served, tmp_path, ahead=2)
    source.expect([3, 1, 5, 0])
    assert wait_until(lambda: len(files(tmp_path)) == 2)
    read(source, 3)
    assert wait_until(
        lambda: [path.name for path in files(tmp_path)] == ["s-01.tar", "s-03.tar", "s-05.tar"]
    )
    in_a_row = remote(served, tmp_path / "b", ahead=2)
    read(in_a_row, 0)
    assert wait_until(lambda: len(files(tmp_path / "b")) == 3)


def wait_until(holds: Callable[[], bool]) -> bool:
    until_s = time.monotonic() + 5
    while not holds() and time.monotonic() < until_s:
        time.sleep(0.01)
    return holds()


# what breaks


def once(wrong: Callable[[Asked], int | bytes | None]) -> Callable[[Asked], int | bytes | None]:
    return lambda asked: wrong(asked) if asked.number == 1 else None


MENDED: dict[str, Callable[[Asked], int | bytes | None]] = {
    "cut at a random byte": once(
        lambda asked: asked.right[: random.Random(3).randrange(len(asked.right))]
    ),
    "cut before the first byte": once(lambda asked: b""),
    "500": once(lambda asked: 500),
    "503 three times": lambda asked: 503 if 1 <= asked.number <= 3 else None,
    "429": once(lambda asked: 429),
    "wrong bytes": once(lambda asked: bytes(len(asked.right))),
}


@pytest.mark.parametrize("what", MENDED)
@pytest.mark.parametrize("knows_ranges", [True, False])
def test_what_breaks_once_is_mended(
    what: str, knows_ranges: bool, served: Served, tmp_path: Path
) -> None:
    served.fault = MENDED[what]
    if not knows_ranges:
        served.knows_ranges, at_first = False, MENDED[what]
        served.fault = lambda asked: at_first(
            Asked(asked.path, asked.start, asked.right, asked.number + 1)
        )
    assert read(remote(served, tmp_path)) == CONTENT["/d/s-00.tar"]
    assert not drafts(tmp_path)


def test_a_broken_transfer_goes_on_where_it_ended(served: Served, tmp_path: Path) -> None:
    served.fault = lambda asked: asked.right[:100] if asked.number == 3 else None
    read(remote(served, tmp_path))
    starts = [asked.start for asked in served.gets("/d/s-00.tar")]
    assert starts == [0, 4096, 8192, 12288, *range(12288, SIZE, 4096)]


def test_a_server_that_stops_to_know_ranges_sends_what_is_missing(
    served: Served, tmp_path: Path
) -> None:
    def forget(asked: Asked) -> None:
        served.knows_ranges = asked.number < 1

    served.fault = forget  # type: ignore[assignment]
    assert read(remote(served, tmp_path)) == CONTENT["/d/s-00.tar"]
    assert len(served.gets("/d/s-00.tar")) == 3


def test_fewer_bytes_than_asked_for_are_no_piece(served: Served, tmp_path: Path) -> None:
    served.fault = lambda asked: Short(asked.right[:-1]) if asked.number == 2 else None
    assert read(remote(served, tmp_path)) == CONTENT["/d/s-00.tar"]
    assert [asked.start for asked in served.gets("/d/s-00.tar")][:4] == [0, 4096, 8192, 8192]
    served.fault = lambda asked: Short(b"")
    with pytest.raises(DataError, match="sent 0 bytes of 4,096"):
        read(remote(served, tmp_path), 1)


@pytest.mark.parametrize("cuts", range(8))
def test_cuts_at_random_bytes_leave_the_right_bytes(
    cuts: int, served: Served, tmp_path: Path
) -> None:
    draws = random.Random(cuts)
    served.fault = lambda asked: (
        asked.right[: draws.randrange(len(asked.right))] if draws.random() < 0.3 else None
    )
    assert (
        read(
            remote(
                served,
                tmp_path,
                patience=RetryPolicy(tries=12, first_wait_s=0.001, longest_wait_s=0.002),
            )
        )
        == CONTENT["/d/s-00.tar"]
    )


def test_a_digest_that_does_not_hold_twice_ends_it_and_nothing_is_kept(
    served: Served, tmp_path: Path
) -> None:
    served.files["/d/s-00.tar"] = bytes(SIZE)
    with pytest.raises(
        DataError, match=f"s-00.tar is not what it should be.*{DIGESTS['s-00.tar']} was expected"
    ):
        read(remote(served, tmp_path))
    assert sum(asked.start == 0 for asked in served.gets("/d/s-00.tar")) == 2  # fetched again once
    assert not files(tmp_path)
    assert not drafts(tmp_path)


@pytest.mark.parametrize("status", [400, 401, 403, 410])
def test_a_refusal_is_told_at_once(status: int, served: Served, tmp_path: Path) -> None:
    served.fault = lambda asked: status
    with pytest.raises(DataError, match=f"cannot be fetched: HTTP {status}"):
        read(remote(served, tmp_path))
    assert len(served.gets("/d/s-00.tar")) == 1


def test_what_is_not_there_is_told_at_once(served: Served, tmp_path: Path) -> None:
    del served.files["/d/s-00.tar"]
    with pytest.raises(DataError, match=r"s-00.tar cannot be fetched: .*404") as raised:
        read(remote(served, tmp_path, patience=RetryPolicy()))
    assert "tries" not in str(raised.value)


def test_a_server_that_stays_away_is_tried_and_told(tmp_path: Path) -> None:
    with serving({}) as gone:
        pass
    with pytest.raises(DataError, match="4 tries in 0 s ended with"):
        read(remote(gone, tmp_path))


def test_a_server_that_says_nothing_is_not_waited_for_forever(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:
        place = f"http://127.0.0.1:{silent.getsockname()[1]}/a.tar"
        source = Remote(
            place,
            cache=tmp_path,
            digests={},
            patience=RetryPolicy(tries=2, first_wait_s=0.01, request_s=0.2),
        )
        with pytest.raises(DataError, match="2 tries in"):
            source.open(0)


def test_a_full_disk_is_told_before_a_byte_is_fetched(
    served: Served, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*what: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "posix_fallocate", full)
    with pytest.raises(DataError, match=r"(?s)No space left on device.*free some space"):
        read(remote(served, tmp_path))
    assert not served.asked
    assert not drafts(tmp_path)


def test_a_cache_that_cannot_be_written_is_told(served: Served, tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"")
    with pytest.raises(DataError, match="the cache cannot keep"):
        remote(served, tmp_path / "file")


@pytest.mark.parametrize("damage", ["cut", "flipped", "of another size"])
def test_what_lies_damaged_in_the_cache_is_fetched_again_and_never_read(
    damage: str, served: Served, tmp_path: Path
) -> None:
    read(remote(served, tmp_path))
    place = files(tmp_path)[0]
    content = bytearray(CONTENT["/d/s-00.tar"])
    content[700] ^= 1
    damaged = {"cut": content[:-512], "flipped": content, "of another size": content + bytes(512)}[
        damage
    ]
    place.write_bytes(damaged)
    assert read(remote(served, tmp_path)) == CONTENT["/d/s-00.tar"]
    if damage != "flipped":  # the size tells it, where no digest is known
        place.write_bytes(damaged)
        assert read(remote(served, tmp_path, digests={})) == CONTENT["/d/s-00.tar"]


def test_a_copy_is_held_against_its_digest_once_by_a_process(
    served: Served, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    read(remote(served, tmp_path))
    of, hashed = shards._digest_of, []
    monkeypatch.setattr(
        shards, "_digest_of", lambda descriptor: hashed.append(descriptor) or of(descriptor)
    )
    source = remote(served, tmp_path)
    for _ in range(3):
        read(source)
    assert len(hashed) == 1


# digests


def test_digests_come_from_a_list_beside_the_shards(served: Served, tmp_path: Path) -> None:
    served.files["/d/SHA256SUMS"] = "".join(
        f"{digest}  {name}\n" for name, digest in DIGESTS.items()
    ).encode()
    assert remote(served, tmp_path, digests=None).listed == DIGESTS
    served.fault = lambda asked: bytes(len(asked.right)) if asked.path.endswith(".tar") else None
    with pytest.raises(DataError, match="is not what it should be"):
        read(remote(served, tmp_path, digests=None))
    served.fault = lambda asked: 500 if asked.path.endswith("SUMS") else None
    with pytest.raises(
        DataError, match="HTTP 500"
    ):  # a list that is not told is no list that is not there
        remote(served, tmp_path, digests=None)
    served.refuses = 503
    with pytest.raises(DataError, match="HTTP 503"):
        remote(served, tmp_path, digests=None)
    served.refuses = 403  # what a store says of what is not there, to those who may not list
    assert remote(served, tmp_path, digests=None).listed == {}


def test_without_a_list_the_first_fetch_is_what_holds(served: Served, tmp_path: Path) -> None:
    Tars(remote(served, tmp_path, digests=None), label="cls")
    served.files["/d/s-00.tar"] = make_tar(9)
    for path in files(tmp_path):
        path.unlink()
    source = Tars(remote(served, tmp_path, digests=None), label="cls")
    with pytest.raises(DataError, match="is not what it should be"):
        source.read(np.array([0]))


def test_a_listed_digest_wins_over_the_index(served: Served, tmp_path: Path) -> None:
    Tars(remote(served, tmp_path, digests=None), label="cls")
    served.files["/d/s-00.tar"] = new = make_tar(9, SAMPLES + 1)
    source = Tars(
        remote(served, tmp_path, digests={**DIGESTS, "s-00.tar": hashlib.sha256(new).hexdigest()}),
        label="cls",
    )
    assert len(source) == SHARDS * SAMPLES + 1
    assert source.read(np.array([0, SAMPLES + 1]))["label"].tolist() == [9 * (SAMPLES + 1), SAMPLES]
    assert len(served.gets("/d/s-01.tar")) == 5  # the others are known: they are not fetched again


def test_an_index_beside_the_shards_spares_the_first_pass(served: Served, tmp_path: Path) -> None:
    for path, content in CONTENT.items():
        (tmp_path / Path(path).name).write_bytes(content)
    index = open_index(sorted(tmp_path.glob("*.tar")), tmp_path, beside=True)
    served.files[f"/d/{index.place.name}"] = index.place.read_bytes()
    source = Tars(remote(served, tmp_path / "cache", digests=None), label="cls")
    assert len(source) == SHARDS * SAMPLES
    assert not [asked for asked in served.asked if asked.path.endswith(".tar")]
    assert source.read(np.array([9]))["label"].tolist() == [9]
    served.files[f"/d/{index.place.name}"] = index.place.read_bytes()[:-8]  # damaged: it is made
    assert (
        len(Tars(remote(served, tmp_path / "other", digests=None), label="cls")) == SHARDS * SAMPLES
    )


# several processes


def read_all(url: str, folder: Path, seed: int, most_bytes: int) -> None:
    source = Tars(Remote(url, cache=folder, cache_bytes=most_bytes, ahead=1), label="cls")
    for epoch in range(3):
        ids = np.random.default_rng((seed, epoch)).permutation(len(source))
        assert source.read(ids)["label"].tolist() == ids.tolist()


def reader(served: Served, folder: Path, seed: int) -> BaseProcess:
    """Another process that reads all in any order, through a cache of 4 shards."""
    process = get_context("fork").Process(
        target=read_all, args=(served.url + URL, folder, seed, 4 * SIZE)
    )
    process.start()
    return process


def test_processes_share_a_cache_that_holds_less_than_all(served: Served, tmp_path: Path) -> None:
    running = [reader(served, tmp_path, seed) for seed in range(3)]
    for one in running:
        one.join(300)
    assert [one.exitcode for one in running] == [0, 0, 0]
    assert sum(path.stat().st_size for path in files(tmp_path)) <= 4 * SIZE


class Slow(Cache):
    """A cache that waits between the list of its files and their sizes until `listed` ends."""

    listed: Callable[[], object] | None = None
    is_adding = False

    def _evict(self, size: int) -> int:
        self.is_adding = True
        return super()._evict(size)

    def _files(self) -> list[Path]:
        found = super()._files()
        if self.is_adding and self.listed is not None:
            self.listed()
        return found


def test_a_shard_that_is_named_while_the_bytes_are_added_up_counts(tmp_path: Path) -> None:
    mine, other = Slow(tmp_path, 2 * SIZE), Cache(tmp_path, 2 * SIZE)
    folder = tmp_path / "set"

    def fill(file: BinaryIO) -> None:
        file.write(bytes(SIZE))

    def fill_late(file: BinaryIO) -> None:
        drafted.set()
        assert ready.wait(60)
        fill(file)

    def let_it_be_named() -> None:
        ready.set()
        until_s = time.monotonic() + 0.5  # it may be named now, or wait for who adds up
        while not (folder / "b.tar").exists() and time.monotonic() < until_s:
            time.sleep(0.01)

    os.close(mine.open(folder / "a.tar", SIZE, fill))
    drafted, ready = threading.Event(), threading.Event()
    beside = threading.Thread(
        target=lambda: os.close(other.open(folder / "b.tar", SIZE, fill_late))
    )
    beside.start()
    assert drafted.wait(60)
    mine.listed, mine.is_adding = let_it_be_named, False
    os.close(mine.open(folder / "c.tar", SIZE, fill))
    beside.join()
    assert sum(path.stat().st_size for path in files(tmp_path)) <= 2 * SIZE


def test_a_killed_process_leaves_a_draft_that_the_next_removes(
    served: Served, tmp_path: Path
) -> None:
    go_on = threading.Event()
    served.fault = lambda asked: (
        500 if asked.path.endswith("02.tar") and asked.start and go_on.wait(30) else None
    )
    running = reader(served, tmp_path, 0)
    assert wait_until(lambda: len(served.gets("/d/s-02.tar")) == 2)
    running.kill()
    running.join()
    go_on.set()
    assert [path.name for path in drafts(tmp_path)] == [".draft-s-02.tar"]
    assert "s-02.tar" not in [path.name for path in files(tmp_path)]
    served.fault = lambda asked: None
    source = remote(served, tmp_path)
    assert not drafts(tmp_path)
    assert read(source, 2) == CONTENT["/d/s-02.tar"]


def test_threads_that_want_one_shard_fetch_it_once(served: Served, tmp_path: Path) -> None:
    source = remote(served, tmp_path)
    with ThreadPoolExecutor(8) as pool:
        assert set(pool.map(lambda _: read(source, 1), range(16))) == {CONTENT["/d/s-01.tar"]}
    assert sum(asked.start == 0 for asked in served.gets("/d/s-01.tar")) == 1


def test_another_process_opens_its_own(served: Served, tmp_path: Path) -> None:
    source = Tars(remote(served, tmp_path), label="cls")
    assert pickle.loads(pickle.dumps(source)).read(np.array([7]))["label"].tolist() == [7]


# a store


@pytest.fixture(scope="module")
def bucket() -> Iterator[str]:
    with serving_store("shards") as url:
        yield url


def test_a_store_gives_the_same_samples_and_refuses_what_is_not_there(
    bucket: str, tmp_path: Path
) -> None:
    fsspec = pytest.importorskip("fsspec")
    store = fsspec.filesystem("s3", skip_instance_cache=True)
    for path, content in CONTENT.items():
        store.pipe_file(f"shards{path}", content)
    source = Tars(
        Remote(bucket + URL, cache=tmp_path, cache_bytes=2 * SIZE, patience=QUICK), label="cls"
    )
    ids = np.random.default_rng(0).permutation(SHARDS * SAMPLES)
    assert source.read(ids)["label"].tolist() == ids.tolist()
    store.pipe_file("shards/d/s-03.tar", make_tar(9))
    for path in files(tmp_path):
        path.unlink()
    fresh = Tars(Remote(bucket + URL, cache=tmp_path, patience=QUICK), label="cls")
    with pytest.raises(DataError, match="is not what it should be"):
        fresh.read(np.array([3 * SAMPLES]))
    with pytest.raises(DataError, match=r"none/1\.tar cannot be fetched: FileNotFound") as raised:
        Tars(Remote(f"{bucket}/none/1.tar", cache=tmp_path), label="cls")
    assert "tries" not in str(raised.value)
