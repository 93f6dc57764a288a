"""The exit code of a script that uses Run: that of the command `surefoot train`, unless the script decides it by sys.exit.

A script that falls off its end would give 0 although SIGTERM or Ctrl-C had ended its run, and a scheduler would take it as done. No
exception is raised for that, so that the script goes on after its `with` block as it likes; when the interpreter ends, the code is set.
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
RUNNER = "runpy"  # what stands above the script in `python -m package.module`


class _Script:
    """The script that this process runs, and the exit codes of its interrupted runs, by folder."""

    def __init__(self) -> None:
        self._frame: FrameType | None = None
        self._process = 0
        self._codes: dict[Path, int] = {}

    def watch(self) -> None:
        """Look for the script once a process; in a notebook, an interactive session or another program's thread there is none."""
        if self._process == os.getpid():
            return
        self._process, self._frame, self._codes = os.getpid(), _find_script(), {}
        begin = getattr(
            threading, "_register_atexit", None
        )  # called before atexit, so that all which is registered there runs once
        if self._frame is not None and begin is not None:
            begin(self._end)

    def record(self, folder: Path, exit_code: int) -> None:
        """Record how the run in `folder` ended: 0 where nothing interrupted it."""
        self._codes.pop(folder, None)
        if exit_code != EXIT_OK:
            self._codes[folder] = exit_code

    def find_code(self) -> int:
        """The exit code that a script which is over should have; 0 where Python's own is right."""
        if self._frame is None or self._process != os.getpid():
            return EXIT_OK
        if self._frame.f_code.co_code[self._frame.f_lasti] in RETURNS:
            return next(reversed(self._codes.values()), EXIT_OK)
        error = getattr(sys, "last_value", None)  # what Python has just printed; an exit leaves it as it was
        return error.exit_code if isinstance(error, SurefootError) and _passed_through(error, self._frame) else EXIT_OK

    def _end(self) -> None:
        code = self.find_code()
        self._frame = None  # the call below comes here once more
        if code != EXIT_OK:
            ctypes.pythonapi.Py_Exit(code)  # ends the interpreter as it would end now, with this code


def _find_script() -> FrameType | None:
    """The outermost frame of this thread where that is a script's, or a module's that `python -m` runs."""
    main = sys.modules.get("__main__")
    frames = [frame for frame, _ in traceback.walk_stack(None)]
    while frames and frames[-1].f_globals.get("__name__") == RUNNER:
        frames.pop()
    last = frames[-1] if frames else None
    is_script = last is not None and last.f_code.co_name == "<module>" and last.f_globals is getattr(main, "__dict__", None)
    return last if is_script and getattr(main, "__file__", None) else None


def _passed_through(error: BaseException, frame: FrameType) -> bool:
    trace = error.__traceback__
    while trace is not None and trace.tb_frame is not frame:
        trace = trace.tb_next
    return trace is not None


script = _Script()
