"""Bytes read past the page cache are those of the file, wherever they begin and end.

Also where the system has only the cache.
"""

from __future__ import annotations

import fcntl
import os
import tempfile
from pathlib import Path

import numpy as np
import pytest

from surefoot.contract import commits, digest
from surefoot.contract.manifest import Entry
from surefoot.core.errors import RunFolderError

NUM_BYTES = 2 * digest.READ_BYTES + 12345
DATA = np.random.default_rng(0).bytes(NUM_BYTES)
MEMORY = Path("/dev/shm")  # a file system without direct reads on older systems


@pytest.fixture(params=["disk", "memory"])
def descriptor(request: pytest.FixtureRequest, tmp_path: Path):  # type: ignore[no-untyped-def]
    if request.param == "memory" and not os.access(MEMORY, os.W_OK):
        pytest.skip("no file system in memory")
    with tempfile.NamedTemporaryFile(dir=MEMORY if request.param == "memory" else tmp_path) as file:
        file.write(DATA)
        file.flush()
        yield file.fileno()


def read(descriptor: int, start: int, num_bytes: int) -> bytes:
    return b"".join(
        bytes(window)
        for window in digest.windows(
            descriptor, start, num_bytes, digest.make_room(digest.READ_BYTES)
        )
    )


@pytest.mark.parametrize("start", [0, 1, 4095, 4096, digest.READ_BYTES - 1, NUM_BYTES - 1])
@pytest.mark.parametrize("num_bytes", [0, 1, 4097, digest.READ_BYTES, NUM_BYTES])
def test_any_part_of_a_file_is_read(descriptor: int, start: int, num_bytes: int) -> None:
    num_bytes = min(num_bytes, NUM_BYTES - start)
    digest.read_directly(descriptor, [digest.READ_BYTES])
    assert read(descriptor, start, num_bytes) == DATA[start : start + num_bytes]


def test_a_file_that_ends_early_is_told(descriptor: int) -> None:
    digest.read_directly(descriptor, [digest.READ_BYTES])
    with pytest.raises(RunFolderError, match="the file is 1 bytes too short"):
        read(descriptor, NUM_BYTES - 5, 6)
    with pytest.raises(RunFolderError, match="the file is 100 bytes too short"):
        read(descriptor, NUM_BYTES + 9000, 100)


def test_large_parts_are_read_into_huge_pages_where_the_system_has_them() -> None:
    """Into pages of 4 KiB a direct read takes up to twice as long."""
    setting = Path("/sys/kernel/mm/transparent_hugepage/enabled")
    if not setting.is_file() or "[never]" in setting.read_text():
        pytest.skip("this system has no huge pages")
    room = digest.make_room(2 * digest.READ_BYTES)
    held_before = held_in_huge_pages()
    room[:: digest.BLOCK_BYTES] = bytes(len(room[:: digest.BLOCK_BYTES]))
    assert held_in_huge_pages() > held_before


def held_in_huge_pages() -> int:
    return sum(
        int(line.split()[1])
        for line in Path("/proc/self/smaps_rollup").read_text().splitlines()
        if "AnonHuge" in line
    )


def test_small_parts_come_through_the_cache(descriptor: int) -> None:
    digest.read_directly(descriptor, [digest.LARGE_BYTES, 8])
    assert not fcntl.fcntl(descriptor, fcntl.F_GETFL) & digest.DIRECT


def test_a_file_that_is_cut_while_it_is_read_is_named(tmp_path: Path) -> None:
    (tmp_path / "state.json").write_bytes(bytes(5000))
    entry = Entry(name="state.json", num_bytes=5000, sha256="")
    with (
        pytest.raises(RunFolderError, match=r"state\.json: the file is 4900 bytes too short"),
        commits.open_file(tmp_path, entry) as file,
        commits.hashing() as pool,
    ):
        os.truncate(tmp_path / "state.json", 100)
        digest.begin_read(pool, file, {"state.json": (0, 5000)}).finish()
