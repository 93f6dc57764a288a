"""Gradients that are sent compressed.

The time of a step between two hosts on a slow cable, and what is learned in equal steps.

python -m benchmarks.distributed.compress --data DIR [--only cost|score] [--rounds 9] [--seeds 3]
                                          [--show]
"""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path

from benchmarks.distributed.compress_arm import RANK
from benchmarks.distributed.hosts import Hosts, two_hosts
from benchmarks.measured import (
    ROOT,
    make_parser,
    measure,
    ratio_of,
    render_conditions,
    render_interval,
    render_scores,
    show,
    standing_of,
)
from surefoot.core.statistics import median_interval
from surefoot.core.units import format_bytes, format_seconds
from surefoot.trial import Arm, Trial, markdown, read_trial

FOLDER = Path(__file__).parent
COST, SCORE = FOLDER / "results" / "compress_cost.json", FOLDER / "results" / "compress_score.json"
KINDS = ("none", "bf16", "fp16", "powersgd")
RATE, STEPS, WARMUP = "100mbit", 10, 2
SEEDS, LEARNING_STEPS = 3, 1500
WALL, BYTES, LOSS = "wall_s_per_step", "bytes_per_step", "score"
MOST, MAX_WORSE = 0.3, 1.0  # of the time of a step; per cent of the loss


def make_arm(
    name: str,
    kind: str,
    data: str,
    steps: int,
    folder: str,
    *,
    seed: int = 0,
    hosts: Hosts | None = None,
) -> Arm:
    """Two ranks, each on a host of its own where there are `hosts`."""
    command = (
        sys.executable,
        "-m",
        "benchmarks.distributed.compress_arm",
        "--kind",
        kind,
        "--data",
        data,
        "--steps",
        str(steps),
        "--warmup",
        str(WARMUP),
        "--seed",
        str(seed),
        "--report",
        "{report}",
        "--folder",
        f"{{work}}/../{folder}",
    )
    between = (
        ()
        if hosts is None
        else (sys.executable, "-m", "benchmarks.distributed.hosts", *map(str, hosts.pids))
    )
    return Arm(name=name, folder=ROOT, ranks=2, timeout_s=7200.0, command=(*between, *command))


def render_cost(trial: Trial) -> str:
    """What goes over the cable in a step, and how long the step takes, against none."""
    rows, bars = [], []
    for kind in trial.arms:
        walls = list(trial.by_round(kind, WALL).values())
        if not walls:
            continue
        sent = list(trial.by_round(kind, BYTES).values())
        share = (
            "1"
            if kind == KINDS[0]
            else render_interval(ratio_of(trial, kind, KINDS[0], WALL), ".3f")
        )
        rows.append(
            (
                kind,
                format_bytes(round(sent[0])),
                format_seconds(median_interval(walls).estimate),
                share,
            )
        )
    low = ratio_of(trial, "powersgd", KINDS[0], WALL)
    bars.append(
        ("powersgd to none", render_interval(low, ".3f"), f"<= {MOST}", standing_of(low, most=MOST))
    )
    heads = ("gradients", "sent by a rank in a step", "a step", "to none (95 %)")
    return "\n".join(
        (markdown(heads, rows), markdown(("share", "median (95 %)", "must", "standing"), bars))
    )


def render_score(trial: Trial) -> str:
    """The loss at the end of equal steps with the same seeds, and how far it is from none."""
    base = [
        each.measures[LOSS]
        for each in trial.outcomes
        if each.arm.startswith(f"{KINDS[0]} ") and LOSS in each.measures
    ]
    factor = -100 * len(base) / sum(base) if base else -1.0  # per cent of the loss of none
    heads = ("mean loss, % of that of none", "% above none", f"means at most {MAX_WORSE} % above")
    return render_scores(trial, KINDS, heads=heads, most_worse=MAX_WORSE, factor=factor)


def main() -> None:
    parser = make_parser(__doc__, COST)
    parser.add_argument("--only", choices=("cost", "score"))
    parser.add_argument("--data", help="the folder of wikitext-2")
    parser.add_argument("--seeds", type=int, default=SEEDS)
    parser.add_argument("--steps", type=int, help="of each run that is measured")
    parser.add_argument("--kinds", nargs="+", choices=KINDS, default=KINDS)
    asked = parser.parse_args()
    if not asked.show and asked.data is None:
        parser.error("--data DIR: the folder of wikitext-2")
    said = {
        "compress_rank": str(RANK),
        "pinned": "each rank to a core of its own, where there are two",
    }
    packages = ("torch", "surefoot")
    parts: dict[str, str] = {}
    with tempfile.TemporaryDirectory(prefix="surefoot-compress-") as name:
        folder = Path(name).name
        for what, results in (
            ("cost", asked.out),
            ("score", SCORE if asked.out == COST else asked.out.with_stem("score")),
        ):
            if asked.only not in (None, what):
                continue
            if what == "cost" and not asked.show:
                with two_hosts(RATE) as hosts:
                    arms = [
                        make_arm(kind, kind, asked.data, asked.steps or STEPS, folder, hosts=hosts)
                        for kind in asked.kinds
                    ]
                    measure(
                        "two hosts",
                        arms,
                        rounds=asked.rounds,
                        packages=packages,
                        out=results,
                        said={**said, "cable": RATE},
                    )
            elif not asked.show:
                arms = [
                    make_arm(
                        f"{kind} seed {seed}",
                        kind,
                        asked.data,
                        asked.steps or LEARNING_STEPS,
                        folder,
                        seed=seed,
                    )
                    for seed in range(asked.seeds)
                    for kind in asked.kinds
                ]
                steps = str(asked.steps or LEARNING_STEPS)
                measure(
                    "loss",
                    arms,
                    rounds=1,
                    packages=packages,
                    out=results,
                    said={**said, "steps": steps},
                    warmup_rounds=0,
                )
            if results.is_file():
                trial = read_trial(results)
                parts |= {
                    what: (render_cost if what == "cost" else render_score)(trial),
                    f"{what}_conditions": render_conditions(trial),
                }
    show(parts, FOLDER / "README.md" if asked.out.resolve() == COST else None)


if __name__ == "__main__":
    main()
