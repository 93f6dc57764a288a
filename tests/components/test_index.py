"""Tests of tars by an index of offsets.

The same samples as reading member by member, made once, and made again where a shard has changed.
"""

from __future__ import annotations

import io
import json
import os
import tarfile
from pathlib import Path

import numpy as np
import pytest

from surefoot.components.data.tars.index import open_index
from surefoot.components.data.tars.shards import find_starts, read_shard, read_spans
from surefoot.components.data.tars.source import is_ignorable_pax, read_sample
from surefoot.core.errors import DataError

MEMBERS = [
    (f"{folder}{number:04d}.{extension}", bytes([number % 256]) * size)
    for number, folder in enumerate(["", "a/", "a/b-c/"] * 7)
    for extension, size in (("jpg", 37 * number), ("cls", 1), ("seg.png", 512))
]
RARE = (
    "long name",
    "a different size",
    "cut",
    "damaged",
    "twice",
    "key twice",
    "a link",
    "a strange name",
    "no tar",
    "empty",
)


def write_tar(path: Path, members: list[tuple[str, bytes]], **how: object) -> Path:
    mtime = how.pop("mtime", 0)
    with tarfile.open(path, "w", **how) as archive:  # type: ignore[call-overload]
        for name, content in members:
            member = tarfile.TarInfo(name)
            member.size, member.mtime = len(content), mtime  # type: ignore[assignment]
            archive.addfile(member, io.BytesIO(content))
    return path


def look(path: Path) -> np.ndarray | None:
    """Where samples begin; None where the tar is refused. However it is read, it is the same."""
    try:
        spans = list(read_spans(path))
    except DataError:
        with pytest.raises(DataError, match=path.name):
            find_starts(path)
        return None
    content, found = path.read_bytes(), find_starts(path)
    assert found.tolist() == [start for _, start, _ in spans] + [spans[-1][2]]
    for sample, start, stop in spans:
        assert read_sample(path, content[start:stop]) == sample
    return found


@pytest.mark.parametrize("kind", [tarfile.USTAR_FORMAT, tarfile.GNU_FORMAT, tarfile.PAX_FORMAT])
@pytest.mark.parametrize("mtime", [0, 1700000000.25])
def test_headers_alone_say_where_samples_begin(kind: int, mtime: float, tmp_path: Path) -> None:
    path = write_tar(tmp_path / "a.tar", MEMBERS, format=kind, mtime=mtime)
    found = look(path)
    assert found is not None
    assert len(found) - 1 == len(list(read_shard(path))) == 21


def test_what_lies_inside_of_a_member_is_no_header(tmp_path: Path) -> None:
    inner = write_tar(tmp_path / "inner.tar", MEMBERS).read_bytes()
    path = write_tar(
        tmp_path / "a.tar", [("1.tar", inner), ("2.tar", inner[:-512]), ("3.txt", b"x")]
    )
    found = look(path)
    assert found is not None
    assert len(found) == 4


@pytest.mark.parametrize("what", RARE)
def test_what_is_rare_is_read_or_refused_alike(what: str, tmp_path: Path) -> None:
    path = tmp_path / "a.tar"
    members = {
        "long name": [("a" * 120 + ".jpg", b"1"), ("b.jpg", b"2")],
        "twice": [("a.jpg", b"1"), ("a.jpg", b"2")],
        "key twice": [("a.jpg", b"1"), ("b.jpg", b"1"), ("a.cls", b"1")],
        "a strange name": [("a b.jpg", b"1")],
        "empty": [],
    }.get(what, MEMBERS)
    content = bytearray(write_tar(path, members, format=tarfile.PAX_FORMAT).read_bytes())
    if what == "a different size":
        with tarfile.open(path, "w", format=tarfile.PAX_FORMAT) as archive:
            member = tarfile.TarInfo("a.jpg")
            member.pax_headers, member.size = {"size": "3"}, 3
            archive.addfile(member, io.BytesIO(b"123"))
    elif what == "a link":
        with tarfile.open(path, "a") as archive:
            member = tarfile.TarInfo("z.jpg")
            member.type, member.linkname = tarfile.SYMTYPE, "/etc/passwd"
            archive.addfile(member)
    elif what == "cut":
        path.write_bytes(content[: 5 * 512])
    elif what == "damaged":
        content[512 * 3 + 3] ^= 1
        content[3] ^= 1
        path.write_bytes(content)
    elif what == "no tar":
        path.write_bytes(b"x" * 4096)
    found = look(path)
    counts = {"long name": 2, "a different size": 1}
    assert (None if found is None else len(found) - 1) == counts.get(what)


