"""Tests of `surefoot data bench`.

What it counts is there, from the device or from memory, and a delay costs what it says.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from surefoot.components.data.disk.devices import cached_share
from surefoot.components.data.tars.source import Tars
from surefoot.prove.bench import reading
from tests.cli.conftest import Command
from tests.components.server import serving
from tests.components.test_index import write_tar
from tests.components.test_tars import image


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Images of two sizes, 40 of them."""
    made = tmp_path / "tars"
    made.mkdir()
    for shard in range(2):
        numbers = range(20 * shard, 20 * shard + 20)
        pairs = [(f"{number}.png", image(size=(5 + number % 2, 4))) for number in numbers]
        write_tar(
            made / f"{shard}.tar",
            [
                each
                for key, content in pairs
                for each in ((key, content), (f"{key[:-4]}.cls", b"3"))
            ],
        )
    return made


@pytest.mark.parametrize("kind", ["thread", "process"])
def test_each_number_of_workers_reads_every_sample_cold_and_warm(
    kind: str, folder: Path, surefoot: Command
) -> None:
    row = surefoot("data", "bench", "tars", "--workers", "0,2", "--kind", kind, "--json").row
    assert row["num_samples"] == 40
    assert [(each["workers"], each["state"]) for each in row["rows"]] == [
        (0, "cold"),
        (0, "warm"),
        (2, "cold"),
        (2, "warm"),
    ]
    for each in row["rows"]:
        assert each["samples"] == 40
        assert each["samples_per_s"] > 0
        assert each["read"] + each["decode"] == pytest.approx(1.0)
        # two members, each a header and a block
        assert each["bytes_per_s"] / each["samples_per_s"] == pytest.approx(4 * 512)
    answer = surefoot("data", "bench", "tars", "--workers", "0")
    assert answer.code == 0
    assert "40 samples in 2 tars" in answer.out
    assert "samples/s" in answer.out


def test_a_folder_of_images_waits_as_long_as_it_was_told(tmp_path: Path, surefoot: Command) -> None:
    for name in ("cat", "dog"):
        (tmp_path / "images" / name).mkdir(parents=True)
        for number in range(8):
            (tmp_path / "images" / name / f"{number}.png").write_bytes(image(size=(5 + number, 4)))
    row = surefoot("data", "bench", "images", "--workers", "0", "--delay", "20", "--json").row
    assert [each["state"] for each in row["rows"]] == ["cold", "warm", "delay"]
    _, warm, delayed = row["rows"]
    assert delayed["samples"] == 16
    assert delayed["samples_per_s"] <= 50  # 20 ms each, however busy the machine is
    assert (warm["delay"], delayed["delay"] > 0) == (0, True)
    answer = surefoot("data", "bench", "images", "--workers", "0", "--delay", "1")
    assert "warm + 1 ms" in answer.out
    assert "\non " in answer.out


def test_cold_begins_without_the_files_in_memory_and_warm_with_them(
    folder: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    real, seen = Tars.explain, list[float | None]()

    def explain(self: Tars, ids: np.ndarray) -> dict[str, float]:
        seen.append(cached_share(folder / "0.tar"))
        return real(self, ids)

    monkeypatch.setattr(Tars, "explain", explain)
    found = reading.measure([str(folder)], workers=[0])
    if not found.dropped:
        pytest.skip("this system keeps its files in memory")
    per_row = -(-40 // reading.BATCH)
    assert seen[0] == 0.0
    assert seen[-per_row:] == [1.0] * per_row


def test_urls_are_measured_where_their_copies_lie(
    folder: Path, surefoot: Command, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("aiohttp", reason="needs aiohttp: the extra store")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    with serving({f"/{path.name}": path.read_bytes() for path in folder.iterdir()}) as served:
        row = surefoot(
            "data", "bench", f"{served.url}/{{0..1}}.tar", "--workers", "0", "--json"
        ).row
    assert [each["samples"] for each in row["rows"]] == [40, 40]


def test_samples_and_seconds_bound_a_row(folder: Path, surefoot: Command) -> None:
    rows = surefoot("data", "bench", "tars", "--workers", "0", "--samples", "7", "--json").row[
        "rows"
    ]
    assert [each["samples"] for each in rows] == [7, 7]
    rows = surefoot("data", "bench", "tars", "--workers", "0", "--seconds", "1e-6", "--json").row[
        "rows"
    ]
    assert [each["samples"] for each in rows] == [reading.BATCH, reading.BATCH]


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (("none",), "none is missing"),
        (("empty",), "empty contains no class folder"),
        (("tars", "--workers", "a"), "--workers must be a list of numbers; got a"),
        (("tars", "--workers", "999"), "measure nothing"),
        (("tars", "--samples", "0"), "measure nothing"),
        (("tars", "--seconds", "nan"), "measure nothing"),
        (("tars", "--delay", "-1"), "measure nothing"),
        (("tars", "--kind", "fork"), "must be thread or process; got fork"),
        (("odd",), "no part that is decoded"),
        (("bad",), "is not an image of the formats JPEG, PNG, WEBP"),
    ],
)
def test_bad_input_is_told_in_words(
    words: tuple[str, ...], says: str, folder: Path, tmp_path: Path, surefoot: Command
) -> None:
    for name in ("empty", "odd", "bad"):
        (tmp_path / name).mkdir()
    write_tar(tmp_path / "odd" / "0.tar", [("0.bin", b"x")])
    write_tar(tmp_path / "bad" / "0.tar", [("0.png", b"x")])
    answer = surefoot("data", "bench", *words)
    assert answer.code == 2
    assert says in answer.err
