"""Activation checkpointing: its settings, and the choice of blocks for a memory budget.

The model of memory is as follows. From its forward pass on, a block that is not recomputed stores
its inputs and everything else that its backward pass needs. A recomputed block stores only its
inputs until its backward pass, in which it stores everything. During that pass each earlier block
still stores what it stored after its forward pass.
"""

from __future__ import annotations

import re
from collections.abc import Container, Sequence
from dataclasses import dataclass
from typing import Literal

from surefoot.core.errors import SpecError
from surefoot.core.units import format_bytes, parse_bytes

Kind = Literal["none", "full", "every", "operators", "budget"]
# unit of time, as a share of all blocks' time; rounding 24 blocks costs under 0.15 %
RESOLUTION = 1 << 13
WORDS = '"none", "full", "every 2", "operators", or a budget as "12 MiB"'


@dataclass(frozen=True)
class RecomputeChoice:
    """Choice of what the backward pass recomputes (activation checkpointing).

    "none": no block; "full": all blocks; "every": every `number`-th block; "operators": the cheap
    operators of all blocks; "budget": as few blocks as fit into `number` bytes.
    """

    kind: Kind
    number: int = 0

    @classmethod
    def parse(cls, text: str) -> RecomputeChoice:
        """Read "none", "full", "every N", "operators" or a size in bytes, such as "12 MiB".

        Raises SpecError for any other text.

        >>> RecomputeChoice.parse("every 3"), RecomputeChoice.parse("12 MiB")
        (RecomputeChoice(kind='every', number=3), RecomputeChoice(kind='budget', number=12582912))
        """
        if text in ("none", "full", "operators"):
            return cls(text)  # type: ignore[arg-type]
        if not isinstance(text, str):
            raise SpecError(
                f"{text!r} is not a value of memory.activation_checkpointing", hint=f"use {WORDS}"
            )
        every = re.fullmatch(r"every ([1-9][0-9]{0,3})", text)
        if every is not None:
            return cls("every", int(every[1]))
        try:
            return cls("budget", parse_bytes(text))
        except SpecError:
            raise SpecError(
                f"{text!r} is not a value of memory.activation_checkpointing", hint=f"use {WORDS}"
            ) from None


@dataclass(frozen=True)
class RecomputeCost:
    """Memory of a block, and the time to recompute it.

    `input_bytes` is the size of its inputs, `inner_bytes` that of everything else that its backward
    pass needs, `again_s` the time to recompute the block, in seconds.
    """

    name: str
    input_bytes: int
    inner_bytes: int
    again_s: float

    @property
    def whole_bytes(self) -> int:
        return self.input_bytes + self.inner_bytes


def smallest_budget(costs: Sequence[RecomputeCost]) -> int:
    """Return the smallest possible peak memory in bytes: the peak if every block is recomputed."""
    return peak_bytes(costs, range(len(costs)))


def peak_bytes(costs: Sequence[RecomputeCost], again: Container[int]) -> int:
    """Return the peak memory in bytes if the blocks with an index in `again` are recomputed.

    >>> blocks = [RecomputeCost("a", 1, 10, 1.0), RecomputeCost("b", 1, 10, 1.0)]
    >>> [peak_bytes(blocks, again) for again in ((), {0}, {1}, {0, 1})]
    [22, 12, 22, 12]
    """
    held = peak = 0
    for number, cost in enumerate(costs):
        peak = max(peak, held + cost.whole_bytes)
        held += cost.input_bytes if number in again else cost.whole_bytes
    return peak


def choose(costs: Sequence[RecomputeCost], budget_bytes: int) -> frozenset[int]:
    """Return the indices of the blocks to recompute so that the peak is within `budget_bytes`.

    The choice takes the least recomputation time, so a larger budget never takes more time. It is
    found by a dynamic program over the bytes stored after each block, which drops a choice if a
    different one needs no more bytes and no more time. Raises SpecError, which names the smallest
    possible budget, if `budget_bytes` is smaller.

    >>> blocks = [RecomputeCost(name, 1, 10, s) for name, s in (("a", 3.0), ("b", 1.0), ("c", 1.0))]
    >>> sorted(choose(blocks, 30))
    [1]
    """
    least = smallest_budget(costs)
    if budget_bytes < least:
        raise SpecError(
            f"memory.activation_checkpointing is {format_bytes(budget_bytes)}, "
            f"and the blocks hold {format_bytes(least)} even when each is computed again",
            hint=(
                f'use "{-(-least // 1024)} KiB" or more, a smaller microbatch, or smaller blocks: '
                "memory.blocks"
            ),
        )
    total_s = sum(cost.again_s for cost in costs) or 1.0
    front = [(0, 0, 0)]  # bytes held, time in units, the blocks as bits: fewer bytes take more time
    for number, cost in enumerate(costs):
        spent = round(cost.again_s / total_s * RESOLUTION)  # in units of total_s / RESOLUTION
        grown = []
        for held, time, bits in front:
            if held + cost.whole_bytes <= budget_bytes:
                grown += [
                    (held + cost.whole_bytes, time, bits),
                    (held + cost.input_bytes, time + spent, bits | 1 << number),
                ]
        front = []
        for held, time, bits in sorted(grown):
            if not front or time < front[-1][1]:
                front.append((held, time, bits))
    bits = front[-1][2]  # the fastest
    return frozenset(number for number in range(len(costs)) if bits >> number & 1)
