"""Every exception of surefoot; each says what was given, what is allowed and what to do.

    SurefootError                   base; never raised itself
    |-- InputError            2     found before any work: nothing was written
    |   |-- SpecError               a run specification: file, line, nearest right name
    |   |-- TaskError               a task that cannot be found, lacks a method or breaks the contract
    |   |-- DataError               data that is missing, truncated or of another format
    |   |   `-- OtherDataError      data that are read again to resume, and are not those that were trained on
    |   |-- RunFolderError          a folder that is no run, or the run of another spec
    |   `-- MissingExtra            an optional package that is not installed
    `-- RunError                    the run began and could not go on; an Ended event holds the cause
        |-- UserCodeError     3     the user's own code raised
        |-- NumbersError      4     non-finite or diverged numbers
        |-- StorageError      5     the run folder can no longer be written
        |-- BadRecordError    6     a record could not be read
        |-- OutOfMemory       7     a step needed more memory than there is
        `-- LostRank          8     another rank of the run is gone, or did not begin

The number is the process's exit code. Besides: 0 done, 1 a verdict that does not hold, 70 an error of our own, 129 ended by
SIGHUP, 130 interrupted, 140 ended by SIGUSR2, 143 ended by SIGTERM, 152 ended by SIGXCPU.
"""

from __future__ import annotations

import errno
import re
from collections.abc import Iterator
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
    """The base of the tree: a message, a hint that says what to do, and the exit code of the process."""

    exit_code = EXIT_INTERNAL

    def __init__(self, message: str, *, hint: str | None = None) -> None:
        super().__init__(message)
        self.message = message
        self.hint = hint

    def __str__(self) -> str:
        return self.message if self.hint is None else f"{self.message}\nhint: {self.hint}"


class InputError(SurefootError):
    """What was given cannot be run; nothing was written."""

    exit_code = 2


class SpecError(InputError):
    """A run specification that is wrong; `where` is `file:line` or the flag that gave the value, `key` its table and key."""

    def __init__(
        self, message: str, *, hint: str | None = None, where: str | None = None, key: tuple[str, ...] | None = None
    ) -> None:
        super().__init__(message if where is None else f"{where}: {message}", hint=hint)
        self.where, self.key = where, key


class TaskError(InputError):
    """A task that cannot be found, lacks a method, or breaks the contract."""


class DataError(InputError):
    """Data that is missing, truncated, or of another format."""


class OtherDataError(DataError):
    """Data that are read again to resume, and are not those that were trained on."""


class RunFolderError(InputError):
    """A folder that is no run, the run of another spec, or one that another process writes."""


class MissingExtra(InputError):
    """An optional package that is not installed; names the extra that brings it."""

    def __init__(self, package: str, *, extra: str, needed_for: str) -> None:
        super().__init__(
            f"{needed_for} needs the package {package}, which is not installed",
            hint=f"pip install 'surefoot[{extra}]'",
        )
        self.package = package
        self.extra = extra


@contextmanager
def needing(package: str, *modules: str, extra: str, needed_for: str) -> Iterator[None]:
    """Imports of `modules` inside raise MissingExtra where one is not installed; one that is there and broken raises its own error."""
    try:
        yield
    except ModuleNotFoundError as error:
        if error.name not in modules:
            raise
        raise MissingExtra(package, extra=extra, needed_for=needed_for) from None


FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
IN_TEXT = re.compile(r"\(os error ([0-9]+)\)")  # how libraries in Rust say it
MENDS = {
    **dict.fromkeys(FULL, "free some space"),
    **dict.fromkeys((errno.EACCES, errno.EPERM), "get the right to write there"),
    **dict.fromkeys((errno.ENOENT, errno.ENOTDIR), "make the folder that it lies in"),
    errno.ELOOP: "put the file itself in the place of the link, where you trust who made it",
    errno.ENAMETOOLONG: "use a shorter name",
    errno.EISDIR: "move the folder of that name away",
    errno.EROFS: "mount the disk for writing",
}


def hint_unwritten(error: BaseException, instead: str | None = None) -> str:
    """What mends a write that the system refused with `error`, or what to do `instead`.

    >>> hint_unwritten(OSError(errno.ENOSPC, "No space left on device"), "give another --run")
    'free some space, or give another --run'
    """
    told = IN_TEXT.search(str(error))
    number = error.errno if isinstance(error, OSError) else int(told.group(1)) if told else None
    mend = MENDS.get(number or 0, "see that the disk is there and takes files")
    return mend if instead is None else f"{mend}, or {instead}"


def hint_unread(error: OSError) -> str:
    """What to do about a file that the system did not open for reading.

    >>> hint_unread(PermissionError(errno.EACCES, "Permission denied"))
    'ask its owner for the right to read it'
    """
    if error.errno in (errno.EACCES, errno.EPERM):
        return "ask its owner for the right to read it"
    if error.errno in (errno.ELOOP, errno.ENAMETOOLONG):
        return MENDS[error.errno]
    return "see that the disk is there and answers"


class RunError(SurefootError):
    """The run began and could not go on."""


class UserCodeError(RunError):
    """The user's own code raised; the message shows the user's own frame, the cause is chained."""

    exit_code = 3


class NumbersError(RunError):
    """Loss, gradients or weights became non-finite, or the loss diverged."""

    exit_code = 4


class StorageError(RunError):
    """The run folder can no longer be written; `is_full` where what was missing is room on the disk, or in its user's share."""

    exit_code = 5
    is_full = False

    @classmethod
    def of(cls, error: OSError, message: str) -> StorageError:
        """What a disk refused with `error`, in the words of `message`."""
        made = cls(message, hint=hint_unwritten(error))
        made.is_full = error.errno in (errno.ENOSPC, errno.EDQUOT)
        return made


class BadRecordError(RunError):
    """A record could not be read while the run went on."""

    exit_code = 6


class OutOfMemory(RunError):
    """A step, or an evaluation, needed more memory than there is."""

    exit_code = 7


class LostRank(RunError):
    """Another rank of the run is gone, or did not begin; the first that failed says why."""

    exit_code = 8
