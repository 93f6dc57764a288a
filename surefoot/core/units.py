"""Parse and format quantities with their units; unknown values are None and print as n/a.

Prefixes of counts are k, M, B, T (10^3, 10^6, 10^9, 10^12); of FLOP k, M, G, T, P; of bytes KiB,
MiB ... (1024) and KB, MB ... (1000).
"""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction
from typing import Literal, Self, get_args

from surefoot.core.errors import SpecError

Unit = Literal["steps", "epochs", "samples", "tokens", "s", "%"]

UNKNOWN = "n/a"
SMALLEST = 1e-9
LARGEST = 10**18  # below 2^63, so that every count fits an int64 of torch or numpy

_PREFIXES = {"": 1, "k": 10**3, "K": 10**3, "M": 10**6, "B": 10**9, "T": 10**12}
_NAMES: dict[str, tuple[Unit, int]] = {
    "step": ("steps", 1),
    "steps": ("steps", 1),
    "epoch": ("epochs", 1),
    "epochs": ("epochs", 1),
    "sample": ("samples", 1),
    "samples": ("samples", 1),
    "token": ("tokens", 1),
    "tokens": ("tokens", 1),
    "s": ("s", 1),
    "second": ("s", 1),
    "seconds": ("s", 1),
    "min": ("s", 60),
    "minute": ("s", 60),
    "minutes": ("s", 60),
    "h": ("s", 3600),
    "hour": ("s", 3600),
    "hours": ("s", 3600),
    "%": ("%", 1),
}
_BYTES = {
    "B": 1,
    **{f"{p}iB": 1024**n for n, p in enumerate("KMGT", 1)},
    **{f"{p}B": 1000**n for n, p in enumerate("KMGT", 1)},
}
_NUMBER = r"([0-9]+(?:_[0-9]+)*(?:\.[0-9]+)?(?:[eE][+-]?[0-9]{1,2})?)"
_DURATION = re.compile(
    rf"{_NUMBER}\s*([kKMBT]?)\s*({'|'.join(sorted(_NAMES, key=len, reverse=True))})"
)
_COUNT = re.compile(rf"{_NUMBER}\s*([kKMBT]?)")
_SIZE = re.compile(rf"{_NUMBER}\s*({'|'.join(sorted(_BYTES, key=len, reverse=True))})")
_LONGEST = 40  # characters; limits the cost of an untrusted number
_HINT = (
    "a duration is a number with its unit: "
    '"5000 steps", "10 epochs", "60000 samples", "20 M tokens", "90 s", "10 min", "2 h", '
    'or "5 %" of the run'
)


