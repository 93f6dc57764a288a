"""Measurement of the increase of memory while code runs, with torch's profiler."""

from __future__ import annotations

from typing import Any

from torch.profiler import ProfilerActivity, profile

from surefoot.core import place

MEMORY = "[memory]"  # the profiler's name for an allocation or a release


class Rise:
    """Recorder of the peak memory of torch's CPU allocator while code runs.

    `stop` returns the peak since `start`, in bytes above the memory at `start`. Memory that
    libraries allocate themselves (oneDNN's scratchpad) is not recorded, nor is the release of
    memory that was allocated before `start`.
    """

    def __init__(self) -> None:
        self._recorder: profile | None = None

    def start(self) -> None:
        """Start recording memory allocations, unless the recorder is already running."""
        if self._recorder is None:
            self._put_back = place.quiet_profiler()
            self._recorder = profile(activities=[ProfilerActivity.CPU], profile_memory=True)
            self._recorder.start()

    def stop(self) -> int:
        if self._recorder is None:
            return 0
        self._recorder.stop()
        self._put_back()
        inner = self._recorder.profiler
        results: Any = inner.kineto_results if inner is not None else None
        events = results.events() if results is not None else ()
        changes = [(each.start_ns(), each.nbytes()) for each in events if each.name() == MEMORY]
        now = most = 0
        # a stable sort: changes at the same time keep their order
        for _, change in sorted(changes, key=lambda pair: pair[0]):
            now += change
            most = max(most, now)
        return most
