"""Tests of records that cannot be read.

The run ends with the first, or leaves out exactly those, the same ones whoever reads.
"""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from surefoot.components.data.blocks import Order
from surefoot.components.data.feed import Feed
from surefoot.components.data.loader.bad import read_sound
from surefoot.components.data.loader.batches import LoaderNotice, LoaderSettings
from surefoot.components.data.loader.jobs import Reader
from surefoot.components.data.loader.loader import Loader
from surefoot.components.data.order import Keys
from surefoot.components.data.tars.source import Tars
from surefoot.components.metrics import Mean, accuracy
from surefoot.contract.spec import RunSpec
from surefoot.contract.task import Loss, Source
from surefoot.core.errors import BadRecordError
from surefoot.train.run import Run, drive
from tests.components.test_index import write_tar
from tests.components.test_tars import image
from tests.train.small import faults_of

NUM_SAMPLES, BATCH = 200, 8
BAD = (3, 17, 18, 101, 199)


def write_photos(folder: Path, bad: tuple[int, ...] = BAD, num_samples: int = NUM_SAMPLES) -> Path:
    """A tar of small images; those in `bad` are cut in the middle, or have no number as label."""
    members: list[tuple[str, bytes]] = []
    for number in range(num_samples):
        content, label = image(color=number), b"%d" % (number % 3)
        if number in bad:
            content, label = (
                (content[: len(content) // 2], label) if number % 2 else (content, b"a cat")
            )
        members += [(f"{number:04d}.png", content), (f"{number:04d}.cls", label)]
    return write_tar(folder / "photos.tar", members)


class Photos:
    """Trains on the images of a tar; shifted by a draw for each sample."""

    def __init__(self, tar: str, cache: str) -> None:
        self.tar, self.cache = tar, cache

    def model(self) -> nn.Module:
        return nn.Linear(60, 3)

    def data(self, split: str) -> Source:
        return Tars([self.tar], cache=self.cache, image="png", label="cls")

    def augment(self, batch: dict[str, Tensor], keys: Keys) -> dict[str, Tensor]:
        return {**batch, "image": batch["image"] / 255 + keys.uniform()[:, :, None, None]}

    def forward(self, model: Any, batch: dict[str, Tensor]) -> Tensor:
        made: Tensor = model(batch["image"].float().flatten(1))
        return made

    def loss(self, output: Tensor, batch: dict[str, Tensor]) -> Loss:
        return Loss.sum(F.cross_entropy(output, batch["label"], reduction="sum"), len(output))

    def metrics(self, output: Tensor, batch: dict[str, Tensor]) -> dict[str, Mean]:
        return {"accuracy": accuracy(output, batch["label"])}


def spec(**tables: Any) -> RunSpec:
    base = {
        "train": {"length": "1 epoch", "batch": BATCH},
        "data": {"on_bad": "skip", "max_bad": 0.03},
        "evaluate": {"every": "99 epochs"},
    }
    return RunSpec(**{**base, **tables})


def task(folder: Path, **how: Any) -> Photos:
    return Photos(str(write_photos(folder, **how)), str(folder / "cache"))


@pytest.mark.parametrize(
    "settings",
    [
        LoaderSettings(),
        LoaderSettings(workers=2, kind="thread"),
        LoaderSettings(workers=2, kind="process"),
    ],
)
def test_exactly_the_bad_ones_are_left_out_whoever_reads(
    settings: LoaderSettings, tmp_path: Path
) -> None:
    source = task(tmp_path).data("train")
    loader = Loader(
        Feed(source, Order(NUM_SAMPLES, 0), batch=BATCH, microbatch=3),
        Reader(source, None, 0),
        settings,
    )
    loader.skip_bad(0.03)
    told: list[LoaderNotice] = []
    loader.tell = told.append
    for number in range(1, 2 * NUM_SAMPLES // BATCH + 1):  # two epochs: each is told once
        taken = loader.take(number)
        good = [each for each in taken.window.ids.tolist() if each not in BAD]
        assert [each for ids in taken.ids for each in ids.tolist()] == good
        assert [
            int(value) for batch in taken.batches for value in batch["image"][:, 0, 0, 0]
        ] == good
        assert taken.num_samples == len(good)
    loader.close()
    assert sorted(loader.bad.found) == list(BAD)
    assert len(told) == len(BAD)
    words = next(each.what for each in told if "sample 17 " in each.what)
    assert "photos.tar" in words
    assert "0017.png" in words
    assert "label" in next(
        each.what for each in told if "sample 18 " in each.what
    ) or "0018.cls" in " ".join(map(str, told))


def test_what_is_left_keeps_its_draws(tmp_path: Path) -> None:
    """A neighbour that is left out changes no augmentation."""
    mine = task(tmp_path)
    source, ids = mine.data("train"), np.array([2, 3, 4])
    read = Reader(source, mine.augment, 0, skips=True)(0, ids)
    alone = Reader(source, mine.augment, 0)(0, np.array([2, 4]))
    assert torch.equal(read.batch["image"], alone.batch["image"])
    assert [each.sample for each in read.bad] == [3]


def test_a_run_leaves_out_what_is_bad_and_says_how_many_samples_it_had(tmp_path: Path) -> None:
    with Run(spec(), task(tmp_path), folder=tmp_path / "run", quiet=True) as run:
        for _ in run.steps():
            pass
        result = run.evaluate("test")
        assert run.num_samples == NUM_SAMPLES - len(BAD)
    assert result.num_samples == NUM_SAMPLES - len(BAD)
    faults = faults_of(tmp_path / "run")
    assert [each.fault for each in faults] == ["bad-record"] * 2 * len(BAD)
    assert all("photos.tar" in each.detail and " of at most 6" in each.action for each in faults)
    assert sum("evaluating on test" in each.detail for each in faults) == len(BAD)


def test_the_first_one_ends_a_run_that_does_not_skip(tmp_path: Path) -> None:
    with (
        pytest.raises(BadRecordError, match=r"photos\.tar") as raised,
        Run(spec(data={}), task(tmp_path, bad=(101,)), folder=tmp_path / "run", quiet=True) as run,
    ):
        drive(run)
    assert raised.value.exit_code == 6


def test_more_than_may_be_left_out_end_the_run(tmp_path: Path) -> None:
    with (
        pytest.raises(
            BadRecordError,
            match=r"5 of 200 samples cannot be read, the last one sample \d+: .*photos\.tar",
        ) as raised,
        Run(
            spec(data={"on_bad": "skip", "max_bad": 0.0151}),
            task(tmp_path),
            folder=tmp_path / "run",
            quiet=True,
        ) as run,
    ):
        drive(run)
    assert "data.max_bad = 0.0151 allows 4" in raised.value.hint


def test_a_run_that_goes_on_knows_what_it_left_out(tmp_path: Path) -> None:
    """Else each attempt could leave out as many again."""
    whole, cut = tmp_path / "whole", tmp_path / "cut"
    mine = task(tmp_path)
    often = {"checkpoint": {"every": "1 step"}}
    with Run(spec(**often), mine, folder=whole, quiet=True) as run:
        drive(run)
        digests = run.state_digests()
    with pytest.raises(KeyboardInterrupt), Run(spec(**often), mine, folder=cut, quiet=True) as run:
        for report in run.steps():
            if report.step == 15:
                raise KeyboardInterrupt
    with Run(spec(**often), mine, folder=cut, quiet=True) as run:
        before = dict(run.assembly.engine.steps.reader.loader.bad.found)
        drive(run)
        assert run.state_digests() == digests
        assert run.num_samples == NUM_SAMPLES - len(BAD)
        assert sorted(run.assembly.engine.steps.reader.loader.bad.found) == list(BAD)
    assert 0 < len(before) < len(BAD)


def test_a_step_of_bad_records_alone_ends_the_run(tmp_path: Path) -> None:
    with (
        pytest.raises(BadRecordError, match="none of the 1 samples can be read"),
        Run(
            spec(train={"length": "1 epoch", "batch": 1}),
            task(tmp_path, bad=(5,), num_samples=20),
            folder=tmp_path / "run",
            quiet=True,
        ) as run,
    ):
        drive(run)


def test_a_disk_that_fails_is_no_bad_record() -> None:
    class Failing:
        def read(self, ids: np.ndarray) -> Any:
            raise OSError(5, "Input/output error")

    with pytest.raises(OSError, match="Input/output error"):
        read_sound(Failing(), np.arange(3))  # type: ignore[arg-type]


def test_fifty_mutated_shards_lose_what_cannot_be_read_and_nothing_else(tmp_path: Path) -> None:
    """F17: a byte flipped, a length that is none, JSON and UTF-8 that are none.

    What is read is what stands in the file.
    """
    drawn = random.Random(0)
    for number in range(50):
        rows = {
            f"{each:03d}": json.dumps({"n": each, "word": "é" * 9}).encode() for each in range(12)
        }
        hit = f"{drawn.randrange(12):03d}"
        content = bytearray(rows[hit])
        how = drawn.choice(("flip", "cut", "utf-8", "empty"))
        if how == "flip":
            content[drawn.randrange(len(content))] ^= 1 << drawn.randrange(8)
        else:
            content = {
                "cut": content[: drawn.randrange(1, len(content))],
                "utf-8": b'"\xff\xfe"' + content,
                "empty": bytearray(),
            }[how]
        rows[hit] = bytes(content)
        source = Tars(
            [
                write_tar(
                    tmp_path / f"{number}.tar", [(f"{key}.json", row) for key, row in rows.items()]
                )
            ],
            cache=tmp_path / "cache",
            row="json",
        )
        read = read_sound(source, np.arange(12))
        try:
            readable = json.loads(rows[hit].decode())
        except ValueError:
            readable = None
        assert [each.sample for each in read.bad] == ([] if readable is not None else [int(hit)]), (
            how,
            rows[hit],
        )
        expected = [
            json.loads(row) for key, row in rows.items() if key != hit or readable is not None
        ]
        assert read.batch["row"] == expected
