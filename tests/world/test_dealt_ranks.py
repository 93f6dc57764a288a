"""Ranks share each batch of a DataLoader: they train to the weights of one process.

A run that was stopped goes on with any number of ranks.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils.data import DataLoader, DistributedSampler, SubsetRandomSampler

from surefoot import Loss, Run, RunSpec, all_gather
from surefoot.components.data.sources.iterated import Iterated
from surefoot.contract import loop_ledger
from surefoot.core.errors import SurefootError
from tests.train.small import faults_of
from tests.train.test_dealt_batches import train
from tests.train.test_dealt_checks import Normed
from tests.train.test_loader_resume import LOADERS, NUMBERS, Augmented, ByEpoch, Task
from tests.world.ranks import run_ranks

SAMPLE: dict[str, Any] = {"data": {"draws": "sample"}}


def on_ranks(
    num_ranks: int,
    folder: Path,
    make: Callable[[], Any],
    leave_at: int | None = None,
    **tables: Any,
) -> list[Any]:
    """The number of samples that each rank trained on, and the weights at its end."""
    if num_ranks == 1:
        seen, weights = train(folder, make(), leave_at, **tables)
        return [[sum(map(len, seen)), [each.tolist() for each in weights]]]

    def job(rank: int) -> Any:
        try:
            seen, weights = train(folder, make(), leave_at, **tables)
        except SurefootError as error:
            return [error.message, error.hint]
        return [sum(map(len, seen)), [each.tolist() for each in weights]]

    return run_ranks(num_ranks, job, folder.parent / f"{folder.name}-{num_ranks}-{leave_at}")


def assert_close(found: Any, weights: Any) -> None:
    for mine, theirs in zip(found, weights, strict=True):
        torch.testing.assert_close(torch.tensor(mine), torch.tensor(theirs), rtol=1e-6, atol=1e-7)


KINDS = ("shuffled by a generator", "augmented by workers", "by epoch", "weighted")


@pytest.mark.quick("augmented by workers", "by epoch")
@pytest.mark.parametrize("kind", KINDS)
def test_two_ranks_train_as_one_process(kind: str, tmp_path: Path) -> None:
    make = LOADERS[kind]
    ((total, weights),) = on_ranks(1, tmp_path / "one", make, **SAMPLE)
    found = on_ranks(2, tmp_path / "two", make)
    assert sum(each[0] for each in found) == total
    assert all(each[0] > total / 3 for each in found)
    for _, mine in found:
        assert_close(mine, weights)
    checked = loop_ledger.check(tmp_path / "two")
    assert checked.holds
    assert checked.num_samples == total


@pytest.mark.quick("augmented by workers")
@pytest.mark.parametrize("kind", KINDS)
def test_a_stopped_run_goes_on_with_other_numbers_of_ranks(kind: str, tmp_path: Path) -> None:
    make, size = LOADERS[kind], len(LOADERS[kind]())
    ((_, weights),) = on_ranks(1, tmp_path / "one", make, **SAMPLE)
    for num_ranks, leave_at in ((2, 2), (1, size + 2), (3, 2 * size + 1), (2, None)):
        found = on_ranks(num_ranks, tmp_path / "stopped", make, leave_at, **SAMPLE)
    for _, mine in found:
        assert_close(mine, weights)
    assert loop_ledger.check(tmp_path / "stopped").holds


def test_draws_that_change_with_the_number_of_ranks_are_named(tmp_path: Path) -> None:
    make = LOADERS["augmented"]
    on_ranks(2, tmp_path / "run", make, leave_at=2)
    for num_ranks, now in ((1, "batch now"), (2, "sample now")):
        on_ranks(num_ranks, tmp_path / "run", make, leave_at=4 + num_ranks)
        assert now in faults_of(tmp_path / "run")[-1].detail
    on_ranks(2, tmp_path / "run", make)
    assert len(faults_of(tmp_path / "run")) == 2


def test_virtual_ranks_give_the_same_bits(tmp_path: Path) -> None:
    make = LOADERS["augmented by workers"]
    layout = {"layout": {"virtual_ranks": 4}}
    (one,) = on_ranks(1, tmp_path / "one", make, **layout)
    for found in on_ranks(2, tmp_path / "two", make, **layout):
        assert found[1] == one[1]


@pytest.mark.parametrize(
    ("num_ranks", "accumulated"), [(2, {"accumulate": 4}), (3, {"batch": 4, "microbatch": 1})]
)
def test_ranks_share_the_batches_of_an_accumulated_step(
    num_ranks: int, accumulated: dict[str, int], tmp_path: Path
) -> None:
    def make() -> Any:
        return DataLoader(Augmented(), 3, shuffle=True)

    how: dict[str, Any] = {"train": accumulated, **SAMPLE}
    ((total, weights),) = on_ranks(1, tmp_path / "one", make, **how)
    found = on_ranks(num_ranks, tmp_path / "ranks", make, **how)
    assert sum(each[0] for each in found) == total
    for _, mine in found:
        assert_close(mine, weights)
    assert loop_ledger.check(tmp_path / "ranks").holds


class Compared(Task):
    """Compares the samples of all ranks."""

    def loss(self, output: Tensor, batch: Any) -> Loss:
        every = all_gather(output)
        return Loss.sum((every - every.T).square().sum() / len(every), len(output), additive=False)


def test_ranks_share_the_last_step_of_a_shortened_epoch(tmp_path: Path) -> None:
    def make() -> Any:
        return Iterated(DataLoader(NUMBERS, 4), num_batches=3)

    how: dict[str, Any] = {"train": {"batch": 2, "microbatch": 1}, **SAMPLE}
    ((total, weights),) = on_ranks(1, tmp_path / "one", make, **how)
    found = on_ranks(2, tmp_path / "two", make, **how)
    assert sum(each[0] for each in found) == total == 3 * 12
    for _, mine in found:
        assert_close(mine, weights)


def test_passes_that_ranks_may_not_share_equally_are_refused(tmp_path: Path) -> None:
    def job(rank: int) -> Any:
        loaders = (
            DataLoader(NUMBERS[:16], 4, sampler=SubsetRandomSampler(range(10))),
            DataLoader(NUMBERS, batch_sampler=ByEpoch()),
        )
        told = []
        for number, loader in enumerate(loaders):
            spec = RunSpec(train={"length": "1 steps", "batchnorm": "sync"})
            try:
                with Run(spec, Normed(loader), folder=tmp_path / str(number), quiet=True):
                    pass
            except SurefootError as error:
                told.append(error.message)
        return told

    for found in run_ranks(2, job, tmp_path / "ranks"):
        assert ["the same number of microbatches" in each for each in found] == [True, True]


@pytest.mark.parametrize("drop_last", [False, True])
def test_a_loss_that_gathers_needs_a_microbatch_on_each_rank(
    drop_last: bool, tmp_path: Path
) -> None:
    def job(rank: int) -> Any:
        loader = DataLoader(NUMBERS[:9], 4, drop_last=drop_last)
        spec = RunSpec(train={"length": "3 steps"}, observe={"tensorboard": False})
        try:
            with Run(spec, Compared(loader), folder=tmp_path / "run", quiet=True) as run:
                return [report.step for report in run.steps()]
        except SurefootError as error:
            return error.message

    for found in run_ranks(2, job, tmp_path / "ranks"):
        if drop_last:
            assert found == [1, 2, 3]
        else:
            assert "a batch of 1 of the DataLoader cannot be divided among 2 ranks" in found


def distributed(rank: int) -> Any:
    sampler = DistributedSampler(NUMBERS, num_replicas=2, rank=rank)
    return DataLoader(NUMBERS, 4, sampler=sampler)


def seeded_apart(rank: int) -> Any:
    return DataLoader(NUMBERS, 4, shuffle=True, generator=torch.Generator().manual_seed(rank))


@pytest.mark.parametrize(
    ("make", "words", "hint"),
    [
        (distributed, "divides the samples among ranks, and so does the run", "leave it out"),
        (seeded_apart, "rank 1 has other samples than that of rank 0", "of the same seed"),
    ],
)
def test_ranks_with_other_samples_are_refused(
    make: Callable[[int], Any], words: str, hint: str, tmp_path: Path
) -> None:
    def job(rank: int) -> Any:
        try:
            train(tmp_path / "run", make(rank))
        except SurefootError as error:
            return [error.message, error.hint]
        return None

    for message, told in run_ranks(2, job, tmp_path / "ranks"):
        assert words in message
        assert hint in told


def test_a_batch_with_fewer_samples_than_ranks_is_refused(tmp_path: Path) -> None:
    found = on_ranks(3, tmp_path / "run", lambda: DataLoader(NUMBERS, 2))
    assert all("a batch of 2 has 2 microbatches for 3 ranks" in each[0] for each in found), found
