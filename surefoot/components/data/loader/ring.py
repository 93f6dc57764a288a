"""Transfer of batches between processes without a copy, through anonymous shared memory.

A batch is stored in a slot: its tensors, and everything else in pickled form. Only the position in
the slot is sent as a message. A slot is a memory file (memfd), which exists as long as a process
has it open. Nothing of it remains when all these processes have ended, even if they were killed.
"""

from __future__ import annotations

import io
import mmap
import os
import pickle
import threading
import weakref
from collections.abc import Callable
from multiprocessing import reduction
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from surefoot.core.flight import open_nameless

ALIGNED = 64  # bytes: a cache line, suitable for vector instructions
GROWS = 1 << 16  # bytes: slot sizes are multiples of this


class Slot:
    """Memory file (memfd) for one batch at a time, shared by a worker and its parent process.

    The worker enlarges the file if necessary.
    """

    def __init__(self, descriptor: int | None = None) -> None:
        self._descriptor = open_nameless("surefoot-loader") if descriptor is None else descriptor
        self._map: mmap.mmap | None = None

    def map_memory(self, num_bytes: int) -> mmap.mmap:
        """Return the mapped memory, enlarged to at least `num_bytes` bytes."""
        if self._map is None or len(self._map) < num_bytes:
            size = max(os.fstat(self._descriptor).st_size, -(-num_bytes // GROWS) * GROWS)
            os.ftruncate(self._descriptor, size)
            self._map = mmap.mmap(self._descriptor, size)
        return self._map

    def close(self) -> None:
        """Close the file. Its memory is freed when the last batch that uses it is freed."""
        self._map = None
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1

    def __reduce__(self) -> tuple[Any, ...]:  # for a spawned process
        return _opened_there, (reduction.DupFd(self._descriptor),)


def _opened_there(handed: Any) -> Slot:
    return Slot(handed.detach())


class PickledSpan(NamedTuple):
    """Position and size of the pickled part of a batch in a slot, in bytes.

    The tensors of the batch are stored before it.
    """

    start: int
    num_bytes: int


def pack(batch: Any, slot: Slot) -> PickledSpan:
    """Write a batch into a slot; return the position from which `unpack` can read the batch.

    Only the position is sent through a pipe, because the batch could fill the pipe.
    """
    packer = _Packer()
    packer.dump(batch)
    lies = PickledSpan(packer.num_bytes, packer.written.tell())
    memory = slot.map_memory(sum(lies))
    for start, array in packer.parts:
        if array.nbytes:
            np.frombuffer(memory, np.uint8, array.nbytes, start).reshape(array.shape)[...] = array
    memory[lies.start : sum(lies)] = packer.written.getbuffer()
    return lies


def unpack(lies: PickledSpan, slot: Slot, release: Callable[[], None]) -> Any:
    """Return the batch in a slot; its tensors share the memory of the slot.

    `release` is called when the last of these tensors has been freed.
    """
    memory, lease = slot.map_memory(sum(lies)), _Lease(release)
    try:
        return _Unpacker(io.BytesIO(memory[lies.start : sum(lies)]), memory, lease).load()
    finally:
        lease.end_of_parts()


def pack_ids(ids: np.ndarray, slot: Slot) -> int:
    """Write sample ids into an empty slot; return the number of ids."""
    np.frombuffer(slot.map_memory(ids.nbytes), np.int64, len(ids))[:] = ids
    return len(ids)


def unpack_ids(count: int, slot: Slot) -> np.ndarray:
    """Return a copy of the `count` sample ids in a slot, which a batch will overwrite."""
    return np.frombuffer(slot.map_memory(count * 8), np.int64, count).copy()


class _Packer(pickle.Pickler):
    def __init__(self) -> None:
        self.written = io.BytesIO()
        super().__init__(self.written, protocol=pickle.HIGHEST_PROTOCOL)
        self.parts: list[tuple[int, np.ndarray]] = []  # start and bytes of each
        self.num_bytes = 0

    def persistent_id(self, obj: Any) -> Any:
        if (
            type(obj) is Tensor
            and obj.layout is torch.strided
            and obj.device.type == "cpu"
            and not (obj.is_quantized or obj.is_nested)
        ):
            dense = obj.detach().resolve_conj().resolve_neg()
            flat = dense.contiguous().view(-1) if dense.numel() else dense.new_empty(0)
            named = str(obj.dtype).removeprefix("torch.")
            return (
                "tensor",
                named,
                tuple(obj.shape),
                self._lay(flat.view(torch.uint8).numpy()),
                obj.requires_grad,
            )
        if type(obj) is np.ndarray and obj.dtype.kind in "biufc":
            return (
                "array",
                obj.dtype.str,
                obj.shape,
                self._lay(np.ascontiguousarray(obj).reshape(-1).view(np.uint8)),
                False,
            )
        return None

    def _lay(self, content: np.ndarray) -> int:
        start = self.num_bytes
        self.parts.append((start, content))
        self.num_bytes += -(-content.nbytes // ALIGNED) * ALIGNED
        return start


class _Unpacker(pickle.Unpickler):
    """Unpickler for messages between a run and its workers; it is not safe for other data."""

    def __init__(self, file: io.BytesIO, memory: mmap.mmap, lease: _Lease) -> None:
        super().__init__(file)
        self._memory, self._lease = memory, lease

    def persistent_load(self, pid: Any) -> Tensor | np.ndarray:
        kind, named, shape, start, requires_grad = pid
        dtype: Any = getattr(torch, named) if kind == "tensor" else np.dtype(named)
        count = int(np.prod(shape, dtype=np.int64))
        if count == 0:
            return (
                torch.empty(shape, dtype=dtype, requires_grad=requires_grad)
                if kind == "tensor"
                else np.empty(shape, dtype)
            )
        content = np.frombuffer(self._memory, np.uint8, count * dtype.itemsize, start)
        self._lease.hold(content)
        if kind == "array":
            array: np.ndarray = content.view(dtype).reshape(shape)
            return array
        made: Tensor = torch.from_numpy(content).view(dtype).view(shape)
        if requires_grad:
            made.requires_grad_()
        return made


class _Lease:
    """Counter of the arrays that still use a slot; calls `release` when it reaches 0.

    A tensor made from an array has a reference to it, and so do views of the tensor.
    """

    def __init__(self, release: Callable[[], None]) -> None:
        self._release, self._left, self._lock = release, 1, threading.RLock()

    def hold(self, part: np.ndarray) -> None:
        with self._lock:
            self._left += 1
        weakref.finalize(part, self.end_of_parts).atexit = False

    def end_of_parts(self) -> None:
        with self._lock:
            self._left -= 1
            is_free = self._left == 0
        if is_free:
            self._release()
