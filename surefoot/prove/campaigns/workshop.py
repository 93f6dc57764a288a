"""Where campaigns work: a scratch folder, the process that forks trials, and the unbroken runs that trials are held against."""

from __future__ import annotations

import contextlib
import json
import os
import select
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from surefoot.contract import commits, events, ledger, manifest
from surefoot.contract.events import Committed, Ended, Step
from surefoot.core.errors import RunFolderError, TaskError
from surefoot.core.place import child_environment
from surefoot.prove.campaigns.jobs import GO, MARKS
from surefoot.prove.campaigns.probe import STEPS, Attempt

SERVER = (sys.executable, "-m", "surefoot.prove.campaigns.server")
PATIENCE_S = 60.0  # a trial that takes longer hangs
LOOK_S = 0.01
STATE = "state.json"
TIMED = "clock.json"  # the one file of a commit that differs between runs that did the same steps
KILLED = -int(signal.SIGKILL)
Digests = Mapping[str, str]


class Child:
    """One forked trial: what it marks, what it says, how it ends."""

    def __init__(self, workshop: Workshop, folder: Path, request: Mapping[str, Any]) -> None:
        self._workshop, self._folder = workshop, folder
        for name in (MARKS, GO):
            os.mkfifo(folder / name)
        # for reading and writing: the opening waits for nobody, and the pipe never reads as ended
        self._marks, self._go = (os.open(folder / name, os.O_RDWR | os.O_NONBLOCK | os.O_CLOEXEC) for name in (MARKS, GO))
        self.pid = int(workshop.ask({**request, "line": str(folder), "said": str(folder / "said")})["pid"])
        self._end = os.pidfd_open(self.pid)  # readable once the process is over, whatever its number is given to then
        self._unread, self.marks = b"", list[str]()
        self._status: int | None = None
        self._words = ""

    def wait_for(self, mark: str, patience_s: float = PATIENCE_S) -> bool:
        """Until the child marks this; False where it ended first. Raises TaskError, once it is killed, for one that takes too long."""
        until_s = time.monotonic() + patience_s
        while mark not in self.marks:
            if not self._listen(until_s - time.monotonic()):
                raise self._hung()
            if self.is_over:
                return mark in self.marks
        return True

    def ends_within(self, patience_s: float) -> bool:
        """Whether it ends in so many seconds; it is left running where it does not."""
        until_s = time.monotonic() + patience_s
        while not self.is_over:
            if not self._listen(until_s - time.monotonic()):
                return False
        return True

    def wait(self, patience_s: float = PATIENCE_S) -> int:
        """Its exit status, below 0 for a signal. Raises TaskError for a child that takes too long."""
        if self._status is None:
            if not self.ends_within(patience_s):
                raise self._hung()
            self._status = int(self._workshop.ask({"wait": self.pid})["status"])
            self._words = self.said
            for descriptor in (self._marks, self._go, self._end):
                os.close(descriptor)
            shutil.rmtree(self._folder)
        return self._status

    def _listen(self, patience_s: float) -> bool:
        """Take in what was marked; False where nothing was and the child goes on."""
        ready, _, _ = select.select([self._marks, self._end], [], [], max(0.0, patience_s))
        if self._marks in ready:
            *lines, self._unread = (self._unread + os.read(self._marks, 1 << 16)).split(b"\n")
            self.marks += [line.decode() for line in lines]
        return bool(ready)

    @property
    def is_over(self) -> bool:
        """Whether it has ended and all its marks were taken in."""
        if self._status is not None:
            return True
        ready, _, _ = select.select([self._marks, self._end], [], [], 0)
        return self._end in ready and self._marks not in ready

    def _hung(self) -> TaskError:
        self.kill()
        return TaskError(f"a trial hung after {self.marks[-3:]}: {self.said[-500:]}", hint="this is a fault of surefoot")

    def go(self) -> None:
        """Give the word that a paused child waits for."""
        os.write(self._go, b"g")

    def send(self, number: int) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.kill(self.pid, number)

    def kill(self) -> None:
        """SIGKILL to the whole session of the child."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.pid, signal.SIGKILL)

    @property
    def said(self) -> str:
        """What it said so far, with the errors it ended with."""
        path = self._folder / "said"
        return path.read_text(errors="replace") if path.exists() else self._words


@dataclass(frozen=True)
class Golden:
    """The unbroken run: the digests of each step's state, the ledger and the losses."""

    states: Mapping[int, Digests]
    consumed: Sequence[tuple[int, int]]
    losses: Mapping[int, float | None]


