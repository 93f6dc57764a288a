"""Tests of remote shards.

What is trained on is what the digest says, whatever breaks on the way.
"""

from __future__ import annotations

import hashlib
import random
import socket
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest

from surefoot.components.data.remote.fetch import RetryPolicy
from surefoot.components.data.remote.shards import Remote
from surefoot.components.data.tars.index import open_index
from surefoot.components.data.tars.source import Tars
from surefoot.core.errors import DataError
from tests.components.remote_shards import (
    CONTENT,
    DIGESTS,
    QUICK,
    SAMPLES,
    SHARDS,
    SIZE,
    URL,
    drafts,
    files,
    make_tar,
    read,
    remote,
    served,
    small_pieces,
)
from tests.components.server import Asked, Served, Short, serving
from tests.components.store_server import serving_store

__all__ = ["served", "small_pieces"]  # fixtures


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
        DataError, match=f"s-00.tar has the SHA-256 .*{DIGESTS['s-00.tar']} was expected"
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
    with pytest.raises(DataError, match=r"4 tries in \d+ s ended with"):
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


def test_digests_come_from_a_list_beside_the_shards(served: Served, tmp_path: Path) -> None:
    served.files["/d/SHA256SUMS"] = "".join(
        f"{digest}  {name}\n" for name, digest in DIGESTS.items()
    ).encode()
    assert remote(served, tmp_path, digests=None).listed == DIGESTS
    served.fault = lambda asked: bytes(len(asked.right)) if asked.path.endswith(".tar") else None
    with pytest.raises(DataError, match="was expected"):
        read(remote(served, tmp_path, digests=None))
    served.fault = lambda asked: 500 if asked.path.endswith("SUMS") else None
    # a list that is not told is no list that is not there
    with pytest.raises(DataError, match="HTTP 500"):
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
    with pytest.raises(DataError, match="was expected"):
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
    with pytest.raises(DataError, match="was expected"):
        fresh.read(np.array([3 * SAMPLES]))
    with pytest.raises(DataError, match=r"none/1\.tar cannot be fetched: FileNotFound") as raised:
        Tars(Remote(f"{bucket}/none/1.tar", cache=tmp_path), label="cls")
    assert "tries" not in str(raised.value)
