"""Exit code of a script that uses Run: that of `surefoot train`, unless the script calls sys.exit.

Without it a script that reaches its end would return 0 although SIGTERM or Ctrl-C had ended its
run, and a scheduler would count the job as done. No exception is raised, so that the script can
continue after its `with` block; the code is set when the interpreter exits.
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
    """Running script of this process, and the exit codes of its interrupted runs, by folder."""

    def __init__(self) -> None:
        self._frame: FrameType | None = None
        self._process = 0
        self._codes: dict[Path, int] = {}

    def watch(self) -> None:
        """Find the running script, once per process.

        There is none in a notebook, an interactive session, or a thread of another program.
        """
        if self._process == os.getpid():
            return
        self._process, self._frame, self._codes = os.getpid(), _find_script(), {}
        # called before atexit, so that all which is registered there runs once
        begin = getattr(threading, "_register_atexit", None)
        if self._frame is not None and begin is not None:
            begin(self._end)

    def record(self, folder: Path, exit_code: int) -> None:
        """Record the exit code of the run in `folder`: 0 if the run was not interrupted."""
        self._codes.pop(folder, None)
        if exit_code != EXIT_OK:
            self._codes[folder] = exit_code

    def find_code(self) -> int:
        """Return the exit code for a script that has ended; 0 if Python's exit code is right."""
        if self._frame is None or self._process != os.getpid():
            return EXIT_OK
        if self._frame.f_code.co_code[self._frame.f_lasti] in RETURNS:
            return next(reversed(self._codes.values()), EXIT_OK)
        # what Python has just printed; an exit leaves it as it was
        error = getattr(sys, "last_value", None)
        return (
            error.exit_code
            if isinstance(error, SurefootError) and _has_frame(error, self._frame)
            else EXIT_OK
        )

    def _end(self) -> None:
        code = self.find_code()
        self._frame = None  # the call below comes here once more
        if code != EXIT_OK:
            # ends the interpreter as it would end now, with this code
            ctypes.pythonapi.Py_Exit(code)


def _find_script() -> FrameType | None:
    """Return this thread's outermost frame if it is a script or a module run by `python -m`."""
    main = sys.modules.get("__main__")
    frames = [frame for frame, _ in traceback.walk_stack(None)]
    while frames and frames[-1].f_globals.get("__name__") == RUNNER:
        frames.pop()
    last = frames[-1] if frames else None
    is_script = (
        last is not None
        and last.f_code.co_name == "<module>"
        and last.f_globals is getattr(main, "__dict__", None)
    )
    return last if is_script and getattr(main, "__file__", None) else None


def _has_frame(error: BaseException, frame: FrameType) -> bool:
    trace = error.__traceback__
    while trace is not None and trace.tb_frame is not frame:
        trace = trace.tb_next
    return trace is not None


script = _Script()