def planted(path: Path, field: tuple[int, bytes], *, checksum: bool = True) -> Path:
    """The second of two members has `field` in its header, whose sum of bytes is right again."""
    content = bytearray(
        write_tar(
            path, [("a.jpg", b"1" * 600), ("a.cls", b"2")], format=tarfile.USTAR_FORMAT
        ).read_bytes()
    )
    at, (place, text) = 512 * 3, field
    content[at + place : at + place + len(text)] = text
    if checksum:
        content[at + 148 : at + 156] = b" " * 8
        content[at + 148 : at + 156] = b"%06o\0 " % sum(content[at : at + 512])
    path.write_bytes(content)
    return path


@pytest.mark.parametrize(
    ("place", "text"),
    [
        (100, b"zzz"),
        (108, b"8"),
        (136, b"1 x"),
        (136, b"zzz"),
        (124, b"1130 9"),
        (124, b"9"),
        (329, b"z"),
        (337, b"8"),
        (124, b"-0001000\0"),
    ],
)
def test_numbers_that_are_none_are_refused(place: int, text: bytes, tmp_path: Path) -> None:
    assert look(planted(tmp_path / "a.tar", (100, b"0000644\0"))) is not None
    assert look(planted(tmp_path / "a.tar", (place, text))) is None


def test_all_of_a_checksum_is_read(tmp_path: Path) -> None:
    path = planted(tmp_path / "a.tar", (100, b"0000644\0"))
    content = bytearray(path.read_bytes())
    digits = content[512 * 3 + 148 : 512 * 3 + 154]
    content[512 * 3 + 148 : 512 * 3 + 156] = b"0" + digits + b"7"
    path.write_bytes(content)
    assert look(path) is None


@pytest.mark.parametrize(
    ("said", "count"),
    [
        ({"GNU.sparse.name": "zz.jpg"}, 2),
        ({"GNU.sparse.map": "0,1"}, None),
        ({"path": "b.jpg"}, 2),
        ({"hdrcharset": "BINARY"}, 1),
    ],
)
def test_what_pax_may_say_of_a_member_is_read_alike(
    said: dict[str, str], count: int | None, tmp_path: Path
) -> None:
    path = tmp_path / "a.tar"
    with tarfile.open(path, "w", format=tarfile.PAX_FORMAT) as archive:
        for name in ("a.jpg", "a.cls"):
            member = tarfile.TarInfo(name)
            member.pax_headers = said if name == "a.jpg" else {}
            member.size = 1
            archive.addfile(member, io.BytesIO(b"1"))
    found = look(path)
    assert (None if found is None else len(found) - 1) == count


@pytest.mark.parametrize(
    "records",
    [b"0 a=b\n", b"9 mtime=1\n", b"99999999999999999999 mtime=1\n", b"11 mtime=1\nx", b"mtime=1\n"],
)
def test_records_of_pax_that_are_none_say_too_much(records: bytes) -> None:
    assert is_ignorable_pax(b"11 mtime=1\n" * 2)
    assert not is_ignorable_pax(records)


def test_keys_are_told_apart_by_their_letters(tmp_path: Path) -> None:
    """Two names to which the numbers that find a key again are the same."""
    path = write_tar(
        tmp_path / "a.tar", [("mhe9zqxh2600064a.jpg", b"1"), ("cm8x6z7m8851098t.cls", b"1")]
    )
    found = look(path)
    assert found is not None
    assert len(found) == 3


def test_a_tar_of_nonsense_is_refused_in_words(tmp_path: Path) -> None:
    path = tmp_path / "a.tar"
    for said in ({"GNU.sparse.major": "1", "GNU.sparse.minor": "0"}, {"GNU.sparse.map": "x"}):
        with tarfile.open(path, "w", format=tarfile.PAX_FORMAT) as archive:
            member = tarfile.TarInfo("a.jpg")
            member.pax_headers, member.size = said, 1
            archive.addfile(member, io.BytesIO(b"1"))
        with pytest.raises(DataError, match=r"a\.tar"):
            open_index([path], tmp_path / "cache")


