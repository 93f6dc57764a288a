"""Cost model of communication: seconds = latency + bytes / bandwidth, fitted to measurements.

The best bucket size follows from it. R. Hockney, "The communication challenge for MPP", 1994, for
the two parameters and the size that reaches half of the bandwidth; the factors of bus bandwidth are
those of NVIDIA's nccl-tests, doc/PERFORMANCE.md.
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
    """Return the bus bandwidth factor of a collective: bus bandwidth = factor * size / time.

    The bus bandwidth does not depend on the number of ranks. The size is that of the whole tensor:
    what is reduced, what is gathered from all ranks, what is scattered to all. Raises InputError
    for an unknown collective and for fewer than two ranks.

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
    """A link with the cost `latency_s` + bytes / `bytes_per_s`.

    `bytes_per_s` is None if larger sizes took no longer. `off` is the median relative error of
    the fit, `num_left_out` the number of sizes that were not used.
    """

    latency_s: float
    bytes_per_s: float | None
    off: float
    num_left_out: int

    def seconds(self, num_bytes: float) -> float:
        """Return the seconds for `num_bytes`.

        >>> Link(latency_s=1e-4, bytes_per_s=1e9, off=0.0, num_left_out=0).seconds(1e6)
        0.0011
        """
        return self.latency_s + (num_bytes / self.bytes_per_s if self.bytes_per_s else 0.0)

    def size_for(self, share: float) -> float | None:
        """Return the bytes that reach `share` of the bandwidth; for 0.5, Hockney's n_1/2.

        None without a bandwidth.

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

    Relative errors give a microsecond at a small size the weight of a millisecond at a large one.
    Outliers are left out first: sizes far from the line through two points that has the least sum
    of log errors, which a few bad points do not move. Neither parameter is below 0. Raises
    InputError for fewer than two sizes.

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
    """Return the lines through two of the points, and through one: flat, or through the origin.

    Lines with a negative parameter are left out.
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
    """Return the distance of each point from the line, as |log(predicted / measured)|.

    Half as long is as far as twice as long.
    """
    latency_s, s_per_byte = line
    return [
        abs(math.log((latency_s + s_per_byte * size) / elapsed_s)) for size, elapsed_s in points
    ]


def _least_squares(points: Sequence[Point]) -> tuple[float, float]:
    """Return (a, b), neither below 0, with the least sum of ((a + b x) / t - 1)^2."""
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
    """Return the bucket size that adds the least time to a backward pass; None without a bandwidth.

    The backward pass hides all but the last bucket. Each of the total / bucket collectives costs
    the latency, and the last bucket is sent when nothing is left to compute: latency * total /
    bucket + bucket / bandwidth has its minimum at sqrt(latency * bandwidth * total). Never more
    than `total_bytes`.

    >>> link = Link(latency_s=1e-4, bytes_per_s=1e9, off=0.0, num_left_out=0)
    >>> round(best_bucket_bytes(400e6, link))
    6324555
    """
    if link.bytes_per_s is None:
        return None
    return min(float(total_bytes), math.sqrt(link.latency_s * link.bytes_per_s * total_bytes))


def reduce_s(bucket_sizes: Sequence[int], link: Link) -> float:
    """Return the seconds to reduce buckets of these sizes one after another, without overlap.

    >>> reduce_s([10**6] * 3, Link(latency_s=1e-4, bytes_per_s=1e9, off=0.0, num_left_out=0))
    0.0033
    """
    return sum(link.seconds(size) for size in bucket_sizes)
