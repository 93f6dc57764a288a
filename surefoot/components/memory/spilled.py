"""Weights that are built lie in a file, of which only those in work are in memory: a rank that keeps some rows of each needs no more.

Whatever a model's constructor does with them is done, with the same draws: what it fills is the memory of the file, mapped, and what it
has filled is let go (madvise(2)) before there is much of it. The file has no name, stands on disk, and ends with the process.
"""

from __future__ import annotations

import mmap
import os
import tempfile
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Self

import torch
from torch import Tensor, nn
from torch.nn.modules.module import register_module_parameter_registration_hook
from torch.overrides import TorchFunctionMode

LEAST_BYTES, KEPT_BYTES = 1 << 18, 16 << 20  # a smaller tensor stays in memory; so much may be in work before it is let go
ON_DISK = "/var/tmp"  # /tmp is memory on many systems (file-hierarchy(7)), and the file has no name


class Spilled(TorchFunctionMode):
    """While it is entered, the parameters that a model registers move to a file; it may be entered again. Where a disk has no room they
    stay in memory."""

    def __init__(self) -> None:
        super().__init__()
        self._maps: dict[int, mmap.mmap] = {}  # by address
        self._touched_bytes, self._is_full = 0, False
        self._hook: Any = None

    def __enter__(self) -> Self:
        self._hook = register_module_parameter_registration_hook(self._move)
        super().__enter__()  # type: ignore[no-untyped-call]
        return self

    def __exit__(self, *error: object) -> None:
        super().__exit__(*error)  # type: ignore[no-untyped-call]
        self._hook.remove()
        self._let_go()

    def __torch_function__(
        self, func: Callable[..., Any], types: Sequence[Any], args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        made = func(*args, **(kwargs or {}))
        for each in (*args, *(kwargs or {}).values()):  # functions of torch.nn.init hand theirs on by name
            if type(each) in (Tensor, nn.Parameter) and each.device.type == "cpu" and _address(each) in self._maps:
                self._touched_bytes += each.nbytes
        if self._touched_bytes > KEPT_BYTES:
            self._let_go()
        return made

    def _let_go(self) -> None:
        """What was written stays in the file, and comes back where it is asked for."""
        for each in self._maps.values():
            each.madvise(mmap.MADV_DONTNEED)
        self._touched_bytes = 0

    def _move(self, module: nn.Module, name: str, parameter: Tensor | None) -> None:
        if type(parameter) is not nn.Parameter or parameter.device.type != "cpu" or parameter.layout != torch.strided:
            return  # none, or of a kind that knows where it lies
        if self._is_full or parameter.nbytes < LEAST_BYTES or _address(parameter) in self._maps:
            return
        try:
            mapped = _map(parameter.nbytes)
        except OSError:
            self._is_full = True
            return
        flat = torch.frombuffer(mapped, dtype=parameter.dtype)
        moved = flat.as_strided(parameter.shape, torch.empty_like(parameter, device="meta").stride())
        moved.copy_(parameter.detach())
        self._maps[flat.data_ptr()] = mapped
        self._touched_bytes += parameter.nbytes
        parameter.data = moved


def _address(tensor: Tensor) -> int:
    return tensor.untyped_storage().data_ptr()


def _map(num_bytes: int) -> mmap.mmap:
    with tempfile.TemporaryFile(dir=ON_DISK if os.access(ON_DISK, os.W_OK) else None) as file:
        os.posix_fallocate(file.fileno(), 0, num_bytes)  # a disk that fills up later would end the process by SIGBUS
        return mmap.mmap(file.fileno(), num_bytes)
