"""Command `surefoot tune-loader`."""

from __future__ import annotations

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
from surefoot.cli.table import print_table
from surefoot.core.process.signals import exit_on_signal
from surefoot.core.units import format_percent

if TYPE_CHECKING:
    from surefoot.prove.bench.loading import LoaderTiming, LoaderTuning


def tune_loader(
    spec: SpecArgument,
    seconds: Annotated[
        float,
        typer.Option(
            "--seconds", metavar="S", help="the time for each setting, alone and again during steps"
        ),
    ] = 2.0,
    most: Annotated[
        int | None,
        typer.Option(
            "--most",
            metavar="N",
            help=(
                "the largest number of workers to try; by default the number of cores, at least 4 "
                "and at most 8"
            ),
        ),
    ] = None,
    set_: SetOption = None,
    seed: SeedOption = None,
    data: DataOption = None,
    json: JsonOption = False,
    quiet: QuietOption = False,
    traceback: TracebackOption = False,
) -> None:
    """Find the number of loader workers with which steps do not wait for data.

    The command measures the samples per second that the steps need, those that the loader returns
    with 0, 1, 2, 4 workers and so on, and both together.
    """
    from surefoot.prove.bench.loading import tune

    read = options.read_spec(
        "tune-loader", spec, options.overrides(set_, seed=seed, data=data)
    ).spec
    with exit_on_signal():
        found = tune(
            read,
            seconds=seconds,
            most=most,
            tell=options.make_progress_printer("tune-loader", quiet=quiet or json),
        )
    options.print_result({"spec": spec, **found.as_row()}, _print, found, json=json)


def _print(found: LoaderTuning) -> None:
    print(f"the steps need {found.demand_per_s:,.0f} samples/s")
    headers = (
        "workers",
        "kind",
        "prefetch",
        "persistent",
        "pinned",
        "loader alone",
        "during steps",
        "waiting",
        "",
    )
    print_table(
        headers, [_cells(each, found) for each in found.tried], right=set(headers) - {"kind", ""}
    )
    chosen = found.chosen
    told = (
        {"workers": chosen.workers, "kind": f'"{chosen.kind}"', "prefetch": chosen.prefetch}
        if chosen.workers
        else {"workers": 0}
    )
    print(f"\n{found.why}:\n\n[loader]")
    for key, value in told.items():
        print(f"{key} = {value}")


def _cells(each: LoaderTiming, found: LoaderTuning) -> tuple[str, ...]:
    yes = "yes" if each.workers else "-"
    return (
        str(each.workers),
        each.kind if each.workers else "-",
        str(each.prefetch) if each.workers else "-",
        yes,
        "yes" if each.pinned else "no",
        f"{each.supply_per_s:,.0f}/s",
        f"{each.samples_per_s:,.0f}/s",
        format_percent(each.waiting),
        "chosen" if each is found.chosen else "",
    )
