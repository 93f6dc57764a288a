"""Command-line flags that several subcommands share, and functions that evaluate them."""

from __future__ import annotations

import errno
import functools
import gc
import importlib
import math
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

if TYPE_CHECKING:
    from surefoot.contract.spec import RunSpec
    from surefoot.contract.spec_file import Origin
    from surefoot.control.launch.looking import Judge
    from surefoot.core.flight import RankSnapshot


def complete_spec(incomplete: str) -> list[str]:
    """Return the names of built-in tasks that start with `incomplete`, for shell completion.

    If there are none, the shell lists files.
    """
    from surefoot.contract.spec_file import builtin_names

    return [name for name in builtin_names() if name.startswith(incomplete)]


SpecArgument = Annotated[
    str,
    typer.Argument(
        metavar="SPEC",
        help="a TOML file, a built-in task's name, or file.py:Task",
        autocompletion=complete_spec,
    ),
]
RunArgument = Annotated[Path, typer.Argument(metavar="RUN", help="a run folder")]
RunOption = Annotated[
    Path | None,
    typer.Option(
        "--run", metavar="DIR", help="the run folder", show_default="a new one below runs/"
    ),
]
SetOption = Annotated[
    list[str] | None,
    typer.Option(
        "--set", metavar="KEY=VALUE", help="set a key of the spec, as in optim.lr=0.01; repeatable"
    ),
]
StepsOption = Annotated[
    int | None, typer.Option("--steps", metavar="N", help="set train.length to N steps")
]
RanksOption = Annotated[
    int | None,
    typer.Option("--ranks", metavar="N", help="train with N processes (ranks) on this host"),
]
RangeOption = Annotated[
    str | None,
    typer.Option(
        "--ranks",
        metavar="N|MIN:MAX",
        help="train with N ranks on this host; MIN:MAX: continue without failed ranks, down to MIN",
    ),
]
RestartsOption = Annotated[
    int | None,
    typer.Option(
        "--max-restarts",
        metavar="N",
        help="with --ranks: consecutive restarts allowed without a new checkpoint; 3",
    ),
]
SeedOption = Annotated[
    int | None,
    typer.Option(
        "--seed", metavar="N", help="set train.seed: initial weights, sample order, augmentation"
    ),
]
DataOption = Annotated[
    str | None,
    typer.Option("--data", metavar="DIR", help="the folder of the data set, or its parent"),
]
TaskOption = Annotated[
    str | None,
    typer.Option(
        "--task",
        metavar="FILE:NAME",
        help="where the task's file is now, if it was moved",
        show_default="task.use",
    ),
]
AcceptCodeChangeOption = Annotated[
    bool, typer.Option("--accept-code-change", help="resume although the task's code has changed")
]
AcceptDataOption = Annotated[
    bool,
    typer.Option("--accept-data", help="resume although the data differ from those trained on"),
]
CsvOption = Annotated[
    Path | None, typer.Option("--csv", metavar="FILE", help="write the table to a new CSV file")
]
JsonOption = Annotated[
    bool, typer.Option("--json", help="print one JSON object on standard output")
]
QuietOption = Annotated[bool, typer.Option("--quiet", help="print no progress")]
TracebackOption = Annotated[
    bool, typer.Option("--traceback", help="show where an error was raised")
]
StepOption = Annotated[
    str, typer.Option("--step", metavar="STEP", help="the checkpoint: best, last, or a step number")
]
SplitOption = Annotated[
    str | None,
    typer.Option(
        "--split", metavar="NAME", help="the split of the data", show_default="evaluate.split"
    ),
]


def overrides(
    set_: list[str] | None,
    *,
    steps: int | None = None,
    seed: int | None = None,
    data: str | None = None,
) -> list[tuple[str, Any, str]]:
    """Return (key, value, origin) for each command-line flag that changes the spec.

    Dedicated flags such as `--steps` override `--set`. If a key gets several different values, a
    warning is printed and the last value is used: command lines are often changed by appending
    flags.
    """
    from surefoot.cli.help import warn_of_values
    from surefoot.contract.spec_file import parse_set

    found = [parse_set(text) for text in set_ or []]
    if steps is not None:
        found.append(("train.length", f"{steps} steps", "--steps"))
    if seed is not None:
        found.append(("train.seed", seed, "--seed"))
    if data is not None:
        found.append(("data.folder", data, "--data"))
    for key in dict.fromkeys(key for key, _, _ in found):
        given = [(value, origin.split()[0]) for other, value, origin in found if other == key]
        if any(value != given[0][0] for value, _ in given):
            warn_of_values(key, [f"{value!r} by {flag}" for value, flag in given])
    return found


def read_spec(
    command: str, given: str, overrides: list[tuple[str, Any, str]], *, is_quiet: bool = False
) -> Origin:
    """Read a spec, and print a note with the spec keys that the command ignores.

    Args:
        command: name of the command, such as "bench step".
        given: the SPEC argument.
        overrides: result of the function `overrides`.
        is_quiet: if True, no note is printed, for ranks other than 0.
    """
    from surefoot.cli.left_out import DECIDED, name_left_out
    from surefoot.contract import spec_file

    origin = spec_file.read(given, overrides, decided=DECIDED.get(command, ()))
    if not is_quiet:
        name_left_out(command, origin)
    return origin


