"""Phases on an asynchronous device, timed by events in its stream.

The events are read at the end of a reporting window. Between two events, the device either ran the
kernels that were launched between them or waited for the host. The phases copy, forward, backward
and optimizer launch kernels; each of them lasts from its event to the next event. Phases of the
host between them, such as reading data and logging, count only for the time in which the device was
idle. That is the last part of the host phase, because the device was still busy during the first
part. The phases therefore add up to the wall time.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from functools import partial
from typing import Any, final

import torch

from surefoot.components.profiler.phases.tally import Tally

MAX_MARKS = 8192  # above this the events are read before the window ends
HOST, MARK, STEP = range(3)
make_cuda_event: Callable[[], Any] = partial(torch.cuda.Event, enable_timing=True)
Segment = tuple[int, int]  # a phase of the host, nanoseconds


@final
class DeviceLine:
    """Recorder of an event in a device's stream whenever one of the phases `timed` starts or ends.

    `make_event` returns an event with the methods `record`, `synchronize` and `elapsed_time` (in
    ms) of `torch.cuda.Event`.
    """

    def __init__(self, make_event: Callable[[], Any], timed: Collection[int]) -> None:
        self._make_event, self._timed = make_event, timed
        self._events: list[Any] = []  # reused in every window
        # (HOST, phase, ns) | (MARK, event, phase that begins) | (STEP, number, ns of collections)
        self._line: list[tuple[Any, ...]] = []
        # the phase of `timed` that was running when the window started
        self._inside: int | None = None

    def start(self, now_ns: int) -> None:
        """Discard all records, and start at the host time `now_ns`.

        The device must be idle at this time.
        """
        self._line.clear()
        self._used, self._began_ns = 0, now_ns
        self._record()

    def _record(self) -> Any:
        if self._used == len(self._events):
            self._events.append(self._make_event())
        event = self._events[self._used]
        self._used += 1
        event.record()
        return event

    def switch(self, old: int, new: int, spent_ns: int) -> None:
        """Record that the host switched to phase `new` after `spent_ns` in phase `old`."""
        if old not in self._timed:
            self._line.append((HOST, old, spent_ns))
        if old != new and (old in self._timed or new in self._timed):
            self._line.append((MARK, self._record(), new))

    def end_step(self, number: int, collecting_ns: int) -> bool:
        """Record the end of a step; return whether the events must be read now.

        They must be read if more than `MAX_MARKS` events are recorded. `collecting_ns` is the total
        time of garbage collection so far.
        """
        self._line.append((STEP, number, collecting_ns))
        return self._used > MAX_MARKS

    def wait(self) -> None:
        """Wait until the device is idle."""
        self._record().synchronize()

    def read(self, tally: Tally, now_ns: int) -> None:
        """Add the times between the recorded events to `tally`, and discard the records.

        `now_ns` is the host time after `wait` returned.
        """
        last, inside, done_ns = self._events[0], self._inside, self._began_ns
        waited: list[Segment] = []
        for kind, *row in self._line:
            if kind == HOST:
                waited.append((row[0], row[1]))
            elif kind == MARK:
                passed_ns = round(last.elapsed_time(row[0]) * 1e6)
                _add(
                    tally,
                    [(inside, passed_ns)]
                    if inside is not None
                    else _find_exposed_segments(waited, passed_ns),
                )
                waited, last, done_ns = [], row[0], done_ns + passed_ns
                inside = row[1] if row[1] in self._timed else None
            else:
                tally.end_step(row[0], done_ns, row[1])
        left_ns = now_ns - done_ns
        _add(
            tally,
            [(inside, left_ns)] if inside is not None else _take_last_segments(waited, left_ns),
        )
        self._inside = inside
        self.start(now_ns)


def _add(tally: Tally, segments: Sequence[Segment]) -> None:
    for phase, ns in segments:
        tally.spent_ns[phase] += ns


def _find_exposed_segments(segments: Sequence[Segment], passed_ns: int) -> list[Segment]:
    """Return the phases of the host during which the device was idle, with their times.

    `segments` are the phases of the host, and `passed_ns` is the time that passed on the device
    meanwhile. If more time passed on the device than on the host, the device ran work that the host
    launched in one of these phases. The difference is then added for the phase of the longest
    segment.
    """
    found = _take_last_segments(segments, passed_ns)
    left_ns = passed_ns - sum(ns for _, ns in found)
    if left_ns > 0 and segments:
        found.append((max(segments, key=lambda each: each[1])[0], left_ns))
    return found


def _take_last_segments(segments: Sequence[Segment], left_ns: int) -> list[Segment]:
    """Return each segment, shortened to the part that lies in the last `left_ns` of all segments.

    The result is in reverse order. The time of an earlier segment may be 0.
    """
    found = []
    for phase, ns in reversed(segments):
        taken_ns = max(0, min(ns, left_ns))
        left_ns -= taken_ns
        found.append((phase, taken_ns))
    return found
