"""Batches of a step: read, moved to the device, augmented there, and counted."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from surefoot.components.data.feed import Feed
from surefoot.components.data.loader.batches import Peek, StepBatches, make_copier
from surefoot.components.data.loader.jobs import Reader, sample_ids
from surefoot.components.data.loader.loader import Loader
from surefoot.components.data.order import Keys
from surefoot.components.data.sources.iterated import Iterated
from surefoot.components.profiler.phases.clock import COPY, DATA, FORWARD, PhaseClock
from surefoot.contract.task import Batch, ResolvedTask
from surefoot.core.errors import BadRecordError
from surefoot.train.step.collectives import Collectives
from surefoot.train.step.program import StepInput


class InputReader:
    """Reader of the input of each step, through the data loader."""

    def __init__(
        self,
        feed: Feed,
        task: ResolvedTask,
        *,
        seed: int,
        device: torch.device,
        clock: PhaseClock,
        collectives: Collectives,
    ) -> None:
        self.feed, self._task, self._seed, self._device = feed, task, seed, device
        self._clock, self._collectives = clock, collectives
        self._counts_rows = isinstance(feed.source, Iterated)  # its ids are whole batches
        self._is_divided = isinstance(feed.source, Iterated) and feed.source.is_divided
        # on the device of the model; on a CPU the reader of the samples augments
        self._augments = task.augment is not None and device.type != "cpu"
        augment = None if self._augments else task.augment
        self.loader = Loader(feed, Reader(feed.source, augment, seed))
        self._moves = device.type != "cpu"
        self._copy = make_copier(device)
        # ids of the samples of the last step, in the order of reading
        self.consumed = np.empty(0, dtype=np.int64)

    def read(self, number: int) -> StepInput:
        """Return the input of step `number`. Raises BadRecordError if no sample can be read."""
        started_ns = self._clock.switch(DATA)
        self._collectives.begin_reading(number)
        taken = self.loader.take(number)
        if not taken.batches and not self._collectives.splits:
            raise BadRecordError(
                f"none of the {len(taken.window.ids)} samples can be read",
                hint="use larger batches, or repair the data",
            )
        batches = taken.batches
        if self._moves:
            batches = self._move_to_device(taken, self.loader.peek)
        waiting_s = (self._clock.switch(FORWARD) - started_ns) / 1e9
        self.consumed = taken.window.ids
        return self._as_input(taken, batches, waiting_s)

    def read_again(self, number: int) -> StepInput:
        """Return the input of step `number` anew, in place of the loader's next step."""
        taken = self.loader.read(number)
        return self._as_input(
            taken, self._move_to_device(taken) if self._moves else taken.batches, 0.0
        )

    def _as_input(self, taken: StepBatches, batches: list[Batch], waiting_s: float) -> StepInput:
        window, sizes, is_sized = taken.window, [*map(len, taken.ids)], True
        num_samples, num_microbatches = sum(sizes), len(batches)
        if self._collectives.splits:
            num_microbatches = len(self.feed.microbatches(window))
        first = taken.first
        if self._counts_rows:
            if self._is_divided:
                source: Any = self.feed.source
                first, num_microbatches = source.count_step()
            counted = self._count_samples(taken)
            sizes, is_sized = [size or 1 for size in counted], None not in counted
            num_samples = sum(sizes)
        return StepInput(
            taken.number,
            self.feed.epoch_of(taken.number),
            batches,
            first,
            num_microbatches,
            sizes,
            num_samples,
            is_sized,
            len(window.ids),
            waiting_s,
        )

    def _move_to_device(self, taken: StepBatches, peek: Peek | None = None) -> list[Batch]:
        """Return the batches on the device; start the copy of the batches that `peek` returns."""
        self._clock.switch(COPY)
        batches = self._copy(taken, peek)
        self._clock.switch(DATA)
        if self._augments and self._task.augment is not None:
            epoch = taken.window.epoch
            draws = [
                Keys(self._seed, epoch, sample_ids(self.feed.source, ids), self._device)
                for ids in taken.ids
            ]
            batches = [
                self._task.augment(batch, keys) for batch, keys in zip(batches, draws, strict=True)
            ]
        return batches

    def _count_samples(self, taken: StepBatches) -> list[int | None]:
        """Return the sample count of each batch of an iterable; None if it is not known."""
        source: Any = self.feed.source
        epoch, pairs = taken.window.epoch, zip(taken.ids, taken.batches, strict=True)
        return [source.count_samples(epoch, int(ids[0]), batch) for ids, batch in pairs]
