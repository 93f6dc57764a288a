"""Command `surefoot verify`."""

from __future__ import annotations

import contextlib
import tempfile
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any

import typer

from surefoot.cli import options
from surefoot.cli.options import (
    DataOption,
    JsonOption,
    QuietOption,
    SeedOption,
    SetOption,
    TracebackOption,
)
from surefoot.core.errors import EXIT_OK, EXIT_VERDICT_FAILS, InputError
from surefoot.core.process.signals import exit_on_signal

NUM_SEEDS, NUM_STEPS, NUM_KILLS = 3, 24, 3
OF_SPEC = ("--set", "--seed", "--data")
USED = {
    "--layouts": ("--steps", "--keep", *OF_SPEC),
    "--precision": ("--seeds", "--steps", *OF_SPEC),
    "--compile": ("--keep", *OF_SPEC),
    "--command": ("--kills", "--kill-seed", "--keep"),
    "a SPEC": ("--steps", "--kills", "--kill-seed", "--keep", *OF_SPEC),
}

OptionalSpecArgument = Annotated[
    str | None,
    typer.Argument(metavar="SPEC", help="a TOML file, a built-in task's name, or file.py:Task"),
]
ResumeOption = Annotated[
    bool,
    typer.Option(
        "--resume",
        help="compare killed and resumed runs with uninterrupted ones (the default test)",
        hidden=True,
    ),
]
PrecisionOption = Annotated[
    bool,
    typer.Option("--precision", help="compare the spec's precision with fp32, by their scores"),
]
CompileOption = Annotated[
    bool,
    typer.Option(
        "--compile", help="compare the compiled step with eager mode instead, by every tensor"
    ),
]
LayoutsOption = Annotated[
    list[str] | None,
    typer.Option(
        "--layouts",
        metavar="LIST",
        help='compare several ranks with one process instead: "1; replicate=2"; repeatable',
    ),
]
SeedsOption = Annotated[
    int | None,
    typer.Option(
        "--seeds", metavar="N", help="with --precision: the number of pairs of runs; 3 (9 if worse)"
    ),
]
RunLengthOption = Annotated[
    int | None, typer.Option("--steps", metavar="N", help="the number of steps of each run; 24")
]
KillsOption = Annotated[
    int | None, typer.Option("--kills", metavar="K", help="the number of kills; 3")
]
KillSeedOption = Annotated[
    int | None,
    typer.Option(
        "--kill-seed", metavar="N", help="the seed of the kill times, to repeat a test; 0"
    ),
]
CommandOption = Annotated[
    str | None,
    typer.Option("--command", metavar="WORDS", help="test any training command instead of a SPEC"),
]
StateOption = Annotated[
    Path | None,
    typer.Option(
        "--state",
        metavar="DIR",
        help="with --command: the folder of all files that the command saves",
    ),
]
KeepRunsOption = Annotated[
    Path | None, typer.Option("--keep", metavar="DIR", help="keep the runs in DIR")
]