def test_what_is_no_file_and_no_tar_at_all_are_refused(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe.tar")
    with pytest.raises(DataError, match=r"pipe\.tar is not a regular file"):
        open_index([tmp_path / "pipe.tar"], tmp_path / "cache")
    with pytest.raises(DataError, match="no shard is given"):
        open_index([], tmp_path / "cache")


@pytest.mark.parametrize("ids", [[-1], [21], [-7, 3], [10**12]])
def test_numbers_of_no_sample_are_refused(ids: list[int], tmp_path: Path) -> None:
    index = open_index([write_tar(tmp_path / "a.tar", MEMBERS)], tmp_path / "cache")
    with pytest.raises(DataError, match="hint: the source has the samples 0 to 20"):
        index.locate(np.array(ids))


@pytest.mark.parametrize("wrong", [1 << 62, -(1 << 63), -512, 1 << 40])
def test_an_index_that_leads_out_of_its_tars_is_refused(wrong: int, tmp_path: Path) -> None:
    paths = [write_tar(tmp_path / "a.tar", MEMBERS)]
    place = open_index(paths, tmp_path / "cache").place
    content = place.read_bytes()
    place.write_bytes(content[: -8 * 22] + np.full(22, wrong, dtype="<i8").tobytes())
    with pytest.raises(DataError, match="is damaged: it has positions outside its tars"):
        open_index(paths, tmp_path / "cache").locate(np.arange(21))
    place.write_bytes(b"[" * 100_000 + b"\n")
    assert len(open_index(paths, tmp_path / "cache")) == 21


def test_a_key_that_comes_again_far_away_is_seen(tmp_path: Path) -> None:
    members = [(f"{'x' * (number % 40)}{number}.jpg", b"1") for number in range(50)]
    found = look(write_tar(tmp_path / "a.tar", members))
    assert found is not None
    assert len(found) == 51
    assert look(write_tar(tmp_path / "a.tar", [*members, ("0.cls", b"1")])) is None


def test_an_index_is_made_once_and_again_where_a_shard_changed(tmp_path: Path) -> None:
    folder, cache = tmp_path / "set", tmp_path / "cache"
    folder.mkdir()
    paths = [write_tar(folder / f"{number}.tar", MEMBERS) for number in range(3)]
    told: list[tuple[int, int]] = []
    index = open_index(paths, cache, tell=lambda done, total: told.append((done, total)))
    assert len(index) == 63
    assert told[-1][0] == told[-1][1] == sum(path.stat().st_size for path in paths)
    assert not list(folder.glob("*.index"))
    told.clear()
    again = open_index(paths[::-1], cache, tell=lambda done, total: told.append((done, total)))
    assert told == []
    assert again.digest == index.digest
    write_tar(paths[1], MEMBERS[:6])
    changed = open_index(paths, cache, tell=lambda done, total: told.append((done, total)))
    assert told == [(paths[1].stat().st_size,) * 2]
    assert len(changed) == 44
    assert changed.digest != index.digest
    assert open_index(paths, cache).digest == changed.digest
    os.utime(paths[0], ns=(1, 1))
    assert open_index(paths, cache).digest == changed.digest  # the same bytes


def test_a_sample_is_one_read_wherever_it_stands(tmp_path: Path) -> None:
    paths = [
        write_tar(tmp_path / f"{number}.tar", MEMBERS[: 3 * (number + 1)]) for number in range(4)
    ]
    index = open_index(paths, tmp_path / "cache")
    shards, first, count = index.locate(np.arange(len(index)))
    assert shards.tolist() == [0, 1, 1, 2, 2, 2, 3, 3, 3, 3]
    whole = [find_starts(path) for path in paths]
    assert first.tolist() == [start for starts in whole for start in starts[:-1].tolist()]
    assert count.tolist() == [size for starts in whole for size in np.diff(starts).tolist()]


@pytest.mark.parametrize("damage", ["cut", "other", "no json"])
def test_a_damaged_index_is_made_again(damage: str, tmp_path: Path) -> None:
    path = write_tar(tmp_path / "a.tar", MEMBERS)
    cache = tmp_path / "cache"
    open_index([path], cache)
    place = next(cache.glob("*/*.index"))
    text = place.read_bytes()
    place.write_bytes(
        {"cut": text[:-8], "other": text.replace(b"index 1", b"index 0"), "no json": b"\n" + text}[
            damage
        ]
    )
    assert len(open_index([path], cache)) == 21
    assert place.read_bytes() == text


def test_an_index_lies_beside_the_shards_where_asked(tmp_path: Path) -> None:
    folder = tmp_path / "set"
    folder.mkdir()
    path = write_tar(folder / "a.tar", MEMBERS)
    open_index([path], tmp_path / "cache", beside=True)
    place = next(folder.glob("*.index"))
    assert json.loads(place.read_bytes().splitlines()[0])["shards"][0]["num_samples"] == 21
    assert len(open_index([path], tmp_path / "none")) == 21
    assert not (tmp_path / "none").exists()


def test_shards_that_are_no_set_are_refused(tmp_path: Path) -> None:
    path = write_tar(tmp_path / "a.tar", MEMBERS)
    (tmp_path / "b").mkdir()
    other = write_tar(tmp_path / "b" / "a.tar", MEMBERS)
    with pytest.raises(DataError, match="2 folders"):
        open_index([path, other], tmp_path / "cache")
    with pytest.raises(DataError, match=r"a\.tar is given twice"):
        open_index([path, path], tmp_path / "cache")
    with pytest.raises(DataError, match="cannot be read"):
        open_index([tmp_path / "none.tar"], tmp_path / "cache")
