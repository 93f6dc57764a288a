"""Command line of surefoot: its subcommands, and the reporting of errors.

Each subcommand is imported only when it is needed.
"""

from __future__ import annotations

import contextlib
import errno
import functools
import importlib
import io
import mmap
import os
import sys
import warnings
from typing import Any, TextIO

import typer
from typer.main import get_command

from surefoot.cli import options
from surefoot.cli.help import LazyVerbs, Verb, Verbs
from surefoot.core import place
from surefoot.core.errors import (
    EXIT_INTERNAL,
    EXIT_INTERRUPTED,
    EXIT_OK,
    InputError,
    OutOfMemory,
    RenamedKeyWarning,
    StorageError,
    SurefootError,
    UserCodeError,
    hint_unread,
    hint_unwritten,
)
from surefoot.core.process.refused import address_space_bytes, is_refused

app = typer.Typer(
    name="surefoot",
    cls=Verbs,
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode="rich",
    help=(
        "Train any PyTorch model, and prove what the library claims.\n\nStart with: "
        "surefoot train digits. For your own task: surefoot init."
    ),
    epilog=(
        "Exit codes: 0 success, 1 a check failed, 2 bad input, 3 an error in your code, 4 "
        "non-finite or diverged values, 5 storage error, 6 a bad record, 7 out of memory, 8 "
        "a failed rank, 70 an internal error of surefoot, 129 ended by SIGHUP, 130 interrupted, "
        "140 ended by SIGUSR2, 143 ended by SIGTERM, 152 ended by SIGXCPU."
    ),
)

# another user's file, a link in a run folder, an invalid name, a file instead of a folder
FORBIDDEN = (errno.EACCES, errno.EPERM, errno.ELOOP, errno.ENAMETOOLONG, errno.ENOTDIR)
DISK_REFUSES = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO, errno.EROFS)
RESERVE_BYTES = 16 << 20  # of address space; no physical memory is allocated for it
RESERVE: list[mmap.mmap] = []  # released when memory is refused
VERBS: dict[str, dict[str, str]] = {  # group in --help -> subcommand -> its module
    "Train": {
        "demo": "train.demo",
        "init": "train.init",
        "train": "train.train",
        "resume": "train.resume",
        "evaluate": "train.evaluate",
        "predict": "train.predict",
    },
    "Inspect": {
        "runs": "look.runs",
        "show": "look.show",
        "compare": "look.compare",
        "why": "look.why",
        "report": "look.report",
        "ledger": "look.ledger",
        "spec": "look.spec",
    },
    "Measure": {
        "profile": "look.profile",
        "roofline": "prove.roofline",
        "explain": "prove.explain",
        "formats": "prove.formats",
        "memory": "prove.memory",
        "bench": "prove.bench",
    },
    "Improve": {
        "ladder": "prove.ladder",
        "whatif": "prove.whatif",
        "tune-loader": "prove.tune_loader",
    },
    "Prove": {"check": "prove.check", "verify": "prove.verify", "prove": "prove.promise"},
    "Manage": {
        "archive": "operate.archive",
        "remove": "operate.remove",
        "checkpoint": "operate.checkpoint",
        "data": "operate.data",
    },
}


@app.callback()
def _no_verb() -> None:
    """Accept no options before the subcommand; the help text is in `app`."""


@functools.cache
def build_verbs() -> Any:
    """Build the root command; each subcommand is imported and built on first access."""
    built: Any = get_command(app)
    built.commands = LazyVerbs(
        {
            name: functools.partial(_build_verb, name, module, group)
            for group, modules in VERBS.items()
            for name, module in modules.items()
        }
    )
    return built


