"""One reused copy of state on the host, so that it can be written while training goes on.

Parameters and optimiser state do not change between two updates: they are copied by another thread while the next forward and
backward pass run, and the update waits only if the copy is not done. Memory is bounded by the one copy.
"""

from __future__ import annotations

import threading
from collections.abc import Mapping

import numpy as np
import torch
from torch import Tensor


class Staging:
    """A host copy of named tensors. `begin` names them, `copy` runs on another thread, `wait` is called before they change."""

    def __init__(self) -> None:
        self._copies: dict[str, Tensor] = {}
        self._sources: dict[str, Tensor] = {}
        self._live: dict[str, Tensor] = {}
        self._versions: dict[str, int] = {}
        self._copied = threading.Event()
        self._copied.set()

    def begin(self, tensors: Mapping[str, Tensor]) -> None:
        """Say what is to be copied; nothing may change it until `wait` returns."""
        self._sources = {name: tensor.detach() for name, tensor in tensors.items()}
        self._versions = {name: tensor._version for name, tensor in tensors.items()}
        self._live = dict(tensors)
        self._copied.clear()

    def copy(self) -> dict[str, Tensor]:
        """Copy what was named; gives the copies, contiguous on the host, which stay as they are until the next `begin`."""
        try:
            with torch.no_grad():
                kept = {name: self._fitting(name, source) for name, source in self._sources.items()}
                self._copies = kept
                for name, source in self._sources.items():
                    _copy(kept[name], source)
            return kept
        finally:
            self._sources = {}
            self._copied.set()

    def _fitting(self, name: str, source: Tensor) -> Tensor:
        held = self._copies.get(name)
        if held is not None and held.shape == source.shape and held.dtype == source.dtype:
            return held
        return torch.empty(source.shape, dtype=source.dtype, pin_memory=source.is_cuda)

    def wait(self) -> None:
        """Wait until what was named may change again."""
        self._copied.wait()

    def give_up(self) -> None:
        """Nothing will be copied: whoever waits goes on."""
        self._sources = {}
        self._copied.set()

    def find_changed(self) -> str | None:
        """The first tensor that was changed in place while it was copied: such a copy is torn. Asked after `wait`, before updates."""
        return next((name for name, tensor in self._live.items() if tensor._version != self._versions[name]), None)

    def release(self) -> None:
        """Give the memory back."""
        self._copies = {}


def _copy(into: Tensor, source: Tensor) -> None:
    """On one thread where both are plain memory: torch's own copy would wake as many threads as the training has."""
    if source.device.type == "cpu" and source.is_contiguous() and source.numel():
        np.copyto(into.view(-1).view(torch.uint8).numpy(), source.view(-1).view(torch.uint8).numpy())
    else:
        into.copy_(source)
