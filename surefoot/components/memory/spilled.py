"""Parameters in memory-mapped files, of which only the pages in use are in memory.

A rank that needs only some rows of each weight then needs no memory for the whole model. The
constructor of the model runs unchanged, with the same random numbers, and fills the mapped memory.
The pages are released with madvise(2) whenever more than `KEPT_BYTES` have been touched. The files
have no names, are stored on disk, and disappear with the process. A parameter that shares its
memory with a different tensor stays in memory, because that tensor would no longer see changes of
the parameter.
"""

from __future__ import annotations

import os
import tempfile
import weakref
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Self

import torch
from torch import Tensor, nn
from torch.nn.modules.module import (
    register_module_module_registration_hook,
    register_module_parameter_registration_hook,
)
from torch.overrides import TorchFunctionMode

from surefoot.core.ranks.mapping import map_file, release_pages

# tensors below MIN_BYTES stay in memory; pages are released after KEPT_BYTES were touched
MIN_BYTES, KEPT_BYTES = (1 << 18, 16 << 20)
ALONE = 2  # use count of a storage that only one parameter uses: its tensor, and the queried object
ON_DISK = "/var/tmp"  # /tmp is memory on many systems (file-hierarchy(7)), and the file has no name


class FileBackedParameters(TorchFunctionMode):
    """Context in which the parameters that a model registers are moved to memory-mapped files.

    It may be entered again. If the disk is full, parameters stay in memory.
    """

    def __init__(self) -> None:
        super().__init__()
        self._maps: dict[int, int] = {}  # sizes of the maps, by address
        self._touched_bytes, self._is_full = 0, False
        self._hooks: list[Any] = []

    def __enter__(self) -> Self:
        self._hooks = [
            register_module_parameter_registration_hook(
                lambda module, name, parameter: self._move(parameter)
            ),
            # a copied block registers no parameters
            register_module_module_registration_hook(self._move_all),
        ]
        super().__enter__()  # type: ignore[no-untyped-call]
        return self

    def __exit__(self, *error: object) -> None:
        super().__exit__(*error)  # type: ignore[no-untyped-call]
        for hook in self._hooks:
            hook.remove()
        self._release_pages()

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Sequence[Any],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        made = func(*args, **(kwargs or {}))
        # functions of torch.nn.init pass tensors by keyword
        for each in (*args, *(kwargs or {}).values()):
            if (
                type(each) in (Tensor, nn.Parameter)
                and each.device.type == "cpu"
                and _address(each) in self._maps
            ):
                self._touched_bytes += each.nbytes
        if self._touched_bytes > KEPT_BYTES:
            self._release_pages()
        return made

    def _release_pages(self) -> None:
        """Release the memory of all mapped parameters.

        Their values stay in the files, and are read from there at the next access.
        """
        for address, size in list(self._maps.items()):
            release_pages(address, size)
        self._touched_bytes = 0

    def _move_all(self, module: nn.Module, name: str, part: nn.Module | None) -> None:
        for parameter in () if part is None else part.parameters():
            self._move(parameter)

    def _move(self, parameter: Tensor | None) -> None:
        if (
            type(parameter) is not nn.Parameter
            or parameter.device.type != "cpu"
            or parameter.layout != torch.strided
        ):
            return  # None, or a tensor subclass or device with other storage
        if self._is_full or parameter.nbytes < MIN_BYTES or _address(parameter) in self._maps:
            return
        if not _is_alone(parameter):
            return
        mapped = _map(parameter.nbytes)
        if mapped is None:
            self._is_full = True
            return
        view = memoryview(mapped)
        flat = torch.frombuffer(view, dtype=parameter.dtype)
        moved = flat.as_strided(
            parameter.shape, torch.empty_like(parameter, device="meta").stride()
        )
        moved.copy_(parameter.detach())
        self._maps[flat.data_ptr()] = parameter.nbytes
        weakref.finalize(view, self._maps.pop, flat.data_ptr(), None).atexit = False
        self._touched_bytes += parameter.nbytes
        parameter.data = moved


def _address(tensor: Tensor) -> int:
    return tensor.untyped_storage().data_ptr()


def _is_alone(parameter: Tensor) -> bool:
    """Return whether a parameter uses its whole storage, and no other tensor uses that storage.

    The result is False if torch has no use count of storages.
    """
    storage = parameter.untyped_storage()
    count: Any = getattr(torch._C, "_storage_Use_Count", None)
    return (
        count is not None
        and storage.nbytes() == parameter.nbytes
        and count(storage._cdata) <= ALONE
    )


def _map(num_bytes: int) -> Any:
    """Return the memory map of a new, unnamed file; None if the disk has no space for it."""
    try:
        with tempfile.TemporaryFile(dir=ON_DISK if os.access(ON_DISK, os.W_OK) else None) as file:
            # a disk that fills up later would end the process by SIGBUS
            os.posix_fallocate(file.fileno(), 0, num_bytes)
            return map_file(file.fileno(), num_bytes)
    except (OSError, AttributeError):  # a full disk; a system without posix_fallocate
        return None
