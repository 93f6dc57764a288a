"""Batches of one step as the loader returns them, its settings, and the notices that it sends."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, NamedTuple, Self

import numpy as np
import torch

from surefoot.components.data.feed import SampleWindow, to_device
from surefoot.components.data.in_place import find_arrays
from surefoot.components.data.loader.bad import ReadResult, UnreadableSample
from surefoot.contract.task import Batch

if TYPE_CHECKING:
    from surefoot.components.data.loader.crew import Start


class StepBatches(NamedTuple):
    """Batches of step `number` for this rank, one per microbatch.

    A microbatch without readable samples has no batch. `ids` has the sample numbers of each batch.
    `first` is the index of this rank's first microbatch among the microbatches of all ranks. `bad`
    are the unreadable samples.
    """

    number: int
    window: SampleWindow
    batches: list[Batch]
    ids: list[np.ndarray]
    bad: tuple[UnreadableSample, ...] = ()
    first: int = 0

    @classmethod
    def of(
        cls,
        number: int,
        window: SampleWindow,
        cut: Iterable[np.ndarray],
        reads: Iterable[ReadResult],
        first: int = 0,
    ) -> Self:
        """Create the batches of a step from the results of reading its microbatches.

        `cut` has the sample numbers of each microbatch.
        """
        batches: list[Batch] = []
        kept: list[np.ndarray] = []
        bad: tuple[UnreadableSample, ...] = ()
        for ids, read in zip(cut, reads, strict=True):
            bad += read.bad
            if read.batch is not None:
                batches.append(read.batch)
                kept.append(read.readable_ids(ids) if read.bad else ids)
        return cls(number, window, batches, kept, bad, first)

    @property
    def num_samples(self) -> int:
        """Number of samples in the batches."""
        return sum(map(len, self.ids))


def bytes_of(batch: Batch) -> int:
    """Return the total bytes of the tensors and arrays in a batch."""
    return sum(
        each.nbytes if isinstance(each, np.ndarray) else each.numel() * each.element_size()
        for each in find_arrays(batch)
    )


Peek = Callable[[int], StepBatches | None]  # batches of a step if they have been read already


def make_copier(device: torch.device) -> Callable[[StepBatches, Peek | None], list[Batch]]:
    """Return a function that returns the batches of a step on `device`.

    On CUDA it starts to copy the batches of the next step, which its second argument returns.
    """
    if device.type == "cpu":
        return lambda taken, _: [to_device(batch, device) for batch in taken.batches]
    from surefoot.components.data.loader.ahead import Ahead

    return Ahead(device).take


Kind = Literal["auto", "thread", "process"]


class LoaderNotice(NamedTuple):
    """Notice from a loader to its run.

    `kind` is worker (a worker failed), starving (steps wait for data), tuned (the number of workers
    was found), bad-record (a sample is left out) or data (a problem with the iterable).
    """

    kind: Literal["worker", "starving", "tuned", "bad-record", "data"]
    step: int
    what: str
    then: str  # the action taken, or the action to take


@dataclass(frozen=True, kw_only=True)
class LoaderSettings:
    """Settings of a loader.

    It has `workers` workers of type `kind`; "auto" is the faster type. Each worker reads `prefetch`
    microbatches ahead. All batches read ahead take at most `memory_bytes`. A worker that sends
    nothing for `timeout_s` seconds while the loader waits for it is replaced. With 0 workers, each
    step reads its samples in the main process. If `most` is not 0, the loader searches for the best
    number of workers, up to `most`, during the run.
    """

    workers: int = 0
    most: int = 0
    kind: Kind = "auto"
    prefetch: int = 2
    start: Start = "auto"
    timeout_s: float = 4.0
    memory_bytes: int = 2 << 30
