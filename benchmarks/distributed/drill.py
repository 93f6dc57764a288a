"""A drill: of four ranks one is killed every half minute, for ten minutes.

What is left of the throughput, and of the numbers?

python -m benchmarks.distributed.drill [--ranks 4] [--every 30] [--seconds 600] [--show]
"""

from __future__ import annotations

import argparse
import json
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import psutil

from benchmarks.measured import ROOT, show
from surefoot.contract import events
from surefoot.core.statistics import median
from surefoot.core.units import format_percent, format_seconds
from surefoot.trial import find_conditions, markdown

FOLDER = Path(__file__).parent
RESULTS = FOLDER / "results" / "drill.json"
RANKS, CALM_STEPS, SEED, AIM = 4, 1500, 0, 0.98
NAMED = "surefoot:"  # and the number of the rank: what its process is called
# each rank draws for its own pieces alone, and several are cut without being told how
OWN = ("state/random/torch", "microbatch")
# of the time that is asked for, an unbroken run takes: the rest goes to what the kills cost
SHARE = 0.8


def make_command(steps: int, run: Path, ranks: int) -> list[str]:
    """`digits` with the same bits on any number of ranks; a commit every second."""
    stated = (
        f"layout.virtual_ranks={RANKS}",
        "train.threads=1",
        'checkpoint.every="1 s"',
        'evaluate.every="5000 steps"',
        'observe.every="20 steps"',
        "observe.tensorboard=false",
    )
    words = [
        "train",
        "digits",
        "--steps",
        str(steps),
        "--run",
        str(run),
        "--quiet",
        *(w for each in stated for w in ("--set", each)),
    ]
    return [
        sys.executable,
        "-P",
        "-m",
        "surefoot",
        *words,
        *(["--ranks", str(ranks)] if ranks > 1 else []),
    ]


def tell(text: str) -> None:
    print(f"drill: {text}", file=sys.stderr, flush=True)


def run_calmly(steps: int, run: Path, ranks: int) -> tuple[float, float]:
    """Wall seconds of an unbroken run, and of a step of it."""
    begun_s = time.perf_counter()
    subprocess.run(make_command(steps, run, ranks), cwd=ROOT, check=True)
    wall_s = time.perf_counter() - begun_s
    rows = [
        event.elapsed_s / event.num_steps
        for event in events.read(run)
        if isinstance(event, events.Step)
    ]
    return wall_s, median(rows[1:])


def run_stormily(steps: int, run: Path, ranks: int, every_s: float) -> tuple[float, list[int]]:
    """Wall seconds to the end of a run of which ranks are killed in turn, and which ranks were."""
    draw, killed = random.Random(SEED), list[int]()
    begun_s = time.perf_counter()
    with subprocess.Popen(
        make_command(steps, run, ranks), cwd=ROOT, stderr=subprocess.DEVNULL
    ) as supervisor:
        while True:
            try:
                code = supervisor.wait(
                    timeout=max(0.0, begun_s + every_s * (len(killed) + 1) - time.perf_counter())
                )
                break
            except subprocess.TimeoutExpired:
                below = psutil.Process(supervisor.pid).children(recursive=True)
                victims = {
                    int(each.name()[len(NAMED) :]): each
                    for each in below
                    if each.name().startswith(NAMED)
                }
                rank = draw.choice(sorted(victims)) if victims else 0
                if victims:
                    os.kill(victims[rank].pid, signal.SIGKILL)
                killed.append(rank)
                tell(f"{time.perf_counter() - begun_s:.0f} s: rank {rank} killed")
    wall_s = time.perf_counter() - begun_s
    if code:
        raise SystemExit(f"the run ended with {code} after {len(killed)} kills")
    return wall_s, killed


def find_rate(run: Path) -> float:
    """Wall seconds of a step, of all that the attempts took."""
    steps = [event for event in events.read(run) if isinstance(event, events.Step)]
    return sum(each.elapsed_s for each in steps) / sum(each.num_steps for each in steps)


