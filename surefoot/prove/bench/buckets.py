"""All-reduce of a model's gradients: its time alone, and the bucket sizes of the shortest step.

A bucket is sent while the backward pass continues, so the time of the all-reduce alone does not
decide. Large buckets have the shortest all-reduce, but they are the last to finish. Therefore whole
steps are compared, with the sizes interleaved. The fastest layout is then compared with the spec's
layout in separate rounds, since the fastest of many is fastest partly by chance.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from surefoot.components.parallel.replicate import Replicas
from surefoot.contract.spec import RunSpec
from surefoot.control.plan import Link, best_bucket_bytes, bus_factor, reduce_s
from surefoot.core.errors import InputError, SurefootError
from surefoot.core.statistics import Interval, median, median_interval, paired_ratio
from surefoot.core.units import parse_bytes
from surefoot.prove.bench.collectives import fit, measure, time_calls
from surefoot.prove.bench.rehearsal import Rehearsal
from surefoot.prove.bench.wanted import Buckets, Sizes
from surefoot.runtime.comm.group import Group
from surefoot.train.failure import blame
from surefoot.train.resume import together
from surefoot.train.resume.program import Program
from surefoot.train.step.ranks import Ranks

STEPS, UNTIMED = 3, 1  # timed and untimed steps per visit to a layout
# bytes of the largest all-reduce from which latency and bandwidth are fitted
MIN_LINK, MAX_LINK = 64 << 10, 64 << 20
Tell = Callable[[str], None]


@dataclass(frozen=True)
class BucketSizes:
    """Bucket layout: the size of a step's first bucket and that of all others, in bytes."""

    bucket_bytes: int
    first_bytes: int


@dataclass(frozen=True, kw_only=True)
class BucketTiming:
    """Measured step time with one bucket layout.

    Args:
        laid: The layout.
        bucket_sizes: Bytes of each bucket.
        elapsed: Median over rounds of the seconds of a step, with its 95 % interval.
    """

    laid: BucketSizes
    bucket_sizes: tuple[int, ...]
    elapsed: Interval


@dataclass(frozen=True, kw_only=True)
class LayoutDuel:
    """Comparison of two bucket layouts: the step time with `laid` over that with `against`.

    `ratio` is the median over rounds with its 95 % interval.
    """

    laid: BucketSizes
    against: BucketSizes
    ratio: Interval


@dataclass(frozen=True, kw_only=True)
class BucketTuning:
    """Results of the measurement of bucket layouts.

    `own` is the layout of the spec. `best` compares the fastest measured layout with it. `first`
    compares the fastest layout with one whose first bucket is as large as the others. Each
    comparison is None if its two layouts are the same. `alone` is the time of the all-reduce
    without a backward pass.
    """

    ranks: int
    device: str
    transport: str
    gradient_bytes: int
    own: BucketSizes
    own_sizes: tuple[int, ...]
    alone: Interval
    link: Link
    tried: tuple[BucketTiming, ...]
    best: LayoutDuel | None
    first: LayoutDuel | None

    @property
    def bytes_per_s(self) -> float:
        """Algorithm bandwidth: bytes of gradients over the time of their all-reduce alone."""
        return self.gradient_bytes / self.alone.estimate

    @property
    def bus_bytes_per_s(self) -> float:
        """Bus bandwidth: bytes per second that a link carried during the all-reduce alone."""
        return bus_factor("all-reduce", self.ranks) * self.bytes_per_s

    @property
    def predicted_s(self) -> float:
        """Predicted seconds of the all-reduce of the gradients in the spec's buckets.

        The prediction is computed from latency and bandwidth.
        """
        return reduce_s(self.own_sizes, self.link)

    @property
    def advised_bytes(self) -> float | None:
        """Bucket size computed from latency and bandwidth; None if the bandwidth is unknown."""
        return best_bucket_bytes(self.gradient_bytes, self.link)

    @property
    def chosen(self) -> BucketSizes:
        """Layout to configure: the fastest one if a second measurement confirms that it is faster.

        Otherwise it is the layout of the spec.
        """
        return (
            self.best.laid
            if self.best is not None and self.best.ratio.verdict == "lower"
            else self.own
        )


def tune(spec: RunSpec, wanted: Buckets, *, tell: Tell = lambda text: None) -> BucketTuning:
    """Measure bucket layouts on all ranks; every rank must call this.

    Raises:
        InputError: For a spec that cannot run on several ranks.
        UserCodeError: For an error in the code of the task.
    """
    own = BucketSizes(
        parse_bytes(spec.layout.bucket_size), parse_bytes(spec.layout.first_bucket_size)
    )
    # for each size, the spec's layout, and two comparisons of two layouts
    most = (len(wanted.sizes) + 5) * wanted.rounds * (UNTIMED + STEPS)
    with contextlib.ExitStack() as stack:
        group = stack.enter_context(together.join_ranks(spec))
        try:
            rehearsal = group.settle(
                lambda: stack.enter_context(Rehearsal(spec, steps=most, group=group))
            )
            task = rehearsal.assembly.task
            together.check_alike(group, rehearsal.assembly, Program.of(task.importable, task.task))
            return _tune(_Bench(rehearsal, group, tell), own, wanted)
        except SurefootError:
            raise
        except (Exception, SystemExit) as error:
            if blame.find_place(error) is None:
                raise
            raise blame.as_run_error(error, f"{group.place}in bench comm:") from error


