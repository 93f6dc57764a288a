"""Resources of fault campaigns: a scratch folder, processes of trials, and uninterrupted runs.

Trials are compared with the uninterrupted runs.
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

# modules that a run imports late: imported once, in the process that forks the trials
PRELOADED = (jobs.__name__, "torch._dynamo")
# a trial that takes longer counts as hung; a busy machine may take minutes for one with ranks
PATIENCE_S = 240.0
LOOK_S = 0.01
STATE = "state.json"
TIMED = "clock.json"  # the only file of a checkpoint that differs between runs with the same steps
# random states, which differ between ranks: each rank draws for its pieces alone
OF_RANKS = (STATE, "state.safetensors")
KILLED = -int(signal.SIGKILL)
Digests = Mapping[str, str]
T = TypeVar("T")
E = TypeVar("E", bound=Event)


class Child:
    """A forked trial: its marks, its output, its exit status.

    `is_over` is true once it has ended and all its marks were received.
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
        """Wait until `what` is true; return False if the child ends first or at the timeout."""
        until_s = time.monotonic() + patience_s
        while not what() and not self.is_over and time.monotonic() < until_s:
            if self._pipe.poll(min(LOOK_S, patience_s)):
                try:
                    self.marks.append(self._pipe.recv_bytes().decode())
                except (EOFError, ConnectionResetError):
                    self.is_over = True
        return what()

    def wait_for(self, mark: str) -> bool:
        """Wait until the child sends this mark; return False if it ends first.

        Kills a child that takes too long and raises TaskError.
        """
        if not self.wait_until(lambda: mark in self.marks, PATIENCE_S) and not self.is_over:
            raise self._make_hung_error()
        return mark in self.marks

    def ends_within(self, patience_s: float) -> bool:
        """Return whether the child ends within `patience_s` seconds; if not, it is left running."""
        return self.wait_until(lambda: self.is_over, patience_s)

    def wait(self) -> int:
        """Return the exit status, below 0 for a signal. Raises TaskError for a child that hangs."""
        if not self.ends_within(PATIENCE_S):
            raise self._make_hung_error()
        self._process.join()
        self._pipe.close()
        return self._process.exitcode or 0

    def end_with(self, status: int) -> None:
        """Wait for the child. Raises TaskError unless it ends with `status`."""
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
        """Send the message that a paused child waits for."""
        with contextlib.suppress(OSError):  # the child may have ended
            self._pipe.send_bytes(b"go")

    def send(self, number: int) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.kill(self.pid, number)

    def kill(self) -> None:
        """Send SIGKILL to the child and to the session that it leads."""
        self.send(signal.SIGKILL)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.pid, signal.SIGKILL)

    @property
    def steps(self) -> list[int]:
        """Steps that the child has done."""
        return [int(mark.removeprefix("step ")) for mark in self.marks if mark.startswith("step ")]

    @property
    def said(self) -> str:
        """Output of the child so far, with the error that ended it."""
        return self._said.read_text(errors="replace") if self._said.exists() else ""


@dataclass(frozen=True)
class Golden:
    """The uninterrupted run: each step's state, the ledger and the losses.

    A state is the digests of its files, except of those that are `ignored`; `marks` are the marks
    of the states in memory.
    """

    states: Mapping[int, Digests]
    marks: Mapping[int, str]
    consumed: Sequence[tuple[int, int]]
    losses: Mapping[int, str]
    ignored: Sequence[str]

    def find_differing(self, run: Path, step: int) -> set[str]:
        """Return the files of a checkpoint that are not those of the uninterrupted run."""
        pairs = digests(run, step, self.ignored).items() ^ self.states.get(step, {}).items()
        return {name for name, _ in pairs}


class Workshop:
    """The scratch folder of campaigns and the objects that trials share."""

    def __init__(self, folder: Path) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self.folder = self._place = folder
        self._made: dict[object, Any] = {}
        self._children: list[Child] = []

    def cached(self, key: object, make: Callable[[], T]) -> T:
        """Return the object that `make` prepares, made once per `key`.

        Examples are an uninterrupted run, a trace and a run to be damaged.
        """
        if key not in self._made:
            self._made[key] = make()
        made: T = self._made[key]
        return made

    def fresh(self, name: str) -> Path:
        """Create a new folder below the scratch folder."""
        return Path(tempfile.mkdtemp(prefix=f"{name}-", dir=self.folder))

    @contextlib.contextmanager
    def scratch(self, name: str) -> Iterator[Path]:
        """Yield a folder for one trial; afterwards delete it, and kill what the trial started."""
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
        """Start a job in a child."""
        child = Child(job, attempt, self._place / f"said-{len(self._children)}")
        self._children.append(child)
        return child

    def train(self, attempt: ProbedRun) -> Child:
        return self.fork(jobs.command if attempt.ranks else jobs.train, attempt)

    def golden(self, attempt: ProbedRun) -> Golden:
        """Return the run of the attempt as one process trains it without interruption.

        It saves after every step and keeps every checkpoint.
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
    """Return the digest of each file of a checkpoint that is not `ignored`.

    Raises RunFolderError.
    """
    made = manifest.read(manifest.step_folder(run, step))
    return {entry.name: entry.sha256 for entry in made.files if entry.name not in ignored}


def read_consumed(run: Path) -> list[tuple[int, int]]:
    return [(row.step, row.checksum) for row in ledger.consumed(ledger.read(run))[0]]


def read_losses(run: Path) -> dict[int, str]:
    """Return the loss of each step as a text, in which NaN equals NaN."""
    return {
        event.step: repr(event.loss)
        for event in events.newest(events.read(run))
        if isinstance(event, Step)
    }


def read_events(run: Path, kind: type[E]) -> list[E]:
    """Return the events of one kind, in the order of the log; none if there is no log."""
    found = events.read(run, kind) if (run / events.FILE).is_file() else ()
    return [each for each in found if isinstance(each, kind)]


def read_faults(run: Path, fault: str) -> list[Fault]:
    return [each for each in read_events(run, Fault) if each.fault == fault]


def find_damage(run: Path, golden: Golden) -> str | None:
    """Return what is wrong with the visible checkpoints: a failed check, or a different state.

    Return None if every one verifies and has the state that the uninterrupted run had at its step.
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
    """Return what is wrong with a run right after a fault, before anything repairs it.

    Visible checkpoints must be whole, and the last acknowledged one, or a later one, must be there.
    """
    acknowledged = [event.step for event in read_events(run, Committed)]
    steps = manifest.steps(run)
    if acknowledged and max(steps, default=-1) < acknowledged[-1]:
        return f"step {acknowledged[-1]} was committed, and {steps} are there"
    return find_damage(run, golden)


def find_difference(run: Path, golden: Golden) -> str | None:
    """Return where a finished run differs from the uninterrupted one: states, ledger or losses."""
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
    """Wait for a run; return what is wrong with its exit status or its results, or None."""
    if status := child.wait():
        return f"it ended with {status}: {child.said[-500:]}"
    return find_difference(attempt.folder, golden)


def restart_and_compare(workshop: Workshop, attempt: ProbedRun, golden: Golden) -> str | None:
    """Restart the run, let it end, and compare it with the uninterrupted run.

    It must resume after its newest checkpoint. Return what is wrong, or None.
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
