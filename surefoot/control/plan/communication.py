"""Cost model of communication: seconds = latency + bytes / bandwidth, fitted to measurements.

The best size of gradient buckets follows from the model. The two parameters, and the size that
reaches half of the bandwidth, are from R. Hockney, "The communication challenge for MPP", 1994. The
factors of bus bandwidth are those of NVIDIA's nccl-tests, doc/PERFORMANCE.md.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import combinations

from surefoot.core.errors import InputError
from surefoot.core.statistics import MAD_TO_SD, median

COLLECTIVES = ("all-reduce", "all-gather", "reduce-scatter", "broadcast", "all-to-all", "send")
# a size is left out if its error exceeds this many robust standard deviations, and 10 %
FAR, MIN_FAR = 3.0, 0.1
Point = tuple[int, float]  # bytes, seconds


def bus_factor(collective: str, ranks: int) -> float:
    """Return the factor in `bus bandwidth = factor * size / time` for a collective.

    Unlike size / time, the bus bandwidth does not depend on the number of ranks. The size is that
    of the whole tensor, which is reduced, gathered from all ranks, or scattered to all ranks.

    Raises:
        InputError: if the collective is unknown, or for fewer than two ranks.

    >>> [bus_factor(name, 4) for name in COLLECTIVES]
    [1.5, 0.75, 0.75, 1.0, 0.75, 1.0]
    """
    if collective not in COLLECTIVES or ranks < 2:
        raise InputError(
            f"{collective} of {ranks} ranks has no bus bandwidth",
            hint=f"two ranks or more do {', '.join(COLLECTIVES)}",
        )
    passed_on = (ranks - 1) / ranks
    if collective == "all-reduce":
        return 2 * passed_on
    return 1.0 if collective in ("broadcast", "send") else passed_on


@dataclass(frozen=True, kw_only=True)
class Link:
    """Fitted cost of a collective in seconds: `latency_s` + bytes / `bytes_per_s`.

    `bytes_per_s` is None if larger tensors took no longer. `off` is the median relative error of
    the fit. `num_left_out` is the number of measurements that were left out as outliers.
    """

    latency_s: float
    bytes_per_s: float | None
    off: float
    num_left_out: int

    def seconds(self, num_bytes: float) -> float:
        """Return the predicted seconds for a tensor of `num_bytes` bytes.

        >>> Link(latency_s=1e-4, bytes_per_s=1e9, off=0.0, num_left_out=0).seconds(1e6)
        0.0011
        """
        return self.latency_s + (num_bytes / self.bytes_per_s if self.bytes_per_s else 0.0)

    def size_for(self, share: float) -> float | None:
        """Return the size of a tensor, in bytes, that reaches `share` of the bandwidth.

        For a share of 0.5, this is Hockney's n_1/2. Return None if the bandwidth is unknown.

        >>> round(Link(latency_s=1e-4, bytes_per_s=1e9, off=0.0, num_left_out=0).size_for(0.9))
        900000
        """
        return (
            None
            if self.bytes_per_s is None
            else share / (1 - share) * self.latency_s * self.bytes_per_s
        )


def fit_link(points: Sequence[Point]) -> Link:
    """Fit latency and bandwidth to measured (bytes, seconds), by least squares of relative errors.

    With relative errors, a microsecond at a small size counts as much as a millisecond at a large
    one. Outliers are left out first. They are far from a robust line through two of the points,
    which has the least sum of absolute log errors. Both parameters are at least 0.

    Raises:
        InputError: for fewer than two different sizes, or for a time that is not positive and
            finite.

    >>> points = [(size, 5e-5 + size / 2e9) for size in (1 << 10, 1 << 14, 1 << 18, 1 << 22)]
    >>> link = fit_link(points + [(1 << 20, 0.5)])
    >>> round(link.latency_s * 1e6), round(link.bytes_per_s / 1e9, 3), link.num_left_out
    (50, 2.0, 1)
    """
    if len({size for size, _ in points}) < 2 or any(
        size < 0 or not 0 < elapsed_s < math.inf for size, elapsed_s in points
    ):
        raise InputError(
            f"{len(points)} measurements make no line",
            hint="measure two sizes or more, each with a time above 0",
        )
    first = min(_lines(points), key=lambda line: sum(_factors(line, points)))
    factors = _factors(first, points)
    limit = max(MIN_FAR, FAR * MAD_TO_SD * median(factors))
    kept = [point for point, factor in zip(points, factors, strict=True) if factor <= limit]
    latency_s, s_per_byte = _least_squares(kept)
    return Link(
        latency_s=latency_s,
        bytes_per_s=1 / s_per_byte if s_per_byte > 0 else None,
        off=math.expm1(median(_factors((latency_s, s_per_byte), points))),
        num_left_out=len(points) - len(kept),
    )


def _lines(points: Sequence[Point]) -> list[tuple[float, float]]:
    """Return the candidates for the line of `fit_link`, as (seconds at 0 bytes, seconds per byte).

    They are the lines through two points, and through each point the horizontal line and the line
    through the origin. Lines with a negative parameter are left out.
    """
    found = [(elapsed_s, 0.0) for _, elapsed_s in points]
    if all(size for size, _ in points):
        found += [(0.0, elapsed_s / size) for size, elapsed_s in points]
    for (size, elapsed_s), (other, other_s) in combinations(points, 2):
        if size != other:
            slope = (other_s - elapsed_s) / (other - size)
            found.append((elapsed_s - slope * size, slope))
    return [line for line in found if line[0] > 0 <= line[1] or line[1] > 0 <= line[0]]


def _factors(line: tuple[float, float], points: Sequence[Point]) -> list[float]:
    """Return |log(predicted / measured)| for each point, its distance from the line.

    Half and twice the measured time are thus equally far from it.
    """
    latency_s, s_per_byte = line
    return [
        abs(math.log((latency_s + s_per_byte * size) / elapsed_s)) for size, elapsed_s in points
    ]


def _least_squares(points: Sequence[Point]) -> tuple[float, float]:
    """Fit t = a + b x to points (x, t), by least squares of relative errors.

    Return (a, b), both at least 0, with the least sum of ((a + b x) / t - 1)^2.
    """
    u = [1 / elapsed_s for _, elapsed_s in points]  # a u + b v should be 1
    v = [size / elapsed_s for size, elapsed_s in points]
    uu, uv, vv = (
        sum(x * y for x, y in zip(one, other, strict=True))
        for one, other in ((u, u), (u, v), (v, v))
    )
    determinant = uu * vv - uv * uv
    if determinant > 1e-12 * uu * vv:
        a, b = (sum(u) * vv - sum(v) * uv) / determinant, (sum(v) * uu - sum(u) * uv) / determinant
        if a >= 0 and b >= 0:
            return a, b
    flat, steep = (sum(u) / uu, 0.0), (0.0, sum(v) / vv if vv else 0.0)
    return min(
        (flat, steep),
        key=lambda line: sum(
            (line[0] * x + line[1] * y - 1) ** 2 for x, y in zip(u, v, strict=True)
        ),
    )


def best_bucket_bytes(total_bytes: float, link: Link) -> float | None:
    """Return the size of gradient buckets, in bytes, that adds the least time to a backward pass.

    The backward pass overlaps with the reduction of all buckets except the last one. Each of the
    total / bucket collectives costs the latency, and the last bucket is sent when nothing is left
    to compute. The added time, latency * total / bucket + bucket / bandwidth, has its minimum at
    sqrt(latency * bandwidth * total). The result is at most `total_bytes`, and None if the
    bandwidth is unknown.

    >>> link = Link(latency_s=1e-4, bytes_per_s=1e9, off=0.0, num_left_out=0)
    >>> round(best_bucket_bytes(400e6, link))
    6324555
    """
    if link.bytes_per_s is None:
        return None
    return min(float(total_bytes), math.sqrt(link.latency_s * link.bytes_per_s * total_bytes))


def reduce_s(bucket_sizes: Sequence[int], link: Link) -> float:
    """Return the predicted seconds to reduce buckets one after another, without overlap.

    `bucket_sizes` are in bytes.

    >>> reduce_s([10**6] * 3, Link(latency_s=1e-4, bytes_per_s=1e9, off=0.0, num_left_out=0))
    0.0033
    """
    return sum(link.seconds(size) for size in bucket_sizes)
