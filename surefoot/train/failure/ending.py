"""Outcome of a run: "finished", "failed" etc., the cause in words, and the exit code."""

from __future__ import annotations

from surefoot.core import flight, place
from surefoot.core.errors import (
    EXIT_INTERNAL,
    EXIT_INTERRUPTED,
    EXIT_OK,
    EXIT_TERMINATED,
    SurefootError,
)
from surefoot.train.failure import blame

WHOLE = ("finished", "the length of the run was reached")


def tell_outcome(
    error: BaseException | None,
    *,
    step: int,
    stop: tuple[str, str] | None,
    stop_code: int,
    total_steps: int | None,
) -> tuple[str, str, int]:
    """Return outcome, cause and exit code of a run that ends after `step`.

    The run ends by `error`, else by `stop` (outcome, cause), else because its loop has ended.
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
        return "stopped", f"the loop was left at step {step}", EXIT_OK
    outcome, cause = stop or WHOLE
    if (
        stop_code == EXIT_TERMINATED
        and outcome == "interrupted"
        and flight.is_recalled(place.flight_file())
    ):
        cause = "ended by the supervisor, to begin anew with more ranks"
    return outcome, cause, stop_code if outcome == "interrupted" else EXIT_OK
