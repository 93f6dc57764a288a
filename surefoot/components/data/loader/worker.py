"""A worker process: reads what comes through its pipe into slots, until the pipe is closed or its parent dies."""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import sys
import traceback
from multiprocessing.connection import Connection

import torch

from surefoot.components.data.loader.jobs import Reader
from surefoot.components.data.loader.ring import Slot, pack

DIES_WITH_PARENT = 1  # PR_SET_PDEATHSIG of prctl(2)


def serve(pipe: Connection, slots: tuple[Slot, ...], reader: Reader, parent: int, inherited: list[Connection]) -> None:
    """Answer each (serial, slot, epoch, ids) with (serial, slot, problem), and with the message of `pack` where there is none."""
    for name, what in (
        ("SIGINT", signal.SIG_IGN),
        ("SIGTERM", signal.SIG_DFL),
        ("SIGHUP", signal.SIG_IGN),
        ("SIGUSR1", signal.SIG_IGN),
    ):
        if hasattr(signal, name):  # Ctrl-C reaches the whole group: the run finishes its step first, and needs what is being read
            signal.signal(getattr(signal, name), what)
    for other in inherited:
        other.close()  # else a pipe outlives the one who reads it
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(DIES_WITH_PARENT, int(signal.SIGKILL), 0, 0, 0)
    if os.getppid() != parent:  # it died before
        return
    torch.set_num_threads(1)
    with contextlib.suppress(EOFError, BrokenPipeError, ConnectionResetError):
        while True:
            serial, slot, epoch, ids = pipe.recv()
            try:
                content = pack(reader(epoch, ids), slots[slot])
            except BaseException:  # noqa: BLE001 - the parent is told, and reads it again
                pipe.send((serial, slot, traceback.format_exc()))
            else:
                pipe.send((serial, slot, None))
                pipe.send_bytes(content)
