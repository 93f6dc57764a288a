"""The exceptions of surefoot; each says what was given, what is allowed and what to do.

    SurefootError                   base; never raised itself
    |-- InputError            2     found before any work: nothing was written
    |   |-- SpecError               a wrong run specification: file, line, nearest valid name
    |   |-- TaskError               a task that is missing, lacks a method or breaks the contract
    |   |-- DataError               data that is missing, truncated or in a different format
    |   |   `-- OtherDataError      data read again to resume that differs from the trained data
    |   |-- RunFolderError          a folder that is not a run, or the run of a different spec
    |   `-- MissingExtra            an optional package that is not installed
    `-- RunError                    the run started and failed; an Ended event has the cause
        |-- UserCodeError     3     user code raised an exception
        |-- NumbersError      4     non-finite or diverged values
        |-- StorageError      5     the run folder can no longer be written
        |-- BadRecordError    6     a record could not be read
        |-- OutOfMemory       7     a step needed more memory than available
        `-- LostRank          8     another rank of the run failed, or did not start
    RenamedKeyWarning               -- a FutureWarning: a key or argument has its previous name

The number is the exit code of the process. Other exit codes: 0 success, 1 a failed verdict, 70 an
internal error, 129 ended by SIGHUP, 130 interrupted, 140 ended by SIGUSR2, 143 ended by SIGTERM,
152 ended by SIGXCPU.
"""

from __future__ import annotations

import difflib
import errno
import re
from collections.abc import Iterable, Iterator
from contextlib import contextmanager

EXIT_OK = 0
EXIT_VERDICT_FAILS = 1
EXIT_INTERNAL = 70
EXIT_HUNG_UP = 129
EXIT_INTERRUPTED = 130
EXIT_USER_SIGNAL = 140
EXIT_TERMINATED = 143
EXIT_CPU_TIME = 152


class SurefootError(Exception):
    """Base of all errors: a message, a hint on what to do, and the exit code of the process.

    Args:
        message: What was given, and what is allowed.
        hint: What to do, printed on a line of its own; None without one.
    """

    exit_code = EXIT_INTERNAL

    def __init__(self, message: str, *, hint: str | None = None) -> None:
        super().__init__(message)
        self.message = message
        self.hint = hint

    def __str__(self) -> str:
        return self.message if self.hint is None else f"{self.message}\nhint: {self.hint}"


class InputError(SurefootError):
    """An input that cannot be run; nothing was written."""

    exit_code = 2


class RenamedKeyWarning(FutureWarning):
    """Warning that a key of a spec, or an argument, is given by its previous name."""


class SpecError(InputError):
    """A wrong run specification.

    `where` is `file:line` or the flag that gave the value, `key` its table and key.
    """

    def __init__(
        self,
        message: str,
        *,
        hint: str | None = None,
        where: str | None = None,
        key: tuple[str, ...] | None = None,
    ) -> None:
        super().__init__(message if where is None else f"{where}: {message}", hint=hint)
        self.where, self.key = where, key


class TaskError(InputError):
    """A task that cannot be found, lacks a method, or breaks the contract."""


class DataError(InputError):
    """Data that is missing, truncated, or in a different format."""


class OtherDataError(DataError):
    """The data that a resumed run reads again differ from the data that were trained on."""


class RunFolderError(InputError):
    """A folder that is not a run, the run of a different spec, or one that another process
    writes.
    """


class MissingExtra(InputError):
    """An optional package that is not installed; names the extra that installs it."""

    def __init__(self, package: str, *, extra: str, needed_for: str) -> None:
        super().__init__(
            f"{needed_for} needs the package {package}, which is not installed",
            hint=f"pip install 'surefoot[{extra}]'",
        )
        self.package = package
        self.extra = extra


@contextmanager
def require_package(package: str, *modules: str, extra: str, needed_for: str) -> Iterator[None]:
    """Raise MissingExtra for an import of `modules` inside the block that is not installed.

    A package that is installed and broken raises its own error.
    """
    try:
        yield
    except ModuleNotFoundError as error:
        if error.name not in modules:
            raise
        raise MissingExtra(package, extra=extra, needed_for=needed_for) from None


FULL = (errno.ENOSPC, errno.EDQUOT)
IN_TEXT = re.compile(r"\(os error ([0-9]+)\)")  # the error number in messages of Rust libraries
MENDS = {
    **dict.fromkeys(FULL, "free some space"),
    **dict.fromkeys((errno.EACCES, errno.EPERM), "get permission to write there"),
    **dict.fromkeys((errno.ENOENT, errno.ENOTDIR), "create its parent folder"),
    errno.ELOOP: "replace the symbolic link with the file itself, if you trust its origin",
    errno.ENAMETOOLONG: "use a shorter name",
    errno.EFBIG: "raise the limit of a file's size: ulimit -f",
    errno.EISDIR: "move the folder of that name away",
    errno.EROFS: "mount the disk for writing",
}


def hint_unwritten(error: BaseException, instead: str | None = None) -> str:
    """Return what to do about a write that failed with `error`, or what to do `instead`.

    >>> hint_unwritten(OSError(errno.ENOSPC, "No space left on device"), "give another --run")
    'free some space, or give another --run'
    """
    told = IN_TEXT.search(str(error))
    number = error.errno if isinstance(error, OSError) else int(told.group(1)) if told else None
    mend = MENDS.get(number or 0, "check that the disk is mounted and accepts files")
    return mend if instead is None else f"{mend}, or {instead}"


def hint_nearest(given: str, known: Iterable[str], cutoff: float = 0.6) -> str:
    """Return the start of a hint that asks whether a known name was meant; "" if none is near.

    >>> hint_nearest("batchh", ["batch", "length"]), hint_nearest("x", ["batch"])
    ("did you mean 'batch'? ", '')
    """
    near = difflib.get_close_matches(given, list(known), n=1, cutoff=cutoff)
    return f"did you mean {near[0]!r}? " if near else ""


def hint_unread(error: OSError) -> str:
    """Return what to do about a file that could not be opened for reading.

    >>> hint_unread(PermissionError(errno.EACCES, "Permission denied"))
    'ask its owner for permission to read it'
    """
    if error.errno in (errno.EACCES, errno.EPERM):
        return "ask its owner for permission to read it"
    if error.errno in (errno.ELOOP, errno.ENAMETOOLONG):
        return MENDS[error.errno]
    return "check that the disk is mounted and responds"


class RunError(SurefootError):
    """A run that started and could not continue."""


class UserCodeError(RunError):
    """An exception in user code; the message shows the user's frame, the cause is chained."""

    exit_code = 3


class NumbersError(RunError):
    """Non-finite loss, gradients or weights, or a diverged loss."""

    exit_code = 4


class StorageError(RunError):
    """A run folder that can no longer be written.

    `is_full` is True if the disk is full, or the user's quota is used up.
    """

    exit_code = 5
    is_full = False

    @classmethod
    def of(cls, error: OSError, message: str) -> StorageError:
        """Return the error for a write that failed with `error`, with the text `message`."""
        made = cls(message, hint=hint_unwritten(error))
        made.is_full = error.errno in (errno.ENOSPC, errno.EDQUOT)
        return made


class BadRecordError(RunError):
    """A record that could not be read during the run."""

    exit_code = 6


class OutOfMemory(RunError):
    """A step or an evaluation that needed more memory than available."""

    exit_code = 7


class LostRank(RunError):
    """Another rank that failed or did not start; the first failed rank reports the reason."""

    exit_code = 8
