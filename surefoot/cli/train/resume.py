"""Command `surefoot resume`."""

from __future__ import annotations

import shlex
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

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
    RunArgument,
    SetOption,
    StepsOption,
    TaskOption,
    TracebackOption,
)
from surefoot.core.errors import EXIT_OK

if TYPE_CHECKING:
    from surefoot.train.resume.start import Start

FromOption = Annotated[
    str | None,
    typer.Option(
        "--from",
        metavar="STEP",
        help="the checkpoint: best, last or a step number",
        show_default="the newest",
    ),
]
ForkOption = Annotated[
    Path | None,
    typer.Option(
        "--fork",
        metavar="NEW",
        help="start a new run in this folder from the checkpoint; RUN is unchanged",
    ),
]
WeightsOnlyOption = Annotated[
    bool,
    typer.Option(
        "--weights-only",
        help="start a new run at step 0 with the weights that fit by name and shape",
    ),
]


def resume(
    run: RunArgument,
    from_: FromOption = None,
    fork: ForkOption = None,
    weights_only: WeightsOnlyOption = False,
    set_: SetOption = None,
    steps: StepsOption = None,
    data: DataOption = None,
    task: TaskOption = None,
    accept_code_change: AcceptCodeChangeOption = False,
    accept_data: AcceptDataOption = False,
    ranks: RangeOption = None,
    max_restarts: RestartsOption = None,
    json: JsonOption = False,
    quiet: QuietOption = False,
    traceback: TracebackOption = False,
) -> int:
    """Resume a run, or fork it from a checkpoint.

    An unfinished run resumes in its folder with its own spec, as if it had not been interrupted.
    With --fork, a new run starts from a checkpoint of the run, and its spec may differ.
    """
    options.import_torch()
    from surefoot.cli.train.train import finish, lengthen, tell_finished
    from surefoot.contract import events, spec_file
    from surefoot.core.errors import SpecError
    from surefoot.train.resume import changes
    from surefoot.train.run import Run

    # a moved task file is the same task
    before = spec_file.read_of_run(run, task=task, checks_task=False).spec
    after = spec_file.read_of_run(
        run, options.overrides(set_, steps=steps, data=data), task=task
    ).spec
    if after.task.use is None:
        raise SpecError(
            f"the task of {run} was built in a script, so only that script can resume the run",
            hint=(
                "in that script: Run(spec, task, folder=...); for a fork add "
                "start=surefoot.Start(Path(run), step)"
            ),
        )
    found = changes.find(before, after)
    start = _start(run, from_, is_fork=fork is not None or weights_only, weights_only=weights_only)
    if start is None:
        ended = events.find_end(run, before.id)
        longer = "" if ended is None or steps is not None else lengthen(ended)
        given = [
            *(part for each in set_ or [] for part in ("--set", each)),
            *([] if steps is None else ["--steps", str(steps)]),
            *([] if data is None else ["--data", str(data)]),
            *([] if task is None else ["--task", task]),
        ]
        changes.check_in_place(
            found, f"surefoot resume {shlex.quote(str(run))} --fork NEW{longer} {shlex.join(given)}"
        )
        if tell_finished(run, before, json=json):
            return EXIT_OK
    elif not weights_only:
        changes.check_fork(found)
    if fork is not None:
        _check_new(fork)
    if ranks is not None:
        return options.launch_ranks(
            ranks, after, run if start is None and fork is None else None, max_restarts
        )
    is_named = start is None or fork is not None
    folder = fork if fork is not None else run
    return finish(
        Run(
            after,
            folder=folder,
            fresh=not is_named,
            accept_code_change=accept_code_change,
            accept_data=accept_data,
            quiet=quiet,
            start=start,
        ),
        json=json,
    )


def _start(run: Path, from_: str | None, *, is_fork: bool, weights_only: bool) -> Start | None:
    """Return the checkpoint from which a fork starts; None if the run resumes in its own folder.

    Args:
        run: run folder.
        from_: value of `--from`: "best", "last", a step number, or None for the newest checkpoint.
        is_fork: True if `--fork` or `--weights-only` is given. Without them, a step that is not the
            newest starts a fork too, and a warning is printed.
        weights_only: True to start from the weights alone.
    """
    from surefoot.contract import commits
    from surefoot.train.resume.start import Start, newest_sound

    if from_ is None and not is_fork:
        return None
    if from_ is None:
        step, troubles = newest_sound(run)
        for trouble in troubles:
            print(f"warning: {trouble}; the previous checkpoint is used", file=sys.stderr)
        return Start(run, step, weights_only)
    step = commits.find_step(run, from_)
    newest = commits.find_step(run, "last")
    if not is_fork and step == newest:
        return None
    if not is_fork:
        print(
            (
                f"warning: step {step:,} is not the newest checkpoint of {run}, which is "
                f"step {newest:,}: that run is unchanged, and a fork of it starts in a new "
                "folder"
            ),
            file=sys.stderr,
        )
    return Start(run, step, weights_only)


def _check_new(fork: Path) -> None:
    from surefoot.contract import events
    from surefoot.core.errors import RunFolderError

    if (fork / events.FILE).is_file():
        raise RunFolderError(
            f"{fork} already holds a run and is not changed",
            hint=(
                f"if that run is unfinished: surefoot resume {shlex.quote(str(fork))}; else "
                "give a new folder with --fork"
            ),
        )
