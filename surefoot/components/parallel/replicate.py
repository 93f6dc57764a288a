"""Data parallelism: every rank has the same weights and reads different samples.

Gradients are all-reduced during the backward pass. They are sent in buckets, in the order in which
the backward pass computes them, and each bucket is sent as soon as its last gradient exists (Li et
al., PyTorch Distributed, VLDB 2020). The all-reduce computes sums, not means: the step divides
once, by the count of all ranks. The reducer of a bucket (see `wires`) compresses and sends it.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from surefoot.components.parallel.exact import InOrder
from surefoot.components.parallel.low_rank import LowRank, LowRankState
from surefoot.components.parallel.wires import (
    NONE,
    BrainFloat,
    Compression,
    CountedGroup,
    Half,
    Plain,
    Wait,
    Wire,
)
from surefoot.contract.state import master_of, run_last
from surefoot.core.errors import TaskError
from surefoot.runtime.comm.group import Group

# as in DDP: the first bucket is small, so that it is sent early
BUCKET_BYTES, FIRST_BUCKET_BYTES = (25 << 20, 1 << 20)

ONE_PASS = (
    "call arm() before the last backward pass of a step and finish() after it; of several losses, "
    "call backward() on the sum"
)


@dataclass(eq=False)
class Bucket:
    """Gradients that are reduced together.

    `flat` contains the gradients, one after the other. After them it has one number for each
    gradient: 1 if this rank has the gradient, otherwise 0.
    """

    parameters: list[Tensor]
    flat: Tensor
    views: list[Tensor]
    presence: Tensor
    wire: Wire
    there: list[bool] = field(default_factory=list)  # which gradients are in `flat`
    has: list[float] = field(default_factory=list)  # 1 for each gradient that this rank has, else 0
    num_missing: int = 0
    wait: Wait | None = field(default=None, init=False)


class Replicas:
    """All-reduce of gradients over the ranks of a group, overlapped with the backward pass.

    Call `arm()` before the last backward pass of a step and `finish()` after it. Each gradient is
    then the sum over all ranks, bitwise identical on all ranks. If only some ranks have a gradient
    for a parameter, it counts as 0 on the other ranks. If no rank has one, the gradient stays None.
    Gradients of 16-bit parameters are summed in fp32. If a parameter has a master copy (see
    `surefoot.optim.master_of`), the gradient in the `.grad` of the master is summed.

    Args:
        parameters: The parameters; those without requires_grad are ignored.
        group: The ranks.
        bucket_bytes: The size of a bucket.
        first_bytes: The size of the first bucket, which is small so that it is sent early.
        compress: The compression of the gradients; the result is the sum of the compressed
            gradients. With powersgd, call `keep()` when it is known whether the step was applied.
        in_order: Sum in an order that does not depend on the number of ranks.
        sparse: Parameters with sparse gradients. They are summed as dense tensors; the result is
            sparse and has the rows that any rank has.
    """

    def __init__(
        self,
        parameters: Iterable[Tensor],
        group: Group,
        *,
        bucket_bytes: int = BUCKET_BYTES,
        first_bytes: int = FIRST_BUCKET_BYTES,
        compress: Compression = NONE,
        in_order: bool = False,
        sparse: Collection[Tensor] = (),
    ) -> None:
        self._in_order = in_order
        self._group, self._link = group, CountedGroup(group)
        self._compress = NONE if group.is_alone else compress
        self._columns = torch.Generator().manual_seed(0)  # draws the initial columns of PowerSGD
        leaves = [each for each in parameters if each.requires_grad]
        self._parameters = list(map(self._holder, leaves))
        self._bucket_bytes, self._first_bytes = bucket_bytes, first_bytes
        self._buckets: list[Bucket] = []
        # parameter id -> (bucket index, index in the bucket)
        self._place: dict[int, tuple[int, int]] = {}
        self._sparse = [each for each in self._parameters if any(each is other for other in sparse)]
        self._rows: dict[int, Tensor] = {}  # sparse parameter id -> the rows that this rank has
        self._next = 0  # index of the next bucket to send: all ranks send in one order
        self._is_armed = False
        self._leaves = leaves
        hooked: Sequence[Any] = leaves
        self._hooks = [each.register_post_accumulate_grad_hook(self._take) for each in hooked]

    def close(self) -> None:
        """Remove the hooks from the parameters."""
        for hook in self._hooks:
            hook.remove()
        self._hooks, self._buckets = [], []

    def arm(self) -> None:
        """Start to send gradients during the backward pass, each bucket as soon as it is complete.

        Call it before the last backward pass of a step. Raises TaskError if gradients were sent
        since the last `arm()`, but `finish()` was not called.
        """
        if self._is_armed and self._next and not self._group.is_alone:
            raise TaskError(
                "arm() was called twice without finish(), "
                "and gradients of the first backward pass are on their way to other ranks",
                hint=ONE_PASS,
            )
        for leaf, handle in zip(self._leaves, self._hooks, strict=True):
            run_last(leaf, handle.id)  # hooks that the loop added run first
        if not self._buckets:
            self._build_buckets()
        for bucket in self._buckets:
            bucket.there, bucket.has = (
                [False] * len(bucket.parameters),
                [1.0] * len(bucket.parameters),
            )
            bucket.num_missing, bucket.wait = len(bucket.parameters), None
        self._next, self._is_armed = 0, True

    @property
    def asks_factor(self) -> bool:
        """True if `finish` needs its argument `factor`.

        In that case, nothing is sent before `finish`.
        """
        return self._compress.kind == "powersgd"

    def finish(self, factor: float | Tensor = 1.0) -> None:
        """Send the remaining buckets, and wait until all gradients are summed.

        `factor` is the number by which the sums will be multiplied when they are applied; all ranks
        must pass the same value. Only powersgd uses it.
        """
        if not self._is_armed:
            self.arm()  # a rank without a batch
        self._is_armed = False
        for bucket in self._buckets:
            for index, parameter in enumerate(bucket.parameters):
                if not bucket.there[index]:
                    self._put(bucket, index, parameter.grad)
            if isinstance(bucket.wire, LowRank):
                bucket.wire.use(factor)
        self._send_ready()
        left = self._buckets
        while left:  # in turns, so that one bucket is sent while the next is computed
            for bucket in left:
                bucket.wait = None if bucket.wait is None else bucket.wait()
                if bucket.wait is None:
                    self._write_back_gradients(bucket)
            left = [bucket for bucket in left if bucket.wait is not None]
        self._make_sparse()

    @torch.no_grad()
    def _make_sparse(self) -> None:
        """Convert the gradients of the parameters in `sparse` back to sparse tensors.

        An optimizer such as SparseAdam skips the rows that no gradient has.
        """
        for parameter in self._sparse:
            has_row = torch.zeros(len(parameter), device=parameter.device)
            if id(parameter) in self._rows:
                has_row[self._rows.pop(id(parameter))] = 1.0
            self._group.add(has_row)
            grad = parameter.grad
            if grad is not None and grad.layout is torch.strided:
                rows = torch.nonzero((has_row > 0) | grad.ne(0).flatten(1).any(1)).T
                parameter.grad = torch.sparse_coo_tensor(
                    rows, grad[rows[0]], grad.shape, is_coalesced=True
                )

    def keep(self, applied: bool | Tensor = True) -> None:
        """End the step; `applied` is true if the sums were applied. Only powersgd uses it."""
        for bucket in self._buckets:
            if isinstance(bucket.wire, LowRank):
                bucket.wire.keep(applied)

    def held(self) -> list[LowRankState]:
        """Return the PowerSGD state of each compressed matrix; an empty list without PowerSGD.

        Except for the residuals, the state is identical on all ranks.
        """
        if not self.asks_factor:
            return []
        if not self._buckets:
            self._build_buckets()
        return [
            held
            for bucket in self._buckets
            if isinstance(bucket.wire, LowRank)
            for held in bucket.wire.held
        ]

    @property
    def num_buckets(self) -> int:
        return len(self._buckets)

    @property
    def bucket_sizes(self) -> list[int]:
        """Bytes of the gradients in each bucket, in the order in which the buckets are sent."""
        return [
            sum(map(_num_bytes, pack))
            for pack in pack_up(self._parameters, self._bucket_bytes, self._first_bytes)
        ]

    @property
    def num_bytes(self) -> int:
        """Total size of the tensors that this rank has passed to collectives so far, in bytes."""
        return self._link.num_bytes

    @property
    def num_collectives(self) -> int:
        return self._link.num_collectives

    @staticmethod
    def _holder(parameter: Tensor) -> Tensor:
        """Return the tensor whose `.grad` has the gradient of `parameter` after all hooks ran.

        It is the master copy of the parameter, or the parameter itself.
        """
        return master_of(parameter)

    def _make(self, parameters: Sequence[Tensor]) -> Bucket:
        return _make_bucket(parameters, self._make_wire, self._group)

    def _build_buckets(self) -> None:
        self._buckets = list(
            map(self._make, pack_up(self._parameters, self._bucket_bytes, self._first_bytes))
        )
        for number, bucket in enumerate(self._buckets):
            for index, parameter in enumerate(bucket.parameters):
                self._place[id(parameter)] = number, index

    def _make_wire(self, flat: Tensor, parameters: Sequence[Tensor]) -> Wire:
        kind, link = self._compress.kind, self._link
        if self._in_order:
            return InOrder(flat, self._group)
        if kind == "powersgd":
            return LowRank(flat, parameters, self._compress.rank, link, self._columns)
        if kind == "fp16":
            return Half(flat, len(parameters), link)
        return BrainFloat(flat, link) if kind == "bf16" else Plain(flat, link)

    def _take(self, parameter: Tensor) -> None:
        """Copy a new gradient into its bucket, and send the buckets that are complete.

        Autograd calls this hook in the thread of the backward pass.
        """
        if not self._is_armed:
            return
        # the master has the gradient by now: its hook ran first
        parameter = self._holder(parameter)
        number, index = self._place[id(parameter)]
        bucket = self._buckets[number]
        if not bucket.there[index]:
            self._put(bucket, index, parameter.grad)
            self._send_ready()
        else:
            self._put_again(bucket, number, index, parameter.grad)

    @torch.no_grad()
    def _put_again(self, bucket: Bucket, number: int, index: int, grad: Tensor | None) -> None:
        """Update a gradient that is already in its bucket, after more was added to it.

        Raises TaskError if it was already sent.
        """
        if number < self._next and not self._group.is_alone:
            shape = tuple(bucket.parameters[index].shape)
            raise TaskError(
                f"a second backward pass after arm(): the gradient of a parameter of shape {shape} "
                "is on its way to other ranks",
                hint=ONE_PASS,
            )
        if grad is not None and grad is not bucket.views[index]:
            bucket.views[index].copy_(grad.to_dense() if grad.layout is not torch.strided else grad)

    @torch.no_grad()
    def _put(self, bucket: Bucket, index: int, grad: Tensor | None) -> None:
        bucket.there[index] = True
        bucket.num_missing -= 1
        view = bucket.views[index]
        if grad is None:
            bucket.has[index] = 0.0
            view.zero_()
            return
        if grad.layout is torch.sparse_coo:
            self._rows[id(bucket.parameters[index])] = grad._indices()[0]
        view.copy_(grad.to_dense() if grad.layout is not torch.strided else grad)
        if grad.dtype == view.dtype:
            bucket.parameters[index].grad = view  # frees the memory of the gradient

    def _send_ready(self) -> None:
        while self._next < len(self._buckets) and self._buckets[self._next].num_missing == 0:
            bucket = self._buckets[self._next]
            self._next += 1
            bucket.presence.copy_(torch.tensor(bucket.has))
            bucket.wait = bucket.wire.begin()

    @torch.no_grad()
    def _write_back_gradients(self, bucket: Bucket) -> None:
        missing = [
            index for index, parameter in enumerate(bucket.parameters) if parameter.grad is None
        ]
        # a host wait, only where a gradient is missing
        elsewhere = bucket.presence.tolist() if missing else []
        for index, parameter in enumerate(bucket.parameters):
            view = bucket.views[index]
            if parameter.grad is None and not elsewhere[index]:
                continue
            if parameter.dtype == view.dtype:
                parameter.grad = view
            elif parameter.grad is None or parameter.grad.layout is not torch.strided:
                parameter.grad = view.to(parameter.dtype)
            else:
                parameter.grad.copy_(view)


def pack_up(
    parameters: Sequence[Tensor], bucket_bytes: int, first_bytes: int
) -> list[list[Tensor]]:
    """Return the parameters of each bucket, in the order of the backward pass (last one first).

    The gradients in a bucket have the same device, and are summed in the same dtype.
    """
    open_: dict[tuple[torch.dtype, torch.device], list[Tensor]] = {}
    packs: list[list[Tensor]] = []
    for parameter in reversed(parameters):
        key = sum_dtype_of(parameter), parameter.device
        pack = open_.setdefault(key, [])
        pack.append(parameter)
        limit = bucket_bytes if packs else min(first_bytes, bucket_bytes)
        if sum(map(_num_bytes, pack)) >= limit:
            packs.append(open_.pop(key))
    return [*packs, *open_.values()]


def sum_dtype_of(parameter: Tensor) -> torch.dtype:
    """Return the dtype in which the gradients of a parameter are summed."""
    return torch.promote_types(parameter.dtype, torch.float32)


def _num_bytes(parameter: Tensor) -> int:
    return parameter.numel() * torch.empty(0, dtype=sum_dtype_of(parameter)).element_size()


def _make_bucket(
    parameters: Sequence[Tensor],
    make_wire: Callable[[Tensor, Sequence[Tensor]], Wire],
    group: Group,
) -> Bucket:
    wide = sum_dtype_of(parameters[0])
    real = wide.to_real() if wide.is_complex else wide
    width = 2 if wide.is_complex else 1
    sizes = [each.numel() * width for each in parameters]
    flat = group.allocate(sum(sizes) + len(parameters), real, parameters[0].device).zero_()
    *parts, presence = torch.split(flat, [*sizes, len(parameters)])
    views = []
    for part, parameter in zip(parts, parameters, strict=True):
        shaped = torch.view_as_complex(part.view(-1, 2)) if wide.is_complex else part
        views.append(view_like(shaped, parameter))
    return Bucket(list(parameters), flat, views, presence, make_wire(flat, parameters))


def view_like(part: Tensor, parameter: Tensor) -> Tensor:
    """Return `part` as a view with the shape and memory layout of `parameter`.

    The layout is, for example, channels last.
    """
    laid = torch.empty_like(parameter, dtype=part.dtype)  # dense, in the parameter's memory order
    return part.as_strided(laid.shape, laid.stride(), part.storage_offset())