def find_run(given: str) -> Path | None:
    """Return the path of the run folder if a SPEC|RUN argument names one; None for a spec."""
    return Path(given) if (Path(given) / "spec.toml").is_file() else None


def read_spec_or_run(
    command: str, given: str, overrides: list[tuple[str, Any, str]], task: str | None
) -> Origin:
    """Read a spec or that of a run folder; print a note with the keys that the command ignores."""
    from surefoot.cli.left_out import name_left_out
    from surefoot.contract import spec_file

    run = find_run(given)
    check_of_run(task, is_run=run is not None)
    if run is None:
        return read_spec(command, given, overrides)
    origin = spec_file.read_of_run(run, overrides, task=task)
    name_left_out(command, origin)
    return origin


def check_new_file(path: Path, flag: str, example: str) -> None:
    """Raise InputError if a new file cannot be created at `path`.

    Commands call this function before they start any long work.

    Args:
        path: path of the file.
        flag: flag or argument that names the file, for the message.
        example: example of a file name, for the message.
    """
    import os

    from surefoot.core.errors import InputError

    if os.path.isdir(path):
        raise InputError(
            f"{path} is a folder", hint=f"give a file in that folder: {flag} {path / example}"
        )
    if os.path.lexists(path):
        raise InputError(
            f"{path} already exists and is not overwritten",
            hint=f"give another {flag}, or remove the existing file",
        )
    if not os.path.isdir(path.parent):
        raise InputError(
            f"there is no folder {path.parent} for {path.name}",
            hint=f"create the folder first, or give another {flag}",
        )


def check_new_folder(path: Path, flag: str) -> None:
    """Raise InputError if `path` is not an empty folder and cannot be created.

    Commands call this function before they start any long work. `flag` names the path in the
    message.
    """
    from surefoot.core.errors import InputError

    try:
        if path.exists() and (not path.is_dir() or any(path.iterdir())):
            raise InputError(
                f"{flag} {path} is not an empty folder", hint="give a new or empty folder"
            )
        if not path.exists():
            path.mkdir(parents=True)
            path.rmdir()
    except OSError as error:
        raise InputError(
            f"{flag} {path} cannot be created: {error.strerror}", hint="give another folder"
        ) from None


def check_of_run(task: str | None, *, is_run: bool) -> None:
    """Raise InputError if `--task` is given without a run: a spec names its task itself."""
    from surefoot.core.errors import InputError

    if task is not None and not is_run:
        raise InputError(
            f"--task {task} applies to a RUN, but a SPEC is given",
            hint=f"for a SPEC, use --set task.use={task}",
        )


def reject_spec_flags(flags: Mapping[str, object], done: str, verb: str) -> None:
    """Raise InputError if a flag would change the spec of a run.

    Args:
        flags: value of each flag; None or empty if it was not given.
        done: participle for the message, such as "profiled".
        verb: subcommand, for the hint.
    """
    from surefoot.core.errors import InputError

    wrong = [flag for flag, value in flags.items() if value is not None and value != []]
    if wrong:
        raise InputError(
            f"{wrong[0]} changes a spec, but a run is {done} with its own spec",
            hint=f"change the spec of the run: surefoot {verb} RUN/spec.toml",
        )


def make_progress_printer(verb: str, *, quiet: bool) -> Callable[[str], None]:
    """Return a function that prints progress on standard error, or nothing if `quiet` is set."""
    return (lambda text: None) if quiet else lambda text: say(f"{verb}: {text}")


def warn(text: str) -> None:
    """Print a warning on standard error, even with `--quiet`."""
    print(f"warning: {text}", file=sys.stderr, flush=True)


def say(text: str) -> None:
    """Print a line on standard error.

    If the pipe is closed, the line and all later ones are discarded, so that a closed pipe neither
    ends training nor changes the exit code.
    """
    try:
        print(text, file=sys.stderr, flush=True)
    except OSError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stderr.fileno())


