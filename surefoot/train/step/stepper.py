"""An optimizer step, as a sequence of operations.

The gradient of a step is the sum over every item of its global batch, divided once by the global
count. With counts known before the backward pass, each term is scaled by its count first; else a
single term is scaled by a power of two near 1/count (exact), and clipping includes the rest.
"""

from __future__ import annotations

import math
import random
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from surefoot.components.data import Feed, Iterated, Keys
from surefoot.components.data.loader import Ahead, Loader, Reader, Taken
from surefoot.components.data.order import derive, mix
from surefoot.components.optim import (
    GuardedUpdate,
    LiveBuffers,
    UpdateInBackward,
    WeightAverage,
    backward,
    leaf_of,
    master_of,
)
from surefoot.components.precision import PLAIN, DtypeRecord, Policy
from surefoot.components.profiler import (
    BACKWARD,
    CHECKPOINT,
    COMMUNICATION,
    COPY,
    DATA,
    FORWARD,
    OPTIMISER,
    PhaseClock,
)
from surefoot.components.stability import GradientNoise
from surefoot.contract.state import Scaling, StepReport
from surefoot.contract.task import Batch, Loss, Resolved, Term
from surefoot.core.errors import BadRecordError, TaskError
from surefoot.runtime.attributes import AttributeSnapshot, AttributeTracker
from surefoot.runtime.comm import ALONE
from surefoot.runtime.comm.gathered import Gathering
from surefoot.train.step.counts import Count, check_count, check_gathered, check_splittable
from surefoot.train.step.hooks import GradientHooks

if TYPE_CHECKING:
    from surefoot.train.step.ranks import Ranks
    from surefoot.train.step.whole import WholeStep

MAX_CONSTANTS = 1000
_INSIDE = nullcontext()
# of a run: the first is looked at, the others are what a compiled step is measured against
EAGER_STEPS = 5


@dataclass(frozen=True)
class LiveUpdate:
    """An `Update` of the task with its optimizers: the loss, and how to apply gradients."""

    name: str
    loss: Callable[[Any, Batch], Loss]
    guarded: GuardedUpdate
    every: int = 1
    in_backward: UpdateInBackward | None = None  # where it is, the backward pass updates


