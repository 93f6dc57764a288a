"""Tests of tar shards.

Every sample once and in order, and every bad shard refused with file, member and reason.
"""

from __future__ import annotations

import gzip
import io
import sys
import tarfile
import zipfile
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from surefoot.components.data.tars import decoders
from surefoot.components.data.tars.decoders import decode_class, decode_jpeg
from surefoot.components.data.tars.shards import Sample, find_shards, read_shard
from surefoot.core.errors import DataError, MissingExtra


def jpeg(width: int = 4, height: int = 4, mode: str = "RGB", kind: str = "JPEG") -> bytes:
    out = io.BytesIO()
    Image.new(mode, (width, height), 100).save(out, kind)
    return out.getvalue()


def write_tar(path: Path, members: list[tuple[str, bytes]]) -> Path:
    with tarfile.open(path, "w") as archive:
        for name, content in members:
            member = tarfile.TarInfo(name)
            member.size = len(content)
            archive.addfile(member, io.BytesIO(content))
    return path


THREE = [
    (f"{number:03d}.{extension}", content)
    for number in range(3)
    for extension, content in (("cls", b"%d" % number), ("jpg", b"x" * 700))
]


def test_a_shard_gives_each_sample_once_in_the_order_written(tmp_path: Path) -> None:
    path = write_tar(
        tmp_path / "a.tar", [("b/2.jpg", b"1"), ("b/2.seg.png", b"2"), ("1.cls", b"3")]
    )
    assert list(read_shard(path)) == [
        Sample(path, "b/2", {"jpg": b"1", "seg.png": b"2"}),
        Sample(path, "1", {"cls": b"3"}),
    ]


def test_a_shard_cut_anywhere_before_its_end_marker_is_refused(tmp_path: Path) -> None:
    whole = write_tar(tmp_path / "whole.tar", THREE).read_bytes()
    # six headers, three blocks of labels, three times two blocks of images
    end = 512 * (2 * 3 + 3 + 2 * 3)
    cut = tmp_path / "cut.tar"
    for length in range(0, end + 512, 128):
        cut.write_bytes(whole[:length])
        with pytest.raises(DataError, match=r"cut\.tar"):
            list(read_shard(cut))
    cut.write_bytes(whole[: end + 512])
    assert len(list(read_shard(cut))) == 3


def test_a_damaged_header_in_the_middle_is_refused_not_taken_for_the_end(tmp_path: Path) -> None:
    content = bytearray(write_tar(tmp_path / "a.tar", THREE).read_bytes())
    content[1024:1030] = b"######"  # the second member's name, so that its checksum fails
    (tmp_path / "a.tar").write_bytes(content)
    with pytest.raises(DataError, match=r"a\.tar is damaged: no member begins at byte 1024"):
        list(read_shard(tmp_path / "a.tar"))


def as_zip(path: Path) -> None:
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("000.cls", "1")


@pytest.mark.parametrize(
    "write",
    [
        lambda path: path.write_bytes(gzip.compress(write_tar(path, THREE).read_bytes())),
        as_zip,
        lambda path: path.write_text("no tar at all\n" * 100),
        lambda path: path.write_bytes(b""),
    ],
    ids=["gzip", "zip", "text", "empty"],
)
def test_a_file_of_another_format_is_no_tar(
    tmp_path: Path, write: Callable[[Path], object]
) -> None:
    write(tmp_path / "a.tar")
    with pytest.raises(DataError, match=r"a\.tar is not a tar"):
        list(read_shard(tmp_path / "a.tar"))


def test_an_empty_tar_holds_no_sample(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"no sample|not a tar|end marker"):
        list(read_shard(write_tar(tmp_path / "a.tar", [])))


@pytest.mark.parametrize(
    "kind",
    [
        tarfile.SYMTYPE,
        tarfile.LNKTYPE,
        tarfile.DIRTYPE,
        tarfile.CHRTYPE,
        tarfile.FIFOTYPE,
        tarfile.GNUTYPE_SPARSE,
    ],
)
def test_what_is_no_regular_file_is_refused(tmp_path: Path, kind: bytes) -> None:
    with tarfile.open(tmp_path / "a.tar", "w", format=tarfile.GNU_FORMAT) as archive:
        member = tarfile.TarInfo("000.jpg")
        member.type, member.linkname = kind, "/etc/passwd"
        archive.addfile(member)
    with pytest.raises(DataError, match=r"'000\.jpg' is not a regular file"):
        list(read_shard(tmp_path / "a.tar"))


@pytest.mark.parametrize(
    "name",
    [
        "../000.jpg",
        "/tmp/000.jpg",
        "a/../../000.jpg",
        "a//0.jpg",
        ".hidden.jpg",
        "pipe:cat.jpg",
        "a b.jpg",
        "0" * 129,
    ],
)
def test_a_name_that_is_not_plain_is_refused(tmp_path: Path, name: str) -> None:
    with pytest.raises(DataError, match="is not a plain name"):
        list(read_shard(write_tar(tmp_path / "a.tar", [(name, b"x")])))


def test_a_member_over_the_size_limit_is_refused_before_it_is_read(tmp_path: Path) -> None:
    path = write_tar(tmp_path / "a.tar", [("0.jpg", b"x" * 100)])
    # the header claims 8 GiB: reading first would say that it is truncated
    with path.open("r+b") as file:
        member = tarfile.TarInfo("0.jpg")
        member.size = 8 << 30
        file.write(member.tobuf(tarfile.GNU_FORMAT))
    with pytest.raises(
        DataError, match=r"0\.jpg has 8,589,934,592 bytes, and at most 1,000 are allowed"
    ):
        list(read_shard(path, max_member_bytes=1000))


