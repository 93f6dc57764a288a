"""What the signals that end a program do: by which name they are told, with which exit code, and who hears them."""

from __future__ import annotations

import contextlib
import ctypes
import functools
import math
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from types import FrameType
from typing import Any

from surefoot.core.errors import EXIT_HUNG_UP, EXIT_INTERRUPTED, EXIT_TERMINATED

ENDINGS = {  # signal -> what it does to a run, its name for a person, the exit code
    "SIGINT": ("interrupted by Ctrl-C", "Ctrl-C", EXIT_INTERRUPTED),
    "SIGTERM": ("ended by SIGTERM", "SIGTERM", EXIT_TERMINATED),
    "SIGHUP": ("ended by SIGHUP", "SIGHUP", EXIT_HUNG_UP),
}
DIES_WITH_PARENT = 1  # PR_SET_PDEATHSIG of prctl(2)

# a person presses Ctrl-C twice; a scheduler's signals meet a busy machine
ECHO_S = {"SIGINT": 1.0, "SIGTERM": 5.0, "SIGHUP": 5.0}


def listen(number: int, on_signal: Callable[[], None], *, has_echo: bool = False) -> Callable[[], None]:
    """Let a signal call `on_signal`; gives what puts back what it did before. With `has_echo` those that follow soon do nothing:
    a scheduler sends it to every process of a job, their launcher among them, which sends it to its ranks too.

    Nothing changes outside the main thread, which alone hears signals, nor in a process that was told to ignore this one.
    """
    before, last_s = signal.getsignal(number), -math.inf
    echo_s = ECHO_S[signal.Signals(number).name] if has_echo else 0.0
    if threading.current_thread() is not threading.main_thread() or before in (None, signal.SIG_IGN):
        return lambda: None

    def put_back() -> None:
        signal.signal(number, before)

    def heard(number: int, frame: FrameType | None) -> None:
        nonlocal last_s
        now_s = time.monotonic()
        if now_s - last_s >= echo_s:
            last_s = now_s
            on_signal()

    signal.signal(number, heard)
    return put_back


@contextlib.contextmanager
def ending_by_signal() -> Iterator[None]:
    """SIGTERM and SIGHUP leave this block as an exception, so that what it began, processes and folders, does not outlive it."""

    def end(code: int) -> None:
        raise SystemExit(code)

    with contextlib.ExitStack() as stack:
        for name in ("SIGTERM", "SIGHUP"):
            if hasattr(signal, name):
                stack.callback(listen(getattr(signal, name), functools.partial(end, ENDINGS[name][2])))
        yield


def process_control() -> Any:
    """The system's prctl(2), on Linux; None elsewhere."""
    return ctypes.CDLL(None).prctl if sys.platform.startswith("linux") else None


def dying_with(parent: int) -> Callable[[], None]:
    """What a new process calls first: the kernel ends it with its parent, if that has not ended already."""
    control = process_control()

    def call() -> None:
        if control is not None:
            control(DIES_WITH_PARENT, int(signal.SIGKILL), 0, 0, 0)
        if os.getppid() != parent:  # it ended before the request
            os.kill(os.getpid(), signal.SIGKILL)

    return call