class Stepper:
    """Step function of a run; called with the number of the step (from 1)."""

    def __init__(
        self,
        *,
        model: Any,
        task: Resolved,
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
        self.record: DtypeRecord | None = None  # of the first step that was done here
        self._is_first = False
        self.has_moved = False  # weights or the optimizer's state, in the current step
        self.records = True  # whether the first step is looked at, and so not compiled
        self.whole: WholeStep | None = None  # set where the step is one graph
        self.ranks: Ranks | None = None  # set where it is shared
        self._look: AbstractContextManager[Any] | None = None
        # nothing is compiled inside: not while operators are seen
        self.eager: Callable[[], AbstractContextManager[None]] = nullcontext
        self._counts_rows = isinstance(feed.source, Iterated)  # its ids are whole batches
        # where the model is: else whoever reads does it
        self._augments = task.augment is not None and device.type != "cpu"
        self.loader = Loader(
            feed, Reader(feed.source, None if self._augments else task.augment, seed)
        )
        self._ahead = Ahead(device)
        self._sizes: list[int] = []  # the samples of each microbatch of the step that is computed
        self._draws = derive(seed, 3)
        self._constants: dict[tuple[float, torch.dtype], Tensor] = {}
        self._moves = device.type != "cpu"
        # the samples of the step before, in the order they were read
        self.consumed = np.empty(0, dtype=np.int64)
        self.clock = PhaseClock(device)
        self.before_update: Callable[[], None] | None = None  # set while the state is being copied
        # told of every batch before it is computed with
        self.saw: Callable[[Batch], None] | None = None
        self.noise: GradientNoise | None = None  # set where the noise of the gradient is asked for
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
                hint="use larger batches, or mend the data",
            )
        batches = self._place(taken, self.loader.peek)
        self.consumed, num_samples, self._first = taken.window.ids, taken.num_samples, taken.first
        waiting_ns = self.clock.switch(FORWARD) - started_ns
        self._buffers.keep()
        sizes = self._count_samples(taken) if self._counts_rows else [*map(len, taken.ids)]
        self._sizes = [size or 1 for size in sizes]
        num_samples = sum(self._sizes) if self._counts_rows else num_samples
        self._num_cut = len(batches)
        if self.ranks is not None:
            self._num_cut = len(self._feed.microbatches(taken.window))
            self.ranks.begin(num_samples, batches)
        totals: dict[str, tuple[Tensor, Count, float]] = {}
        keys: dict[str, tuple[str, ...]] = {}
        norm: float | Tensor | None = None
        applied: bool | Tensor = True
        overflowed: bool | Tensor = False
        rate: float | Tensor = 0.0
        num_done = 0
        self._is_first = self.records and self.record is None
        if self._is_first:
            tf32 = self.policy.compute == "tf32"
            self.record = DtypeRecord(self._model, tf32=tf32, hooked=not self._is_whole(number))
            # the same whether a run was left before this step, or not
            self._look = self.record if number == 1 else None
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
            rate = update.guarded.optimizers[0].param_groups[0]["lr"]
            num_done += 1
        if self.ranks is not None:
            self.clock.switch(COMMUNICATION)
            self.ranks.end(number)
            num_samples = self.ranks.num_samples
        if applied is not True:
            self._buffers.put_back_unless(applied)
        if self.ranks is not None:
            self.ranks.look(number, applied)
            self.clock.switch(OPTIMISER)
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
        if None in sizes:  # the batches do not say it
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
                # after all updates: one scale holds for the whole step
                self._scaler.update(overflowed)
            report.scaling = Scaling(self._scaler.scale, overflowed)
        return report

    def take_back(self) -> None:
        """Undo a step that failed before any weight changed; the next step clears gradients."""
        self._buffers.put_back()
        if self._is_first and self.record is not None:
            self.record.leave()
            self.record = None

    def look(self, number: int) -> None:
        """Repeat a step's passes without the update, for an observer; unseeded draws differ."""
        batches = self._place(self.loader.read(number))
        self._buffers.keep()
        for index, update in enumerate(self._updates):
            for position, batch in enumerate(batches):
                self._seed_draws(number, position, index)
                with self.policy.context():
                    terms = update.loss(self._model, batch).terms
                backward(
                    [term.total for term in terms],
                    [self._factor(term, self._known_counts(batches), None) for term in terms],
                )
            update.guarded.clear_gradients()
        self._buffers.put_back()

    def _place(
        self, taken: Taken, peek: Callable[[int], Taken | None] | None = None
    ) -> list[Batch]:
        """Return the batches on the device and start the copy of the next step's from `peek`."""
        batches = taken.batches
        if self._moves:
            self.clock.switch(COPY)
            batches = self._ahead.take(taken, peek)
            self.clock.switch(DATA)
        if self._augments and self._task.augment is not None:
            draws = [Keys(self._seed, taken.window.epoch, ids) for ids in taken.ids]
            batches = [
                self._task.augment(batch, keys) for batch, keys in zip(batches, draws, strict=True)
            ]
        if self.saw is not None:
            for batch in batches:
                self.saw(batch)
        return batches

    def _count_samples(self, taken: Taken) -> list[int | None]:
        """Return the sample count of each batch of an iterable; None if the batch does not say."""
        source: Any = self._feed.source
        pairs = zip(taken.ids, taken.batches, strict=True)
        return [
            source.count_samples(taken.window.epoch, int(ids[0]), batch) for ids, batch in pairs
        ]

    def _is_whole(self, number: int) -> bool:
        """Return whether a step is run as one compiled graph."""
        return (
            self.whole is not None
            and self.whole.is_on
            and not (self.records and number <= EAGER_STEPS)
        )

    def _update(
        self,
        update: LiveUpdate,
        index: int,
        number: int,
        batches: list[Batch],
        totals: dict[str, tuple[Tensor, Count, float]],
    ) -> tuple[float | Tensor, bool | Tensor, bool | Tensor]:
        guarded, switch = update.guarded, self.clock.switch
        if index:
            switch(FORWARD)
        guarded.clear_gradients()
        if self.whole is not None and self._is_whole(number):
            done = self._as_one_graph(self.whole, number, batches[0], totals)
            if done is not None:
                return *done, False
        counts = self._known_counts(batches, update.name)
        is_split = len(batches) > 1 or self.ranks is not None
        scale = self._power_of_two() if is_split and counts is None else None
        # a GAN's generator must not leave gradients in the critic
        inputs = (
            [leaf_of(each) for each in guarded.parameters if each.requires_grad]
            if len(self._updates) > 1
            else None
        )
        mine: dict[str, tuple[Tensor, Count, float]] = {}
        num_idle = (
            0
            if self.ranks is None
            else self.ranks.num_passes(len(batches), self._num_cut) - len(batches)
        )
        if self.ranks is not None:
            self.ranks.open(index, self._first, self._num_cut)
        if is_split or self._hooks.is_split:
            self._hooks.begin(is_split=is_split)
        with _INSIDE if self.ranks is None and self._look is None else self._inside() as gathered:
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
                    joins = (
                        gathered is not None
                        and gathered.was_used
                        and self._num_cut == gathered.group.size
                    )
                    check_splittable(update.name, loss, counts is not None, joins_ranks=joins)
                    self._prepare_hooks(guarded, terms, counts, scale)
                factors = [self._factor(term, counts, scale) for term in terms]
                if update.in_backward is not None:
                    _add(totals, terms)
                    return *self._update_in_backward(update.in_backward, terms, factors), False
                switch(BACKWARD)
                if self.ranks is not None and position == len(batches) - 1 and not num_idle:
                    self.ranks.arm(index)
                _backward_of(
                    terms, factors, inputs, is_even=self.ranks is not None and self.ranks.is_even
                )
                _add(mine, terms)
                if self.ranks is not None:
                    self.ranks.passed(index, self._first + position + 1, mine)
                if self.noise is not None and position == 0:
                    # later passes add to these gradients
                    first = guarded.norm(), mine[terms[0].name][1]
        if self.ranks is not None:
            if num_idle:
                self._pass_along(self.ranks, update, index, batches, num_idle)
            switch(COMMUNICATION)
            mine = self.ranks.add_up(index, mine)
            if gathered is not None and gathered.was_used and counts is not None:
                check_gathered(counts, mine)
        factor = self._remaining_factor(mine, scale)
        if guarded.on_device:
            # 0, or nan where a loss is not finite
            factor = factor + sum(total * 0.0 for total, _, _ in mine.values())
        elif not all(math.isfinite(total.item()) for total, _, _ in mine.values()):
            factor = math.nan  # a loss that is not finite skips the step even where its gradient is
        if self._scaler is not None:
            factor = factor / self._scaler.scale
        if self.ranks is not None:
            self.ranks.finish(index, factor)
        switch(OPTIMISER)
        if self.before_update is not None:
            switch(CHECKPOINT)
            self.before_update()
            switch(OPTIMISER)
        totals.update(
            mine if inputs is None else {f"{update.name}.{name}": row for name, row in mine.items()}
        )
        self.has_moved = True
        norm, applied = guarded.step_if_finite(factor)
        if self.ranks is not None:
            self.ranks.replicas[index].keep(applied)
        # a microbatch in which no item counts has no mean
        if self.noise is not None and (isinstance(first[1], Tensor) or first[1]):
            share = first[1] / mine[terms[0].name][1]
            self.noise.add(
                (first[0] * factor / share) ** 2, norm**2, self._sizes[0], sum(self._sizes)
            )
        return norm, applied, self._scaler is not None and _overflowed(norm, factor)

    def _pass_along(
        self, ranks: Ranks, update: LiveUpdate, index: int, batches: list[Batch], count: int
    ) -> None:
        """Run passes with zero gradients while other ranks still gather weights from all ranks."""
        batch = batches[-1] if batches else self._place(self.loader.read(1))[0]
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
        self,
        whole: WholeStep,
        number: int,
        batch: Batch,
        totals: dict[str, tuple[Tensor, Count, float]],
    ) -> tuple[float | Tensor, bool | Tensor] | None:
        """Run the step as one graph, timed as forward pass; return None if compilation failed."""
        if self.before_update is not None:
            self.clock.switch(CHECKPOINT)
            self.before_update()
            self.clock.switch(FORWARD)
        self._seed_draws(number, 0, 0)
        self.has_moved = True  # nobody outside of a graph knows how far it came
        done = whole(batch)
        if done is None:
            return None
        _add(totals, done[0])
        self._remaining_factor(totals, None)
        return done[1:]

    def _update_in_backward(
        self, update: UpdateInBackward, terms: tuple[Term, ...], factors: list[Tensor]
    ) -> tuple[float, bool]:
        """Run backward pass and update in one; check first, since the update cannot be undone."""
        for term in terms:
            check_count(term.name, term.count)
        if not any(float(term.count) for term in terms):
            return math.nan, False
        if not all(math.isfinite(term.total.item()) for term in terms):
            return math.nan, False
        if self.before_update is not None:
            self.clock.switch(CHECKPOINT)
            self.before_update()
        self.clock.switch(BACKWARD)
        self.has_moved = True
        norm = update.step(lambda: backward([term.total for term in terms], factors))
        self.clock.switch(OPTIMISER)
        return norm, True

    @contextmanager
    def _inside(self) -> Iterator[Gathering]:
        """Return a context for an update's passes: all_gather, and the first step's observers."""
        with Gathering(ALONE if self.ranks is None else self.ranks.group) as gathered:
            if self._look is None:
                yield gathered
            else:
                with self.eager(), self._look:
                    yield gathered

    def _known_counts(
        self, batches: list[Batch], update: str = ""
    ) -> Mapping[str, float] | float | None:
        """Return the global batch's counts if known before the forward pass, else None."""
        if self._task.counts is None or (len(batches) == 1 and self.ranks is None):
            return None
        counted: list[Any] = [self._task.counts(batch) for batch in batches]
        if self.ranks is not None:
            return self._counts_of_all(self.ranks, update, counted)
        if isinstance(counted[0], Mapping):
            return {name: float(sum(each[name] for each in counted)) for name in counted[0]}
        return float(sum(counted))

    @staticmethod
    def _counts_of_all(
        ranks: Ranks, update: str, counted: list[Any]
    ) -> Mapping[str, float] | float:
        """Return the counts summed over all ranks, one of which may have no batch."""
        rows = [each if isinstance(each, Mapping) else {"": each} for each in counted]
        names = rows[0] if rows else {}
        if ranks.is_exact and not all(
            float(value).is_integer() for row in rows for value in row.values()
        ):
            raise TaskError(
                "counts(batch) gives a number that is not whole, whose sum depends on its order",
                hint="count items, or leave layout.virtual_ranks out",
            )
        found = ranks.totals.add_counts(
            update, [(name, float(sum(row[name] for row in rows))) for name in names]
        )
        return found[""] if list(found) == [""] else found

    def _remaining_factor(
        self, totals: Mapping[str, tuple[Tensor, Count, float]], scale: float | None
    ) -> float | Tensor:
        """Return the factor that makes gradients means; NaN (skips the step) without items."""
        counts = [count for _, count, _ in totals.values()]
        is_known = not self._moves or not any(isinstance(count, Tensor) for count in counts)
        if is_known:
            for term, (_, count, _) in totals.items():
                check_count(term, count)
        if is_known and not any(map(float, counts)):
            return math.nan
        if scale is None:
            return (
                1.0
                if is_known
                else torch.where(
                    torch.as_tensor(sum(counts), device=self._device) > 0, 1.0, math.nan
                )
            )
        (count,) = counts
        if not isinstance(count, Tensor):
            return 1.0 / (scale * float(count))
        # a model in float64 would show 32 bits
        exact = count if count.device.type == "mps" else count.double()
        return 1.0 / (scale * exact)

    def _prepare_hooks(
        self,
        guarded: GuardedUpdate,
        terms: tuple[Term, ...],
        counts: Mapping[str, float] | float | None,
        scale: float | None,
    ) -> None:
        adds = self.ranks is None or not self.ranks.is_even  # stages 2 and 3 take each pass apart
        leaves = [leaf_of(each) for each in guarded.parameters]
        self._hooks.begin_pass(
            leaves, terms, lambda term: self._divisor(term, counts, scale), adds=adds
        )

    def _power_of_two(self) -> float:
        """Return a power of two near 1 / num_samples: exact in products, equal on all ranks."""
        num_samples = sum(self._sizes) if self.ranks is None else len(self.consumed)
        return 2.0 ** -round(math.log2(max(1, num_samples)))

    @staticmethod
    def _divisor(
        term: Term, counts: Mapping[str, float] | float | None, scale: float | None
    ) -> Count:
        """Return the divisor of a term's total in its backward pass; see `_factor`."""
        if scale is not None:
            return 1.0 / scale
        return (
            term.count
            if counts is None or term.fixed
            else counts[term.name]
            if isinstance(counts, Mapping)
            else counts
        )

    def _factor(
        self, term: Term, counts: Mapping[str, float] | float | None, scale: float | None
    ) -> Tensor:
        """Return the gradient of a term's total: weight / global count, or weight * `scale`."""
        total = term.total
        if scale is not None:
            return self._scaled(self._constant(term.weight * scale, total))
        if term.fixed:  # once a step: each of its microbatches adds an equal share
            count: Count = term.count * self._num_cut
        else:
            count = (
                term.count
                if counts is None
                else counts[term.name]
                if isinstance(counts, Mapping)
                else counts
            )
        if isinstance(count, Tensor):
            # 16 bits would round the count
            count = count.to(torch.promote_types(total.dtype, torch.float32))
            return self._scaled(torch.where(count > 0, term.weight / count, 0.0).to(total))
        # a term without items adds nothing
        return self._scaled(self._constant(term.weight / float(count) if count else 0.0, total))

    def _scaled(self, factor: Tensor) -> Tensor:
        """Return `factor` times the loss scale, if any, which is constant within a step."""
        return factor if self._scaler is None else self._scaler.seed(factor)

    def _constant(self, value: float, like: Tensor) -> Tensor:
        """Return a cached scalar tensor: counts mostly repeat from step to step."""
        key = (value, like.dtype)
        if key not in self._constants:
            if len(self._constants) > MAX_CONSTANTS:
                self._constants.clear()
            self._constants[key] = torch.full_like(like, value, requires_grad=False)
        return self._constants[key]

    def _seed_draws(self, number: int, microbatch: int, update: int) -> None:
        """Seed dropout and other draws in the model from (seed, step, global microbatch).

        NumPy and Python are seeded only if another number of ranks must draw the same: else
        checkpoints hold these streams, and seeding them takes a tenth of a step of a small model.
        """
        key = mix(self._draws ^ (number << 24 | microbatch << 8 | update)) >> 1
        for generator in self._generators:
            generator.manual_seed(key)
        if self.ranks is not None or self._feed.is_cut:
            np.random.seed(key & 0xFFFFFFFF)  # noqa: NPY002 - the masks of wav2vec 2.0 are drawn so
            random.seed(key)