def _tune(bench: _Bench, own: BucketSizes, wanted: Buckets) -> BucketTuning:
    own_sizes = bench.use(own)
    gradient_bytes = sum(own_sizes)
    bench.tell(f"the gradients alone, {wanted.calls} times")
    alone = bench.time_alone(wanted.calls, wanted.warmup)
    bench.tell("an all-reduce over sizes")
    largest = min(MAX_LINK, max(gradient_bytes, MIN_LINK))
    link = fit(measure(bench.group, Sizes(collectives=("all-reduce",), largest=largest)))[
        "all-reduce"
    ]
    ways = bench.distinct_layouts(
        [own, *(BucketSizes(size, min(own.first_bytes, size)) for size in sorted(wanted.sizes))]
    )
    tried, best, first = _sweep(bench, ways, wanted.rounds), None, None
    quickest = min(tried, key=lambda each: each.elapsed.estimate).laid
    if quickest != own:
        bench.tell("the quickest against the spec's own")
        best = _compare_layouts(bench, quickest, own, wanted.rounds)
    alike = BucketSizes(quickest.bucket_bytes, quickest.bucket_bytes)
    if len(bench.distinct_layouts([quickest, alike])) > 1:
        bench.tell("a first bucket of its own against one like the others")
        first = _compare_layouts(bench, quickest, alike, wanted.rounds)
    return BucketTuning(
        ranks=bench.group.size,
        device=str(bench.rehearsal.device),
        transport=bench.group.transport,
        gradient_bytes=gradient_bytes,
        own=own,
        own_sizes=own_sizes,
        alone=alone,
        link=link,
        tried=tried,
        best=best,
        first=first,
    )


def _sweep(bench: _Bench, ways: Sequence[BucketSizes], rounds: int) -> tuple[BucketTiming, ...]:
    found = bench.time_steps(ways, rounds)
    return tuple(
        BucketTiming(laid=way, bucket_sizes=bench.use(way), elapsed=median_interval(found[way]))
        for way in ways
    )


def _compare_layouts(
    bench: _Bench, laid: BucketSizes, against: BucketSizes, rounds: int
) -> LayoutDuel:
    found = bench.time_steps([laid, against], rounds)
    return LayoutDuel(laid=laid, against=against, ratio=paired_ratio(found[laid], found[against]))


class _Bench:
    """Training steps of a spec on this rank; the bucket layout can change between two steps."""

    def __init__(self, rehearsal: Rehearsal, group: Group, tell: Tell) -> None:
        ranks = rehearsal.assembly.engine.steps.collectives.ranks
        if ranks is None:
            raise InputError("one rank has no gradients to reduce", hint="use --ranks 2 or more")
        self.rehearsal, self.group, self.tell = rehearsal, group, tell
        self._ranks: Ranks = ranks

    def use(self, laid: BucketSizes) -> tuple[int, ...]:
        """Change the bucket layout; return the gradient bytes of each bucket, in step order."""
        self._ranks.use_buckets(laid.bucket_bytes, laid.first_bytes)
        return tuple(size for replicas in self._ranks.replicas for size in replicas.bucket_sizes)

    def distinct_layouts(self, ways: Sequence[BucketSizes]) -> list[BucketSizes]:
        """Return the layouts without those that result in the same buckets as an earlier one.

        In a small model, many sizes result in the same buckets.
        """
        found: dict[tuple[int, ...], BucketSizes] = {}
        for way in ways:
            found.setdefault(self.use(way), way)
        return list(found.values())

    def time_alone(self, calls: int, warmup: int) -> Interval:
        """Time the all-reduce of all gradients without a backward pass that overlaps it.

        The gradients are zeros, since other values would become Inf when they are summed in place
        repeatedly.
        """
        parameters = [
            each for update in self.rehearsal.assembly.updates for each in update.guarded.parameters
        ]
        for each in parameters:
            each.grad = torch.zeros_like(each)

        def sums() -> None:
            for replicas in self._ranks.replicas:
                send(replicas)

        found = time_calls(self.group, sums, calls, warmup)
        for each in parameters:
            each.grad = None
        return median_interval(found)

    def time_steps(
        self, ways: Sequence[BucketSizes], rounds: int
    ) -> dict[BucketSizes, list[float]]:
        """Return the seconds of a step with each layout, one value per round.

        A value is the median of a few steps on the slowest rank. Every round measures every layout
        and starts with a different one.
        """
        found: dict[BucketSizes, list[float]] = {way: [] for way in ways}
        for number in range(rounds):
            self.tell(f"round {number + 1} of {rounds}, {len(ways)} ways to lay out buckets")
            turn = number % len(ways)
            for way in (*ways[turn:], *ways[:turn]):
                self.use(way)
                elapsed_s = [self._time_step() for _ in range(UNTIMED + STEPS)]
                found[way] += self.group.most([median(elapsed_s[UNTIMED:])])
        return found

    def _time_step(self) -> float:
        started_s = time.perf_counter()
        self.rehearsal.take("step")
        return time.perf_counter() - started_s


def send(replicas: Replicas) -> None:
    """Reduce the present gradients over all ranks, and wait for the end of the reduction."""
    replicas.arm()
    replicas.finish()
