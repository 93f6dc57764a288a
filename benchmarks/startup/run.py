"""From the start of the process to the end of step 1, and what `surefoot --help` costs.

`surefoot train` is held against a bare script.

python benchmarks/startup/run.py [--rounds 15]
"""

from __future__ import annotations

import sys
from pathlib import Path

from benchmarks.measured import ROOT, make_parser, measure, render_conditions, show
from surefoot.core.statistics import median_interval
from surefoot.core.units import format_number, format_seconds
from surefoot.trial import (
    Arm,
    Bar,
    Effect,
    Trial,
    find_effect,
    format_measure,
    markdown,
    read_trial,
)

FOLDER = Path(__file__).parent
RESULTS = FOLDER / "results" / "startup.json"
BATCHES = {"mlp": 32, "convnet": 64}
CPU, WALL = "cpu_s_to_step_1", "wall_s_to_step_1"
MAX_TIMES, MAX_HELP_S = 1.25, 0.25


def make_arms() -> list[Arm]:
    """Per model the bare script and `surefoot train`; and the help."""
    arms = []
    for model, batch in BATCHES.items():
        bare = (sys.executable, "-m", "benchmarks.startup.bare", model, "{report}", "{started_s}")
        train = (
            sys.executable,
            "-m",
            "surefoot",
            "train",
            "benchmarks.startup.task:Marked",
            "--steps",
            "2",
            "--run",
            "{work}/run",
            "--set",
            f"task.workload={model}",
            "--set",
            "task.report={report}",
            "--set",
            "task.started_s={started_s}",
            "--set",
            "train.threads=1",
            "--set",
            f"train.batch={batch}",
            "--set",
            "schedule.name=constant",
        )
        arms += [
            Arm(name=f"bare {model}", command=bare, folder=ROOT),
            Arm(name=f"surefoot {model}", command=train, folder=ROOT),
        ]
    return [
        *arms,
        Arm(name="help", command=(sys.executable, "-m", "surefoot", "--help"), folder=ROOT),
    ]


def render(trial: Trial) -> str:
    """Medians, paired ratios with intervals, and the bar; the help's CPU time with its own."""
    rows = []
    for model in BATCHES:
        for measured in (CPU, WALL):
            effect = find_effect(trial, f"surefoot {model}", f"bare {model}", f"{model}/{measured}")
            rows.append((model, measured, *_cells(effect), *_standing(effect)))
    rows += _help_rows(trial)
    return markdown(
        ("model", "measure", "bare script", "surefoot", "paired ratio (95 %)", "bar", "verdict"),
        rows,
    )


def _cells(effect: Effect) -> tuple[str, str, str]:
    if effect.interval is None:
        return "", "", effect.words.splitlines()[0]
    low, middle, high = map(
        format_number, (effect.interval.low, effect.interval.estimate, effect.interval.high)
    )
    both = (format_measure(effect.measure, value) for value in (effect.reference, effect.value))
    return *both, f"{middle} ({low} to {high})"


def _standing(effect: Effect) -> tuple[str, str]:
    # shown beside it; the bar is on CPU time, which a busy machine stretches less
    if effect.measure.endswith(WALL):
        return "", ""
    bar = Bar(arm=effect.arm, baseline=effect.baseline, measure=effect.measure, most=MAX_TIMES)
    return f"<= {MAX_TIMES}", bar.standing(effect)


def _help_rows(trial: Trial) -> list[tuple[str, ...]]:
    seconds = list(trial.by_round("help", "process_cpu_s").values())
    if not seconds:
        return [
            (
                "",
                "CPU time of `surefoot --help`",
                "",
                "n/a",
                "",
                f"<= {MAX_HELP_S} s",
                "not measured",
            )
        ]
    interval = median_interval(seconds)
    low, middle, high = map(format_seconds, (interval.low, interval.estimate, interval.high))
    highest = interval.estimate if interval.high is None else interval.high
    holds = "holds" if highest <= MAX_HELP_S else "fails"
    return [
        (
            "",
            "CPU time of `surefoot --help`",
            "",
            f"{middle} ({low} to {high})",
            "",
            f"<= {MAX_HELP_S} s",
            holds,
        )
    ]


def main() -> None:
    asked = make_parser(__doc__, RESULTS).parse_args()
    if not asked.show:
        measure(
            "startup",
            make_arms(),
            rounds=asked.rounds,
            packages=("torch", "tensorboard", "surefoot"),
            out=asked.out,
        )
    trial = read_trial(asked.out)
    parts = {"conditions": render_conditions(trial), "results": render(trial)}
    show(parts, FOLDER / "README.md" if asked.out == RESULTS else None)


if __name__ == "__main__":
    main()
