"""ZeRO stage 1: every rank has all weights, but updates only some rows of them.

A rank stores the optimizer state of its rows only. Gradients are sent in buckets during the
backward pass, as in `replicate`, and reduce-scattered, so that a rank gets the sums for its rows.
After an update, the ranks all-gather the updated rows. A step therefore sends each gradient and
each weight once, which is as much as one all-reduce sends. A bucket is cut by bytes, not by
tensors: every rank has about the same share of it, and takes part in every collective.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from surefoot.components.parallel.replicate import (
    BUCKET_BYTES,
    FIRST_BUCKET_BYTES,
    Bucket,
    Replicas,
    pack_up,
    sum_dtype_of,
    view_like,
)
from surefoot.components.parallel.shard.parts import (
    Given,
    check_has_rows,
    cut_rows,
    read_groups,
    serve_part,
)
from surefoot.components.parallel.wires import Wait
from surefoot.contract.state import master_of
from surefoot.core.errors import TaskError
from surefoot.runtime.comm.mesh import Mesh

Rows = list[range]  # the rows of one tensor, by rank


@dataclass(eq=False, kw_only=True)
class CutBucket(Bucket):
    """Bucket that is split into one part for each rank.

    `slots` has a list for each tensor: the views of its rows in `flat`, by rank.
    """

    slots: list[list[Tensor]]


class _BucketReduceScatter:
    """Reducer of one bucket: a reduce-scatter over the shard axis, then a sum over the replicas."""

    def __init__(self, flat: Tensor, own: Tensor, mesh: Mesh) -> None:
        self._flat, self._own, self._mesh = flat, own, mesh

    def begin(self) -> Wait:
        return partial(self._end, self._mesh.shard.begin_to_scatter(self._own, self._flat))

    def _end(self, wait: Wait) -> None:
        wait()
        self._mesh.replicate.add(self._own)


class ShardedState:
    """Sharding of the optimizer state over `mesh.shard` (ZeRO stage 1).

    After construction, `master_of(parameter)` returns the rows that this rank updates.

    Args:
        model: A module, or what torch's optimizers accept: parameters, pairs of a name and a
            parameter, or groups of either. They may belong to several modules, such as a model and
            a loss. All ranks must pass the same parameters in the same order.
        mesh: The ranks.
        bucket_bytes: The size of a bucket.
        first_bytes: The size of the first bucket.
        on_host: Update a copy of the rows in host memory.

    Raises:
        SpecError: For a scalar (0-dimensional) or complex parameter, and for arguments that torch
            optimizers do not accept.
    """

    is_even = False  # whether all ranks must run the same number of passes
    splits_weights = False
    first_weights = ""  # a digest of the initial weights of a rank

    def __init__(
        self,
        model: Given,
        mesh: Mesh,
        *,
        bucket_bytes: int = BUCKET_BYTES,
        first_bytes: int = FIRST_BUCKET_BYTES,
        on_host: bool = False,
    ) -> None:
        self._listed = read_groups(model)
        named = [pair for group in self._listed for pair in group.named]
        check_has_rows(named)
        self._sizes, self._on_host = (bucket_bytes, first_bytes), on_host
        self._mesh, self.group, self.replicas = mesh, mesh.shard, mesh.replicate
        self._cuts: dict[int, Rows] = {}
        self._packs = pack_up([each for _, each in named if each.requires_grad], *self._sizes)
        for pack in self._packs:
            sizes = [(len(each), math.prod(each.shape[1:])) for each in pack]
            for parameter, rows in zip(pack, cut_rows(sizes, mesh.shard.size), strict=True):
                self._cuts[id(parameter)] = rows
                mine = rows[mesh.shard.rank]
                serve_part(
                    parameter, parameter[mine.start : mine.stop], mine.start, self, on_host=on_host
                )

    @property
    def groups(self) -> list[dict[str, Any]]:
        """Parameter groups for an optimizer, with the rows that this rank updates.

        There is one group if ShardedState was created with a module, or with parameters without
        groups.
        """
        return [each.with_masters() for each in self._listed]

    def synced(self, leaves: Iterable[Tensor]) -> Replicas:
        """Return the object that sums the gradients of `leaves` over the ranks.

        Each rank gets the sums for its rows. Raises TaskError for a leaf that requires gradients,
        but was not passed to ShardedState.
        """
        leaves = list(leaves)
        for each in leaves:
            if each.requires_grad and id(each) not in self._cuts:
                raise TaskError(
                    f"a parameter of shape {list(each.shape)} is to be trained, "
                    "and ShardedState was not given it",
                    hint="give it to ShardedState too, with requires_grad as it is trained",
                )
        return _GradientReduceScatter(leaves, self._mesh, self._cuts, self._sizes)

    def begin(self) -> None:
        """Do nothing at the start of a step."""

    def end(self) -> None:
        """Do nothing at the end of a step."""

    @torch.no_grad()
    def publish(self) -> None:
        """All-gather the updated rows, so that every rank has all weights again."""
        group = self.group
        for pack in self._packs:
            cuts = [self._cuts[id(each)] for each in pack]
            sent = group.allocate(
                _max_held_elements(pack, cuts), pack[0].dtype, pack[0].device
            ).zero_()
            into = pack[0].new_empty(group.size * len(sent))
            for parameter, cut, slot in zip(
                pack, cuts, _slots(sent, pack, cuts, group.rank), strict=True
            ):
                mine = parameter[cut[group.rank].start : cut[group.rank].stop]
                if self._on_host:
                    mine.copy_(master_of(parameter))
                slot.copy_(mine)
            group.gather_into(into, sent)
            for rank, part in enumerate(into.view(group.size, -1)):
                if rank != group.rank:
                    for parameter, rows, slot in zip(
                        pack, cuts, _slots(part, pack, cuts, rank), strict=True
                    ):
                        parameter[rows[rank].start : rows[rank].stop].copy_(slot)


class _GradientReduceScatter(Replicas):
    """Reduce-scatter of the gradients of `leaves`, so that each rank gets the sums for its rows.

    The `.grad` of a parameter is freed as soon as it is copied into its bucket.
    """

    def __init__(
        self, leaves: Iterable[Tensor], mesh: Mesh, cuts: dict[int, Rows], sizes: tuple[int, int]
    ) -> None:
        self._mesh, self._cuts = mesh, cuts
        super().__init__(leaves, mesh.shard, bucket_bytes=sizes[0], first_bytes=sizes[1])

    @staticmethod
    def _holder(parameter: Tensor) -> Tensor:
        return parameter

    def _make(self, parameters: Sequence[Tensor]) -> Bucket:
        group, count = self._group, len(parameters)
        cuts = [self._cuts[id(each)] for each in parameters]
        most = _max_held_elements(parameters, cuts)
        flat = group.allocate(
            group.size * (most + count), sum_dtype_of(parameters[0]), parameters[0].device
        ).zero_()
        parts = flat.view(group.size, -1)
        slots = [_slots(part, parameters, cuts, rank) for rank, part in enumerate(parts)]
        wire = _BucketReduceScatter(flat, parts[group.rank], self._mesh)
        return CutBucket(
            list(parameters),
            flat,
            slots[group.rank],
            parts[:, most:],
            wire,
            slots=[list(each) for each in zip(*slots, strict=True)],
        )

    @torch.no_grad()
    def _put(self, bucket: Bucket, index: int, grad: Tensor | None) -> None:
        assert isinstance(bucket, CutBucket)
        bucket.there[index] = True
        bucket.num_missing -= 1
        bucket.has[index] = float(grad is not None)
        parameter = bucket.parameters[index]
        for rows, slot in zip(self._cuts[id(parameter)], bucket.slots[index], strict=True):
            slot.copy_(grad[rows.start : rows.stop]) if grad is not None else slot.zero_()
        parameter.grad = None

    @torch.no_grad()
    def _write_back_gradients(self, bucket: Bucket) -> None:
        elsewhere = bucket.presence[self._group.rank].tolist()
        for index, parameter in enumerate(bucket.parameters):
            master, view = master_of(parameter), bucket.views[index]
            if elsewhere[index]:
                master.grad = view.to(master)


def _max_held_elements(parameters: Sequence[Tensor], cuts: Sequence[Rows]) -> int:
    """Return the largest number of elements of these parameters that any rank stores."""
    widths = [math.prod(each.shape[1:]) for each in parameters]
    return max(
        sum(len(rows) * width for rows, width in zip(each, widths, strict=True))
        for each in zip(*cuts, strict=True)
    )


def _slots(
    flat: Tensor, parameters: Sequence[Tensor], cuts: Sequence[Rows], rank: int
) -> list[Tensor]:
    """Return the views of a rank's rows in `flat`, one for each parameter.

    The rows are stored one after the other. Each view has the shape and memory layout of its rows.
    """
    found, begin = [], 0
    for parameter, rows in zip(parameters, cuts, strict=True):
        like = parameter.detach()[rows[rank].start : rows[rank].stop]
        found.append(view_like(flat[begin : begin + like.numel()], like))
        begin += like.numel()
    return found
