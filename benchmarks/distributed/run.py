"""Two ranks on two cores, and four.

surefoot against torch's DistributedDataParallel by hand, and against one rank.

python -m benchmarks.distributed.run [--rounds 9] [--only pair] [--show]
"""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from benchmarks.by_hand.components import MODELS
from benchmarks.distributed.arm import RANKS
from benchmarks.measured import (
    ROOT,
    make_parser,
    measure,
    ratio_of,
    render_conditions,
    render_interval,
    show,
    standing_of,
)
from surefoot.core.statistics import median_interval
from surefoot.core.units import format_seconds
from surefoot.trial import Arm, Trial, markdown, read_trial

FOLDER = Path(__file__).parent
RESULTS, PAIR = FOLDER / "results" / "replicate.json", FOLDER / "results" / "pair.json"
# processes of each way to scale
# pair: so many runs of one at a time; gloo: weak, by sockets; four: weak, on the cores of two
NUM_RANKS = {"one": 1, "pair": RANKS, "weak": RANKS, "gloo": RANKS, "strong": RANKS, "four": 4}
SHARED = ("one", "pair", "weak", "gloo")
KINDS = tuple(
    (how, scaling)
    for scaling in NUM_RANKS
    if scaling not in ("pair", "gloo")
    for how in ("surefoot", "hand")
)
WALL, WAITED, CPU = "wall_s_per_step", "waited_s_per_step", "cpu_s_per_step"
MOST, LEAST = 1.05, 0.90


def make_arms(folder: str, kinds: Sequence[tuple[str, str]]) -> list[Arm]:
    return [
        Arm(
            name=f"{model} {how} {scaling}",
            folder=ROOT,
            ranks=NUM_RANKS[scaling],
            timeout_s=300.0,
            command=(
                sys.executable,
                "-m",
                "benchmarks.distributed.arm",
                "--how",
                how,
                "--scaling",
                scaling,
                "--model",
                model,
                "--report",
                "{report}",
                "--folder",
                f"{{work}}/{folder}" if scaling == "one" else f"{{work}}/../{folder}",
            ),
        )
        for model in MODELS
        for how, scaling in kinds
    ]


def render(trial: Trial) -> str:
    """Each model's step, how it scales, and what it takes against the one by hand."""
    rows, bars = [], []
    for model in MODELS:
        for how, scaling in KINDS:
            arm = f"{model} {how} {scaling}"
            walls = list(trial.by_round(arm, WALL).values())
            if not walls:
                continue
            waited = list(trial.by_round(arm, WAITED).values())
            told = (
                ""
                if scaling in ("one", "pair") or how == "hand"
                else format_seconds(median_interval(waited).estimate)
            )
            rows.append(
                (
                    model,
                    how,
                    scaling,
                    format_seconds(median_interval(walls).estimate),
                    format_seconds(
                        median_interval(list(trial.by_round(arm, CPU).values())).estimate
                    ),
                    told,
                    _efficiency(trial, model, how, scaling),
                )
            )
        for scaling in ("weak", "strong"):
            ratio = ratio_of(trial, f"{model} surefoot {scaling}", f"{model} hand {scaling}", WALL)
            bars.append(
                (
                    f"{model}, {scaling}: surefoot to by hand",
                    render_interval(ratio, ".3f"),
                    f"<= {MOST}",
                    standing_of(ratio, most=MOST),
                )
            )
        weak = ratio_of(trial, f"{model} surefoot one", f"{model} surefoot weak", WALL)
        bars.append(
            (
                f"{model}: weak scaling",
                render_interval(weak, ".3f"),
                f">= {LEAST}",
                standing_of(weak, least=LEAST),
            )
        )
    heads = (
        "model",
        "by",
        "batch",
        "a step",
        "CPU time of a rank",
        "of the step waiting for others",
        "efficiency (95 %)",
    )
    return "\n".join(
        (markdown(heads, rows), markdown(("share", "median (95 %)", "must", "standing"), bars))
    )


def render_pair(trial: Trial) -> str:
    """What becomes of weak scaling, also by gloo.

    What two cores at work leave of one, and what ranks that share their work leave of that.
    """
    rows = []
    for model in MODELS:
        one, pair, weak, gloo = arms = tuple(f"{model} surefoot {scaling}" for scaling in SHARED)
        times = [_median(trial, arm, WALL) for arm in arms]
        pairs = ((one, pair), (pair, weak), (one, weak), (one, gloo))
        ratios = [render_interval(ratio_of(trial, *each, WALL), ".3f") for each in pairs]
        rows.append(
            (model, *times, *ratios, *(_median(trial, arm, CPU) for arm in (one, weak, gloo)))
        )
    heads = (
        "model",
        "one",
        "pair",
        "weak",
        "weak by gloo",
        "one / pair: the cores",
        "pair / weak: the sharing",
        "one / weak: both",
        "one / weak by gloo",
        "CPU time of a rank: one",
        "weak",
        "weak by gloo",
    )
    return markdown(heads, rows)


def _median(trial: Trial, arm: str, measure_name: str) -> str:
    return format_seconds(
        median_interval(list(trial.by_round(arm, measure_name).values())).estimate
    )


def _efficiency(trial: Trial, model: str, how: str, scaling: str) -> str:
    """T1 / T2 of a batch twice as large, or T1 / 2 T2 of the same batch.

    Of four ranks on two cores the same of CPU time.
    """
    if scaling == "one":
        return "1"
    found = ratio_of(
        trial, f"{model} {how} one", f"{model} {how} {scaling}", CPU if scaling == "four" else WALL
    )
    return render_interval(found, ".3f", 1 / RANKS if scaling == "strong" else 1.0)


def main() -> None:
    parser = make_parser(__doc__, RESULTS)
    parser.add_argument("--only", choices=("replicate", "pair"))
    asked = parser.parse_args()
    said = {"pinned": "each rank to a core of its own"}
    parts: dict[str, str] = {}
    for what, kinds in (
        ("replicate", KINDS),
        ("pair", tuple(("surefoot", each) for each in SHARED)),
    ):
        if asked.only not in (None, what):
            continue
        results = (
            asked.out
            if what == "replicate"
            else PAIR
            if asked.out == RESULTS
            else asked.out.with_stem("pair")
        )
        if not asked.show:
            with tempfile.TemporaryDirectory(prefix="surefoot-distributed-") as name:
                arms = make_arms(Path(name).name, kinds)
                measure(
                    "two ranks",
                    arms,
                    rounds=asked.rounds,
                    packages=("torch", "surefoot"),
                    out=results,
                    said=said,
                )
        trial = read_trial(results)
        if what == "replicate":
            parts |= {"results": render(trial), "conditions": render_conditions(trial)}
        else:
            parts |= {"pair": render_pair(trial), "pair conditions": render_conditions(trial)}
    show(parts, FOLDER / "README.md" if asked.out.resolve() == RESULTS else None)


if __name__ == "__main__":
    main()
