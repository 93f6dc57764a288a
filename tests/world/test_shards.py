"""Ranks share a step over a stream by its shards, and resume on any number of ranks."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, IterableDataset

import surefoot
from surefoot import Loss, Run, RunSpec, all_gather
from surefoot.contract import loop_ledger
from surefoot.core.errors import OtherDataError, SpecError, SurefootError
from surefoot.data import Arrays, Iterated, StreamShard
from tests.train.test_loader_resume import Left
from tests.world.ranks import run_ranks

SAMPLES, BATCH = 44, 3


class Part(IterableDataset[Any]):
    """Every `count`-th number from `index` on, with a random part; it can keep its place."""

    def __init__(self, shard: StreamShard, *, has_length: bool) -> None:
        self.numbers = range(shard.index, SAMPLES, shard.count)
        self.has_length, self.epoch = has_length, 0

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __iter__(self) -> Iterator[Any]:
        for number in self.numbers:
            yield 100.0 * self.epoch + number + torch.rand(()).item() / 8

    def __len__(self) -> int:
        if not self.has_length:
            raise TypeError
        return len(self.numbers)


class Stateful(Part):
    """Has its place in its state, as a StatefulDataLoader has."""

    def __init__(self, shard: StreamShard, *, has_length: bool) -> None:
        super().__init__(shard, has_length=has_length)
        self.at = torch.zeros((), dtype=torch.int64)

    def __iter__(self) -> Iterator[Any]:
        values = torch.tensor(self.numbers).float().split(BATCH)
        while int(self.at) < len(values):
            self.at += 1
            yield values[int(self.at) - 1] + 100.0 * self.epoch
        self.at.zero_()

    def __len__(self) -> int:
        return -(-super().__len__() // BATCH)

    def state_dict(self) -> dict[str, Any]:
        return {"at": self.at.clone()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.at.copy_(state["at"])


class Uneven(Part):
    """Shards of very different lengths."""

    def __init__(self, shard: StreamShard) -> None:
        super().__init__(shard, has_length=True)
        ends = [0, 22, 25, 40, SAMPLES]
        self.numbers = range(ends[shard.index], ends[shard.index + 1])


STREAMS: dict[str, Callable[[StreamShard], Any]] = {
    "with a length": lambda shard: DataLoader(Part(shard, has_length=True), BATCH),
    "without a length": lambda shard: DataLoader(Part(shard, has_length=False), BATCH),
    "with workers": lambda shard: DataLoader(Part(shard, has_length=True), BATCH, num_workers=1),
    "of uneven shards": lambda shard: DataLoader(Uneven(shard), BATCH),
    "with a state": lambda shard: Stateful(shard, has_length=True),
    "with a state, without a length": lambda shard: Stateful(shard, has_length=False),
}


class Task:
    def __init__(self, kind: str) -> None:
        self.kind, self.seen = kind, list[list[float]]()

    def model(self) -> nn.Module:
        return nn.Sequential(nn.Linear(1, 4), nn.Dropout(0.2), nn.Linear(4, 1))

    def data(self, split: str, shard: StreamShard) -> Any:
        return STREAMS[self.kind](shard) if split == "train" else Arrays(torch.zeros(4))

    def blocks(self, model: nn.Module) -> list[nn.Module]:
        return [*model.children()][::2]

    def forward(self, model: nn.Module, batch: Any) -> Tensor:
        values = batch[0] if isinstance(batch, list | tuple) else batch
        if model.training:
            self.seen.append([round(float(value), 4) for value in values.flatten()])
        return model(values.float().reshape(-1, 1) / 100)  # type: ignore[no-any-return]

    def loss(self, output: Tensor, batch: Any) -> Loss:
        return Loss.sum((output - 1).square().sum(), count=len(output))


def train(
    folder: Path, task: Any, leave_at: int | None = None, **tables: Any
) -> tuple[list[list[float]], list[Any]]:
    """The batches of this rank, and the weights at the end."""
    table = {"length": "14 steps", "threads": 1} | tables.pop("train", {})
    spec = RunSpec(
        **{
            "train": table,
            "optim": {"lr": 0.01},
            "evaluate": {"every": "1000 steps"},
            "checkpoint": {"every": "1 steps", "background": False},
            "observe": {"tensorboard": False},
            **tables,
        }
    )
    weights = list[Any]()
    try:
        with Run(spec, task, folder=folder, quiet=True) as run:
            for report in run.steps():
                if report.step == leave_at:
                    raise Left
            weights = [
                each.tolist() for each in run.model.parameters() if type(each) is nn.Parameter
            ]
    except Left:
        pass
    return task.seen, weights


def on_ranks(
    num_ranks: int, folder: Path, kind: str, leave_at: int | None = None, **tables: Any
) -> list[Any]:
    if num_ranks == 1:
        return [list(train(folder, Task(kind), leave_at, **tables))]

    def job(rank: int) -> Any:
        try:
            return list(train(folder, Task(kind), leave_at, **tables))
        except SurefootError as error:
            return [error.message, error.hint]

    return run_ranks(num_ranks, job, folder.parent / f"{folder.name}-{num_ranks}-{leave_at}")


def assert_close(found: Any, weights: Any) -> None:
    for mine, theirs in zip(found, weights, strict=True):
        torch.testing.assert_close(torch.tensor(mine), torch.tensor(theirs), rtol=1e-6, atol=1e-7)


FOUR = {"data": {"shards": 4}}


@pytest.mark.quick("of uneven shards", "with a state, without a length")
@pytest.mark.parametrize("kind", STREAMS)
def test_a_step_is_the_same_on_any_number_of_ranks(kind: str, tmp_path: Path) -> None:
    ((batches, weights),) = on_ranks(1, tmp_path / "one", kind, **FOUR)
    for num_ranks in (2, 3):
        found = on_ranks(num_ranks, tmp_path / str(num_ranks), kind, **FOUR)
        assert sorted(sum((each[0] for each in found), [])) == sorted(batches)  # noqa: RUF017
        for _, mine in found:
            assert_close(mine, weights)
        assert loop_ledger.check(tmp_path / str(num_ranks)).holds


@pytest.mark.quick("of uneven shards", "with a state, without a length")
@pytest.mark.parametrize("kind", STREAMS)
def test_a_stopped_run_goes_on_with_other_numbers_of_ranks(kind: str, tmp_path: Path) -> None:
    ((_, weights),) = on_ranks(1, tmp_path / "one", kind, **FOUR)
    for num_ranks, leave_at in ((2, 3), (1, 6), (4, 10), (3, None)):
        found = on_ranks(num_ranks, tmp_path / "stopped", kind, leave_at, **FOUR)
    for _, mine in found:
        assert_close(mine, weights)
    assert loop_ledger.check(tmp_path / "stopped").holds


def test_an_epoch_has_each_sample_once(tmp_path: Path) -> None:
    how = {**FOUR, "train": {"length": "2 epochs"}}
    for kind, num_batches in (("with a length", 16), ("of uneven shards", 16)):
        found = on_ranks(2, tmp_path / kind, kind, **how)
        batches = [batch for each in found for batch in each[0]]
        seen = sorted(int(value) for batch in batches for value in batch)
        assert seen == [*range(SAMPLES), *range(100, 100 + SAMPLES)]
        assert loop_ledger.check(tmp_path / kind).num_batches == len(batches) == 2 * num_batches


def test_each_rank_has_a_shard_by_default(tmp_path: Path) -> None:
    found = on_ranks(2, tmp_path / "run", "with a length", train={"length": "1 epochs"})
    for rank, (batches, _) in enumerate(found):
        assert sorted(int(value) for batch in batches for value in batch) == list(
            range(rank, SAMPLES, 2)
        )


def test_virtual_ranks_give_the_same_bits(tmp_path: Path) -> None:
    layout = {"layout": {"virtual_ranks": 4}, "data": {"shards": 4}}
    ((_, weights),) = on_ranks(1, tmp_path / "one", "with a length", **layout)
    for _, mine in on_ranks(2, tmp_path / "two", "with a length", **layout):
        assert mine == weights


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_sharded_weights_train_as_in_one_process(stage: int, tmp_path: Path) -> None:
    how = {"data": {"shards": 3}, "train": {"length": "2 epochs"}}
    kind = "of uneven shards" if stage == 1 else "with a length"
    how |= FOUR if stage == 1 else {}
    ((_, weights),) = on_ranks(1, tmp_path / "one", kind, **how)
    how |= {"layout": {"shard": 2, "zero_stage": stage}}

    def job(rank: int) -> Any:
        train(tmp_path / "two", Task(kind), **how)

    run_ranks(2, job, tmp_path / "ranks")
    model = surefoot.load(tmp_path / "two", "last", task=Task(kind))
    assert_close([each.tolist() for each in model.parameters()], weights)


def test_steps_accumulate_batches_of_each_shard(tmp_path: Path) -> None:
    how = {"train": {"accumulate": 2, "length": "8 steps"}, **FOUR}
    ((batches, weights),) = on_ranks(1, tmp_path / "one", "without a length", **how)
    assert len(batches) == 8 * 4 * 2
    for _, mine in on_ranks(2, tmp_path / "two", "without a length", **how):
        assert_close(mine, weights)


class WithoutShard(Task):
    def data(self, split: str) -> Any:  # type: ignore[override]
        return super().data(split, StreamShard())


class ByNumber(Task):
    def data(self, split: str, shard: StreamShard) -> Any:
        return Arrays(torch.zeros(8))


class Loaded(Task):
    def data(self, split: str, shard: StreamShard) -> Any:
        return DataLoader(torch.zeros(8), 2)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("task", "tables", "words", "hint"),
    [
        (
            WithoutShard,
            FOUR,
            "data.shards is 4, but data(split) of task",
            "data(self, split, shard)",
        ),
        (ByNumber, FOUR, "returns samples by number", "define data(self, split)"),
        (Loaded, FOUR, "returns samples by number", "define data(self, split)"),
        (Task, {**FOUR, "train": {"microbatch": 2}}, "whole batches of 4 shards", "leave train."),
    ],
    ids=["no shard", "arrays", "a loader", "a microbatch"],
)
def test_what_has_no_shards_is_refused(
    task: type[Task], tables: dict[str, Any], words: str, hint: str, tmp_path: Path
) -> None:
    with pytest.raises(SurefootError) as caught:
        train(tmp_path / "run", task("with a length"), **tables)
    assert words in caught.value.message
    assert hint in (caught.value.hint or "")


@pytest.mark.parametrize(
    ("tables", "words"),
    [
        ({"layout": {"shard": 2, "zero_stage": 2}, **FOUR}, "layout.zero_stage is 2"),
        ({"layout": {"virtual_ranks": 4}, **FOUR}, "layout.virtual_ranks is 4"),
    ],
    ids=["stage 2", "virtual ranks"],
)
def test_shards_that_give_ranks_unequal_work_are_refused(
    tables: dict[str, Any], words: str, tmp_path: Path
) -> None:
    for message, hint in on_ranks(2, tmp_path / "run", "of uneven shards", **tables):
        assert words in message
        assert "the same number of batches" in hint


class Normed(Task):
    def model(self) -> nn.Module:
        return nn.Sequential(nn.Linear(1, 4), nn.BatchNorm1d(4), nn.Linear(4, 1))


@pytest.mark.parametrize(("num_shards", "kind"), [(3, "with a length"), (4, "of uneven shards")])
def test_norms_over_all_ranks_need_equal_shards(num_shards: int, kind: str, tmp_path: Path) -> None:
    def job(rank: int) -> Any:
        how = {"data": {"shards": num_shards}, "train": {"batchnorm": "sync"}}
        with pytest.raises(SpecError, match="and the shards of the stream"):
            train(tmp_path / "run", Normed(kind), **how)
        return True

    assert run_ranks(2, job, tmp_path / "ranks") == [True, True]


class Gathers(Task):
    def loss(self, output: Tensor, batch: Any) -> Loss:
        every = all_gather(output)
        return Loss.sum((every - every.T).square().sum() / len(every), len(output), additive=False)


@pytest.mark.parametrize(("num_shards", "kind"), [(2, "with a length"), (4, "of uneven shards")])
def test_a_loss_that_gathers_needs_a_batch_on_each_rank(
    num_shards: int, kind: str, tmp_path: Path
) -> None:
    def job(rank: int) -> Any:
        try:
            how = {"data": {"shards": num_shards}, "train": {"length": "2 steps"}}
            return len(train(tmp_path / "run", Gathers(kind), **how)[0]) > 0
        except SurefootError as error:
            return error.message

    for found in run_ranks(2, job, tmp_path / "ranks"):
        assert found is True if num_shards == 2 else "one batch in each step" in found


def test_ranks_need_a_shard_each(tmp_path: Path) -> None:
    for message, hint in on_ranks(3, tmp_path / "run", "with a length", data={"shards": 2}):
        assert "2 shards for 3 ranks" in message
        assert "data.shards = 3" in hint


def test_a_changed_number_of_shards_is_refused(tmp_path: Path) -> None:
    on_ranks(2, tmp_path / "run", "with a length", leave_at=3)
    with pytest.raises(OtherDataError, match="of 2 shards, and this run has 1") as caught:
        train(tmp_path / "run", Task("with a length"))
    assert "resume on 2 ranks" in (caught.value.hint or "")
    for message, hint in on_ranks(3, tmp_path / "run", "with a length"):
        assert "2 shards" in message
        assert "resume on 2 ranks" in hint


def test_a_stream_without_the_parameter_says_what_to_define(tmp_path: Path) -> None:
    def job(rank: int) -> Any:
        try:
            train(tmp_path / "run", WithoutShard("with a length"))
        except SurefootError as error:
            return error.hint

    for hint in run_ranks(2, job, tmp_path / "ranks"):
        assert "data(self, split, shard)" in hint


def test_a_shard_of_a_cut_stream(tmp_path: Path) -> None:
    class Cut(Task):
        def data(self, split: str, shard: StreamShard) -> Any:
            given = super().data(split, shard)
            return Iterated(given, num_batches=2) if split == "train" else given

    task = Cut("without a length")
    train(tmp_path / "run", task, **FOUR, train={"length": "1 epochs"})
    assert len(task.seen) == 8
