"""Phase clock of a run, which is always on.

The run is in one phase at any time, so that the times of the phases add up to the wall time. A
switch of the phase reads the monotonic clock once, and adds the elapsed time to the phase that
ends. No phase is computed as a remainder. On an asynchronous device, a switch also records an event
in the stream of the device; the events are read when a reporting window ends (see `device_line`).
"""

from __future__ import annotations

import gc
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from time import perf_counter_ns
from typing import Any, final

import torch

from surefoot.components.profiler.phases.tally import Tally
from surefoot.contract.events import PHASES
from surefoot.contract.state import Timing

DATA, COPY, FORWARD, BACKWARD, OPTIMIZER, COMMUNICATION, CHECKPOINT, EVALUATION, LOGGING, OTHER = (
    range(len(PHASES))
)
ON_DEVICE = frozenset((COPY, FORWARD, BACKWARD, OPTIMIZER))  # the host only launches these


@final
class PhaseClock:
    """Clock that measures the time of one run by phase and by step.

    A phase is an index into `PHASES`. All times are counted since the last call of `start`.
    """

    __slots__ = (
        "_collecting_ns",
        "_collection_began_ns",
        "_line",
        "_phase",
        "_since_ns",
        "_spent_ns",
        "_tally",
        "listener",
    )

    def __init__(self, device: torch.device) -> None:
        self._line = None
        if device.type == "cuda":
            from surefoot.components.profiler.phases.device_line import DeviceLine, make_cuda_event

            self._line = DeviceLine(make_cuda_event, ON_DEVICE)
        self._collecting_ns = self._collection_began_ns = 0
        # called with each phase that begins, while a window of the profiler is open
        self.listener: Callable[[int], None] | None = None
        self.start(OTHER)

    def start(self, phase: int) -> None:
        """Reset all counts, and make `phase` the current phase."""
        self._tally = Tally(len(PHASES), count_compiled)
        self._spent_ns = self._tally.spent_ns
        self._phase, self._since_ns = phase, perf_counter_ns()
        if self._line is not None:
            self._line.start(self._since_ns)

    @property
    def phase(self) -> int:
        """The current phase, as an index into `PHASES`."""
        return self._phase

    def switch(self, phase: int) -> int:
        """End the current phase and start `phase`.

        Return the time of the switch, in nanoseconds of `time.perf_counter_ns`.
        """
        now_ns = perf_counter_ns()
        if self._line is None:
            self._spent_ns[self._phase] += now_ns - self._since_ns
        else:
            self._line.switch(self._phase, phase, now_ns - self._since_ns)
        self._since_ns = now_ns
        self._phase = phase
        if self.listener is not None:
            self.listener(phase)
        return now_ns

    @contextmanager
    def within(self, phase: int) -> Iterator[None]:
        """Switch to `phase` inside the block, and back to the previous phase after it."""
        before = self._phase
        self.switch(phase)
        try:
            yield
        finally:
            self.switch(before)

    def begin_steps(self) -> None:
        """Start the first step now; the time before this call is not part of any step."""
        self._tally.begin_steps(self._read_up_to_now(OTHER))

    def end_step(self, number: int) -> None:
        """End step `number`.

        A step lasts from the end of the previous step until this call, and includes the time
        between steps.
        """
        now_ns = self.switch(OTHER)
        if self._line is None:
            self._tally.end_step(number, now_ns, self._collecting_ns)
        elif self._line.end_step(number, self._collecting_ns):
            self._read_up_to_now(OTHER)

    def take(self) -> Timing:
        """Wait for the device, and return the timing since the last call of `take`."""
        self._read_up_to_now(self._phase)
        return self._tally.take()

    def _read_up_to_now(self, phase: int) -> int:
        now_ns = self.switch(phase)
        if self._line is not None:
            self._line.wait()
            now_ns = self.switch(phase)
            self._line.read(self._tally, now_ns)
        return now_ns

    def total(self) -> Timing:
        """Return the timing from `start` to the last call of `take`.

        The step times of a long run are an evenly spaced sample.
        """
        return self._tally.total()

    def listen_to_collections(self) -> Callable[[], None]:
        """Start to time the garbage collections of Python; return a function that stops the timing.

        The times are used to find out whether garbage collection was the cause of a slow step.
        """
        callback = self._on_collection
        gc.callbacks.append(callback)

        def stop() -> None:
            with suppress(ValueError):  # stop() was called before
                gc.callbacks.remove(callback)

        return stop

    def _on_collection(self, moment: str, details: dict[str, Any]) -> None:
        if moment == "start":
            self._collection_began_ns = perf_counter_ns()
        else:
            self._collecting_ns += perf_counter_ns() - self._collection_began_ns


def count_compiled() -> int:
    """Return the number of frames that torch.compile has processed in this process.

    The number is 0 if `torch._dynamo` is not imported, or if torch lacks the private
    `torch._dynamo.utils.counters`. In the second case, a step that was slow because of compilation
    is attributed to its slowest phase.
    """
    loaded = sys.modules.get("torch._dynamo.utils")
    if loaded is None:
        return 0
    counters = getattr(loaded, "counters", {})
    return int(counters["frames"]["total"]) if "frames" in counters else 0
