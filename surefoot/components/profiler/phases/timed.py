"""Timer for a block of code; on a GPU, it uses CUDA events."""

from __future__ import annotations

import time
from types import TracebackType
from typing import Any, Self, final

import torch

from surefoot.components.profiler.phases.device_line import make_cuda_event
from surefoot.core.process.forked import uses_gpu


@final
class Timed:
    """A context that measures the time of its block.

    `elapsed_s` is None inside the block. After the block, it is the time in seconds.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._events: tuple[Any, ...] = ()
        self._began_s = 0.0
        self.elapsed_s: float | None = None

    def __enter__(self) -> Self:
        self.elapsed_s = None
        if self._device.type == "cuda":
            with torch.cuda.device(self._device):
                self._events = (make_cuda_event(), make_cuda_event())
                self._events[0].record()
        self._began_s = time.perf_counter()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if not self._events:
            self.elapsed_s = time.perf_counter() - self._began_s
            return
        begin, end = self._events
        with torch.cuda.device(self._device):
            end.record()
            end.synchronize()
        self.elapsed_s = begin.elapsed_time(end) / 1000


def timed(device: str | torch.device | None = None) -> Timed:
    """Return a context that measures the time of its block, in seconds.

    After `with surefoot.timed() as took: ...`, the time is `took.elapsed_s`. On a GPU, it is the
    time between two CUDA events, which are recorded on the current stream at the start and at the
    end of the block; the host waits for the device once, at the end. On a CPU, it is the time of
    the monotonic clock.

    Args:
        device: The device; None for the GPU if this process already uses one, otherwise the CPU.
    """
    if device is None:
        device = "cuda" if uses_gpu() else "cpu"
    return Timed(torch.device(device))
