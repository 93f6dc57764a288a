"""Comparison of groups of runs for `surefoot compare`, with confidence intervals.

A group is a folder that contains runs, such as one run per seed. The verdict is "no effect" if the
interval of the difference includes 0.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from surefoot.cli.look import past
from surefoot.cli.look.past import Past, finite_or_none, value_of
from surefoot.cli.table import print_table, without_control
from surefoot.core.errors import RunFolderError
from surefoot.core.statistics import Interval, mean, mean_difference
from surefoot.core.units import (
    UNKNOWN,
    format_bytes,
    format_number,
    format_percent,
    format_rate,
    format_seconds,
)


@dataclass(frozen=True)
class Side:
    """Group of runs: a folder and the runs in it."""

    folder: Path
    runs: tuple[Past, ...]


@dataclass(frozen=True)
class MeasureComparison:
    """Comparison of one measure, such as the score, between a group of runs and the first group.

    `mine` is the mean over the runs of `side`, `theirs` the mean over the first group. `difference`
    is `mine` - `theirs` with a confidence interval. All three are None if either group has no
    value.
    """

    measure: str
    side: Side
    mine: float | None
    theirs: float | None
    difference: Interval | None

    @property
    def verdict(self) -> str:
        return "not measured" if self.difference is None else self.difference.verdict


MEASURES: Mapping[str, Callable[[Past], float | None]] = {
    "score": lambda run: value_of(run.last),
    "training loss": lambda run: finite_or_none(run.steps[-1].loss) if run.steps else None,
    "samples_per_s": lambda run: run.samples_per_s,
    "elapsed_s": lambda run: run.elapsed_s if run.steps else None,
    "peak_bytes": lambda run: run.peak_bytes,
}


def read(folder: Path) -> Side:
    """Read the runs below `folder`, or `folder` itself if it is a run.

    Raises:
        RunFolderError: if there is no run, or if a run is damaged.
    """
    found = tuple(past.read(path) for path in past.find(folder))
    if not found:
        raise RunFolderError(
            f"{folder} holds no runs", hint="give a run folder, or a folder that holds runs"
        )
    return Side(folder, found)


def compare(sides: Sequence[Side]) -> list[MeasureComparison]:
    """Compare each group of runs with the first group, in every measure.

    The interval of the difference between two means is that of Welch's t-test. Scores are compared
    only if all runs have the same score.
    """
    scores = {run.last.score for side in sides for run in side.runs if run.last is not None}
    return [
        MeasureComparison(name, side, None, None, None)
        if name == "score" and len(scores) > 1
        else _compare(name, of, side, sides[0])
        for name, of in MEASURES.items()
        for side in sides[1:]
    ]


def _compare(
    name: str, of: Callable[[Past], float | None], side: Side, first: Side
) -> MeasureComparison:
    mine, theirs = (
        [value for run in each.runs if (value := of(run)) is not None] for each in (side, first)
    )
    if not mine or not theirs:
        return MeasureComparison(name, side, None, None, None)
    return MeasureComparison(name, side, mean(mine), mean(theirs), mean_difference(mine, theirs))


def print_comparison(sides: Sequence[Side]) -> None:
    """Print the comparison of the groups of runs as a table."""
    counts = ", ".join(f"{each.folder}: {len(each.runs)}" for each in sides)
    print(f"Runs on each side: {counts}; differences from {sides[0].folder}, with 95 % intervals")
    rows = []
    for each in compare(sides):
        show = _format(each.measure, sides)
        rows.append(
            (
                each.measure,
                str(each.side.folder),
                show(each.theirs),
                show(each.mine),
                _format_difference(each.difference, show),
                each.verdict,
            )
        )
    for run in (run for side in sides for run in side.runs if run.state != "finished"):
        print(
            without_control(
                "not finished, included in the means up to its last step: "
                f"{run.folder}, {run.state}, {run.num_steps:,} steps"
            )
        )
    print_table(("measure", "side", "first", "this", "difference", "verdict"), rows)
    print(
        "\nruns that were not made in turns also differ by what the machine did meanwhile: "
        "speed is compared by surefoot ladder"
    )


def _format(measure: str, sides: Sequence[Side]) -> Callable[[float | None], str]:
    last = sides[0].runs[0].last
    in_percent = last is not None and last.units.get(last.score) == "%"
    score = format_percent if in_percent else format_number
    shows: dict[str, Callable[[float | None], str]] = {
        "score": score,
        "samples_per_s": lambda value: format_rate(value, "samples"),
        "elapsed_s": _signed(format_seconds),
        "peak_bytes": _signed(format_bytes),
    }
    return shows.get(measure, format_number)


def _signed(show: Callable[[float | None], str]) -> Callable[[float | None], str]:
    return lambda value: f"-{show(-value)}" if value is not None and value < 0 else show(value)


def _format_difference(difference: Interval | None, show: Callable[[float | None], str]) -> str:
    if difference is None:
        return UNKNOWN
    if difference.low is None or difference.high is None:
        return show(difference.estimate)
    return f"{show(difference.estimate)} ({show(difference.low)} to {show(difference.high)})"


def as_row(sides: Sequence[Side]) -> dict[str, Any]:
    """Return the comparison of the groups of runs as a JSON-compatible dict."""
    return {
        "sides": [
            {"side": str(side.folder), "runs": [run.as_row() for run in side.runs]}
            for side in sides
        ],
        "effects": [
            {
                "measure": each.measure,
                "side": str(each.side.folder),
                "baseline": str(sides[0].folder),
                "mean": each.mine,
                "baseline_mean": each.theirs,
                "verdict": each.verdict,
                "difference": None
                if each.difference is None
                else {
                    "estimate": each.difference.estimate,
                    "low": each.difference.low,
                    "high": each.difference.high,
                    "n": each.difference.count,
                },
            }
            for each in compare(sides)
        ],
    }
