"""Jobs of a forked trial: train a run, or open a damaged one, and report progress as marks.

Marks come from Python's audit events (https://docs.python.org/3/library/audit_events.html), so
nothing under test is replaced.
"""

from __future__ import annotations

import contextlib
import ctypes
import gc
import json
import os
import resource
import signal
import sys
from collections.abc import Callable
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch

from surefoot.components import checkpoint
from surefoot.components.checkpoint import Commit
from surefoot.contract import commits, manifest
from surefoot.core.errors import EXIT_INTERRUPTED, RunFolderError, SurefootError
from surefoot.prove.campaigns.probe import ProbedRun
from surefoot.train.run import Run

# PR_SET_PTRACER of prctl(2): strace may attach, though it is not a parent of this process
TRACER = 0x59616D61
RUNS_CODE = (
    "os.system",
    "os.exec",
    "os.posix_spawn",
    "os.fork",
    "subprocess.Popen",
    "pickle.find_class",
    "socket.connect",
)


class Line:
    """The pipe between a trial and its campaign: marks go out, a message to continue comes in."""

    def __init__(self, pipe: Connection) -> None:
        self._pipe = pipe

    def mark(self, text: str) -> None:
        self._pipe.send_bytes(text.encode())

    def pause(self, text: str) -> None:
        """Send a mark and wait for a message."""
        self.mark(text)
        self._pipe.recv_bytes()


Job = Callable[[ProbedRun, Line], int]


def begin(
    job: Job, attempt: ProbedRun, pipe: Connection, said: Path, plant: Callable[[], None] | None
) -> None:
    """Run one job in a new session, with its output in the file `said`.

    `plant` breaks something first; the tests of the campaigns use it.
    """
    os.setsid()
    # a shell ignores SIGINT in background jobs
    signal.signal(signal.SIGINT, signal.default_int_handler)
    output = os.open(said, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    for target in (1, 2):
        os.dup2(output, target)
    torch.set_num_threads(1)
    gc.freeze()  # a garbage collection of objects from before the fork would copy their pages
    if plant is not None:
        plant()
    try:
        raise SystemExit(job(attempt, Line(pipe)))
    except SurefootError as error:
        os.write(2, f"{type(error).__name__}: {error.message}\n".encode())
        raise SystemExit(error.exit_code) from None
    except KeyboardInterrupt:
        raise SystemExit(EXIT_INTERRUPTED) from None


def train(attempt: ProbedRun, line: Line) -> int:
    """Train one attempt at a run; mark its steps and what happens to its checkpoints.

    A checkpoint is started, named, retired, set aside, loaded or cleared.
    """
    if attempt.pauses:
        ctypes.CDLL(None).prctl(TRACER, ctypes.c_ulong(2**64 - 1), 0, 0, 0)
    if 0 in attempt.pauses:
        line.pause("paused 0")
    sys.addaudithook(lambda event, given: _mark_commit(line, event, given))
    with Run(attempt.spec(), attempt.task(), folder=attempt.folder, quiet=True) as run:
        line.mark("begun")
        if attempt.marks_states:
            line.mark(state_of(run))
        for report in run.steps():
            if run.evaluation_due:
                run.evaluate()
            line.mark(f"step {report.step}")
            if attempt.marks_states:
                line.mark(state_of(run))
            if report.step in attempt.pauses:
                line.pause(f"paused {report.step}")
            if report.step == attempt.die_at:
                os.kill(os.getpid(), signal.SIGKILL)
    return run.exit_code


def state_of(run: Run) -> str:
    return f"state {run.step} {json.dumps(run.state_digests(), sort_keys=True)}"


def _mark_commit(line: Line, event: str, given: tuple[Any, ...]) -> None:
    """Record what happens to checkpoints as marks such as `draft 12`, `name 12`, `retire 3` or
    `load 12`.

    The other marks are `aside 12` (set aside) and `clear 12` (an old draft is deleted).
    """
    if event not in ("os.mkdir", "os.rename", "shutil.rmtree", "open") or not isinstance(
        given[0], str | os.PathLike
    ):
        return
    name, words = Path(given[0]).name, {"draft": commits.DRAFT}
    if event == "open":
        is_read = (
            name == "state.json"
            and isinstance(given[2], int)
            and not given[2] & (os.O_WRONLY | os.O_RDWR)
        )
        name, words = Path(given[0]).parent.name, {"load": ""} if is_read else {}
    elif event == "shutil.rmtree":
        words = {"clear": commits.DRAFT}
    elif event == "os.rename":
        name, words = (
            Path(given[1]).name,
            {"name": "", "retire": commits.GONE, "aside": commits.BAD},
        )
    for word, prefix in words.items():
        if name.startswith(prefix) and (
            hit := manifest.STEP_FOLDER.match(name.removeprefix(prefix))
        ):
            line.mark(f"{word} {int(hit[1])}")


def open_run(attempt: ProbedRun, line: Line) -> int:
    """Check the checkpoints of a run and open it.

    Marks each checkpoint as whole or damaged, and the state that was loaded. With
    `attempt.memory_bytes` it runs under that limit of memory, beyond what the process holds before,
    and marks everything that it touches outside of the run.
    """
    if attempt.memory_bytes:
        held = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
        resource.setrlimit(resource.RLIMIT_AS, (held + attempt.memory_bytes,) * 2)
        _watch_out(attempt.folder, line)
    for folder in sorted((attempt.folder / manifest.FOLDER).glob("step-*")):
        try:
            commits.check(folder)
            line.mark(f"whole {folder.name}")
        except RunFolderError as error:
            line.mark(f"damaged {folder.name} {error.message}")
    with contextlib.suppress(RunFolderError):
        commits.find_best(attempt.folder, steps := manifest.named_steps(attempt.folder))
        newest = Commit(attempt.folder, steps[-1])
        checkpoint.join(
            newest.json("state.json"), newest.read("") and newest.read("state.safetensors")
        )
    with Run(attempt.spec(), attempt.task(), folder=attempt.folder, quiet=True) as run:
        line.mark(state_of(run))
    return 0


def _watch_out(run: Path, line: Line) -> None:
    """Mark opened files beside the run, writes elsewhere, and what runs or loads foreign code.

    A bare name that is opened without following links is below a folder that was opened before, and
    that folder is marked if it is outside.
    """

    def hear(event: str, given: tuple[Any, ...]) -> None:
        if event == "subprocess.Popen" and list(given[1])[:1] == ["git"]:
            # the commit of the task's own project is recorded
            return
        if event in RUNS_CODE:
            line.mark(f"outside {event}")
        elif event == "open" and isinstance(given[0], str | os.PathLike):
            mode = given[2] if isinstance(given[2], int) else 0
            place = given[0] if not mode & os.O_NOFOLLOW else os.path.dirname(given[0])
            path = Path(os.path.realpath(place))
            is_written = mode & (os.O_WRONLY | os.O_RDWR) and path != Path(os.devnull)
            if (
                place
                and not path.is_relative_to(run)
                and (path.is_relative_to(run.parent) or is_written)
            ):
                line.mark(f"outside open {path}")

    sys.addaudithook(hear)
