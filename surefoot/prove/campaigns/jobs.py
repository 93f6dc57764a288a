"""Jobs of a forked process: train a run, or open a damaged one, and report progress as marks.

A mark is a text that names a point in the job. Marks come from Python's audit events
(https://docs.python.org/3/library/audit_events.html), so that no code under test is replaced.
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
# name of the mark, by audit event and prefix of the name of the checkpoint folder
COMMIT_MARKS = {
    ("os.mkdir", commits.DRAFT): "draft",
    ("os.rename", ""): "name",
    ("os.rename", commits.GONE): "retire",
    ("open", ""): "load",
    ("shutil.rmtree", commits.DRAFT): "clear",
}


class Line:
    """Pipe between a trial's process and its campaign.

    The process sends marks, which are texts that name a point that it has reached. The campaign
    sends a message that lets a paused process continue.
    """

    def __init__(self, pipe: Connection) -> None:
        self._pipe = pipe

    def mark(self, text: str) -> None:
        self._pipe.send_bytes(text.encode())

    def pause(self, text: str) -> None:
        """Send the mark `text` and wait for a message."""
        self.mark(text)
        self._pipe.recv_bytes()

    def hand_over(self) -> None:
        """Keep the pipe open in the program that this process executes next."""
        os.set_inheritable(self._pipe.fileno(), True)


Job = Callable[[ProbedRun, Line], int]


def begin(job: Job, attempt: ProbedRun, pipe: Connection, said: Path) -> None:
    """Run `job` in a new session, with its output in the file `said`; exit with its exit code."""
    begin_process(said)
    # a shell ignores SIGINT in background jobs
    signal.signal(signal.SIGINT, signal.default_int_handler)
    torch.set_num_threads(1)
    gc.freeze()  # collecting objects from before the fork would copy their pages
    try:
        raise SystemExit(job(attempt, Line(pipe)))
    except SurefootError as error:
        os.write(2, f"{type(error).__name__}: {error.message}\n".encode())
        raise SystemExit(error.exit_code) from None
    except KeyboardInterrupt:
        raise SystemExit(EXIT_INTERRUPTED) from None


def command(attempt: ProbedRun, line: Line) -> int:
    """Replace this process by the command `surefoot train` on the ranks of the attempt."""
    spec = attempt.folder.with_name("spec.toml")
    spec.write_text(spec_file.write(attempt.spec()))
    words = [sys.executable, "-m", "surefoot", "train", str(spec), "--run", str(attempt.folder)]
    if attempt.ranks > 1:
        words += ["--ranks", str(attempt.ranks), "--max-restarts", str(attempt.restarts)]
    line.hand_over()
    os.execve(sys.executable, [*words, "--quiet"], place.child_environment(threads=1))


def train(attempt: ProbedRun, line: Line) -> int:
    """Train one attempt at a run; send a mark for each step and each change of a checkpoint.

    The changes are those in `COMMIT_MARKS`: a draft is started or deleted, or a checkpoint is
    renamed to its final name, retired or loaded.
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
    """Send a mark for an audit event that changes or loads a checkpoint, such as `draft 12`.

    The marks are `draft`, `name`, `retire`, `load` and `clear` (an old draft is deleted), each with
    the step.
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
    """Check the checkpoints of a run, then open the run.

    Sends a mark for each checkpoint (whole or damaged) and for the loaded state. With
    `attempt.memory_bytes`, the process may allocate that many bytes more, and sends a mark for
    everything that it touches outside of the run.
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
    """Send a mark for audit events that reach outside of the run.

    These are opened files beside the run, files elsewhere that are opened to write, and calls that
    run or load foreign code. A name that is opened without following links is not resolved; its
    folder is tested instead.
    """
    if event == "subprocess.Popen" and list(given[1])[:1] == ["git"]:
        # a run records the git commit of the task's project
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
