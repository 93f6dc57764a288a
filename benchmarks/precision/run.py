"""fp32, bf16 and fp16 on a convolutional network and real images.

Time of a step, peak memory, and what is learned.

python benchmarks/precision/run.py [--only cost|score] [--data DIR] [--rounds 9] [--seeds 3]
                                   [--show]
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

from benchmarks.measured import ROOT, make_parser, measure, render_conditions, render_scores, show
from surefoot.contract import spec_file
from surefoot.contract.spec import RunSpec
from surefoot.trial import Arm, Trial, effects_markdown, find_effects, read_trial, spec_arm

FOLDER = Path(__file__).parent
RESULTS, SCORES = (FOLDER / "results" / f"{name}.json" for name in ("cost", "score"))
DATA = "../shared/data"
# a processor without units for fp16 takes ten times as long over it
STEPS = {"fp32": 8, "bf16": 8, "fp16": 2}
LEARNED = ("fp32", "bf16")
MAX_APART, SEEDS = 0.5, 3  # points


def make_spec(compute: str, data: str, *, seed: int = 0) -> RunSpec:
    """`cifar10_quick` as it is, but for the precision.

    Two epochs of the images, Muon at a batch of 250.
    """
    base = spec_file.read("cifar10_quick").spec
    return base.replace(
        precision={"compute": compute}, data={"folder": data}, train={"seed": seed, "threads": 1}
    )


def cost_arms(data: str) -> list[Arm]:
    return [
        spec_arm(name, make_spec(name, data), steps=steps, warmup=min(steps, 3), timeout_s=1200.0)
        for name, steps in STEPS.items()
    ]


def score_arms(seeds: int, data: str) -> list[Arm]:
    words = (
        sys.executable,
        "-m",
        "benchmarks.large_batch.arms",
        "score",
        "{work}/spec.toml",
        "{work}/run",
        "{report}",
    )
    return [
        Arm(
            name=f"{compute} seed {seed}",
            command=words,
            folder=ROOT,
            timeout_s=7200.0,
            files={"spec.toml": spec_file.write(make_spec(compute, data, seed=seed))},
        )
        for seed in range(seeds)
        for compute in LEARNED
    ]


def render_cost(trial: Trial) -> str:
    """Time of a sample and peak of the process against fp32."""
    return effects_markdown(find_effects(trial, "fp32", ["cpu_s_per_sample", "peak_bytes"]))


def render_score(trial: Trial) -> str:
    """The mean accuracy in either precision, the difference with the same seeds, and the bar."""
    heads = ("mean accuracy, %", "points above fp32", f"means within {MAX_APART} points")
    return render_scores(trial, LEARNED, heads=heads, most_worse=MAX_APART, factor=100)


def main() -> None:
    parser = make_parser(__doc__, RESULTS)
    parser.add_argument("--only", choices=("cost", "score"))
    parser.add_argument("--seeds", type=int, default=SEEDS)
    parser.add_argument(
        "--data",
        type=Path,
        default=Path(os.environ.get("DATA", DATA)),
        help="the folder of cifar10-webdataset",
    )
    asked = parser.parse_args()
    data, scores = str((ROOT / asked.data).resolve()), asked.out.with_name(SCORES.name)
    if not asked.show and asked.only != "score":
        measure(
            "precision: cost",
            cost_arms(data),
            rounds=asked.rounds,
            packages=("torch", "surefoot"),
            out=asked.out,
        )
    if not asked.show and asked.only != "cost":
        arms = score_arms(asked.seeds, data)
        measure(
            "precision: score",
            arms,
            rounds=1,
            packages=("torch", "surefoot"),
            out=scores,
            warmup_rounds=0,
        )
    parts = {}
    for name, out, render in (("cost", asked.out, render_cost), ("score", scores, render_score)):
        if out.is_file():
            parts |= {
                name: render(read_trial(out)),
                f"{name} conditions": render_conditions(read_trial(out)),
            }
    show(parts, FOLDER / "README.md" if asked.out == RESULTS else None)


if __name__ == "__main__":
    main()
