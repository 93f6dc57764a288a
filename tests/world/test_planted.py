"""What is claimed of several ranks is seen to fail where it is broken.

Faults planted one at a time, in real runs.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, Self

import pytest
import torch

from surefoot.components.data.feed import Share
from surefoot.components.parallel.norms import JoinedBuffers
from surefoot.components.parallel.replicate import Replicas
from surefoot.components.parallel.totals import Totals
from surefoot.runtime.comm.group import Group
from surefoot.train.record import batch_results
from tests.world.ranks import run_ranks
from tests.world.test_run import apart, train

Plant = Callable[[pytest.MonkeyPatch], None]


def means_of_ranks(patch: pytest.MonkeyPatch) -> None:
    """What torch's DistributedDataParallel does: right only where all ranks count alike."""
    give = Replicas._write_back_gradients

    def averaged(self: Replicas, bucket: Any) -> None:
        bucket.flat.div_(self._group.size)
        give(self, bucket)

    patch.setattr(Replicas, "_write_back_gradients", averaged)


def counts_of_one_rank(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(
        Totals,
        "add",
        lambda self, update, mine, extra=(): (dict(mine), [float(each) for each in extra]),
    )


def only_the_last_pass(patch: pytest.MonkeyPatch) -> None:
    """The sum of the last microbatch alone."""
    arm = Replicas.arm

    def forgetting(self: Replicas) -> None:
        for each in self._parameters:
            each.grad = None
        arm(self)

    patch.setattr(Replicas, "arm", forgetting)


def a_bucket_is_not_sent(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Group, "begin_to_add", lambda self, tensor: lambda: None)


def statistics_of_one_rank(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(JoinedBuffers, "_join_norms", lambda self: None)


def draws_by_the_rank_s_own_count(patch: pytest.MonkeyPatch) -> None:
    """Dropout from the number of the microbatch on this rank: two ranks draw alike."""
    patch.setattr(Share, "of", lambda self, count, of=Share.of: Zero(*of(self, count)))


class Zero(tuple[int, int]):
    """A first and a last microbatch; the first one is told as 0."""

    __slots__ = ()

    def __new__(cls, first: int, last: int) -> Self:
        return super().__new__(cls, (Told(first), last))


class Told(int):
    """A number that slices as it is, and says that it is 0 when it is added to."""

    def __add__(self, other: int) -> int:
        return other


def samples_that_overlap(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Share, "of", lambda self, count: (0, -(-count // self.size)))


def a_guard_of_one_rank(patch: pytest.MonkeyPatch) -> None:
    """Loss and gradient are summed, and each rank looks at numbers of its own."""
    patch.setattr(
        Totals,
        "add",
        lambda self, update, mine, extra=(): (dict(mine), [float(each) for each in extra]),
    )
    patch.setattr(Group, "begin_to_add", lambda self, tensor: lambda: None)


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> Any:
    return train(tmp_path_factory.mktemp("alone") / "run")


@pytest.mark.quick("a_bucket_is_not_sent", "samples_that_overlap")
@pytest.mark.parametrize(
    "plant",
    [
        means_of_ranks,
        counts_of_one_rank,
        only_the_last_pass,
        a_bucket_is_not_sent,
        statistics_of_one_rank,
        draws_by_the_rank_s_own_count,
        samples_that_overlap,
        a_guard_of_one_rank,
    ],
    ids=lambda plant: plant.__name__,
)
def test_a_planted_fault_shows_in_the_numbers(plant: Plant, alone: Any, tmp_path: Path) -> None:
    def job(rank: int) -> Any:
        with pytest.MonkeyPatch.context() as patch:
            plant(patch)
            return train(tmp_path / "run")

    found = run_ranks(2, job, tmp_path / "ranks")
    assert any("losses" not in each or apart(alone, each) > 1e-8 for each in found)


def test_an_evaluation_that_merges_in_the_order_of_ranks_shows(tmp_path: Path) -> None:
    """Sums of numbers of unlike size: the order shows in the last bits."""
    sizes = torch.randn(40, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    parts = [batch_results.BatchResult(1, (("loss", size, 1, 1.0),), {}) for size in sizes]
    in_order, by_rank = batch_results.Merged(), batch_results.Merged()
    for part in parts:
        in_order.add(part)
    for part in (*parts[::2], *parts[1::2]):
        by_rank.add(part)
    assert in_order.terms["loss"][0].value() != by_rank.terms["loss"][0].value()
