"""Compression of gradient buckets: uncompressed, in 16 bits, or as products of low rank
(`low_rank`).

`begin` runs when all gradients of a bucket exist, and returns a function that waits, called after
the backward pass. That function may return another one to wait for, where the reduction has several
rounds; the buckets then take turns.
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
    """Compression of gradients before they are sent.

    Args:
        kind: "none", "bf16", "fp16" or "powersgd" (Vogels et al. 2019, arXiv 1905.13727).
        rank: Number of columns of P and Q with powersgd.
    """

    kind: Literal["none", "bf16", "fp16", "powersgd"] = "none"
    rank: int = 4


NONE = Compression()


class CountedGroup:
    """The group, with the bytes and collectives that this rank has sent; `num_bytes` counts the
    arguments of the collectives."""

    def __init__(self, group: Group) -> None:
        self.group = group
        self.num_bytes = self.num_collectives = 0

    def add(self, tensor: Tensor) -> Callable[[], None]:
        """Start an all-reduce (sum) of `tensor` in place; return the function that waits for it."""
        return self._count_bytes(tensor, self.group.begin_to_add)

    def most(self, tensor: Tensor) -> Callable[[], None]:
        """Start an all-reduce (maximum) of `tensor` in place; return the function that waits for
        it."""
        return self._count_bytes(tensor, self.group.begin_to_take_largest)

    def _count_bytes(
        self, tensor: Tensor, begin: Callable[[Tensor], Callable[[], None]]
    ) -> Callable[[], None]:
        self.num_bytes += tensor.numel() * tensor.element_size()
        self.num_collectives += 1
        return begin(tensor)


class Wire(Protocol):
    """Reducer of one bucket, whose tensor holds the sum over all ranks after the last wait."""

    def begin(self) -> Wait: ...


class Plain:
    """Reducer without compression."""

    def __init__(self, flat: Tensor, link: CountedGroup) -> None:
        self._flat, self._link = flat, link

    def begin(self) -> Wait:
        return self._link.add(self._flat)


class BrainFloat:
    """Reducer in bf16, which has the range of fp32: half the bytes, and summed in bf16 too.

    The error of a sum over n ranks is at most ((1 + 2^-8)^n - 1) times the sum of magnitudes: one
    rounding for the cast, one for each addition.
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
    """Reducer in fp16, scaled by a power of two from the largest value of all ranks, so that a sum
    over all ranks stays below 2^15.

    No sum overflows, and a value 2^29 times smaller than the largest of its bucket still has all 11
    bits. It is 8 times as precise as bf16, and costs one more all-reduce, of one number, which runs
    after the backward pass. Non-finite values stay non-finite.
    """

    def __init__(self, flat: Tensor, num_tail: int, link: CountedGroup) -> None:
        """Split `flat`: its last `num_tail` elements are counts of ranks, which are not scaled."""
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
