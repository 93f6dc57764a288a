"""Offloading of the tensors that autograd saves in the forward pass to host memory."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks

from surefoot.runtime.nested_tensors import find_tensors

MIN_BYTES = 1 << 16  # a smaller tensor stays: copying it would cost more than its memory


class Offloaded:
    """Wrapper of a loss that moves the tensors saved by autograd to host memory.

    The tensors are copied back in the backward pass. Weights, buffers, the batch and tensors under
    64 KiB stay on the device. The copies use pinned memory. They run on the stream of the
    computation: a tensor is copied after it has been computed, and the step waits for the copies.
    `num_bytes` is the total number of bytes offloaded so far.

    Args:
        loss: Function of (model, batch).
    """

    def __init__(self, loss: Callable[[Any, Any], Any]) -> None:
        self._loss = loss
        self._stays: set[int] = set()
        self.num_bytes = 0

    def __call__(self, model: Any, batch: Any) -> Any:
        own = (*model.parameters(), *model.buffers(), *find_tensors(batch))
        self._stays = {each.untyped_storage().data_ptr() for each in own}
        with saved_tensors_hooks(self._keep, _copy_to_device):
            return self._loss(model, batch)

    def _keep(self, tensor: Tensor) -> Tensor | tuple[torch.device, Tensor]:
        is_strided = tensor.layout == torch.strided
        if (
            not is_strided
            or tensor.nbytes < MIN_BYTES
            or tensor.untyped_storage().data_ptr() in self._stays
        ):
            return tensor
        held = torch.empty_like(tensor, device="cpu", pin_memory=tensor.is_cuda)
        held.copy_(tensor.detach())
        self.num_bytes += tensor.nbytes
        return tensor.device, held


def _copy_to_device(kept: Tensor | tuple[torch.device, Tensor]) -> Tensor:
    if isinstance(kept, Tensor):
        return kept
    device, held = kept
    return held.to(device, non_blocking=True)
