"""Command `surefoot ledger`."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from surefoot.cli import options
from surefoot.cli.options import JsonOption, RunArgument, TracebackOption
from surefoot.cli.table import print_pairs, print_text
from surefoot.core.errors import RunFolderError
from surefoot.core.units import format_number

if TYPE_CHECKING:
    from surefoot.components.data.consumed import ConsumedCheck
    from surefoot.contract import loop_ledger
    from surefoot.contract.ledger import LedgerFault

MAX_SHOWN = 10


def ledger(
    run: RunArgument,
    sample: Annotated[
        int | None,
        typer.Option(
            "--sample",
            metavar="ID",
            help="print the steps that consumed this sample; samples count from 0",
        ),
    ] = None,
    json: JsonOption = False,
    traceback: TracebackOption = False,
) -> int:
    """Check which samples a run consumed.

    Every sample must be consumed exactly once per epoch, in the planned order, however often the
    run was killed. The exit code is 1 if the check fails.
    """
    from surefoot.contract import loop_ledger

    if loop_ledger.is_loop_run(run):
        return _print_loop_ledger(run, sample, json=json)
    options.import_torch()
    from surefoot.components.data import consumed
    from surefoot.contract import events
    from surefoot.contract.ledger import FILE

    if not (run / FILE).exists():
        # raises the error for a folder that is not a run
        next(events.read(run, events.Started), None)
    found = consumed.check(run)
    _check_any(run, found.last - found.after)
    _tell_unjudged(run, found.last)
    uses = None if sample is None else consumed.find_sample(run, sample)
    row = {
        "run": str(run),
        "ok": found.holds,
        "plan": vars(found.plan),
        "after": found.after,
        "last": found.last,
        "attempts": list(found.attempts),
        "num_rows": found.num_rows,
        "num_overruled": found.num_overruled,
        "num_samples": found.num_samples,
        "epochs": found.epochs,
        "torn_bytes": found.torn_bytes,
        "faults": [each._asdict() for each in found.faults],
        "sample": None
        if uses is None
        else {"id": sample, "uses": [each._asdict() for each in uses]},
    }
    options.print_result(row, _print_ledger, found, json=json)
    if uses is not None and not json:
        _tell_uses(sample, [(use.step, use.epoch) for use in uses])
    return int(not found.holds)


def _tell_uses(sample: int | None, uses: Sequence[tuple[int, int]]) -> None:
    """Print the training steps, with their epochs, that consumed a sample."""
    words = ", ".join(f"step {step:,} (epoch {epoch:,})" for step, epoch in uses)
    print(f"sample {sample:,}: {words or 'not yet'}")


def _check_any(run: Path, count: int) -> None:
    """Raise RunFolderError if `count`, the number of steps or batches in the ledger, is 0."""

    if not count:
        raise RunFolderError(
            f"the ledger of {run} has no steps, so there is nothing to check",
            hint=(
                "rows are written with each checkpoint: save more often with --set "
                "'checkpoint.every=10 steps'"
            ),
        )


def _tell_unjudged(run: Path, last: int) -> None:
    """Warn if the event log has steps after `last`, the last step in the ledger.

    The ledger check does not cover these steps.
    """
    from surefoot.contract import events

    if not (run / events.FILE).is_file():
        return
    kept = events.newest(events.read(run, events.Started, events.Step))
    newest = max((each.step for each in kept if isinstance(each, events.Step)), default=0)
    if newest > last:
        rest = f"the log continues to step {newest:,}, without rows in the ledger"
        print(f"warning: the verdict ends at step {last:,}: {rest}", file=sys.stderr)


def _print_ledger(found: ConsumedCheck) -> None:
    plan = found.plan
    order = (
        f"shuffled each epoch with seed {plan.seed}" if plan.shuffle else "in the order of the data"
    )
    order += f", {plan.window:,} runs of {plan.chunk:,} at a time" if plan.window else ""
    if plan.mixture:
        order += f", a mixture of {plan.mixture.split(' ')[1].count(',') + 1:,} sources"
    short = ", without the incomplete last one" if plan.drop_last else ""
    grows = ", ".join(f"{batch:,} from sample {samples:,}" for samples, batch in plan.ramp)
    steps = (
        f"steps {found.after + 1:,} to {found.last:,}" if found.last > found.after else "no step"
    )
    pairs = [
        (
            "plan",
            f"{plan.samples:,} samples, {order}, in batches of {grows or f'{plan.batch:,}'}{short}",
        ),
        (
            "consumed",
            f"{steps}: {found.num_samples:,} samples, {format_number(found.epochs)} epochs",
        ),
        ("attempts", f"{len(found.attempts):,}; {found.num_overruled:,} steps were repeated"),
    ]
    if found.after:
        pairs.append(
            (
                "before",
                (
                    f"the first {found.after:,} steps followed a different plan, in the run "
                    "from which this run was forked"
                ),
            )
        )
    if found.torn_bytes:
        pairs.append(
            (
                "torn",
                "an incomplete row at the end, as after a kill; the next attempt removes the row",
            )
        )
    print_pairs(pairs)
    if found.holds:
        print_text(
            f"{'as planned' if plan.mixture else 'exactly once'}: every step consumed its planned "
            "samples; none is repeated, lost or out of order"
        )
        return
    _tell_faults(found.faults)


def _tell_faults(faults: Sequence[LedgerFault]) -> None:
    for each in faults[:MAX_SHOWN]:
        print_text(f"{each.kind}: {each.told}", indent=2)
    if len(faults) > MAX_SHOWN:
        print(f"  and {len(faults) - MAX_SHOWN:,} more")
    print("NOT exactly once")


def _print_loop_ledger(run: Path, sample: int | None, *, json: bool) -> int:
    """Check and print the samples that a user-written loop with `surefoot.attach` consumed.

    Such a loop has no planned sample order, so its ledger records the samples themselves. Return
    the exit code, which is 1 if the check fails.
    """
    from surefoot.contract import loop_ledger

    found = loop_ledger.check(run)
    _check_any(run, found.num_batches)
    _tell_unjudged(run, found.last)
    uses = None if sample is None else loop_ledger.find_sample(run, sample)
    positions = [
        {"step": use.step, "pass": use.number_of_pass + 1, "place": use.place + 1}
        for use in uses or ()
    ]
    row = {
        "run": str(run),
        "ok": found.holds,
        **asdict(found),
        "faults": [each._asdict() for each in found.faults],
        "attempts": list(found.attempts),
        "sample": None if uses is None else {"id": sample, "uses": positions},
    }
    options.print_result(row, _tell_loop, found, json=json)
    if uses is not None and not json:
        _tell_uses(sample, [(use.step, use.number_of_pass + 1) for use in uses])
    return int(not found.holds)


def _tell_loop(found: loop_ledger.LoopConsumed) -> None:
    promise = found.promise
    unknown = "identified by digests" if promise.digests else "with unknown samples"
    known = f"{found.num_samples:,} samples" if found.num_samples else unknown
    of = "" if promise.samples is None else f" of {promise.samples:,}"
    print_pairs(
        [
            (
                "consumed",
                (
                    f"steps 1 to {found.last:,}: {found.num_batches:,} batches, {known}, "
                    f"{found.num_passes:,} epochs{of}"
                ),
            ),
            (
                "attempts",
                f"{len(found.attempts):,}; {found.num_overruled:,} batches were repeated",
            ),
        ]
    )
    if not found.holds:
        _tell_faults(found.faults)
    elif promise.once and found.num_samples:
        print("exactly once: every batch at its position, every sample once per epoch")
    else:
        print_text(
            "every batch at its position, none repeated or lost; the loader determines "
            "whether an epoch has each sample once"
        )
    if found.num_compared and found.holds:
        what = "digest" if promise.digests else "samples"
        print(f"{found.num_compared:,} batches that were repeated after a stop had the same {what}")
