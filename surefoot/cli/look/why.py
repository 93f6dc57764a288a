"""Command `surefoot why`."""

from __future__ import annotations

import shlex
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from surefoot.cli import options
from surefoot.cli.options import JsonOption, RunArgument, TracebackOption
from surefoot.cli.table import print_pairs, print_table
from surefoot.core.errors import InputError
from surefoot.core.units import UNKNOWN, format_percent, format_seconds, parse_bytes

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
            help="the memory that the run may use, as 8GiB",
            show_default="the memory of the device",
        ),
    ] = None,
    measured: Annotated[
        list[Path] | None,
        typer.Option(
            "--measured",
            metavar="PATH",
            help="the folder of a ladder, or the table of whatif batch --csv; repeatable",
        ),
    ] = None,
    json: JsonOption = False,
    traceback: TracebackOption = False,
) -> None:
    """Show how much time and how many steps a run lost, and why.

    The output has the attempts, the steps that were repeated after a failure, the goodput, how
    often the run should save, which ranks the others waited for, and the memory use, with changes
    that would improve it and their effect, as measured or as predicted.
    """
    from surefoot.cli.look import past
    from surefoot.contract import runlock
    from surefoot.contract.events import Started
    from surefoot.control.diagnose import find_goodput, find_health, find_memory_use, find_waits
    from surefoot.control.plan import advise_interval
    from surefoot.control.report import read_measured, read_shape

    limit_bytes = None if limit is None else parse_bytes(limit)
    if limit_bytes == 0:
        raise InputError(
            "--limit must be more than 0 bytes; got 0",
            hint="give the memory that the run may use, as 8GiB",
        )
    elsewhere = [each for path in measured or [] for each in read_measured(path)]
    owner = runlock.find_owner(run)  # before the records, which may grow meanwhile
    records, _ = past.read_records(run)
    has_started = any(isinstance(each, Started) for each in records)
    found = find_goodput(records, find_health(owner, records) if has_started else None)
    memory = find_memory_use(
        records,
        limit_bytes=limit_bytes,
        shape=read_shape(run),
        measured=elsewhere,
        spec_file=shlex.quote(str(run / "spec.toml")),
    )
    waits, advice = find_waits(records), None
    if found.mean_save_s is not None and found.between_failures_s is not None:
        advice = advise_interval(
            found.mean_save_s, found.between_failures_s, found.mean_write_s or 0.0
        )
    more = {
        "ranks": None if waits is None else waits.as_row(),
        "memory": None if memory is None else memory.as_row(),
    }
    row = {**_as_row(str(run), found, advice), **more}
    options.print_result(row, _print_losses, found, advice, waits, memory, json=json)


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


def _print_losses(
    found: Goodput, advice: SaveAdvice | None, waits: Waits | None, memory: MemoryUse | None
) -> None:
    from surefoot.control.diagnose.attempts import SET_BACK

    print("Attempts")
    headers = ("attempt", "from step", "to step", "repeated", "ended", "time", "cause")
    print_table(headers, [_row(each) for each in found.attempts], right=headers[:4], indent=2)
    print("\nTime lost")
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
    print("\nCheckpoint interval")
    print_pairs(_advice(found, advice), whole=True)
    if waits is not None:
        _tell_waits(waits)
    _tell_memory(memory)


def _row(attempt: Attempt) -> list[str]:
    from surefoot.control.diagnose.attempts import SET_BACK

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
    """Format a number of steps that lies between `least` and `least` + `more`.

    The exact number is unknown if the log has a record only every few steps.
    """
    return f"{least:,} to {least + more:,}" if more else f"{least:,}"


def _advice(found: Goodput, advice: SaveAdvice | None) -> list[tuple[str, str]]:
    if advice is None:
        reason = "no attempt failed" if not found.num_failures else "no save was recorded"
        return [("advice", f"n/a: {reason}, so no interval can be computed")]
    return [
        (
            "a save costs",
            (
                f"{format_seconds(advice.save_s)} of waiting and "
                f"{format_seconds(advice.write_s)} of writing (means over all saves)"
            ),
        ),
        ("mean time between failures", format_seconds(advice.between_s)),
        (
            "save every",
            f"{format_seconds(advice.interval_s)}, "
            + (
                "the square root of 2 x save x time between failures"
                if advice.interval_s > advice.write_s
                else "as fast as a checkpoint is written, because steps hardly wait for a save"
            ),
        ),
        ("expected loss", format_percent(advice.lost_share)),
    ]


def _tell_waits(found: Waits) -> None:
    print(f"\nWaiting for ranks, over {found.num_steps:,} steps of the newest attempt")
    headers = (
        "rank",
        "was last",
        "share",
        "others waited",
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
    print("  times, samples and items are per step; times exclude waiting for other ranks")
    named = [(f"step {step:,}", words) for step, words in found.named]
    print_pairs(
        named or [("named", "none: no rank was last significantly more often than by chance")],
        whole=True,
    )


def _tell_memory(found: MemoryUse | None) -> None:
    print("\nMemory")
    words = (
        f"{UNKNOWN}: the peak or the memory of the device was not recorded"
        if found is None
        else found.words
    )
    print_pairs(
        [
            ("peak", words),
            *((each.change, each.effect) for each in (found.remedies if found else ())),
        ]
    )
