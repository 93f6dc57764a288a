"""Commands of `surefoot checkpoint`, without torch.

`export` and `import` are in `transfer.py`.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from surefoot.cli import options
from surefoot.cli.help import Verb, Verbs
from surefoot.cli.operate import transfer
from surefoot.cli.options import JsonOption, RunArgument, TracebackOption

if TYPE_CHECKING:
    from surefoot.cli.operate.stored import CommitHealth

app = typer.Typer(
    cls=Verbs,
    no_args_is_help=True,
    help="List, check, compare, prune, export and import checkpoints.",
)

CommitArgument = Annotated[
    str,
    typer.Argument(metavar="CHECKPOINT", help="RUN, RUN:STEP, RUN:best, or the folder of a step"),
]
KeepOption = Annotated[
    int | None,
    typer.Option(
        "--keep",
        metavar="N",
        help="the number of newest checkpoints to keep",
        min=2,
        show_default="checkpoint.keep",
    ),
]
KeepBestOption = Annotated[
    int | None,
    typer.Option(
        "--keep-best",
        metavar="N",
        help="the number of best checkpoints to keep",
        min=1,
        show_default="checkpoint.keep_best",
    ),
]
KeepEveryOption = Annotated[
    str | None,
    typer.Option(
        "--keep-every",
        metavar="D",
        help="also keep the first checkpoint after each multiple of D",
        show_default="checkpoint.keep_every",
    ),
]
DryRunOption = Annotated[
    bool, typer.Option("--dry-run", help="print what would be deleted, and delete nothing")
]
MAX_SHOWN = 40


@app.command(cls=Verb, name="list")
def list_(run: RunArgument, json: JsonOption = False, traceback: TracebackOption = False) -> None:
    """List the checkpoints of a run.

    Each line has the step, attempt, size, score and age, and the share of files that are links to
    those of an earlier checkpoint.
    """
    from surefoot.cli.operate import stored
    from surefoot.cli.table import print_table, without_control

    found = stored.rows(run)
    units = {} if json else stored.read_units(run)
    others = stored.find_leftovers(run)
    if json:
        options.print_json({"run": str(run), "commits": found, "left_over": others})
        return
    print_table(
        ("step", "attempt", "size", "linked", "score", "age", ""),
        [_line(row, units) for row in found],
        right=("step", "attempt", "size", "linked", "age"),
    )
    for name in others:
        print(
            without_control(f"unfinished or set aside: {run / 'checkpoints' / name}"),
            file=sys.stderr,
        )


def _line(row: dict[str, Any], units: Mapping[str, str]) -> tuple[str, ...]:
    from surefoot.core.units import UNKNOWN, format_bytes, format_seconds

    if "error" in row:
        return (f"{row['step']:,}", UNKNOWN, UNKNOWN, UNKNOWN, UNKNOWN, UNKNOWN, row["error"])
    marks = [
        name
        for name, holds in (("best", row["best"]), ("weights only", not row["whole_state"]))
        if holds
    ]
    return (
        f"{row['step']:,}",
        str(row["generation"]),
        format_bytes(row["bytes"]),
        format_bytes(row["linked_bytes"]) if row["linked"] else "",
        _score(row["score"], units) or UNKNOWN,
        format_seconds(row["age_s"]),
        ", ".join(marks),
    )


def _score(score: Mapping[str, Any] | None, units: Mapping[str, str]) -> str | None:
    """Format the score in a checkpoint's manifest, as `surefoot show` does; None if there is none.

    `units` maps the names of metrics to their units.
    """
    from surefoot.cli.look.past import format_value

    value = None if score is None else score.get("value")
    if score is None or not isinstance(value, int | float):
        return None
    return f"{score['name']} {format_value(value, units.get(score['name'], ''))}"


@app.command(cls=Verb)
def show(
    commit: CommitArgument,
    step: Annotated[
        str, typer.Option("--step", metavar="STEP", help="for a RUN: best, last, or a step number")
    ] = "last",
    json: JsonOption = False,
    traceback: TracebackOption = False,
) -> None:
    """Show the files and tensors of a checkpoint.

    The output has the tensors with shapes and dtypes, and the origin of the checkpoint. Only the
    manifest is read. For a RUN the newest checkpoint with a readable manifest is shown.
    """
    from surefoot.cli.operate import stored
    from surefoot.cli.table import print_pairs, print_table, without_control
    from surefoot.core.units import format_bytes

    folder, made, troubles = stored.find_readable(commit, step)
    for trouble in troubles:
        print(
            without_control(f"warning: {trouble}; the checkpoint before it is shown"),
            file=sys.stderr,
        )
    if json:
        files = [
            {
                "name": e.name,
                "bytes": e.num_bytes,
                "sha256": e.sha256,
                "since": e.since,
                "tensors": _tensors(e),
            }
            for e in made.files
        ]
        options.print_json(
            {
                **stored.row_of(folder, made),
                "spec_id": made.spec_id,
                "format": made.format,
                "layout": dict(made.layout),
                "environment": dict(made.environment),
                "files": files,
            }
        )
        return
    parent = made.parent or {}
    told = [
        ("commit", str(folder)),
        ("step", f"{made.step:,}"),
        ("attempt", str(made.generation)),
        ("spec", made.spec_id),
        ("size", format_bytes(made.num_bytes)),
    ]
    if (score := _score(made.score, stored.read_units(folder.parent.parent))) is not None:
        told.append(("score", score))
    if parent:
        told.append(("from", f"step {parent.get('step')} of {parent.get('folder')}"))
    print_pairs(
        [
            *told,
            (
                "versions",
                ", ".join(f"{name} {version}" for name, version in made.environment.items()),
            ),
        ]
    )
    for entry in made.files:
        since = (
            f", unchanged since step {entry.since:,}"
            if entry.since not in (None, made.step)
            else ""
        )
        print(f"\n{entry.name}  {format_bytes(entry.num_bytes)}{since}")
        if entry.tensors:
            rows = [
                (name, piece.dtype, str(list(piece.shape)), format_bytes(piece.num_bytes))
                for name, piece in entry.tensors.items()
            ]
            print_table(("tensor", "dtype", "shape", "size"), rows, right=("size",), indent=2)


def _tensors(entry: Any) -> dict[str, Any] | None:
    if entry.tensors is None:
        return None
    return {
        name: {
            "dtype": piece.dtype,
            "shape": list(piece.shape),
            "bytes": piece.num_bytes,
            "sha256": piece.sha256,
        }
        for name, piece in entry.tensors.items()
    }


@app.command(cls=Verb)
def check(
    run: Annotated[
        str, typer.Argument(metavar="RUN", help="a run folder, or one checkpoint of it: RUN:STEP")
    ],
    repair: Annotated[
        bool,
        typer.Option("--repair", help="rename damaged checkpoints to .bad-...; nothing is deleted"),
    ] = False,
    json: JsonOption = False,
    traceback: TracebackOption = False,
) -> int:
    """Compare every byte of the checkpoints of a run with its digest.

    The output names damaged files, checkpoints of the log that are missing, and the checkpoint from
    which a run would resume. The exit code is 1 if a checkpoint is damaged or missing, even if it
    was renamed just now.
    """
    from surefoot.cli.operate import stored, wholeness
    from surefoot.cli.table import without_control
    from surefoot.core.errors import RunFolderError

    has_folder, lost = (Path(run) / "checkpoints").is_dir(), wholeness.find_lost(Path(run))
    is_run = has_folder or bool(lost)
    found = [] if is_run else [stored.check_commit(stored.find_commit(run))]
    found += stored.check_run(Path(run)) if has_folder else []
    if not found and not lost:
        raise RunFolderError(
            f"{run} has no checkpoint, so there is nothing to check", hint=stored.COMMIT_HINT
        )
    unread = wholeness.why_unread(Path(run)) if is_run else None
    if unread is not None:
        print(
            without_control(f"warning: missing checkpoints cannot be detected: {unread}"),
            file=sys.stderr,
        )
    damaged = [each for each in found if not each.is_sound]
    moved = _set_aside(Path(run), damaged, found[0].folder) if repair and damaged else {}
    goes_on = stored.newest_sound(found)
    if json:
        options.print_json(
            {
                "run": run,
                "ok": not (damaged or lost),
                "goes_on_after": goes_on,
                "commits": [_health_row(each, moved) for each in found],
                "gone": [each.step for each in lost],
                "log_unread": unread,
            }
        )
        return int(bool(damaged or lost))
    for each in found:
        _print_health(each, moved)
    for missing in lost:
        print(without_control(f"step {missing.step:,}  GONE    {missing.why}"))
    if is_run:
        print(
            "no checkpoint here can be resumed from"
            if goes_on is None
            else f"a run resumes after step {goes_on:,}"
        )
    return int(bool(damaged or lost))


def _health_row(health: CommitHealth, moved: Mapping[int, str]) -> dict[str, Any]:
    return {
        "step": health.step,
        "sound": health.is_sound,
        "damaged": list(health.damaged),
        "files": list(health.names),
        "unknown": list(health.unknown),
        "num_files": health.num_files,
        "bytes": health.num_bytes,
        "whole_state": health.whole_state,
        "set_aside": moved.get(health.step),
    }


def _print_health(health: CommitHealth, moved: Mapping[int, str]) -> None:
    from surefoot.cli.table import without_control
    from surefoot.core.units import format_bytes

    sound = f"sound   {health.num_files} files, {format_bytes(health.num_bytes)}"
    print(f"step {health.step:,}  {sound if health.is_sound else 'DAMAGED'}")
    for problem in health.damaged:
        print(without_control(f"  {problem}"))
    for name in health.unknown:
        print(without_control(f"  {name} is not in the manifest and is never read"))
    if health.step in moved:
        print(f"  renamed to {moved[health.step]}")


def _set_aside(run: Path, damaged: list[Any], first: Path) -> dict[int, str]:
    from surefoot.cli.operate import stored
    from surefoot.contract import commits

    holder = run if (run / "checkpoints").is_dir() else first.parent.parent
    with stored.check_not_written(holder):
        return {each.step: str(commits.set_aside(each.folder)) for each in damaged}


@app.command(cls=Verb)
def prune(
    run: RunArgument,
    keep: KeepOption = None,
    keep_best: KeepBestOption = None,
    keep_every: KeepEveryOption = None,
    dry_run: DryRunOption = False,
    json: JsonOption = False,
    traceback: TracebackOption = False,
) -> int:
    """Delete the checkpoints that retention does not keep.

    The flags, or the [checkpoint] table of the spec, decide what is kept; the newest two and the
    best are always kept. If the newest checkpoint is damaged, nothing is deleted and the exit code
    is 1.
    """
    from surefoot.cli.operate import stored
    from surefoot.contract import commits, manifest
    from surefoot.contract.run_folder import retention
    from surefoot.core.errors import RunFolderError
    from surefoot.core.units import parse_bytes

    stored.check_folder(run)
    table = _table(run)
    every_text = keep_every if keep_every is not None else table.keep_every
    every, every_s = (None, None) if every_text is None else stored.parse_every(every_text, run)
    most, best = keep or table.keep, keep_best or table.keep_best
    budget = None if table.budget is None else parse_bytes(table.budget)
    rule: dict[str, Any] = {
        "keep": most,
        "every": every,
        "every_s": every_s,
        "keep_best": best,
        "budget_bytes": budget,
    }
    doomed = retention.find_doomed(run, **rule)
    problem, gone = None, []
    steps = manifest.steps(run)
    if steps and not dry_run:
        with stored.check_not_written(run) if doomed else contextlib.nullcontext():
            try:
                commits.check(manifest.step_folder(run, steps[-1]))
            except RunFolderError as error:
                problem = error.message
            else:
                gone = retention.retain(run, **rule)
    if json:
        options.print_json(
            {
                "run": str(run),
                "keep": most,
                "every": every,
                "every_s": every_s,
                "keep_best": best,
                "budget": budget,
                "doomed": doomed,
                "deleted": gone,
                "problem": problem,
            }
        )
    else:
        told = "would be deleted" if dry_run else "deleted"
        shown = doomed if dry_run else gone
        print(f"{told}: {', '.join(f'step {step:,}' for step in shown) or 'nothing'}")
        if problem is not None:
            print(
                f"nothing was deleted, because the newest checkpoint is damaged: {problem}",
                file=sys.stderr,
            )
    return int(problem is not None)


def _table(run: Path) -> Any:
    """Return the `[checkpoint]` table of the run's spec, or its defaults if the run has no spec."""
    from surefoot.contract import spec_file
    from surefoot.contract.spec import CheckpointTable

    has_spec = (run / spec_file.FILE).is_file()
    return (
        spec_file.read_of_run(run, checks_task=False).spec.checkpoint
        if has_spec
        else CheckpointTable()
    )


