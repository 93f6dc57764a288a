"""Attribution of an error to surefoot or to user code; user code is reported with its line."""

from __future__ import annotations

import contextlib
import re
import traceback
from collections.abc import Iterator
from typing import TYPE_CHECKING

from surefoot.core.errors import (
    EXIT_OK,
    BadRecordError,
    DataError,
    InputError,
    LostRank,
    NumbersError,
    OutOfMemory,
    SurefootError,
    TaskError,
    UserCodeError,
)
from surefoot.core.process.frames import find_user_frame, is_of_library, is_of_surefoot, is_of_torch
from surefoot.core.process.refused import is_refused

if TYPE_CHECKING:
    from surefoot.components.precision.instability import Overflow
    from surefoot.components.stability.guard import Guard
    from surefoot.train.assemble import Assembly

# message of torch about an output that a later replay has overwritten
_OVERWRITTEN = "of CUDAGraphs that has been overwritten"
# the message with which a DataLoader raises the error of a worker
IN_WORKER = re.compile(
    r"Caught (?P<kind>\w+) in DataLoader worker process \d+\.\nOriginal Traceback"
)
FRAME = re.compile(
    r'^ *File "(?P<file>[^"\n]+)", line (?P<line>\d+), in (?P<name>\S+)\n *(?P<code>.*)$',
    re.MULTILINE,
)


def is_ours(error: BaseException) -> bool:
    """Return whether code of surefoot raised the error, regardless of its caller.

    For example, a signal handler of surefoot runs between any two lines of user code.
    """
    frames = traceback.extract_tb(error.__traceback__)
    return bool(frames) and is_of_surefoot(frames[-1].filename)


def describe(error: BaseException) -> str:
    """Return the error as text: `ValueError: too many (my_task.py:31, in loss: return ...)`."""
    if (inside := _describe_in_worker(str(error))) is not None:
        return inside
    place = find_place(error)
    first = str(error).strip().splitlines() or [""]
    return f"{type(error).__name__}: {first[0]}{'' if place is None else f' ({place})'}"


def _describe_in_worker(text: str) -> str | None:
    """Return the error of a DataLoader worker; None if `text` is not the message of such an error.

    torch puts the traceback of the worker into the message.
    """
    caught = IN_WORKER.match(text)
    if caught is None:
        return None
    told = next(
        (
            line
            for line in reversed(text.splitlines())
            if re.match(rf"(\w+\.)*{caught['kind']}\b", line)
        ),
        caught["kind"],
    )
    frames = [
        each
        for each in FRAME.finditer(text)
        if not (is_of_surefoot(each["file"]) or is_of_library(each["file"]))
    ]
    return (
        told
        if not frames
        else "{0} ({file}:{line}, in {name}: {code})".format(told, **frames[-1].groupdict())
    )


def find_place(error: BaseException) -> str | None:
    """Return the line of user code that raised, or None: `my_task.py:31, in loss: return ...`."""
    frame = find_user_frame(error)
    if frame is None:
        return None
    return (
        f"{frame.filename}:{frame.lineno}, in {frame.name}{f': {frame.line}' if frame.line else ''}"
    )


def find_exit_code(leave: SystemExit) -> int:
    """Return the exit code with which Python ends the process for this SystemExit."""
    return leave.code if isinstance(leave.code, int) else EXIT_OK if leave.code is None else 1


def is_out_of_memory(error: BaseException) -> bool:
    """Return whether the error is a failed allocation on the host or the device."""
    return is_refused(error)


def is_failed_collective(error: BaseException) -> bool:
    """Return whether `error` is a failure of a collective that user code calls.

    Gloo and NCCL raise a RuntimeError for every failure.
    """
    frames = traceback.extract_tb(error.__traceback__)
    is_called = bool(frames) and is_of_torch(frames[-1].filename, "distributed")
    return (
        is_called
        and isinstance(error, RuntimeError)
        and any(words in str(error) for words in ("/gloo/", "NCCL"))
    )


@contextlib.contextmanager
def as_task_errors() -> Iterator[None]:
    """Raise TaskError for errors of user code inside the context; leave others unchanged."""
    try:
        yield
    except SurefootError:
        raise
    except (Exception, SystemExit) as error:
        if find_place(error) is None:
            raise
        raise TaskError(
            f"the task failed before the run: {describe(error)}",
            hint="run with --traceback to see the whole error",
        ) from error


def as_run_error(error: Exception | SystemExit, place: str) -> SurefootError:
    """Return the error that a run raises for `error`, prefixed with `place` (rank and step).

    A failed allocation becomes OutOfMemory. Any other SurefootError that is not an InputError is
    returned with the prefix. A failed collective of the task becomes LostRank, an OSError or
    DataError becomes BadRecordError. Any other error, including InputError and SystemExit, becomes
    UserCodeError, because the run has started.
    """
    is_short = is_out_of_memory(error) and not isinstance(error, OutOfMemory)
    if isinstance(error, SurefootError) and not isinstance(error, InputError) and not is_short:
        if not error.message.startswith(place):
            error.message = f"{place} {error.message}"
        return error
    if is_short:
        short = OutOfMemory(
            f"{place} {describe(error)}",
            hint="use smaller batches: train.microbatch, evaluate.batch",
        )
        short.__cause__ = error
        return short
    if is_failed_collective(error):
        lost = LostRank(
            f"{place} the other ranks are unreachable, in a collective that the task "
            f"itself calls ({find_place(error)})",
            hint="call the same collectives on all ranks, in the same order, with tensors "
            "of the same size",
        )
        lost.__cause__ = error
        return lost
    kind = BadRecordError if isinstance(error, OSError | DataError) else UserCodeError
    if isinstance(error, InputError):
        made = kind(f"{place} {error.message}", hint=error.hint)
    else:
        made = kind(f"{place} {describe(error)}", hint=_find_hint(error))
    made.__cause__ = error
    return made


def _find_hint(error: BaseException) -> str:
    """Return the hint for an error of user code."""
    from surefoot.components.memory.caches import HINT, is_of_repeated_pass

    if is_of_repeated_pass(error):
        return HINT
    if _OVERWRITTEN in str(error):
        return (
            "keep a copy of the output of the model: output.clone(); or set compile.mode "
            '= "default"'
        )
    return "run with --traceback to see the whole error"


def raise_if_over(guard: Guard, assembly: Assembly, step: int) -> None:
    """Raise NumbersError if `guard`, the non-finite check, ends the run.

    The message names the first module with non-finite values, and the hint a remedy.
    """
    try:
        guard.raise_if_over(step)
    except NumbersError as error:
        found = find_overflow(assembly, step)
        if found is not None:
            error.message = f"{error.message}; {found.words}"
            error.hint = error.hint if found.remedy is None else f"set {found.remedy}"
        raise


def find_overflow(assembly: Assembly, step: int) -> Overflow | None:
    """Return the first module with non-finite values in `step`, whose update was skipped.

    The step is computed again to find it. Returns None if the step cannot be repeated.
    """
    from surefoot.components.precision.instability import Watch

    if assembly.feed.source.guarantee != "proven" or any(
        update.in_backward is not None for update in assembly.updates
    ):
        return None
    # the original error is reported, not this one
    with Watch(assembly.model) as watch, contextlib.suppress(Exception):
        assembly.engine.steps.repeat(step)
    return watch.overflow
