"""Two ranks that hold a part each: a step of every stage against torch's own parts by hand, and the bytes that a rank holds.

python -m benchmarks.distributed.shard [--rounds 9] [--show]
"""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path

from benchmarks.distributed.arm import RANKS
from benchmarks.measured import ROOT, make_parser, measure, ratio_of, render_conditions, render_interval, show, standing_of
from surefoot.control.plan import compare_stages
from surefoot.core.statistics import median_interval
from surefoot.core.units import format_bytes, format_percent, format_seconds
from surefoot.trial import Arm, Trial, markdown, read_trial

FOLDER = Path(__file__).parent
RESULTS = FOLDER / "results" / "shard.json"
STEPS = (("convnet", 1), ("convnet", 2), ("gpt", 1), ("gpt", 2), ("gpt", 3))  # a convnet without blocks has no stage 3
HELD = tuple((ranks, stage) for ranks in (2, 4) for stage in (0, 1, 2, 3))
WALL = "wall_s_per_step"
MOST, MOST_OFF = 1.05, 0.05


def make_arms(folder: str) -> list[Arm]:
    def arm(name: str, ranks: int, *words: str) -> Arm:
        command = (
            sys.executable,
            "-m",
            "benchmarks.distributed.shard_arm",
            *words,
            "--report",
            "{report}",
            "--folder",
            f"{{work}}/../{folder}",
        )
        return Arm(name=name, folder=ROOT, ranks=ranks, timeout_s=300.0, command=command)

    steps = [
        arm(f"{model} {how} {stage}", RANKS, "--how", how, "--stage", str(stage), "--model", model)
        for model, stage in STEPS
        for how in ("surefoot", "hand")
    ]
    return steps + [arm(f"bytes {stage} on {ranks}", ranks, "--how", "bytes", "--stage", str(stage)) for ranks, stage in HELD]


def render(trial: Trial) -> str:
    """Steps against those by hand, and bytes against the formula."""
    steps, held = [], []
    for model, stage in STEPS:
        mine, hand = f"{model} surefoot {stage}", f"{model} hand {stage}"
        walls = [format_seconds(median_interval(list(trial.by_round(arm, WALL).values())).estimate) for arm in (mine, hand)]
        ratio = ratio_of(trial, mine, hand, WALL)
        steps.append((model, str(stage), *walls, render_interval(ratio, ".3f"), f"<= {MOST}", standing_of(ratio, most=MOST)))
    for ranks, stage in HELD:
        arm = f"bytes {stage} on {ranks}"
        found = median_interval(list(trial.by_round(arm, "held_bytes").values())).estimate
        count = int(median_interval(list(trial.by_round(arm, "num_parameters").values())).estimate)
        expected = compare_stages(count, ranks)[stage].num_bytes
        off = found / expected - 1.0
        standing = "holds" if abs(off) <= MOST_OFF else "fails"
        held.append(
            (
                str(ranks),
                str(stage) if stage else "none",
                format_bytes(found),
                format_bytes(expected),
                format_percent(off),
                standing,
            )
        )
    heads = ("model", "stage", "surefoot", "by hand", "ratio (95 %)", "must", "standing")
    sizes = ("ranks", "stage", "a rank holds", "by the formula", "off by", f"within {MOST_OFF:.0%}")
    return "\n".join((markdown(heads, steps), markdown(sizes, held)))


def main() -> None:
    asked = make_parser(__doc__, RESULTS).parse_args()
    if not asked.show:
        with tempfile.TemporaryDirectory(prefix="surefoot-shard-") as name:
            measure(
                "ranks that hold a part", make_arms(Path(name).name), rounds=asked.rounds, packages=("torch", "surefoot"), out=asked.out,
                said={"pinned": "each rank to a core of its own, where there are as many"},
            )  # fmt: skip
    trial = read_trial(asked.out)
    parts = {"shard": render(trial), "shard conditions": render_conditions(trial)}
    show(parts, FOLDER / "README.md" if asked.out.resolve() == RESULTS else None)


if __name__ == "__main__":
    main()
