"""Two ranks on two cores, and four: surefoot against torch's DistributedDataParallel by hand, and against one rank.

python -m benchmarks.distributed.run [--rounds 9] [--show]
"""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path

from benchmarks.by_hand.components import MODELS
from benchmarks.distributed.arm import RANKS
from benchmarks.measured import ROOT, make_parser, measure, ratio_of, render_conditions, render_interval, show, standing_of
from surefoot.core.statistics import median_interval
from surefoot.core.units import format_seconds
from surefoot.trial import Arm, Trial, markdown, read_trial

FOLDER = Path(__file__).parent
RESULTS = FOLDER / "results" / "replicate.json"
# processes of each way to scale; pair: that many runs of one, at the same time; four: weak, on as many cores as two have
NUM_RANKS = {"one": 1, "pair": RANKS, "weak": RANKS, "strong": RANKS, "four": 4}
KINDS = tuple((how, scaling) for scaling in NUM_RANKS for how in ("surefoot", "hand"))
WALL, WAITED, CPU = "wall_s_per_step", "waited_s_per_step", "cpu_s_per_step"
MOST, LEAST = 1.05, 0.90


def make_arms(folder: str) -> list[Arm]:
    return [
        Arm(
            name=f"{model} {how} {scaling}", folder=ROOT, ranks=NUM_RANKS[scaling], timeout_s=300.0,
            command=(
                sys.executable, "-m", "benchmarks.distributed.arm", "--how", how, "--scaling", scaling, "--model", model,
                "--report", "{report}", "--folder", f"{{work}}/{folder}" if scaling == "one" else f"{{work}}/../{folder}",
            ),
        )
        for model in MODELS
        for how, scaling in KINDS
    ]  # fmt: skip


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
            told = "" if scaling in ("one", "pair") or how == "hand" else format_seconds(median_interval(waited).estimate)
            rows.append(
                (
                    model,
                    how,
                    scaling,
                    format_seconds(median_interval(walls).estimate),
                    format_seconds(median_interval(list(trial.by_round(arm, CPU).values())).estimate),
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
        bars.append((f"{model}: weak scaling", render_interval(weak, ".3f"), f">= {LEAST}", standing_of(weak, least=LEAST)))
        cores = ratio_of(trial, f"{model} surefoot one", f"{model} surefoot pair", WALL)
        bars.append((f"{model}: what two cores at once leave of one, without ranks", render_interval(cores, ".3f"), "", ""))
        left = ratio_of(trial, f"{model} surefoot pair", f"{model} surefoot weak", WALL)
        bars.append((f"{model}: what sharing its work leaves of that", render_interval(left, ".3f"), "", ""))
    heads = ("model", "by", "batch", "a step", "CPU time of a rank", "of the step waiting for others", "efficiency (95 %)")
    return "\n".join((markdown(heads, rows), markdown(("share", "median (95 %)", "must", "standing"), bars)))


def _efficiency(trial: Trial, model: str, how: str, scaling: str) -> str:
    """T1 / T2 of a batch twice as large, or T1 / 2 T2 of the same batch; of four ranks on two cores the same of CPU time."""
    if scaling == "one":
        return "1"
    found = ratio_of(trial, f"{model} {how} one", f"{model} {how} {scaling}", CPU if scaling == "four" else WALL)
    return render_interval(found, ".3f", 1 / RANKS if scaling == "strong" else 1.0)


def main() -> None:
    asked = make_parser(__doc__, RESULTS).parse_args()
    if not asked.show:
        with tempfile.TemporaryDirectory(prefix="surefoot-distributed-") as name:
            measure(
                "two ranks", make_arms(Path(name).name), rounds=asked.rounds, packages=("torch", "surefoot"), out=asked.out,
                said={"pinned": "each rank to a core of its own"},
            )  # fmt: skip
    trial = read_trial(asked.out)
    parts = {"results": render(trial), "conditions": render_conditions(trial)}
    show(parts, FOLDER / "README.md" if asked.out.resolve() == RESULTS else None)


if __name__ == "__main__":
    main()
