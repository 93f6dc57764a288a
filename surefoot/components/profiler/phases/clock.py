"""The phase clock, which is always on: it is switched from phase to phase, so that the phases add
up to the wall time.

A switch reads the monotonic clock once and adds the elapsed time to the phase that ends: no phase
is a remainder. On an asynchronous device the switches record events in its stream, which are read
when a window ends: see `device_line`.
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
    """Clock of one run that counts time by phase and by step, from `start` on."""

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
        """Reset all counts, and start in `phase`."""
        self._tally = Tally(len(PHASES), count_compiled)
        self._spent_ns = self._tally.spent_ns
        self._phase, self._since_ns = phase, perf_counter_ns()
        if self._line is not None:
            self._line.start(self._since_ns)

    @property
    def phase(self) -> int:
        """The current phase."""
        return self._phase

    def switch(self, phase: int) -> int:
        """End the current phase and start `phase`; return the time of the switch, in nanoseconds of
        the monotonic clock."""
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
        """Start the first step now: the time before it belongs to no step."""
        self._tally.begin_steps(self._read_up_to_now(OTHER))

    def end_step(self, number: int) -> None:
        """End the step `number`, which lasted from the end of the previous step and includes the
        time between steps."""
        now_ns = self.switch(OTHER)
        if self._line is None:
            self._tally.end_step(number, now_ns, self._collecting_ns)
        elif self._line.end_step(number, self._collecting_ns):
            self._read_up_to_now(OTHER)

    def take(self) -> Timing:
        """Return the timing since the last call, up to now. Waits for the device."""
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
        """Return the timing from the start to the last `take`, with an even sample of the steps of
        a long run."""
        return self._tally.total()

    def listen_to_collections(self) -> Callable[[], None]:
        """Time the garbage collections of this process, so that one can explain a slow step; return
        the function that stops it."""
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
    """Return how many frames torch.compile has handled in this process; 0 while its compiler is not
    imported.

    `torch._dynamo.utils.counters` is private; where torch lacks it the count is 0, and a step that
    compiled is explained by its slowest phase.
    """
    loaded = sys.modules.get("torch._dynamo.utils")
    if loaded is None:
        return 0
    counters = getattr(loaded, "counters", {})
    return int(counters["frames"]["total"]) if "frames" in counters else 0
