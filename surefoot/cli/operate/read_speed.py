"""Command `surefoot data bench`, which measures how fast samples are read and decoded."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from surefoot.cli import options
from surefoot.cli.options import JsonOption, QuietOption, TracebackOption

if TYPE_CHECKING:
    from surefoot.prove.bench.reading import MeasuredReading

ReadArgument = Annotated[
    list[str],
    typer.Argument(
        metavar="PATH",
        help="tars, folders of them, URLs with {000..099}, or a folder of images by class",
    ),
]


def bench(
    paths: ReadArgument,
    workers: Annotated[
        str, typer.Option("--workers", metavar="N,N", help="the numbers of workers to try")
    ] = "0,2,4",
    kind: Annotated[
        str, typer.Option("--kind", metavar="KIND", help="the kind of workers: thread or process")
    ] = "thread",
    samples: Annotated[
        int,
        typer.Option(
            "--samples", metavar="N", help="read at most N samples for each number of workers"
        ),
    ] = 2000,
    seconds: Annotated[
        float,
        typer.Option(
            "--seconds", metavar="S", help="measure each number of workers for at most S seconds"
        ),
    ] = 5.0,
    delay: Annotated[
        float,
        typer.Option(
            "--delay",
            metavar="MS",
            help="also wait this many ms for each sample, as on a slow disk",
        ),
    ] = 0.0,
    json: JsonOption = False,
    quiet: QuietOption = False,
    traceback: TracebackOption = False,
) -> None:
    """Measure how fast samples are read and decoded from their storage.

    Samples are read in random order, from the device (cold: after the system was asked to drop the
    files from its cache) and from memory (warm). A worker reads and decodes each sample and
    discards it.
    """
    from surefoot.core.errors import InputError
    from surefoot.prove.bench.reading import measure

    if kind not in ("thread", "process"):
        raise InputError(
            f"--kind must be thread or process; got {kind}",
            hint="use --kind thread or --kind process",
        )
    numbers = [int(word) if word.strip().isdecimal() else -1 for word in workers.split(",")]
    if min(numbers) < 0:
        raise InputError(
            f"--workers must be a list of numbers; got {workers}", hint="use --workers 0,2,4"
        )
    tell = options.make_progress_printer("data bench", quiet=quiet or json)
    found = measure(
        paths,
        workers=numbers,
        samples=samples,
        seconds=seconds,
        delay_s=delay / 1000,
        kind=kind,  # type: ignore[arg-type]
        tell=tell,
    )
    if json:
        options.print_json({"paths": list(paths), "delay_ms": delay, **found.as_row()})
        return
    _print(found, delay)


def _print(found: MeasuredReading, delay_ms: float) -> None:
    from surefoot.cli.table import print_table, without_control
    from surefoot.core.units import format_number, format_percent

    print(without_control(found.what))
    print(
        without_control(
            f"on {found.device}; workers are "
            f"{'threads' if found.kind == 'thread' else 'processes'}\n"
        )
    )
    rows = [
        (
            str(row.workers),
            f"warm + {format_number(delay_ms)} ms" if row.state == "delay" else row.state,
            f"{row.samples:,}",
            f"{row.samples_per_s:,.0f}",
            f"{row.bytes_per_s / 1e6:,.1f}",
            *(format_percent(round(each, 3)) for each in (row.read, row.decode)),
            format_percent(round(row.delay, 3)) if delay_ms else "-",
        )
        for row in found.rows
    ]
    heads = ("workers", "cache", "samples", "samples/s", "MB/s", "reading", "decoding", "delay")
    print_table(heads, rows, right=set(heads) - {"cache"})
    if not found.dropped:
        print(
            "\ncold may not be cold: the system did not drop the files from its cache, "
            "so they may have been read from memory"
        )
