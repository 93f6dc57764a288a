"""Keep forked processes from writing, ending or deleting what they inherit from their parent."""

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
    """The process that made this object; processes forked from it must not use what it owns."""

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
        """Raise InputError in another process than the owner."""
        if os.getpid() != self._process:  # called at every step
            raise InputError(
                self.describe(what),
                hint=(
                    "call it only in that process, and send values to that process by a "
                    "multiprocessing.Queue or a file"
                ),
            )


def uses_gpu() -> bool:
    """Return whether this process has used CUDA, which a process forked from it then cannot use.

    Neither imports torch nor initializes CUDA.
    """
    return bool(getattr(sys.modules.get("torch.cuda"), "is_initialized", bool)())


def call_in_children(owner: Any, call: Callable[[Any], None]) -> None:
    """Call `call(owner)` in every process forked from this one while `owner` lives.

    The call happens before the fork returns in the child.
    """
    _calls[owner] = call


def make_lock(owner: Any) -> None:
    """Give `owner` a `_lock`, and a new one in each process forked from this one.

    Another thread may hold the lock at the fork, and the child has no such thread that could
    release it.
    """
    owner._lock = threading.Lock()
    call_in_children(owner, make_lock)


def never_end_in_children(owner: Any) -> None:
    """Keep processes forked from this one from finalizing `owner`.

    Its `__del__` ends resources of this process. A child that collects an iterator of a DataLoader
    raises "can only test a child process" for each worker, on stderr; one that closes a generator
    runs its `finally`, which may delete files that the parent still reads.
    """
    try:
        _kept.add(owner)
    except TypeError:  # the class has no weak references, or no hash
        return


def _hold() -> None:
    # strong references, before the fork: a collection in the child finds them in use
    _forking.held = list(_kept)
    _forking.uses_gpu = uses_gpu()


def _let_go() -> None:
    _forking.held = []


def _begin_child() -> None:
    _inherited.extend(_forking.held)
    if _forking.uses_gpu:
        # freeing GPU memory aborts a process that cannot use the GPU: do not free it
        gc.freeze()
    # the workers of the parent: multiprocessing ends those in its list at exit, whichever process
    # started them
    getattr(sys.modules.get("multiprocessing.process"), "_children", set()).clear()
    for owner, call in list(_calls.items()):
        call(owner)


if hasattr(os, "register_at_fork"):
    os.register_at_fork(before=_hold, after_in_parent=_let_go, after_in_child=_begin_child)
