"""The phases of an asynchronous device: events in its stream, read at the end of a window.

Between two events the device either ran the kernels launched between them or waited for the host.
Copy, forward, backward and optimizer launch kernels: each lasts from its event to the next one.
Host phases between them (reading data, logging) count only for the time that the device was idle:
for their last part, since the device was still busy during the first. So the phases add up to the
wall time.
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
    """Events in a device's stream where one of the phases `timed` starts or ends.

    `make_event` returns an event with record, synchronize and elapsed_time in ms, as
    torch.cuda.Event.
    """

    def __init__(self, make_event: Callable[[], Any], timed: Collection[int]) -> None:
        self._make_event, self._timed = make_event, timed
        self._events: list[Any] = []  # reused in every window
        # (HOST, phase, ns) | (MARK, event, phase that begins) | (STEP, number, ns of collections)
        self._line: list[tuple[Any, ...]] = []
        # the phase of `timed` that was running when the window started
        self._inside: int | None = None

    def start(self, now_ns: int) -> None:
        """Reset at `now_ns`, when the device is idle."""
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
        """Record that the host switched from the phase `old`, which took it `spent_ns`, to
        `new`."""
        if old not in self._timed:
            self._line.append((HOST, old, spent_ns))
        if old != new and (old in self._timed or new in self._timed):
            self._line.append((MARK, self._record(), new))

    def end_step(self, number: int, collecting_ns: int) -> bool:
        """Record the end of a step; return whether so many events were recorded that they must be
        read."""
        self._line.append((STEP, number, collecting_ns))
        return self._used > MAX_MARKS

    def wait(self) -> None:
        """Wait until the device is idle."""
        self._record().synchronize()

    def read(self, tally: Tally, now_ns: int) -> None:
        """Add the time between the events to `tally`, and reset. `now_ns` must be a time after
        `wait`."""
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
    """Return the host phases during which the device was idle, of those in `segments`, where
    `passed_ns` passed on the device.

    Where more time passed on the device than on the host, the device ran work that the host
    launched meanwhile; that time counts for the longest segment.
    """
    found = _take_last_segments(segments, passed_ns)
    left_ns = passed_ns - sum(ns for _, ns in found)
    if left_ns > 0 and segments:
        found.append((max(segments, key=lambda each: each[1])[0], left_ns))
    return found


def _take_last_segments(segments: Sequence[Segment], left_ns: int) -> list[Segment]:
    """Return the last `left_ns` of the segments."""
    found = []
    for phase, ns in reversed(segments):
        taken_ns = max(0, min(ns, left_ns))
        left_ns -= taken_ns
        found.append((phase, taken_ns))
    return found
