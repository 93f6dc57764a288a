"""Two checkouts of surefoot against each other.

Live processes in turns on one core, until the ratio of their CPU time is known to 1 %.

python benchmarks/old_and_new/run.py OLD [NEW] [--workloads mlp,save] [--most-turns 150]

OLD and NEW are folders with a checkout each.
"""

from __future__ import annotations

import json
import os
import sys
import tempfile
from dataclasses import asdict
from pathlib import Path
from typing import Any

from benchmarks.live import Side, pin
from benchmarks.measured import (
    ROOT,
    find_checkouts_conditions,
    make_checkouts_parser,
    render_interval,
    show,
    standing_of,
)
from surefoot.core.statistics import Interval, paired_ratio
from surefoot.trial import markdown

FOLDER = Path(__file__).parent
RESULTS = FOLDER / "results" / "old_and_new.json"
WORKLOADS = ("mlp", "loader", "convnet", "gpt", "save", "load", "read")
HALF_WIDTH, MIN_TURNS = 0.01, 60
TURNS_OF_A_PAIR = 10  # then both begin anew: where a process lies in memory makes a few percent
BAR = 1.05


def begin(checkout: Path, workload: str, folder: str) -> Side:
    """A live process with the surefoot of one checkout."""
    words = (str(FOLDER / "turns.py"), workload, folder)
    side = Side(words, folder, {"PYTHONPATH": f"{checkout}{os.pathsep}{ROOT}"})
    found = side.facts["surefoot"]
    if Path(found).resolve() != checkout.resolve():
        raise SystemExit(
            f"{checkout} was asked for, and its process imports the surefoot of {found}"
        )
    return side


def compare(
    old: Path, new: Path, workload: str, most_turns: int
) -> tuple[list[float], list[float], Interval]:
    """CPU seconds of the turns of both, and the ratio new to old."""
    taken: list[list[float]] = [[], []]
    while True:
        with (
            tempfile.TemporaryDirectory() as folder,
            begin(old, workload, folder) as before,
            begin(new, workload, folder) as after,
        ):
            for number in range(TURNS_OF_A_PAIR):
                for which, side in (
                    ((0, before), (1, after)) if number % 2 else ((1, after), (0, before))
                ):
                    taken[which].append(side.turn())
        ratio, count = paired_ratio(taken[1], taken[0]), len(taken[0])
        if count >= MIN_TURNS and (half_width(ratio) < HALF_WIDTH or count >= most_turns):
            return taken[0], taken[1], ratio


def half_width(ratio: Interval) -> float:
    """Relative; infinite where the turns are too few for an interval."""
    if ratio.low is None or ratio.high is None:
        return float("inf")
    return (ratio.high - ratio.low) / 2 / ratio.estimate


def render(found: dict[str, Any]) -> str:
    rows = []
    for name, each in found["workloads"].items():
        ratio = Interval(**each["ratio"])
        rows.append(
            (
                name,
                str(len(each["old_s"])),
                render_interval(ratio, ".3f"),
                f"<= {BAR}",
                standing_of(ratio, most=BAR),
            )
        )
    return markdown(("workload", "turns", "CPU time, new over old (95 %)", "bar", "verdict"), rows)


def main() -> None:
    parser = make_checkouts_parser(__doc__, RESULTS)
    parser.add_argument("--workloads", default=",".join(WORKLOADS))
    parser.add_argument("--most-turns", type=int, default=200)
    asked = parser.parse_args()
    if asked.old is not None:
        pin()
        found: dict[str, Any] = {
            "conditions": find_checkouts_conditions(asked.old, asked.new),
            "workloads": {},
        }
        for name in asked.workloads.split(","):
            old_s, new_s, ratio = compare(
                asked.old.resolve(), asked.new.resolve(), name, asked.most_turns
            )
            found["workloads"][name] = {"old_s": old_s, "new_s": new_s, "ratio": asdict(ratio)}
            print(
                f"{name}: {render_interval(ratio, '.3f')} after {len(old_s)} turns",
                file=sys.stderr,
                flush=True,
            )
            asked.out.write_text(json.dumps(found, indent=1) + "\n")
    found = json.loads(asked.out.read_text())
    conditions = markdown(("condition", "value"), [*found["conditions"].items()])
    show(
        {"bars": render(found), "conditions": conditions},
        FOLDER / "README.md" if asked.out == RESULTS else None,
    )


if __name__ == "__main__":
    main()
