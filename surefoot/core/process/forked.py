"""Prevent forked child processes from damaging files, locks and objects of their parent."""

from __future__ import annotations

import gc
import os
import sys
import threading
import weakref
from collections.abc import Callable
from typing import Any

from surefoot.core.errors import InputError

_calls: weakref.WeakKeyDictionary[Any, Callable[[Any], None]] = weakref.WeakKeyDictionary()
_kept: weakref.WeakSet[Any] = weakref.WeakSet()
_forking = threading.local()  # what a forking thread passes to the child
_inherited: list[Any] = []  # objects of the parent of this process


class OwningProcess:
    """Guard of an object that may be used only in the process that created it, not after a fork."""

    def __init__(self) -> None:
        self._process = os.getpid()

    @property
    def is_here(self) -> bool:
        return os.getpid() == self._process

    def describe(self, what: str) -> str:
        return (
            f"{what} belongs to process {self._process}, but this is process {os.getpid()}, "
            "which was forked from it"
        )

    def check(self, what: str) -> None:
        """Raise InputError if this process is not the one that created the object.

        `what` names the object in the message.
        """
        if os.getpid() != self._process:  # called at every step
            raise InputError(
                self.describe(what),
                hint=(
                    "call it only in that process, and send values to that process by a "
                    "multiprocessing.Queue or a file"
                ),
            )


def uses_gpu() -> bool:
    """Return whether this process has initialized CUDA; its forked children then cannot use CUDA.

    The check neither imports torch nor initializes CUDA.
    """
    return bool(getattr(sys.modules.get("torch.cuda"), "is_initialized", bool)())


def call_in_children(owner: Any, call: Callable[[Any], None]) -> None:
    """Register `call(owner)` to run in every process that is forked from this one.

    The call runs in the child before the fork returns there. The registration ends when `owner` is
    garbage-collected.
    """
    _calls[owner] = call


def make_lock(owner: Any) -> None:
    """Set `owner._lock` to a new lock, now and in each process that is forked from this one.

    If another thread holds the lock during a fork, the child inherits a locked lock, but not the
    thread that could release it.
    """
    owner._lock = threading.Lock()
    call_in_children(owner, make_lock)


def never_end_in_children(owner: Any) -> None:
    """Prevent the finalizer of `owner` from running in processes forked from this one.

    The finalizer would release resources of this process. For example, a child that collects a
    DataLoader iterator prints "can only test a child process" to stderr for each worker. A child
    that closes a generator runs its `finally` block, which may delete files that the parent still
    reads.
    """
    try:
        _kept.add(owner)
    except TypeError:  # the class has no weak references, or no hash
        return


def _hold() -> None:
    # strong references from before the fork, so that garbage collection in the child frees nothing
    _forking.held = list(_kept)


def _let_go() -> None:
    _forking.held = []


def _begin_child() -> None:
    _inherited.extend(_forking.held)
    # Do not free the parent's garbage. Freeing a destroyed process group would wait forever for
    # threads that the child does not have; freeing GPU memory would abort the child.
    gc.freeze()
    # the workers of the parent: at exit multiprocessing ends all workers in its list, even those
    # that another process started
    getattr(sys.modules.get("multiprocessing.process"), "_children", set()).clear()
    for owner, call in list(_calls.items()):
        call(owner)


if hasattr(os, "register_at_fork"):
    os.register_at_fork(before=_hold, after_in_parent=_let_go, after_in_child=_begin_child)
