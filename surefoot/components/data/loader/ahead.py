"""Batches on their way to the device while it computes: copied on a stream of their own, from memory that is pinned."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from surefoot.components.data.feed import to_device
from surefoot.components.data.loader.loader import Taken
from surefoot.contract.task import Batch

Peek = Callable[[int], Taken | None]


class Ahead:
    """Gives each step its batches on `device`; on CUDA those of the next step are copied meanwhile, where they are read already."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream: Any = torch.cuda.Stream(device) if device.type == "cuda" else None  # type: ignore[no-untyped-call]
        self._copied: tuple[int, list[Batch]] | None = None
        self._leaving: list[tuple[Any, Taken]] = []  # what is being copied must stay where it is until it is done

    def take(self, taken: Taken, peek: Peek | None = None) -> list[Batch]:
        """The batches of a step on the device. `peek` gives what the next step reads, if that is there."""
        if self._stream is None:
            return [to_device(batch, self._device) for batch in taken.batches]
        copied, self._copied = self._copied, None
        if copied is not None and copied[0] == taken.number:
            current = torch.cuda.current_stream(self._device)
            current.wait_stream(self._stream)
            for tensor in _tensors(copied[1]):
                tensor.record_stream(current)  # else its memory would be given away while the step still computes with it
            batches = copied[1]
        else:
            batches = self._copy(taken, torch.cuda.current_stream(self._device))
        following = None if peek is None else peek(taken.number + 1)
        if following is not None:
            self._copied = taken.number + 1, self._copy(following, self._stream)
        return batches

    def _copy(self, taken: Taken, stream: Any) -> list[Batch]:
        self._leaving = [each for each in self._leaving if not each[0].query()]
        with torch.cuda.stream(stream):
            batches = [to_device(_pinned(batch), self._device) for batch in taken.batches]
            self._leaving.append((stream.record_event(), taken))
        return batches


def _pinned(part: Any) -> Any:
    """The batch in memory that the device reads by itself: out of any other a copy waits for the one before it."""
    if isinstance(part, Tensor):
        return part if part.is_pinned() else part.pin_memory()
    if isinstance(part, dict):
        return {key: _pinned(each) for key, each in part.items()}
    if isinstance(part, tuple) and hasattr(part, "_fields"):
        return type(part)(*map(_pinned, part))
    return type(part)(map(_pinned, part)) if isinstance(part, tuple | list) else part


def _tensors(part: Any) -> list[Tensor]:
    if isinstance(part, Tensor):
        return [part]
    inside = part.values() if isinstance(part, dict) else part if isinstance(part, tuple | list) else ()
    return [tensor for each in inside for tensor in _tensors(each)]