@pytest.mark.parametrize(
    ("members", "reason"),
    [
        ([("0.jpg", b"x"), ("0.jpg", b"y")], r"0\.jpg occurs twice"),
        (
            [("0.cls", b"1"), ("0.jpg", b"x"), ("1.cls", b"x"), ("1.jpg", b"x"), ("0.png", b"1")],
            r"0\.png belongs to 0, whose members are not consecutive",
        ),
        (
            [("0.cls", b"1"), ("0.jpg", b"x"), ("1.jpg", b"x")],
            r"1\.cls is missing; the sample has jpg",
        ),
        ([("0.jpg", b"x"), ("1.cls", b"1"), ("1.jpg", b"x")], r"0\.cls is missing"),
    ],
)
def test_a_sample_that_comes_twice_or_lacks_a_part_is_refused(
    tmp_path: Path, members: list[tuple[str, bytes]], reason: str
) -> None:
    with pytest.raises(DataError, match=reason):
        list(read_shard(write_tar(tmp_path / "a.tar", members), needs=("jpg", "cls")))


def test_shards_are_found_in_their_own_folder_or_below_its_parent_sorted_by_name(
    tmp_path: Path,
) -> None:
    home = tmp_path / "some-set"
    home.mkdir()
    for name in ("train-1.tar", "train-0.tar", "test-0.tar", "train-0.tar.part"):
        (home / name).touch()
    for folder in (home, tmp_path):
        assert [path.name for path in find_shards(folder, "train-*.tar", home="some-set")] == [
            "train-0.tar",
            "train-1.tar",
        ]


def test_a_folder_that_is_missing_or_empty_or_a_file_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    (tmp_path / "empty").mkdir()
    for name, reason in (
        ("gone", "gone is missing"),
        ("file", "file is not a folder"),
        ("empty", r"empty contains no train-\*\.tar"),
    ):
        with pytest.raises(DataError, match=reason) as caught:
            find_shards(tmp_path / name, "train-*.tar", home="some-set")
        assert "--data DIR" in str(caught.value)
    with pytest.raises(DataError, match="not given"):
        find_shards(None, "train-*.tar", home="some-set")


def test_a_folder_or_shard_that_may_not_be_read_is_named(tmp_path: Path) -> None:
    shard, folder = write_tar(tmp_path / "a.tar", THREE), tmp_path / "closed"
    folder.mkdir()
    shard.chmod(0)
    folder.chmod(0)
    try:
        if _may_read(shard):
            pytest.skip("this user may read everything")
        with pytest.raises(DataError, match=r"a\.tar cannot be read: Permission denied"):
            list(read_shard(shard))
        with pytest.raises(DataError, match="closed cannot be read: Permission denied"):
            find_shards(folder, "train-*.tar", home="some-set")
    finally:
        folder.chmod(0o700)


def _may_read(path: Path) -> bool:
    try:
        path.read_bytes()
    except PermissionError:
        return False
    return True


def test_a_jpeg_is_decoded_to_rows_of_red_green_blue() -> None:
    sample = Sample(Path("a.tar"), "0", {"jpg": jpeg(6, 4), "grey": jpeg(6, 4, "L")})
    pixels = decode_jpeg(sample, height=4, width=6)
    assert (pixels.shape, pixels.dtype) == ((4, 6, 3), np.uint8)
    assert decode_jpeg(sample, height=4, width=6, extension="grey").shape == (4, 6, 3)


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        (jpeg(5, 4), "is an image of 5 x 4 pixels, not 4 x 4"),
        (jpeg()[:-10], "is a damaged JPEG: image file is truncated"),
        (jpeg()[:-200], "is a damaged JPEG"),
        (b"not an image", "is not an image of the formats JPEG, PNG, WEBP"),
        (b"", "is not an image of the formats JPEG, PNG, WEBP"),
        (jpeg(kind="GIF"), "is not an image of the formats JPEG, PNG, WEBP"),
    ],
)
def test_a_broken_or_wrong_image_is_refused_with_file_and_member(
    content: bytes, reason: str
) -> None:
    with pytest.raises(DataError, match=rf"^a\.tar: 7\.jpg {reason}"):
        decode_jpeg(Sample(Path("a.tar"), "7", {"jpg": content}), height=4, width=4)


def test_without_pillow_the_extra_that_brings_it_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    sample = Sample(Path("a.tar"), "0", {"jpg": jpeg()})
    monkeypatch.setitem(sys.modules, "PIL", None)
    # as in a process that has not looked for it yet
    monkeypatch.setattr(decoders, "_pillow", decoders._pillow.__wrapped__)
    with pytest.raises(MissingExtra, match=r"surefoot\[images\]"):
        decode_jpeg(sample, height=4, width=4)


def test_a_class_is_a_whole_number_below_the_number_of_classes() -> None:
    assert [
        decode_class(Sample(Path("a.tar"), "0", {"cls": text}), num_classes=10)
        for text in (b"0", b"9", b" 3\n")
    ] == [0, 9, 3]
    for text in (b"10", b"-1", b"3.0", b"cat", b"", b"9" * 5000, b"\xff", "٣".encode()):
        with pytest.raises(DataError, match=r"^a\.tar: 0\.cls is"):
            decode_class(Sample(Path("a.tar"), "0", {"cls": text}), num_classes=10)
