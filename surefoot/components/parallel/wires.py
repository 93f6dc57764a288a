"""Compression of gradient buckets: none, 16 bits, or products of low rank (`low_rank`).

The method `begin` of a reducer is called when all gradients of a bucket exist. It returns a
function that waits for the reduction, which is called after the backward pass. If the reduction has
several rounds, that function returns a further function to wait for, and the buckets take turns.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal, Protocol

import torch
from torch import Tensor

from surefoot.runtime.comm.group import Group

Wait = Callable[[], Any]  # returns the next Wait, or None
# largest exponent whose power of two and its inverse are normal numbers
EXPONENTS = {torch.float32: 126, torch.float64: 1022}
TOP = 15  # sums in fp16 stay below 2 ** 15; the largest fp16 is 65504


@dataclass(frozen=True)
class Compression:
    """Compression of gradients before they are sent to other ranks.

    Args:
        kind: "none", "bf16", "fp16" or "powersgd" (Vogels et al. 2019, arXiv 1905.13727).
        rank: Number of columns of the low-rank factors P and Q; only for powersgd.
    """

    kind: Literal["none", "bf16", "fp16", "powersgd"] = "none"
    rank: int = 4


NONE = Compression()


class CountedGroup:
    """Group that counts the collectives of this rank, and the bytes of their arguments."""

    def __init__(self, group: Group) -> None:
        self.group = group
        self.num_bytes = self.num_collectives = 0

    def add(self, tensor: Tensor) -> Callable[[], None]:
        """Start an all-reduce (sum) of `tensor` in place; return a function that waits for it."""
        return self._count_bytes(tensor, self.group.begin_to_add)

    def most(self, tensor: Tensor) -> Callable[[], None]:
        """Start an all-reduce (max) of `tensor` in place; return a function that waits for it."""
        return self._count_bytes(tensor, self.group.begin_to_take_largest)

    def _count_bytes(
        self, tensor: Tensor, begin: Callable[[Tensor], Callable[[], None]]
    ) -> Callable[[], None]:
        self.num_bytes += tensor.numel() * tensor.element_size()
        self.num_collectives += 1
        return begin(tensor)


class Wire(Protocol):
    """Reducer of one bucket of gradients.

    After the last wait, the tensor of the bucket contains the sum over all ranks.
    """

    def begin(self) -> Wait: ...


class Plain:
    """Reducer of one bucket without compression."""

    def __init__(self, flat: Tensor, link: CountedGroup) -> None:
        self._flat, self._link = flat, link

    def begin(self) -> Wait:
        return self._link.add(self._flat)


class BrainFloat:
    """Reducer of one bucket in bf16, which has the range of fp32.

    It sends half the bytes of fp32, and the sum is computed in bf16, too. The error of a sum over n
    ranks is at most ((1 + 2^-8)^n - 1) times the sum of magnitudes: one rounding for the cast, and
    one for each addition.
    """

    def __init__(self, flat: Tensor, link: CountedGroup) -> None:
        self._flat, self._link = flat, link

    def begin(self) -> Wait:
        wire = self._flat.to(torch.bfloat16)
        return partial(self._end, wire, self._link.add(wire))

    def _end(self, wire: Tensor, wait: Callable[[], None]) -> None:
        wait()
        self._flat.copy_(wire)


class Half:
    """Reducer of one bucket in fp16, with a scale that prevents overflow of the sums.

    The scale is a power of two. It is computed from the largest value on all ranks, so that a sum
    over all ranks stays below 2^15. A value 2^29 times smaller than the largest value of its bucket
    still has all 11 bits of precision. The reducer is 8 times as precise as one in bf16, but needs
    one more all-reduce, of one number, which runs after the backward pass. Non-finite values stay
    non-finite.
    """

    def __init__(self, flat: Tensor, num_tail: int, link: CountedGroup) -> None:
        """Split `flat` into gradients, and `num_tail` counts of ranks, which are not scaled."""
        self._gradients, self._tail = (
            flat[: flat.numel() - num_tail],
            flat[flat.numel() - num_tail :],
        )
        self._flat, self._link = flat, link

    def begin(self) -> Wait:
        return self._ask

    def _ask(self) -> Wait:
        largest = self._flat.new_zeros(1)
        if self._gradients.numel():
            low, high = torch.aminmax(self._gradients)
            largest = torch.maximum(-low, high).view(1)
        return partial(self._send, largest, self._link.most(largest))

    def _send(self, largest: Tensor, wait: Callable[[], None]) -> Wait:
        wait()
        bits = (self._link.group.size - 1).bit_length()
        most = EXPONENTS[largest.dtype]
        scale = torch.exp2(
            (TOP - bits - torch.frexp(largest).exponent).clamp(-most, most).to(largest.dtype)
        )
        wire = self._flat.to(torch.float16)
        wire[: self._gradients.numel()] = self._gradients * scale
        return partial(self._end, wire, scale, self._link.add(wire))

    def _end(self, wire: Tensor, scale: Tensor, wait: Callable[[], None]) -> None:
        wait()
        self._flat.copy_(wire)
        self._gradients.div_(scale)
