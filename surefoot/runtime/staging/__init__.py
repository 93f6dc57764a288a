"""Reusable host copy of state, so that it can be written to disk while training continues.

Parameters and optimizer state do not change between two optimizer steps. Another thread copies them
during the next forward and backward pass, and the optimizer step waits only if the copy is not
complete. The memory of one copy is needed.
"""

from __future__ import annotations

import threading
from collections.abc import Mapping

import numpy as np
import torch
from torch import Tensor


class Staging:
    """Copy of named tensors in host memory, made while training continues.

    Call `begin` with the tensors, then `copy` on another thread. Call `wait` before the tensors
    change.
    """

    def __init__(self) -> None:
        self._copies: dict[str, Tensor] = {}
        self._sources: dict[str, Tensor] = {}
        self._live: dict[str, Tensor] = {}
        self._versions: dict[str, int] = {}
        self._copied = threading.Event()
        self._copied.set()

    def begin(self, tensors: Mapping[str, Tensor]) -> None:
        """Set the tensors that `copy` copies; they must not change until `wait` returns."""
        self._sources = {name: tensor.detach() for name, tensor in tensors.items()}
        self._versions = {name: tensor._version for name, tensor in tensors.items()}
        self._live = dict(tensors)
        self._copied.clear()

    def copy(self) -> dict[str, Tensor]:
        """Copy the tensors of `begin` to host memory; return contiguous copies by name.

        The copies are valid until the next `begin`.
        """
        try:
            with torch.no_grad():
                kept = {
                    name: self._find_host_buffer(name, source)
                    for name, source in self._sources.items()
                }
                self._copies = kept
                for name, source in self._sources.items():
                    _copy(kept[name], source)
            return kept
        finally:
            self._sources = {}
            self._copied.set()

    def _find_host_buffer(self, name: str, source: Tensor) -> Tensor:
        held = self._copies.get(name)
        if held is not None and held.shape == source.shape and held.dtype == source.dtype:
            return held
        return torch.empty(source.shape, dtype=source.dtype, pin_memory=source.is_cuda)

    def wait(self) -> None:
        """Wait until the copy is complete, so that the tensors may change again."""
        self._copied.wait()

    def give_up(self) -> None:
        """Cancel a copy that has not started, and release callers of `wait`."""
        self._sources = {}
        self._copied.set()

    def find_changed(self) -> str | None:
        """Return the name of a tensor that was changed in place during the copy; None if none was.

        Such a copy may mix old and new values. Must be called after `wait` and before the next
        optimizer step.
        """
        return next(
            (
                name
                for name, tensor in self._live.items()
                if tensor._version != self._versions[name]
            ),
            None,
        )

    def release(self) -> None:
        """Free the memory of the copies."""
        self._copies = {}


def _copy(into: Tensor, source: Tensor) -> None:
    """Copy `source` to `into`, on one thread if `source` is contiguous host memory.

    torch's copy would wake all threads that the training uses.
    """
    if source.device.type == "cpu" and source.is_contiguous() and source.numel():
        np.copyto(
            into.view(-1).view(torch.uint8).numpy(), source.view(-1).view(torch.uint8).numpy()
        )
    else:
        into.copy_(source)
