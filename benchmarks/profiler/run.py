"""What a step costs with the profiler off, waiting for its window, and inside of it at each level.

python benchmarks/profiler/run.py [--rounds 15]
"""

from __future__ import annotations

import sys
from pathlib import Path

from benchmarks.measured import ROOT, make_parser, measure, render_conditions, show
from benchmarks.profiler.arm import LEVELS, OFF, WAITING
from surefoot.core.statistics import median
from surefoot.core.units import UNKNOWN, format_bytes, format_number, format_seconds
from surefoot.trial import Arm, Trial, find_effect, markdown, read_trial

FOLDER = Path(__file__).parent
RESULTS = FOLDER / "results" / "profiler.json"
ARMS = (OFF, WAITING, *LEVELS)
CPU = "cpu_s_per_step"


def make_arms() -> list[Arm]:
    """One process for each level."""
    words = (sys.executable, "-m", "benchmarks.profiler.arm")
    return [Arm(name=arm, command=(*words, arm, "{report}", "{work}"), folder=ROOT) for arm in ARMS]


def render(trial: Trial) -> str:
    """CPU time of a step at each level against the profiler off.

    And the time that the window takes to close, and the size of its trace.
    """
    rows = []
    for arm in ARMS:
        cost, words = "", "1"
        if arm != OFF:
            effect = find_effect(trial, arm, OFF, CPU)
            found = effect.interval
            words = effect.words.splitlines()[0]
            if found is not None:
                low, middle, high = map(format_number, (found.low, found.estimate, found.high))
                words = f"{middle} ({low} to {high})"
        steps = list(trial.by_round(arm, CPU).values())
        cost = format_seconds(median(steps)) if steps else UNKNOWN
        closing, size = (
            list(trial.by_round(arm, name).values())
            for name in ("closing_s", "trace_bytes_per_step")
        )
        is_recorded = arm in LEVELS and closing and size
        rows.append(
            (
                arm,
                cost,
                words,
                format_seconds(median(closing)) if is_recorded else "",
                format_bytes(20 * median(size)) if is_recorded else "",
            )
        )
    return markdown(
        (
            "level",
            "CPU time of a step",
            "against off (95 %)",
            "closing, 41 steps",
            "trace of 20 steps",
        ),
        rows,
    )


def main() -> None:
    asked = make_parser(__doc__, RESULTS).parse_args()
    if not asked.show:
        measure(
            "profiler",
            make_arms(),
            rounds=asked.rounds,
            packages=("torch", "surefoot"),
            out=asked.out,
        )
    trial = read_trial(asked.out)
    parts = {"conditions": render_conditions(trial), "results": render(trial)}
    show(parts, FOLDER / "README.md" if asked.out == RESULTS else None)


if __name__ == "__main__":
    main()
