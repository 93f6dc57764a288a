"""Command `surefoot prove`."""

from __future__ import annotations

import functools
import tempfile
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from surefoot.cli import options
from surefoot.cli.options import JsonOption, QuietOption, TracebackOption
from surefoot.cli.table import print_table
from surefoot.core.errors import EXIT_OK, EXIT_VERDICT_FAILS, InputError
from surefoot.core.units import format_percent, format_seconds

if TYPE_CHECKING:
    from surefoot.prove.campaigns.outcome import CampaignOutcome
    from surefoot.prove.promises import Promise


def prove(
    what: Annotated[
        str, typer.Argument(metavar="N", help="the number of a promise, or list to print all")
    ],
    trials: Annotated[
        int | None,
        typer.Option(
            "--trials",
            metavar="K",
            help="the number of trials of each campaign",
            show_default="a few",
        ),
    ] = None,
    seed: Annotated[
        int,
        typer.Option(
            "--seed", metavar="S", help="the seed of the first trial; later trials count up"
        ),
    ] = 0,
    case: Annotated[
        str | None,
        typer.Option(
            "--case",
            metavar="CASE",
            help="run only this campaign",
            show_default="all campaigns of the promise",
        ),
    ] = None,
    json: JsonOption = False,
    quiet: QuietOption = False,
    traceback: TracebackOption = False,
) -> int:
    """Test a promise with real faults: kill runs, cut the power, and count failures.

    The command trains real runs with real faults in a temporary folder; the same seed replays a
    trial. The exit code is 0 if the promise held in every trial, and 1 if it did not or cannot be
    tested on this machine.
    """
    from surefoot.prove.promises import find_promise

    if what == "list":
        return _list(json)
    promise = find_promise(what)
    if (trials is not None and trials < 1) or seed < 0:
        raise InputError(
            f"--trials must be at least 1 and --seed at least 0; got {trials} and {seed}",
            hint="give --trials 1 or more, and --seed 0 or more",
        )
    if case is not None and case not in promise.cases:
        raise InputError(
            f"promise {what} has no campaign {case!r}",
            hint=f"its campaigns are {', '.join(promise.cases)}",
        )
    tell = options.make_progress_printer("prove", quiet=quiet or json)
    outcomes = _run_campaigns(promise.cases if case is None else (case,), trials, seed, tell)
    holds = all(each.holds for each in outcomes)
    rows = [{**asdict(each), "bound": each.bound} for each in outcomes]
    row = {"promise": promise.number, "name": promise.name, "holds": holds, "campaigns": rows}
    options.print_result(row, _print, promise, outcomes, holds, json=json)
    return EXIT_OK if holds else EXIT_VERDICT_FAILS


def _list(json: bool) -> int:
    from surefoot.prove.promises import PROMISES

    rows = [(str(each.number), each.name, " ".join(each.cases)) for each in PROMISES]
    table = functools.partial(print_table, right=("N",))
    row = {"promises": [asdict(each) for each in PROMISES]}
    options.print_result(row, table, ("N", "promise", "campaigns"), rows, json=json)
    return EXIT_OK


def _run_campaigns(
    cases: tuple[str, ...], trials: int | None, seed: int, tell: Callable[[str], None]
) -> list[CampaignOutcome]:
    from surefoot.prove.campaigns import CAMPAIGNS
    from surefoot.prove.campaigns.outcome import run_trials
    from surefoot.prove.campaigns.workshop import Workshop

    chosen = [campaign for campaign in CAMPAIGNS if campaign.case in cases]
    with tempfile.TemporaryDirectory(prefix="surefoot-prove-") as folder:
        workshop = Workshop(Path(folder))
        return [
            run_trials(
                campaign,
                workshop,
                trials=trials or campaign.few,
                seed=seed,
                tell=tell,
            )
            for campaign in chosen
        ]


def _print(promise: Promise, outcomes: list[CampaignOutcome], holds: bool) -> None:
    print(f"promise {promise.number}: {promise.name}. {promise.words}\n")
    rows = [
        (
            each.case,
            each.title,
            f"{each.trials:,}",
            str(len(each.failures)),
            format_percent(None if each.bound is None else min(1.0, each.bound)),
            format_seconds(each.elapsed_s),
        )
        for each in outcomes
    ]
    counted = ("trials", "failures", "failure rate below (95 %)", "time")
    print_table(("case", "fault", *counted), rows, right=counted)
    lines = [""]
    for each in outcomes:
        if each.not_here is not None:
            lines.append(f"{each.case} cannot run on this machine: {each.not_here}")
        for failure in each.failures:
            trial = f"--case {each.case} --seed {failure.seed} --trials 1"
            again = f"surefoot prove {promise.number} {trial}"
            lines.append(f"{each.case}, seed {failure.seed}: {failure.what}\n  replay: {again}")
    verdict = (
        "the promise does not hold"
        if any(each.failures for each in outcomes)
        else "the promise cannot be tested on this machine"
    )
    if holds:
        count = sum(each.trials for each in outcomes)
        verdict = f"the promise held in {count:,} trials, first seed {outcomes[0].seed}"
    print("\n".join([*lines, f"verdict: {verdict}"]))
