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
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from surefoot.contract import commits, events, ledger, manifest
from surefoot.contract.events import Committed, Ended, Step
from surefoot.core.errors import RunFolderError, TaskError
from surefoot.prove.campaigns import jobs
from surefoot.prove.campaigns.jobs import Job
from surefoot.prove.campaigns.probe import STEPS, ProbedRun

# modules that a run imports late: imported once, in the process that forks the trials
PRELOADED = (jobs.__name__, "torch._dynamo")
PATIENCE_S = 60.0  # a trial that takes longer counts as hung
LOOK_S = 0.01
STATE = "state.json"
TIMED = "clock.json"  # the only file of a checkpoint that differs between runs with the same steps
KILLED = -int(signal.SIGKILL)
Digests = Mapping[str, str]
T = TypeVar("T")


class Child:
    """A forked trial: its marks, its output, its exit status.

    `is_over` is true once it has ended and all its marks were received.
    """

    def __init__(
        self, job: Job, attempt: ProbedRun, said: Path, plant: Callable[[], None] | None
    ) -> None:
        forks = multiprocessing.get_context("forkserver")
        forks.set_forkserver_preload(list(PRELOADED))
        self._pipe, theirs = forks.Pipe()
        self._said, self._words, self.marks, self.is_over = said, "", list[str](), False
        self._process = forks.Process(
            target=jobs.begin, args=(job, attempt, theirs, said, plant), daemon=True
        )
        self._process.start()
        theirs.close()
        self.pid = self._process.pid or 0

    def wait_for(self, mark: str) -> bool:
        """Wait until the child sends this mark; return False if it ends first.

        Kills a child that takes too long and raises TaskError.
        """
        until_s = time.monotonic() + PATIENCE_S
        while mark not in self.marks and not self.is_over:
            if not self._listen(until_s - time.monotonic()):
                raise self._hung()
        return mark in self.marks

    def ends_within(self, patience_s: float) -> bool:
        """Return whether the child ends within `patience_s` seconds; if not, it is left running."""
        until_s = time.monotonic() + patience_s
        while not self.is_over and self._listen(until_s - time.monotonic()):
            pass
        return self.is_over

    def wait(self) -> int:
        """Return the exit status, below 0 for a signal. Raises TaskError for a child that hangs."""
        if not self.ends_within(PATIENCE_S):
            raise self._hung()
        self._process.join()
        self._words = self.said
        self._said.unlink(missing_ok=True)
        self._pipe.close()
        return self._process.exitcode or 0

    def _listen(self, patience_s: float) -> bool:
        """Receive the next mark, or the end of the child; return False if neither came in time."""
        if not self._pipe.poll(max(0.0, patience_s)):
            return False
        try:
            self.marks.append(self._pipe.recv_bytes().decode())
        except (EOFError, ConnectionResetError):
            self.is_over = True
        return True

    def _hung(self) -> TaskError:
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
        return self._said.read_text(errors="replace") if self._said.exists() else self._words


@dataclass(frozen=True)
class Golden:
    """The uninterrupted run: the digests of each step's state, the ledger and the losses."""

    states: Mapping[int, Digests]
    consumed: Sequence[tuple[int, int]]
    losses: Mapping[int, float | None]


