"""Command `surefoot demo`."""

from __future__ import annotations

import contextlib
import sys
from pathlib import Path

from surefoot.cli import options
from surefoot.cli.options import JsonOption, TracebackOption

# one that may be faster, one rank per core, and a tempting one that changes the results
RUNGS, OWN_RUNG = "fused,data parallel", "no clipping: optim.clip=0"
PAIRS, SAMPLES = 7, 2000


def demo(json: JsonOption = False, traceback: TracebackOption = False) -> int:
    """Run a demonstration of training, ladder and report in three minutes.

    Trains digits, measures a short ladder of optimizations on digits, and writes both as one HTML
    page. The ladder uses a few pairs of short runs: its results are a demonstration and no
    measurement to quote.
    """
    options.import_torch()
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
        f"{PAIRS} pairs of runs of {SAMPLES:,} samples; surefoot ladder digits uses more "
        "pairs and samples"
    )
    print(f"\na short ladder on digits: {told}", file=sys.stderr)
    ladder(
        "digits",
        rungs=RUNGS,
        rung=[OWN_RUNG],
        out=run / "ladder",
        pairs=PAIRS,
        samples=SAMPLES,
        skip_refused=True,
    )
    print("\nthe report, to be opened in a browser:", file=sys.stderr)
    report([run], ladder=run / "ladder")
