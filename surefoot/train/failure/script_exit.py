"""Exit code of a script that uses Run, after SIGTERM or Ctrl-C has ended a run.

The script ends with the exit code that `surefoot train` would have, unless it calls sys.exit.
Otherwise the exit code would be 0, and a scheduler would count the job as done. No exception is
raised, so that the script can continue after its `with` block. The code is set when the interpreter
exits.
"""

from __future__ import annotations

import ctypes
import dis
import os
import sys
import threading
import traceback
from pathlib import Path
from types import FrameType

from surefoot.core.errors import EXIT_OK, SurefootError

RETURNS = tuple(dis.opmap[name] for name in ("RETURN_VALUE", "RETURN_CONST") if name in dis.opmap)
RUNNER = "runpy"  # the outermost frames of `python -m package.module`


class _Script:
    """Running script of this process, and the exit codes of its interrupted runs by run folder."""

    def __init__(self) -> None:
        self._frame: FrameType | None = None
        self._process = 0
        self._codes: dict[Path, int] = {}

    def watch(self) -> None:
        """Find the running script, once per process.

        A notebook, an interactive session and a thread of another program have no script.
        """
        if self._process == os.getpid():
            return
        self._process, self._frame, self._codes = os.getpid(), _find_script(), {}
        # called before atexit, so that each function registered there runs once
        begin = getattr(threading, "_register_atexit", None)
        if self._frame is not None and begin is not None:
            begin(self._end)

    def record(self, folder: Path, exit_code: int) -> None:
        """Record the exit code of the run in `folder`: 0 if the run was not interrupted."""
        self._codes.pop(folder, None)
        if exit_code != EXIT_OK:
            self._codes[folder] = exit_code

    def find_code(self) -> int:
        """Return the exit code of a script that has ended; 0 to leave Python's unchanged."""
        if self._frame is None or self._process != os.getpid():
            return EXIT_OK
        if self._frame.f_code.co_code[self._frame.f_lasti] in RETURNS:
            return next(reversed(self._codes.values()), EXIT_OK)
        # the error that Python has just printed; SystemExit does not set it
        error = getattr(sys, "last_value", None)
        return (
            error.exit_code
            if isinstance(error, SurefootError) and _has_frame(error, self._frame)
            else EXIT_OK
        )

    def _end(self) -> None:
        code = self.find_code()
        self._frame = None  # the call below calls this function again
        if code != EXIT_OK:
            # ends the interpreter as usual, but with this exit code
            ctypes.pythonapi.Py_Exit(code)


def _find_script() -> FrameType | None:
    """Return the outermost frame of this thread if it is the program that Python was started with.

    Such a program is a file, a module, the text of `-c` or standard input. Returns None in a
    thread, an interactive session, a notebook and a program that embeds Python.
    """
    is_interactive = hasattr(sys, "ps1") or sys.flags.inspect
    frames = [frame for frame, _ in traceback.walk_stack(sys._getframe())]
    while frames and frames[-1].f_globals.get("__name__") == RUNNER:
        frames.pop()
    if is_interactive or not sys.orig_argv or not frames:
        return None
    last = frames[-1]
    # not `sys.modules["__main__"]`, which runpy replaces while it runs a file
    is_main = last.f_code.co_name == "<module>" and last.f_globals.get("__name__") == "__main__"
    return last if is_main else None


def _has_frame(error: BaseException, frame: FrameType) -> bool:
    trace = error.__traceback__
    while trace is not None and trace.tb_frame is not frame:
        trace = trace.tb_next
    return trace is not None


script = _Script()