def verify(
    spec: OptionalSpecArgument = None,
    resume: ResumeOption = True,
    precision: PrecisionOption = False,
    compiled: CompileOption = False,
    layouts: LayoutsOption = None,
    seeds: SeedsOption = None,
    steps: RunLengthOption = None,
    kills: KillsOption = None,
    kill_seed: KillSeedOption = None,
    command: CommandOption = None,
    state: StateOption = None,
    keep: KeepRunsOption = None,
    set_: SetOption = None,
    seed: SeedOption = None,
    data: DataOption = None,
    json: JsonOption = False,
    quiet: QuietOption = False,
    traceback: TracebackOption = False,
) -> int:
    """Test whether training is bitwise repeatable, even when the run is killed and resumed.

    Two uninterrupted runs in fresh processes are compared with each other, and then with a run that
    is killed with SIGKILL and resumed. The output names the first step and component that differ;
    the exit code is 0 if all results are identical, else 1. --precision tests whether fewer bits
    changed the score, --compile whether torch.compile changed the results, --layouts whether
    several ranks compute the same as one process.
    """
    ways = {
        "--layouts": bool(layouts),
        "--precision": precision,
        "--compile": compiled,
        "--command": command is not None,
    }
    way = next((name for name, is_given in ways.items() if is_given), "a SPEC")
    given = {"--seeds": seeds, "--steps": steps, "--kills": kills, "--kill-seed": kill_seed}
    _refuse_idle(
        way, {**given, "--keep": keep, "--set": set_ or None, "--seed": seed, "--data": data}
    )
    steps, kills = NUM_STEPS if steps is None else steps, NUM_KILLS if kills is None else kills
    tell = options.make_progress_printer("verify", quiet=quiet or json)
    if precision or compiled or layouts:
        if spec is None or sum(ways.values()) > 1:
            raise InputError(
                f"{way} needs a SPEC, but no other test",
                hint=f"surefoot verify digits {way}",
            )
        stated = options.overrides(set_, seed=seed, data=data)
        if precision:
            seeds = NUM_SEEDS if seeds is None else seeds
            return _verify_precision(spec, stated, tell, steps=steps, seeds=seeds, json=json)
        with _folder(keep) as folder:
            if compiled:
                return _verify_compiled(spec, stated, folder, tell, json=json)
            text = "; ".join(layouts or ())
            return _verify_layouts(spec, stated, text, folder, tell, steps=steps, json=json)
    _check_resume(spec, command, state, steps, kills)
    with _folder(keep) as folder:
        if command is not None and state is not None:
            return _verify_command(command, state, folder, tell, kills, kill_seed or 0, json=json)
        stated = options.overrides(set_, seed=seed, data=data)
        return _verify_resume(
            str(spec), stated, folder, tell, steps, kills, kill_seed or 0, json=json
        )


def _refuse_idle(way: str, given: Mapping[str, object]) -> None:
    """Raise InputError if a flag was given that has no effect on the selected test.

    Args:
        way: selected test, a key of `USED`.
        given: value of each flag; None if it was not given.
    """
    idle = [flag for flag, value in given.items() if value is not None and flag not in USED[way]]
    if idle:
        raise InputError(
            f"{idle[0]} has no effect with {way}",
            hint=f"leave out {idle[0]}: {way} allows {', '.join(USED[way])}",
        )


def _check_resume(
    spec: str | None, command: str | None, state: Path | None, steps: int, kills: int
) -> None:
    """Raise InputError if the flags do not define a valid test of killed and resumed runs."""
    if (spec is None) == (command is None):
        raise InputError(
            "verify needs either a SPEC or --command",
            hint='surefoot verify digits, or --command "python train.py" --state out/',
        )
    from surefoot.prove.verify import MIN_STEPS

    if (command is None) != (state is None):
        raise InputError(
            "--command and --state must be given together",
            hint="give the folder that holds all files that the command saves",
        )
    if kills < 1:
        raise InputError(f"--kills must be at least 1; got {kills}", hint="give --kills 1 or more")
    if steps < MIN_STEPS:
        raise InputError(f"--steps is {steps}", hint=f"use {MIN_STEPS} steps or more")


def _verify_resume(
    spec: str,
    stated: Any,
    folder: Path,
    tell: Callable[[str], None],
    steps: int,
    kills: int,
    seed: int,
    *,
    json: bool,
) -> int:
    from surefoot.cli.prove.tables.verify import print_resume
    from surefoot.prove.verify import verify_resume

    origin = options.read_spec("verify", spec, stated)
    found = verify_resume(origin.spec, folder, steps=steps, kills=kills, seed=seed, tell=tell)
    row = {"spec": spec, "holds": found.holds, **asdict(found)}
    options.print_result(row, print_resume, found, spec, json=json)
    return EXIT_OK if found.holds else EXIT_VERDICT_FAILS


def _verify_command(
    command: str,
    state: Path,
    folder: Path,
    tell: Callable[[str], None],
    kills: int,
    seed: int,
    *,
    json: bool,
) -> int:
    from surefoot.cli.prove.tables.verify import print_command
    from surefoot.prove.command import verify_command

    found = verify_command(command, state, folder, kills=kills, seed=seed, tell=tell)
    row = {"command": command, "holds": found.holds, **asdict(found)}
    options.print_result(row, print_command, found, command, json=json)
    return EXIT_OK if found.holds else EXIT_VERDICT_FAILS


