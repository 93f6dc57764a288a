"""What the timers cost a step, what the phases of four tasks add up to, and where delays are found.

The delays are of known size.

python benchmarks/phases/run.py [--rounds 9]
python benchmarks/phases/run.py --part cost --rounds 60     one of the three parts alone
"""

from __future__ import annotations

import sys
from collections.abc import Iterable
from pathlib import Path

from benchmarks.measured import ROOT, make_parser, measure, render_conditions, show
from surefoot.contract.events import PHASES
from surefoot.core.statistics import median, median_interval
from surefoot.core.units import format_number, format_seconds
from surefoot.trial import Arm, Trial, markdown, read_trial

FOLDER = Path(__file__).parent
RESULTS = FOLDER / "results"
COSTS = {
    "the calls alone": ("calls", "cpu_s_per_step"),
    "in a run": ("steps", "added_cpu_s_per_step"),
}
TASKS = ("digits", "cifar10", "pycorpus", "wikitext2")
PLACES = (
    "data",
    "augmentation",
    "forward",
    "loss",
    "backward",
    "optimizer",
    "evaluation",
    "checkpoint",
    "logging",
    "other",
)
SIZES = ("2 ms", "5 ms", "10 ms", "20 ms", "50 ms")
MAX_ADDED_S, MAX_OFF, MAX_OTHER = 10e-6, 0.01, 0.05


def arm(name: str, what: str) -> Arm:
    return Arm(
        name=name,
        command=(sys.executable, "-m", "benchmarks.phases.arms", what, "{report}", "{work}/run"),
        folder=ROOT,
    )


def render_cost(trial: Trial) -> str:
    rows = []
    for name, (what, measured) in COSTS.items():
        interval = median_interval(list(trial.by_round(what, measured).values()))
        low, middle, high = map(format_seconds, (interval.low, interval.estimate, interval.high))
        lowest, highest = (
            interval.estimate if bound is None else bound for bound in (interval.low, interval.high)
        )
        verdict = (
            "holds" if highest <= MAX_ADDED_S else "fails" if lowest > MAX_ADDED_S else "undecided"
        )
        rows.append((name, f"{middle} ({low} to {high})", "<= 10 us", verdict))
    return markdown(("CPU time of a step", "median (95 %)", "bar", "verdict"), rows)


def render_wall(trial: Trial) -> str:
    rows = []
    for task in TASKS:
        for how in ("plain", "saved and evaluated"):
            found = {
                key: _middle(trial, f"{task} {how}", key)
                for key in ("coverage", *(f"{name}_share" for name in PHASES))
            }
            coverage, other = found.pop("coverage"), found["other_share"]
            if coverage is None or other is None:
                rows.append((f"{task}, {how}", "n/a", *("n/a" for _ in PHASES), "not measured"))
                continue
            holds = abs(coverage - 1) <= MAX_OFF and other <= MAX_OTHER
            shares = (f"{100 * (share or 0.0):.1f}" for share in found.values())
            rows.append(
                (
                    f"{task}, {how}",
                    f"{100 * coverage:.3f} %",
                    *shares,
                    "holds" if holds else "fails",
                )
            )
    return markdown(("run", "phases by wall time", *(f"{name} %" for name in PHASES), "bar"), rows)


def render_delays(trial: Trial, against: str) -> str:
    rows = []
    for where in PLACES:
        sizes = [f"{against}/{size}" for size in SIZES]
        cells = [
            f"{_percent(trial, where, f'{size}/own')} / {_percent(trial, where, f'{size}/others')}"
            for size in sizes
        ]
        rows.append((where, format_seconds(_middle(trial, where, "usual_s")), *cells))
    return markdown(("delay put into", "without it", *SIZES), rows)


def _middle(trial: Trial, name: str, measured: str) -> float | None:
    values: Iterable[float] = trial.by_round(name, measured).values()
    return median(list(values)) if values else None


def _percent(trial: Trial, name: str, measured: str) -> str:
    value = _middle(trial, name, measured)
    return "n/a" if value is None else f"{format_number(round(100 * value, 2))} %"


def main() -> None:
    parser = make_parser(__doc__, RESULTS)
    parser.set_defaults(rounds=9)
    parser.add_argument(
        "--part",
        choices=("cost", "wall", "delays"),
        help="measure this alone; the rest stays as it is",
    )
    asked = parser.parse_args()
    costs = [arm(what, what) for what, _ in COSTS.values()]
    runs = {"plain": "plain", "saved and evaluated": "busy"}
    walls = [
        arm(f"{task} {how}", f"wall:{task}:{word}") for task in TASKS for how, word in runs.items()
    ]
    delays = [arm(where, f"delay:{where}") for where in PLACES]
    parts = {
        "cost": ("what the timers cost", costs, asked.rounds),
        "wall": ("phases and wall time", walls, 1),
        "delays": ("planted delays", delays, 1),
    }
    for name, (title, arms, rounds) in parts.items():
        if not asked.show and asked.part in (None, name):
            packages = ("torch", "numpy", "surefoot")
            measure(
                title,
                arms,
                rounds=rounds,
                packages=packages,
                out=asked.out / f"{name}.json",
                warmup_rounds=0,
            )
    cost, wall, planted = (
        read_trial(asked.out / f"{name}.json") for name in ("cost", "wall", "delays")
    )
    shown = {
        "cost": render_cost(cost),
        "wall": render_wall(wall),
        "delays": render_delays(planted, "elsewhere"),
        "raw": render_delays(planted, "nowhere"),
        "conditions": render_conditions(cost),
    }
    show(shown, FOLDER / "README.md" if asked.out == RESULTS else None)


if __name__ == "__main__":
    main()
