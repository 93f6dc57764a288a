"""What the memory components save and what they cost: the chunked head, and recomputation of a deep model.

python benchmarks/memory_components/run.py [--rounds 15]
"""

from __future__ import annotations

import sys
from pathlib import Path

from benchmarks.measured import ROOT, make_parser, measure, render_conditions, show
from surefoot.core.units import format_number, format_percent
from surefoot.trial import Arm, Bar, Trial, effects_markdown, find_effect, markdown, read_trial

FOLDER = Path(__file__).parent
RESULTS = FOLDER / "results" / "memory_components.json"
ARMS = ("head plain", "head chunked", "deep none", "deep full", "deep every2", "deep operators")
PAIRS = (
    ("head chunked", "head plain"),
    ("deep full", "deep none"),
    ("deep every2", "deep none"),
    ("deep operators", "deep none"),
)
MEASURES = ("peak_bytes", "cpu_s_per_step")
BARS = (
    ("head chunked", "head plain", "peak_bytes", 0.25), ("head chunked", "head plain", "cpu_s_per_step", 1.15),
    ("deep full", "deep none", "peak_bytes", 0.35), ("deep full", "deep none", "cpu_s_per_step", 1.40),
    ("deep operators", "deep none", "cpu_s_per_step", 1.10),
)  # fmt: skip
LEAST_SHARE = 0.60  # of the saving of full recomputation that the selective one has


def make_arms() -> list[Arm]:
    module = "benchmarks.memory_components.arms"
    return [Arm(name=name, command=(sys.executable, "-m", module, name, "{report}"), folder=ROOT) for name in ARMS]


def render(trial: Trial) -> str:
    """Each arm against the plain one, then the bars."""
    effects = [find_effect(trial, arm, baseline, name) for arm, baseline in PAIRS for name in MEASURES]
    rows = []
    for arm, baseline, name, most in BARS:
        effect = find_effect(trial, arm, baseline, name)
        bar = Bar(arm=arm, baseline=baseline, measure=name, most=most)
        rows.append((f"{arm} / {baseline}", name, f"<= {most}", bar.standing(effect)))
    share = find_share(trial)
    verdict = "n/a" if share is None else "holds" if share >= LEAST_SHARE else "fails"
    rows.append(
        (
            "share of full's saving, deep operators",
            f"peak_bytes: {format_percent(share)}",
            f">= {format_number(LEAST_SHARE)}",
            verdict,
        )
    )
    return f"{effects_markdown(effects)}\n{markdown(('arms', 'measure', 'bar', 'verdict'), rows)}"


def find_share(trial: Trial) -> float | None:
    """How much of what full recomputation saves the selective one does; allocations repeat, so one round says it."""
    found = [list(trial.by_round(arm, "peak_bytes").values()) for arm in ("deep none", "deep full", "deep operators")]
    if not all(found):
        return None
    none, full, operators = (values[0] for values in found)
    return (none - operators) / (none - full)


def main() -> None:
    asked = make_parser(__doc__, RESULTS).parse_args()
    if not asked.show:
        measure("memory components", make_arms(), rounds=asked.rounds, packages=("torch", "surefoot"), out=asked.out)
    trial = read_trial(asked.out)
    parts = {"conditions": render_conditions(trial), "results": render(trial)}
    show(parts, FOLDER / "README.md" if asked.out == RESULTS else None)


if __name__ == "__main__":
    main()
