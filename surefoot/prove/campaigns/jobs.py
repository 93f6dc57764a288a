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
from functools import partial
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch

from surefoot.components import checkpoint
from surefoot.components.checkpoint import Commit
from surefoot.contract import commits, manifest, spec_file
from surefoot.core import place
from surefoot.core.errors import EXIT_INTERRUPTED, RunFolderError, SurefootError
from surefoot.prove.campaigns.probe import ProbedRun
from surefoot.prove.child import begin_process
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
WRITES = os.O_WRONLY | os.O_RDWR
# what happens to a checkpoint, by the audit event and the prefix of the name of its folder
COMMIT_MARKS = {
    ("os.mkdir", commits.DRAFT): "draft",
    ("os.rename", ""): "name",
    ("os.rename", commits.GONE): "retire",
    ("open", ""): "load",
    ("shutil.rmtree", commits.DRAFT): "clear",
}


class Line:
    """The pipe between a trial and its campaign.

    The trial sends marks, texts that name a point that it has reached; the campaign sends a message
    that lets the trial continue.
    """

    def __init__(self, pipe: Connection) -> None:
        self._pipe = pipe

    def mark(self, text: str) -> None:
        self._pipe.send_bytes(text.encode())

    def pause(self, text: str) -> None:
        """Send a mark and wait for a message."""
        self.mark(text)
        self._pipe.recv_bytes()

    def hand_over(self) -> None:
        """Leave the pipe open in the program that this process becomes."""
        os.set_inheritable(self._pipe.fileno(), True)


Job = Callable[[ProbedRun, Line], int]


def begin(job: Job, attempt: ProbedRun, pipe: Connection, said: Path) -> None:
    """Run one job in a new session, with its output in the file `said`."""
    begin_process(said)
    # a shell ignores SIGINT in background jobs
    signal.signal(signal.SIGINT, signal.default_int_handler)
    torch.set_num_threads(1)
    gc.freeze()  # a garbage collection of objects from before the fork would copy their pages
    try:
        raise SystemExit(job(attempt, Line(pipe)))
    except SurefootError as error:
        os.write(2, f"{type(error).__name__}: {error.message}\n".encode())
        raise SystemExit(error.exit_code) from None
    except KeyboardInterrupt:
        raise SystemExit(EXIT_INTERRUPTED) from None


def command(attempt: ProbedRun, line: Line) -> int:
    """Become `surefoot train` on the ranks of the attempt, as a user types it."""
    spec = attempt.folder.with_name("spec.toml")
    spec.write_text(spec_file.write(attempt.spec()))
    words = [sys.executable, "-m", "surefoot", "train", str(spec), "--run", str(attempt.folder)]
    if attempt.ranks > 1:
        words += ["--ranks", str(attempt.ranks), "--max-restarts", str(attempt.restarts)]
    line.hand_over()
    os.execve(sys.executable, [*words, "--quiet"], place.child_environment(threads=1))


def train(attempt: ProbedRun, line: Line) -> int:
    """Train one attempt at a run, and send a mark for each step and each change of a checkpoint.

    The changes are those of `COMMIT_MARKS`: a draft is started or cleared, or a checkpoint is
    named, retired or loaded.
    """
    if attempt.pauses:
        ctypes.CDLL(None).prctl(TRACER, ctypes.c_ulong(2**64 - 1), 0, 0, 0)
    if 0 in attempt.pauses:
        line.pause("paused 0")
    sys.addaudithook(partial(_mark_commit, line))
    with Run(attempt.spec(), folder=attempt.folder, quiet=True) as run:
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
    """Record what happens to checkpoints as marks such as `draft 12`, `name 12`, `retire 3`, `load
    12`.

    `clear 12` marks that an old draft is deleted.
    """
    if event not in ("os.mkdir", "os.rename", "shutil.rmtree", "open") or not isinstance(
        given[0], str | os.PathLike
    ):
        return
    path = Path(given[1] if event == "os.rename" else given[0])
    if event == "open":
        if path.name != "state.json" or not isinstance(given[2], int) or given[2] & WRITES:
            return
        path = path.parent
    prefix, _, step = path.name.rpartition("step-")
    word = COMMIT_MARKS.get((event, prefix))
    if word is not None and step.isdigit():
        line.mark(f"{word} {int(step)}")


def open_run(attempt: ProbedRun, line: Line) -> int:
    """Check the checkpoints of a run and open it.

    Marks each checkpoint as whole or damaged, and the state that was loaded. With
    `attempt.memory_bytes` it runs under that limit of memory, beyond what the process holds before,
    and marks everything that it touches outside of the run.
    """
    if attempt.memory_bytes:
        held = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
        resource.setrlimit(resource.RLIMIT_AS, (held + attempt.memory_bytes,) * 2)
        sys.addaudithook(partial(_mark_outside, line, attempt.folder))
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
    with Run(attempt.spec(), folder=attempt.folder, quiet=True) as run:
        line.mark(state_of(run))
    return 0


def _mark_outside(line: Line, run: Path, event: str, given: tuple[Any, ...]) -> None:
    """Mark opened files beside the run, writes elsewhere, and what runs or loads foreign code.

    A bare name that is opened without following links is below a folder that was opened before, and
    that folder is marked if it is outside.
    """
    if event == "subprocess.Popen" and list(given[1])[:1] == ["git"]:
        # the commit of the task's own project is recorded
        return
    if event in RUNS_CODE:
        line.mark(f"outside {event}")
    elif event == "open" and isinstance(given[0], str | os.PathLike):
        mode = given[2] if isinstance(given[2], int) else 0
        name = given[0] if not mode & os.O_NOFOLLOW else os.path.dirname(given[0])
        path = Path(os.path.realpath(name))
        is_written = mode & WRITES and path != Path(os.devnull)
        if (
            name
            and not path.is_relative_to(run)
            and (path.is_relative_to(run.parent) or is_written)
        ):
            line.mark(f"outside open {path}")
