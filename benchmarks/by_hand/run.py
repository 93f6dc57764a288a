"""A component of surefoot against the same feature of torch, written by hand.

CPU time of a step, pair by pair.

python benchmarks/by_hand/run.py                                            15 rounds
python benchmarks/by_hand/run.py --components fp32,bf16 --rounds 17 --out again.json
python benchmarks/by_hand/run.py --components bf16,recompute --rounds 1 --steps 4 --out smoke.json
"""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path

from benchmarks.by_hand.components import COMPONENTS, MODELS
from benchmarks.measured import ROOT, make_parser, measure, render_conditions, render_ratio, show
from surefoot.core.statistics import median_interval
from surefoot.core.units import format_seconds
from surefoot.trial import Arm, Bar, Trial, find_effect, markdown, read_trial

FOLDER = Path(__file__).parent
RESULTS = FOLDER / "results" / "by_hand.json"
AGAIN = FOLDER / "results" / "again.json"  # what the noise had left undecided, once more
CPU = "cpu_s_per_step"
MOST = 1.05
PLAIN = "fp32"


def make_arms(components: list[str], steps: int | None, caches: str) -> list[Arm]:
    """A pair for each component; what the warm-up round compiled, later ones find in `caches`."""
    more = () if steps is None else ("--steps", str(steps))
    return [
        Arm(
            name=f"{how} {component}",
            folder=ROOT,
            timeout_s=1800.0,
            variables={"TORCHINDUCTOR_CACHE_DIR": f"{caches}/{how}-{component.replace(' ', '-')}"},
            command=(
                sys.executable,
                "-m",
                "benchmarks.by_hand.arm",
                "--how",
                how,
                "--component",
                component,
                "--report",
                "{report}",
                "--folder",
                "{work}/runs",
                *more,
            ),
        )
        for component in components
        for how in ("hand", "surefoot")
    ]


def render(trial: Trial) -> str:
    """Both times of a step of each component and model, and their ratio with the bar.

    And what the component brings surefoot.
    """
    rows = []
    for component in COMPONENTS:
        for model in MODELS:
            name = f"{model}/{CPU}"
            times = [
                list(trial.by_round(f"{how} {component}", name).values())
                for how in ("hand", "surefoot")
            ]
            if not all(times):
                continue
            bar = Bar(
                arm=f"surefoot {component}", baseline=f"hand {component}", measure=name, most=MOST
            )
            effect = find_effect(trial, bar.arm, bar.baseline, name)
            cells = (format_seconds(median_interval(each).estimate) for each in times)
            rows.append(
                (
                    component,
                    model,
                    *cells,
                    render_ratio(effect),
                    bar.standing(effect),
                    _brings(trial, component, name),
                )
            )
    heads = (
        "component",
        "model",
        "by hand",
        "surefoot",
        "surefoot to hand (95 %)",
        f"<= {MOST}",
        f"surefoot to its {PLAIN} (95 %)",
    )
    return markdown(heads, rows)


def _brings(trial: Trial, component: str, name: str) -> str:
    arm, plain = f"surefoot {component}", f"surefoot {PLAIN}"
    return (
        ""
        if component == PLAIN or not trial.by_round(plain, name)
        else render_ratio(find_effect(trial, arm, plain, name))
    )


def main() -> None:
    parser = make_parser(__doc__, RESULTS)
    parser.add_argument("--components", default=",".join(COMPONENTS))
    parser.add_argument(
        "--steps", type=int, help="measured, instead of each model's own: to see that it works"
    )
    asked = parser.parse_args()
    if not asked.show:
        with tempfile.TemporaryDirectory(prefix="surefoot-by-hand-") as caches:
            arms = make_arms(asked.components.split(","), asked.steps, caches)
            measure(
                "by hand",
                arms,
                rounds=asked.rounds,
                packages=("torch", "torchao", "surefoot"),
                out=asked.out,
            )
    trial = read_trial(asked.out)
    prefix = "again " if asked.out.resolve() == AGAIN else ""
    parts = {f"{prefix}results": render(trial), f"{prefix}conditions": render_conditions(trial)}
    show(parts, FOLDER / "README.md" if asked.out.resolve() in (RESULTS, AGAIN) else None)


if __name__ == "__main__":
    main()
