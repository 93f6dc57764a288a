"""What a step does together with the other ranks: gradients, sums, buffers."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from surefoot.components.optim import Lamb, Lars, find_sparse, leaf_of, master_of
from surefoot.components.parallel import Compression, JoinedBuffers, Replicas, Sharded, SyncNorm, Totals
from surefoot.components.parallel.alike import find_apart
from surefoot.components.parallel.exact import Ordered, VirtualRanks
from surefoot.components.parallel.renormed import JoinedRenorms
from surefoot.components.parallel.replicate import BUCKET_BYTES, FIRST_BUCKET_BYTES
from surefoot.components.parallel.totals import Row
from surefoot.components.parallel.wires import NONE
from surefoot.contract.task import Batch
from surefoot.core.errors import NumbersError
from surefoot.runtime.comm import Group
from surefoot.train.step.pace import Paces

if TYPE_CHECKING:
    from surefoot.train.step.stepper import LiveUpdate


class Ranks:
    """The parts of a step that all ranks take part in. Each of them calls the same methods in the same order."""

    def __init__(
        self, group: Group, model: nn.Module, updates: Sequence[LiveUpdate], *, sharded: Sharded | None = None,
        joins_buffers: bool = True, compress: Compression = NONE, num_virtual: int | None = None,
    ) -> None:  # fmt: skip
        self._virtual = None if num_virtual is None else VirtualRanks(num_virtual, group)
        self._ordered: list[Ordered] = []
        self._rows: list[dict[str, Row]] = []  # the loss terms of each virtual rank that is over
        self.group, self._updates, self._model, self.sharded, self._compress = group, updates, model, sharded, compress
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
        self.renorms = JoinedRenorms(model, group)
        self._sync_norms = [module for module in model.modules() if isinstance(module, SyncNorm)]
        self.num_samples = 0  # of the step, on all ranks
        self._mine, self._was_told = 0, False
        self.paces = Paces(group)
        self._alike_after = 0
        self.checks_after: Callable[[int], bool] = lambda number: False  # whether replicas are held side by side after a step

    def use_buckets(self, bucket_bytes: int, first_bytes: int) -> None:
        """Gradients go in buckets of so many bytes from now on, the first of a step apart; between two steps.

        They stand in the order of the model, not of the optimiser's groups: biases and norms, which come from every layer and are a group,
        would fill a first bucket that is whole when the backward pass is over, and nothing be on its way until then.
        """
        self.close()
        place = {id(each): number for number, each in enumerate(self._model.parameters())}
        leaves = [
            sorted((leaf_of(each) for each in update.guarded.parameters), key=lambda each: place.get(id(each), -1))
            for update in self._updates
        ]
        if self.sharded is not None:  # cut as it was made
            self.replicas = [self.sharded.synced(each) for each in leaves]
            return
        is_exact = self._virtual is not None
        sparse: list[Tensor] = [*find_sparse(self._model)]
        for optimizer in (each for update in self._updates for each in update.guarded.optimizers):
            if isinstance(optimizer, torch.optim.SparseAdam):  # takes no others, whatever module they come from
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
        self._ordered = [Ordered(each) for each in leaves] if is_exact else []

    def step(self, number: int) -> None:
        """A step begins, with the reading of its samples."""
        self.paces.begin()
        if self.group.flight is not None:
            self.group.flight.step(number)

    def microbatch(self, position: int) -> None:
        """The pass of a microbatch begins."""
        if self.group.flight is not None:
            self.group.flight.microbatch(position)

    def begin(self, num_samples: int, batches: Sequence[Batch]) -> None:
        """The samples of a step are there, so many on this rank, in these batches."""
        self.paces.ready(num_samples, batches)
        self._mine, self._was_told = num_samples, False
        if self.sharded is not None:
            self.sharded.begin()
        self.buffers.keep()
        for each in self._sync_norms:  # from the first step on: what is tried before it, a rank tries alone
            each.group = self.group

    @property
    def is_exact(self) -> bool:
        """Whether sums are those of virtual ranks, in their order."""
        return self._virtual is not None

    def open(self, index: int, first: int, num_microbatches: int) -> None:
        """The passes of an update begin, from microbatch `first` on of so many on all ranks."""
        if self._virtual is not None:
            self._virtual.begin(num_microbatches)
            self._rows = []
            self.passed(index, first, {})

    def arm(self, index: int) -> None:
        """The last backward pass comes: gradients go out as they come, unless they are first added in their order."""
        if self._virtual is None:
            self.replicas[index].arm()

    def passed(self, index: int, done: int, mine: dict[str, Row]) -> None:
        """So many microbatches of the step are done, or another rank's; `mine` are the terms of those since a virtual rank was over."""
        for _ in range(0 if self._virtual is None else self._virtual.count_over(done)):
            self._ordered[index].end_one()
            self.buffers.end_one()
            self._rows.append(dict(mine))
            mine.clear()

    def add_up(self, index: int, mine: Mapping[str, Row]) -> dict[str, Row]:
        """The loss terms of all ranks for an update, by its place; and its gradients, where they need not be told their factor first."""
        if not self._was_told:
            self.paces.passed()
        if self._virtual is not None:
            self._ordered[index].put_back()
        if not self.replicas[index].asks_factor:
            self.replicas[index].finish()
        self.renorms.join()
        return self.add(self.names[index], mine)

    def finish(self, index: int, factor: float | Tensor) -> None:
        """The gradients, where they must be told what they are multiplied by."""
        if self.replicas[index].asks_factor:
            self.replicas[index].finish(factor)

    def add(self, update: str, mine: Mapping[str, Row]) -> dict[str, Row]:
        """The loss terms of all ranks; with the first of a step go the samples, and the pace of the step before."""
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

    def end(self, number: int) -> None:
        """All passes and updates of a step are over."""
        if not self._was_told:
            self.paces.passed()
            self.add("", {})
        if self.sharded is not None:
            self.sharded.end()
        self.buffers.join()

    def look(self, number: int, applied: bool | Tensor) -> None:
        """A step is over, and what it moved stays, or was put back. Raises NumbersError where a rank's weights are no longer those of the
        others, where they are no numbers, which is asked when a step was skipped, and where a running statistic is none.

        Where the host would wait for a device it is asked as often as replicas are held side by side.
        """
        is_due = self.checks_after(number)
        if (is_due or self.group.device.type == "cpu") and applied and (spoiled := self.buffers.find_spoiled()) is not None:
            self._end_spoiled(spoiled[1], f"the running statistics of rank{{}} {{}} of {{}} are not finite: {spoiled[0]}")
        if applied is False:
            self._check_finite()
        if is_due:
            self._check_alike(number)

    def _check_finite(self) -> None:
        held = [(name, master_of(each)) for name, each in self._model.named_parameters()]
        wrong = [place for place, (_, each) in enumerate(held) if not torch.isfinite(each).all()]
        told = self.group.gather(torch.tensor([wrong[0] if wrong else -1], device=self.group.device)).flatten().tolist()
        ranks = [rank for rank, place in enumerate(told) if place >= 0]
        if ranks:
            self._end_spoiled(ranks, f"the weights of rank{{}} {{}} of {{}} are not finite: {held[told[ranks[0]]][0]}")

    def _end_spoiled(self, ranks: Sequence[int], words: str) -> None:
        raise NumbersError(
            words.format("s" * (len(ranks) > 1), ", ".join(map(str, ranks)), self.group.size),
            hint=f"all ranks were alike after step {self._alike_after:,}, and no commit holds such numbers: surefoot resume RUN goes on "
            "after the newest one; test the memory of that host",
        )

    @property
    def is_even(self) -> bool:
        """Whether no rank may pass through the model more often than another."""
        return self.sharded is not None and self.sharded.is_even

    def num_passes(self, num_own: int, num_all: int) -> int:
        """The passes of a step on this rank, with so many microbatches of its own of all: where weights are gathered in each, as many as
        on any other."""
        if not self.is_even:
            return num_own
        return -(-num_all // self.group.size)

    def _join_norm(self, norm: Tensor) -> Tensor:
        """The norm of all rows from that of this rank's; of several, each by itself."""
        assert self.sharded is not None
        square = self.sharded.group.add(norm.detach().double().square().reshape(-1).to(self.group.device))
        return square.sqrt().reshape(norm.shape).to(norm)

    def _check_alike(self, number: int) -> None:
        width, place = 1, 0  # ranks that hold the same are so many apart, the first of them is here
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
        others = ("most of those with the same rows" if width > 1 else "most ranks") if first.is_certain else f"rank {place}"
        raise NumbersError(
            f"the weights of rank{'s' * (len(apart) > 1)} {ranks} of {self.group.size} are not those of {others}: {first.name}",
            hint=f"they were alike after step {self._alike_after:,}: surefoot resume RUN --fork NEW --from that step or an earlier one; "
            "test the memory of that host",
        )

    def close(self) -> None:
        for each in self.replicas:
            each.close()
