"""Resources of fault campaigns: a scratch folder, processes of trials, and uninterrupted runs.

The results of trials are compared with those of the uninterrupted runs.
"""

from __future__ import annotations

import contextlib
import json
import multiprocessing
import os
import shutil
import signal
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TypeVar

from surefoot.contract import commits, events, ledger, manifest
from surefoot.contract.events import Committed, Event, Fault, Step
from surefoot.core.errors import EXIT_OK, RunFolderError, TaskError
from surefoot.prove.campaigns import jobs
from surefoot.prove.campaigns.jobs import Job
from surefoot.prove.campaigns.probe import ProbedRun

# modules that a run imports late; imported once, in the process that forks the trials
PRELOADED = (jobs.__name__, "torch._dynamo")
# a trial that takes longer counts as hung; a busy machine may take minutes for one with ranks
PATIENCE_S = 240.0
LOOK_S = 0.01
STATE = "state.json"
TIMED = "clock.json"  # the only file of a checkpoint that differs between runs with the same steps
# random states, which differ between ranks: each rank draws only for its own pieces
OF_RANKS = (STATE, "state.safetensors")
KILLED = -int(signal.SIGKILL)
Digests = Mapping[str, str]
T = TypeVar("T")
E = TypeVar("E", bound=Event)


class Child:
    """Forked process of a trial, with its marks, its output and its exit status.

    A mark is a text that names a point which the process has reached. `is_over` is true once the
    process has ended and all its marks were received.
    """

    def __init__(self, job: Job, attempt: ProbedRun, said: Path) -> None:
        forks = multiprocessing.get_context("forkserver")
        forks.set_forkserver_preload(list(PRELOADED))
        self._pipe, theirs = forks.Pipe()
        self._said, self.marks, self.is_over = said, list[str](), False
        self._process = forks.Process(
            target=jobs.begin, args=(job, attempt, theirs, said), daemon=True
        )
        self._process.start()
        theirs.close()
        self.pid = self._process.pid or 0

    def wait_until(self, what: Callable[[], bool], patience_s: float) -> bool:
        """Wait until `what` is true; return False if the child ends first or time runs out."""
        until_s = time.monotonic() + patience_s
        while not what() and not self.is_over and time.monotonic() < until_s:
            if self._pipe.poll(min(LOOK_S, patience_s)):
                try:
                    self.marks.append(self._pipe.recv_bytes().decode())
                except (EOFError, ConnectionResetError):
                    self.is_over = True
        return what()

    def wait_for(self, mark: str) -> bool:
        """Wait until the child sends this mark; return False if the child ends first.

        A child that takes longer than PATIENCE_S is killed, and TaskError is raised.
        """
        if not self.wait_until(lambda: mark in self.marks, PATIENCE_S) and not self.is_over:
            raise self._make_hung_error()
        return mark in self.marks

    def ends_within(self, patience_s: float) -> bool:
        """Return whether the child ends within `patience_s` seconds; otherwise it continues."""
        return self.wait_until(lambda: self.is_over, patience_s)

    def wait(self) -> int:
        """Wait for the child and return its exit status, which is negative after a signal.

        Raises:
            TaskError: If the child does not end within PATIENCE_S.
        """
        if not self.ends_within(PATIENCE_S):
            raise self._make_hung_error()
        self._process.join()
        self._pipe.close()
        return self._process.exitcode or 0

    def end_with(self, status: int) -> None:
        """Wait for the child and check its exit status.

        Raises:
            TaskError: If it is not `status`.
        """
        if self.wait() != status:
            raise TaskError(
                f"a run that is needed failed: {self.said[-1000:]}",
                hint="this is a fault of surefoot",
            )

    def _make_hung_error(self) -> TaskError:
        self.kill()
        return TaskError(
            f"a trial hung after {self.marks[-3:]}: {self.said[-500:]}",
            hint="this is a fault of surefoot",
        )

    def go(self) -> None:
        """Send the message for which a paused child waits."""
        with contextlib.suppress(OSError):  # the child may have ended
            self._pipe.send_bytes(b"go")

    def send(self, number: int) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.kill(self.pid, number)

    def kill(self) -> None:
        """Send SIGKILL to the child and to all processes of its session."""
        self.send(signal.SIGKILL)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.pid, signal.SIGKILL)

    @property
    def steps(self) -> list[int]:
        """Steps that the child has completed."""
        return [int(mark.removeprefix("step ")) for mark in self.marks if mark.startswith("step ")]

    @property
    def said(self) -> str:
        """Output of the child so far, including the error that ended it."""
        return self._said.read_text(errors="replace") if self._said.exists() else ""


