"""Copies of batches to the device during its computation, from pinned memory.

They run on a separate CUDA stream.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from surefoot.components.data.feed import to_device
from surefoot.components.data.loader.batches import Peek, StepBatches
from surefoot.contract.task import Batch
from surefoot.runtime.nested_tensors import map_tensors


class Ahead:
    """Copier of the batches of each step to `device`.

    On CUDA, the batches of the next step are copied while the current step computes, if they have
    been read already.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        make_stream: Any = torch.cuda.Stream
        self._stream: Any = make_stream(device) if device.type == "cuda" else None
        self._copied: tuple[int, list[Batch]] | None = None
        # the sources of copies in progress must stay in memory
        self._leaving: list[tuple[Any, StepBatches]] = []

    def take(self, taken: StepBatches, peek: Peek | None = None) -> list[Batch]:
        """Return the batches of the step `taken` on the device.

        `peek(n)` returns the batches of step n, or None if they have not been read yet.
        """
        if self._stream is None:
            return [to_device(batch, self._device) for batch in taken.batches]
        copied, self._copied = self._copied, None
        if copied is not None and copied[0] == taken.number:
            current = torch.cuda.current_stream(self._device)
            current.wait_stream(self._stream)
            batches = copied[1]
            map_tensors(batches, lambda tensor: _keep_until_used(tensor, current))
        else:
            batches = self._copy(taken, torch.cuda.current_stream(self._device))
        following = None if peek is None else peek(taken.number + 1)
        if following is not None:
            self._copied = taken.number + 1, self._copy(following, self._stream)
        return batches

    def _copy(self, taken: StepBatches, stream: Any) -> list[Batch]:
        self._leaving = [each for each in self._leaving if not each[0].query()]
        with torch.cuda.stream(stream):
            batches = [to_device(map_tensors(batch, _pin), self._device) for batch in taken.batches]
            self._leaving.append((stream.record_event(), taken))
        return batches


def _keep_until_used(tensor: Tensor, stream: Any) -> Tensor:
    """Prevent reuse of the memory of `tensor` by the allocator until `stream` has used it."""
    tensor.record_stream(stream)
    return tensor


def _pin(tensor: Tensor) -> Tensor:
    """Return `tensor` in pinned memory.

    A copy from pageable memory to the device would wait for earlier copies.
    """
    return tensor if tensor.is_pinned() else tensor.pin_memory()
