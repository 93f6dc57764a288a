"""The exceptions of surefoot; each says what was given, what is allowed and what to do.

    SurefootError                   base; never raised itself
    |-- InputError            2     found before any work: nothing was written
    |   |-- SpecError               a wrong run specification: file, line, nearest valid name
    |   |-- TaskError               a task that is missing, lacks a method or violates the protocol
    |   |-- DataError               data that is missing, truncated or in a different format
    |   |   |-- UnknownSplitError   a split of which the task has no data
    |   |   |-- EndOfStream         the end of data without a length
    |   |   `-- OtherDataError      data of a resumed run that differs from the trained data
    |   |-- RunFolderError          a folder that is not a run, or the run of a different spec
    |   `-- MissingExtra            an optional package that is not installed
    `-- RunError                    the run started and failed; an Ended event has the cause
        |-- UserCodeError     3     user code raised an exception
        |-- NumbersError      4     non-finite or diverged values
        |-- StorageError      5     surefoot can no longer write to the run folder
        |-- BadRecordError    6     a data record could not be read
        |-- OutOfMemory       7     a step needed more memory than available
        `-- LostRank          8     another rank of the run failed, or did not start
    RenamedKeyWarning               -- a FutureWarning: a key or argument was given by its old name

The number is the exit code of the process. Other exit codes: 0 success, 1 a failed check, 70 an
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
    """Base class of all errors: a message, a hint on what to do, and the exit code of the process.

    Args:
        message: What was given, and what is allowed.
        hint: What the user can do, printed on a line of its own; None for no hint.
    """

    exit_code = EXIT_INTERNAL

    def __init__(self, message: str, *, hint: str | None = None) -> None:
        super().__init__(message)
        self.message = message
        self.hint = hint

    def __str__(self) -> str:
        return self.message if self.hint is None else f"{self.message}\nhint: {self.hint}"


class InputError(SurefootError):
    """Invalid input that was found before any work; nothing was written."""

    exit_code = 2


class RenamedKeyWarning(FutureWarning):
    """Warning that a key of a spec, or an argument, was given by its old name."""


class SpecError(InputError):
    """Invalid run specification.

    `where` is the place of the wrong value, if known: `file:line` or a command-line flag. `key` is
    the table and the key of that value, such as `("optim", "lr")`.
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
    """Task that cannot be found, lacks a method, or violates the task protocol."""


class DataError(InputError):
    """Data that is missing, truncated, or in a different format."""


class UnknownSplitError(DataError):
    """The task has no data of a split."""


class EndOfStream(DataError):
    """End of data without a length; an evaluation ends there."""


class OtherDataError(DataError):
    """Data that differs from the data that a run was trained on, found when the run is resumed."""


class RunFolderError(InputError):
    """Folder that is not a run, is the run of a different spec, or is in use by another process."""


class MissingExtra(InputError):
    """Optional package that is not installed; the hint names the extra of surefoot to install."""

    def __init__(self, package: str, *, extra: str, needed_for: str) -> None:
        super().__init__(
            f"{needed_for} needs the package {package}, which is not installed",
            hint=f"pip install 'surefoot[{extra}]'",
        )
        self.package = package
        self.extra = extra


@contextmanager
def require_package(package: str, *modules: str, extra: str, needed_for: str) -> Iterator[None]:
    """Raise MissingExtra if an import inside the block fails because a module is not installed.

    Only the names in `modules` count. A package that is installed but fails to import raises its
    own error.
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
    """Return a hint for a write that failed with `error`.

    It says how to fix the cause; `instead`, if given, is added as an alternative.

    >>> hint_unwritten(OSError(errno.ENOSPC, "No space left on device"), "give another --run")
    'free some space, or give another --run'
    """
    told = IN_TEXT.search(str(error))
    number = error.errno if isinstance(error, OSError) else int(told.group(1)) if told else None
    mend = MENDS.get(number or 0, "check that the disk is mounted and accepts files")
    return mend if instead is None else f"{mend}, or {instead}"


def hint_nearest(given: str, known: Iterable[str], cutoff: float = 0.6) -> str:
    """Return a hint such as "did you mean 'batch'? " for the most similar name; "" for none.

    `cutoff` is the least similarity, from 0 to 1, as in `difflib.get_close_matches`. More text can
    follow the hint.

    >>> hint_nearest("batchh", ["batch", "length"]), hint_nearest("x", ["batch"])
    ("did you mean 'batch'? ", '')
    """
    near = find_nearest(given, known, n=1, cutoff=cutoff)
    return f"did you mean {near[0]!r}? " if near else ""


def find_nearest(given: str, known: Iterable[str], n: int = 3, cutoff: float = 0.6) -> list[str]:
    """Return at most `n` names that are similar to `given`, the most similar first.

    Upper and lower case, "_" and "-" make no difference.

    >>> find_nearest("AdamW", ["adam", "adamw"]), find_nearest("one-cycle", ["one_cycle"])
    (['adamw', 'adam'], ['one_cycle'])
    """
    names: dict[str, list[str]] = {}
    for name in known:
        names.setdefault(plain_name(name), []).append(name)
    close = difflib.get_close_matches(plain_name(given), names, n=n, cutoff=cutoff)
    return [name for each in close for name in sorted(names[each], key=given.__ne__)][:n]


def plain_name(name: str) -> str:
    """Return a name in lower case, without "_" and "-"."""
    return name.lower().replace("_", "").replace("-", "")


def hint_unread(error: OSError) -> str:
    """Return a hint for a file that could not be opened for reading.

    >>> hint_unread(PermissionError(errno.EACCES, "Permission denied"))
    'ask its owner for permission to read it'
    """
    if error.errno in (errno.EACCES, errno.EPERM):
        return "ask its owner for permission to read it"
    if error.errno in (errno.ELOOP, errno.ENAMETOOLONG):
        return MENDS[error.errno]
    return "check that the disk is mounted and responds"


class RunError(SurefootError):
    """Failure of a run after it started."""


class UserCodeError(RunError):
    """Error in user code; the message shows where, and the user's exception, if any, is chained."""

    exit_code = 3


class NumbersError(RunError):
    """Non-finite loss, gradients or weights, or a loss that diverged."""

    exit_code = 4


class StorageError(RunError):
    """Run folder to which surefoot can no longer write.

    `is_full` is True if the disk is full or the user's quota is used up.
    """

    exit_code = 5
    is_full = False

    @classmethod
    def of(cls, error: OSError, message: str) -> StorageError:
        """Return a StorageError with the text `message` for a write that failed with `error`."""
        made = cls(message, hint=hint_unwritten(error))
        made.is_full = error.errno in (errno.ENOSPC, errno.EDQUOT)
        return made


class BadRecordError(RunError):
    """Data record, such as a sample, that could not be read during the run."""

    exit_code = 6


class OutOfMemory(RunError):
    """Training step or evaluation that needed more memory than was available."""

    exit_code = 7


class LostRank(RunError):
    """Failure of this rank because another rank failed or did not start.

    The rank that failed first reports the reason.
    """

    exit_code = 8
