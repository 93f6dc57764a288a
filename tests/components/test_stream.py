"""Tars read forwards: every sample once, from pipes and from far, gone on with by reading again."""

from __future__ import annotations

import io
import os
import pickle
import tarfile
import threading
from collections.abc import Callable
from pathlib import Path
from typing import BinaryIO

import numpy as np
import pytest

from surefoot.components.data.blocks import BlockShuffle
from surefoot.components.data.remote.shards import Remote
from surefoot.components.data.tars.shards import read_spans
from surefoot.components.data.tars.stream import TarStream
from surefoot.core.errors import DataError
from tests.components.remote_shards import QUICK, make_tar
from tests.components.server import serving

SHARDS, SAMPLES = 5, 8
TARS = [make_tar(shard, SAMPLES) for shard in range(SHARDS)]
COUNTS = [SAMPLES] * SHARDS


class Forwards(io.RawIOBase):
    """A stream that cannot be sought, and gives few bytes at a time, as a socket does."""

    def __init__(self, content: bytes, most: int = 1000) -> None:
        self._inner, self._most = io.BytesIO(content), most

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: memoryview) -> int:  # type: ignore[override]
        return self._inner.readinto(memoryview(buffer)[: self._most])


class Counted:
    """Openers of the tars that count how often each was opened."""

    def __init__(self, most: int = 1000) -> None:
        self.opened = [0] * SHARDS
        self.openers: list[Callable[[], BinaryIO]] = [
            self._opener(number, most) for number in range(SHARDS)
        ]

    def _opener(self, number: int, most: int) -> Callable[[], BinaryIO]:
        def opens() -> BinaryIO:
            self.opened[number] += 1
            return Forwards(TARS[number], most)  # type: ignore[return-value]

        return opens


def labels(source: TarStream, ids: np.ndarray, batch: int = 3) -> list[int]:
    read = [source.read(ids[start : start + batch])["label"] for start in range(0, len(ids), batch)]
    return [int(number) for batch_of in read for number in batch_of]


@pytest.mark.parametrize("most", [1, 700, 1 << 20])
def test_samples_in_a_row_come_once_and_each_shard_is_opened_once(most: int) -> None:
    counted = Counted(most)
    source = TarStream(counted.openers, COUNTS, label="cls")
    assert source.guarantee == "replayed"
    assert labels(source, np.arange(40)) == list(range(40))
    assert counted.opened == [1] * SHARDS
    assert labels(source, np.arange(40)) == list(range(40))  # another epoch
    assert counted.opened == [2] * SHARDS


def test_an_order_by_blocks_needs_no_shard_twice() -> None:
    counted = Counted()
    ids = BlockShuffle(COUNTS, key=3, window=2)(np.arange(40))
    source = TarStream(counted.openers, COUNTS, window=2, label="cls")
    assert labels(source, ids) == ids.tolist()
    assert counted.opened == [1] * SHARDS
    assert not source._reading  # nothing waits


def test_any_order_is_right_though_shards_are_read_again() -> None:
    counted = Counted()
    ids = np.random.default_rng(0).permutation(40)
    assert labels(TarStream(counted.openers, COUNTS, label="cls"), ids) == ids.tolist()
    assert min(counted.opened) > 1


def test_to_go_on_in_the_middle_only_the_shard_there_is_read_again() -> None:
    counted = Counted()
    assert labels(TarStream(counted.openers, COUNTS, label="cls"), np.arange(19, 40)) == list(
        range(19, 40)
    )
    assert counted.opened == [0, 0, 1, 1, 1]


@pytest.mark.parametrize("parts", [1, 2, 3, 5])
def test_parts_hold_every_sample_once(parts: int) -> None:
    source = TarStream(Counted().openers, COUNTS, label="cls")
    found = [source.part(part, parts) for part in range(parts)]
    assert sum(len(each) for each in found) == 40
    assert sorted(
        number for each in found for number in labels(each, np.arange(len(each)))
    ) == list(range(40))


def test_a_pipe_is_read_once_and_heard_out() -> None:
    far, near = os.pipe()

    def write() -> None:
        with os.fdopen(near, "wb") as out:
            out.write(TARS[0] + bytes(1 << 18))

    writer = threading.Thread(target=write)
    writer.start()
    source = TarStream([os.fdopen(far, "rb")], [SAMPLES], label="cls")
    assert labels(source, np.arange(SAMPLES)) == list(range(SAMPLES))
    writer.join(120)
    assert not writer.is_alive()
    with pytest.raises(
        DataError, match="a file object that can be read only once was requested again"
    ):
        source.read(np.array([0]))


