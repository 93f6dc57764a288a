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

from surefoot.core.errors import EXIT_CPU_TIME, EXIT_HUNG_UP, EXIT_INTERRUPTED, EXIT_TERMINATED, EXIT_USER_SIGNAL
from surefoot.core.process.forked import Owner

ENDINGS = {  # signal -> what it does to a run, its name for a person, the exit code
    "SIGINT": ("interrupted by Ctrl-C", "Ctrl-C", EXIT_INTERRUPTED),
    "SIGTERM": ("ended by SIGTERM", "SIGTERM", EXIT_TERMINATED),
    "SIGHUP": ("ended by SIGHUP", "SIGHUP", EXIT_HUNG_UP),
    "SIGUSR2": ("ended by SIGUSR2", "SIGUSR2", EXIT_USER_SIGNAL),
    "SIGXCPU": ("ended by SIGXCPU", "SIGXCPU", EXIT_CPU_TIME),
}
OURS_BY_DEFAULT = ("SIGUSR2", "SIGXCPU")  # heard where nobody else does: submitit has a handler of its own for SIGUSR2
# asks a rank for the stacks of its threads: no scheduler sends it, as SIGUSR1 and SIGUSR2 are sent
STACKS_SIGNAL: int = signal.SIGRTMIN + 6 if hasattr(signal, "SIGRTMIN") else signal.SIGUSR2
DIES_WITH_PARENT = 1  # PR_SET_PDEATHSIG of prctl(2)

# a person presses Ctrl-C twice; a scheduler's signals meet a busy machine
ECHO_S = {"SIGINT": 1.0, **dict.fromkeys(("SIGTERM", "SIGHUP", "SIGUSR2", "SIGXCPU"), 5.0)}
_before: dict[int, Any] = {}  # of what this process listens to: what each signal did before the first


_forking = threading.local()  # the signals that a thread which forks had blocked before


def _hold_back() -> None:
    """A SIGTERM to a child is not lost that comes before the child has put back what it does."""
    _forking.blocked = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM}) if _before else None


def _let_through() -> None:
    if _forking.blocked is not None:
        signal.pthread_sigmask(signal.SIG_SETMASK, _forking.blocked)


def _leave_to_child() -> None:
    """What this process set for SIGTERM is not its children's: `terminate()`, and leaving a Pool, send it to end them."""
    before = _before.pop(signal.SIGTERM, None)
    _before.clear()
    if before is not None:
        signal.signal(signal.SIGTERM, before)
    _let_through()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(before=_hold_back, after_in_parent=_let_through, after_in_child=_leave_to_child)


def listen(number: int, on_signal: Callable[[], None], *, has_echo: bool = False) -> Callable[[], None]:
    """Let a signal call `on_signal`; gives what puts back what it did before. With `has_echo` those that follow soon do nothing:
    a scheduler sends it to every process of a job, their launcher among them, which sends it to its ranks too.

    A process that this one forks hears SIGTERM as before. Other signals reach a whole job: the first one does nothing there, so that
    workers outlive the step that needs them, and a second one does what it did before.

    Nothing changes outside the main thread, which alone hears signals, nor in a process that was told to ignore this one, or that has a
    handler for one of `OURS_BY_DEFAULT`.
    """
    before, last_s = signal.getsignal(number), -math.inf
    name = signal.Signals(number).name
    echo_s = ECHO_S[name] if has_echo else 0.0
    if name in OURS_BY_DEFAULT and before is not signal.SIG_DFL:
        return lambda: None
    if threading.current_thread() is not threading.main_thread() or before in (None, signal.SIG_IGN):
        return lambda: None

    is_outer = number not in _before
    _before.setdefault(number, before)

    def put_back() -> None:
        signal.signal(number, before)
        if is_outer:
            _before.pop(number, None)

    owner, inherited = Owner(), 0  # how many came to a process that inherits this

    def heard(number: int, frame: FrameType | None) -> None:
        nonlocal last_s, inherited
        now_s = time.monotonic()
        if now_s - last_s < echo_s:
            return
        last_s = now_s
        if owner.is_here:
            on_signal()
            return
        inherited += 1
        if inherited > 1:
            signal.signal(number, before)
            os.kill(os.getpid(), number)

    signal.signal(number, heard)
    return put_back


@contextlib.contextmanager
def ending_by_signal() -> Iterator[None]:
    """Signals that end, but for Ctrl-C, leave this block as an exception: processes and folders that it began do not outlive it."""

    def end(code: int) -> None:
        raise SystemExit(code)

    with contextlib.ExitStack() as stack:
        for name in ENDINGS.keys() - {"SIGINT"}:
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
