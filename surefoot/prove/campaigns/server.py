"""The process that forks trials: torch is loaded once, so that a trial costs its own steps and not seconds of imports.

It reads a line of JSON for each request and answers with one. It has one thread, and forks nothing but what it is asked for.
"""

from __future__ import annotations

import gc
import json
import os
import signal
import sys
import tempfile
import traceback
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from surefoot.core.errors import EXIT_INTERNAL, EXIT_INTERRUPTED, EXIT_OK, SurefootError
from surefoot.prove.campaigns import jobs
from surefoot.prove.campaigns.probe import Attempt
from surefoot.train.run import Run, drive

Plant = Callable[[], None]
NOTHING: Mapping[str, Plant] = {}


def main(planted: Mapping[str, Plant] = NOTHING) -> None:
    """Serve until standard input ends. `planted` faults by name are for tests: a child may be asked to break something of ours first."""
    _warm_up()
    gc.freeze()  # a child neither looks through what was loaded before the fork nor copies its pages
    _answer({"ready": os.getpid()})
    for line in sys.stdin:
        request: dict[str, Any] = json.loads(line)
        if "wait" in request:
            _, status = os.waitpid(request["wait"], 0)
            _answer({"status": os.waitstatus_to_exitcode(status)})
            continue
        child = os.fork()
        if child == 0:
            os._exit(_be_child(request, planted))  # taking the interpreter apart would cost more than the trial
        _answer({"pid": child})


def _answer(row: Mapping[str, Any]) -> None:
    os.write(1, json.dumps(row).encode() + b"\n")


def _warm_up() -> None:
    """Load what a run loads when it first needs it, so that no trial does."""
    with tempfile.TemporaryDirectory() as folder, Run(
        (attempt := Attempt(run=f"{folder}/run", steps=2)).spec(), attempt.task(), folder=attempt.folder, quiet=True
    ) as run:  # fmt: skip
        drive(run)


def _be_child(request: Mapping[str, Any], planted: Mapping[str, Plant]) -> int:
    """A session of its own, its words in a file, its marks in a pipe; what it does is one job."""
    os.setsid()
    signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell that started the campaign beside itself had it ignored
    said = os.open(request["said"], os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    nothing = os.open(os.devnull, os.O_RDONLY)
    for source, target in ((nothing, 0), (said, 1), (said, 2)):
        os.dup2(source, target)
    line = jobs.Line(Path(request["line"]))
    if request["planted"] is not None:
        planted[request["planted"]]()
    try:
        return jobs.JOBS[request["job"]](request["words"], line)
    except SurefootError as error:
        os.write(2, f"{type(error).__name__}: {error.message}\n".encode())
        return error.exit_code
    except KeyboardInterrupt:
        return EXIT_INTERRUPTED
    except SystemExit as leave:
        return leave.code if isinstance(leave.code, int) else EXIT_OK
    except BaseException:  # noqa: BLE001 - it must not go on as the process that forks
        os.write(2, traceback.format_exc().encode())
        return EXIT_INTERNAL


if __name__ == "__main__":
    main()
