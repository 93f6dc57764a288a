"""Commands in processes that are forked from this one, which has loaded torch.

Such a command takes a tenth of the time of one in a new interpreter.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path

from surefoot.cli.entry import main
from tests.world.launched import Forked, forked, speak


def call(*words: str | Path) -> int:
    """Run `surefoot words...` in this process; gives the exit code."""
    sys.argv = ["surefoot", *map(str, words)]
    try:
        main()
    except SystemExit as left:
        return left.code if isinstance(left.code, int) else int(left.code is not None)
    return 0


def run_forked(
    *words: str | Path,
    folder: str | Path,
    variables: Mapping[str, str] | None = None,
    prepare: Callable[[], None] = lambda: None,
) -> subprocess.CompletedProcess[str]:
    """`surefoot words...` in a forked process, in a working folder; `prepare` comes first there."""

    def job() -> int:
        os.environ |= variables or {}
        prepare()
        return call(*words)

    return _fork(job, folder, ("surefoot", *map(str, words)))


def start_forked(*words: str | Path, folder: Path) -> Forked:
    """The same, not waited for; what it says is in the file `said` of the folder."""

    def job() -> int:
        with (folder / "said").open("w") as file:
            speak(file.fileno(), file.fileno())
        os.chdir(folder)
        return call(*words)

    return Forked(forked(job), None)


def _fork(
    job: Callable[[], int], folder: str | Path, command: tuple[str, ...]
) -> subprocess.CompletedProcess[str]:
    with tempfile.TemporaryFile("w+") as out, tempfile.TemporaryFile("w+") as error:

        def begin() -> int:
            speak(out.fileno(), error.fileno())
            os.chdir(folder)
            return job()

        code = os.waitstatus_to_exitcode(os.waitpid(forked(begin), 0)[1])
        said = [_read(file.fileno()) for file in (out, error)]
    return subprocess.CompletedProcess(command, code, *said)


def _read(number: int) -> str:
    return os.pread(number, os.fstat(number).st_size, 0).decode(errors="replace")