def test_remote_shards_are_streamed_without_a_cache_and_a_wrong_digest_ends_it(
    tmp_path: Path,
) -> None:
    with serving({f"/{number}.tar": content for number, content in enumerate(TARS)}) as served:
        far = Remote(f"{served.url}/{{0..4}}.tar", cache=tmp_path, digests={}, patience=QUICK)
        source = TarStream(far, COUNTS, label="cls")
        served.fault = lambda asked: asked.right[:50] if asked.number == 0 else None
        assert labels(source, np.arange(40)) == list(range(40))
        assert not list(tmp_path.rglob("*.tar"))
        checked = Remote(
            f"{served.url}/0.tar", cache=tmp_path, digests={"0.tar": "0" * 64}, patience=QUICK
        )
        with pytest.raises(DataError, match="has the SHA-256"):
            labels(TarStream(checked, [SAMPLES], label="cls"), np.arange(SAMPLES))


def test_another_process_opens_its_own(tmp_path: Path) -> None:
    (tmp_path / "a.tar").write_bytes(TARS[0])
    source = TarStream([tmp_path / "a.tar"], [SAMPLES], label="cls")
    source.read(np.array([0]))
    assert labels(pickle.loads(pickle.dumps(source)), np.arange(SAMPLES)) == list(range(SAMPLES))


DAMAGED = {
    "cut in a member": (TARS[0][:2000], "unexpected end of data|truncated|is damaged"),
    "cut between members": (
        TARS[0][: SAMPLES * 6 * 512 // 2],
        "truncated|ended after|unexpected end",
    ),
    "no end marker": (
        TARS[0].rstrip(b"\0") + bytes(-len(TARS[0].rstrip(b"\0")) % 512),
        "it has no end marker",
    ),
    "no tar": (b"x" * 4096, "is not a tar"),
    "empty": (b"", "is not a tar"),
}


@pytest.mark.parametrize("what", DAMAGED)
def test_what_is_damaged_ends_it_by_name(what: str) -> None:
    content, says = DAMAGED[what]
    with pytest.raises(DataError, match=f"stream-0.*({says})"):
        labels(TarStream([Forwards(content)], [SAMPLES], label="cls"), np.arange(SAMPLES))  # type: ignore[list-item]


@pytest.mark.parametrize("count", [7, 9])
def test_another_number_of_samples_than_counted_is_told(count: int) -> None:
    says = "contains more than 7 samples" if count == 7 else "ended after 8 samples of 9"
    with pytest.raises(DataError, match=says):
        labels(TarStream([Forwards(TARS[0])], [count], label="cls"), np.arange(count))  # type: ignore[list-item]


def test_what_cannot_be_is_told() -> None:
    source = TarStream(Counted().openers, COUNTS, label="cls")
    for make, says in (
        (lambda: TarStream([], [], label="cls"), "a TarStream of .* is not possible"),
        (
            lambda: TarStream(Counted().openers, [1], label="cls"),
            "a TarStream of .* is not possible",
        ),
        (lambda: TarStream(Counted().openers, COUNTS), "a TarStream of .* is not possible"),
        (lambda: source.part(0, 6), "part 0 of 6 is not possible with 5 shards"),
        (lambda: source.read(np.array([40])), "sample 40 was requested"),
        (
            lambda: TarStream([Path("none.tar")], [1], label="cls").read(np.array([0])),
            "none.tar cannot be",
        ),
    ):
        with pytest.raises(DataError, match=says):
            make()


@pytest.mark.parametrize("kind", [tarfile.USTAR_FORMAT, tarfile.GNU_FORMAT, tarfile.PAX_FORMAT])
def test_a_stream_is_read_as_a_file_is(kind: int, tmp_path: Path) -> None:
    path = tmp_path / "a.tar"
    with tarfile.open(path, "w", format=kind) as archive:
        for number in range(30):
            member = tarfile.TarInfo(
                f"{'folder/' * (number % 20)}{number}.{'x' * (number * 3 + 1)}"
            )
            member.size, member.mtime = 777 * number, 0.5
            archive.addfile(member, io.BytesIO(bytes([number]) * member.size))
    as_file = [(sample.key, sample.parts, start, stop) for sample, start, stop in read_spans(path)]
    as_stream = [
        (s.key, s.parts, start, stop)
        for s, start, stop in read_spans(path, file=Forwards(path.read_bytes()))
    ]  # type: ignore[arg-type]
    assert as_file == as_stream
