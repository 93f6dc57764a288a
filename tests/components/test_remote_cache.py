"""Tests of the cache of remote shards.

It keeps its bound, never gives what is damaged, and is shared by threads and processes.
"""

from __future__ import annotations

import os
import pickle
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from multiprocessing import get_context
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import BinaryIO

import numpy as np
import pytest

from surefoot.components.data.remote import shards
from surefoot.components.data.remote.cache import Cache
from surefoot.components.data.remote.shards import Remote
from surefoot.components.data.tars.source import Tars
from surefoot.core.errors import DataError
from tests.components.remote_shards import (
    CONTENT,
    SAMPLES,
    SHARDS,
    SIZE,
    URL,
    drafts,
    files,
    read,
    remote,
    served,
    small_pieces,
    wait_until,
)
from tests.components.server import Served

__all__ = ["served", "small_pieces"]  # fixtures


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
    with pytest.raises(DataError, match=r"has no space for s-02\.tar"):
        source.cache.open(source.path(2), SIZE, lambda file: None, wait_s=0.1)
    assert not drafts(tmp_path)
    os.close(held[0])
    assert read(source, 2) == CONTENT["/d/s-02.tar"]
    os.close(held[1])
    with pytest.raises(DataError, match="but the size of the cache is 1 KiB"):
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
    with pytest.raises(DataError, match="the cache cannot store"):
        remote(served, tmp_path / "file")


@pytest.mark.parametrize("damage", ["cut", "flipped", "of a different size"])
def test_what_lies_damaged_in_the_cache_is_fetched_again_and_never_read(
    damage: str, served: Served, tmp_path: Path
) -> None:
    read(remote(served, tmp_path))
    place = files(tmp_path)[0]
    content = bytearray(CONTENT["/d/s-00.tar"])
    content[700] ^= 1
    damaged = {
        "cut": content[:-512],
        "flipped": content,
        "of a different size": content + bytes(512),
    }[damage]
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