def _verify_precision(
    spec: str, stated: Any, tell: Callable[[str], None], *, steps: int, seeds: int, json: bool
) -> int:
    from surefoot.cli.prove.tables.verify import print_precision
    from surefoot.prove.precision import WIDE, verify_precision

    with exit_on_signal():
        tried = options.read_spec("verify --precision", spec, stated).spec
        name, score = verify_precision(tried, steps=steps, seeds=seeds, tell=tell)
    holds = not score.is_worse
    row = {"spec": spec, "precision": name, "against": WIDE, "holds": holds, **asdict(score)}
    options.print_result(row, print_precision, score, spec, name, steps, json=json)
    return EXIT_OK if holds else EXIT_VERDICT_FAILS


def _verify_compiled(
    spec: str, stated: Any, folder: Path, tell: Callable[[str], None], *, json: bool
) -> int:
    from surefoot.cli.prove.tables.verify import print_compiled
    from surefoot.prove.ladder import verify_compiled

    origin = options.read_spec("verify --compile", spec, stated)
    tried, found = verify_compiled(origin.spec, folder, tell=tell)
    holds = found.verdict == "passes"
    row = {
        "spec": spec,
        "compile": tried.compile.what,
        "mode": tried.compile.mode,
        "holds": holds,
        "words": found.words,
        "comparisons": [asdict(each) for each in found.claims],
    }
    what = f"{tried.compile.what}, {tried.compile.mode}"
    options.print_result(row, print_compiled, found, spec, what, json=json)
    return EXIT_OK if holds else EXIT_VERDICT_FAILS


def _verify_layouts(
    spec: str,
    stated: Any,
    text: str,
    folder: Path,
    tell: Callable[[str], None],
    *,
    steps: int,
    json: bool,
) -> int:
    from surefoot.cli.prove.tables.verify import print_layouts
    from surefoot.core.ranks.layout import Layout
    from surefoot.prove.layouts import verify_layouts

    # each once, however it is written
    layouts = list(dict.fromkeys(Layout.parse(each) for each in text.split(";")))
    if all(each.world_size == 1 for each in layouts):
        raise InputError(
            f"--layouts {text!r} has no layout with several ranks",
            hint='--layouts "replicate=2; replicate=4"',
        )
    if steps < 1:
        raise InputError(f"--steps is {steps}", hint="give --steps 1 or more")
    origin = options.read_spec("verify --layouts", spec, stated)
    found = verify_layouts(origin.spec, layouts, folder, steps=steps, tell=tell)
    rows = [{**asdict(row), "holds": row.holds} for row in found.rows]
    row = {**asdict(found), "spec": spec, "holds": found.holds, "rows": rows}
    options.print_result(row, print_layouts, found, spec, json=json)
    return EXIT_OK if found.holds else EXIT_VERDICT_FAILS


@contextlib.contextmanager
def _folder(keep: Path | None) -> Iterator[Path]:
    """Yield the folder for the runs: `keep`, or a temporary folder that is deleted afterwards.

    Raises:
        InputError: if `keep` is not empty, or if the folder cannot be created or written.
    """
    with contextlib.ExitStack() as stack:
        stack.enter_context(exit_on_signal())
        try:
            if keep is None:
                temporary = tempfile.TemporaryDirectory(prefix="surefoot-verify-")
                folder = Path(stack.enter_context(temporary))
            else:
                folder = _create_folder(keep).resolve()
        except OSError as error:
            what, hint = f"--keep {keep}", "give another folder"
            if keep is None:
                what, hint = "a folder for the runs", "give a folder with --keep"
            raise InputError(
                f"{what} cannot be created or written: {error.strerror}", hint=hint
            ) from error
        yield folder


def _create_folder(keep: Path) -> Path:
    """Create the folder and check that files can be written to it.

    Raises:
        OSError: if files cannot be written.
        InputError: if the folder is not empty.
    """
    if keep.exists() and (not keep.is_dir() or any(keep.iterdir())):
        raise InputError(f"--keep {keep} is not an empty folder", hint="give a new or empty folder")
    keep.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryFile(dir=keep):
        return keep
