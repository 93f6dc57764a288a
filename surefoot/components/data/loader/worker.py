"""Worker process that reads requested samples into slots of shared memory.

Requests arrive through a pipe. The process ends when the pipe is closed or its parent dies.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import sys
import threading
import time
import traceback
from multiprocessing.connection import Connection
from typing import Any

import torch

from surefoot.components.data.loader.jobs import Reader
from surefoot.components.data.loader.ring import Slot, pack, unpack_ids

DIES_WITH_PARENT = 1  # PR_SET_PDEATHSIG of prctl(2)
LOOKS_S = 0.2  # between checks for the parent, where the kernel does not kill this process
MAX_NAMED = 3_000  # characters of a traceback: at 4 bytes each, they fit into a pipe


def serve(
    pipe: Connection,
    slots: tuple[Slot, ...],
    reader: Reader,
    parent: int,
    inherited: list[Connection],
    of_main: bool,
) -> None:
    """Read the samples of each request from the pipe, and send an answer, until the pipe is closed.

    A request is (serial, slot, epoch, number of ids in the slot). An answer is (serial, slot,
    seconds, position of the batch, problem, whether the batch was read but cannot be sent).
    `of_main` is True if the main thread of `parent` started this process. Only then can the kernel
    be told to kill this process when its parent dies: the kernel kills it as soon as the thread
    that started it ends.
    """
    for name, what in (
        ("SIGINT", signal.SIG_IGN),
        ("SIGTERM", signal.SIG_DFL),
        ("SIGHUP", signal.SIG_IGN),
        *((name, signal.SIG_IGN) for name in ("SIGUSR1", "SIGUSR2", "SIGXCPU")),
    ):
        # Ctrl-C reaches the whole process group: the run finishes its step first, and needs the
        # batches being read
        if hasattr(signal, name):
            signal.signal(getattr(signal, name), what)
    for other in inherited:
        other.close()  # otherwise a pipe outlives its reader
    if sys.platform == "linux" and of_main:
        ctypes.CDLL(None).prctl(DIES_WITH_PARENT, int(signal.SIGKILL), 0, 0, 0)
    if os.getppid() != parent:  # the parent died before
        return
    if not of_main:
        threading.Thread(target=_end_with, args=(parent,), daemon=True).start()
    torch.set_num_threads(1)
    with contextlib.suppress(EOFError, BrokenPipeError, ConnectionResetError):
        while True:
            serial, slot, epoch, count = pipe.recv()
            begun_s = time.monotonic()
            done = _read(reader, epoch, unpack_ids(count, slots[slot]), slots[slot])
            pipe.send((serial, slot, time.monotonic() - begun_s, *done))


def _read(reader: Reader, epoch: int, ids: Any, slot: Slot) -> tuple[Any, str | None, bool]:
    """Read samples, and write the batch into a slot.

    Returns the position of the batch, the traceback of an exception or None, and whether the batch
    was read but cannot be sent.
    """
    is_read = False
    try:
        read = reader(epoch, ids)
        is_read = True
        return pack(read, slot), None, False
    except BaseException as error:  # noqa: BLE001 - sent to the parent, which reads again
        return (
            None,
            traceback.format_exc()[-MAX_NAMED:],
            is_read and not isinstance(error, OSError | MemoryError),
        )


def _end_with(parent: int) -> None:
    while os.getppid() == parent:
        time.sleep(LOOKS_S)
    os.kill(os.getpid(), signal.SIGKILL)