class Workshop:
    """The place of a campaign, as a context. `server` is the command of the process that forks, `planted` a fault that tests plant."""

    def __init__(self, folder: Path, *, server: Sequence[str] = SERVER, planted: str | None = None) -> None:
        self.folder, self._command, self.planted = folder, list(server), planted
        self._golden: dict[tuple[str, int, int], Golden] = {}
        self.kept: dict[str, Any] = {}  # what a campaign prepares once: traces, damaged runs
        self._number = 0

    def __enter__(self) -> Self:
        self.folder.mkdir(parents=True, exist_ok=True)
        self._said = (self.folder / "server").open("w+b")
        self._server = subprocess.Popen(
            self._command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=self._said, env=child_environment(threads=1),
            start_new_session=True,
        )  # fmt: skip
        self._answer()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        assert self._server.stdin is not None
        assert self._server.stdout is not None
        self._server.stdin.close()
        self._server.wait()
        self._server.stdout.close()
        self._said.close()

    def ask(self, request: Mapping[str, Any]) -> dict[str, Any]:
        assert self._server.stdin is not None
        self._server.stdin.write(json.dumps(request).encode() + b"\n")
        self._server.stdin.flush()
        return self._answer()

    def _answer(self) -> dict[str, Any]:
        assert self._server.stdout is not None
        line = self._server.stdout.readline()
        if not line:
            self._said.seek(0)
            told = self._said.read().decode(errors="replace")[-1000:]
            raise TaskError(f"the process that forks trials ended: {told}", hint="this is a fault of surefoot")
        row: dict[str, Any] = json.loads(line)
        return row

    def fresh(self, name: str) -> Path:
        """A new folder below the scratch folder."""
        self._number += 1
        made = self.folder / f"{name}-{self._number}"
        made.mkdir()
        return made

    def fork(self, job: str, words: Mapping[str, Any], *, planted: bool = True) -> Child:
        """Begin a job in a child; the planted fault, if there is one, breaks it unless `planted` says otherwise."""
        request = {"job": job, "words": dict(words), "planted": self.planted if planted else None}
        return Child(self, self.fresh("line"), request)

    def train(self, attempt: Attempt, *, planted: bool = True) -> Child:
        return self.fork("train", asdict(attempt), planted=planted)

    def golden(self, variant: str = "plain", width: int = 16, steps: int = STEPS) -> Golden:
        """The unbroken run, which saves after every step and keeps it all; made once."""
        key = (variant, width, steps)
        if key not in self._golden:
            attempt = Attempt(
                run=str(self.fresh("golden") / "run"), steps=steps, every=1, keep=steps, background=False, variant=variant, width=width
            )  # fmt: skip
            child = self.train(attempt, planted=False)
            if child.wait() != 0:
                raise TaskError(f"the unbroken run failed: {child.said[-1000:]}", hint="this is a fault of surefoot")
            folder = attempt.folder
            self._golden[key] = Golden(
                {step: digests(folder, step) for step in manifest.steps(folder)}, read_consumed(folder), read_losses(folder)
            )
            shutil.rmtree(folder)
        return self._golden[key]

    @contextlib.contextmanager
    def scratch(self, name: str) -> Iterator[Path]:
        """A folder for one trial, deleted after it."""
        made = self.fresh(name)
        try:
            yield made
        finally:
            shutil.rmtree(made, ignore_errors=True)


