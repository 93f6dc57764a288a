"""Interpreter that forks attempts, and an attempt: it trains a spec and records its state.

The interpreter has imported surefoot and torch, but has read no spec, task or data. A fork of it
therefore starts as a new process does, except for the imports. It reads a line of JSON for each
attempt and answers with two lines: the process id, and the exit code of that process.

An attempt writes the digests of its state after every step. A kill is a real SIGKILL of its process
group between the end of a step and the end of the next one, which waits for the kill. The number of
steps that are completed before the kill is therefore the same on any machine, however busy; the
point within the next step at which the kill arrives is not.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import threading
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from surefoot.contract import commits, spec_file
from surefoot.train.run import Run

LOOK_S = 0.0002


def main() -> None:
    """Fork an attempt for each line of standard input; print its process id and exit code."""
    for line in sys.stdin:
        process = os.fork()
        if process == 0:
            begin_process(json.loads(line)["said"])
            attempt(**json.loads(line)["attempt"])
            return
        _report_step(process)
        _report_step(os.waitstatus_to_exitcode(os.waitpid(process, 0)[1]))


def _report_step(number: int) -> None:
    os.write(sys.__stdout__.fileno(), f"{number}\n".encode())  # type: ignore[union-attr]


def begin_process(said: str | Path) -> None:
    """Start a new session, and write standard output and error to the file `said`."""
    os.setsid()
    log, nothing = (
        os.open(said, os.O_WRONLY | os.O_CREAT | os.O_TRUNC),
        os.open(os.devnull, os.O_RDONLY),
    )
    for source, target in ((nothing, 0), (log, 1), (log, 2)):
        os.dup2(source, target)


def attempt(spec: str, run: str, trace: str, steps: int, kill: dict[str, Any] | None) -> None:
    """Train `spec` in the run folder `run` up to step `steps`, and record its state.

    A line of JSON is appended to `trace` for each step. With `kill`, the process is killed after
    step `kill["step"]`.
    """
    killer: Killer | None = None
    with (
        Path(trace).open("a", buffering=1) as rows,
        Run(spec_file.read_written(spec), folder=run, quiet=True) as live,
    ):
        for report in live.steps():
            if killer is not None:
                killer.strike()
            if live.evaluation_due:
                live.evaluate()
            row = {
                "step": report.step,
                "loss": report.loss,
                "guarantee": live.assembly.feed.source.guarantee,
            }
            rows.write(json.dumps({**row, "digests": live.state_digests()}) + "\n")
            if report.step >= steps:
                live.stop("the trial was so long")
            elif kill is not None and report.step == kill["step"]:
                killer = Killer(Path(run), after_ms=kill["after_ms"], in_save=kill["in_save"])


@dataclass
class Killer:
    """Thread that kills this process group `after_ms` milliseconds after its creation.

    With `in_save` the time counts from the start of the next save. `strike` kills at once.
    """

    run: Path
    after_ms: float
    in_save: bool

    def __post_init__(self) -> None:
        self._latest = threading.Event()
        self._thread = threading.Thread(target=self._kill, daemon=True)
        self._thread.start()

    def strike(self) -> None:
        self._latest.set()
        self._thread.join()

    def _kill(self) -> None:
        while self.in_save and not self._latest.is_set() and not commits.has_draft(self.run):
            time.sleep(LOOK_S)
        self._latest.wait(self.after_ms / 1000)
        os.killpg(os.getpgid(0), signal.SIGKILL)


if __name__ == "__main__":
    main()
