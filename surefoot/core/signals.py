"""What the signals that end a program do: by which name they are told, with which exit code, and who hears them."""

from __future__ import annotations

import contextlib
import functools
import signal
import threading
from collections.abc import Callable, Iterator
from types import FrameType

from surefoot.core.errors import EXIT_HUNG_UP, EXIT_INTERRUPTED, EXIT_TERMINATED

ENDINGS = {  # signal -> what it does to a run, its name for a person, the exit code
    "SIGINT": ("interrupted by Ctrl-C", "Ctrl-C", EXIT_INTERRUPTED),
    "SIGTERM": ("ended by SIGTERM", "SIGTERM", EXIT_TERMINATED),
    "SIGHUP": ("ended by SIGHUP", "SIGHUP", EXIT_HUNG_UP),
}


def listen(number: int, on_signal: Callable[[], None]) -> Callable[[], None]:
    """Let a signal call `on_signal`; gives what puts back what it did before.

    Nothing changes outside the main thread, which alone hears signals, nor in a process that was told to ignore this one.
    """
    before = signal.getsignal(number)
    if threading.current_thread() is not threading.main_thread() or before in (None, signal.SIG_IGN):
        return lambda: None

    def put_back() -> None:
        signal.signal(number, before)

    def heard(number: int, frame: FrameType | None) -> None:
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
