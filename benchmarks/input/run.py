"""Input for `cifar10` against the faster of two ways by hand over the decoded images.

Input is order, gather, augmentation and normalization.

python benchmarks/input/run.py --data FOLDER [--rounds 15]
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

from benchmarks.measured import ROOT, make_parser, measure, render_conditions, show
from surefoot.core.statistics import median
from surefoot.trial import Arm, Bar, Trial, effects_markdown, find_effects, markdown, read_trial

FOLDER = Path(__file__).parent
RESULTS = FOLDER / "results" / "input.json"
DATA = "../shared/data"
ARMS = ("surefoot", "by_windows", "by_image")
MEASURE = "cpu_s_per_sample"
MIN_SHARE = 0.9  # of the samples per CPU second by hand; so at most 1 / 0.9 of its time


def make_arms(data: Path) -> list[Arm]:
    words = (sys.executable, "-m", "benchmarks.input.arms")
    return [
        Arm(name=name, command=(*words, name, str(data), "{report}"), folder=ROOT) for name in ARMS
    ]


def render(trial: Trial) -> str:
    """Samples per CPU second of every way, all against the faster one by hand, and the bar."""
    medians = {
        arm: median(values)
        for arm in trial.arms
        if (values := list(trial.by_round(arm, MEASURE).values()))
    }
    fastest = min((arm for arm in medians if arm != "surefoot"), key=medians.__getitem__)
    effects = find_effects(trial, fastest, [MEASURE])
    rates = [(arm, f"{1 / seconds:,.0f}") for arm, seconds in medians.items()]
    mine = next(effect for effect in effects if effect.arm == "surefoot")
    standing = Bar(arm="surefoot", baseline=fastest, measure=MEASURE, most=1 / MIN_SHARE).standing(
        mine
    )
    share = f"{1 / mine.interval.estimate:.3g}" if mine.interval else "n/a"
    row = (
        f"samples per CPU second, of {fastest}'s, the faster by hand",
        share,
        f">= {MIN_SHARE}",
        standing,
    )
    bar = markdown(("share", "median", "bar", "verdict"), [row])
    return "\n".join(
        (markdown(("arm", "samples per CPU second"), rates), effects_markdown(effects), bar)
    )


def main() -> None:
    parser = make_parser(__doc__, RESULTS)
    parser.add_argument(
        "--data",
        type=Path,
        default=Path(os.environ.get("DATA", DATA)),
        help="the folder of cifar10-webdataset",
    )
    asked = parser.parse_args()
    if not asked.show:
        arms = make_arms((ROOT / asked.data).resolve())
        measure(
            "input",
            arms,
            rounds=asked.rounds,
            packages=("torch", "numpy", "surefoot"),
            out=asked.out,
        )
    trial = read_trial(asked.out)
    parts = {"conditions": render_conditions(trial), "results": render(trial)}
    show(parts, FOLDER / "README.md" if asked.out == RESULTS else None)


if __name__ == "__main__":
    main()