@dataclass(frozen=True)
class Duration:
    """Duration or interval: a number with its unit.

    The number is finite and at least 0. The unit is steps, epochs, samples, tokens, seconds, or
    percent of the run. Steps, samples and tokens are integers. Durations of the same length and
    unit compare equal and print alike, however they were written. Raises SpecError for any other
    number or unit.

    >>> Duration.parse("20 M tokens")
    Duration(value=20000000, unit='tokens')
    >>> texts = ("1 epochs", "0.01 k steps", "10 min", "5_000 steps", "2500 M tokens")
    >>> [str(Duration.parse(text)) for text in texts]
    ['1 epoch', '10 steps', '600 s', '5000 steps', '2.5 B tokens']
    >>> str(Duration.parse("5%"))
    '5 %'
    """

    value: int | float
    unit: Unit

    def __post_init__(self) -> None:
        given = f"a duration of {self.value!r} {self.unit}"
        if self.unit not in get_args(Unit):
            raise SpecError(
                f"{given} has no known unit", hint=f"use one of {', '.join(get_args(Unit))}"
            )
        if type(self.value) not in (int, float) or not 0 <= self.value < math.inf:
            raise SpecError(f"{given} is not a finite number of 0 or more", hint=_HINT)
        if self.value > LARGEST or 0 < self.value < SMALLEST:
            raise SpecError(
                f"{given} is not between {SMALLEST:g} and {LARGEST:g}",
                hint="check the prefix: k, M, B or T",
            )
        if self.unit == "%" and self.value > 100:
            raise SpecError(
                f"{given} is more than the run", hint="a share of the run is at most 100 %"
            )
        if float(self.value).is_integer():
            # 2.0 and 2 mean the same, so they must be equal
            object.__setattr__(self, "value", int(self.value))
        elif self.unit not in ("epochs", "s", "%"):
            raise SpecError(
                f"{given} is not a whole number of {self.unit}",
                hint="only epochs, times and shares may be fractions",
            )

    @classmethod
    def parse(cls, text: str) -> Self:
        """Read `number [k|M|B|T] unit`, such as "5_000 steps", "0.5 epoch", "20M tokens", "10 min".

        Raises SpecError for a number without a unit, a negative or non-finite number, and any other
        text.
        """
        match = _match(_DURATION, text)
        if match is None:
            raise SpecError(f"{_clip(text)} is not a duration", hint=_HINT)
        number, prefix, name = match.groups()
        unit, scale = _NAMES[name]
        if unit in ("s", "%") and prefix:
            raise SpecError(
                f"{text!r} has a prefix before {'a time' if unit == 's' else '%'}", hint=_HINT
            )
        value = Fraction(number) * _PREFIXES[prefix] * scale
        return cls(int(value) if value.denominator == 1 else float(value), unit)

    def __str__(self) -> str:
        if self.unit in ("s", "%"):
            return f"{self.value} {self.unit}"
        name = self.unit.removesuffix("s") if self.value == 1 else self.unit
        for prefix in "TBM":
            scale = _PREFIXES[prefix]
            if self.value >= scale and self.value % (scale // 1000) == 0:
                # at most three decimals, so nothing is lost
                return f"{self.value / scale:.3f}".rstrip("0").rstrip(".") + f" {prefix} {name}"
        return f"{self.value} {name}"

    def to_steps(
        self,
        steps_per_epoch: int,
        samples_per_step: int,
        tokens_per_step: float | None,
        total_steps: int | None = None,
    ) -> int:
        """Return the duration in optimizer steps, rounded up: at least 1 unless the duration is 0.

        `samples_per_step` is the global batch size: the samples of all microbatches and ranks.
        Raises SpecError for a time, for tokens if `tokens_per_step` is unknown, and for a
        percentage if `total_steps` is unknown.

        >>> [Duration.parse(text).to_steps(100, 32, None) for text in ("0.07 epochs", "33 samples")]
        [7, 2]
        """
        # the decimal that was written: 0.07 * 100 is 7 steps, not 7.000000000000001
        exact = Fraction(str(self.value))
        if self.unit == "steps":
            return int(self.value)
        if self.unit == "epochs":
            steps = exact * steps_per_epoch
        elif self.unit == "samples":
            steps = exact / samples_per_step
        elif self.unit == "tokens" and tokens_per_step:
            steps = exact / Fraction(tokens_per_step)
        elif self.unit == "%" and total_steps is not None:
            steps = exact * total_steps / 100
        elif self.unit == "%":
            raise SpecError(
                f"{self} is a share of the run, but the number of steps of the run is not known",
                hint="give it in steps or epochs",
            )
        elif self.unit == "tokens":
            raise SpecError(
                f"{self} cannot be counted: the data has no known tokens per sample",
                hint="give it in steps or epochs",
            )
        else:
            raise SpecError(
                f"{self} is a time, not a number of steps",
                hint="give it in steps, epochs, samples or tokens",
            )
        return math.ceil(steps)


def parse_count(text: str) -> int:
    """Return the integer in a text such as "70B", "1.3 M" or "4_000".

    Raises SpecError for any other text.

    >>> parse_count("70B"), parse_count("1.3 M")
    (70000000000, 1300000)
    """
    match = _match(_COUNT, text)
    if match is None:
        raise SpecError(
            f"{_clip(text)} is not a count",
            hint='a count is a number with k, M, B or T: "4000", "1.3M", "70 B"',
        )
    return int(Fraction(match[1]) * _PREFIXES[match[2]])


def parse_bytes(text: str) -> int:
    """Return the number of bytes in a text such as "1.5 GiB" or "80 GB", rounded down.

    GiB is based on 1024, GB on 1000. Raises SpecError for a number without a unit, and for any
    other text.

    >>> parse_bytes("1.5 GiB") == 3 * 2**29, parse_bytes("80 GB")
    (True, 80000000000)
    """
    match = _match(_SIZE, text)
    if match is None:
        raise SpecError(
            f"{_clip(text)} is not a size in bytes",
            hint='a size needs its unit: "512 B", "1.5 GiB", "80 GB"',
        )
    return int(Fraction(match[1]) * _BYTES[match[2]])


def format_bytes(value: float | None) -> str:
    """Format a number of bytes, with units that are powers of 1024.

    >>> format_bytes(1.5 * 2**30), format_bytes(None)
    ('1.5 GiB', 'n/a')
    """
    return _format_scaled(
        value, [(1024**n, f"{p}B") for n, p in enumerate(["", "Ki", "Mi", "Gi", "Ti"])]
    )


def format_count(value: float | None) -> str:
    """Format a count, with prefixes that are powers of 1000.

    >>> format_count(2.1e9), format_count(1797), format_count(10)
    ('2.1 B', '1.8 k', '10')
    """
    return _format_scaled(value, [(1, ""), (10**3, "k"), (10**6, "M"), (10**9, "B"), (10**12, "T")])


def format_flops(value: float | None) -> str:
    """Format a number of floating-point operations, with prefixes that are powers of 1000.

    >>> format_flops(8.858e9), format_flops(328e3)
    ('8.86 GFLOP', '328 kFLOP')
    """
    return _format_scaled(
        value,
        [
            (1, "FLOP"),
            (10**3, "kFLOP"),
            (10**6, "MFLOP"),
            (10**9, "GFLOP"),
            (10**12, "TFLOP"),
            (10**15, "PFLOP"),
        ],
    )


def format_seconds(value: float | None) -> str:
    """Format a time, given in seconds, in a unit that suits its size.

    >>> [format_seconds(value) for value in (2e-6, 0.04, 59.999, 5400)]
    ['2 us', '40 ms', '1 min', '1.5 h']
    """
    if value == 0:
        return "0 s"
    return _format_scaled(value, [(1e-6, "us"), (1e-3, "ms"), (1, "s"), (60, "min"), (3600, "h")])


def format_rate(value: float | None, what: str) -> str:
    """Format a rate; `value` is the number of `what` per second.

    >>> format_rate(12_340, "samples")
    '12.3 k samples/s'
    """
    return UNKNOWN if value is None else f"{format_count(value)} {what}/s"


def format_throughput(samples_per_s: float | None, items_per_s: float | None, unit: str) -> str:
    """Format samples per second, followed by items per second unless the items are samples.

    `unit` is the name of the items over which the loss is averaged, such as "tokens".

    >>> format_throughput(1_280, 163_840, "tokens"), format_throughput(1_280, 1_280, "samples")
    ('1.28 k samples/s, 164 k tokens/s', '1.28 k samples/s')
    """
    samples = format_rate(samples_per_s, "samples")
    return samples if unit == "samples" else f"{samples}, {format_rate(items_per_s, unit)}"


def format_bits_per_s(bytes_per_s: float | None) -> str:
    """Format a bandwidth given in bytes/s as bits/s, in powers of 1000.

    >>> format_bits_per_s(1.25e9), format_bits_per_s(None)
    ('10 Gbit/s', 'n/a')
    """
    ladder = [(1000**n, f"{p}bit/s") for n, p in enumerate(["", "k", "M", "G", "T"])]
    return _format_scaled(None if bytes_per_s is None else 8 * bytes_per_s, ladder)


def format_percent(value: float | None) -> str:
    """Format a fraction as a percentage with four significant digits: 1 is 100 %.

    A fraction below 1 is never shown as 100 %.

    >>> format_percent(0.994), format_percent(0.999999), format_percent(1)
    ('99.4 %', '99.99 %', '100 %')
    """
    if value is None:
        return UNKNOWN
    return "99.99 %" if 0.9999 < value < 1 else f"{format_number(100 * value)} %"


def format_number(value: float | None) -> str:
    """Format a number with four significant digits.

    Numbers from 1,000 on are rounded to integers. Numbers from a million on, and below 1e-4, have
    an exponent.

    >>> values = (164.23, 0.0006, 60_000, 1.5e7, 3e-5, float("nan"), None)
    >>> [format_number(value) for value in values]
    ['164.2', '0.0006', '60000', '1.5e+07', '3e-05', 'nan', 'n/a']
    """
    if value is None:
        return UNKNOWN
    return f"{value:.0f}" if 1000 <= abs(value) < 999_999.5 else f"{value:.4g}"


def name_some(names: Sequence[str], most: int) -> str:
    """Return a text with the first `most` of the names and the number of the remaining ones.

    >>> name_some(["a", "b", "c"], 2), name_some(["a", "b"], 2)
    ('a, b and 1 more', 'a, b')
    """
    return ", ".join(names[:most]) + (
        f" and {len(names) - most:,} more" if len(names) > most else ""
    )


def _format_scaled(value: float | None, ladder: Sequence[tuple[float, str]]) -> str:
    """Format `value` in the largest unit in which it rounds to at least 1: 1023.9 MiB is 1 GiB.

    `ladder` lists the units in ascending order, each as (size, name).
    """
    if value is None:
        return UNKNOWN
    if not math.isfinite(value):
        return str(value)
    shown, unit = _short(value / ladder[0][0]), ladder[0][1]
    for scale, name in ladder[1:]:
        if abs(float(_short(value / scale))) >= 1:
            shown, unit = _short(value / scale), name
    return f"{shown} {unit}".rstrip()


def _short(value: float) -> str:
    """Format a number below 100 with three significant digits, a larger one as an integer."""
    return f"{value:.0f}" if abs(value) >= 99.95 else f"{value:.3g}"


def _match(pattern: re.Pattern[str], text: object) -> re.Match[str] | None:
    """Return the match of `pattern` with the whole text; None if it does not match or is too long.

    A number without quotes in TOML is an int, although the callers' annotations say str. It is
    handled like its text.
    """
    written = str(text).strip()
    return pattern.fullmatch(written) if len(written) <= _LONGEST else None


def _clip(text: object) -> str:
    shown = repr(text)
    return shown if len(shown) <= _LONGEST else f"{shown[:_LONGEST]}..."
