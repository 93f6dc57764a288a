"""Rank slots of a supervised run, and the decision to stop or restart after an attempt.

The checkpoints that the run writes are counted, because the decision depends on them.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

from surefoot.contract import events, manifest
from surefoot.control.launch.decide import (
    Choice,
    ExitKind,
    RankFailure,
    RestartHistory,
    Rules,
    can_grow,
    choose,
    decide,
)
from surefoot.core.errors import EXIT_OK

LOOK_S = 0.2
JOIN_S = 1.0


class AttemptEnd(NamedTuple):
    """End of an attempt: its exit code, and the failure if there was one.

    `is_asked` is True if a signal to the supervisor ended the attempt. `is_recalled` is True if the
    supervisor ended it to restart with more ranks. `step` is the step in which the failed rank was.
    """

    code: int
    fault: RankFailure | None = None
    is_asked: bool = False
    is_recalled: bool = False
    step: int = 0


class Commits:
    """Counter of the checkpoints that a run writes after this object was created.

    `newest` is the step of the newest checkpoint; 0 if there is none.
    """

    def __init__(self, run: Path | None) -> None:
        self._run = run
        self.count, self.newest = 0, max(self._steps(), default=0)

    def _steps(self) -> list[int]:
        return [] if self._run is None else manifest.steps(self._run)

    def look(self) -> None:
        steps = self._steps()
        self.count += sum(step > self.newest for step in steps)
        self.newest = max(steps, default=0)

    @contextlib.contextmanager
    def count_in_background(self) -> Iterator[None]:
        """Count checkpoints in a thread, inside the context.

        A disk that does not respond then does not delay the supervision of the ranks.
        """
        over = threading.Event()

        def count() -> None:
            while not over.wait(LOOK_S):
                with contextlib.suppress(OSError):
                    self.look()

        thread = threading.Thread(target=count, daemon=True)
        thread.start()
        try:
            yield
        finally:
            over.set()
            thread.join(JOIN_S)


class Places:
    """Rank slots of a run; `now` lists the slots that have a rank, by rank."""

    def __init__(self, rules: Rules, run: Path | None, say: Callable[[str], None]) -> None:
        self._rules, self._run, self._say = rules, run, say
        self._course, self._commits = RestartHistory(), Commits(run)
        self.now = choose(rules, self._course)

    @property
    def is_elastic(self) -> bool:
        """True if the run may continue with fewer ranks, which need less memory in total."""
        return len(self._rules.numbers) > 1

    def can_grow(self) -> bool:
        """Return whether the run could restart with more ranks than now.

        It cannot once it has finished: its first rank may still be printing the result.
        """
        return (
            self._run is not None
            and can_grow(self._rules, self._course, self.now, self._commits.count)
            and not events.is_finished(self._run)
        )

    def watch_for_growth(self) -> contextlib.AbstractContextManager[None]:
        """Return a context manager that counts checkpoints if a slot was left out.

        Such a slot is tried again after a number of checkpoints. Otherwise the context does
        nothing.
        """
        return (
            self._commits.count_in_background()
            if self._run is not None and self._course.out
            else contextlib.nullcontext()
        )

    def log_growth(self) -> None:
        """Log that all ranks will save and end, to restart with more ranks."""
        found = choose(self._rules, replace(self._course, num_commits=self._commits.count))
        self._say(
            f"{_names(set(found) - set(self.now))} will be tried again: all ranks save and end, "
            f"to restart as {len(found)} ranks"
        )

    def after(self, end: AttemptEnd) -> int | None:
        """Decide what follows an attempt: the exit code of the supervisor, or None for a restart.

        Before a restart, `now` is updated and a message is logged.
        """
        fault = end.fault
        if self._run is None or end.is_asked or fault is None:
            return end.code
        grows = end.is_recalled and fault.how is ExitKind.TOLD
        if not grows and (not fault.how.is_retried or self._rules.max_restarts == 0):
            return end.code
        if events.is_finished(self._run):
            self._say("the run had finished before: nothing is lost")
            return EXIT_OK
        self._commits.look()
        if grows:
            self._course = replace(self._course, num_commits=self._commits.count, in_vain=0)
        else:
            decision, self._course = decide(self._rules, self._course, fault, self._commits.count)
            if decision.why:
                self._say(
                    f"error: {decision.why}" if decision.choice is Choice.STOP else decision.why
                )
            if decision.choice is Choice.STOP:
                return end.code
        self.now = choose(self._rules, self._course)
        where = "" if self.now == tuple(range(len(self.now))) else f", at {_names(self.now)}"
        after = (
            f"after step {self._commits.newest:,}"
            if self._commits.newest
            else "from the start: there is no checkpoint yet"
        )
        who = "one rank restarts" if len(self.now) == 1 else f"all {len(self.now)} ranks restart"
        self._say(f"{who}, {after}{where}")
        return None


def _names(places: set[int] | tuple[int, ...]) -> str:
    """Name slots in a message.

    >>> _names({2}), _names((0, 2, 3))
    ('slot 2', 'slots 0, 2 and 3')
    """
    *others, last = map(str, sorted(places))
    return f"slots {', '.join(others)} and {last}" if others else f"slot {last}"