@dataclass(frozen=True)
class Golden:
    """Results of an uninterrupted run: the state after each step, the ledger and the losses.

    A state is given by the digests of the files in its checkpoint, without those in `ignored`.
    `marks` are texts with the digests of the states in memory, by step.
    """

    states: Mapping[int, Digests]
    marks: Mapping[int, str]
    consumed: Sequence[tuple[int, int]]
    losses: Mapping[int, str]
    ignored: Sequence[str]

    def find_differing(self, run: Path, step: int) -> set[str]:
        """Return the files in a checkpoint of `run` that differ from the uninterrupted run."""
        pairs = digests(run, step, self.ignored).items() ^ self.states.get(step, {}).items()
        return {name for name, _ in pairs}


class Workshop:
    """Scratch folder of campaigns, with the processes and cached objects that trials use."""

    def __init__(self, folder: Path) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self.folder = self._place = folder
        self._made: dict[object, Any] = {}
        self._children: list[Child] = []

    def cached(self, key: object, make: Callable[[], T]) -> T:
        """Return the object for `key`, which `make` creates at the first call.

        Examples are an uninterrupted run, a trace and a run to be damaged.
        """
        if key not in self._made:
            self._made[key] = make()
        made: T = self._made[key]
        return made

    def fresh(self, name: str) -> Path:
        """Create a new folder in the scratch folder."""
        return Path(tempfile.mkdtemp(prefix=f"{name}-", dir=self.folder))

    @contextlib.contextmanager
    def scratch(self, name: str) -> Iterator[Path]:
        """Return a context with a folder for one trial; at its end the folder is deleted.

        Processes that the trial started are killed.
        """
        outer, count, self._place = self._place, len(self._children), self.fresh(name)
        made = self._place
        try:
            yield made
        finally:
            for child in self._children[count:]:
                if not child.is_over:
                    child.kill()
                    child.wait()
            del self._children[count:]
            shutil.rmtree(made, ignore_errors=True)
            self._place = outer

    def fork(self, job: Job, attempt: ProbedRun) -> Child:
        """Start `job` in a child process."""
        child = Child(job, attempt, self._place / f"said-{len(self._children)}")
        self._children.append(child)
        return child

    def train(self, attempt: ProbedRun) -> Child:
        return self.fork(jobs.command if attempt.ranks else jobs.train, attempt)

    def golden(self, attempt: ProbedRun) -> Golden:
        """Return the results of the attempt's run when one process trains it without interruption.

        That run saves after every step and keeps every checkpoint. It is trained once and then
        cached.
        """
        whole = ProbedRun(
            folder=Path(),
            steps=attempt.steps,
            every=1,
            keep=attempt.steps,
            background=False,
            marks_states=True,
            variant=attempt.variant,
            task=attempt.task,
            tables=attempt.tables,
        )
        ignored = (TIMED, *OF_RANKS) if attempt.ranks else (TIMED,)
        return self.cached(("golden", repr(whole)), lambda: self._make_golden(whole, ignored))

    def _make_golden(self, attempt: ProbedRun, ignored: Sequence[str]) -> Golden:
        with self.scratch("golden") as folder:
            run = folder / "run"
            child = self.train(replace(attempt, folder=run))
            child.end_with(EXIT_OK)
            return Golden(
                {step: digests(run, step, ignored) for step in manifest.steps(run)},
                {int(mark.split()[1]): mark for mark in child.marks if mark.startswith("state")},
                read_consumed(run),
                read_losses(run),
                ignored,
            )


