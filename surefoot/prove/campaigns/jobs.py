"""What a forked trial does: train, commit once, or open what a stranger left; and how it says where it stands.

Marks come from Python's own audit events (https://docs.python.org/3/library/audit_events.html), so nothing that is tested is replaced.
"""

from __future__ import annotations

import contextlib
import ctypes
import itertools
import json
import os
import resource
import signal
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch

from surefoot.components import checkpoint
from surefoot.components.checkpoint import Commit, Content, Stamp
from surefoot.contract import commits, manifest
from surefoot.core.errors import RunFolderError
from surefoot.prove.campaigns.probe import Attempt
from surefoot.train.run import Run

Words = Mapping[str, Any]
MARKS, GO = "marks", "go"
TRACER = 0x59616D61  # PR_SET_PTRACER of prctl(2): strace may attach although it is no parent of this process
DAY_S, TEN_YEARS_S = 86_400.0, 315_576_000.0
CLOCKS: Mapping[str, Callable[[int], float]] = {  # how far a clock is off when it is read for the nth time, in seconds
    "a day back": lambda n: -DAY_S,
    "ten years on": lambda n: TEN_YEARS_S,
    "backwards": lambda n: -2.0 * n,
    "to and fro": lambda n: TEN_YEARS_S if n % 2 else -DAY_S,
}
RUNS_CODE = (
    "os.system", "os.exec", "os.posix_spawn", "os.fork", "subprocess.Popen", "pickle.find_class", "socket.connect",
)  # fmt: skip
SETTLED = 2  # commits that a commit job keeps


class Line:
    """What a child says to the campaign that forked it, and what it waits for: two named pipes."""

    def __init__(self, folder: Path) -> None:
        self._marks = os.open(folder / MARKS, os.O_WRONLY | os.O_CLOEXEC)
        self._go = os.open(folder / GO, os.O_RDONLY | os.O_CLOEXEC)

    def mark(self, text: str) -> None:
        os.write(self._marks, f"{text}\n".encode())

    def pause(self, text: str) -> None:
        """Say so and wait for a word."""
        self.mark(text)
        os.read(self._go, 1)


def train(words: Words, line: Line) -> int:
    """One attempt at a run; marks each step, and each commit that is begun, named, retired, set aside or read."""
    attempt = Attempt(**words)
    if attempt.pauses:
        _let_trace()
    if 0 in attempt.pauses:
        line.pause("paused 0")
    _watch(line)
    _set_clock(attempt.clock)
    with Run(attempt.spec(), attempt.task(), folder=attempt.folder, quiet=True) as run:
        line.mark("begun")
        for report in run.steps():
            if run.evaluation_due:
                run.evaluate()
            line.mark(f"step {report.step}")
            if report.step in attempt.pauses:
                line.pause(f"paused {report.step}")
            if report.step == attempt.die_at:
                os.kill(os.getpid(), signal.SIGKILL)
    return run.exit_code


def _watch(line: Line) -> None:
    """Mark what happens to commits: `draft 12`, `name 12`, `retire 3`, `aside 12`, `load 12`, `clear 12`."""

    def hear(event: str, given: tuple[Any, ...]) -> None:
        if event in ("os.mkdir", "os.rename", "shutil.rmtree", "open"):
            mark = _told(event, given)
            if mark is not None:
                line.mark(mark)

    sys.addaudithook(hear)


def _told(event: str, given: tuple[Any, ...]) -> str | None:
    if not isinstance(given[0], str | os.PathLike):
        return None
    path = Path(given[0])
    if event == "open":
        is_read = path.name == "state.json" and isinstance(given[2], int) and not given[2] & (os.O_WRONLY | os.O_RDWR)
        return _step("load", path.parent.name) if is_read else None
    if event == "os.mkdir":
        return _step("draft", path.name, ".draft-")
    if event == "shutil.rmtree":
        return _step("clear", path.name, ".draft-")
    to = Path(given[1]).name
    return _step("name", to) or _step("retire", to, commits.GONE) or _step("aside", to, commits.BAD)


def _step(word: str, name: str, prefix: str = "") -> str | None:
    hit = manifest.STEP_FOLDER.match(name.removeprefix(prefix)) if name.startswith(prefix) else None
    return None if hit is None else f"{word} {int(hit.group(1))}"


