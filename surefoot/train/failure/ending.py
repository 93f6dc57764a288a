"""End of a run: requests to end it, its outcome (such as "finished"), its cause and exit code."""

from __future__ import annotations

import contextlib
import functools
import signal
from collections.abc import Callable

from surefoot.core import flight, place
from surefoot.core.errors import (
    EXIT_INTERNAL,
    EXIT_INTERRUPTED,
    EXIT_OK,
    EXIT_TERMINATED,
    SurefootError,
)
from surefoot.core.process import signals
from surefoot.train import environment
from surefoot.train.failure import blame

WHOLE = ("finished", "the length of the run was reached")


class StopRequests:
    """Requests to end a run, from signals or from the training loop.

    `outcome` is None without a request, else the outcome of the run and its cause.
    """

    def __init__(self) -> None:
        self.outcome: tuple[str, str] | None = None  # outcome and cause
        self.exit_code = EXIT_INTERRUPTED
        self.is_leaving = False  # whether the end is being recorded
        self._asked = set[int]()  # exit codes of the received signals

    @property
    def is_preempted(self) -> bool:
        """True if a signal other than Ctrl-C has requested the end of the run."""
        is_interrupted = self.outcome is not None and self.outcome[0] == "interrupted"
        return is_interrupted and self.exit_code != EXIT_INTERRUPTED

    def stop(self, reason: str) -> None:
        """End the run after this step, unless its end is requested already."""
        self.outcome = self.outcome or ("stopped", reason)

    def listen(
        self,
        opened: contextlib.ExitStack,
        save: Callable[[], None],
        say: Callable[[str], None],
        step: Callable[[], int],
    ) -> None:
        """Handle signals until `opened` is closed.

        A signal of `signals.ENDINGS` ends the run after its current step, which `step()` returns; a
        second one ends it at once. SIGUSR1 calls `save`. `say` prints a message.
        """
        for signal_name, ending in signals.ENDINGS.items():
            if hasattr(signal, signal_name):  # no SIGHUP on Windows
                heard = functools.partial(self._interrupt, *ending, say, step)
                number, has_echo = getattr(signal, signal_name), environment.is_launched()
                opened.callback(signals.listen(number, heard, has_echo=has_echo))
        if hasattr(signal, "SIGUSR1"):
            opened.callback(signals.listen(signal.SIGUSR1, save))

    def ending(
        self, error: BaseException | None, step: int, total_steps: int | None
    ) -> tuple[str, str, int]:
        """Return outcome, cause and exit code of a run that ends after `step`.

        `error` is the error that ends the run, or None.
        """
        stop, code = self.outcome, self.exit_code
        return tell_outcome(error, step=step, stop=stop, stop_code=code, total_steps=total_steps)

    def _interrupt(
        self,
        cause: str,
        name: str,
        exit_code: int,
        say: Callable[[str], None],
        step: Callable[[], int],
    ) -> None:
        """Handle a signal: end the run after this step, or at once if the signal is repeated."""
        if self.is_leaving:
            return  # a further signal must not interrupt the recording of the end
        is_first = exit_code not in self._asked
        self._asked.add(exit_code)
        self.outcome, self.exit_code = ("interrupted", cause), exit_code
        if not is_first:
            self.outcome = ("interrupted", f"{cause}, at once, after step {step()}")
            self.is_leaving = True
            raise KeyboardInterrupt if exit_code == EXIT_INTERRUPTED else SystemExit(exit_code)
        # a signal may interrupt a write to the same stream, which raises RuntimeError
        with contextlib.suppress(RuntimeError):
            say(f"ending after this step; {name} again stops at once")


def tell_outcome(
    error: BaseException | None,
    *,
    step: int,
    stop: tuple[str, str] | None,
    stop_code: int,
    total_steps: int | None,
) -> tuple[str, str, int]:
    """Return outcome, cause and exit code of a run that ends after `step`.

    `error` is the error that ends the run. Without one, the result is `stop` (outcome and cause,
    with exit code `stop_code`). Without `stop`, the loop has ended: "finished" at `total_steps`,
    else "stopped".
    """
    if isinstance(error, KeyboardInterrupt):
        return "interrupted", f"interrupted at once by Ctrl-C after step {step}", EXIT_INTERRUPTED
    if isinstance(error, SurefootError):
        return "failed", error.message, error.exit_code
    if isinstance(error, Exception):
        made = blame.as_run_error(error, f"after step {step}:")
        return "failed", made.message, made.exit_code
    if isinstance(error, SystemExit) and stop is not None and error.code == stop_code:
        return *stop, stop_code
    if isinstance(error, SystemExit):
        code = blame.find_exit_code(error)
        return "failed" if code else "stopped", f"SystemExit: {error.code}, after step {step}", code
    if error is not None:
        return "failed", f"{type(error).__name__} after step {step}", EXIT_INTERNAL
    if stop is None and step != total_steps:
        return "stopped", f"the loop exited at step {step}", EXIT_OK
    outcome, cause = stop or WHOLE
    if (
        stop_code == EXIT_TERMINATED
        and outcome == "interrupted"
        and flight.is_recalled(place.flight_file())
    ):
        cause = "ended by the supervisor, to restart with more ranks"
    return outcome, cause, stop_code if outcome == "interrupted" else EXIT_OK
