"""An optimizer step, as a sequence of operations.

The gradient of a step is the sum over every item of its global batch, divided once by the global
count. If counts are known before the backward pass, each term is divided by its count first. Else a
single term is scaled by a power of two near 1/count (exact); clipping includes the rest.
"""

from __future__ import annotations

import math
import random
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from surefoot.components.data.feed import Feed
from surefoot.components.data.loader.ahead import Ahead
from surefoot.components.data.loader.batches import StepBatches
from surefoot.components.data.loader.jobs import Reader
from surefoot.components.data.loader.loader import Loader
from surefoot.components.data.order import Keys, derive, mix
from surefoot.components.data.sources.iterated import Iterated
from surefoot.components.optim.backward import backward
from surefoot.components.optim.buffers import LiveBuffers
from surefoot.components.optim.update import GuardedUpdate
from surefoot.components.precision.policy import PLAIN, Policy
from surefoot.components.precision.record import DtypeRecord
from surefoot.components.profiler.phases.clock import (
    BACKWARD,
    CHECKPOINT,
    COMMUNICATION,
    COPY,
    DATA,
    FORWARD,
    OPTIMIZER,
    PhaseClock,
)
from surefoot.contract.state import Scaling, StepReport, leaf_of, learning_rate_of, master_of
from surefoot.contract.task import Batch, Loss, ResolvedTask, Term
from surefoot.core.errors import BadRecordError
from surefoot.runtime.attributes.snapshot import AttributeSnapshot
from surefoot.runtime.attributes.tracker import AttributeTracker
from surefoot.runtime.comm.gathered import Gathering
from surefoot.runtime.comm.group import ALONE
from surefoot.train.step.counts import check_gathered, check_splittable
from surefoot.train.step.factors import Counts, LossFactors
from surefoot.train.step.hooks import GradientHooks
from surefoot.train.step.update import (
    LiveUpdate,
    Totals,
    add_noise,
    add_terms,
    can_apply,
    check_has_gradient,
    has_overflowed,
    run_backward,
)

if TYPE_CHECKING:
    from surefoot.components.optim.average import WeightAverage
    from surefoot.components.stability.noise import GradientNoise
    from surefoot.train.step.ranks import Ranks
    from surefoot.train.step.whole import WholeStep

_INSIDE = nullcontext()
# of a run: the first is observed, the others are the baseline for the time of a compiled step
EAGER_STEPS = 5


