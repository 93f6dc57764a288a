"""The index of tars: how fast it is made, and how soon one of ten million samples is open.

It is made from the page cache.

python -m benchmarks.data.run [--rounds 7] [--out FILE] [--show]
"""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from benchmarks.data.arms import write_large_index, write_set
from benchmarks.measured import ROOT, make_parser, measure, render_conditions, show
from surefoot.core.statistics import median_interval
from surefoot.core.units import format_seconds
from surefoot.trial import Arm, Trial, markdown, read_trial

FOLDER = Path(__file__).parent
RESULTS = FOLDER / "results" / "index.json"


def make_arms(folders: dict[str, Path]) -> list[Arm]:
    module = "benchmarks.data.arms"
    return [
        Arm(
            name=name,
            command=(sys.executable, "-m", module, name, str(folder), "{report}"),
            folder=ROOT,
            timeout_s=600,
        )
        for name, folder in folders.items()
    ]


def _giga(value: float) -> str:
    return f"{value / 1e9:.3g} GB"


def _mega(value: float) -> str:
    return f"{value / 1e6:.3g} MB"


@dataclass(frozen=True)
class Row:
    """A measure of an arm, how it is told, and what it must be: `least` or `most`."""

    arm: str
    measure: str
    what: str
    told: Callable[[float], str]
    least: float | None = None
    most: float | None = None


ROWS = (
    Row(
        "index",
        "bytes_per_s",
        "4 GiB of tars indexed, with their digests, in a second",
        _giga,
        least=1e9,
    ),
    Row("open", "open_s", "an index of 10 million samples opened", format_seconds, most=0.05),
    Row("open", "resident_bytes", "the memory that this takes", _mega, most=200e6),
    Row("open", "batch_s", "where 256 of them lie", format_seconds),
)


def render(trial: Trial) -> str:
    """Each measure with its interval, and whether the whole of it is what it must be."""
    return markdown(
        ("what", "median (95 %)", "must", "standing"), [_cells(trial, row) for row in ROWS]
    )


def _cells(trial: Trial, row: Row) -> tuple[str, str, str, str]:
    must = (
        f">= {row.told(row.least)}"
        if row.least is not None
        else f"<= {row.told(row.most)}"
        if row.most is not None
        else ""
    )
    values = list(trial.by_round(row.arm, row.measure).values())
    if not values:
        return row.what, "n/a", must, "not measured"
    found = median_interval(values)
    low, high = (found.estimate if each is None else each for each in (found.low, found.high))
    holds = (row.least is None or low >= row.least) and (row.most is None or high <= row.most)
    return (
        row.what,
        f"{row.told(found.estimate)} ({row.told(low)} to {row.told(high)})",
        must,
        ("holds" if holds else "fails") if must else "",
    )


def main() -> None:
    asked = make_parser(__doc__, RESULTS).parse_args()
    if not asked.show:
        with tempfile.TemporaryDirectory(prefix="surefoot-data-") as made:
            folders = {name: Path(made) / name for name in ("index", "open")}
            for name, write in (("index", write_set), ("open", write_large_index)):
                folders[name].mkdir()
                write(folders[name])
            measure(
                "index of tars",
                make_arms(folders),
                rounds=asked.rounds,
                packages=("numpy", "surefoot"),
                out=asked.out,
            )
    trial = read_trial(asked.out)
    show(
        {"results": render(trial), "conditions": render_conditions(trial)},
        FOLDER / "README.md" if asked.out == RESULTS else None,
    )


if __name__ == "__main__":
    main()
