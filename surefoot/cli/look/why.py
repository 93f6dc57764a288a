"""`surefoot why`."""

from __future__ import annotations

import shlex
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from surefoot.cli import options
from surefoot.cli.options import JsonOption, RunArgument, TracebackOption
from surefoot.core.errors import InputError

if TYPE_CHECKING:
    from surefoot.control.diagnose import Attempt, Goodput, MemoryUse, Waits
    from surefoot.control.plan import SaveAdvice


def why(
    run: RunArgument,
    limit: Annotated[
        str | None,
        typer.Option(
            "--limit",
            metavar="SIZE",
            help="the memory it may take, as 8GiB",
            show_default="all of its device",
        ),
    ] = None,
    measured: Annotated[
        list[Path] | None,
        typer.Option(
            "--measured",
            metavar="PATH",
            help="a ladder's folder, or the table of whatif --batch --csv; repeatable",
        ),
    ] = None,
    json: JsonOption = False,
    traceback: TracebackOption = False,
) -> None:
    """Tell what a run lost and why.

    Its attempts, what was done again after a failure, which share of the time counted, how often it
    should save, which of several ranks the others waited for, and whether it made good use of its
    memory: what would change that, and by how much, as measured or as predicted.
    """
    from surefoot.cli.look import past
    from surefoot.control.diagnose import find_goodput, find_memory_use, find_waits
    from surefoot.control.plan import advise_interval
    from surefoot.control.report import read_measured, read_shape
    from surefoot.core.units import parse_bytes

    limit_bytes = None if limit is None else parse_bytes(limit)
    if limit_bytes == 0:
        raise InputError(
            "--limit is 0 bytes", hint="give the memory that the run may take, as 8GiB"
        )
    elsewhere = [each for path in measured or [] for each in read_measured(path)]
    records, _ = past.read_records(run)
    found = find_goodput(records)
    memory = find_memory_use(
        records,
        limit_bytes=limit_bytes,
        shape=read_shape(run),
        measured=elsewhere,
        spec_file=shlex.quote(str(run / "spec.toml")),
    )
    waits, advice = find_waits(records), None
    if found.median_save_s is not None and found.between_failures_s is not None:
        advice = advise_interval(
            found.median_save_s, found.between_failures_s, found.median_write_s or 0.0
        )
    if json:
        more = {
            "ranks": None if waits is None else waits.as_row(),
            "memory": None if memory is None else memory.as_row(),
        }
        options.print_json({**_as_row(str(run), found, advice), **more})
    else:
        _tell(found, advice)
        if waits is not None:
            _tell_waits(waits)
        _tell_memory(memory)


def _as_row(run: str, found: Goodput, advice: SaveAdvice | None) -> dict[str, Any]:
    return {
        "run": run,
        **{name: value for name, value in asdict(found).items() if name != "attempts"},
        "goodput": found.share,
        "num_failures": found.num_failures,
        "between_failures_s": found.between_failures_s,
        "attempts": [asdict(attempt) for attempt in found.attempts],
        "advice": None if advice is None else asdict(advice),
    }


def _tell(found: Goodput, advice: SaveAdvice | None) -> None:
    from surefoot.cli.table import print_pairs, print_table
    from surefoot.control.diagnose.attempts import SET_BACK
    from surefoot.core.units import format_percent, format_seconds

    print("Attempts")
    headers = ("attempt", "from step", "to step", "done again", "ended", "time", "cause")
    print_table(headers, [_row(each) for each in found.attempts], right=headers[:4], indent=2)
    print("\nWhere the time went")
    total_s = found.total_s
    shares = [
        [name, SET_BACK, ""]
        if value is None
        else [name, format_seconds(value), format_percent(value / total_s if total_s > 0 else None)]
        for name, value in found.parts.items()
    ]
    print_table(
        ("part", "time", "share"),
        [*shares, ["total", format_seconds(total_s), ""]],
        right=("time", "share"),
        indent=2,
    )
    print("\nHow often to save")
    print_pairs(_advice(found, advice), whole=True)


def _row(attempt: Attempt) -> list[str]:
    from surefoot.control.diagnose.attempts import SET_BACK
    from surefoot.core.units import format_seconds

    more = attempt.num_unrecorded
    again = _range(attempt.num_redone, more) if attempt.num_redone else ""
    return [
        str(attempt.generation),
        f"{attempt.first_step:,}",
        _range(attempt.last_step, more),
        again,
        attempt.outcome,
        SET_BACK if attempt.elapsed_s is None else format_seconds(attempt.elapsed_s),
        attempt.cause,
    ]


def _range(least: int, more: int) -> str:
    """Return a number of which the log, with a record every few steps, shows the least value."""
    return f"{least:,} to {least + more:,}" if more else f"{least:,}"


def _advice(found: Goodput, advice: SaveAdvice | None) -> list[tuple[str, str]]:
    from surefoot.core.units import format_percent, format_seconds

    if advice is None:
        reason = "no attempt failed" if not found.num_failures else "no save was recorded"
        return [("advice", f"n/a: {reason}, so there is nothing to weigh a save against")]
    return [
        (
            "a save costs",
            (
                f"{format_seconds(advice.save_s)} of waiting (median), "
                f"and is written in {format_seconds(advice.write_s)}"
            ),
        ),
        ("a failure comes every", format_seconds(advice.between_s)),
        (
            "save every",
            f"{format_seconds(advice.interval_s)}, "
            + (
                "the root of 2 x save x time between failures"
                if advice.interval_s > advice.write_s
                else "as fast as one is written: it is hardly waited for"
            ),
        ),
        ("then is lost", format_percent(advice.lost_share)),
    ]


def _tell_waits(found: Waits) -> None:
    from surefoot.cli.table import print_pairs, print_table
    from surefoot.core.units import format_percent, format_seconds

    print(f"\nWho was waited for, over {found.num_steps:,} steps of the newest attempt")
    headers = (
        "rank",
        "the last in",
        "share",
        "waited for",
        "data",
        "compute",
        "between",
        "samples",
        "items",
    )
    rows = []
    for each in found.ranks:
        shares = [f"{each.num_last:,}", format_percent(each.num_last / found.num_steps)]
        seconds = (
            each.waited_s / found.num_steps,
            each.pace.data_s,
            each.pace.compute_s,
            each.pace.other_s,
        )
        work = [f"{each.pace.num_samples:,.1f}", f"{each.pace.num_items:,.1f}"]
        rows.append([str(each.rank), *shares, *map(format_seconds, seconds), *work])
    print_table(headers, rows, right=headers, indent=2)
    print("  seconds, samples and items a step; of the time, what no rank spent waiting for others")
    named = [(f"step {step:,}", words) for step, words in found.named]
    print_pairs(
        named
        or [("named", "none: no rank was behind the others often enough to tell it from noise")],
        whole=True,
    )


def _tell_memory(found: MemoryUse | None) -> None:
    from surefoot.cli.table import print_pairs
    from surefoot.core.units import UNKNOWN

    print("\nMemory")
    words = (
        f"{UNKNOWN}: the peak or the memory of the device is not recorded"
        if found is None
        else found.words
    )
    print_pairs(
        [
            ("at its most", words),
            *((each.change, each.effect) for each in (found.remedies if found else ())),
        ]
    )
