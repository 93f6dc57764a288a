"""The peaks of a CPU: do they repeat, and does any library call do better?

python benchmarks/roofline/run.py [--rounds 5] [--part repeats|search]
"""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path

from benchmarks.measured import ROOT, make_parser, measure, render_conditions, show
from surefoot.core.cost.roofline import format_giga
from surefoot.core.hardware import find_machine
from surefoot.core.statistics import median
from surefoot.core.units import format_percent
from surefoot.trial import Arm, Trial, markdown, read_trial

FOLDER = Path(__file__).parent
RESULTS = FOLDER / "results" / "roofline.json"
REPEATS = FOLDER / "results" / "repeats.json"  # surefoot's alone, one after the other
ROUNDS = 5
WIDEST, MIN_SHARE = 0.05, 0.85
MEASURES = ("fp32_flops_per_s", "bf16_flops_per_s", "fp64_flops_per_s", "copied_bytes_per_s")


def make_arms() -> list[Arm]:
    """One core and all of them.

    The libraries search through all calls and shapes of benchmarks/roofline/arms.py.
    """
    return [
        Arm(
            name=f"{kind} {threads}",
            command=_command(kind, threads),
            folder=ROOT,
            threads=threads,
            timeout_s=1200,
            variables={"OPENBLAS_NUM_THREADS": str(threads)},
        )
        for threads in sorted({1, find_machine().cores})
        for kind in ("surefoot", "torch", "numpy")
    ]


def repeat_arms() -> list[Arm]:
    """Surefoot's alone, without a rest: two minutes for all of their repeats."""
    return [
        replace(arm, command=(*arm.command, "--no-rest"))
        for arm in make_arms()
        if arm.name.startswith("surefoot")
    ]


def _command(kind: str, threads: int) -> tuple[str, ...]:
    return (sys.executable, "-m", "benchmarks.roofline.arms", kind, str(threads), "{report}")


def render_spreads(trial: Trial) -> str:
    """How far the repeats lie apart."""
    spreads = []
    for threads in _threads_of(trial):
        for name in MEASURES:
            if mine := list(trial.by_round(f"surefoot {threads}", name).values()):
                spread = (max(mine) - min(mine)) / median(mine)
                spreads.append(
                    (
                        threads,
                        name,
                        format_giga(median(mine)),
                        str(len(mine)),
                        format_percent(spread),
                        _word(spread <= WIDEST),
                    )
                )
    return markdown(
        ("threads", "measure", "median, 10^9", "n", f"spread, <= {WIDEST:.0%}", "verdict"), spreads
    )


def render_shares(trial: Trial) -> str:
    """The median against the best that was found."""
    shares = []
    for threads in _threads_of(trial):
        for name in MEASURES:
            mine = list(trial.by_round(f"surefoot {threads}", name).values())
            found = [
                (value, arm, each)
                for arm in ("torch", "numpy")
                for each, value in trial.by_round(f"{arm} {threads}", name).items()
            ]
            if mine and found:
                best, arm, number = max(found)
                share = median(mine) / best
                shares.append(
                    (
                        threads,
                        name,
                        format_giga(median(mine)),
                        format_giga(best),
                        f"{arm}: {_call(trial, f'{arm} {threads}', number, name)}",
                        format_percent(share),
                        _word(share >= MIN_SHARE),
                    )
                )
    head = (
        "threads",
        "measure",
        "surefoot, 10^9",
        "best found, 10^9",
        "by",
        f"share, >= {MIN_SHARE:.0%}",
        "verdict",
    )
    return markdown(head, shares)


def _threads_of(trial: Trial) -> list[str]:
    return sorted({arm.rpartition(" ")[2] for arm in trial.arms}, key=int)


def _word(holds: bool) -> str:
    return "holds" if holds else "fails"


def _call(trial: Trial, arm: str, number: int, measure: str) -> str:
    """Which call and shape was the best of that round."""
    facts = next(
        each.facts
        for each in trial.outcomes
        if each.arm == arm and each.round == number and not each.is_warmup
    )
    return facts.get(measure.partition("_")[0], "")


def main() -> None:
    parser = make_parser(__doc__, RESULTS)
    parser.set_defaults(rounds=ROUNDS)
    parser.add_argument(
        "--part",
        choices=("repeats", "search"),
        help="this alone; the other stays as it was measured before",
    )
    asked = parser.parse_args()
    repeats = (
        REPEATS if asked.out == RESULTS else asked.out.with_name(f"{asked.out.stem}_{REPEATS.name}")
    )
    if not asked.show and asked.part != "search":
        measure(
            "repeats",
            repeat_arms(),
            rounds=asked.rounds,
            packages=("torch", "surefoot"),
            out=repeats,
            warmup_rounds=0,
        )
    if not asked.show and asked.part != "repeats":
        packages = ("torch", "numpy", "surefoot")
        measure(
            "roofline",
            make_arms(),
            rounds=asked.rounds,
            packages=packages,
            out=asked.out,
            warmup_rounds=0,
        )
    parts = {}
    if repeats.exists():
        parts |= {
            "repeats": render_spreads(read_trial(repeats)),
            "repeats conditions": render_conditions(read_trial(repeats)),
        }
    if asked.out.exists():
        trial = read_trial(asked.out)
        parts |= {
            "spreads": render_spreads(trial),
            "shares": render_shares(trial),
            "conditions": render_conditions(trial),
        }
    show(parts, FOLDER / "README.md" if asked.out == RESULTS else None)


if __name__ == "__main__":
    main()
