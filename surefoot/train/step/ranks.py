"""Parts of a step that involve the other ranks: gradients, loss sums, buffers."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Self

import torch
from torch import Tensor, nn

from surefoot.components.optim.groups import find_sparse
from surefoot.components.optim.kinds.layerwise import Lamb, Lars
from surefoot.components.parallel.alike import find_apart
from surefoot.components.parallel.exact import OrderedGradientSum, VirtualRanks
from surefoot.components.parallel.norms import JoinedBuffers
from surefoot.components.parallel.renormed import JoinedRenorms
from surefoot.components.parallel.replicate import BUCKET_BYTES, FIRST_BUCKET_BYTES, Replicas
from surefoot.components.parallel.shard import Sharded
from surefoot.components.parallel.sync_norm import SyncNorm
from surefoot.components.parallel.totals import Row, Totals
from surefoot.components.parallel.wires import NONE, Compression
from surefoot.components.profiler.phases.clock import COMMUNICATION, OPTIMIZER, PhaseClock
from surefoot.contract.state import leaf_of, master_of
from surefoot.core.errors import NumbersError, TaskError
from surefoot.runtime.comm.gathered import Gathering
from surefoot.runtime.comm.group import Group
from surefoot.train.step.pace import Paces

if TYPE_CHECKING:
    from surefoot.components.optim.buffers import LiveBuffers
    from surefoot.train.step.program import LiveUpdate, StepDone, StepInput


class Ranks:
    """Collective parts of a step; every rank must call the same methods in the same order."""

    splits = True

    def __init__(
        self,
        group: Group,
        model: nn.Module,
        updates: Sequence[LiveUpdate],
        clock: PhaseClock,
        *,
        sharded: Sharded | None = None,
        joins_buffers: bool = True,
        compress: Compression = NONE,
        num_virtual: int | None = None,
    ) -> None:
        self._virtual = None if num_virtual is None else VirtualRanks(num_virtual, group)
        self._ordered: list[OrderedGradientSum] = []
        self._rows: list[dict[str, Row]] = []  # loss terms of each finished virtual rank
        self.group, self._clock = group, clock
        self._updates = updates
        self._model = model
        self.sharded = sharded
        self._compress = compress
        self.names = [update.name for update in updates]
        self.replicas: list[Any] = []
        self.use_buckets(BUCKET_BYTES, FIRST_BUCKET_BYTES)
        if sharded is not None:
            for update in updates:
                update.guarded.join_norm = self._join_norm
                for each in update.guarded.optimizers:
                    if isinstance(each, Lamb | Lars):
                        each.join_norms = self._join_norm
        self.totals = Totals(group)
        self.buffers = JoinedBuffers(model, group, joins_norms=joins_buffers, virtual=self._virtual)
        self.renorms = JoinedRenorms(model, group, is_exact=self._virtual is not None)
        self._sync_norms = [module for module in model.modules() if isinstance(module, SyncNorm)]
        self.num_samples = 0  # of the step, on all ranks
        self._mine, self._was_told = 0, False
        self.paces = Paces(group)
        self._alike_after = 0
        # whether replicas are compared after a step
        self.checks_after: Callable[[int], bool] = lambda number: False

    def use_buckets(self, bucket_bytes: int, first_bytes: int) -> None:
        """Set the gradient bucket size in bytes, and that of the first bucket, between two steps.

        Buckets follow the order of the parameters in the model. The optimizer's groups are not
        suitable: the group of biases and norms contains parameters of every layer. As the first
        bucket it would be complete only at the end of the backward pass, and no reduction could
        start earlier.
        """
        self.close()
        place = {id(each): number for number, each in enumerate(self._model.parameters())}
        leaves = [
            sorted(
                (leaf_of(each) for each in update.guarded.parameters),
                key=lambda each: place.get(id(each), -1),
            )
            for update in self._updates
        ]
        if self.sharded is not None:  # with the bucket sizes set when it was made
            self.replicas = [self.sharded.synced(each) for each in leaves]
            return
        is_exact = self._virtual is not None
        sparse: list[Tensor] = [*find_sparse(self._model)]
        for optimizer in (each for update in self._updates for each in update.guarded.optimizers):
            # supports only sparse gradients, from any module
            if isinstance(optimizer, torch.optim.SparseAdam):
                sparse += [each for group in optimizer.param_groups for each in group["params"]]
        self.replicas = [
            Replicas(
                each,
                self.group,
                bucket_bytes=bucket_bytes,
                first_bytes=first_bytes,
                compress=self._compress,
                in_order=is_exact,
                sparse=sparse,
            )
            for each in leaves
        ]
        self._ordered = [OrderedGradientSum(each) for each in leaves] if is_exact else []

    @property
    def ranks(self) -> Self:
        return self

    @property
    def size(self) -> int:
        return self.group.size

    def begin_reading(self, number: int) -> None:
        """Record the start of step `number`, before its samples are requested."""
        self.paces.begin()
        if self.group.flight is not None:
            self.group.flight.step(number)

    def begin_pass(self, position: int) -> None:
        """Record that the forward pass of microbatch `position` of the step starts."""
        if self.group.flight is not None:
            self.group.flight.microbatch(position)

    def begin(self, given: StepInput) -> None:
        """Start the computation of a step."""
        self.paces.ready(given.num_samples, given.batches)
        self._mine, self._was_told = given.num_samples, False
        if self.sharded is not None:
            self.sharded.begin()
        self.buffers.keep()
        # from the first step on: the checks before it run on each rank alone
        for each in self._sync_norms:
            each.group = self.group

    def begin_next_update(self) -> None:
        """Prepare the buffers for another update of the same step."""
        self.buffers.between()

    @property
    def is_exact(self) -> bool:
        """True if sums are computed in the fixed order of `layout.virtual_ranks`."""
        return self._virtual is not None

    def begin_passes(self, index: int, given: StepInput) -> int:
        """Start the passes of update `index`; return how many placeholder passes must follow.

        In stages 2 and 3, which gather weights in each pass, every rank runs the same number.
        """
        self.renorms.keep()
        if self._virtual is not None:
            self._virtual.begin(given.num_microbatches)
            self._rows = []
            self.end_pass(index, given.first, {})
        if not self.is_even:
            return 0
        return -(-given.num_microbatches // self.group.size) - len(given.batches)

    def gathering(self) -> Gathering:
        """Return the context of the passes, in which `surefoot.all_gather` communicates."""
        return Gathering(self.group)

    def begin_last_backward(self, index: int) -> None:
        """Start to reduce gradients while the last backward pass computes them.

        Has no effect with `layout.virtual_ranks`.
        """
        if self._virtual is None:
            self.replicas[index].arm()

    def end_pass(self, index: int, done: int, totals: dict[str, Row]) -> None:
        """Record that this rank's microbatches up to number `done` of the step are done.

        `totals` holds the loss terms of the current virtual rank; it is cleared when all
        microbatches of this virtual rank are done.
        """
        for _ in range(0 if self._virtual is None else self._virtual.count_over(done)):
            self._ordered[index].end_one()
            self.buffers.end_one()
            self._rows.append(dict(totals))
            totals.clear()

    def reduce(self, index: int, totals: Mapping[str, Row]) -> dict[str, Row]:
        """Return the loss terms of update `index` summed over all ranks.

        The gradient reduction is finished too, except if the gradients must be multiplied by a
        factor first: then `finish` does it.
        """
        self._clock.switch(COMMUNICATION)
        if not self._was_told:
            self.paces.end_passes()
        if self._virtual is not None:
            self._ordered[index].put_back()
        if not self.replicas[index].asks_factor:
            self.replicas[index].finish()
        self.renorms.join()
        return self.add(self.names[index], totals)

    def sum_counts(self, update: str, counted: Sequence[Any]) -> Mapping[str, float] | float:
        """Return the counts summed over all ranks; a rank may have no batch.

        Raises TaskError for a fractional count with `layout.virtual_ranks`.
        """
        rows = [each if isinstance(each, Mapping) else {"": each} for each in counted]
        names = rows[0] if rows else {}
        if self.is_exact and not all(
            float(value).is_integer() for row in rows for value in row.values()
        ):
            raise TaskError(
                "counts(batch) returned a fractional count, but the sum of fractions "
                "depends on their order",
                hint="return whole counts, or leave layout.virtual_ranks out",
            )
        found = self.totals.add_counts(
            update, [(name, float(sum(row[name] for row in rows))) for name in names]
        )
        return found[""] if list(found) == [""] else found

    def finish(self, index: int, factor: float | Tensor) -> None:
        """Finish the reduction of gradients that must be multiplied by `factor` first."""
        if self.replicas[index].asks_factor:
            self.replicas[index].finish(factor)

    def add(self, update: str, mine: Mapping[str, Row]) -> dict[str, Row]:
        """Return the loss terms of an update summed over all ranks.

        The first sum of a step includes the sample counts, and the times of the previous step.
        """
        rows = [mine] if self._virtual is None or not update else self._rows
        used = self.replicas[0].used() if self.sharded is not None and self.sharded.is_even else []
        extra = () if self._was_told else (float(self._mine), *self.paces.row(), *used)
        if self._virtual is None or not update:
            found, told = self.totals.add(update, mine, extra)
        else:
            found, told = self.totals.add_in_order(update, self._rows, extra, self._virtual)
        if told:
            self._was_told, self.num_samples = True, int(told[0])
            self.paces.hear(told[1 : len(told) - len(used)])
            if used:
                self.replicas[0].keep_used(told[-len(used) :])
            self.paces.count(rows)
        return found

    def end(self, done: StepDone, buffers: LiveBuffers) -> None:
        """Finish the collectives of a step; `buffers` are restored if it was skipped."""
        for update, _, applied in done.updates:  # what was not sent of the gradients
            self.replicas[self.names.index(update.name)].keep(applied.was_applied)
        self._clock.switch(COMMUNICATION)
        if not self._was_told:
            self.paces.end_passes()
            self.add("", {})
        if self.sharded is not None:
            self.sharded.end()
        self.buffers.join()
        if done.was_applied is not True:
            buffers.restore_unless(done.was_applied)
        self.check(done.given.number, done.was_applied)
        self._clock.switch(OPTIMIZER)

    def check(self, number: int, applied: bool | Tensor) -> None:
        """Check weights and buffers after a step that was applied or skipped.

        Raises NumbersError if this rank's weights differ from those of its replicas, if weights are
        non-finite (checked after a skipped step), or if a running statistic is non-finite. A check
        that would synchronize the device runs only in the steps in which replicas are compared.
        """
        is_due = self.checks_after(number)
        if (
            (is_due or self.group.device.type == "cpu")
            and applied
            and (spoiled := self.buffers.find_spoiled()) is not None
        ):
            self._end_spoiled(
                spoiled[1],
                f"the running statistics of rank{{}} {{}} of {{}} are not finite: {spoiled[0]}",
            )
        if applied is False:
            self._check_finite()
        if is_due:
            self._check_alike(number)

    def end_step(self, given: StepInput) -> int:
        """Record the end of a step; return its number of samples on all ranks."""
        self.paces.end()
        return self.num_samples

    def scaled_by(self, given: StepInput) -> int:
        """Return a number of samples near the item count of the step, equal on all ranks."""
        return given.num_drawn

    def _check_finite(self) -> None:
        held = [(name, master_of(each)) for name, each in self._model.named_parameters()]
        wrong = [place for place, (_, each) in enumerate(held) if not torch.isfinite(each).all()]
        told = (
            self.group.gather(torch.tensor([wrong[0] if wrong else -1], device=self.group.device))
            .flatten()
            .tolist()
        )
        ranks = [rank for rank, place in enumerate(told) if place >= 0]
        if ranks:
            self._end_spoiled(
                ranks,
                f"the weights of rank{{}} {{}} of {{}} are not finite: {held[told[ranks[0]]][0]}",
            )

    def _end_spoiled(self, ranks: Sequence[int], words: str) -> None:
        raise NumbersError(
            words.format("s" * (len(ranks) > 1), ", ".join(map(str, ranks)), self.group.size),
            hint=(
                f"all ranks had the same weights after step {self._alike_after:,}, "
                "and no checkpoint holds non-finite values: surefoot resume RUN "
                "resumes after the newest checkpoint; test the memory of that host"
            ),
        )

    @property
    def is_even(self) -> bool:
        """True if all ranks must run the same number of forward passes."""
        return self.sharded is not None and self.sharded.is_even

    def _join_norm(self, norm: Tensor) -> Tensor:
        """Return the norms over the rows of all ranks; `norm` holds those over this rank's rows."""
        assert self.sharded is not None
        square = self.sharded.group.add(
            norm.detach().double().square().reshape(-1).to(self.group.device)
        )
        return square.sqrt().reshape(norm.shape).to(norm)

    def _check_alike(self, number: int) -> None:
        # the numbers of ranks with the same rows differ by `width`; `place` is the lowest of them
        width, place = 1, 0
        if self.sharded is not None and self.sharded.splits_weights:
            width, place = self.sharded.group.size, self.sharded.group.rank
            held = {name: master_of(each) for name, each in self._model.named_parameters()}
            apart = find_apart(self.sharded.replicas, held)
        else:
            apart = find_apart(self.group, dict(self._model.named_parameters()))
        if not apart:
            self._alike_after = number
            return
        first = apart[0]
        ranks = ", ".join(str(each.rank * width + place) for each in apart)
        others = (
            ("most ranks with the same rows" if width > 1 else "most ranks")
            if first.is_certain
            else f"rank {place}"
        )
        raise NumbersError(
            f"the weights of rank{'s' * (len(apart) > 1)} {ranks} of "
            f"{self.group.size} differ from those of {others}: {first.name}",
            hint=(
                f"all ranks had the same weights after step {self._alike_after:,}: "
                "surefoot resume RUN --fork NEW --from that step or an earlier "
                "step; test the memory of that host, and search the task for code that changes "
                "weights between steps"
            ),
        )

    def close(self) -> None:
        for each in self.replicas:
            each.close()