def _set_clock(jump: str | None) -> None:
    """The time of day as a machine has it whose clock was set, and the time since its start as one has it that was started anew."""
    if jump is not None:
        real, since, calls = time.time, time.monotonic, itertools.count(1)
        begun_s, moved_s = since(), CLOCKS[jump]
        time.time = lambda: real() + moved_s(next(calls))
        time.monotonic = lambda: since() - begun_s


def content(step: int) -> Content:
    """What a commit job commits: trained numbers of `step`, frozen ones that are always the same, a text."""
    draws = torch.Generator().manual_seed(step)
    frozen = torch.arange(1500, dtype=torch.float32)
    tensors = {
        "model.safetensors": {"weight": torch.randn(40, 40, generator=draws), "bias": torch.randn(40, generator=draws)},
        "frozen.safetensors": {"table": frozen},
    }
    return Content(step=step, tensors=tensors, texts={"state.json": f'{{"step": {step}}}'.encode()}, finite=frozenset({"weight"}))


def commit(words: Words, line: Line) -> int:
    """Commit the steps of `steps` one after the other, then, after a word where `hold` is set, `last`; retention follows each."""
    run = Path(words["run"])
    for step in words["steps"]:
        _commit(run, step, words["generation"])
    if words["hold"]:
        _let_trace()
        line.pause("ready")
    if words["last"] is not None:
        _commit(run, words["last"], words["generation"])
    line.mark("acked")
    return 0


def _commit(run: Path, step: int, generation: int) -> None:
    checkpoint.commit(run, content(step), Stamp(generation=generation))
    checkpoint.retain(run, keep=SETTLED)


def _let_trace() -> None:
    ctypes.CDLL(None).prctl(TRACER, ctypes.c_ulong(2**64 - 1), 0, 0, 0)


def open_run(words: Words, line: Line) -> int:
    """Open a run that a stranger left, under a limit of memory; marks whatever happens outside of its folder."""
    attempt = Attempt(**words["attempt"])
    limit = _address_space_bytes() + int(words["memory_bytes"])
    resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
    _watch_out(attempt.folder, line)
    steps = manifest.named_steps(attempt.folder)
    commits.find_best(attempt.folder, steps)
    for read in (commits.check, _read_all):
        with contextlib.suppress(RunFolderError):
            read(manifest.step_folder(attempt.folder, steps[-1]))
            line.mark(f"whole {steps[-1]}")
    with Run(attempt.spec(), attempt.task(), folder=attempt.folder, quiet=True) as run:
        line.mark(f"state {json.dumps(run.state_digests(), sort_keys=True)}")
    return 0


def _read_all(folder: Path) -> None:
    one = Commit(folder.parents[1], int(folder.name.removeprefix("step-")))
    one.read("")
    checkpoint.join(one.json("state.json"), one.read("state.safetensors"))


def _watch_out(run: Path, line: Line) -> None:
    """Mark every file beside the run that is opened, every write elsewhere, and all that runs or loads what could be foreign.

    A bare name that is opened without following a link is one below a folder that was opened before, and marked if it is outside.
    """

    def hear(event: str, given: tuple[Any, ...]) -> None:
        if event == "subprocess.Popen" and list(given[1])[:1] == ["git"]:  # the commit of the task's own project is recorded
            return
        if event in RUNS_CODE:
            line.mark(f"outside {event}")
        elif event == "open" and isinstance(given[0], str | os.PathLike):
            follows = not (isinstance(given[2], int) and given[2] & os.O_NOFOLLOW)
            if not follows and not os.path.dirname(given[0]):
                return
            path = Path(os.path.realpath(given[0]) if follows else os.path.realpath(os.path.dirname(given[0])))
            is_written = isinstance(given[2], int) and bool(given[2] & (os.O_WRONLY | os.O_RDWR))
            if not path.is_relative_to(run) and (path.is_relative_to(run.parent) or (is_written and path != Path(os.devnull))):
                line.mark(f"outside open {path}")

    sys.addaudithook(hear)


def _address_space_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()


JOBS: dict[str, Callable[[Words, Line], int]] = {"train": train, "commit": commit, "open": open_run}
