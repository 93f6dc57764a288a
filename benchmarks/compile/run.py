"""What compiling brings and costs.

A plain loop, surefoot in eager mode, and with its blocks, model or whole step compiled.

python benchmarks/compile/run.py        15 rounds; hours, since each process compiles anew
python benchmarks/compile/run.py --models deep --rounds 9
python benchmarks/compile/run.py --models mlp --rounds 1 --steps 20 --out smoke.json
"""

from __future__ import annotations

import sys
from pathlib import Path

from benchmarks.compile.arm import FIRST, KINDS, MODELS
from benchmarks.measured import ROOT, make_parser, measure, render_conditions, render_ratio, show
from surefoot.core.statistics import median_interval
from surefoot.core.units import format_seconds
from surefoot.trial import Arm, Bar, Trial, find_effect, markdown, read_trial

FOLDER = Path(__file__).parent
RESULTS = FOLDER / "results" / "compile.json"
CPU, FIRST_S = "cpu_s_per_step", "first_s"
# in processes and results of its own: its blocks are those of the GPT, and would be compiled before
DEEP = "deep"
SMALL = tuple(name for name in MODELS if name != DEEP)
WITHOUT_BLOCKS = ("mlp", "convnet")
BARS = (
    Bar(arm="graph", baseline="idiomatic", measure=f"mlp/{CPU}", most=0.25),
    Bar(arm="step", baseline="idiomatic", measure=f"mlp/{CPU}", most=0.25),
    Bar(arm="blocks", baseline="model", measure=f"{DEEP}/{FIRST_S}", most=0.5),
    Bar(arm="blocks", baseline="model", measure=f"{DEEP}/{CPU}", most=1.05),
)


def make_arms(models: tuple[str, ...], steps: int | None) -> list[Arm]:
    """An arm of each kind for the models that go with it.

    Only the GPTs have blocks, and the deep one is there for those.
    """
    more = () if steps is None else ("--steps", str(steps))
    arms = []
    for kind in ("eager", "blocks", "model") if models == (DEEP,) else KINDS:
        mine = [name for name in models if not (kind == "blocks" and name in WITHOUT_BLOCKS)]
        words = (
            sys.executable,
            "-m",
            "benchmarks.compile.arm",
            "--kind",
            kind,
            "--models",
            ",".join(mine),
            *more,
        )
        if mine:
            arms.append(
                Arm(
                    name=kind,
                    command=(*words, "--report", "{report}", "--folder", "{work}/runs"),
                    folder=ROOT,
                    timeout_s=3600.0,
                )
            )
    return arms


def render_bars(trial: Trial) -> str:
    """The bars of the models that were measured."""
    rows = []
    for bar in BARS:
        model, _, measure = bar.measure.partition("/")
        if not trial.by_round(bar.arm, bar.measure):
            continue
        effect = find_effect(trial, bar.arm, bar.baseline, bar.measure)
        rows.append(
            (
                model,
                measure,
                f"{bar.arm} against {bar.baseline}",
                render_ratio(effect),
                f"<= {bar.most}",
                bar.standing(effect),
            )
        )
    return markdown(("model", "measure", "what", "median (95 %)", "bar", "verdict"), rows)


def render_arms(trial: Trial) -> str:
    """Of each model and arm the CPU time of a step, and that to the plain loop's.

    And how long it takes until steps run as later ones do.
    """
    rows = []
    for model in MODELS:
        base = "eager" if model == DEEP else "idiomatic"
        for arm in trial.arms:
            times, firsts = (
                list(trial.by_round(arm, f"{model}/{measure}").values())
                for measure in (CPU, FIRST_S)
            )
            if not times:
                continue
            ratio = (
                "" if arm == base else render_ratio(find_effect(trial, arm, base, f"{model}/{CPU}"))
            )
            cells = (format_seconds(median_interval(each).estimate) for each in (times, firsts))
            rows.append((model, arm, next(cells), ratio, next(cells), str(FIRST[arm])))
    return markdown(
        (
            "model",
            "arm",
            "CPU time of a step",
            "to idiomatic (deep: eager)",
            "until steady",
            "in step",
        ),
        rows,
    )


def main() -> None:
    parser = make_parser(__doc__, RESULTS)
    parser.add_argument(
        "--models",
        default=",".join(MODELS),
        help=f"of {', '.join(MODELS)}; {DEEP} is measured by itself",
    )
    parser.add_argument(
        "--steps", type=int, help="measured, instead of each model's own: to see that it works"
    )
    asked = parser.parse_args()
    parts = {}
    for models, prefix, out in (
        (SMALL, "", asked.out),
        ((DEEP,), f"{DEEP} ", asked.out.with_name(f"{DEEP}.json")),
    ):
        chosen = tuple(name for name in models if name in asked.models.split(","))
        if chosen and not asked.show:
            arms = make_arms(chosen, asked.steps)
            measure(
                "compile",
                arms,
                rounds=asked.rounds,
                packages=("torch", "numpy", "surefoot"),
                out=out,
                warmup_rounds=0,
            )
        if out.is_file():
            trial = read_trial(out)
            parts |= {f"{prefix}bars": render_bars(trial), f"{prefix}arms": render_arms(trial)}
            parts[f"{prefix}conditions"] = render_conditions(trial)
    show(parts, FOLDER / "README.md" if asked.out == RESULTS else None)


if __name__ == "__main__":
    main()
