"""Repetition of the step that ended a run, watching every module, so that the error names one."""

from __future__ import annotations

import contextlib

from surefoot.components.precision import Overflow, Watch
from surefoot.components.stability.guard import Guard
from surefoot.core.errors import NumbersError
from surefoot.train.assemble import Assembly


def raise_if_over(guard: Guard, assembly: Assembly, step: int) -> None:
    """Raise the guard's NumbersError; name the first module with non-finite values and a remedy."""
    try:
        guard.raise_if_over(step)
    except NumbersError as error:
        found = find_overflow(assembly, step)
        if found is not None:
            error.message = f"{error.message}; {found.words}"
            error.hint = error.hint if found.remedy is None else f"set {found.remedy}"
        raise


def find_overflow(assembly: Assembly, step: int) -> Overflow | None:
    """Return the first module with non-finite values in `step`, whose optimizer step was skipped.

    Returns None if the step cannot be repeated.
    """
    if assembly.feed.source.guarantee != "proven" or any(
        update.in_backward is not None for update in assembly.updates
    ):
        return None
    # the error that is on its way is the one to tell
    with Watch(assembly.model) as watch, contextlib.suppress(Exception):
        assembly.engine.stepper.look(step)
    return watch.overflow
