"""Samples of each step and their split into microbatches, computed directly for any step."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from surefoot.components.data.blocks import BlockShuffle, Order
from surefoot.components.data.order import Permutation
from surefoot.contract.task import Batch, Source
from surefoot.core.errors import DataError
from surefoot.runtime.nested_tensors import find_tensors, map_tensors

Ramp = tuple[tuple[int, int], ...]
BLOCK_SAMPLES = 4096  # positions computed at once: the cost is then under 0.1 us per sample
SOUGHT_SAMPLES = 512  # the same after a seek, which may be one of many


class SampleWindow(NamedTuple):
    """Samples of one step.

    `ids` (int64) are the sample numbers in reading order. `start` is the position of the first of
    them in `epoch`, which is counted from 0.
    """

    epoch: int
    start: int
    ids: np.ndarray


class FeedPiece(NamedTuple):
    """Part of a run with a constant batch size.

    `step` (from 0) is its first step, which reads from position `start` of `epoch` on. `batch` is
    the number of samples per step.
    """

    step: int
    epoch: int
    start: int
    batch: int


class Share(NamedTuple):
    """Microbatches of each step that one rank reads.

    The microbatches of a step are divided into `size` consecutive parts, and this rank reads part
    `rank`. `pieces` is the number of microbatches of a step if no microbatch size is given, by
    default one per rank.
    """

    rank: int = 0
    size: int = 1
    pieces: int | None = None

    @property
    def num_pieces(self) -> int:
        return self.pieces or self.size

    def of(self, count: int) -> tuple[int, int]:
        """Return the range of this rank's microbatches, out of `count`: first index and end index.

        >>> [Share(rank, 3).of(4) for rank in range(3)]
        [(0, 2), (2, 3), (3, 4)]
        """
        return -(-count * self.rank // self.size), -(-count * (self.rank + 1) // self.size)


WHOLE = Share()


@dataclass(frozen=True)
class StreamShard:
    """Part of a stream that a task's `data(split, shard)` returns.

    The parts together have all samples of the stream, each once.

    Args:
        index: Number of this part, from 0.
        count: Number of parts.
    """

    index: int = 0
    count: int = 1


ALL_OF_STREAM = StreamShard()


class Feed:
    """Batch sampler: the samples of each step, as a pure function of (order, batch, ramp).

    The samples of a step therefore do not depend on the workers or on restarts.

    Args:
        source: The data.
        order: The sample order.
        batch: Samples per step, of all ranks together.
        microbatch: Samples per microbatch; None splits a step as `share` describes.
        drop_last: Leave out the last batch of each epoch if it is short; `dropped` is its number of
            samples. It cannot be combined with a ramp.
        ramp: Changes of the batch size, each as (samples, batch): after that many samples, counted
            over all epochs, a step has that batch size. The batch size of the last change is
            `batch`.
        share: The microbatches of a step that this rank reads.

    Raises:
        DataError: If `drop_last` leaves no batch.
    """

    def __init__(
        self,
        source: Source,
        order: Order,
        *,
        batch: int,
        microbatch: int | None = None,
        drop_last: bool = False,
        ramp: Ramp = (),
        share: Share = WHOLE,
    ) -> None:
        self.source, self.order, self.batch, self.ramp = source, order, batch, ramp
        self.share, self._is_cut = share, microbatch is not None
        self.cut_keys: tuple[str, ...] = ()  # keys of the spec that set the microbatches
        self.microbatch = microbatch or -(-batch // share.num_pieces)
        n = order.n
        self.dropped = n % batch if drop_last else 0
        self._end = n - self.dropped
        # samples of the largest step
        self.largest = (
            min(max(batch, *(size for _, size in ramp)), self._end)
            if ramp
            else min(batch, self._end)
        )
        if self._end == 0:
            raise DataError(
                (
                    f"a batch of {batch} is larger than the data set of {n} samples, but "
                    "data.last_batch is 'drop'"
                ),
                hint=f'use a batch of {n} or less, or data.last_batch = "keep"',
            )
        self._pieces = [FeedPiece(0, 0, 0, ramp[0][1] if ramp else batch)]
        # it decreases with a ramp
        self.steps_per_epoch = None if ramp else self.steps_for(self._end)
        for samples, next_batch in ramp[1:]:
            step = self.steps_for(samples)
            made = FeedPiece(step, *self.find_position(step), next_batch)
            # a piece that would end before its first step is dropped
            self._pieces = [piece for piece in self._pieces if piece.step < step] + [made]
        self._epoch = -1
        self._permutation: Permutation | BlockShuffle | None = None
        self._block = np.empty(0, dtype=np.int64)
        self._block_start = 0

    def window(self, step: int) -> SampleWindow:
        """Return the samples of step `step`, counted from 0."""
        epoch, start = self.find_position(step)
        stop = min(start + self.batch_at(step), self._end)
        if (
            epoch != self._epoch
            or start < self._block_start
            or stop > self._block_start + len(self._block)
        ):
            self._look_up(epoch, start)
        offset = start - self._block_start
        return SampleWindow(epoch, start, self._block[offset : offset + stop - start])

    def _look_up(self, epoch: int, start: int) -> None:
        order = self.order
        end = self._block_start + len(self._block)
        goes_on = (epoch, start) == (self._epoch + 1, 0) or (
            epoch == self._epoch and self._block_start < start <= end
        )
        if epoch != self._epoch:
            self._permutation, self._epoch = order.permutation(epoch), epoch
            expect = getattr(self.source, "expect", None)
            if order.window and expect is not None:
                expect(order.chunks(epoch))  # the source may fetch remote chunks in advance
        block = BLOCK_SAMPLES if goes_on else SOUGHT_SAMPLES
        positions = np.arange(start, min(start + max(self.batch, block), order.n), dtype=np.int64)
        self._block = self._permutation(positions) if self._permutation is not None else positions
        self._block_start = start

    @property
    def is_cut(self) -> bool:
        """True if a step may have more than one microbatch."""
        return self._is_cut or self.microbatch < self.batch

    @property
    def has_microbatches(self) -> bool:
        """True if a microbatch size was given that is smaller than the batch."""
        return self._is_cut and self.microbatch < self.batch

    def microbatches(self, window: SampleWindow) -> list[np.ndarray]:
        """Return the sample ids of each microbatch of a step, for all ranks.

        The last microbatch may be shorter.
        """
        pieces = self.share.num_pieces
        size = self.microbatch if self._is_cut or pieces == 1 else -(-len(window.ids) // pieces)
        if len(window.ids) <= size:
            return [window.ids]
        return [window.ids[at : at + size] for at in range(0, len(window.ids), size)]

    def mine(self, window: SampleWindow) -> tuple[int, list[np.ndarray]]:
        """Return the index of this rank's first microbatch of a step, and this rank's microbatches.

        The index counts the microbatches of all ranks. Each microbatch is an array of sample ids. A
        short step may have no microbatch for this rank.
        """
        cut = self.microbatches(window)
        if self.share.size == 1:
            return 0, cut
        first, last = self.share.of(len(cut))
        return first, cut[first:last]

    @property
    def num_unlike(self) -> int:
        """Number of epochs from the start of the run to the end of the ramp; 0 without a ramp.

        All later epochs have the same batch sizes.
        """
        return self._pieces[-1].epoch + 1 if self.ramp else 0

    def batch_at(self, step: int) -> int:
        """Return the batch size of step `step`, counted from 0.

        The last step of an epoch may have fewer samples.
        """
        return min(self._piece(step).batch if self.ramp else self.batch, self.largest)

    def samples_after(self, steps: int) -> int:
        """Return the total number of samples in the first `steps` steps."""
        epoch, start = self.find_position(steps)
        return epoch * self._end + start

    def steps_for(self, samples: float | Fraction) -> int:
        """Return the number of steps that are needed to read `samples` samples.

        The short last batch of each epoch counts with its actual size.
        """
        piece = next(
            each
            for each in reversed(self._pieces)
            if each.epoch * self._end + each.start <= samples
        )
        epochs, rest = divmod(samples, self._end)
        if epochs == piece.epoch:
            return piece.step + min(
                self._steps_to_epoch_end(piece), math.ceil((rest - piece.start) / piece.batch)
            )
        whole = -(-self._end // piece.batch)
        return (
            piece.step
            + self._steps_to_epoch_end(piece)
            + (int(epochs) - piece.epoch - 1) * whole
            + min(whole, math.ceil(rest / piece.batch))
        )

    def step_of(self, epoch: int, position: int) -> int:
        """Return the step that reads the sample at `position` of `epoch`, all counted from 0."""
        return self.steps_for(epoch * self._end + position + 1) - 1

    def epoch_of(self, step: int) -> float:
        """Return the number of epochs, with fraction, that have been read after `step` steps."""
        if self.steps_per_epoch is not None:
            return step / self.steps_per_epoch
        return self.samples_after(step) / self._end

    def find_position(self, step: int) -> tuple[int, int]:
        """Return the epoch, and the position in it, at which step `step` starts; all from 0."""
        if self.steps_per_epoch is not None:
            epoch, within = divmod(step, self.steps_per_epoch)
            return epoch, within * self.batch
        piece = self._piece(step)
        done = step - piece.step
        if done < self._steps_to_epoch_end(piece):
            return piece.epoch, piece.start + done * piece.batch
        epochs, within = divmod(
            done - self._steps_to_epoch_end(piece), -(-self._end // piece.batch)
        )
        return piece.epoch + 1 + epochs, within * piece.batch

    def _piece(self, step: int) -> FeedPiece:
        if len(self._pieces) == 1:
            return self._pieces[0]
        return next(each for each in reversed(self._pieces) if each.step <= step)

    def _steps_to_epoch_end(self, piece: FeedPiece) -> int:
        """Return the number of steps from the start of `piece` to the end of its first epoch."""
        return -(-(self._end - piece.start) // piece.batch)


def to_device(batch: Batch, device: torch.device) -> Batch:
    """Move all tensors of a batch, including nested ones, to `device`; return the batch.

    Any other object that has a method `to` is moved as well.

    Args:
        batch: Tensors in tuples, lists and dicts, or any other object.
        device: The device. Copies from pinned memory are asynchronous (`non_blocking=True`).
    """
    return map_tensors(
        batch,
        lambda tensor: tensor.to(device, non_blocking=True),
        lambda other: other.to(device) if hasattr(other, "to") else other,
    )


def size_of(batch: Batch) -> int | None:
    """Return the number of samples in a batch; None if its structure does not determine it.

    A batch of graphs reports the number as `num_graphs`, and a PackedSequence in `batch_sizes`. In
    other batches, it is the first dimension that all tensors share, or the length that all lists
    share, as in `([image, ...], [target, ...])`. If these numbers differ, the result is None.
    """
    sizes = getattr(batch, "batch_sizes", None)
    # a PackedSequence: the number of sequences at each time step
    if isinstance(sizes, Tensor) and sizes.numel():
        return int(sizes[0])
    for name in ("num_graphs", "batch_size"):
        size = getattr(batch, name, None)
        # a TensorDict can have several batch dimensions
        size = size[0] if isinstance(size, tuple) and size else size
        if isinstance(size, int) and size > 0:
            return size
    if isinstance(batch, Mapping | tuple | list) and len(batch):
        fields = list(batch.values()) if isinstance(batch, Mapping) else list(batch)
        of_tensors, of_lists = _sizes_of_tensors(fields), _sizes_of_lists(batch, fields)
        # tensors of single samples, whose dimensions differ
        if len(of_lists) == len(fields) and len(set(of_tensors)) > 1:
            of_tensors = []
        return _common_size([*of_tensors, *of_lists])
    return _common_size(_sizes_of_tensors([batch]))


def _common_size(sizes: Sequence[int]) -> int | None:
    return sizes[0] if len(set(sizes)) == 1 else None


def _sizes_of_tensors(parts: Sequence[Any]) -> list[int]:
    """Return the first dimension of each tensor and array in `parts`, including nested ones.

    Tensors without dimensions are ignored. For a batch of graphs, return its number of graphs.
    """
    found = []
    for part in parts:
        if isinstance(part, Mapping | tuple | list):
            found += _sizes_of_tensors(list(part.values()) if isinstance(part, Mapping) else part)
        elif (own := size_of(part) if hasattr(part, "num_graphs") else None) is not None:
            found.append(own)
        elif isinstance(part, Tensor | np.ndarray) and part.ndim:
            found.append(int(part.size(0)) if isinstance(part, Tensor) else len(part))
    return found


def _sizes_of_lists(batch: Batch, fields: Sequence[Any]) -> list[int]:
    """Return the lengths of the fields that are lists with one item per sample.

    If the batch itself is a list of samples, return its length instead.
    """
    if (
        isinstance(batch, list)
        and len(fields) > 2
        and all(_is_like(field, fields[0]) for field in fields)
    ):
        return [len(fields)]  # more similar items than inputs and labels
    if isinstance(batch, list) and all(isinstance(field, Mapping) for field in fields):
        return [len(fields)]
    kinds = list if isinstance(batch, list) else (list, tuple)
    lists = [field for field in fields if isinstance(field, kinds)]
    if len(lists) == len(fields):
        return [len(field) for field in lists]
    return [len(field) for field in lists if not _sizes_of_tensors(field)]


def _is_like(one: Any, other: Any) -> bool:
    """Return whether two objects look like the same field of two different samples."""
    if isinstance(one, Tensor) and isinstance(other, Tensor):
        return one.dtype == other.dtype and one.shape[1:] == other.shape[1:]
    return (
        type(one) is type(other)
        and isinstance(one, tuple | list | Mapping)
        and len(one) == len(other)
    )


def count_numbers(batch: Batch) -> int:
    """Return the total number of elements of all tensors in a batch."""
    return sum(each.numel() for each in find_tensors(batch))


def count_batches(iterable: Any) -> int | None:
    """Return the length of an iterable of batches; None if it has none."""
    try:
        return len(iterable)
    except (TypeError, NotImplementedError):
        return None
