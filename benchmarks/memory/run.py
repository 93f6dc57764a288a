"""Peak minus after-import resident memory of a model that needs 537 MB.

A surefoot run against the bare loop.

python benchmarks/memory/run.py [--rounds 15]
"""

from __future__ import annotations

import sys
from pathlib import Path

from benchmarks.measured import ROOT, make_parser, measure, render_conditions, show
from surefoot.trial import Arm, Bar, Trial, effects_markdown, find_effects, markdown, read_trial

FOLDER = Path(__file__).parent
RESULTS = FOLDER / "results" / "memory.json"
MODULES = {"bare": "benchmarks.memory.bare", "surefoot": "benchmarks.memory.surefoot_run"}
MEASURES = ("steps_bytes", "whole_bytes")  # the steps alone; with the weights written at the end
MAX_TIMES = 1.05


def make_arms() -> list[Arm]:
    return [
        Arm(name=name, command=(sys.executable, "-m", module, "{report}", "{work}"), folder=ROOT)
        for name, module in MODULES.items()
    ]


def render(trial: Trial) -> str:
    """Both measures against the bare loop, then the bar."""
    effects = find_effects(trial, "bare", MEASURES)
    bars = [
        Bar(arm="surefoot", baseline="bare", measure=measure, most=MAX_TIMES)
        for measure in MEASURES
    ]
    rows = [
        (each.measure, f"<= {MAX_TIMES}", bar.standing(each))
        for bar, each in zip(bars, effects, strict=True)
    ]
    return f"{effects_markdown(effects)}\n{markdown(('measure', 'bar', 'verdict'), rows)}"


def main() -> None:
    asked = make_parser(__doc__, RESULTS).parse_args()
    if not asked.show:
        measure(
            "memory",
            make_arms(),
            rounds=asked.rounds,
            packages=("torch", "safetensors", "surefoot"),
            out=asked.out,
        )
    trial = read_trial(asked.out)
    parts = {"conditions": render_conditions(trial), "results": render(trial)}
    show(parts, FOLDER / "README.md" if asked.out == RESULTS else None)


if __name__ == "__main__":
    main()