class Stepper:
    """Step function of a run; called with the number of the step (from 1)."""

    def __init__(
        self,
        *,
        model: Any,
        task: ResolvedTask,
        feed: Feed,
        updates: list[LiveUpdate],
        seed: int,
        device: torch.device,
        policy: Policy = PLAIN,
        average: WeightAverage | None = None,
    ) -> None:
        self._model, self._task, self._feed, self._updates = model, task, feed, updates
        self._seed, self._device, self._average = seed, device, average
        self._buffers = LiveBuffers(model)
        self.attributes = AttributeTracker(model, task.state)
        self.policy, self._scaler = policy, policy.scaler
        self._hooks = GradientHooks(model)
        self.record: DtypeRecord | None = None  # of the first step of this process
        self._is_first = False
        self.has_moved = False  # weights or optimizer state, in this step
        self.records = True  # whether the first step is observed, and so not compiled
        self.whole: WholeStep | None = None  # set if the step is one graph
        self.ranks: Ranks | None = None  # set if there are several ranks
        self._look: AbstractContextManager[Any] | None = None
        # context without compilation, for steps whose operators are observed
        self.eager: Callable[[], AbstractContextManager[None]] = nullcontext
        self._counts_rows = isinstance(feed.source, Iterated)  # its ids are whole batches
        # on the device of the model; on a CPU the reader of the samples augments
        self._augments = task.augment is not None and device.type != "cpu"
        self.loader = Loader(
            feed, Reader(feed.source, None if self._augments else task.augment, seed)
        )
        self._ahead = Ahead(device)
        self._sizes: list[int] = []  # samples of each microbatch of the current step
        self._draws = derive(seed, 3)
        self._factors = LossFactors(task, device, policy.scaler)
        self._moves = device.type != "cpu"
        # ids of the samples of the last step, in the order of reading
        self.consumed = np.empty(0, dtype=np.int64)
        self.clock = PhaseClock(device)
        self.before_update: Callable[[], None] | None = None  # set while a save copies state
        # called with every batch before its forward pass
        self.saw: Callable[[Batch], None] | None = None
        self.noise: GradientNoise | None = None  # set with `observe.noise`
        # this rank's first microbatch of the step, and how many there are on all ranks
        self._first, self._num_cut = 0, 1
        self._generators = [torch.default_generator]
        if device.type == "cuda":
            self._generators.append(torch.cuda.default_generators[device.index or 0])

    def __call__(self, number: int) -> StepReport:
        started_ns = self.clock.switch(DATA)
        self.has_moved = False
        if self.ranks is not None:
            self.ranks.step(number)
        taken = self.loader.take(number)
        if not taken.batches and self.ranks is None:
            raise BadRecordError(
                f"none of the {len(taken.window.ids)} samples can be read",
                hint="use larger batches, or repair the data",
            )
        batches = self._move_to_device(taken, self.loader.peek)
        waiting_ns = self.clock.switch(FORWARD) - started_ns
        self._buffers.keep()
        sizes, num_samples = self._begin(taken, batches)
        totals: Totals = {}
        keys: dict[str, tuple[str, ...]] = {}
        norm: float | Tensor | None = None
        applied: bool | Tensor = True
        overflowed: bool | Tensor = False
        rate: float | Tensor | None = 0.0
        num_done = 0
        self._observe_first(number)
        for index, update in enumerate(self._updates):
            if number % update.every:
                continue
            begun_s = time.perf_counter()
            if self.ranks is not None and num_done:
                self.ranks.buffers.between()
            known = len(totals)
            norm, was_applied, did_overflow = self._update(update, index, number, batches, totals)
            keys[update.name] = tuple(totals)[known:]
            if self.whole is not None and not self._is_first:
                self.whole.plan.pace.add(
                    time.perf_counter() - begun_s, is_compiled=self.whole.plan.was_called
                )
            applied = was_applied if num_done == 0 else applied & was_applied
            overflowed = overflowed | did_overflow
            rate = learning_rate_of(update.guarded.optimizers[0].param_groups[0])
            num_done += 1
        self._end(number, applied)
        if self.ranks is not None:
            num_samples = self.ranks.num_samples
        if None in sizes:  # the batches do not tell their size
            num_samples = round(float(next((count for _, count, _ in totals.values()), 0)))
        report = StepReport(
            step=number,
            epoch=self._feed.epoch_of(number),
            num_samples=num_samples,
            learning_rate=rate,
            totals=totals,
            norm=norm if num_done == 1 else None,
            was_applied=applied,
            waiting_s=waiting_ns / 1e9,
        )
        report.updates.update(keys)
        if self._scaler is not None:
            if num_done:
                # after all updates, which share one loss scale
                self._scaler.update(overflowed)
            report.scaling = Scaling(self._scaler.scale, overflowed)
        return report

    def _begin(self, taken: StepBatches, batches: list[Batch]) -> tuple[Sequence[int | None], int]:
        """Start the computation of a step; return the sample count of each batch, and their sum.

        The count of a batch is None if the source does not know it.
        """
        self.consumed, self._first = taken.window.ids, taken.first
        sizes: Sequence[int | None] = [*map(len, taken.ids)]
        if self._counts_rows:
            sizes = self._count_samples(taken)
        self._sizes = [size or 1 for size in sizes]
        num_samples = sum(self._sizes) if self._counts_rows else taken.num_samples
        self._num_cut = len(batches)
        if self.ranks is not None:
            self._num_cut = len(self._feed.microbatches(taken.window))
            self.ranks.begin(num_samples, batches)
        self._factors.num_microbatches = self._num_cut
        return sizes, num_samples

    def _observe_first(self, number: int) -> None:
        """Create the record of dtypes if `number` is the first step of this process."""
        self._is_first = self.records and self.record is None
        if self._is_first:
            tf32 = self.policy.compute == "tf32"
            self.record = DtypeRecord(self._model, tf32=tf32, hooked=not self._is_whole(number))
            # only in step 1, so that a resumed run computes the same
            self._look = self.record if number == 1 else None

    def _end(self, number: int, applied: bool | Tensor) -> None:
        """Finish a step after its updates: collectives, buffers, weight average, records."""
        if self.ranks is not None:
            self.clock.switch(COMMUNICATION)
            self.ranks.end(number)
        if applied is not True:
            self._buffers.restore_unless(applied)
        if self.ranks is not None:
            self.ranks.look(number, applied)
            self.clock.switch(OPTIMIZER)
        if self._average is not None:
            self._average.update(applied)
        if self._is_first and self.record is not None:
            self._look = None
            self.record.see_update(
                (each for update in self._updates for each in update.guarded.states()), master_of
            )
        self.clock.end_step(number)
        if self.ranks is not None:
            self.ranks.paces.end()

    def undo_failed_step(self) -> None:
        """Restore the buffers after a step that failed before any weight changed."""
        self._buffers.restore()
        if self._is_first and self.record is not None:
            self.record.leave()
            self.record = None

    def look(self, number: int) -> None:
        """Repeat the passes of a step without its update, to observe it; unseeded draws differ."""
        batches = self._move_to_device(self.loader.read(number))
        self._buffers.keep()
        for index, update in enumerate(self._updates):
            for position, batch in enumerate(batches):
                self._seed_draws(number, position, index)
                with self.policy.context():
                    terms = update.loss(self._model, batch).terms
                counts = self._factors.known_counts(batches, self.ranks)
                factors = [self._factors.of(term, counts, None) for term in terms]
                backward([term.total for term in terms], factors)
            update.guarded.clear_gradients()
        self._buffers.restore()

    def _move_to_device(
        self, taken: StepBatches, peek: Callable[[int], StepBatches | None] | None = None
    ) -> list[Batch]:
        """Return the batches on the device; start the copy of the batches that `peek` returns."""
        batches = taken.batches
        if self._moves:
            self.clock.switch(COPY)
            batches = self._ahead.take(taken, peek)
            self.clock.switch(DATA)
        if self._augments and self._task.augment is not None:
            epoch = taken.window.epoch
            draws = [Keys(self._seed, epoch, ids, self._device) for ids in taken.ids]
            batches = [
                self._task.augment(batch, keys) for batch, keys in zip(batches, draws, strict=True)
            ]
        if self.saw is not None:
            for batch in batches:
                self.saw(batch)
        return batches

    def _count_samples(self, taken: StepBatches) -> list[int | None]:
        """Return the sample count of each batch of an iterable; None if it is not known."""
        source: Any = self._feed.source
        epoch, pairs = taken.window.epoch, zip(taken.ids, taken.batches, strict=True)
        return [source.count_samples(epoch, int(ids[0]), batch) for ids, batch in pairs]

    def _is_whole(self, number: int) -> bool:
        """Return whether step `number` runs as one compiled graph."""
        if self.whole is None or not self.whole.is_on:
            return False
        return not (self.records and number <= EAGER_STEPS)

    def _update(
        self, update: LiveUpdate, index: int, number: int, batches: list[Batch], totals: Totals
    ) -> tuple[float | Tensor, bool | Tensor, bool | Tensor]:
        guarded, switch = update.guarded, self.clock.switch
        if index:
            switch(FORWARD)
        guarded.clear_gradients()
        if self.whole is not None and self._is_whole(number):
            done = self._as_one_graph(self.whole, number, batches[0], totals)
            if done is not None:
                return *done, False
        counts = self._factors.known_counts(batches, self.ranks, update.name)
        is_split = len(batches) > 1 or self.ranks is not None
        scale = self._power_of_two() if is_split and counts is None else None
        inputs = None
        if len(self._updates) > 1:  # a GAN's generator must not leave gradients in the critic
            inputs = [leaf_of(each) for each in guarded.parameters if each.requires_grad]
        mine: Totals = {}
        num_idle = num_backward = 0
        if self.ranks is not None:
            num_idle = self.ranks.num_passes(len(batches), self._num_cut) - len(batches)
            self.ranks.open(index, self._first, self._num_cut)
        if is_split or self._hooks.is_split:
            self._hooks.begin(is_split=is_split)
        is_plain = self.ranks is None and self._look is None
        with _INSIDE if is_plain else self._pass_context() as gathered:
            for position, batch in enumerate(batches):
                if position:
                    switch(FORWARD)
                if self.ranks is not None:
                    self.ranks.microbatch(self._first + position)
                self._seed_draws(number, self._first + position, index)
                with self.policy.context():
                    loss = update.loss(self._model, batch)
                terms = loss.terms
                if is_split:
                    self._begin_split_pass(update, loss, counts, scale, gathered)
                factors = [self._factors.of(term, counts, scale) for term in terms]
                if update.in_backward is not None:
                    add_terms(totals, terms)
                    return *self._update_in_backward(update, terms, factors), False
                switch(BACKWARD)
                if self.ranks is not None and position == len(batches) - 1 and not num_idle:
                    self.ranks.arm(index)
                num_backward += run_backward(
                    terms, factors, inputs, is_even=self.ranks is not None and self.ranks.is_even
                )
                add_terms(mine, terms)
                if self.ranks is not None:
                    self.ranks.passed(index, self._first + position + 1, mine)
                if self.noise is not None and position == 0:
                    # later passes add to these gradients
                    first = guarded.norm(), mine[terms[0].name][1]
        if self.ranks is not None:
            if num_idle:
                self._run_placeholder_passes(self.ranks, update, index, batches, num_idle)
            switch(COMMUNICATION)
            mine = self.ranks.add_up(index, mine)
            if gathered is not None and gathered.was_used and counts is not None:
                check_gathered(counts, mine)
        factor = self._final_factor(guarded, mine, scale)
        if self.ranks is not None:
            self.ranks.finish(index, factor)
        if batches and not num_backward:
            check_has_gradient(update, mine)
        if self.before_update is not None:
            switch(CHECKPOINT)
            self.before_update()
        switch(OPTIMIZER)
        totals.update(
            mine if inputs is None else {f"{update.name}.{name}": row for name, row in mine.items()}
        )
        self.has_moved = True
        norm, applied = guarded.step_if_finite(factor)
        if self.ranks is not None:
            self.ranks.replicas[index].keep(applied)
        if self.noise is not None:
            whole = norm, mine[terms[0].name][1]
            add_noise(self.noise, first, whole, factor, self._sizes)
        return norm, applied, self._scaler is not None and has_overflowed(norm, factor)

    def _begin_split_pass(
        self,
        update: LiveUpdate,
        loss: Loss,
        counts: Counts,
        scale: float | None,
        gathered: Gathering | None,
    ) -> None:
        """Check that the loss may be split, and prepare gradient hooks for its backward pass."""
        joins = gathered is not None and gathered.was_used and self._num_cut == gathered.group.size
        check_splittable(update.name, loss, counts is not None, self._feed, joins_ranks=joins)
        # stages 2 and 3 reduce the gradients of each pass separately
        adds = self.ranks is None or not self.ranks.is_even
        leaves = [leaf_of(each) for each in update.guarded.parameters]
        self._hooks.begin_pass(
            leaves, loss.terms, lambda term: self._factors.divisor(term, counts, scale), adds=adds
        )

    def _final_factor(
        self, guarded: GuardedUpdate, totals: Totals, scale: float | None
    ) -> float | Tensor:
        """Return the factor of the gradient sums; NaN, to skip the step, for a non-finite loss."""
        factor = self._factors.mean_factor(totals, scale)
        if guarded.on_device:
            # adds 0, or NaN if a loss is non-finite
            factor = factor + sum(total * 0.0 for total, _, _ in totals.values())
        elif not all(math.isfinite(total.item()) for total, _, _ in totals.values()):
            factor = math.nan  # a non-finite loss skips the step even if the gradient is finite
        if self._scaler is not None:
            factor = factor / self._scaler.scale
        return factor

    def _run_placeholder_passes(
        self, ranks: Ranks, update: LiveUpdate, index: int, batches: list[Batch], count: int
    ) -> None:
        """Run passes with zero gradients, since other ranks still gather weights from all ranks."""
        batch = batches[-1] if batches else self._move_to_device(self.loader.read(1))[0]
        held = [(buffer, buffer.clone()) for buffer in self._model.buffers()]
        attributes = AttributeSnapshot(self._model)
        self._hooks.is_on = False
        for left in reversed(range(count)):
            with self.policy.context():
                terms = update.loss(self._model, batch).terms
            if not left:
                ranks.replicas[index].arm()
            backward(
                [term.total for term in terms], [torch.zeros_like(term.total) for term in terms]
            )
        self._hooks.is_on = True
        with torch.no_grad():
            for buffer, kept in held:
                buffer.copy_(kept)
        attributes.put_back()

    def _as_one_graph(
        self, whole: WholeStep, number: int, batch: Batch, totals: Totals
    ) -> tuple[float | Tensor, bool | Tensor] | None:
        """Run the step as one graph, timed as forward pass; return None if compilation failed."""
        if self.before_update is not None:
            self.clock.switch(CHECKPOINT)
            self.before_update()
            self.clock.switch(FORWARD)
        self._seed_draws(number, 0, 0)
        self.has_moved = True  # after a failure it is not known what the graph has changed
        done = whole(batch)
        if done is None:
            return None
        add_terms(totals, done[0])
        self._factors.mean_factor(totals, None)
        return done[1:]

    def _update_in_backward(
        self, update: LiveUpdate, terms: tuple[Term, ...], factors: list[Tensor]
    ) -> tuple[float, bool]:
        """Check losses and counts, then run a backward pass that applies the update."""
        assert update.in_backward is not None
        if not can_apply(update, terms):
            return math.nan, False
        if self.before_update is not None:
            self.clock.switch(CHECKPOINT)
            self.before_update()
        self.clock.switch(BACKWARD)
        self.has_moved = True
        norm = update.in_backward.step(lambda: backward([term.total for term in terms], factors))
        self.clock.switch(OPTIMIZER)
        return norm, True

    @contextmanager
    def _pass_context(self) -> Iterator[Gathering]:
        """Return the context of an update's passes: all_gather, and observers in the first step."""
        with Gathering(ALONE if self.ranks is None else self.ranks.group) as gathered:
            if self._look is None:
                yield gathered
            else:
                with self.eager(), self._look:
                    yield gathered

    def _power_of_two(self) -> float:
        """Return a power of two near 1 / num_samples: an exact factor, equal on all ranks."""
        num_samples = sum(self._sizes) if self.ranks is None else len(self.consumed)
        return 2.0 ** -round(math.log2(max(1, num_samples)))

    def _seed_draws(self, number: int, microbatch: int, update: int) -> None:
        """Seed dropout and other draws in the model from (seed, step, global microbatch, update).

        NumPy and Python are seeded only on several ranks or with several microbatches, where any
        number of ranks must draw the same. Otherwise checkpoints hold their states, and seeding
        would take a tenth of a step of a small model.
        """
        key = mix(self._draws ^ (number << 24 | microbatch << 8 | update)) >> 1
        for generator in self._generators:
            generator.manual_seed(key)
        if self.ranks is not None or self._feed.is_cut:
            np.random.seed(key & 0xFFFFFFFF)  # noqa: NPY002 - the masks of wav2vec 2.0 are drawn so
            random.seed(key)
