"""Messages hashed side by side have the digests that hashlib gives them.

Whatever their sizes and parts; and one lane too few is told.
"""

from __future__ import annotations

import ctypes
import hashlib
import os
import random
import subprocess
import sys
import zipfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from surefoot.contract import digest
from surefoot.core.errors import InputError
from surefoot.native import lanes

PROJECT = Path(__file__).parents[2]
EDGES = (0, 1, 55, 56, 63, 64, 65, 119, 120, 127, 128, 4096)
needs_lanes = pytest.mark.skipif(
    not lanes.num_lanes(), reason="hashlib is as fast on this processor, or there is no C compiler"
)


@needs_lanes
@pytest.mark.parametrize("seed", range(8))
def test_any_messages_in_any_parts(seed: int) -> None:
    chance = random.Random(seed)
    for _ in range(50):
        num = chance.randint(1, lanes.num_lanes())
        messages = [
            bytearray(chance.randbytes(chance.choice((*EDGES, chance.randint(0, 5000)))))
            for _ in range(num)
        ]
        side_by_side = lanes.Lanes(num)
        begun = [0] * num
        while any(start < len(message) for start, message in zip(begun, messages, strict=True)):
            stops = [start + chance.choice((0, 1, 63, 64, 640, 3000)) for start in begun]
            views = [
                memoryview(message)[start:stop]
                for message, start, stop in zip(messages, begun, stops, strict=True)
            ]
            side_by_side.update(
                [view.toreadonly() if chance.random() < 0.2 else view for view in views]
            )
            begun = stops
        assert side_by_side.digests() == [hashlib.sha256(message).digest() for message in messages]


@needs_lanes
@pytest.mark.parametrize("width", [8, 16])
def test_both_widths(width: int, monkeypatch: pytest.MonkeyPatch) -> None:
    if width > lanes.num_lanes():
        pytest.skip("this processor has no AVX-512")
    messages = [memoryview(bytearray(os.urandom(1000 + lane))) for lane in range(width)]
    side_by_side = lanes.Lanes(width)
    side_by_side._width = width
    side_by_side.update(messages)
    assert side_by_side.digests() == [hashlib.sha256(each).digest() for each in messages]


@pytest.mark.parametrize("num", [0, 17])
def test_more_messages_than_lanes_are_refused(num: int) -> None:
    with pytest.raises(
        InputError, match=rf"{num} messages to hash at once; this processor takes 1 to \d+"
    ):
        lanes.Lanes(num)


@needs_lanes
def test_a_library_that_disagrees_is_not_used(monkeypatch: pytest.MonkeyPatch) -> None:
    # what a compiler's error would look like
    monkeypatch.setattr(lanes, "INITIAL", (1, *lanes.INITIAL[1:]))
    lanes.num_lanes.cache_clear()
    try:
        assert lanes.num_lanes() == 0
    finally:
        monkeypatch.undo()
        lanes.num_lanes.cache_clear()


class Strange:
    """What ctypes makes of a library that is none of ours."""

    def __init__(self, **functions: object) -> None:
        self.__dict__.update(functions)


STRANGE = {
    "no functions": Strange(),
    "no update": Strange(num_lanes=lambda: 8),
    "more lanes than there are": Strange(num_lanes=lambda: 64, update=print),
    "less than none": Strange(num_lanes=lambda: -1, update=print),
}


@pytest.mark.parametrize("which", STRANGE)
def test_another_library_in_its_place_leaves_the_work_to_hashlib(
    which: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ctypes, "CDLL", lambda path: STRANGE[which])
    lanes._open.cache_clear()
    lanes.num_lanes.cache_clear()
    try:
        assert lanes.num_lanes() == 0
        with pytest.raises(InputError, match="this processor takes 1 to 0"):
            lanes.Lanes(8)
    finally:
        lanes._open.cache_clear()
        lanes.num_lanes.cache_clear()


@needs_lanes
def test_a_group_holds_what_fills_the_lanes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lanes, "num_lanes", lambda: 16)
    assert lanes.group_by_size([]) == []
    assert lanes.group_by_size([100]) == [[0]]
    assert lanes.group_by_size([100, 100]) == [[0], [1]]
    assert lanes.group_by_size([100] * 3) == [[0, 1, 2]]
    assert lanes.group_by_size([100] * 20) == [list(range(16)), list(range(16, 20))]
    assert lanes.group_by_size([10_000, *[100] * 5]) == [[0], [1, 2, 3, 4, 5]]
    monkeypatch.setattr(lanes, "num_lanes", lambda: 0)
    assert lanes.group_by_size([100, 200]) == [[1], [0]]


def test_digests_are_the_same_with_lanes_and_without(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    chance = random.Random(3)
    sizes = [
        0,
        5,
        70_001,
        300_000,
        300_000,
        digest.LANE_BYTES * 3 + 7,
        digest.CHUNK_BYTES + 999,
        64,
        *[1000] * 20,
    ]
    held = {str(i): memoryview(bytearray(chance.randbytes(size))) for i, size in enumerate(sizes)}
    wanted = {name: digest.digest_of_bytes(each) for name, each in held.items()}
    path = tmp_path / "all"
    path.write_bytes(b"x" * 24 + b"".join(held.values()))
    spans, start = {}, 24
    for name, each in held.items():
        spans[name], start = (start, start + len(each)), start + len(each)
    for num in {lanes.num_lanes(), 0}:
        monkeypatch.setattr(lanes, "num_lanes", lambda num=num: num)
        with ThreadPoolExecutor(2) as pool, path.open("rb") as file:
            assert digest.begin(pool, held).finish() == wanted
            assert digest.begin_read(pool, file.fileno(), spans).finish() == wanted
            into = {name: memoryview(bytearray(len(each))) for name, each in held.items()}
            digest.read_directly(file.fileno(), [digest.READ_BYTES])
            assert digest.begin_read(pool, file.fileno(), spans, into).finish() == wanted
            assert into == held


def build(folder: Path, **environment: str) -> tuple[Path, str]:
    done = subprocess.run(
        [
            sys.executable,
            "-m",
            "pip",
            "wheel",
            "--no-deps",
            "--no-build-isolation",
            "-w",
            folder,
            "-v",
            PROJECT,
        ],
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
        stdin=subprocess.DEVNULL,
        check=True,
    )
    (wheel,) = folder.glob("*.whl")
    return wheel, done.stdout + done.stderr


@pytest.mark.slow
@pytest.mark.skipif(not lanes.LIBRARY.exists(), reason="there is no C compiler")
def test_the_wheel_holds_the_library_and_says_for_which_machine(tmp_path: Path) -> None:
    wheel, _ = build(tmp_path)
    assert wheel.name.startswith("surefoot-0.1.0-py3-none-linux_")
    with zipfile.ZipFile(wheel) as file:
        name = "surefoot/native/_sha256.so"
        assert {name, "surefoot/native/sha256.c"} <= set(file.namelist())
        assert ctypes.CDLL(file.extract(name, tmp_path)).num_lanes() in (0, 8, 16)


def test_without_a_compiler_the_wheel_is_plain(tmp_path: Path) -> None:
    wheel, said = build(tmp_path, CC="no-such-compiler")
    assert wheel.name == "surefoot-0.1.0-py3-none-any.whl"
    assert "checkpoints will be hashed by hashlib alone" in said
    with zipfile.ZipFile(wheel) as file:
        assert "surefoot/native/_sha256.so" not in file.namelist()