def digests(run: Path, step: int) -> Digests:
    """The digest of each file of a commit that does not hold times. Raises RunFolderError."""
    return {entry.name: entry.sha256 for entry in manifest.read(manifest.step_folder(run, step)).files if entry.name != TIMED}


def read_consumed(run: Path) -> list[tuple[int, int]]:
    return [(row.step, row.checksum) for row in ledger.consumed(ledger.read(run))[0]]


def read_losses(run: Path) -> dict[int, float | None]:
    return {event.step: event.loss for event in events.newest(events.read(run)) if isinstance(event, Step)}


def find_damage(run: Path, golden: Golden) -> str | None:
    """What is wrong with the commits that can be seen: one that does not verify, or whose state is not that of its step."""
    for step in manifest.steps(run):
        try:
            commits.check(manifest.step_folder(run, step))
        except RunFolderError as error:
            return f"a commit that can be seen is damaged: {error.message}"
        if digests(run, step) != golden.states.get(step) and not _lacks_evaluation(run, step, golden):
            return f"the commit of step {step} holds another state than the unbroken run had"
    return None


def _lacks_evaluation(run: Path, step: int, golden: Golden) -> bool:
    """Whether a commit differs from the unbroken run's only in that SIGTERM came before its evaluation, as it says itself."""
    state = json.loads((manifest.step_folder(run, step) / STATE).read_text())
    others = [
        {name: value for name, value in each.items() if name != STATE} for each in (digests(run, step), golden.states[step])
    ]
    return bool(state["scores"]["owed"]) and others[0] == others[1]


def find_lost(run: Path) -> str | None:
    """What is wrong with what the log calls committed: the newest must be there, or one after it."""
    if not (run / events.FILE).is_file():
        return None
    acknowledged = [event.step for event in events.read(run) if isinstance(event, Committed)]
    steps = manifest.steps(run)
    if acknowledged and (not steps or steps[-1] < acknowledged[-1]):
        return f"step {acknowledged[-1]} was committed, and {steps} are there"
    return None


def look_at(run: Path, golden: Golden) -> str | None:
    """Right after a fault, before anything mends it: what can be seen is whole, and what was committed is there."""
    return find_damage(run, golden) or find_lost(run)


def find_difference(run: Path, golden: Golden) -> str | None:
    """Where a run that came to its end differs from the unbroken one: states, ledger, losses."""
    last = max(golden.states)
    if last not in manifest.steps(run):
        return f"the last step {last} is not committed: {manifest.steps(run)}"
    if (wrong := find_damage(run, golden)) is not None:
        return wrong
    if read_consumed(run) != list(golden.consumed):
        return "the ledger is not that of the unbroken run"
    if read_losses(run) != golden.losses:
        return "the losses are not those of the unbroken run"
    return None


def _is_finished(run: Path) -> bool:
    past = list(events.read(run)) if (run / events.FILE).is_file() else []
    return bool(past) and isinstance(past[-1], Ended) and past[-1].outcome == "finished"


def go_on(workshop: Workshop, attempt: Attempt, golden: Golden) -> str | None:
    """Start the run again, let it come to its end, and hold it against the unbroken one; it must begin after its newest commit."""
    newest = max(manifest.steps(attempt.folder), default=0)
    if _is_finished(attempt.folder):  # the fault fell after the end was written; another start would begin another run
        return find_difference(attempt.folder, golden)
    child = workshop.train(attempt)
    status = child.wait()
    if status != 0:
        return f"the run did not go on: it ended with {status}: {child.said[-500:]}"
    done = [int(mark.removeprefix("step ")) for mark in child.marks if mark.startswith("step ")]
    if done != list(range(newest + 1, attempt.steps + 1)):
        return f"step {newest} was committed, and the steps done again are {done}"
    return find_difference(attempt.folder, golden)
