"""Options of `surefoot bench comm`, checked before any rank starts, without torch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import get_args

from surefoot.control.plan import COLLECTIVES
from surefoot.core.errors import InputError
from surefoot.core.hardware import find_machine
from surefoot.core.ranks.layout import Transport

STEP = 4  # factor from one size to the next
DEVICES = ("auto", "cpu", "cuda")
TRANSPORTS = get_args(Transport)
HELD = 2  # most buffers of the largest size in a rank


@dataclass(frozen=True, kw_only=True)
class Sizes:
    """Options to time collectives over buffers of `smallest` to `largest` bytes.

    Raises:
        InputError: For options with which nothing can be measured.
    """

    collectives: tuple[str, ...] = COLLECTIVES
    smallest: int = 1 << 10
    largest: int = 64 << 20
    device: str = "auto"
    transport: Transport = "auto"
    calls: int = 20
    warmup: int = 5

    def __post_init__(self) -> None:
        unknown = [each for each in self.collectives if each not in COLLECTIVES]
        if unknown or not 0 < len(self.collectives) == len(set(self.collectives)):
            said = (
                f"there is no collective {unknown[0]!r}"
                if unknown
                else "no collective is named, or one twice"
            )
            raise InputError(said, hint=f"use some of {','.join(COLLECTIVES)}")
        if self.device not in DEVICES:
            raise InputError(
                f"--device is {self.device!r}", hint=f"use one of {', '.join(DEVICES)}"
            )
        if self.transport not in TRANSPORTS:
            raise InputError(
                f"--transport is {self.transport!r}", hint=f"use one of {', '.join(TRANSPORTS)}"
            )
        if not 1 <= self.smallest <= self.largest:
            raise InputError(
                f"sizes from {self.smallest:,} to {self.largest:,} bytes are none",
                hint="--smallest is 1 B or more, and --largest no less",
            )
        _check_calls(self.calls, self.warmup)

    def check_memory(self, ranks: int) -> None:
        """Check that the buffers of `ranks` ranks fit in half of this host's memory.

        Raises:
            InputError: If they do not.
        """
        needed, there = HELD * self.largest * ranks, find_machine().memory_bytes
        if needed > there / 2:
            raise InputError(
                f"{ranks} ranks with buffers of {self.largest:,} bytes need {needed:,} bytes, "
                f"but this host has {there:,}",
                hint=f'use --largest "{there // (2 * HELD * ranks) >> 20} MiB" or less',
            )

    @property
    def all(self) -> list[int]:
        """Buffer sizes in bytes: from `smallest` by factors of four, with `largest` as the last.

        >>> Sizes(smallest=1024, largest=20_000).all
        [1024, 4096, 16384, 20000]
        """
        found = [self.smallest]
        while found[-1] * STEP <= self.largest:
            found.append(found[-1] * STEP)
        return found if found[-1] == self.largest else [*found, self.largest]


@dataclass(frozen=True, kw_only=True)
class Buckets:
    """Options to compare buckets of `sizes` bytes in `rounds` rounds.

    The all-reduce of the gradients alone is timed in `calls` calls after `warmup` calls.

    Raises:
        InputError: For options with which nothing can be measured.
    """

    sizes: tuple[int, ...] = tuple(size << 20 for size in (1, 2, 5, 10, 25, 50, 100))
    calls: int = 100
    warmup: int = 10
    rounds: int = 7

    def __post_init__(self) -> None:
        if not self.sizes or min(self.sizes) < 1 or len(set(self.sizes)) < len(self.sizes):
            raise InputError(
                "--buckets names no size, or one twice",
                hint='name some, as in --buckets "1 MiB,10 MiB"',
            )
        if self.rounds < 1:
            raise InputError(
                f"--rounds is {self.rounds}", hint="use 1 or more; six or more give intervals"
            )
        _check_calls(self.calls, self.warmup)


def _check_calls(calls: int, warmup: int) -> None:
    if calls < 1 or warmup < 0:
        raise InputError(
            f"{calls} calls after {warmup} measure nothing",
            hint="use --calls 1 or more, and --warmup 0 or more",
        )