def _build_verb(name: str, module: str, group: str) -> Any:
    found = importlib.import_module(f"surefoot.cli.{module}")
    alone = typer.Typer(
        add_completion=False, pretty_exceptions_enable=False, rich_markup_mode="rich"
    )
    if isinstance(getattr(found, "app", None), typer.Typer):
        alone.add_typer(found.app, name=name, rich_help_panel=group)
        around: Any = get_command(alone)
        return around.commands[name]
    verb = getattr(found, name.replace("-", "_"))
    alone.command(name, cls=Verb, rich_help_panel=group)(verb)
    return get_command(alone)


def main() -> None:
    """Run the subcommand in `sys.argv` and exit with its exit code.

    Errors are printed as text; with `--traceback`, tracebacks are printed too.
    """
    _open_closed_streams()
    _allow_any_text()
    _show_renamed_keys()
    _reserve_memory()
    try:
        code = build_verbs()(prog_name="surefoot", standalone_mode=False)
    except SurefootError as error:
        if not isinstance(error, OutOfMemory) and is_refused(error):
            code = _tell_no_memory(error, error.message)
        else:
            _print_error(error)
            code = error.exit_code
    except typer.Exit as leave:
        code = leave.exit_code
    except (KeyboardInterrupt, typer.Abort):
        print("interrupted", file=sys.stderr)
        code = EXIT_INTERRUPTED
    except SystemExit as leave:
        code = _exit_code_of(leave)
    except OSError as error:
        code = _tell_refused(error)
    except Exception as error:  # noqa: BLE001 - the last place that can put it into words
        code = _tell_other(error)
    sys.exit(_flush(code if isinstance(code, int) else EXIT_OK))


def _show_renamed_keys() -> None:
    """Replace `warnings.showwarning`, so that a renamed key is reported in one line.

    The line is printed on standard error by the first process only, not by every rank.
    """
    show = warnings.showwarning

    def show_or_print(
        message: Warning | str,
        category: type[Warning],
        filename: str,
        lineno: int,
        file: TextIO | None = None,
        line: str | None = None,
    ) -> None:
        if not issubclass(category, RenamedKeyWarning):
            show(message, category, filename, lineno, file, line)
        elif not place.is_started_rank():
            options.warn(str(message))

    warnings.showwarning = show_or_print


def _open_closed_streams() -> None:
    """Replace a missing stdout or stderr by the null device, so that printing works as usual.

    A stream is missing in a daemon, or after `>&-` in a shell.
    """
    for name in ("stdout", "stderr"):
        if getattr(sys, name) is None:
            # for as long as the process lives
            stream = open(os.devnull, "w", encoding="utf-8")  # noqa: SIM115
            setattr(sys, name, stream)


def _allow_any_text() -> None:
    """Make stdout and stderr escape characters that they cannot encode, instead of raising.

    An ASCII terminal gets `\\xe9`; an undecodable byte in a file name becomes `\\udcff`.
    """
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            # a rank's stream was a file and is a pipe now: the change queries the file position
            with contextlib.suppress(OSError):
                stream.reconfigure(errors="backslashreplace")


def _reserve_memory() -> None:
    """Reserve address space for printing an out-of-memory error, if `ulimit -v` sets a limit.

    Without this limit, no reserve is needed: Linux kills the process rather than refuse an
    allocation.
    """
    if address_space_bytes() is not None:
        with contextlib.suppress(OSError, MemoryError):
            RESERVE.append(mmap.mmap(-1, RESERVE_BYTES))


def _flush(code: int) -> int:
    """Flush stdout and return the exit code: `code`, or that of a storage error if flushing fails.

    It is not a failure if the reader of a pipe closed it early, as `head` does.
    """
    try:
        sys.stdout.flush()
        return code
    except OSError as error:
        nowhere = os.open(os.devnull, os.O_WRONLY)
        # otherwise the interpreter would flush again at exit, and print an error
        os.dup2(nowhere, sys.stdout.fileno())
        return code if isinstance(error, BrokenPipeError) else _tell_unwritten(error)