def _overflowed(norm: float | Tensor, factor: float | Tensor) -> bool | Tensor:
    """Return whether the loss scale must change: gradients are non-finite, losses finite."""
    if isinstance(norm, Tensor):
        return ~torch.isfinite(norm) & torch.isfinite(torch.as_tensor(factor))
    return not math.isfinite(norm) and math.isfinite(float(factor))


def _backward_of(
    terms: tuple[Term, ...], factors: list[Tensor], inputs: list[Tensor] | None, *, is_even: bool
) -> None:
    """Run the backward pass of all terms except constant totals without items.

    With `is_even` ranks need equal numbers of backward passes: raises TaskError if none is left.
    """
    pairs = zip(terms, factors, strict=True)
    kept = [
        (term.total, factor)
        for term, factor in pairs
        if term.total.requires_grad or float(term.count)
    ]
    if is_even and not kept:
        raise TaskError(
            "the loss of a batch without items is a constant, and stages 2 and 3 gather weights "
            "in the backward pass of every rank",
            hint="return a total that comes from the model there too: 0.0 * output.sum()",
        )
    if kept:
        backward([total for total, _ in kept], [factor for _, factor in kept], inputs)


def _add(into: dict[str, tuple[Tensor, Count, float]], terms: tuple[Term, ...]) -> None:
    for term in terms:
        total = term.total.detach()
        count: Count = term.count
        if term.name in into:
            total, count = into[term.name][0] + total, into[term.name][1] + count
        into[term.name] = (total, count, term.weight)
