"""`data.window`: shards are mixed a few at a time.

Their order is known at any step, and the ledger holds it.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from surefoot.components.data.blocks import BlockShuffle, Order
from surefoot.components.data.consumed import check
from surefoot.components.data.tars.source import Tars
from surefoot.contract import ledger
from surefoot.core.errors import SpecError
from surefoot.train.run import Run, drive
from tests.components.test_bad_records import Photos, spec
from tests.components.test_index import write_tar
from tests.components.test_tars import image
from tests.train.small import Small

SHARDS, EACH, BATCH = 7, 10, 8


class Many(Photos):
    """Photos of several tars."""

    def data(self, split: str) -> Tars:
        return Tars(
            sorted(Path(self.tar).glob("*.tar")), cache=self.cache, image="png", label="cls"
        )


def make(folder: Path) -> Many:
    (folder / "tars").mkdir()
    for shard in range(SHARDS):
        # one is smaller
        numbers = range(shard * EACH, (shard + 1) * EACH - (3 if shard == 2 else 0))
        parts = [
            (f"{number:03d}.{name}", part)
            for number in numbers
            for name, part in (("png", image(color=number)), ("cls", b"1"))
        ]
        write_tar(folder / "tars" / f"{shard}.tar", parts)
    return Many(str(folder / "tars"), str(folder / "cache"))


@pytest.mark.slow
def test_a_run_stays_in_a_few_shards_at_a_time_and_goes_on_in_the_same_order(
    tmp_path: Path,
) -> None:
    stated, task = (
        spec(
            train={"length": "2 epochs", "batch": BATCH},
            data={"window": 2},
            checkpoint={"every": "1 step"},
        ),
        make(tmp_path),
    )
    read: dict[int, list[int]] = {}
    with Run(stated, task, folder=tmp_path / "whole", quiet=True) as run:
        for report in run.steps():
            read[report.step] = run.assembly.engine.steps.reader.consumed.tolist()
        run.evaluate()
        digests = run.state_digests()
    per_epoch = run.assembly.feed.steps_per_epoch or 0
    count = len(task.data("train"))
    for epoch in range(2):
        ids = np.concatenate(
            [read[step] for step in range(epoch * per_epoch + 1, (epoch + 1) * per_epoch + 1)]
        )
        assert sorted(ids.tolist()) == list(range(count))
        permutation = run.assembly.feed.order.permutation(epoch)
        assert isinstance(permutation, BlockShuffle)
        for block in permutation.blocks():
            size = sum(min(EACH, count - chunk * EACH) for chunk in block)
            assert sorted(set((ids[:size] // EACH).tolist())) == sorted(block)
            ids = ids[size:]
    assert read[1] != read[per_epoch + 1]
    with (
        pytest.raises(KeyboardInterrupt),
        Run(stated, task, folder=tmp_path / "cut", quiet=True) as run,
    ):
        for report in run.steps():
            if report.step == 7:
                raise KeyboardInterrupt
    with Run(stated, task, folder=tmp_path / "cut", quiet=True) as run:
        drive(run)
        assert run.state_digests() == digests
    assert check(tmp_path / "cut").holds
    plan = ledger.read_plan(tmp_path / "cut")
    assert (plan.window, plan.chunk) == (2, EACH)


def test_a_source_is_told_which_shards_come_next(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    told: list[np.ndarray] = []
    monkeypatch.setattr(Tars, "expect", lambda self, chunks: told.append(chunks))
    stated = spec(train={"length": "2 epochs", "batch": BATCH}, data={"window": 2})
    with Run(stated, make(tmp_path), folder=tmp_path / "run", quiet=True) as run:
        drive(run)
    assert len(told) == 2
    for chunks in told:
        assert sorted(chunks[:, 0].tolist()) == list(range(0, 67, EACH))
    assert not np.array_equal(*told)


def test_a_window_needs_shards_and_shuffling(tmp_path: Path) -> None:
    with (
        pytest.raises(
            SpecError, match=r"data\.window is 2, but the source has no shards: 24 samples"
        ),
        Run(spec(data={"window": 2}), Small(), folder=tmp_path / "a"),
    ):
        pass
    with (
        pytest.raises(
            SpecError, match=r"data\.window = 2 has no effect with data\.shuffle = false"
        ),
        Run(spec(data={"window": 2, "shuffle": False}), make(tmp_path), folder=tmp_path / "b"),
    ):
        pass


def test_a_window_of_all_shards_mixes_everything() -> None:
    order = Order(1000, seed=3, chunk=100, window=10)
    ids = order.ids(0, 0, 1000)
    assert sorted(ids.tolist()) == list(range(1000))
    assert len(set((ids[:100] // 100).tolist())) == 10
    assert not np.array_equal(ids, order.ids(1, 0, 1000))
    assert np.array_equal(order.ids(0, 500, 600), ids[500:600])
