"""The gradients of a model summed over ranks: how long that takes alone, and in which buckets a whole step is the shortest.

A bucket is sent while the backward pass goes on, so that the sums alone say little: large buckets are always the quickest, and the last
thing to be on its way. What is compared are whole steps, each size in turns with the others; what wins is then held against the spec's
own in rounds of its own, since what wins among many is in part lucky.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from surefoot.components.parallel import Replicas
from surefoot.contract.spec import RunSpec
from surefoot.control.plan import Link, best_bucket_bytes, bus_factor, reduce_s
from surefoot.core.errors import InputError, SurefootError
from surefoot.core.statistics import Interval, median, median_interval, paired_ratio
from surefoot.core.units import parse_bytes
from surefoot.prove.bench.collectives import fit, measure, time_calls
from surefoot.prove.bench.rehearsal import Rehearsal
from surefoot.prove.bench.wanted import Buckets, Sizes
from surefoot.runtime.comm import Group
from surefoot.train.failure import blame
from surefoot.train.resume import together
from surefoot.train.resume.program import Program
from surefoot.train.step.ranks import Ranks

STEPS, UNTIMED = 3, 1  # of each visit to a way to lay out buckets
SHORTEST_LINK, LONGEST_LINK = 64 << 10, 64 << 20  # bytes of the largest all-reduce that latency and bandwidth are found from
Tell = Callable[[str], None]


@dataclass(frozen=True)
class Laid:
    """A way to lay out buckets: the bytes of all but a step's first, and of that one."""

    bucket_bytes: int
    first_bytes: int


@dataclass(frozen=True, kw_only=True)
class Tried:
    """Steps with buckets laid out like this: how many there are, and the median over rounds with its 95 % interval in seconds."""

    laid: Laid
    bucket_sizes: tuple[int, ...]
    elapsed: Interval


@dataclass(frozen=True, kw_only=True)
class Duel:
    """One way against another, round by round: what a step takes with the first over what it takes with the second."""

    laid: Laid
    against: Laid
    ratio: Interval


@dataclass(frozen=True, kw_only=True)
class Tuned:
    """What was found. `best` is the quickest of the sweep against the spec's own, `first` the quickest against itself with a first bucket
    like the others; None where that is the same layout."""

    ranks: int
    device: str
    transport: str
    gradient_bytes: int
    own: Laid
    own_sizes: tuple[int, ...]
    alone: Interval
    link: Link
    tried: tuple[Tried, ...]
    best: Duel | None
    first: Duel | None

    @property
    def bytes_per_s(self) -> float:
        """Bytes of gradients over the time of their sums alone."""
        return self.gradient_bytes / self.alone.estimate

    @property
    def bus_bytes_per_s(self) -> float:
        """What a link carried for it."""
        return bus_factor("all-reduce", self.ranks) * self.bytes_per_s

    @property
    def predicted_s(self) -> float:
        """The same from latency and bandwidth."""
        return reduce_s(self.own_sizes, self.link)

    @property
    def advised_bytes(self) -> float | None:
        """The bucket that latency and bandwidth speak for."""
        return best_bucket_bytes(self.gradient_bytes, self.link)

    @property
    def chosen(self) -> Laid:
        """What to set: the quickest of the sweep where its rounds against the spec's own confirm it, else the spec's own."""
        return self.best.laid if self.best is not None and self.best.ratio.verdict == "lower" else self.own


def tune(spec: RunSpec, wanted: Buckets, *, tell: Tell = lambda text: None) -> Tuned:
    """Measure on the ranks that this process is one of.

    Raises InputError of some kind for a spec that several ranks cannot share, UserCodeError for what the task raises.
    """
    own = Laid(parse_bytes(spec.layout.bucket), parse_bytes(spec.layout.first_bucket))
    most = (len(wanted.sizes) + 5) * wanted.rounds * (UNTIMED + STEPS)  # each size and the spec's own, and two duels
    with contextlib.ExitStack() as stack:
        group = stack.enter_context(together.joined(spec))
        try:
            rehearsal = group.settle(lambda: stack.enter_context(Rehearsal(spec, steps=most, group=group)))
            task = rehearsal.assembly.task
            together.check_alike(group, rehearsal.assembly, Program.of(task.importable, task.task))
            return _tune(_Bench(rehearsal, group, tell), own, wanted)
        except SurefootError:
            raise
        except (Exception, SystemExit) as error:
            if blame.find_place(error) is None:
                raise
            raise blame.as_run_error(error, f"{group.place}in bench comm:") from error


