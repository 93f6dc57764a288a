"""Ranks that hold a part each.

A step of every stage against torch's own parts by hand, and the bytes that a rank holds.

python -m benchmarks.distributed.shard [--only steps|bytes|trade] [--rounds 9] [--data DIR] [--show]
"""

from __future__ import annotations

import functools
import os
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path

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
from surefoot.control.plan import compare_stages
from surefoot.core.statistics import median_interval
from surefoot.core.units import format_bytes, format_percent, format_seconds
from surefoot.trial import Arm, Trial, markdown, read_trial

FOLDER = Path(__file__).parent
RESULTS, BYTES, TRADE = (
    FOLDER / "results" / f"{name}.json" for name in ("shard", "shard_bytes", "shard_trade")
)
# a convnet without blocks has no stage 3
STEPS = (("convnet", 1), ("convnet", 2), ("gpt", 1), ("gpt", 2), ("gpt", 3))
HELD = tuple((ranks, stage) for ranks in (2, 4) for stage in (0, 1, 2, 3))
WALL = "wall_s_per_step"
MOST, MAX_OFF = 1.05, 0.05


def make_arm(folder: str, name: str, ranks: int, *words: str) -> Arm:
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


def make_steps(folder: str) -> list[Arm]:
    return [
        make_arm(
            folder,
            f"{model} {how} {stage}",
            RANKS,
            "--how",
            how,
            "--stage",
            str(stage),
            "--model",
            model,
        )
        for model, stage in STEPS
        for how in ("surefoot", "hand")
    ]


def make_held(folder: str) -> list[Arm]:
    return [
        make_arm(
            folder, f"stage {stage} on {ranks}", ranks, "--how", "bytes", "--stage", str(stage)
        )
        for ranks, stage in HELD
    ]


def make_trade(folder: str, data: str) -> list[Arm]:
    return [
        make_arm(
            folder,
            f"stage {stage} on {ranks}",
            ranks,
            "--how",
            "trade",
            "--stage",
            str(stage),
            "--data",
            data,
        )
        for ranks, stage in HELD
    ]


def render(trial: Trial) -> str:
    """Steps against those by hand."""
    rows = []
    for model, stage in STEPS:
        mine, hand = f"{model} surefoot {stage}", f"{model} hand {stage}"
        walls = [
            format_seconds(median_interval(list(trial.by_round(arm, WALL).values())).estimate)
            for arm in (mine, hand)
        ]
        ratio = ratio_of(trial, mine, hand, WALL)
        rows.append(
            (
                model,
                str(stage),
                *walls,
                render_interval(ratio, ".3f"),
                f"<= {MOST}",
                standing_of(ratio, most=MOST),
            )
        )
    return markdown(
        ("model", "stage", "surefoot", "by hand", "ratio (95 %)", "must", "standing"), rows
    )


def render_bytes(trial: Trial) -> str:
    """Bytes against the formula."""
    rows = []
    for ranks, stage in HELD:
        found, count = (
            median_interval(
                list(trial.by_round(f"stage {stage} on {ranks}", measure).values())
            ).estimate
            for measure in ("held_bytes", "num_parameters")
        )
        expected = compare_stages(int(count), ranks)[stage].num_bytes
        off = found / expected - 1.0
        sizes = format_bytes(found), format_bytes(expected), format_percent(off)
        rows.append(
            (
                str(ranks),
                str(stage) if stage else "none",
                *sizes,
                "holds" if abs(off) <= MAX_OFF else "fails",
            )
        )
    return markdown(
        ("ranks", "stage", "a rank holds", "by the formula", "off by", f"within {MAX_OFF:.0%}"),
        rows,
    )


def render_trade(trial: Trial) -> str:
    """What each stage holds, sends and takes, and whether it learns the same."""

    def middle(arm: str, measure: str) -> float:
        return median_interval(list(trial.by_round(arm, measure).values())).estimate

    rows = []
    for ranks, stage in HELD:
        arm, base = f"stage {stage} on {ranks}", f"stage 0 on {ranks}"
        volumes = middle(arm, "sent_bytes") / (4 * middle(arm, "num_parameters"))
        apart = abs(middle(arm, "loss") / middle("stage 0 on 2", "loss") - 1)
        time = "1" if stage == 0 else render_interval(ratio_of(trial, arm, base, WALL), ".3f")
        rows.append(
            (
                str(ranks),
                str(stage) if stage else "none",
                format_bytes(middle(arm, "held_bytes")),
                f"{volumes:.2f}",
                f"{middle(arm, 'words_per_s'):,.0f}",
                time,
                f"{middle(arm, 'loss'):.6f}",
                f"{apart:.0e}",
            )
        )
    heads = (
        "ranks",
        "stage",
        "a rank holds",
        "parameter volumes sent",
        "words/s",
        "a step to none (95 %)",
        "loss",
        "apart",
    )
    return markdown(heads, rows)


def main() -> None:
    parser = make_parser(__doc__, RESULTS)
    parser.add_argument("--only", choices=("steps", "bytes", "trade"))
    parser.add_argument(
        "--data", default=str((ROOT / os.environ.get("DATA", "../shared/data")).resolve())
    )
    asked = parser.parse_args()
    parts: dict[str, str] = {}
    kinds: tuple[tuple[str, Path, Callable[[str], list[Arm]], Callable[[Trial], str]], ...] = (
        ("steps", RESULTS, make_steps, render),
        ("bytes", BYTES, make_held, render_bytes),
        ("trade", TRADE, functools.partial(make_trade, data=asked.data), render_trade),
    )
    for kind, out, make, tell in kinds:
        if asked.only in (None, kind) and not asked.show:
            with tempfile.TemporaryDirectory(prefix="surefoot-shard-") as name:
                measure(
                    "ranks that hold a part",
                    make(Path(name).name),
                    rounds=asked.rounds,
                    packages=("torch", "surefoot"),
                    out=out,
                    said={"pinned": "each rank to a core of its own, where there are as many"},
                )
        if out.is_file():
            trial = read_trial(out)
            parts |= {
                f"shard {kind}": tell(trial),
                f"shard {kind} conditions": render_conditions(trial),
            }
    show(parts, FOLDER / "README.md")


if __name__ == "__main__":
    main()
