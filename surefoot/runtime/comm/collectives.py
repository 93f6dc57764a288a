"""Collectives of a group that can be called repeatedly, to measure their bandwidth."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final

import torch
import torch.distributed as dist

from surefoot.core.errors import InputError
from surefoot.core.flight import Kind
from surefoot.runtime.comm.group import Group

ITEM = 4  # bytes of an fp32 number
ALL_REDUCE, ALL_GATHER, REDUCE_SCATTER, BROADCAST, ALL_TO_ALL, SEND = (
    "all-reduce",
    "all-gather",
    "reduce-scatter",
    "broadcast",
    "all-to-all",
    "send",
)
FLIGHT: Final = {
    ALL_REDUCE: Kind.SUM,
    ALL_GATHER: Kind.GATHER,
    REDUCE_SCATTER: Kind.SCATTER,
    BROADCAST: Kind.COPY,
    ALL_TO_ALL: Kind.SWAP,
    SEND: Kind.SEND,
}
# torch 2.13 renamed both functions
_gather: Callable[..., Any] = (
    getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
)
_scatter: Callable[..., Any] = (
    getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
)


class Collective:
    """Collective over at least `num_bytes` of fp32 zeros, divided equally among the ranks.

    The values are zeros because repeated in-place sums of others would overflow: on two ranks 1
    becomes inf after 128 sums. After `period` consecutive calls no rank can be ahead of the others:
    a broadcast starts from a different rank in each call, and `send` goes from the first rank to
    the last and then back.

    Raises:
        InputError: For an unknown name, for less than one byte, and for a group of one rank.
    """

    def __init__(self, name: str, group: Group, num_bytes: int) -> None:
        if name not in FLIGHT or group.is_alone or num_bytes < 1:
            raise InputError(
                f"{name} of {num_bytes} bytes over {group.size} ranks cannot be measured",
                hint=f"use two ranks or more, and one of {', '.join(FLIGHT)}",
            )
        self.name, self._group = name, group
        piece = -(-num_bytes // (ITEM * group.size))
        self._whole = group.allocate(piece * group.size, torch.float32, group.device).zero_()
        self._other = group.allocate(
            piece * (group.size if name == ALL_TO_ALL else 1), torch.float32, group.device
        ).zero_()
        self.num_bytes = ITEM * piece * group.size
        self.period = {BROADCAST: group.size, SEND: 2}.get(name, 1)

    def call(self, number: int) -> None:
        """Run the collective; `number` is the index of the call, from 0.

        On a GPU the collective may still be running on return.

        Raises:
            LostRank: If another rank has failed.
        """
        self._group.do(lambda: self._call(number), FLIGHT[self.name], self._whole)

    def _call(self, number: int) -> None:
        whole, other, memory = self._whole, self._other, self._group.memory
        if self.name == ALL_REDUCE:
            dist.all_reduce(whole) if memory is None else memory.add(whole)
        elif self.name == ALL_GATHER:
            _gather(whole, other) if memory is None else memory.gather_into(whole, other)
        elif self.name == REDUCE_SCATTER:
            _scatter(other, whole) if memory is None else memory.begin_to_scatter(other, whole)()
        elif self.name == BROADCAST:
            dist.broadcast(whole, number % self._group.size)
        elif self.name == ALL_TO_ALL:
            dist.all_to_all_single(other, whole)
        else:
            ends = (0, self._group.size - 1) if number % 2 == 0 else (self._group.size - 1, 0)
            if self._group.rank == ends[0]:
                dist.send(whole, ends[1])
            elif self._group.rank == ends[1]:
                dist.recv(whole, ends[0])

    def is_right(self) -> bool:
        """Return whether the collective gives the correct result on this rank.

        Every rank must call this. Afterwards the tensors of all ranks hold zeros again.
        """
        size, rank = self._group.size, self._group.rank
        # a distinct number for each piece
        number_of = torch.arange(size, device=self._whole.device).repeat_interleave(
            len(self._whole) // size
        )
        from_rank = [
            (1 + size * sender + number_of).to(self._whole.dtype) for sender in range(size)
        ]
        pieces = [row.view(size, -1) for row in from_rank]
        self._whole.copy_(from_rank[rank])
        if self.name == ALL_GATHER:
            self._other.copy_(pieces[rank][rank])
        self._call(0)
        got, expected = self._whole, from_rank[rank]
        if self.name == ALL_REDUCE:
            expected = torch.stack(from_rank).sum(0)
        elif self.name == ALL_GATHER:
            expected = torch.cat([pieces[sender][sender] for sender in range(size)])
        elif self.name == REDUCE_SCATTER:
            got, expected = self._other, torch.stack([row[rank] for row in pieces]).sum(0)
        elif self.name == BROADCAST:
            expected = from_rank[0]
        elif self.name == ALL_TO_ALL:
            got, expected = self._other, torch.cat([row[rank] for row in pieces])
        elif rank == size - 1:
            expected = from_rank[0]
        is_right = torch.equal(got, expected)
        self._whole.zero_()
        self._other.zero_()
        return is_right
