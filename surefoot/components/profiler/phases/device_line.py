"""The phases as a device sees them that works beside the host: marks in its one stream, read late.

Between two marks the device either worked on what was launched there or waited for the host. Copy, forward, backward and optimiser
are launched: each lasts from its mark to the next one. What the host does between them (reading data, logging) counts only as far as
the device stood still for it: the last so many seconds of it, since the device was at work before. So the phases tile the wall time.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from functools import partial
from typing import Any, final

import torch

from surefoot.components.profiler.phases.tally import Tally

MOST_MARKS = 8192  # then they are read before the window ends
HOST, MARK, STEP = range(3)
make_cuda_event: Callable[[], Any] = partial(torch.cuda.Event, enable_timing=True)
Segment = tuple[int, int]  # a phase of the host, nanoseconds


@final
class DeviceLine:
    """Marks made by `make_event` (record, synchronize, elapsed_time in ms, as torch.cuda.Event) where one of `timed` begins or ends."""

    def __init__(self, make_event: Callable[[], Any], timed: Collection[int]) -> None:
        self._make_event, self._timed = make_event, timed
        self._events: list[Any] = []  # used again in every window
        self._line: list[
            tuple[Any, ...]
        ] = []  # (HOST, phase, ns) | (MARK, event, phase that begins) | (STEP, its number, ns of collections)
        self._inside: int | None = None  # which of `timed` went on when the window began

    def start(self, now_ns: int) -> None:
        """Begin anew at `now_ns`, when the device has nothing to do."""
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
        """The host went from `old`, which took it `spent_ns`, to `new`."""
        if old not in self._timed:
            self._line.append((HOST, old, spent_ns))
        if old != new and (old in self._timed or new in self._timed):
            self._line.append((MARK, self._record(), new))

    def end_step(self, number: int, collecting_ns: int) -> bool:
        """A step ended here; gives whether it is time to read the marks."""
        self._line.append((STEP, number, collecting_ns))
        return self._used > MOST_MARKS

    def wait(self) -> None:
        """Wait until the device has nothing to do."""
        self._record().synchronize()

    def read(self, tally: Tally, now_ns: int) -> None:
        """Add what lies between the marks to `tally`, and begin anew. `now_ns` came after `wait`."""
        last, inside, done_ns = self._events[0], self._inside, self._began_ns
        waited: list[Segment] = []
        for kind, *row in self._line:
            if kind == HOST:
                waited.append((row[0], row[1]))
            elif kind == MARK:
                passed_ns = round(last.elapsed_time(row[0]) * 1e6)
                _add(tally, [(inside, passed_ns)] if inside is not None else _exposed(waited, passed_ns))
                waited, last, done_ns = [], row[0], done_ns + passed_ns
                inside = row[1] if row[1] in self._timed else None
            else:
                tally.end_step(row[0], done_ns, row[1])
        left_ns = now_ns - done_ns
        _add(tally, [(inside, left_ns)] if inside is not None else _last(waited, left_ns))
        self._inside = inside
        self.start(now_ns)


def _add(tally: Tally, segments: Sequence[Segment]) -> None:
    for phase, ns in segments:
        tally.spent_ns[phase] += ns


def _exposed(segments: Sequence[Segment], passed_ns: int) -> list[Segment]:
    """What the device stood still for, of what the host did while `passed_ns` passed on the device.

    More time on the device than on the host is work that the host launched meanwhile: that of its longest segment.
    """
    found = _last(segments, passed_ns)
    left_ns = passed_ns - sum(ns for _, ns in found)
    if left_ns > 0 and segments:
        found.append((max(segments, key=lambda each: each[1])[0], left_ns))
    return found


def _last(segments: Sequence[Segment], left_ns: int) -> list[Segment]:
    """The last `left_ns` of the segments."""
    found = []
    for phase, ns in reversed(segments):
        taken_ns = max(0, min(ns, left_ns))
        left_ns -= taken_ns
        found.append((phase, taken_ns))
    return found
