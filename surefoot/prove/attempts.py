"""Attempts at a run; each is a process that is forked from one of two interpreters in turn.

Both interpreters have only imported surefoot and torch (`prove.child`). There are two, so that two
consecutive runs, or a killed run and the attempt that resumes it, never share values that Python
draws once per interpreter: the order of its sets and the addresses of its objects.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import re
import signal
import subprocess
import sys
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Self

from surefoot.core.errors import TaskError
from surefoot.core.place import child_environment

TOLD_LINES = 12
ERROR = re.compile(r"^surefoot\.core\.errors\.\w+: ")


@dataclass(frozen=True)
class Kill:
    """Planned SIGKILL of a run.

    It is sent `after_ms` milliseconds after the end of `step` or, if `in_save` is true, after the
    start of the save of that step.
    """

    step: int
    after_ms: float
    in_save: bool


class Interpreters:
    """Context with two interpreters that run attempts (training processes), one at a time.

    The interpreters are killed on exit.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._running: int | None = None

    def __enter__(self) -> Self:
        self._both = [_start(self._folder / f"interpreter-{number}.said") for number in (1, 2)]
        self._turns = itertools.cycle(zip(self._both, (1, 2), strict=True))
        return self

    def __exit__(self, *error: object) -> None:
        if self._running is not None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self._running, signal.SIGKILL)
        for process in self._both:
            process.kill()
            process.communicate()

    def attempt(self, spec: Path, run: Path, *, steps: int, kill: Kill | None = None) -> bool:
        """Train in the run folder `run` up to step `steps`, in a forked process.

        Returns True if it reached that step, and False if it was killed as planned by `kill`.

        Raises:
            TaskError: If the attempt fails for a different reason.
        """
        process, number = next(self._turns)
        said = Path(f"{run}.said")
        words = {
            "spec": str(spec),
            "run": str(run),
            "trace": f"{run}.trace",
            "steps": steps,
            "kill": kill and asdict(kill),
        }
        with contextlib.suppress(BrokenPipeError):
            stdin: Any = process.stdin
            stdin.write(json.dumps({"said": str(said), "attempt": words}) + "\n")
            stdin.flush()
        self._running = self._read(process, self._folder / f"interpreter-{number}.said")
        status = self._read(process, said)
        self._running = None
        if status != 0 and (kill is None or status != -signal.SIGKILL):
            told = (
                _find_last_error(said)
                if status > 0
                else f"it was ended by {signal.Signals(-status).name}"
            )
            raise TaskError(
                f"the run failed by itself: {told}",
                hint="check first that the spec trains: surefoot train SPEC",
            )
        return status == 0

    def _read(self, process: subprocess.Popen[str], said: Path) -> int:
        line = process.stdout.readline()  # type: ignore[union-attr]
        if not line:
            raise TaskError(
                f"no process could be started: {_find_last_error(said)}",
                hint="free some memory, and try again",
            )
        return int(line)


def _start(said: Path) -> subprocess.Popen[str]:
    with said.open("w") as file:
        return subprocess.Popen(
            [sys.executable, "-m", "surefoot.prove.child"],
            env=child_environment(),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=file,
            text=True,
            start_new_session=True,
        )


def _find_last_error(said: Path) -> str:
    return (
        find_last_error(said.read_text(encoding="utf-8", errors="replace")) if said.exists() else ""
    )


def find_last_error(text: str) -> str:
    """Return the error at the end of a process's output, without the traceback before it.

    >>> error = "surefoot.core.errors.TaskError: no such task\\nhint: name it"
    >>> find_last_error(f"Traceback (most recent call last):\\n  File\\n{error}")
    'no such task\\nhint: name it'
    """
    lines = text.strip().splitlines()
    starts = [number for number, line in enumerate(lines) if ERROR.match(line)]
    words = "\n".join(lines[starts[-1] :] if starts else lines[-TOLD_LINES:])
    return ERROR.sub("", words, count=1)