def find_apart(one: Path, other: Path) -> list[str]:
    """In what the newest commits of both differ: weights, moments, averages, scores.

    Not in how a rank drew for its own samples.
    """
    words = [
        sys.executable,
        "-P",
        "-m",
        "surefoot",
        "checkpoint",
        "diff",
        str(one),
        str(other),
        "--json",
    ]
    said = subprocess.run(words, cwd=ROOT, stdout=subprocess.PIPE, text=True, check=False).stdout
    return [row["name"] for row in json.loads(said)["differences"] if row["name"] not in OWN]


def measure(ranks: int, every_s: float, seconds: float) -> dict[str, Any]:
    conditions = find_conditions(("torch", "surefoot"))
    with tempfile.TemporaryDirectory(prefix="surefoot-drill-") as made:
        folder = Path(made)
        calm_s, step_s = run_calmly(CALM_STEPS, folder / "calm", ranks)
        steps = int(SHARE * seconds / step_s)
        tell(f"{format_seconds(step_s)} a step on {ranks} ranks, {steps:,} steps")
        wall_s, killed = run_stormily(steps, folder / "storm", ranks, every_s)
        tell(f"{wall_s:.0f} s with {len(killed)} kills; now the same steps on one process")
        stormy_s = find_rate(folder / "storm")
        run_calmly(steps, folder / "alone", 1)
        apart = find_apart(folder / "storm", folder / "alone")
        checked = subprocess.run(
            [sys.executable, "-P", "-m", "surefoot", "ledger", str(folder / "storm")],
            cwd=ROOT,
            check=False,
        )
    start_s = calm_s - CALM_STEPS * step_s
    # at the rate of these minutes: that of others is a few per cent off
    unbroken_s = start_s + steps * stormy_s
    return {
        "ranks": ranks,
        "every_s": every_s,
        "steps": steps,
        "step_s": step_s,
        "stormy_s": stormy_s,
        "start_s": start_s,
        "unbroken_s": unbroken_s,
        "wall_s": wall_s,
        "killed": killed,
        "kept": unbroken_s / wall_s,
        "apart": apart,
        "ledger": checked.returncode == 0,
        "conditions": conditions,
    }


def render(found: dict[str, Any]) -> str:
    """What was left of throughput and numbers."""
    kills, lost_s = len(found["killed"]), found["wall_s"] - found["unbroken_s"]
    rows = (
        ("kills", f"{kills}, of ranks {', '.join(map(str, found['killed']))}"),
        (
            "steps",
            (
                f"{found['steps']:,} in {format_seconds(found['wall_s'])}; "
                f"unbroken {format_seconds(found['unbroken_s'])}"
            ),
        ),
        ("throughput kept", f"{format_percent(found['kept'])}, {format_percent(AIM)} is the aim"),
        ("a kill costs", format_seconds(lost_s / max(1, kills))),
        (
            "final state against one process without kills",
            f"DIFFERS: {', '.join(found['apart'])}" if found["apart"] else "the same bits",
        ),
        ("every sample once", "holds" if found["ledger"] else "FAILS"),
    )
    return markdown(("of the drill", "measured"), rows)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--ranks", type=int, default=RANKS)
    parser.add_argument(
        "--every", type=float, default=30.0, help="seconds from one kill to the next"
    )
    parser.add_argument(
        "--seconds", type=float, default=600.0, help="about how long the ranks are killed"
    )
    parser.add_argument("--out", type=Path, default=RESULTS)
    parser.add_argument(
        "--show", action="store_true", help="only make the table from the results that are there"
    )
    asked = parser.parse_args()
    if not asked.show:
        found = measure(asked.ranks, asked.every, asked.seconds)
        asked.out.write_text(json.dumps(found, indent=1) + "\n")
    if asked.out == RESULTS:
        found = json.loads(RESULTS.read_text())
        show(
            {
                "drill": render(found),
                "drill conditions": markdown(("condition", "value"), found["conditions"].items()),
            },
            FOLDER / "README.md",
        )


if __name__ == "__main__":
    main()
