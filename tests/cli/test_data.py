"""Tests of `surefoot data index` and `check`.

Real tars and every kind of bad one, told by name and with its exit code.
"""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from tests.cli.conftest import Command
from tests.components.server import serving
from tests.components.test_index import write_tar
from tests.components.test_tars import image, members_of


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    made = tmp_path / "set"
    made.mkdir()
    for shard in range(2):
        write_tar(
            made / f"{shard}.tar",
            [each for number in range(4) for each in members_of(4 * shard + number)],
        )
    return made


def test_an_index_is_written_beside_the_tars_and_told(folder: Path, surefoot: Command) -> None:
    answer = surefoot("data", "index", str(folder))
    assert answer.code == 0
    (place,) = folder.glob("surefoot-*.index")
    assert f"8 samples in 2 tars; index: {place}" in answer.out
    row = surefoot("data", "index", str(folder / "1.tar"), str(folder / "0.tar"), "--json").row
    assert row["samples"] == 8
    assert [each["name"] for each in row["shards"]] == ["0.tar", "1.tar"]
    assert [each["samples"] for each in row["shards"]] == [4, 4]


def test_a_sound_set_passes(folder: Path, surefoot: Command) -> None:
    answer = surefoot("data", "check", str(folder))
    assert (answer.code, answer.err) == (0, "")
    assert answer.out == "8 samples are undamaged, 0 parts are bad\n"


def test_every_bad_part_is_named_and_the_rest_is_read(folder: Path, surefoot: Command) -> None:
    write_tar(
        folder / "2.tar",
        [
            ("0.png", image()[:20]),
            ("1.cls", b"x"),
            ("2.cls", b"3"),
            ("3.pkl", b"not decoded, not bad"),
        ],
    )
    cut = write_tar(folder / "3.tar", [each for number in range(4) for each in members_of(number)])
    cut.write_bytes(cut.read_bytes()[:9000])
    (folder / "4.tar").write_bytes(b"x" * 2000)
    answer = surefoot("data", "check", str(folder), "--json")
    assert answer.code == 1
    assert not answer.row["ok"]
    bad = {(each["shard"], each["key"]): each["reason"] for each in answer.row["bad"]}
    assert list(bad) == [("2.tar", "0.png"), ("2.tar", "1.cls"), ("3.tar", ""), ("4.tar", "")]
    assert bad["2.tar", "0.png"].startswith("is a damaged PNG")
    assert "after byte" in bad["3.tar", ""]
    assert bad["4.tar", ""].startswith("is not a tar")
    assert answer.row["samples"] == 8 + 2 + 1  # of the tar that is cut one sample is whole
    told = surefoot("data", "check", str(folder))
    assert told.code == 1
    assert "4 parts are bad" in told.out
    assert "0.png" in told.out


def test_a_real_tar_is_sound(cifar10_folder: Path, surefoot: Command) -> None:
    row = surefoot("data", "check", str(cifar10_folder / "test-00000.tar"), "--json").row
    assert (row["ok"], row["samples"]) == (True, 5_000)


@pytest.mark.parametrize("verb", ["index", "check"])
def test_what_is_no_set_of_tars_is_refused_in_words(
    verb: str, tmp_path: Path, surefoot: Command
) -> None:
    (tmp_path / "empty").mkdir()
    for place, words in (("none", "none is missing"), ("empty", "empty contains no tar")):
        answer = surefoot("data", verb, place)
        assert answer.code == 2
        assert words in answer.err


def test_an_index_that_cannot_be_made_is_refused_in_words(
    folder: Path, tmp_path: Path, surefoot: Command
) -> None:
    other = tmp_path / "other"
    shutil.copytree(folder, other)
    answer = surefoot("data", "index", str(folder), str(other))
    assert answer.code == 2
    assert "the shards are in 2 folders" in answer.err
    (folder / "0.tar").write_bytes(b"x" * 4096)
    answer = surefoot("data", "index", str(folder))
    assert answer.code == 2
    assert "0.tar is not a tar" in answer.err
    assert not list(folder.glob("*.index"))


def test_urls_are_read_like_files(
    folder: Path, surefoot: Command, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("aiohttp", reason="needs aiohttp: the extra store")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    with serving({f"/{path.name}": path.read_bytes() for path in folder.iterdir()}) as served:
        url = f"{served.url}/{{0..1}}.tar"
        assert surefoot("data", "index", url, "--json").row["samples"] == 8
        assert surefoot("data", "check", url).out == "8 samples are undamaged, 0 parts are bad\n"
        assert surefoot("data", "check", f"{served.url}/2.tar").code == 2
    assert surefoot("data", "check", "pipe:cat").code == 2
