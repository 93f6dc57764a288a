"""`surefoot demo`."""

from __future__ import annotations

import contextlib
import sys
from pathlib import Path

from surefoot.cli import options
from surefoot.cli.options import JsonOption, TracebackOption

# one that may gain, a tempting one that changes the results, and finally a rank per core
RUNGS, OWN_RUNG = "fused,data parallel", "no clipping: optim.clip=0"
PAIRS, SAMPLES = 7, 2000


def demo(json: JsonOption = False, traceback: TracebackOption = False) -> int:
    """See all of it in three minutes, on data that is here.

    Trains digits, climbs a short ladder of optimisations with it, and writes both as a page. Few
    pairs of short runs: a demonstration, and no measurement to quote.
    """
    from surefoot.cli.train.train import finish
    from surefoot.contract import spec_file
    from surefoot.train.run import Run

    with contextlib.redirect_stdout(sys.stderr) if json else contextlib.nullcontext():
        run = Run(spec_file.read("digits").spec)
        code = finish(run, json=False)
        if not code:
            _climb_and_report(run.folder)
    if json:
        options.print_json({"run": str(run.folder), "outcome": run.outcome})
    return code


def _climb_and_report(run: Path) -> None:
    from surefoot.cli.look.report import report
    from surefoot.cli.prove.ladder import ladder

    told = (
        f"{PAIRS} pairs of runs of {SAMPLES:,} samples; surefoot ladder digits takes more of both"
    )
    print(f"\na short ladder of digits: {told}", file=sys.stderr)
    ladder(
        "digits",
        rungs=RUNGS,
        rung=[OWN_RUNG],
        out=run / "ladder",
        pairs=PAIRS,
        samples=SAMPLES,
        skip_refused=True,
    )
    print("\nall of it as a page, to be opened in a browser:", file=sys.stderr)
    report([run], ladder=run / "ladder")
