"""LARS and LAMB: what an update costs beside fused AdamW, and what a batch of 2,048 scores.

The score is held against SGD at 256.

python benchmarks/large_batch/run.py [--only step|score] [--data DIR] [--rounds 15] [--seeds 3]
                                     [--show]
"""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from benchmarks.measured import ROOT, make_parser, measure, render_conditions, render_scores, show
from surefoot.contract import spec_file
from surefoot.contract.spec import RunSpec
from surefoot.trial import Arm, Bar, Trial, effects_markdown, find_effects, markdown, read_trial

FOLDER = Path(__file__).parent
RESULTS, SCORES = (FOLDER / "results" / f"{name}.json" for name in ("step", "score"))
DATA = "../shared/data"
OPTIMIZERS, MODELS = ("adamw", "lars", "lamb", "lars compiled", "lamb compiled"), ("convnet", "gpt")
MAX_COMPILED, MAX_APART, SEEDS = 1.3, 1.5, 3
EPOCHS = 4
# the same task, epochs and schedule for all; each has the rate of its own kind
COMMON: Mapping[str, Mapping[str, Any]] = {
    "train": {"length": f"{EPOCHS} epochs"},
    "evaluate": {"every": f"{EPOCHS} epochs"},
    "precision": {"compute": "bf16"},
    "schedule": {"name": "linear", "warmup": "0.5 epochs"},
    "checkpoint": {"every": f"{EPOCHS} epochs"},
}
KINDS: Mapping[str, Mapping[str, Mapping[str, Any]]] = {
    "sgd 256": {
        "optim": {"name": "sgd", "lr": 0.1, "nesterov": True, "weight_decay": 5e-4, "clip": 0.0},
        "train": {"batch": 256},
    },
    "lars 2048": {
        "optim": {"name": "lars", "lr": 8.0, "weight_decay": 5e-4, "clip": 0.0},
        "train": {"batch": 2048, "microbatch": 256},
    },
    "lamb 2048": {
        "optim": {"name": "lamb", "lr": 0.02, "weight_decay": 0.01, "clip": 0.0},
        "train": {"batch": 2048, "microbatch": 256},
    },
}


def make_spec(kind: str, seed: int, data: str) -> RunSpec:
    """One run of `cifar10_quick`; BatchNorm sees 256 samples in all of them."""
    base = spec_file.read("cifar10_quick").spec
    task = {"use": "cifar10", **base.task.parameters}
    tables: dict[str, dict[str, Any]] = {"task": task, "data": {"folder": data}}
    for more in (COMMON, KINDS[kind], {"train": {"seed": seed}}):
        for name, keys in more.items():
            tables[name] = {**tables.get(name, {}), **keys}
    return RunSpec(**tables)


def step_arms() -> list[Arm]:
    words = (sys.executable, "-m", "benchmarks.large_batch.arms", "step")
    return [
        Arm(
            name=name,
            command=(*words, name, ",".join(MODELS), "{report}"),
            folder=ROOT,
            timeout_s=1200,
        )
        for name in OPTIMIZERS
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
            name=f"{kind} seed {seed}",
            command=words,
            folder=ROOT,
            timeout_s=7200,
            files={"spec.toml": spec_file.write(make_spec(kind, seed, data))},
        )
        for seed in range(seeds)
        for kind in KINDS
    ]


def render_step(trial: Trial) -> str:
    """Every optimizer's update against that of fused AdamW, and the bar of the compiled ones."""
    parts, bars = [], []
    for model in MODELS:
        name = f"{model}/cpu_s_per_step"
        if not trial.by_round("adamw", name):
            continue
        effects = find_effects(trial, "adamw", [name])
        parts.append(effects_markdown(effects))
        for effect in effects:
            if effect.arm.endswith("compiled"):
                bar = Bar(arm=effect.arm, baseline="adamw", measure=name, most=MAX_COMPILED)
                bars.append((model, effect.arm, f"<= {MAX_COMPILED}", bar.standing(effect)))
    return "\n".join([*parts, markdown(("model", "arm", "bar", "verdict"), bars)])


def render_score(trial: Trial) -> str:
    """The mean score of each kind, its difference from SGD's with the same seeds, and the bar."""
    heads = ("mean accuracy, %", "points above SGD at 256", f"means within {MAX_APART} points")
    return render_scores(trial, list(KINDS), heads=heads, most_worse=MAX_APART, factor=100)


def main() -> None:
    parser = make_parser(__doc__, RESULTS)
    parser.add_argument("--only", choices=("step", "score"))
    parser.add_argument("--seeds", type=int, default=SEEDS)
    parser.add_argument(
        "--data",
        type=Path,
        default=Path(os.environ.get("DATA", DATA)),
        help="the folder of cifar10-webdataset",
    )
    asked = parser.parse_args()
    packages = ("torch", "surefoot")
    if not asked.show and asked.only != "score":
        measure(
            "large batch: update", step_arms(), rounds=asked.rounds, packages=packages, out=RESULTS
        )
    if not asked.show and asked.only != "step":
        arms = score_arms(asked.seeds, str((ROOT / asked.data).resolve()))
        measure(
            "large batch: score", arms, rounds=1, packages=packages, out=SCORES, warmup_rounds=0
        )
    parts = {}
    if RESULTS.is_file():
        parts |= {
            "step conditions": render_conditions(read_trial(RESULTS)),
            "step": render_step(read_trial(RESULTS)),
        }
    if SCORES.is_file():
        parts |= {
            "score conditions": render_conditions(read_trial(SCORES)),
            "score": render_score(read_trial(SCORES)),
        }
    show(parts, FOLDER / "README.md")


if __name__ == "__main__":
    main()