def digests(run: Path, step: int, ignored: Sequence[str]) -> Digests:
    """Return the digest of each file of a checkpoint, without the files in `ignored`.

    Raises:
        RunFolderError: If the manifest of the checkpoint cannot be read.
    """
    made = manifest.read(manifest.step_folder(run, step))
    return {entry.name: entry.sha256 for entry in made.files if entry.name not in ignored}


def read_consumed(run: Path) -> list[tuple[int, int]]:
    return [(row.step, row.checksum) for row in ledger.consumed(ledger.read(run))[0]]


def read_losses(run: Path) -> dict[int, str]:
    """Return the loss of each step as text, so that NaN equals NaN."""
    return {
        event.step: repr(event.loss)
        for event in events.newest(events.read(run))
        if isinstance(event, Step)
    }


def read_events(run: Path, kind: type[E]) -> list[E]:
    """Return the events of the type `kind` in the order of the log; none if there is no log."""
    found = events.read(run, kind) if (run / events.FILE).is_file() else ()
    return [each for each in found if isinstance(each, kind)]


def read_faults(run: Path, fault: str) -> list[Fault]:
    return [each for each in read_events(run, Fault) if each.fault == fault]


def find_damage(run: Path, golden: Golden) -> str | None:
    """Return the error of a visible checkpoint: a failed check or a wrong state; otherwise None.

    The state must be that of the uninterrupted run at the same step.
    """
    for step in manifest.steps(run):
        folder = manifest.step_folder(run, step)
        try:
            commits.check(folder)
        except RunFolderError as error:
            return f"a commit that can be seen is damaged: {error.message}"
        differing = golden.find_differing(run, step)
        # SIGTERM may come before the evaluation of a step; its checkpoint then records this
        if differing and (
            differing != {STATE} or not json.loads((folder / STATE).read_text())["scores"]["owed"]
        ):
            return (
                f"the commit of step {step} holds a different state than the unbroken run had: "
                f"{differing}"
            )
    return None


def check_after_fault(run: Path, golden: Golden) -> str | None:
    """Return the error of a run right after a fault, before anything is repaired, or None.

    Visible checkpoints must be undamaged, and the newest one must not be older than the last one
    that the log reports.
    """
    acknowledged = [event.step for event in read_events(run, Committed)]
    steps = manifest.steps(run)
    if acknowledged and max(steps, default=-1) < acknowledged[-1]:
        return f"step {acknowledged[-1]} was committed, and {steps} are there"
    return find_damage(run, golden)


def find_difference(run: Path, golden: Golden) -> str | None:
    """Return how a finished run differs from the uninterrupted run, or None.

    States, ledger and losses are compared.
    """
    if (last := max(golden.states)) not in manifest.steps(run):
        return f"the last step {last} is not committed: {manifest.steps(run)}"
    same = {
        "ledger": read_consumed(run) == list(golden.consumed),
        "losses": read_losses(run) == golden.losses,
    }
    wrong = [what for what, is_same in same.items() if not is_same]
    return find_damage(run, golden) or (
        f"{wrong} are not those of the unbroken run" if wrong else None
    )


def find_wrong_end(child: Child, attempt: ProbedRun, golden: Golden) -> str | None:
    """Wait for a run; return the error in its exit status or its results, or None."""
    if status := child.wait():
        return f"it ended with {status}: {child.said[-500:]}"
    return find_difference(attempt.folder, golden)


def restart_and_compare(workshop: Workshop, attempt: ProbedRun, golden: Golden) -> str | None:
    """Restart the run, let it end, and return how it differs from the uninterrupted run, or None.

    The run must resume after its newest checkpoint.
    """
    newest = max(manifest.steps(attempt.folder), default=0)
    if events.is_finished(attempt.folder):
        # the fault came after the end was recorded; a restart would start a new run
        return find_difference(attempt.folder, golden)
    child = workshop.train(attempt)
    wrong = find_wrong_end(child, attempt, golden)
    if wrong is None and child.steps != list(range(newest + 1, attempt.steps + 1)):
        return f"step {newest} was committed, and the steps done again are {child.steps}"
    return wrong
