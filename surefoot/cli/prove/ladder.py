"""Command `surefoot ladder`."""

from __future__ import annotations

import itertools
import shlex
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from surefoot.cli import options
from surefoot.cli.options import (
    DataOption,
    JsonOption,
    QuietOption,
    SeedOption,
    SetOption,
    SpecArgument,
    TracebackOption,
)
from surefoot.cli.table import print_table, print_text
from surefoot.core.errors import EXIT_OK, InputError, SpecError, StorageError, hint_unwritten
from surefoot.core.process.signals import exit_on_signal
from surefoot.core.units import UNKNOWN

if TYPE_CHECKING:
    from surefoot.prove.ladder import Ladder

RUNG_HELP = 'a user-defined rung: "name (kind): table.key=value"; repeatable'
OUT = "a new one below ladders/"

RungsOption = Annotated[
    str | None,
    typer.Option(
        "--rungs", metavar="A,B", help="the rungs to measure, in this order", show_default="all"
    ),
]
RungOption = Annotated[list[str] | None, typer.Option("--rung", metavar="WORDS", help=RUNG_HELP)]
OutOption = Annotated[
    Path | None,
    typer.Option("--out", metavar="DIR", help="the folder for the results", show_default=OUT),
]
PairsOption = Annotated[
    int,
    typer.Option(
        "--pairs",
        metavar="N",
        help="the maximum number of pairs of runs per rung; a gain needs at least 7",
    ),
]
SamplesOption = Annotated[
    int | None,
    typer.Option(
        "--samples",
        metavar="N",
        help="the number of samples of each run",
        show_default="1.5 seconds of baseline",
    ),
]
LeaveOneOutOption = Annotated[
    bool,
    typer.Option(
        "--leave-one-out", help="at the end, measure the best spec without each of its rungs"
    ),
]
SkipRefusedOption = Annotated[
    bool,
    typer.Option("--skip-refused", help="do not time a rung that failed the parity gate"),
]


def ladder(
    spec: SpecArgument,
    rungs: RungsOption = None,
    rung: RungOption = None,
    out: OutOption = None,
    pairs: PairsOption = 15,
    samples: SamplesOption = None,
    leave_one_out: LeaveOneOutOption = False,
    skip_refused: SkipRefusedOption = False,
    set_: SetOption = None,
    seed: SeedOption = None,
    data: DataOption = None,
    json: JsonOption = False,
    quiet: QuietOption = False,
    traceback: TracebackOption = False,
) -> int:
    """Measure the gain of each optimization on this machine, starting with the plain loop.

    Each rung runs in fresh processes, interleaved with the rung below it. A rung is kept if its
    interval shows a gain and its results agree with those of the baseline; rejected rungs stay in
    the table with the reason. The command writes a table, JSON, a plot and best.toml.
    """
    from surefoot.prove.ladder import LadderSettings, as_row, climb_ladder, parse_rung

    origin = options.read_spec("ladder", spec, options.overrides(set_, seed=seed, data=data))
    if origin.spec.task.use is None:
        raise SpecError(
            "the spec names no task, so other processes cannot build it",
            hint='add [task] use = "file.py:Task"',
        )
    given = [parse_rung(text) for text in rung or []]
    names = None if rungs is None else [name.strip() for name in rungs.split(",")]
    settings = LadderSettings(pairs=pairs, samples=samples, measures_refused=not skip_refused)
    folder = _folder(out, origin.spec.task.use)
    tell = options.make_progress_printer("ladder", quiet=quiet or json)
    with exit_on_signal():
        found = climb_ladder(
            spec,
            origin.spec,
            settings,
            folder,
            given=given,
            names=names,
            leave_one_out=leave_one_out,
            tell=tell,
            decided=lambda ladder: _report_rung(ladder, folder, tell),
        )
    options.print_result(as_row(found), _print, found, folder, not settings.can_decide, json=json)
    if found.results and not any(each.is_measured for each in found.results):
        first = found.results[0]
        raise InputError(
            f"no rung was measured: {first.rung.name}: {first.reason}",
            hint=(
                f"{folder / 'ladder.md'} has the reasons; choose rungs for this machine and "
                "task: --rungs, --rung"
            ),
        )
    return EXIT_OK


def _folder(out: Path | None, use: str) -> Path:
    """Return the folder for the results: `out`, or the first unused `ladders/<task>-<n>`.

    Raises:
        InputError: if `out` is not an empty folder and cannot be created.
    """
    if out is not None:
        options.check_new_folder(out, "--out")
        return out
    stem = Path(use.rpartition(":")[0]).stem or use
    return next(
        path
        for number in itertools.count(1)
        if not (path := Path("ladders") / f"{stem}-{number}").exists()
    )


def _report_rung(ladder: Ladder, folder: Path, tell: Callable[[str], None]) -> None:
    """Write the results so far to `folder`, and print the result of the newest variant.

    If the command is interrupted, the written results remain.
    """
    import json as as_text

    from surefoot.prove.ladder import BEST, as_markdown, as_row, as_svg, as_toml

    texts = {
        "ladder.json": as_text.dumps(as_row(ladder), indent=1) + "\n",
        "ladder.md": as_markdown(ladder),
        "ladder.svg": as_svg(ladder),
        BEST: as_toml(ladder),
    }
    try:
        for name, text in texts.items():
            draft = folder / f".{name}.draft"
            draft.write_text(text, encoding="utf-8")
            draft.replace(folder / name)
    except OSError as error:
        raise StorageError(
            f"{folder} cannot be written: {error.strerror}",
            hint=hint_unwritten(error, "give another folder: --out"),
        ) from None
    if ladder.left_out is None:
        last = ladder.results[-1]
        tell(f"{last.rung.name}: {last.standing.upper()}: {last.reason}")


def _print(ladder: Ladder, folder: Path, is_undecided: bool) -> None:
    from surefoot.prove.ladder import BEST, HEADER, cells
    from surefoot.trial.arm import num_ranks

    print_table(HEADER, [cells(each) for each in ladder.results])
    print()
    for each in ladder.results:
        if not each.kept:
            print_text(f"{each.rung.name}: {each.reason}")
    for name, interval in (ladder.left_out or {}).items():
        print_text(
            f"without {name}: the best spec takes {interval} of the time of that without the rung"
        )
    if is_undecided:
        print_text("too few pairs to show a gain: give --pairs 7 or more")
    last = ladder.kept[-1].total["time"] if ladder.kept else None
    time = UNKNOWN if last is None else last
    gain = f"takes {time} of the baseline's {ladder.conditions['time']}"
    print_text(
        f"best: {folder / BEST} {gain if ladder.kept else 'is the baseline: no rung was kept'}; "
        f"{ladder.num_runs} runs"
    )
    if num_ranks(ladder.best) > 1:
        print_text(
            "this spec needs several ranks: surefoot train "
            f"{shlex.quote(str(folder / BEST))} --ranks {num_ranks(ladder.best)}"
        )
