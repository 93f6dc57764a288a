"""Python programs that a test starts, as forks of this process, which has loaded torch.

Such a program has a process, group, environment and output of its own, as any other. It lacks what
a new interpreter brings: an import of everything, and an address space of its own size.
"""

from __future__ import annotations

import logging
import multiprocessing.process
import os
import runpy
import signal
import subprocess
import sys
import tempfile
import threading
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from multiprocessing import forkserver, resource_tracker
from pathlib import Path
from typing import Any, NoReturn

import pytest

STANDARD = {0: "r", 1: "w", 2: "w"}


@pytest.fixture
def programs_are_forked() -> Iterator[None]:
    """A test's `python -m module` and `python file` are forks."""
    with forking():
        yield


@contextmanager
def forking() -> Iterator[None]:
    """`python -m module` and `python file` are forked; whatever else is started is started.

    This holds in the forks, too.
    """
    start: Callable[..., int] = subprocess._fork_exec  # type: ignore[attr-defined]

    def fork_or_start(words: Sequence[str], *given: Any) -> int:
        # a process group, a user, a umask or a function that comes first: an interpreter of its own
        has_more = any(each not in (None, -1) for each in given[15:21])
        if words[0] != sys.executable or _program(words) is None or has_more:
            return start(words, *given)
        pid = os.fork()
        if pid == 0:
            _leave(lambda: _begin(list(map(os.fsdecode, words)), *given[:15]))
        return pid

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(subprocess, "_fork_exec", fork_or_start)
        yield


def _program(words: Sequence[str]) -> int | None:
    """The place of `-m` or of the file among the words of an interpreter; None without one."""
    for place, word in enumerate(words[1:], start=1):
        if word == "-m" or word.endswith(".py"):
            return place
        if word not in ("-I", "-S", "-P", "-E", "-u"):
            return None
    return None


def _begin(
    words: Sequence[str],
    executables: Sequence[bytes],
    close_fds: bool,
    kept: Sequence[int],
    folder: str | os.PathLike[str] | None,
    variables: Sequence[bytes] | None,
    *ends: Any,
) -> None:
    """What the C function does between a fork and the program, and the program."""
    reads, _, _, writes, _, errs, _, told, _, is_new_session = ends
    if folder is not None:
        os.chdir(folder)
    if is_new_session:
        os.setsid()
    # copies first: a standard one may itself be among those to be put over
    copies = {
        number: os.dup(end)
        for number, end in enumerate((reads, writes, errs))
        if end not in (-1, number)
    }
    for number, copy in copies.items():
        os.dup2(copy, number)
    for number in (0, 1, 2):
        os.set_inheritable(number, True)
    for number in kept:
        if number != told:
            os.set_inheritable(number, True)
    if variables is not None:
        pairs = (os.fsdecode(each).partition("=") for each in variables)
        _exec(words, {name: value for name, _, value in pairs})
    else:
        _exec(words, dict(os.environ))


def _exec(words: Sequence[str], variables: Mapping[str, str]) -> None:
    """Be the program `words` to the end: what is left of the one before is as after an exec."""
    _close_what_an_exec_closes()
    os.environ.clear()
    os.environ.update(variables)
    _forget()
    be(words)


def be(words: Sequence[str]) -> None:
    """Run what an interpreter is told to by the words of its command line, the first its own."""
    place = _program(words)
    assert place is not None
    is_module = words[place] == "-m"
    first = os.getcwd() if is_module else str(Path(words[place]).resolve().parent)
    paths = os.environ.get("PYTHONPATH", "").split(os.pathsep)
    sys.path[:0] = [first, *filter(None, paths)]
    if is_module:
        module, sys.argv = words[place + 1], list(words[place + 1 :])
        runpy.run_module(module, run_name="__main__", alter_sys=True)
    else:
        sys.argv = list(words[place:])
        runpy.run_path(words[place], run_name="__main__")


def _exec_instead(file: str, words: Sequence[str]) -> NoReturn:
    _leave(lambda: _exec(words, dict(os.environ)))


def _close_what_an_exec_closes() -> None:
    for number in map(int, os.listdir("/proc/self/fd")):
        try:
            if number > 2 and not os.get_inheritable(number):
                os.close(number)
        except OSError:  # the one of the listing
            continue


def _forget() -> None:
    """Leave behind what pytest and a test set in the process that was forked."""
    import torch

    for number in signal.valid_signals():
        if callable(signal.getsignal(number)):
            signal.signal(number, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    for descriptor, mode in STANDARD.items():
        name = ("stdin", "stdout", "stderr")[descriptor]
        stream = os.fdopen(descriptor, mode, buffering=1, closefd=False)
        setattr(sys, name, stream)
        setattr(sys, f"__{name}__", stream)
    sys.excepthook, sys.unraisablehook = sys.__excepthook__, sys.__unraisablehook__
    threading.excepthook = threading.__excepthook__
    warnings.resetwarnings()
    for kind in (DeprecationWarning, PendingDeprecationWarning, ImportWarning, ResourceWarning):
        warnings.simplefilter("ignore", kind)
    warnings.filterwarnings("ignore", "'surefoot.* found in sys.modules", RuntimeWarning)
    logging.root.handlers.clear()
    tempfile.tempdir = None
    # processes that multiprocessing has started for this one are not the program's
    multiprocessing.process._children.clear()  # type: ignore[attr-defined]
    for each in (resource_tracker._resource_tracker, forkserver._forkserver):
        each.__init__()  # type: ignore[misc]
    # where spawned processes look for a script that has a relative path
    multiprocessing.process.ORIGINAL_DIR = os.getcwd()  # type: ignore[attr-defined]
    torch.set_num_threads(1)  # the threads of a pool are not there after a fork
    os.execvp = _exec_instead  # type: ignore[assignment]


def _leave(program: Callable[[], None]) -> NoReturn:
    """Run a program and end this process with its exit code."""
    code = 1
    try:
        program()
        code = 0
    except SystemExit as end:
        code = end.code if isinstance(end.code, int) else int(end.code is not None)
        if isinstance(end.code, str):
            print(end.code, file=sys.stderr)
    except BaseException:  # noqa: BLE001 - told as an interpreter does
        sys.excepthook(*sys.exc_info())
    finally:
        for stream in (sys.stdout, sys.stderr):
            stream.flush()
        os._exit(code)
