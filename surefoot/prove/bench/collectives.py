"""Measurement of collectives on the available ranks: correctness, time by size, and a fit."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch

from surefoot.control.plan import Link, bus_factor, fit_link
from surefoot.core import place
from surefoot.core.errors import InputError, NumbersError, SpecError
from surefoot.core.ranks.layout import Transport
from surefoot.core.statistics import Interval, median_interval
from surefoot.prove.bench.wanted import Sizes
from surefoot.runtime.comm.collectives import Collective
from surefoot.runtime.comm.group import Group
from surefoot.runtime.comm.join import join
from surefoot.train.environment import find_device

WAIT_S, TIMEOUT_S = 120.0, 600.0  # wait for ranks that are still importing; timeout of a collective
Tell = Callable[[str], None]


@dataclass(frozen=True, kw_only=True)
class TimedCollective:
    """Median time of the calls of a collective over `num_bytes` bytes, with its 95 % interval.

    The time of a call is that of the slowest rank, in seconds.
    """

    collective: str
    ranks: int
    num_bytes: int
    elapsed: Interval

    @property
    def bytes_per_s(self) -> float:
        """Algorithm bandwidth: bytes over time.

        It is not the speed of a link, and it falls as the number of ranks grows.
        """
        return self.num_bytes / self.elapsed.estimate

    @property
    def bus_bytes_per_s(self) -> float:
        """Bus bandwidth: bytes per second that a link carried for the collective."""
        return bus_factor(self.collective, self.ranks) * self.bytes_per_s


@contextlib.contextmanager
def on_ranks(device: str, transport: Transport = "auto") -> Iterator[Group]:
    """Return a context that joins this process with all ranks, on the device that `--device` names.

    Raises:
        InputError: If a rank has no device of its own, or GPUs are used and `transport` is set.
    """
    try:
        chosen = find_device(device)
    except SpecError as error:
        raise InputError(
            error.message, hint="start as many ranks as there are GPUs, or give --device cpu"
        ) from None
    if chosen.type == "cuda" and transport != "auto":
        raise InputError(
            f"--transport is {transport}, but GPUs use NCCL",
            hint="leave it out, or give --device cpu",
        )
    with join(
        place.here(), chosen, wait_s=WAIT_S, timeout_s=TIMEOUT_S, transport=transport
    ) as group:
        yield group


def measure(
    group: Group, wanted: Sizes, *, tell: Tell = lambda text: None
) -> tuple[TimedCollective, ...]:
    """Time every collective in `wanted` over every size; all ranks return the same rows.

    Raises:
        NumbersError: If a collective returns wrong values.
    """
    rows: list[TimedCollective] = []
    for name in wanted.collectives:
        check(group, name)
        tell(f"{name}, {len(wanted.all)} sizes")
        rows += [
            time_collective(group, Collective(name, group, size), wanted.calls, wanted.warmup)
            for size in wanted.all
        ]
    return tuple(rows)


def check(group: Group, name: str) -> None:
    """Check a collective on a small buffer against its definition.

    Raises:
        NumbersError: On every rank, if the result is wrong on any rank.
    """
    is_right = Collective(name, group, 1 << 10).is_right()
    wrong = (
        group.gather(torch.tensor(float(not is_right), device=group.device))
        .nonzero()
        .flatten()
        .tolist()
    )
    if wrong:
        raise NumbersError(
            (
                f"{name} returns wrong values on rank{'s' * (len(wrong) > 1)} "
                f"{', '.join(map(str, wrong))} of {group.size}"
            ),
            hint=(
                "training on these ranks would be wrong: try another version of torch or "
                "of the driver"
            ),
        )


def time_collective(
    group: Group, collective: Collective, calls: int, warmup: int
) -> TimedCollective:
    """Time `calls` samples of a collective, after `warmup` samples that are not counted.

    A sample consists of `collective.period` consecutive calls, so that no rank runs ahead of the
    others.
    """
    elapsed_s = time_calls(
        group, lambda: list(map(collective.call, range(collective.period))), calls, warmup
    )
    return TimedCollective(
        collective=collective.name,
        ranks=group.size,
        num_bytes=collective.num_bytes,
        elapsed=median_interval([each / collective.period for each in elapsed_s]),
    )


def time_calls(group: Group, job: Callable[[], object], calls: int, warmup: int) -> list[float]:
    """Return the seconds of each call of `job` on the slowest rank, with the GPU synchronized.

    The first `warmup` calls are not included.
    """
    found: list[float] = []
    for number in range(-warmup, calls):
        if number <= 0:
            group.most([0.0])  # all ranks start the warm-up, and the counted calls, at once
            _synchronize(group)
        started_s = time.perf_counter()
        job()
        _synchronize(group)
        found.append(time.perf_counter() - started_s)
    return group.most(found[warmup:])


def _synchronize(group: Group) -> None:
    if group.device.type == "cuda":
        torch.cuda.synchronize(group.device)


def fit(rows: Sequence[TimedCollective]) -> dict[str, Link]:
    """Return latency and bandwidth of each collective that was timed with two sizes or more."""
    points: dict[str, list[tuple[int, float]]] = {}
    for row in rows:
        points.setdefault(row.collective, []).append((row.num_bytes, row.elapsed.estimate))
    return {
        name: fit_link(found)
        for name, found in points.items()
        if len({size for size, _ in found}) > 1
    }