@app.command(cls=Verb)
def diff(
    one: CommitArgument,
    other: CommitArgument,
    json: JsonOption = False,
    traceback: TracebackOption = False,
) -> int:
    """Show in which tensors two checkpoints differ, and by how much.

    The exit code is 1 if they differ. Times (clock.json) are ignored, so two runs that did the same
    steps are equal.
    """
    from surefoot.cli.operate import difference, stored
    from surefoot.cli.table import print_table
    from surefoot.core.errors import RunFolderError
    from surefoot.core.units import format_number

    folders = stored.find_commit(one), stored.find_commit(other)
    found, same = difference.compare(*folders)
    if not found and not same:
        raise RunFolderError(
            f"neither {one} nor {other} holds a tensor, so there is nothing to compare",
            hint=stored.COMMIT_HINT,
        )
    if json:
        options.print_json(
            {
                "one": str(folders[0]),
                "other": str(folders[1]),
                "equal": not found,
                "num_equal_tensors": same,
                "differences": [each.as_row() for each in found],
            }
        )
        return int(bool(found))
    rows = []
    for each in found[:MAX_SHOWN]:
        how = (
            each.what
            if each.num_values is None
            else f"{each.num_different:,} of {each.num_values:,}"
        )
        rows.append(
            (
                each.file,
                each.name,
                how,
                "" if each.num_values is None else format_number(each.max_abs),
            )
        )
    if rows:
        print_table(("file", "name", "different", "max difference"), rows, right="max difference")
    if len(found) > MAX_SHOWN:
        print(f"and {len(found) - MAX_SHOWN:,} more")
    verdict, noun = "different" if found else "equal", "tensor is" if same == 1 else "tensors are"
    print(f"{verdict}: {same:,} {noun} bitwise identical")
    return int(bool(found))


app.command(cls=Verb, name="export")(transfer.export)
app.command(cls=Verb, name="import")(transfer.import_)
