"""How the numbers of a bucket go to the other ranks: as they are, in 16 bits, or as products of low rank (`low_rank`).

A wire is begun when all gradients of its bucket are there, and waited for when the backward pass is over. What waits may give another
that is waited for after it: then ranks tell each other something first, and the buckets take turns.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal, Protocol

import torch
from torch import Tensor

from surefoot.runtime.comm import Group

Wait = Callable[[], Any]  # Wait | None: what is waited for next
EXPONENTS = {torch.float32: 126, torch.float64: 1022}  # of powers of two that are normal numbers, as their inverse is
TOP = 15  # the largest sum in fp16 is at most 2 ** 15; it holds 65504


@dataclass(frozen=True)
class Compression:
    """What gradients are made smaller by before they are sent: `rank` columns for each side of a matrix, with powersgd."""

    kind: Literal["none", "bf16", "fp16", "powersgd"] = "none"
    rank: int = 4


NONE = Compression()


class Link:
    """The group, and what this rank has sent to it: `num_bytes` as the collectives' own arguments."""

    def __init__(self, group: Group) -> None:
        self.group = group
        self.num_bytes = self.num_collectives = 0

    def add(self, tensor: Tensor) -> Callable[[], None]:
        """Begin to sum `tensor` over ranks in its place; gives what waits for it."""
        return self._counted(tensor, self.group.begin_to_add)

    def most(self, tensor: Tensor) -> Callable[[], None]:
        """The same with the largest of each number."""
        return self._counted(tensor, self.group.begin_to_take_largest)

    def _counted(self, tensor: Tensor, begin: Callable[[Tensor], Callable[[], None]]) -> Callable[[], None]:
        self.num_bytes += tensor.numel() * tensor.element_size()
        self.num_collectives += 1
        return begin(tensor)


class Wire(Protocol):
    """The way of one bucket, whose numbers are those of all ranks when the last wait is over."""

    def begin(self) -> Wait: ...


class Plain:
    """As they are."""

    def __init__(self, flat: Tensor, link: Link) -> None:
        self._flat, self._link = flat, link

    def begin(self) -> Wait:
        return self._link.add(self._flat)


class BrainFloat:
    """In bf16, which has the range of fp32: half the bytes, summed in bf16 too.

    A sum over n ranks is off by at most ((1 + 2^-8)^n - 1) of the sum of magnitudes: one rounding for the cast, one for each addition.
    """

    def __init__(self, flat: Tensor, link: Link) -> None:
        self._flat, self._link = flat, link

    def begin(self) -> Wait:
        wire = self._flat.to(torch.bfloat16)
        return partial(self._end, wire, self._link.add(wire))

    def _end(self, wire: Tensor, wait: Callable[[], None]) -> None:
        wait()
        self._flat.copy_(wire)


class Half:
    """In fp16, times a power of two that the largest number of all ranks allows: n of them in a sum stay below 2^15.

    So no sum overflows, and what is 2^29 times smaller than the largest of its bucket still has all 11 bits. It is 8 times as exact as
    bf16, and costs one more message of one number, for which it waits until the backward pass is over. What is not finite stays so.
    """

    def __init__(self, flat: Tensor, num_tail: int, link: Link) -> None:
        """The last `num_tail` numbers of `flat` are counts of ranks, which go as they are."""
        self._gradients, self._tail = flat[: flat.numel() - num_tail], flat[flat.numel() - num_tail :]
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
        scale = torch.exp2((TOP - bits - torch.frexp(largest).exponent).clamp(-most, most).to(largest.dtype))
        wire = self._flat.to(torch.float16)
        wire[: self._gradients.numel()] = self._gradients * scale
        return partial(self._end, wire, scale, self._link.add(wire))

    def _end(self, wire: Tensor, scale: Tensor, wait: Callable[[], None]) -> None:
        wait()
        self._flat.copy_(wire)
        self._gradients.div_(scale)
