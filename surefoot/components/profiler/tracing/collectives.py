"""Collectives in a trace: when each started and ended, and how much of it was exposed.

A collective lasts from its start on this rank until it is complete; through shared memory, it lasts
until the host has waited for it. The time of waiting for a slower rank is therefore included. The
collective *overlaps* with computation while a device also runs a different kernel (NCCL), or while
the host is not inside a call of surefoot's communication (gloo, shared memory). The rest of its
time is *exposed*.

This module does not import torch.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from surefoot.components.profiler.tracing.trace import (
    AUTOGRAD_NODE,
    DEVICE_WORK,
    OPERATOR,
    RANGE,
    Slice,
    Trace,
)
from surefoot.core import flight

ON_HOST, ON_DEVICE, CALL = "gloo:", "nccl", "c10d::"
WAITED = flight.Kind.WAIT.words
Spans = list[tuple[int, int]]  # sorted and disjoint, in nanoseconds


@dataclass(frozen=True, kw_only=True)
class CollectiveStats:
    """Mean times of one collective of a step, over its `num_calls` calls in a window.

    `place` is the position of the collective among those with the same name in a step, starting at
    1. `begins_s`, `ends_s` and `backward_ends_s` are seconds since the start of the step.
    `backward_ends_s` is the end of the last backward pass in the step, or None if a step has no
    backward pass. `num_early` is the number of calls that started before the end of the last
    backward pass.
    """

    name: str
    place: int
    num_calls: int
    num_early: int
    begins_s: float
    ends_s: float
    backward_ends_s: float | None
    overlapped_s: float
    exposed_s: float

    @property
    def lasts_s(self) -> float:
        return self.overlapped_s + self.exposed_s

    @property
    def share(self) -> float | None:
        """Fraction of the duration that overlaps with computation; None if the duration is 0."""
        return self.overlapped_s / self.lasts_s if self.lasts_s > 0 else None

    def as_row(self) -> dict[str, Any]:
        return {**vars(self), "overlapped_share": self.share}


class _Call(NamedTuple):
    name: str
    place: int  # index among the calls of this name in the step
    begins_ns: int
    ends_ns: int
    backward_ends_ns: int | None
    lasts_ns: int
    exposed_ns: int


def find_collectives(trace: Trace) -> list[CollectiveStats] | None:
    """Return the mean times of each collective of a step, in order of their start times.

    Return None if the trace has no collectives. Return None also if it does not show how long the
    host waited for them: for gloo, only the trace of a surefoot run shows that.
    """
    work = [
        each
        for each in trace.slices
        if each.category in DEVICE_WORK and each.name.startswith(ON_DEVICE)
    ]
    is_idle: Spans
    if work:
        kernels = _merge_spans(
            each
            for each in trace.slices
            if each.category in DEVICE_WORK and not each.name.startswith(ON_DEVICE)
        )
        is_idle = _gaps(kernels)
    else:
        work = [
            each
            for each in trace.slices
            if each.category == RANGE and each.name.startswith(ON_HOST)
        ]
        is_idle = _merge_spans(each for each in trace.slices if _is_ours(each))
        if not is_idle:
            return None
    paired = [*_match_calls(trace, work), *_shared_memory_collectives(trace)]
    calls: dict[tuple[str, int], list[_Call]] = {}
    for call in _find_calls(trace, sorted(paired, key=lambda each: each[0].start_ns), is_idle):
        calls.setdefault((call.name, call.place), []).append(call)
    return (
        sorted((_sum_calls(each) for each in calls.values()), key=lambda each: each.begins_s)
        or None
    )


def _is_ours(each: Slice) -> bool:
    return each.category == RANGE and each.name.startswith(flight.RANGE)


def _match_calls(trace: Trace, work: Sequence[Slice]) -> list[tuple[Slice, str]]:
    """Return each collective in `work` that has a c10d call, with its name.

    Calls and collectives are matched in the order in which the calls were issued. The name is that
    of the surefoot range around the call, or else the name of the slice in `work`.
    """
    asked = [
        each for each in trace.slices if each.category == OPERATOR and each.name.startswith(CALL)
    ]
    ranges: dict[Any, list[Slice]] = {}
    for each in filter(_is_ours, trace.slices):
        ranges.setdefault(each.thread, []).append(each)
    found, left = [], sorted(work, key=lambda each: each.start_ns)
    for op in asked:
        at = next((index for index, each in enumerate(left) if each.start_ns >= op.start_ns), None)
        if at is None:
            break
        del left[:at]
        done = left.pop(0)
        around = ranges.get(op.thread, [])
        before = bisect_right(around, op.start_ns, key=lambda each: each.start_ns) - 1
        is_inside = before >= 0 and around[before].end_ns >= op.end_ns
        found.append(
            (done, around[before].name.removeprefix(flight.RANGE) if is_inside else done.name)
        )
    return found


def _shared_memory_collectives(trace: Trace) -> list[tuple[Slice, str]]:
    """Return the collectives through shared memory: surefoot's ranges without a c10d call inside.

    Each of them ends with the range that waits for the same number of bytes in the same step.
    """
    calls: dict[Any, list[int]] = {}
    for each in trace.slices:
        if each.category == OPERATOR and each.name.startswith(CALL):
            calls.setdefault(each.thread, []).append(each.start_ns)
    steps = [each.start_ns for each in trace.steps]
    found: list[tuple[Slice, str]] = []
    open_: dict[tuple[Any, int, str], list[int]] = {}  # indices in `found` of started collectives
    for each in filter(_is_ours, trace.slices):
        name = each.name.removeprefix(flight.RANGE)
        key = each.thread, bisect_right(steps, each.start_ns), name.rpartition(" of ")[2]
        if name.startswith(WAITED):
            if begun := open_.get(key):
                place = begun.pop(0)
                found[place] = found[place][0]._replace(end_ns=each.end_ns), found[place][1]
            continue
        inside = calls.get(each.thread, [])
        after = bisect_left(inside, each.start_ns)
        if after == len(inside) or inside[after] >= each.end_ns:
            open_.setdefault(key, []).append(len(found))
            found.append((each, name))
    return found


def _find_calls(
    trace: Trace, paired: Sequence[tuple[Slice, str]], is_idle: Spans
) -> Iterable[_Call]:
    """Yield the collectives that start in a step of the window."""
    starts = [each.start_ns for each in trace.steps]
    passes = [
        each
        for each in trace.slices
        if each.category == OPERATOR and each.name.startswith(AUTOGRAD_NODE)
    ]
    seen: Counter[tuple[int, str]] = Counter()
    for work, name in paired:
        number = bisect_right(starts, work.start_ns) - 1
        if number < 0 or work.start_ns > trace.steps[number].end_ns:
            continue
        step = trace.steps[number]
        ends = [each.end_ns for each in passes if step.start_ns <= each.start_ns < step.end_ns]
        seen[number, name] += 1
        exposed_ns = sum(
            min(end, work.end_ns) - max(begin, work.start_ns)
            for begin, end in is_idle
            if _overlaps(begin, end, work)
        )
        begun, over = work.start_ns - step.start_ns, work.end_ns - step.start_ns
        last = max(ends) - step.start_ns if ends else None
        yield _Call(
            name, seen[number, name], begun, over, last, work.end_ns - work.start_ns, exposed_ns
        )


def _overlaps(begin: int, end: int, work: Slice) -> bool:
    return begin < work.end_ns and end > work.start_ns


def _sum_calls(calls: Sequence[_Call]) -> CollectiveStats:
    def mean_s(values: Iterable[int]) -> float:
        return sum(values) / len(calls) / 1e9

    known = [each.backward_ends_ns for each in calls if each.backward_ends_ns is not None]
    return CollectiveStats(
        name=calls[0].name,
        place=calls[0].place,
        num_calls=len(calls),
        num_early=sum(
            each.backward_ends_ns is not None and each.begins_ns < each.backward_ends_ns
            for each in calls
        ),
        begins_s=mean_s(each.begins_ns for each in calls),
        ends_s=mean_s(each.ends_ns for each in calls),
        backward_ends_s=mean_s(known) if len(known) == len(calls) else None,
        overlapped_s=mean_s(each.lasts_ns - each.exposed_ns for each in calls),
        exposed_s=mean_s(each.exposed_ns for each in calls),
    )


def _merge_spans(slices: Iterable[Slice]) -> Spans:
    found: Spans = []
    for each in slices:  # in the order of their starts
        if found and each.start_ns <= found[-1][1]:
            found[-1] = found[-1][0], max(found[-1][1], each.end_ns)
        else:
            found.append((each.start_ns, each.end_ns))
    return found


def _gaps(spans: Spans) -> Spans:
    """Return the gaps between `spans`, including those before the first and after the last span."""
    edges = [-(1 << 62), *(edge for span in spans for edge in span), 1 << 62]
    return list(zip(edges[::2], edges[1::2], strict=True))
