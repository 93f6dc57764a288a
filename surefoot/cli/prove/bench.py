"""Command `surefoot bench step`; `surefoot bench comm` is in `comm.py`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Annotated, Any

import typer

from surefoot.cli import options
from surefoot.cli.help import Verb, Verbs
from surefoot.cli.left_out import name_left_out
from surefoot.cli.options import (
    CsvOption,
    DataOption,
    JsonOption,
    QuietOption,
    SeedOption,
    SetOption,
    SpecArgument,
    TracebackOption,
)
from surefoot.cli.prove import comm
from surefoot.cli.table import print_table, print_text, write_csv
from surefoot.core.errors import InputError, UserCodeError
from surefoot.core.process.signals import exit_on_signal
from surefoot.core.units import format_bytes, format_number, format_seconds

if TYPE_CHECKING:
    from surefoot.contract.spec import RunSpec
    from surefoot.contract.spec_file import Origin
    from surefoot.prove.bench.step import Bench, TimedMode

app = typer.Typer(
    cls=Verbs,
    no_args_is_help=True,
    help="Time a training step of a spec, or communication between ranks.",
)
TIMES = ("mean_s", "sd_s", "p50_s", "p95_s", "p99_s", "cold_mean_s", "first_s")
# of the CSV, after mode and varied keys
COLUMNS = (
    "n",
    "rounds",
    *TIMES,
    "samples_per_s",
    "peak_bytes",
    "failure",
)


app.command(cls=Verb)(comm.comm)


@app.callback()
def bench() -> None:
    "Time a training step of a spec, or communication between ranks."


VaryOption = Annotated[
    list[str] | None,
    typer.Option(
        "--vary",
        metavar="KEY=A,B",
        help="compare values of a key, as in task.width=64,128; repeatable",
    ),
]


@app.command(cls=Verb)
def step(
    spec: SpecArgument,
    mode: Annotated[
        str, typer.Option("--mode", metavar="NAMES", help="the parts to time, as in forward,step")
    ] = "forward,backward,step",
    vary: VaryOption = None,
    calls: Annotated[
        int, typer.Option("--calls", metavar="N", help="the number of timed calls per process")
    ] = 30,
    warmup: Annotated[
        int, typer.Option("--warmup", metavar="N", help="the number of unmeasured warm-up calls")
    ] = 10,
    rounds: Annotated[
        int,
        typer.Option(
            "--rounds",
            metavar="N",
            help="the number of processes for each row; six or more give intervals",
        ),
    ] = 3,
    csv: CsvOption = None,
    set_: SetOption = None,
    seed: SeedOption = None,
    data: DataOption = None,
    json: JsonOption = False,
    quiet: QuietOption = False,
    traceback: TracebackOption = False,
) -> None:
    """Time parts of a training step: forward pass, forward and backward pass, or all of it.

    Each mode and each varied value runs in fresh processes, interleaved; the timer synchronizes the
    device before and after each call.
    """
    from surefoot.contract import spec_file
    from surefoot.prove.bench.rehearsal import MODES
    from surefoot.prove.bench.step import bench as measure
    from surefoot.prove.bench.step import vary as make_variants

    if csv is not None:
        options.check_new_file(csv, "--csv", "times.csv")
    modes = [each for each in MODES if each in mode.split(",")]
    if not modes or set(mode.split(",")) - set(MODES):
        raise InputError(
            f"--mode must be a list of {', '.join(MODES)}; got {mode!r}",
            hint=f"give one or more of {','.join(MODES)}",
        )
    stated = options.overrides(set_, seed=seed, data=data)
    origins: list[Origin] = []

    def read(chosen: Sequence[tuple[str, Any, str]]) -> RunSpec:
        origins.append(spec_file.read(spec, [*stated, *chosen]))
        return origins[-1].spec

    variants = make_variants(read, vary or [])
    name_left_out("bench step", origins[-1])
    tell = options.make_progress_printer("bench", quiet=quiet or json)
    with exit_on_signal():
        found = measure(variants, modes=modes, n=calls, warmup=warmup, rounds=rounds, tell=tell)
    if csv is not None:
        keys = list(found.rows[0].values)
        cells = [
            [each.mode, *each.values.values(), *(getattr(each, name) for name in COLUMNS)]
            for each in found.rows
        ]
        write_csv(csv, ["mode", *keys, *COLUMNS], cells)
    row = {
        "spec": spec,
        "warmup": warmup,
        "conditions": found.conditions,
        "rows": [each.as_row() for each in found.rows],
    }
    options.print_result(row, _print, found, json=json)
    for each in found.rows:
        if each.failure is not None:
            raise UserCodeError(
                f"{_label(each)} failed: {each.failure.splitlines()[-1]}",
                hint="check that surefoot train can run this spec",
            )


def _label(row: TimedMode) -> str:
    return " ".join([row.mode, *(f"{key}={value}" for key, value in row.values.items())])


def _print(found: Bench) -> None:
    keys = list(found.rows[0].values)
    has_others = any(each.against is not None for each in found.rows)
    times = ["n", "mean", "sd", "p50", "p95", "p99", "no warm-up", "first"]
    headers = ["mode", *keys, *times, "samples/s", "peak memory"]
    rows = [
        [
            each.mode,
            *each.values.values(),
            f"{each.n} x {each.rounds}",
            *(format_seconds(getattr(each, name)) for name in TIMES),
            format_number(each.samples_per_s),
            format_bytes(each.peak_bytes),
            *([_format_comparison(each)] if has_others else []),
        ]
        for each in found.rows
    ]
    print_table(
        [*headers, *(["ratio to the first value"] if has_others else [])],
        rows,
        right=headers[1 + len(keys) :],
    )
    threads = found.conditions.get("threads")
    print()
    print_text(
        f"{found.conditions.get('processor')}, {threads} thread{'' if threads == '1' else 's'}, "
        f"torch {found.conditions.get('torch')}"
    )
    print_text(
        f"mean, sd and percentiles: after {found.warmup} warm-up calls; no warm-up: the "
        "mean of the first calls of a process"
    )


def _format_comparison(row: TimedMode) -> str:
    return "" if row.against is None else f"{row.against}: {row.against.verdict}"
