"""Command `surefoot train`."""

from __future__ import annotations

import shlex
import shutil
import sys
from collections.abc import Mapping
from typing import TYPE_CHECKING, Annotated, Any

import typer

from surefoot.cli import options
from surefoot.cli.options import (
    AcceptCodeChangeOption,
    AcceptDataOption,
    DataOption,
    JsonOption,
    QuietOption,
    RangeOption,
    RestartsOption,
    RunOption,
    SeedOption,
    SetOption,
    SpecArgument,
    StepsOption,
    TracebackOption,
)
from surefoot.core.errors import EXIT_OK

if TYPE_CHECKING:
    from pathlib import Path

    from surefoot.contract.events import Ended
    from surefoot.contract.spec import RunSpec
    from surefoot.train.resume.start import Start
    from surefoot.train.run import Run


def train(
    spec: SpecArgument,
    run: RunOption = None,
    set_: SetOption = None,
    steps: StepsOption = None,
    seed: SeedOption = None,
    data: DataOption = None,
    fresh: Annotated[
        bool,
        typer.Option(
            "--fresh", help="train a new run in a new folder beside --run; nothing is deleted"
        ),
    ] = False,
    accept_code_change: AcceptCodeChangeOption = False,
    accept_data: AcceptDataOption = False,
    weights: Annotated[
        str | None,
        typer.Option(
            "--weights",
            metavar="DIR",
            help="start a new run with the weights of a run or of an import",
        ),
    ] = None,
    partial_weights: Annotated[
        bool,
        typer.Option(
            "--partial-weights",
            help="with --weights: load only the weights that fit by name and shape",
        ),
    ] = False,
    ranks: RangeOption = None,
    max_restarts: RestartsOption = None,
    json: JsonOption = False,
    quiet: QuietOption = False,
    traceback: TracebackOption = False,
) -> int:
    """Train a task and print how the run ended.

    The run folder holds the spec, the event log and the weights; the same command with --run
    resumes an unfinished run. With --ranks several processes of this host train the run, with the
    same results as one process.
    """
    from surefoot.contract import spec_file
    from surefoot.core.errors import InputError

    if partial_weights and weights is None:
        raise InputError(
            "--partial-weights needs --weights DIR, which is not given",
            hint="add --weights DIR, or leave out --partial-weights",
        )
    origin = spec_file.read(spec, options.overrides(set_, steps=steps, seed=seed, data=data))
    if run is not None and weights is not None and not fresh and _started_from(run, weights):
        weights = None  # the run resumes, or is finished
    if (
        run is not None
        and not fresh
        and weights is None
        and tell_finished(run, origin.spec, json=json)
    ):
        return EXIT_OK
    if ranks is not None:
        goes_on = run is not None and not fresh and weights is None
        return options.launch_ranks(ranks, origin.spec, run if goes_on else None, max_restarts)

    options.import_torch()
    from surefoot.train.run import Run

    start = None if weights is None else _start(weights, partial=partial_weights)
    return finish(
        Run(
            origin.spec,
            folder=run,
            fresh=fresh,
            accept_code_change=accept_code_change,
            accept_data=accept_data,
            quiet=quiet,
            start=start,
        ),
        json=json,
    )


def _start(weights: str, *, partial: bool = False) -> Start:
    """Return the checkpoint that the value of `--weights` names; for a run folder, its best one."""
    from surefoot.cli.operate import stored
    from surefoot.train.resume.start import Start

    folder = stored.find_commit(weights, "best")
    return Start(
        folder.parent.parent,
        int(folder.name.removeprefix("step-")),
        weights_only=True,
        partial=partial,
    )


def _started_from(run: Path, weights: str) -> bool:
    """Return whether the run in folder `run` started from the checkpoint that `weights` names."""
    from surefoot.contract import events

    start = _start(weights)
    first = next(events.read(run, events.Started), None) if (run / events.FILE).is_file() else None
    parent = first.parent if isinstance(first, events.Started) else {}
    return (
        parent.get("folder") == str(start.run.resolve())
        and parent.get("step") == start.step
        and bool(parent.get("weights_only"))
    )


def lengthen(ended: Ended) -> str:
    """Return a `--steps` option with which a fork of a finished run has steps left to train.

    A run that was stopped early has steps left, so its fork needs no option: the result is "".
    """
    return "" if ended.outcome == "stopped" else f" --steps {2 * max(1, ended.step)}"


def tell_finished(run: Path, spec: RunSpec, *, json: bool) -> bool:
    """Return whether the run in folder `run` has this spec and nothing left to train.

    If so, rank 0 prints how the run ended.
    """
    from surefoot.contract import events
    from surefoot.core import place

    ended = events.find_end(run, spec.id)
    if ended is None or place.here().rank:
        return ended is not None
    quoted = shlex.quote(str(run))
    ways = [f"to train longer: surefoot resume {quoted} --fork NEW{lengthen(ended)}"]
    ways = [] if ended.step == 0 else ways  # without a checkpoint to go on from
    ways.append("to train from step 0: another --run, or train with --fresh")
    print(
        f"{run} is {ended.outcome} after step {ended.step:,} ({ended.cause}): "
        "nothing is left to train",
        file=sys.stderr,
    )
    print(f"hint: {'; '.join(ways)}", file=sys.stderr)
    # the log has the folder in which the run ended, which may be moved or copied since
    _print_summary(
        {**ended.summary, "folder": str(run)},
        f"{ended.summary.get('task', run.name)}: {ended.outcome}",
        json=json,
    )
    return True


def _print_summary(summary: Mapping[str, Any], title: str, *, json: bool) -> None:
    from surefoot.components.observe.console import final_table, result_rows

    if json:
        options.print_json(dict(summary))
    else:
        columns = shutil.get_terminal_size().columns if sys.stdout.isatty() else None
        print(final_table(result_rows(dict(summary)), title, columns))


def finish(attempt: Run, *, json: bool) -> int:
    """Train a run to its end, print the result on the first rank, and return the exit code."""
    from surefoot.core import flight, place
    from surefoot.train.run import drive

    with attempt:
        drive(attempt)
    if not attempt.group.is_first or (
        attempt.outcome == "interrupted" and flight.is_recalled(place.flight_file())
    ):
        return attempt.exit_code
    _print_summary(attempt.summary, f"{attempt.task.name}: {attempt.outcome}", json=json)
    return attempt.exit_code
