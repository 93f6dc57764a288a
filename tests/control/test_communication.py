"""Latency and bandwidth out of planted measurements, and what follows from them."""

from __future__ import annotations

import random

import pytest

from surefoot.control.plan import (
    COLLECTIVES,
    Link,
    best_bucket_bytes,
    bus_factor,
    fit_link,
    reduce_s,
)
from surefoot.core.errors import InputError
from surefoot.core.units import format_bits_per_s

SIZES = [1 << power for power in range(10, 27, 2)]  # 1 KiB to 64 MiB


def planted(
    latency_s: float, bytes_per_s: float, *, noise: float = 0.0, seed: int = 0
) -> list[tuple[int, float]]:
    draw = random.Random(seed)
    return [
        (size, (latency_s + size / bytes_per_s) * (1 + draw.uniform(-noise, noise)))
        for size in SIZES
    ]


@pytest.mark.parametrize("latency_s", [2e-6, 5e-5, 3e-3])
@pytest.mark.parametrize("bytes_per_s", [1e8, 1.2e9, 4e11])
def test_planted_latency_and_bandwidth_are_found(latency_s: float, bytes_per_s: float) -> None:
    link = fit_link(planted(latency_s, bytes_per_s))
    assert link.latency_s == pytest.approx(latency_s, rel=1e-6)
    assert link.bytes_per_s == pytest.approx(bytes_per_s, rel=1e-6)
    assert (link.off < 1e-9, link.num_left_out) == (True, 0)


@pytest.mark.parametrize("seed", range(20))
def test_both_are_found_through_noise_and_small_sizes_count(seed: int) -> None:
    """By plain least squares 5 % of the largest size's time would drown a latency of 50 us.

    They are 2.6 ms.
    """
    link = fit_link(planted(5e-5, 1.25e9, noise=0.05, seed=seed))
    assert link.latency_s == pytest.approx(5e-5, rel=0.08)
    assert link.bytes_per_s == pytest.approx(1.25e9, rel=0.08)
    assert 0.001 < link.off < 0.05


@pytest.mark.parametrize("where", [0, 3, 8])
@pytest.mark.parametrize("factor", [0.2, 4.0, 100.0])
def test_single_bad_measurements_move_nothing_and_are_counted(where: int, factor: float) -> None:
    points = planted(5e-5, 1.25e9, noise=0.01)
    points[where] = (points[where][0], factor * points[where][1])
    link = fit_link(points)
    assert link.num_left_out == 1
    assert link.latency_s == pytest.approx(5e-5, rel=0.05)
    assert link.bytes_per_s == pytest.approx(1.25e9, rel=0.05)


def test_what_cannot_be_is_not_fitted() -> None:
    flat = fit_link([(size, 1e-3) for size in SIZES])
    assert (flat.latency_s, flat.bytes_per_s, flat.size_for(0.9), best_bucket_bytes(1e9, flat)) == (
        pytest.approx(1e-3),
        None,
        None,
        None,
    )
    # larger is quicker: no rate below 0
    faster = fit_link([(size, 1.0 / size) for size in SIZES[:3]])
    assert faster.bytes_per_s is None
    # the line would begin at -1 us
    through_nothing = fit_link([(1000, 1e-6), (2000, 3e-6), (4000, 7e-6)])
    assert through_nothing.latency_s == 0.0
    for points in ([], [(1000, 1e-3)], [(1000, 1e-3), (1000, 2e-3)], [(1000, 1e-3), (2000, 0.0)]):
        with pytest.raises(InputError, match="make no line"):
            fit_link(points)


@pytest.mark.parametrize("total", [1e5, 1e7, 4e8, 4e9])
@pytest.mark.parametrize("latency_s", [1e-5, 1e-3])
def test_no_other_bucket_adds_less_to_a_backward_pass(total: float, latency_s: float) -> None:
    link = Link(latency_s=latency_s, bytes_per_s=1e9, off=0.0, num_left_out=0)

    def added_s(bucket: float) -> float:
        return latency_s * total / bucket + bucket / 1e9

    best = best_bucket_bytes(total, link)
    assert best is not None
    assert all(
        added_s(best) <= added_s(total * share / 1000) * (1 + 1e-12) for share in range(1, 1001)
    )


def test_bandwidths_are_those_of_the_definitions() -> None:
    assert {name: bus_factor(name, 2) for name in COLLECTIVES} == {
        "all-reduce": 1.0,
        "all-gather": 0.5,
        "reduce-scatter": 0.5,
        "broadcast": 1.0,
        "all-to-all": 0.5,
        "send": 1.0,
    }
    assert bus_factor("all-reduce", 8) == 2 * 7 / 8
    for name, ranks in (("all-reduce", 1), ("sum", 2)):
        with pytest.raises(InputError):
            bus_factor(name, ranks)
    link = Link(latency_s=1e-4, bytes_per_s=1e9, off=0.0, num_left_out=0)
    size = link.size_for(0.9)
    assert size is not None
    assert size / link.seconds(size) == pytest.approx(0.9e9)
    assert reduce_s([1000, 10**6], link) == pytest.approx(2e-4 + 1.001e-3)
    assert format_bits_per_s(125e6) == "1 Gbit/s"