class Workshop:
    """The scratch folder of campaigns and the objects that trials share.

    `plant` breaks something in each trial first; tests set it.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.plant: Callable[[], None] | None = None
        self._made: dict[object, Any] = {}
        self._number = 0

    def once(self, key: object, make: Callable[[], T], *, planted: bool = False) -> T:
        """Return the object that `make` prepares, made once per `key`.

        It is made without the planted fault, unless `planted`. Examples are an uninterrupted run, a
        trace and a run to be damaged.
        """
        if key not in self._made:
            plant, self.plant = self.plant, self.plant if planted else None
            try:
                self._made[key] = make()
            finally:
                self.plant = plant
        made: T = self._made[key]
        return made

    def fresh(self, name: str) -> Path:
        """Create a new folder below the scratch folder."""
        self._number += 1
        made = self.folder / f"{name}-{self._number}"
        made.mkdir(parents=True)
        return made

    def fork(self, job: Job, attempt: ProbedRun) -> Child:
        """Start a job in a child, with the planted fault if there is one."""
        self._number += 1
        return Child(job, attempt, self.folder / f"said-{self._number}", self.plant)

    def train(self, attempt: ProbedRun) -> Child:
        return self.fork(jobs.train, attempt)

    def golden(self, variant: str = "plain", width: int = 16) -> Golden:
        """Return the uninterrupted run, which saves after every step and keeps every checkpoint."""
        return self.once(("golden", variant, width), lambda: self._make_golden(variant, width))

    def _make_golden(self, variant: str, width: int) -> Golden:
        with self.scratch("golden") as folder:
            run = folder / "run"
            child = self.train(
                ProbedRun(
                    run=str(run),
                    every=1,
                    keep=STEPS,
                    background=False,
                    variant=variant,
                    width=width,
                )
            )
            if child.wait() != 0:
                raise TaskError(
                    f"the unbroken run failed: {child.said[-1000:]}",
                    hint="this is a fault of surefoot",
                )
            return Golden(
                {step: digests(run, step) for step in manifest.steps(run)},
                read_consumed(run),
                read_losses(run),
            )

    @contextlib.contextmanager
    def scratch(self, name: str) -> Iterator[Path]:
        """Yield a folder for one trial, and delete it afterwards."""
        made = self.fresh(name)
        try:
            yield made
        finally:
            shutil.rmtree(made, ignore_errors=True)


def digests(run: Path, step: int) -> Digests:
    """Return the digest of each file of a checkpoint, except of the file that holds times.

    Raises RunFolderError.
    """
    return {
        entry.name: entry.sha256
        for entry in manifest.read(manifest.step_folder(run, step)).files
        if entry.name != TIMED
    }


def read_consumed(run: Path) -> list[tuple[int, int]]:
    return [(row.step, row.checksum) for row in ledger.consumed(ledger.read(run))[0]]


def read_losses(run: Path) -> dict[int, float | None]:
    return {
        event.step: event.loss
        for event in events.newest(events.read(run))
        if isinstance(event, Step)
    }


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
        differing = {
            name for name, _ in digests(run, step).items() ^ golden.states.get(step, {}).items()
        }
        # SIGTERM may come before the evaluation of a step; its checkpoint then records this
        if differing and (
            differing != {STATE} or not json.loads((folder / STATE).read_text())["scores"]["owed"]
        ):
            return (
                f"the commit of step {step} holds a different state than the unbroken run had: "
                f"{differing}"
            )
    return None


def look_at(run: Path, golden: Golden) -> str | None:
    """Return what is wrong with a run right after a fault, before anything repairs it.

    Visible checkpoints must be whole, and the last acknowledged one, or a later one, must be there.
    """
    past = list(events.read(run)) if (run / events.FILE).is_file() else []
    acknowledged, steps = (
        [event.step for event in past if isinstance(event, Committed)],
        manifest.steps(run),
    )
    if acknowledged and max(steps, default=-1) < acknowledged[-1]:
        return f"step {acknowledged[-1]} was committed, and {steps} are there"
    return find_damage(run, golden)


def find_difference(run: Path, golden: Golden) -> str | None:
    """Return where a finished run differs from the uninterrupted one: states, ledger or losses."""
    if STEPS not in manifest.steps(run):
        return f"the last step {STEPS} is not committed: {manifest.steps(run)}"
    same = {
        "ledger": read_consumed(run) == list(golden.consumed),
        "losses": read_losses(run) == golden.losses,
    }
    wrong = [what for what, is_same in same.items() if not is_same]
    return find_damage(run, golden) or (
        f"{wrong} are not those of the unbroken run" if wrong else None
    )


def _is_finished(run: Path) -> bool:
    past = list(events.read(run)) if (run / events.FILE).is_file() else []
    return bool(past) and isinstance(past[-1], Ended) and past[-1].outcome == "finished"


def go_on(workshop: Workshop, attempt: ProbedRun, golden: Golden) -> str | None:
    """Restart the run, let it end, and compare it with the uninterrupted run.

    It must resume after its newest checkpoint. Return what is wrong, or None.
    """
    newest = max(manifest.steps(attempt.folder), default=0)
    if _is_finished(attempt.folder):
        # the fault came after the end was recorded; a restart would start a new run
        return find_difference(attempt.folder, golden)
    child = workshop.train(attempt)
    status = child.wait()
    if status != 0:
        return f"the run did not resume: it ended with {status}: {child.said[-500:]}"
    if child.steps != list(range(newest + 1, attempt.steps + 1)):
        return f"step {newest} was committed, and the steps done again are {child.steps}"
    return find_difference(attempt.folder, golden)