def _tell_no_memory(error: Exception, message: str = "") -> int:
    """Print an out-of-memory error for an allocation outside of a training step.

    The host, the container or `ulimit -v` refused the memory, for example for the import of torch
    or for the weights of a model. Return the exit code of such an error.
    """
    RESERVE.clear()
    text = next(iter(str(error).strip().splitlines()), "")
    message = message or f"out of memory: {type(error).__name__}: {text}"
    try:
        from surefoot.core.process.memory_limits import find_limit

        most = f"this process may use at most {find_limit().words}"
        _print_error(
            OutOfMemory(message, hint=f"{most}: raise that limit, or use a smaller model or batch")
        )
    # even this message needs memory, and an import without it raises any error
    except Exception:  # noqa: BLE001
        os.write(2, f"error: {message}\n".encode(errors="replace"))
    return OutOfMemory.exit_code


def _tell_unwritten(error: OSError) -> int:
    """Print a storage error for a write that failed; return its exit code.

    The disk is full, broken or read-only. Most often the write was to standard output.
    """
    where = error.filename or "standard output"
    _print_error(
        StorageError(
            f"{where} cannot be written: {error.strerror}",
            hint=hint_unwritten(error, "write to another disk"),
        )
    )
    return StorageError.exit_code


def _tell_refused(error: OSError) -> int:
    """Print an error for an OSError that no subcommand handled; return the exit code.

    Errors of the disk and missing permissions are reported as such. Any other OSError is reported
    as a bug in surefoot.
    """
    if error.errno in DISK_REFUSES:
        return _tell_unwritten(error)
    if error.errno not in FORBIDDEN or error.filename is None:
        return _tell_other(error)
    told = InputError(
        f"{error.filename} cannot be opened: {error.strerror}", hint=hint_unread(error)
    )
    _print_error(told)
    return told.exit_code


def _exit_code_of(leave: SystemExit) -> int:
    """Return the exit code for a SystemExit; re-raise it if surefoot or Typer raised it.

    An exit that the user's task requested is reported as an error of the task, whatever its code.
    After a closed pipe, as with `head`, the exit code is 0.
    """
    if isinstance(leave.__context__, BrokenPipeError):
        # Typer exits with 1 after a closed pipe, as by `head`; surefoot's 1 is a failed verdict
        return EXIT_OK
    if "torch" not in sys.modules:
        # no task has run, for example in shell completion, which should not wait for torch
        raise leave
    from surefoot.train.failure import blame

    if blame.is_ours(leave) or blame.find_place(leave) is None:
        raise leave
    error = UserCodeError(
        f"the task ended the process: {blame.describe(leave)}", hint="raise an error instead"
    )
    _print_error(error)
    return error.exit_code


def _wants_traceback() -> bool:
    return "--traceback" in sys.argv


def _print_error(error: SurefootError) -> None:
    if _wants_traceback():
        import traceback

        traceback.print_exception(error)
    with contextlib.suppress(OSError):  # the stream may be closed; the exit code remains
        print(f"error: {_remove_control_characters(error.message)}", file=sys.stderr)
        if error.hint:
            print(f"hint: {_remove_control_characters(error.hint)}", file=sys.stderr)


def _remove_control_characters(text: str) -> str:
    """Return the text without terminal control characters.

    Error messages may quote text from untrusted files, such as the name of a tensor.
    """
    from surefoot.cli.table import without_control

    return "\n".join(map(without_control, text.split("\n")))


def _tell_other(error: Exception) -> int:
    show_usage = getattr(error, "show", None)
    if callable(show_usage):  # a usage error of the command line
        show_usage(file=sys.stderr)
        return int(getattr(error, "exit_code", 2))
    if is_refused(error):
        return _tell_no_memory(error)
    if _wants_traceback():
        import traceback

        traceback.print_exception(error)
    print(f"error: surefoot failed: {type(error).__name__}: {error}", file=sys.stderr)
    print(
        "hint: this is a bug in surefoot; run the command with --traceback and report it",
        file=sys.stderr,
    )
    return EXIT_INTERNAL
