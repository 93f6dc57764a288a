"""Signals that end a program: their names, exit codes and handlers."""

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

from surefoot.core.errors import (
    EXIT_CPU_TIME,
    EXIT_HUNG_UP,
    EXIT_INTERRUPTED,
    EXIT_TERMINATED,
    EXIT_USER_SIGNAL,
)
from surefoot.core.process.forked import OwningProcess

ENDINGS = {  # signal -> what it does to a run, its display name, the exit code
    "SIGINT": ("interrupted by Ctrl-C", "Ctrl-C", EXIT_INTERRUPTED),
    "SIGTERM": ("ended by SIGTERM", "SIGTERM", EXIT_TERMINATED),
    "SIGHUP": ("ended by SIGHUP", "SIGHUP", EXIT_HUNG_UP),
    "SIGUSR2": ("ended by SIGUSR2", "SIGUSR2", EXIT_USER_SIGNAL),
    "SIGXCPU": ("ended by SIGXCPU", "SIGXCPU", EXIT_CPU_TIME),
}
# handled only where no handler is set: submitit has one for SIGUSR2
OURS_BY_DEFAULT = ("SIGUSR2", "SIGXCPU")
# requests the stacks of a rank's threads; schedulers send SIGUSR1 and SIGUSR2, but not this one
STACKS_SIGNAL: int = signal.SIGRTMIN + 6 if hasattr(signal, "SIGRTMIN") else signal.SIGUSR2
DIES_WITH_PARENT = 1  # PR_SET_PDEATHSIG of prctl(2)

# seconds in which repetitions are ignored: a user presses Ctrl-C twice; the signals of a scheduler
# arrive late on a busy host
ECHO_S = {"SIGINT": 1.0, **dict.fromkeys(("SIGTERM", "SIGHUP", "SIGUSR2", "SIGXCPU"), 5.0)}
_before: dict[int, Any] = {}  # what each signal did before this process first set a handler


_forking = threading.local()  # the signals that a forking thread had blocked before


def _block_sigterm() -> None:
    """Block SIGTERM during a fork, so that none is lost before the child restores its handler."""
    _forking.blocked = (
        signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM}) if _before else None
    )


def _unblock_sigterm() -> None:
    if _forking.blocked is not None:
        signal.pthread_sigmask(signal.SIG_SETMASK, _forking.blocked)


def _leave_to_child() -> None:
    """Restore, in a forked child, the SIGTERM handler from before the first `listen`.

    `Process.terminate()` and a Pool that ends send SIGTERM to end their children, so the signal
    must have its usual effect there.
    """
    before = _before.pop(signal.SIGTERM, None)
    _before.clear()
    if before is not None:
        signal.signal(signal.SIGTERM, before)
    _unblock_sigterm()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(
        before=_block_sigterm, after_in_parent=_unblock_sigterm, after_in_child=_leave_to_child
    )


def listen(
    number: int, on_signal: Callable[[], None], *, has_echo: bool = False
) -> Callable[[], None]:
    """Call `on_signal` on signal `number`; return a function that restores the previous handler.

    With `has_echo`, repetitions of the signal within `ECHO_S` seconds are ignored. A scheduler
    sends a signal to every process of a job, including the launcher, and the launcher forwards it
    to its ranks.

    In a forked process SIGTERM has its previous handler. Other signals are sent to all processes of
    a job, so a forked process ignores the first one: a worker must live until the end of the step
    that needs it. The second one has its previous effect.

    The handler is not changed outside the main thread, in a process that ignores the signal, and
    for a signal of `OURS_BY_DEFAULT` that already has a handler.
    """
    before, last_s = signal.getsignal(number), -math.inf
    name = signal.Signals(number).name
    echo_s = ECHO_S[name] if has_echo else 0.0
    if name in OURS_BY_DEFAULT and before is not signal.SIG_DFL:
        return lambda: None
    if threading.current_thread() is not threading.main_thread() or before in (
        None,
        signal.SIG_IGN,
    ):
        return lambda: None

    is_outer = number not in _before
    _before.setdefault(number, before)

    def put_back() -> None:
        signal.signal(number, before)
        if is_outer:
            _before.pop(number, None)

    owner, inherited = OwningProcess(), 0  # number of signals that a forked process received

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
def exit_on_signal() -> Iterator[None]:
    """Raise SystemExit inside the block on SIGTERM, SIGHUP, SIGUSR2 or SIGXCPU.

    The code in the block can then clean up its processes and folders. Ctrl-C is not changed.
    """

    def end(code: int) -> None:
        raise SystemExit(code)

    with contextlib.ExitStack() as stack:
        for name in ENDINGS.keys() - {"SIGINT"}:
            if hasattr(signal, name):
                stack.callback(
                    listen(getattr(signal, name), functools.partial(end, ENDINGS[name][2]))
                )
        yield


def process_control() -> Any:
    """Return the C function prctl(2) on Linux; None on other systems."""
    return ctypes.CDLL(None).prctl if sys.platform.startswith("linux") else None


def make_parent_death_hook(parent: int) -> Callable[[], None]:
    """Return a function that a new process must call first, so that it dies with its parent.

    After the call the Linux kernel kills the process when the process `parent` ends. If `parent`
    has already ended, the call kills the process at once.
    """
    control = process_control()

    def call() -> None:
        if control is not None:
            control(DIES_WITH_PARENT, int(signal.SIGKILL), 0, 0, 0)
        if os.getppid() != parent:  # the parent ended before the request
            os.kill(os.getpid(), signal.SIGKILL)

    return call
