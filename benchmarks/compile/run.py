"""What compiling brings and costs: a plain loop, surefoot in eager mode, and with its blocks, model or whole step compiled.

python benchmarks/compile/run.py                                          15 rounds; hours, since each process compiles anew
python benchmarks/compile/run.py --models mlp --rounds 1 --steps 20 --out smoke.json
"""

from __future__ import annotations

import sys
from pathlib import Path

from benchmarks.compile.arm import FIRST, KINDS, MODELS
from benchmarks.measured import ROOT, make_parser, measure, render_conditions, show
from surefoot.core.statistics import median_interval
from surefoot.core.units import format_number, format_seconds
from surefoot.trial import Arm, Bar, Effect, Trial, find_effect, markdown, read_trial

FOLDER = Path(__file__).parent
RESULTS = FOLDER / "results" / "compile.json"
CPU, FIRST_S = "cpu_s_per_step", "first_s"
BARS = (
    Bar(arm="graph", baseline="idiomatic", measure=f"mlp/{CPU}", most=0.25),
    Bar(arm="step", baseline="idiomatic", measure=f"mlp/{CPU}", most=0.25),
    Bar(arm="blocks", baseline="model", measure=f"deep/{FIRST_S}", most=0.5),
    Bar(arm="blocks", baseline="model", measure=f"deep/{CPU}", most=1.05),
)
WITHOUT_BLOCKS = ("mlp", "convnet")


def make_arm(kind: str, models: list[str], steps: int | None) -> Arm:
    """An arm for all models that go with it: only the GPTs have blocks, and the deep one is there for blocks against the model."""
    mine = [name for name in models if not (kind == "blocks" and name in WITHOUT_BLOCKS)]
    mine = [name for name in mine if name != "deep" or kind in ("eager", "blocks", "model")]
    words = (sys.executable, "-m", "benchmarks.compile.arm", "--kind", kind, "--models", ",".join(mine))
    more = () if steps is None else ("--steps", str(steps))
    return Arm(
        name=kind, command=(*words, *more, "--report", "{report}", "--folder", "{work}/runs"), folder=ROOT, timeout_s=3600.0
    )


def render_bars(trial: Trial) -> str:
    rows = []
    for bar in BARS:
        effect = find_effect(trial, bar.arm, bar.baseline, bar.measure)
        model, _, measure = bar.measure.partition("/")
        rows.append((model, measure, f"{bar.arm} against {bar.baseline}", _ratio(effect), f"<= {bar.most}", bar.standing(effect)))
    return markdown(("model", "measure", "what", "median (95 %)", "bar", "verdict"), rows)


def render_arms(trial: Trial) -> str:
    """Of each model and arm the CPU time of a step, that to the plain loop's, and how long it takes until steps run as later ones do."""
    rows = []
    for model in MODELS:
        base = "eager" if model == "deep" else "idiomatic"
        for arm in trial.arms:
            times, firsts = (list(trial.by_round(arm, f"{model}/{measure}").values()) for measure in (CPU, FIRST_S))
            if not times:
                continue
            ratio = "" if arm == base else _ratio(find_effect(trial, arm, base, f"{model}/{CPU}"))
            cells = (format_seconds(median_interval(each).estimate) for each in (times, firsts))
            rows.append((model, arm, next(cells), ratio, next(cells), str(FIRST[arm])))
    return markdown(("model", "arm", "CPU time of a step", "to idiomatic (deep: eager)", "until steady", "in step"), rows)


def _ratio(effect: Effect) -> str:
    found = effect.interval
    return (
        "n/a" if found is None else f"{format_number(found.estimate)} ({format_number(found.low)} to {format_number(found.high)})"
    )


def main() -> None:
    parser = make_parser(__doc__, RESULTS)
    parser.add_argument("--models", default=",".join(MODELS))
    parser.add_argument("--steps", type=int, help="measured, instead of each model's own: to see that it works")
    asked = parser.parse_args()
    if not asked.show:
        models = asked.models.split(",")
        kinds = [kind for kind in KINDS if kind != "blocks" or any(name not in WITHOUT_BLOCKS for name in models)]
        arms = [make_arm(kind, models, asked.steps) for kind in kinds]
        measure("compile", arms, rounds=asked.rounds, packages=("torch", "numpy", "surefoot"), out=asked.out, warmup_rounds=0)
    trial = read_trial(asked.out)
    parts = {"arms": render_arms(trial), "conditions": render_conditions(trial)}
    if asked.models == ",".join(MODELS):
        parts = {"bars": render_bars(trial), **parts}
    show(parts, FOLDER / "README.md" if asked.out == RESULTS else None)


if __name__ == "__main__":
    main()