def _tune(bench: _Bench, own: Laid, wanted: Buckets) -> Tuned:
    own_sizes = bench.use(own)
    gradient_bytes = sum(own_sizes)
    bench.tell(f"the gradients alone, {wanted.calls} times")
    alone = bench.time_alone(wanted.calls, wanted.warmup)
    bench.tell("an all-reduce over sizes")
    largest = min(LONGEST_LINK, max(gradient_bytes, SHORTEST_LINK))
    link = fit(measure(bench.group, Sizes(collectives=("all-reduce",), largest=largest)))["all-reduce"]
    ways = bench.without_twins([own, *(Laid(size, min(own.first_bytes, size)) for size in sorted(wanted.sizes))])
    tried, best, first = _sweep(bench, ways, wanted.rounds), None, None
    quickest = min(tried, key=lambda each: each.elapsed.estimate).laid
    if quickest != own:
        bench.tell("the quickest against the spec's own")
        best = _duel(bench, quickest, own, wanted.rounds)
    alike = Laid(quickest.bucket_bytes, quickest.bucket_bytes)
    if len(bench.without_twins([quickest, alike])) > 1:
        bench.tell("a first bucket of its own against one like the others")
        first = _duel(bench, quickest, alike, wanted.rounds)
    return Tuned(
        ranks=bench.group.size, device=str(bench.rehearsal.device), transport=bench.group.transport,
        gradient_bytes=gradient_bytes, own=own, own_sizes=own_sizes,
        alone=alone, link=link, tried=tried, best=best, first=first,
    )  # fmt: skip


def _sweep(bench: _Bench, ways: Sequence[Laid], rounds: int) -> tuple[Tried, ...]:
    found = bench.time_steps(ways, rounds)
    return tuple(Tried(laid=way, bucket_sizes=bench.use(way), elapsed=median_interval(found[way])) for way in ways)


def _duel(bench: _Bench, laid: Laid, against: Laid, rounds: int) -> Duel:
    found = bench.time_steps([laid, against], rounds)
    return Duel(laid=laid, against=against, ratio=paired_ratio(found[laid], found[against]))


class _Bench:
    """The steps of a spec on this rank, whose buckets can be laid out anew between two of them."""

    def __init__(self, rehearsal: Rehearsal, group: Group, tell: Tell) -> None:
        ranks = rehearsal.assembly.engine.stepper.ranks
        if ranks is None:
            raise InputError("one rank sums its gradients with nobody", hint="use --ranks 2 or more")
        self.rehearsal, self.group, self.tell = rehearsal, group, tell
        self._ranks: Ranks = ranks

    def use(self, laid: Laid) -> tuple[int, ...]:
        """Lay the buckets out; gives the bytes of the gradients in each, in the order of a step."""
        self._ranks.use_buckets(laid.bucket_bytes, laid.first_bytes)
        return tuple(size for replicas in self._ranks.replicas for size in replicas.bucket_sizes)

    def without_twins(self, ways: Sequence[Laid]) -> list[Laid]:
        """One of those that come to the same buckets: a model has only so many parameters."""
        found: dict[tuple[int, ...], Laid] = {}
        for way in ways:
            found.setdefault(self.use(way), way)
        return list(found.values())

    def time_alone(self, calls: int, warmup: int) -> Interval:
        """All gradients summed with nothing to hide behind. They are zeros: what is summed in its place again and again becomes inf."""
        parameters = [each for update in self.rehearsal.assembly.updates for each in update.guarded.parameters]
        for each in parameters:
            each.grad = torch.zeros_like(each)

        def sums() -> None:
            for replicas in self._ranks.replicas:
                send(replicas)

        found = time_calls(self.group, sums, calls, warmup)
        for each in parameters:
            each.grad = None
        return median_interval(found)

    def time_steps(self, ways: Sequence[Laid], rounds: int) -> dict[Laid, list[float]]:
        """Seconds of a step, the median of a few, in each round: every way in each, by turns from another one on."""
        found: dict[Laid, list[float]] = {way: [] for way in ways}
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
    """One sum of all gradients that are there."""
    replicas.arm()
    replicas.finish()
