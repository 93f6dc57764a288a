"""A file written past the page cache holds the bytes in their order, of any length.

Also where direct writes are refused.
"""

import errno
import os
from pathlib import Path

import pytest

from surefoot.components.checkpoint import direct

LENGTHS = (
    (0,),
    (1,),
    (4095,),
    (4096,),
    (4097,),
    (100, 0, 5000, 1),
    (direct.BUFFER_BYTES,),
    (direct.BUFFER_BYTES - 1, 2, 4096),
    (3 * direct.BUFFER_BYTES + 7, 9),
)


def parts_of(lengths: tuple[int, ...]) -> list[bytes]:
    return [os.urandom(length) for length in lengths]


@pytest.mark.parametrize("lengths", LENGTHS, ids=str)
def test_the_bytes_arrive_in_their_order(tmp_path: Path, lengths: tuple[int, ...]) -> None:
    parts = parts_of(lengths)
    direct.write_new(tmp_path / "file", map(memoryview, parts))
    assert (tmp_path / "file").read_bytes() == b"".join(parts)


def test_a_system_that_refuses_to_open_directly_gets_the_same_bytes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = os.open

    def refusing(path: Path, flags: int, mode: int = 0o777) -> int:
        if flags & direct.DIRECT:
            raise OSError(errno.EINVAL, "no direct writes here")
        return real(path, flags, mode)

    monkeypatch.setattr(os, "open", refusing)
    parts = parts_of((5000, 70000))
    direct.write_new(tmp_path / "file", map(memoryview, parts))
    assert (tmp_path / "file").read_bytes() == b"".join(parts)


def test_a_disk_with_larger_blocks_gets_the_same_bytes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # so that a direct write is asked for which no disk takes
    monkeypatch.setattr(direct, "BLOCK_BYTES", 1)
    parts = parts_of((5001,))
    direct.write_new(tmp_path / "file", map(memoryview, parts))
    assert (tmp_path / "file").read_bytes() == b"".join(parts)


def test_a_file_that_is_there_is_not_written_over(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("kept")
    with pytest.raises(FileExistsError):
        direct.write_new(tmp_path / "file", [memoryview(b"other")])
    assert (tmp_path / "file").read_text() == "kept"
