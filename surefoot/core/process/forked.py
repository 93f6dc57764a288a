"""What processes that are forked from this one inherit: all of its objects, and none of them is theirs to write, to end or to delete."""

from __future__ import annotations

import os
import sys
import threading
import weakref
from collections.abc import Callable
from typing import Any

from surefoot.core.errors import InputError

_calls: weakref.WeakKeyDictionary[Any, Callable[[Any], None]] = weakref.WeakKeyDictionary()
_kept: weakref.WeakSet[Any] = weakref.WeakSet()
_forking = threading.local()  # what a thread that forks hands on
_inherited: list[Any] = []  # of the parent of this process


class Owner:
    """The process in which this is made: what belongs to it is left alone by those that are forked from it."""

    def __init__(self) -> None:
        self._process = os.getpid()

    @property
    def is_here(self) -> bool:
        return os.getpid() == self._process

    def describe(self, what: str) -> str:
        return f"{what} belongs to process {self._process}, and this is process {os.getpid()}, which was forked from it"

    def check(self, what: str) -> None:
        """Raise InputError in another process than the owner."""
        if os.getpid() != self._process:  # asked at every step
            raise InputError(
                self.describe(what),
                hint="call it in that process alone, and send it what this one finds: by a multiprocessing.Queue, or a file",
            )


def call_in_children(owner: Any, call: Callable[[Any], None]) -> None:
    """Call `call(owner)` in every process that is forked from this one while `owner` lives, before the fork returns there."""
    _calls[owner] = call


def make_lock(owner: Any) -> None:
    """Give `owner` a `_lock`, and a new one in each process that is forked from this one: another thread may hold it at the fork, and
    there is no such thread in the child that could release it."""
    owner._lock = threading.Lock()
    call_in_children(owner, make_lock)


def never_end_in_children(owner: Any) -> None:
    """Let no process that is forked from this one finalize `owner`: its `__del__` ends what belongs to this process.

    A child that collects an iterator of a DataLoader raises "can only test a child process" for each worker, on stderr; one that closes
    a generator runs its `finally`, which may delete files that the parent still reads.
    """
    try:
        _kept.add(owner)
    except TypeError:  # of a class that has no weak references, or no hash
        return


def _hold() -> None:
    _forking.held = list(_kept)  # strong references, before the fork: a collection in the child finds them in use


def _let_go() -> None:
    _forking.held = []


def _begin_child() -> None:
    _inherited.extend(_forking.held)
    # the workers of the parent: multiprocessing ends those of its own list when the interpreter ends, whoever began them
    getattr(sys.modules.get("multiprocessing.process"), "_children", set()).clear()
    for owner, call in list(_calls.items()):
        call(owner)


if hasattr(os, "register_at_fork"):
    os.register_at_fork(before=_hold, after_in_parent=_let_go, after_in_child=_begin_child)