def launch_ranks(
    ranks: int | str,
    spec: RunSpec,
    run: Path | None,
    max_restarts: int | None,
    *,
    trains: bool = True,
) -> int:
    """Run the current command as several ranks on this host; return the exit code.

    Args:
        ranks: number of ranks, or a range "MIN:MAX".
        spec: spec that the ranks use.
        run: run folder, from whose checkpoints the ranks restart after a failure; None for no
            restarts.
        max_restarts: consecutive restarts allowed without a new checkpoint; None for 3.
        trains: False for a command that writes no checkpoint to resume from.

    Raises:
        InputError: if the number of ranks is not possible.
    """
    from surefoot.control.launch import launch
    from surefoot.control.launch.decide import find_numbers
    from surefoot.control.launch.local import without_ranks
    from surefoot.core.errors import InputError
    from surefoot.core.ranks import layout

    least, most = (None, ranks) if isinstance(ranks, int) else read_range(ranks)
    numbers: tuple[int, ...] = ()
    if least is not None:
        if run is None:
            raise InputError(
                (
                    f"--ranks {ranks} restarts the remaining ranks in a run folder, but no "
                    "run folder is given"
                ),
                hint="give --run DIR, without --fresh, --weights, --fork and --from",
            )
        numbers, passed = find_numbers(least, most, functools.partial(_refuse, spec))
        if passed:
            say(passed)
    elif most > 0 and trains:
        _check_ranks(spec, most)
    elif most > 0:
        layout.fit(most, spec.layout.replicate, spec.layout.shard, spec.layout.zero_stage)
    judge = find_judge(spec.layout.hang_timeout)
    judge = (
        judge if trains else judge._replace(hint="no checkpoint was saved; start the command again")
    )
    restarts = 3 if max_restarts is None else max_restarts
    try:
        return launch(
            without_ranks(sys.argv[1:]),
            most,
            say,
            judge,
            run=run,
            max_restarts=restarts,
            numbers=numbers,
        )
    except OSError as error:
        if error.errno != errno.EMFILE:
            raise
        raise InputError(
            f"--ranks is {ranks}: the limit of open files is too low for that many ranks",
            hint="raise the limit: ulimit -n",
        ) from error


def import_torch() -> None:
    """Import torch, if it is not imported yet, while Python's garbage collector is paused.

    Importing torch creates about 250,000 objects that live until the process ends. The collector
    would examine them again and again and find nothing to free. They are frozen (`gc.freeze`), so
    that neither collections during training nor the end of the process examine them.
    """
    if "torch" in sys.modules:
        return
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        importlib.import_module("torch")
    finally:
        if was_enabled:
            gc.enable()
    gc.freeze()


def read_range(text: str) -> tuple[int | None, int]:
    """Parse the value of `--ranks` to (MIN, MAX), or to (None, N).

    Raises:
        InputError: if the value is invalid.

    >>> read_range("2"), read_range("1:4")
    ((None, 2), (1, 4))
    """
    from surefoot.core.errors import InputError

    words = text.split(":")
    values = [int(word) if word.isascii() and word.isdecimal() else 0 for word in words]
    if len(values) > 2 or min(values) < 1 or values != sorted(values):
        raise InputError(
            f"--ranks must be N or MIN:MAX with 1 <= MIN <= MAX; got {text}",
            hint="use --ranks 2, or a range such as --ranks 2:4",
        )
    return (values[0] if len(values) == 2 else None), values[-1]


def _refuse(spec: RunSpec, number: int) -> str:
    """Return why `number` ranks cannot train this spec; "" if the spec allows them."""
    from surefoot.core.errors import SpecError

    try:
        _check_ranks(spec, number)
    except SpecError as error:
        return error.message
    return ""


def _check_ranks(spec: RunSpec, number: int) -> None:
    """Raise SpecError, before any rank starts, if `number` ranks cannot train this spec."""
    from surefoot.core.ranks import layout, pieces

    table, train = spec.layout, spec.train
    batches = (train.step_batch, *(batch for _, batch in train.ramp))
    size = train.pass_size(table.virtual_ranks or number)
    layout.fit(number, table.replicate, table.shard, table.zero_stage)
    if table.virtual_ranks is not None:
        pieces.check_virtual(table.virtual_ranks, number)
    # a batch of a DataLoader is known to the ranks only, which check it again
    is_known = "batch" in train.model_fields_set and train.microbatch != 1
    if number > 1 and is_known:
        pieces.check_pieces(batches, size, number)
    if number > 1 and is_known and train.batchnorm == "sync":
        pieces.check_equal_passes(batches, size, number, has_ramp=bool(train.ramp))


def find_judge(stall_s: float) -> Judge:
    """Return the functions with which a supervisor detects and describes stalled ranks.

    Ranks are stalled if one waits for `stall_s` seconds in a collective.
    """
    from surefoot.control.diagnose.hang import find_apart, find_hang, is_stalled
    from surefoot.control.launch.looking import Judge

    def blame(rows: Sequence[RankSnapshot]) -> tuple[int, ...] | None:
        found = find_hang(rows)
        return None if found.is_unlike else found.ranks

    return Judge(
        lambda rows: is_stalled(rows, stall_s),
        lambda rows: find_hang(rows).words,
        lambda rows: "" if (found := find_apart(rows)) is None else found.words,
        blame,
    )


def print_result(row: dict[str, Any], show: Callable[..., None], *given: Any, json: bool) -> None:
    """Print `row` as one JSON object if `json` is set; otherwise call `show(*given)`."""
    if json:
        print_json(row)
    else:
        show(*given)


def print_json(row: dict[str, Any]) -> None:
    """Print one JSON object with the version of its format; non-finite values become null."""
    import json

    print(json.dumps(_without_nan({"version": 1, **row}), allow_nan=False, default=str))


def _without_nan(value: Any) -> Any:
    if isinstance(value, float) and not math.isfinite(value):
        return None
    if isinstance(value, Mapping):
        return {key: _without_nan(part) for key, part in value.items()}
    return [_without_nan(part) for part in value] if isinstance(value, list | tuple) else value
