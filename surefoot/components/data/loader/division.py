"""Division of the batches of a DataLoader into microbatches, from their sample indices."""

from __future__ import annotations

from typing import Any, NamedTuple

from torch.utils.data import BatchSampler, DistributedSampler

from surefoot.components.data.feed import Share
from surefoot.components.data.sources.iterated import Iterated
from surefoot.core.errors import DataError, SpecError
from surefoot.core.ranks.pieces import check_pieces


class Deal(NamedTuple):
    """Division of the batches of a DataLoader into microbatches.

    A step has `batches` batches of the loader. Each is divided into microbatches of `size` samples,
    at most `parts` of them, or into `parts` of equal sizes if `size` is None. `parts` is a multiple
    of the number of ranks. `share` are the microbatches of this rank. `seed` is the seed of random
    draws in the dataset.

    The microbatches of an epoch have the numbers 0 to `total` - 1. If a batch is too small for all
    of its parts, the last numbers of its step stand for no microbatch.
    """

    seed: int
    share: Share
    parts: int
    size: int | None
    batches: int
    total: int

    @property
    def step(self) -> int:
        """Largest number of microbatches of a step, of all ranks."""
        return self.parts * self.batches

    def cut(self, batches: list[list[Any]]) -> list[list[Any]]:
        """Return the samples of each microbatch of a step, from those of its batches.

        >>> Deal(0, Share(), parts=3, size=None, batches=1, total=3).cut([[5, 6, 7, 8]])
        [[5, 6], [7, 8]]
        """
        found = []
        for ids in batches:
            if self.size is not None and len(ids) > self.size * self.parts:
                raise DataError(
                    f"a batch of the DataLoader has {len(ids)} samples, more than the "
                    f"{self.size * self.parts} of {self.parts} microbatches of {self.size}",
                    hint="the attribute batch_size of its batch sampler must be the number of "
                    "samples of the largest batch",
                )
            size = self.size or max(1, -(-len(ids) // self.parts))
            found += [ids[start : start + size] for start in range(0, len(ids), size)]
        return found

    def own(self, cut: list[list[Any]]) -> list[list[Any]]:
        """Return the microbatches of this rank, out of all of a step."""
        begin, end = self.share.of(len(cut))
        return cut[begin:end]

    def own_numbers(self, first: int) -> range:
        """Return the numbers of this rank in the step whose first number is `first`."""
        begin, end = self.share.of(min(self.step, max(self.total - first, 0)))
        return range(first + begin, first + end)

    def next_own(self, number: int) -> int:
        """Return the first number of this rank from `number` on; `total` at the end."""
        for first in range(number - number % self.step, self.total, self.step):
            own = self.own_numbers(first)
            if number < own.stop:
                return max(number, own.start)
        return self.total


def make_deal(
    source: Iterated, size: int | None, num_batches: int, share: Share, seed: int
) -> Deal:
    """Return the division of steps of `num_batches` batches into microbatches of `size` samples.

    Without a size, each batch has as many equal parts as `share` has pieces. Raises SpecError if a
    rank would have no microbatch.
    """
    loader = source.loader
    if share.size > 1:
        _check_undivided(loader)
    largest = getattr(loader.batch_sampler, "batch_size", None)
    if size is None:
        parts = share.num_pieces
    elif isinstance(largest, int):
        parts = -(-largest // (size * share.size)) * share.size
    else:
        raise SpecError(
            f"train.microbatch is {size}, but the batch sampler of the DataLoader, a "
            f"{type(loader.batch_sampler).__name__}, has no batch_size",
            hint="leave train.microbatch out, or give the batch sampler the attribute batch_size, "
            "the number of samples of its largest batch",
        )
    if isinstance(largest, int) and num_batches == 1:
        check_pieces([largest], size, share.size)
    return Deal(seed, share, parts, size, num_batches, source.num_batches * parts)


def _check_undivided(loader: Any) -> None:
    """Raise SpecError for a loader whose sampler divides the samples among ranks itself."""
    samplers = (loader.sampler, getattr(loader.batch_sampler, "sampler", None))
    for sampler in (loader.batch_sampler, *samplers):
        if isinstance(sampler, DistributedSampler) and sampler.num_replicas > 1:
            raise SpecError(
                f"the {type(sampler).__name__} of the DataLoader divides the samples among ranks, "
                "and so does the run",
                hint="leave it out: DataLoader(dataset, batch_size=the batch of all ranks, "
                "shuffle=True)",
            )


def find_sizes(loader: Any) -> list[int]:
    """Return the usual number of samples of a batch, and that of a short last one.

    The result is empty for a batch sampler that is not torch's, whose batches may have any size.
    """
    batches = loader.batch_sampler
    sampler: Any = getattr(batches, "sampler", None)
    if type(batches) is not BatchSampler:
        return []
    try:
        last = 0 if batches.drop_last else len(sampler) % batches.batch_size
    except TypeError:
        return []
    return [batches.batch_size, last] if last else [batches.batch_size]


def check_equal_passes(source: Iterated, deal: Deal) -> None:
    """Raise SpecError if ranks could compute different numbers of forward passes in a step.

    With synchronized BatchNorm a rank with more passes would wait for the others.
    """
    sizes = find_sizes(source.loader)
    if (
        len(sizes) != 1
        or len(deal.cut([[0] * sizes[0]] * deal.batches)) % deal.share.size
        or source.num_batches % deal.batches
    ):
        raise SpecError(
            'train.batchnorm is "sync", and the batches of the DataLoader do not give each of '
            f"{deal.share.size} ranks the same number of microbatches",
            hint="set drop_last=True in the DataLoader, and a batch_size that is a multiple of "
            "the number of ranks",
        )
