"""Properties of number formats, measured by casting values and reading the results.

tf32 is not a dtype of torch: a GPU rounds fp32 to tf32 at the input of a matmul. This module
emulates the rounding, to 10 mantissa bits.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

HALVINGS = 60  # bisections of an interval of doubles, down to the last bit
MIN_NORMAL, LARGEST = 2.0**-126, 3.4028234e38  # of fp32
USES = {
    "fp32": "weights, optimizer state, sums; the default",
    "tf32": "products of fp32 on a GPU, rounded on the way in",
    "bf16": "forward and backward; no loss scale",
    "fp16": "forward and backward, with a loss scale",
    "e4m3": "weights and activations of products, scaled by tensor or block",
    "e5m2": "gradients of products, scaled by tensor or block",
}


@dataclass(frozen=True, kw_only=True)
class Format:
    """Properties of a number format.

    `least` is the smallest positive number. `least_normal` is the smallest with full precision;
    smaller ones have fewer significant bits. `resolution` is the distance from 1 to the next larger
    number. Values up to `vanishes_up_to` are rounded to 0. Values from `overflows_from` on become
    `overflows_to`: inf, NaN or the largest number.
    """

    name: str
    bits: int
    significant_bits: int
    largest: float
    least_normal: float
    least: float
    resolution: float
    overflows_from: float
    overflows_to: str
    vanishes_up_to: float
    use: str


def round_to_tf32(values: Tensor) -> Tensor:
    """Return fp32 values rounded to 10 mantissa bits, ties to even; overflow gives inf.

    >>> round_to_tf32(torch.tensor([1.0, 1.0 + 2**-10, 1.0 + 2**-11])).tolist()
    [1.0, 1.0009765625, 1.0]
    """
    bits = values.view(torch.int32)
    rounded = (bits + 0xFFF + ((bits >> 13) & 1)) & ~0x1FFF
    return torch.where(torch.isfinite(values), rounded.view(torch.float32), values)


def _make_cast(dtype: torch.dtype) -> Callable[[float], float]:
    return lambda value: float(torch.tensor(value, dtype=torch.float64).to(dtype).to(torch.float64))


_CASTS: dict[str, tuple[int, Callable[[float], float]]] = {
    "fp32": (32, _make_cast(torch.float32)),
    "tf32": (
        19,
        lambda value: float(round_to_tf32(torch.tensor(value, dtype=torch.float64).float())),
    ),
    "bf16": (16, _make_cast(torch.bfloat16)),
    "fp16": (16, _make_cast(torch.float16)),
    "e4m3": (8, _make_cast(torch.float8_e4m3fn)),
    "e5m2": (8, _make_cast(torch.float8_e5m2)),
}


def find_formats() -> tuple[Format, ...]:
    """Return the measured properties of every number format."""
    return tuple(_measure(name, bits, cast) for name, (bits, cast) in _CASTS.items())


def _measure(name: str, bits: int, cast: Callable[[float], float]) -> Format:
    fraction_bits = next(count for count in range(60) if cast(1.0 + 2.0 ** -(count + 1)) == 1.0)
    resolution = 2.0**-fraction_bits
    least_exponent = next(exponent for exponent in range(1, 200) if cast(2.0**-exponent) == 0.0) - 1
    normal_exponent = (
        next(
            exponent
            for exponent in range(1, 200)
            if not _is_exact(cast, 2.0**-exponent, resolution)
        )
        - 1
    )
    power = 2.0 ** max(exponent for exponent in range(200) if cast(2.0**exponent) == 2.0**exponent)
    step = power * resolution  # between the largest numbers
    largest = max(
        value for number in range(16) if cast(value := 2.0 * power - step * (number + 1)) == value
    )
    overflow = _border(lambda value: not abs(cast(value) - value) < step / 2, largest, 2.0 * power)[
        1
    ]
    vanishing = _border(lambda value: cast(value) != 0.0, 0.0, 2.0**-least_exponent)[0]
    return Format(
        name=name,
        bits=bits,
        significant_bits=fraction_bits + 1,
        largest=largest,
        least_normal=2.0**-normal_exponent,
        least=2.0**-least_exponent,
        resolution=resolution,
        overflows_from=overflow,
        overflows_to=f"{cast(2.0 * power):g}",
        vanishes_up_to=vanishing,
        use=USES[name],
    )


def _is_exact(cast: Callable[[float], float], value: float, resolution: float) -> bool:
    return cast(value * (1.0 + resolution)) == value * (1.0 + resolution)


def _border(holds: Callable[[float], bool], below: float, above: float) -> tuple[float, float]:
    """Return the last value for which `holds` is False, and the first for which it is True.

    Both are between `below` and `above`, and are rounded to fp32 if they are in its normal range.
    """
    for _ in range(HALVINGS):
        middle = (below + above) / 2
        below, above = (below, middle) if holds(middle) else (middle, above)
    is_normal = MIN_NORMAL < above < LARGEST
    return (_as_fp32(below), _as_fp32(above)) if is_normal else (below, above)


def _as_fp32(value: float) -> float:
    return float(torch.tensor(value, dtype=torch.float64).float())
