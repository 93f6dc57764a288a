"""Training curves of a report: loss, score, learning rate, gradient norm, samples per second.

Several runs are drawn in the same axes.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace

from surefoot.contract.events import Evaluated, Step
from surefoot.control.report.figure import NUM_STYLES, Figure, Frame, Key, Mark, Path, Point
from surefoot.control.report.rows import RunRows
from surefoot.core.axis import LARGEST, find_axis, is_drawn
from surefoot.core.units import format_number

# max / min from which the axis is logarithmic: a linear one hides the small values
WIDE_RANGE = 30.0


@dataclass(frozen=True, kw_only=True)
class PlottedCurve:
    """Curve of a figure.

    `style` is the index of its color and marker. `marks` draws a marker at each point, and `joins`
    connects the points with a line. `best` is the point of the best score.
    """

    style: int
    label: str
    points: Sequence[Point]
    marks: bool = False
    joins: bool = True
    best: Point | None = None


def draw_curves(runs: Sequence[RunRows]) -> list[Figure]:
    """Draw the training curves of the runs; figures without any value are left out."""
    scale, score_title = _score_scale(runs)
    wanted = (
        ("Loss", "loss", list(_losses(runs))),
        ("Score", score_title, list(_scores(runs, scale))),
        ("Learning rate", "lr", list(_rates(runs))),
        (
            "Gradient norm",
            "norm before clipping",
            list(_step_curves(runs, lambda step: step.gradient_norm)),
        ),
        ("Throughput", "samples/s", list(_step_curves(runs, lambda step: step.samples_per_s))),
    )
    return [
        figure
        for title, y_title, lines in wanted
        if (figure := draw(title, y_title, lines)) is not None
    ]


def draw(title: str, y_title: str, lines: Sequence[PlottedCurve]) -> Figure | None:
    """Draw curves in the same axes; return None if there is nothing to draw.

    The y axis is logarithmic if all values are positive and their range is wide.
    """
    lines = [replace(line, points=_mask_out_of_range(line.points)) for line in lines]
    lines = [line for line in lines if any(is_drawn(y) for _, y in line.points)]
    values = [y for line in lines for _, y in line.points]
    positive = [y for y in values if y is not None and 0 < y < math.inf]
    low = min((y for y in values if is_drawn(y)), default=0.0)
    is_log = bool(positive) and low > 0 and max(positive) / min(positive) >= WIDE_RANGE
    x, y = find_axis(x for line in lines for x, _ in line.points), find_axis(values, log=is_log)
    if x is None or y is None:
        return None
    frame = Frame(x=x, y=y)
    return Figure(
        title=title,
        width=frame.width,
        height=frame.height,
        paths=[
            *frame.grid(),
            *(
                Path(d=frame.line(line.points), style=f"line s{line.style}")
                for line in lines
                if line.joins
            ),
        ],
        marks=[mark for line in lines if line.marks for mark in _marks(frame, line)],
        words=frame.labels("step", f"{y_title} (log)" if is_log else y_title),
        legend=[
            Key(style=line.style, label=line.label, kind="mark" if line.marks else "line")
            for line in lines
        ]
        if len(lines) > 1
        else [],
        note="; ".join([*_best(lines), *_note(values)]),
    )


def _mask_out_of_range(points: Sequence[Point]) -> list[Point]:
    """Replace values beyond the range of an axis by NaN, because the log is untrusted input."""
    return [(x, y if y is None or abs(y) < LARGEST else math.nan) for x, y in points]


def _marks(frame: Frame, line: PlottedCurve) -> Iterator[Mark]:
    for x, y in line.points:
        if is_drawn(y):
            tooltip = f"{line.label}: {format_number(y)} at step {x:,.0f}"
            yield Mark(x=frame.x_of(x), y=frame.y_of(y), shape=line.style, tooltip=tooltip)


def _best(lines: Sequence[PlottedCurve]) -> Iterator[str]:
    for line in lines:
        if line.best is not None:
            step, value = line.best
            name = f"{line.label}: " if len(lines) > 1 else ""
            yield f"{name}best {format_number(value)} at step {step:,.0f}"


def _note(values: Sequence[float | None]) -> Iterator[str]:
    lost = sum(value is not None and not math.isfinite(value) for value in values)
    if lost:
        yield f"{lost:,} value{'s that are' if lost > 1 else ' that is'} not finite left out"


def _label(runs: Sequence[RunRows], run: RunRows, what: str) -> str:
    """Return the label of a curve: `what`, preceded by the run's name if there are several runs."""
    return what if len(runs) == 1 else f"{run.name}, {what}" if what else run.name


def _losses(runs: Sequence[RunRows]) -> Iterator[PlottedCurve]:
    """Yield the training loss of each run as a line, and its evaluation loss as markers."""
    for index, run in enumerate(runs):
        yield PlottedCurve(
            style=index,
            label=_label(runs, run, "training"),
            points=[(each.step, each.loss) for each in run.steps],
        )
        evaluated = [(each.step, each.loss) for each in run.evaluations]
        label = _label(runs, run, f"{run.evaluations[-1].split} split") if evaluated else ""
        yield PlottedCurve(style=index, label=label, points=evaluated, marks=True, joins=False)


def _scores(runs: Sequence[RunRows], scale: float) -> Iterator[PlottedCurve]:
    for index, run in enumerate(runs):
        found = [(each, value_of(each)) for each in run.evaluations]
        best = [
            (float(each.step), value * scale)
            for each, value in found
            if each.best and value is not None
        ]
        points = [(each.step, None if value is None else value * scale) for each, value in found]
        label = _label(runs, run, found[-1][0].score if found else "")
        yield PlottedCurve(
            style=index, label=label, points=points, marks=True, best=best[-1] if best else None
        )


def _score_scale(runs: Sequence[RunRows]) -> tuple[float, str]:
    last = next((run.evaluations[-1] for run in runs if run.evaluations), None)
    if last is None:
        return 1.0, "score"
    return (100.0, f"{last.score}, %") if last.units.get(last.score) == "%" else (1.0, last.score)


def value_of(evaluated: Evaluated) -> float | None:
    """Return the value of an evaluation's score, which is its loss or a metric.

    Return None if the value is missing or not a number.
    """
    value = evaluated.loss if evaluated.score == "loss" else evaluated.metrics.get(evaluated.score)
    return value if isinstance(value, int | float) else None


def _rates(runs: Sequence[RunRows]) -> Iterator[PlottedCurve]:
    """Yield learning-rate curves for each parameter group of each run, at most `NUM_STYLES` curves.

    Parameter groups of a run with equal learning rates share one curve.
    """
    found: list[tuple[str, list[Point]]] = []
    for run in runs:
        groups: dict[tuple[Point, ...], list[str]] = {}
        for name in dict.fromkeys(name for each in run.steps for name in each.learning_rates):
            groups.setdefault(
                tuple((each.step, each.learning_rates.get(name)) for each in run.steps), []
            ).append(name)
        found += [
            (_label(runs, run, ", ".join(names) if len(groups) > 1 else ""), list(points))
            for points, names in groups.items()
        ]
    for index, (label, points) in enumerate(found[:NUM_STYLES]):
        yield PlottedCurve(style=index, label=label, points=points)


def _step_curves(
    runs: Sequence[RunRows], value: Callable[[Step], float | None]
) -> Iterator[PlottedCurve]:
    for index, run in enumerate(runs):
        yield PlottedCurve(
            style=index,
            label=_label(runs, run, ""),
            points=[(each.step, value(each)) for each in run.steps],
        )
