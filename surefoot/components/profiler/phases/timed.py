"""A timer for one block of code, which uses events on a GPU."""

from __future__ import annotations

import time
from types import TracebackType
from typing import Any, Self, final

import torch

from surefoot.components.profiler.phases.device_line import make_cuda_event
from surefoot.core.process.forked import uses_gpu


@final
class Timed:
    """A context that times its block; `elapsed_s` is None inside the block and the seconds after
    it."""

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
    """Time a block: `with surefoot.timed() as took: ...`, then `took.elapsed_s`, in seconds.

    On a GPU, this is the time from the start of the block's first work on the device to the end of
    its last, measured with CUDA events; the host waits for the device once, at the end. On a CPU,
    it is the time of the monotonic clock.

    Args:
        device: The device; None for the GPU if this process already uses one, else the CPU.
    """
    if device is None:
        device = "cuda" if uses_gpu() else "cpu"
    return Timed(torch.device(device))
