"""Profiler window in a running training, opened by its own process or by a request file.

A request file in the run folder reaches a run in a container or on a different host. The run checks
for the file at the end of a step, at most once a second.
"""

from __future__ import annotations

import contextlib
import json
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, final

from torch.profiler import record_function

from surefoot.components.profiler.phases.clock import OTHER
from surefoot.contract.events import PHASES
from surefoot.contract.run_folder import files
from surefoot.contract.state import StepReport
from surefoot.core.errors import InputError, SurefootError
from surefoot.train.assemble import Assembly

if TYPE_CHECKING:
    from surefoot.components.profiler.tracing.window import Profiler, Window

FOLDER, REQUEST_FILE, ANSWER_FILE = "profile", "request.json", "answer.json"
LOOK_EVERY_S = 1.0
# few steps before a requested window, so that a slow run answers soon
LIVE = {"wait": 5, "warmup": 2}


@final
class Profiling:
    """Recorder of profiler windows, which its caller or a request file opens.

    `say` prints to the console.
    """

    def __init__(self, run: Path, assembly: Assembly, say: Callable[[str], None]) -> None:
        self._run, self._folder, self._assembly, self._say = run, run / FOLDER, assembly, say
        self._request = self._folder / REQUEST_FILE
        self._next_look_s = 0.0
        self._profiler: Profiler | None = None
        self._asked: str | None = None  # id of the request
        self._clock = assembly.engine.steps.clock

    @property
    def is_done(self) -> bool:
        """True if a window was opened and has closed."""
        return self._profiler is not None and self._profiler.is_done

    def begin(
        self, window: Window, levels: Sequence[str], step: int, *, nvtx: bool = False
    ) -> Window:
        """Open a window that starts after `step`; return the window, shortened to fit the run.

        Raises InputError if no step is left.
        """
        from surefoot.components.profiler.tracing.window import Profiler

        total = self._assembly.course.total_steps
        fitted = window.fitted(None if total is None else total - step)
        average = self._assembly.engine.average
        self._profiler = Profiler(
            self._assembly.model,
            self._folder,
            window=fitted,
            levels=levels,
            first_step=step + 1,
            nvtx=nvtx,
            optimizers=[
                each for update in self._assembly.updates for each in update.guarded.optimizers
            ],
            more_state=() if average is None else average.averages,
        )
        self._listen()
        return fitted

    def _listen(self) -> None:
        """Subscribe to phases and collectives while the window records; unsubscribe otherwise."""
        is_open = self._profiler is not None and self._profiler.ranges is not None
        self._clock.listener = self._phase_begins if is_open else None
        if (ranks := self._assembly.engine.steps.collectives.ranks) is not None:
            ranks.group.waiting.ranges = record_function if is_open else None

    def step_done(self, report: StepReport) -> None:
        """Advance the window after a step; without a window, check for a request file."""
        if self._profiler is None:
            now_s = time.monotonic()
            if now_s >= self._next_look_s:
                self._next_look_s = now_s + LOOK_EVERY_S
                if self._request.exists():
                    self._take_request(report.step)
            return
        with self._suppress_window_errors():
            self._profiler.step_done(int(report.epoch))
            self._listen()
        if self._asked is not None and self._profiler is not None and self._profiler.is_done:
            self._answer_request("done", f"recorded up to step {report.step:,}")

    def _phase_begins(self, phase: int) -> None:
        """Mark the start of `phase` in the trace; time outside of all phases is not marked."""
        ranges = None if self._profiler is None else self._profiler.ranges
        if ranges is not None and phase == OTHER:
            ranges.end("phase")
        elif ranges is not None:
            ranges.begin("phase", PHASES[phase])

    def close(self) -> None:
        """Close an open window at the end of the run; the steps recorded so far are saved."""
        self._clock.listener = None
        if self._profiler is None or self._profiler.is_done:
            return
        with self._suppress_window_errors():
            has_any = self._profiler.close()
            self._listen()
            if self._asked is not None:
                self._answer_request(
                    "done" if has_any else "failed", "the run ended before the profile window"
                )

    @contextlib.contextmanager
    def _suppress_window_errors(self) -> Any:
        """Return a context in which an error of a requested window does not end the run.

        The error is written as the answer to the request.
        """
        try:
            yield
        except Exception as error:
            if self._asked is None:
                raise
            self._answer_request(
                "failed",
                error.message
                if isinstance(error, SurefootError)
                else f"{type(error).__name__}: {error}",
            )

    def _take_request(self, step: int) -> None:
        """Open the window that the request file asks for, and remove the file."""
        from surefoot.components.profiler.tracing.window import Window

        self._asked = ""
        with self._suppress_window_errors():
            text = files.read_text(self._run, f"{FOLDER}/{REQUEST_FILE}")
            self._request.unlink()
            asked = _check_request(text)
            self._asked = asked["id"]
            window = self.begin(Window(**LIVE, active=asked["active"]), asked["levels"], step)
            self._say(f"step {step:,}: a profile was requested: {window}")

    def _answer_request(self, outcome: str, words: str) -> None:
        """Write the answer to the request, and close the window to allow a new request."""
        self._clock.listener = None
        answer = {"version": 1, "id": self._asked, "outcome": outcome, "words": words}
        with contextlib.suppress(OSError):
            files.write_whole(self._run, f"{FOLDER}/{ANSWER_FILE}", json.dumps(answer).encode())
        self._say(f"the profile is {outcome}: {words}")
        if self._profiler is not None and not self._profiler.is_done:
            with contextlib.suppress(Exception):
                self._profiler.close()
        self._asked = self._profiler = None
        self._listen()


def _check_request(text: str) -> Mapping[str, Any]:
    """Return the fields of a request. Raises InputError if the file is damaged."""
    with contextlib.suppress(ValueError, RecursionError):
        asked = json.loads(text)
        if isinstance(asked, dict) and all(
            isinstance(asked.get(key), kind)
            for key, kind in (("id", str), ("active", int), ("levels", list))
        ):
            return asked
    raise InputError(
        f"{REQUEST_FILE} is damaged", hint="request the profile again: surefoot profile RUN"
    )
