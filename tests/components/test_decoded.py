"""A set is decoded once, opened at once, and never opened damaged."""

from __future__ import annotations

import os
import shutil
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from surefoot.components.data.decoded import DecodedArrays, open_decoded
from surefoot.core.errors import DataError


class Halves:
    """Decodes a file into its bytes and their halves, and counts how often it was asked."""

    def __init__(self) -> None:
        self.asked: list[str] = []

    def __call__(self, shard: Path) -> dict[str, np.ndarray]:
        self.asked.append(shard.name)
        content = np.frombuffer(shard.read_bytes(), dtype=np.uint8)
        return {"bytes": content.reshape(-1, 2), "halves": content[::2] / 2}


@pytest.fixture
def shards(tmp_path: Path) -> list[Path]:
    folder = tmp_path / "set"
    folder.mkdir()
    for number in range(3):
        (folder / f"{number}.tar").write_bytes(bytes(range(number, number + 10)))
    return sorted(folder.iterdir())


def opened(
    shards: list[Path], cache: Path, decode: Halves, decoder: str = "halves 1"
) -> DecodedArrays:
    return open_decoded(shards, cache, decoder=decoder, decode=decode)


def test_the_second_opening_decodes_nothing_and_gives_the_same_rows(
    tmp_path: Path, shards: list[Path]
) -> None:
    decode = Halves()
    first, second = (opened(shards, tmp_path / "cache", decode) for _ in range(2))
    assert decode.asked == ["0.tar", "1.tar", "2.tar"]
    assert first.digest == second.digest
    expected = np.concatenate(
        [np.frombuffer(shard.read_bytes(), dtype=np.uint8).reshape(-1, 2) for shard in shards]
    )
    assert np.array_equal(second.arrays["bytes"], expected)
    assert np.array_equal(second.arrays["halves"], expected[:, 0] / 2)


def test_a_copy_of_the_shards_opens_the_same_set(tmp_path: Path, shards: list[Path]) -> None:
    decode = Halves()
    first = opened(shards, tmp_path / "cache", decode)
    shutil.copytree(shards[0].parent, tmp_path / "copy")
    second = opened(sorted((tmp_path / "copy").iterdir()), tmp_path / "cache", decode)
    assert len(decode.asked) == 3
    assert first.digest == second.digest


def test_a_shard_with_other_content_is_decoded_even_with_its_old_size_and_time(
    tmp_path: Path, shards: list[Path]
) -> None:
    decode = Halves()
    first = opened(shards, tmp_path / "cache", decode)
    times = shards[1].stat()
    shards[1].write_bytes(bytes(10))
    os.utime(shards[1], ns=(times.st_atime_ns, times.st_mtime_ns))
    second = opened(shards, tmp_path / "cache", decode)
    assert len(decode.asked) == 6
    assert first.digest != second.digest


def test_another_decoder_does_not_get_the_old_pixels(tmp_path: Path, shards: list[Path]) -> None:
    decode = Halves()
    for decoder in ("halves 1", "halves 2"):
        opened(shards, tmp_path / "cache", decode, decoder)
    assert len(decode.asked) == 6


def flip_a_bit(folder: Path) -> None:
    content = bytearray((folder / "halves").read_bytes())
    content[17] ^= 1
    (folder / "halves").write_bytes(content)


@pytest.mark.parametrize(
    "damage",
    [
        flip_a_bit,
        lambda folder: os.truncate(folder / "bytes", 8),
        lambda folder: (folder / "bytes").unlink(),
        lambda folder: (folder / "manifest.json").write_text('{"format": 1, "arrays": {'),
        lambda folder: (folder / "manifest.json").unlink(),
    ],
    ids=["bit flip", "truncated", "missing", "torn manifest", "no manifest"],
)
def test_a_damaged_set_is_decoded_again(
    tmp_path: Path, shards: list[Path], damage: Callable[[Path], object]
) -> None:
    decode = Halves()
    first = opened(shards, tmp_path / "cache", decode)
    rows = {name: array.copy() for name, array in first.arrays.items()}
    (folder,) = (tmp_path / "cache").iterdir()
    damage(folder)
    second = opened(shards, tmp_path / "cache", decode)
    assert len(decode.asked) == 6
    assert second.digest == first.digest
    assert all(np.array_equal(second.arrays[name], rows[name]) for name in rows)


def test_what_is_written_into_an_array_never_reaches_the_disk(
    tmp_path: Path, shards: list[Path]
) -> None:
    decode = Halves()
    opened(shards, tmp_path / "cache", decode).arrays["bytes"][:] = 99
    assert opened(shards, tmp_path / "cache", decode).arrays["bytes"][0].tolist() == [0, 1]
    assert len(decode.asked) == 3


def test_a_decoder_that_fails_leaves_nothing_in_the_cache(
    tmp_path: Path, shards: list[Path]
) -> None:
    def fail_at_the_last(shard: Path) -> dict[str, np.ndarray]:
        if shard.name == "2.tar":
            raise DataError("2.tar is broken")
        return {"bytes": np.zeros(4)}

    with pytest.raises(DataError, match=r"2\.tar is broken"):
        open_decoded(shards, tmp_path / "cache", decoder="failing 1", decode=fail_at_the_last)
    assert list((tmp_path / "cache").iterdir()) == []


def test_drafts_of_processes_that_died_are_ignored_and_removed_after_a_day(
    tmp_path: Path, shards: list[Path]
) -> None:
    decode = Halves()
    opened(shards, tmp_path / "cache", decode)
    (done,) = (tmp_path / "cache").iterdir()
    old, young = tmp_path / "cache" / ".draft-old", tmp_path / "cache" / ".draft-young"
    for draft in (old, young):
        shutil.copytree(done, draft)
    long_ago = time.time() - 25 * 3600
    os.utime(old, (long_ago, long_ago))
    shutil.rmtree(done)
    opened(shards, tmp_path / "cache", decode)
    assert len(decode.asked) == 6
    assert young.is_dir()
    assert not old.exists()


def test_a_cache_that_cannot_be_written_is_named_with_the_way_out(
    tmp_path: Path, shards: list[Path]
) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(DataError, match=r"the cache .*file/below cannot be written") as caught:
        opened(shards, tmp_path / "file" / "below", Halves())
    assert "task.cache" in str(caught.value)
