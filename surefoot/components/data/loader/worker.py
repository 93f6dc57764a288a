"""A worker process: reads what comes through its pipe into slots, until the pipe is closed or its parent dies."""

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
LOOKS_S = 0.2  # for its parent, where the kernel does not
MOST_TOLD = 3_000  # characters of a problem: 4 bytes each, they still go through a pipe at once


def serve(
    pipe: Connection, slots: tuple[Slot, ...], reader: Reader, parent: int, inherited: list[Connection], of_main: bool
) -> None:  # fmt: skip
    """Answer each (serial, slot, epoch, how many ids lie in the slot) with (serial, slot, seconds, where the batch lies, problem).

    `of_main` is whether the main thread of `parent` began this process: the kernel ends it with the thread that did.
    """
    for name, what in (
        ("SIGINT", signal.SIG_IGN),
        ("SIGTERM", signal.SIG_DFL),
        ("SIGHUP", signal.SIG_IGN),
        *((name, signal.SIG_IGN) for name in ("SIGUSR1", "SIGUSR2", "SIGXCPU")),
    ):
        if hasattr(signal, name):  # Ctrl-C reaches the whole group: the run finishes its step first, and needs what is being read
            signal.signal(getattr(signal, name), what)
    for other in inherited:
        other.close()  # else a pipe outlives the one who reads it
    if sys.platform == "linux" and of_main:
        ctypes.CDLL(None).prctl(DIES_WITH_PARENT, int(signal.SIGKILL), 0, 0, 0)
    if os.getppid() != parent:  # it died before
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
    """Where the batch lies; or what was raised, and whether it was read and cannot be sent."""
    is_read = False
    try:
        read = reader(epoch, ids)
        is_read = True
        return pack(read, slot), None, False
    except BaseException as error:  # noqa: BLE001 - the parent is told, and reads it again
        return None, traceback.format_exc()[-MOST_TOLD:], is_read and not isinstance(error, OSError | MemoryError)


def _end_with(parent: int) -> None:
    while os.getppid() == parent:
        time.sleep(LOOKS_S)
    os.kill(os.getpid(), signal.SIGKILL)
