"""Fork server: a process that imports all modules once and then forks the ranks of a run.

Its client is the supervisor, in `control/launch/forks.py`. The server does no training and has only
one thread.
"""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import gc
import io
import json
import os
import random
import signal
import socket
import sys
import threading
from collections.abc import Mapping, Sequence
from typing import Any

from surefoot.control.launch.forks import MAX_BYTES, name_process
from surefoot.core import place
from surefoot.core.process import signals
from surefoot.core.process.forked import uses_gpu

MAX_DESCRIPTORS = 8
ENDINGS = tuple(getattr(signal, name) for name in signals.ENDINGS if hasattr(signal, name))


def serve(descriptor: int) -> None:
    """Serve the requests of the supervisor: fork a rank, or wait for the exit status of one.

    The function returns only in the forked ranks. The server itself exits when the supervisor
    closes the socket.

    Args:
        descriptor: file descriptor of the socket to the supervisor.
    """
    # a scheduler sends these signals to all processes; the ranks handle them
    before = {number: signal.signal(number, signal.SIG_IGN) for number in ENDINGS}
    with socket.socket(fileno=descriptor) as link:
        _load()
        gc.collect()
        # garbage collection in a rank then skips these objects and copies none of their pages
        gc.freeze()
        link.send(json.dumps({"fit": _can_fork()}).encode())
        while True:
            content, given, _, _ = socket.recv_fds(link, MAX_BYTES, MAX_DESCRIPTORS)
            if not content:
                sys.exit()
            request: dict[str, Any] = json.loads(content)
            if "wait" in request:
                answer = {"status": os.waitstatus_to_exitcode(os.waitpid(request["wait"], 0)[1])}
            else:
                me, child = os.getpid(), os.fork()
                if child == 0:
                    for number, how in before.items():
                        signal.signal(number, how)
                    return _become_rank(me, request, given)
                answer = {"pid": child}
                for each in given:
                    os.close(each)
            link.send(json.dumps(answer).encode())


def _load() -> None:
    """Import the modules that every rank uses, lazy imports included, before the first fork."""

    from surefoot.cli import options

    options.import_torch()
    import surefoot.cli.main
    import surefoot.tasks
    import surefoot.train.run  # noqa: F401


def leave(code: int) -> None:
    """Exit the process with `code`, but skip Python's teardown of the imported modules.

    The teardown takes a third of a second, during which the other ranks would wait. As in a normal
    exit, threads are joined, `atexit` callbacks run, and open files are flushed.
    """
    # before any collection: in a cycle Python may close a file before its buffered text is written
    _write_open_files()
    threading._shutdown()  # type: ignore[attr-defined]
    atexit._run_exitfuncs()
    _write_open_files()
    os._exit(code)


def _write_open_files() -> None:
    for each in gc.get_objects():  # objects from before the fork are frozen, and not in this list
        if issubclass(type(each), io.TextIOWrapper | io.BufferedWriter | io.BufferedRandom):
            with contextlib.suppress(OSError, ValueError):
                each.flush()
    ctypes.CDLL(None).fflush(None)


def _can_fork() -> bool:
    """Return whether this process can fork safely: it has one thread and no initialized CUDA.

    A monitoring agent, for example, may have started a second thread.
    """
    return (
        threading.active_count() == 1 and len(os.listdir("/proc/self/task")) == 1 and not uses_gpu()
    )


def _become_rank(parent: int, request: Mapping[str, Any], given: Sequence[int]) -> None:
    """Turn this forked process into a rank: set what a launcher sets for a new process.

    The rank gets a process group, output streams, environment variables, random seeds and a process
    name. It is killed when the fork server ends.

    Args:
        parent: process id of the fork server.
        request: the supervisor's request, with the environment variables of the rank.
        given: file descriptors that were sent with the request.
    """
    os.setpgid(0, 0)
    signals.make_parent_death_hook(parent)()
    if not request["speaks"]:
        nowhere = os.open(os.devnull, os.O_WRONLY)
        for source, target in ((nowhere, 1), (given[-1], 2)):
            os.dup2(source, target)
            os.close(source)
    numbers = dict(zip(request["passed"], map(str, given), strict=False))
    for name, value in (request["variables"] | numbers).items():
        place.set_variable(name, value)
    random.seed()  # a new seed, as in a new process
    if "numpy" in sys.modules:
        sys.modules["numpy"].random.seed()
    name_process(f"surefoot:{request['variables']['RANK']}")
