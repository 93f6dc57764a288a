"""Conversion of a ladder to JSON, Markdown, an SVG picture, and a spec with its evidence.

Nothing is computed here.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from html import escape
from typing import Any

from surefoot.contract import spec_file
from surefoot.core.statistics import Interval
from surefoot.core.units import UNKNOWN, format_number, format_percent
from surefoot.prove.ladder.climb import Ladder, RungResult
from surefoot.prove.ladder.gate import Score
from surefoot.prove.ladder.rungs import PLAIN
from surefoot.trial import markdown

VERSION = 1
BEST = "best.toml"
HEADER = (
    "rung",
    "verdict",
    "time",
    "time from the start",
    "memory",
    "samples/s",
    "start-up",
    "score",
    "numbers",
    "expected",
)
FEW = "too few pairs to show a gain: nothing can be kept"


def as_row(ladder: Ladder) -> dict[str, Any]:
    """Return the ladder as one object for JSON; values that were not measured are null."""
    return {
        "version": VERSION,
        "spec": ladder.spec,
        "device": ladder.device,
        "conditions": dict(ladder.conditions),
        "baseline": {"spec_id": ladder.start.id, "plain": dict(PLAIN)},
        "num_samples": ladder.num_samples,
        "num_runs": ladder.num_runs,
        "rungs": [_rung_row(each) for each in ladder.results],
        "leave_one_out": None
        if ladder.left_out is None
        else [
            {"name": name, "time_ratio": _interval_row(each)}
            for name, each in ladder.left_out.items()
        ],
        "best": BEST,
    }


def _rung_row(result: RungResult) -> dict[str, Any]:
    rung, step, total, parity = result.rung, result.step, result.total, result.parity
    worst = parity.worst if parity.worst is not None and math.isfinite(parity.worst) else None
    return {
        "name": rung.name,
        "kind": rung.kind,
        "standing": result.standing,
        "kept": result.kept,
        "reason": result.reason,
        "change": {key: _value(each) for key, each in rung.change.items()},
        "purpose": rung.purpose,
        "needs": rung.needs,
        "time_ratio": _interval_row(step["time"]),
        "wall_ratio": _interval_row(step["wall"]),
        "memory_ratio": _interval_row(step["memory"]),
        "throughput_ratio": _interval_row(inverse(step["wall"])),
        "startup_ratio": _interval_row(step["startup"]),
        "total_time_ratio": _interval_row(total["time"]),
        "total_wall_ratio": _interval_row(total["wall"]),
        "total_memory_ratio": _interval_row(total["memory"]),
        "total_throughput_ratio": _interval_row(inverse(total["wall"])),
        "score": _score_row(result.score),
        "parity": {"verdict": parity.verdict, "worst": worst, "words": parity.words},
        "expected": dict(rung.expected),
        "num_runs": result.num_runs,
    }


def _value(value: Any) -> Any:
    """Return a value of a spec for JSON; dates and non-finite values of TOML become text."""
    if isinstance(value, list):
        return [_value(each) for each in value]
    is_known = (
        value is None
        or isinstance(value, bool | int | str)
        or (isinstance(value, float) and math.isfinite(value))
    )
    return value if is_known else str(value)


def _line(text: str) -> str:
    r"""Return the text on one line, without characters that TOML or Markdown forbid in a line.

    The error of a task, for example, may be colored or have several lines.

    >>> _line("red \x1b[31m,\n two  lines")
    'red ?[31m, two lines'
    """
    return " ".join(
        "".join(each if each.isprintable() or each.isspace() else "?" for each in text).split()
    )


def _interval_row(interval: Interval | None) -> dict[str, Any] | None:
    if interval is None:
        return None
    return {
        "estimate": interval.estimate,
        "low": interval.low,
        "high": interval.high,
        "n": interval.count,
    }


def _score_row(score: Score | None) -> dict[str, Any] | None:
    if score is None:
        return None
    return {
        "name": score.name,
        "better": score.better,
        "unit": score.unit,
        "start": score.start,
        "value": score.value,
        "difference": _interval_row(score.difference),
        "spread": score.spread,
    }


def inverse(interval: Interval | None) -> Interval | None:
    """Return the interval of the reciprocal, such as that of throughput for an interval of time.

    >>> inverse(Interval(estimate=0.5, low=0.4, high=0.8, count=7, neutral=1.0))
    Interval(estimate=2.0, low=1.25, high=2.5, count=7, neutral=1.0)
    """
    if interval is None:
        return None
    low, high = (None if bound is None else 1 / bound for bound in (interval.high, interval.low))
    return Interval(
        estimate=1 / interval.estimate, low=low, high=high, count=interval.count, neutral=1.0
    )


def cells(result: RungResult) -> tuple[str, ...]:
    """Return the cells of one optimization (rung) in the table with the columns HEADER."""
    step = result.step
    return (
        result.rung.name,
        result.standing if result.standing != "rejected" else "REJECTED",
        _format_interval(step["time"]),
        _format_interval(result.total["time"]),
        _format_interval(step["memory"]),
        _format_interval(inverse(step["wall"])),
        _format_interval(step["startup"]),
        _score(result.score),
        result.parity.verdict,
        _expected(result.rung.expected),
    )


def _format_interval(interval: Interval | None) -> str:
    if interval is None:
        return UNKNOWN
    if interval.low is None or interval.high is None:
        return f"{interval.estimate:.3g}x"
    return f"{interval.estimate:.3g}x ({interval.low:.3g} to {interval.high:.3g})"


def _score(score: Score | None) -> str:
    if score is None:
        return UNKNOWN
    show = format_percent if score.unit == "%" else format_number
    return f"{show(score.value)} (start {show(score.start)})"


def _expected(expected: Mapping[str, float]) -> str:
    return ", ".join(f"{name} {format_number(factor)}x" for name, factor in expected.items()) or "-"


def as_markdown(ladder: Ladder) -> str:
    """Return the ladder as Markdown: table, reasons, leave-one-out results, conditions."""
    parts = [
        f"# The ladder of {ladder.spec}\n",
        markdown(HEADER, map(cells, ladder.results)),
        "## Why\n",
    ]
    parts.append(
        markdown(
            ("rung", "change", "reason"),
            ((r.rung.name, _line(f"`{r.rung.words}`"), _line(r.reason)) for r in ladder.results),
        )
    )
    if ladder.left_out:
        rows = (
            (name, _format_interval(each), _format_interval(_step_of(ladder, name)))
            for name, each in ladder.left_out.items()
        )
        parts += [
            "## Leaving one out\n",
            markdown(("rung", "time of all to all but it", "time when it was added"), rows),
        ]
    parts += ["## Conditions\n", markdown(("condition", "value"), ladder.conditions.items())]
    return "\n".join(parts)


def _step_of(ladder: Ladder, name: str) -> Interval | None:
    return next((each.step["time"] for each in ladder.results if each.rung.name == name), None)


def as_toml(ladder: Ladder) -> str:
    """Return the best spec as TOML, with its evidence in comments above it."""
    last = ladder.kept[-1] if ladder.kept else None
    lines = [
        (
            f"the best of the ladder of {ladder.spec} on "
            f"{ladder.conditions.get('processor', ladder.device)}"
        )
    ]
    if last is None:
        lines.append("no rung was kept: this is the start")
    else:
        lines += [
            (
                f"time {_format_interval(last.total['time'])}, "
                f"memory {_format_interval(last.total['memory'])} of the baseline, same samples"
            )
        ]
        lines += [
            f"{each.rung.name}: {each.rung.words}: time {_format_interval(each.step['time'])}"
            for each in ladder.kept
        ]
    lines += [
        f"not kept: {each.rung.name}: {each.reason}" for each in ladder.results if not each.kept
    ]
    comment = "".join(f"# {_line(line)}\n" for line in lines)
    return f"{comment}\n{spec_file.write(ladder.best)}"


# pixels: the picture, a row of it, the names, the verdicts
WIDE, LINE, LEFT, RIGHT = 720, 30, 150, 130


def as_svg(ladder: Ladder) -> str:
    """Return a picture of the time of each optimization (rung) relative to the baseline.

    The axis is logarithmic, and intervals are drawn as lines. The SVG has no scripts and no remote
    parts.
    """
    shown = [(each, each.total["time"]) for each in ladder.results]
    bounds = [
        bound
        for _, ratio in shown
        if ratio
        for bound in (ratio.estimate, ratio.low, ratio.high)
        if bound
    ]
    low, high = min([0.5, *bounds]) * 0.95, max([1.25, *bounds]) * 1.05

    def x(value: float) -> float:
        return LEFT + (WIDE - LEFT - RIGHT) * math.log(value / low) / math.log(high / low)

    height = LINE * (len(shown) + 2)
    head = (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDE} {height}" '
        'font-family="sans-serif" font-size="12"'
    )
    title = "time for the same samples, as a share of the start"
    parts = [f'{head} fill="currentColor" stroke="none"><title>{title}</title>']
    for tick in _ticks(low, high):
        across = f'x1="{x(tick):.1f}" x2="{x(tick):.1f}" y1="{LINE}" y2="{height - LINE}"'
        parts.append(
            f'<line {across} stroke="currentColor" stroke-opacity="{0.5 if tick == 1 else 0.15}"/>'
        )
        parts.append(
            f'<text x="{x(tick):.1f}" y="{height - 10}" text-anchor="middle">{tick:g}x</text>'
        )
    for number, (result, ratio) in enumerate(shown, start=1):
        y = LINE * number + LINE / 2
        parts.append(
            f'<text x="{LEFT - 8}" y="{y + 4}" text-anchor="end">{escape(result.rung.name)}</text>'
        )
        parts.append(f'<text x="{WIDE - RIGHT + 8}" y="{y + 4}">{escape(cells(result)[1])}</text>')
        parts += _mark(ratio, x, y, result.kept)
    return "".join(parts) + "</svg>\n"


def _ticks(low: float, high: float) -> Iterable[float]:
    return [
        tick
        for tick in (0.05, 0.1, 0.2, 0.3, 0.5, 0.7, 1, 1.5, 2, 3, 5, 10, 20)
        if low <= tick <= high
    ]


def _mark(ratio: Interval | None, x: Any, y: float, kept: bool) -> list[str]:
    """Return SVG elements of a ratio: a dot for a kept rung, else a ring, and the interval."""
    if ratio is None:
        return []
    parts = []
    if ratio.low is not None and ratio.high is not None:
        parts.append(
            f'<line x1="{x(ratio.low):.1f}" x2="{x(ratio.high):.1f}" y1="{y}" y2="{y}" '
            'stroke="currentColor" stroke-width="2"/>'
        )
    fill = "currentColor" if kept else "none"
    return [
        *parts,
        (
            f'<circle cx="{x(ratio.estimate):.1f}" cy="{y}" r="5" fill="{fill}" '
            'stroke="currentColor" stroke-width="1.5"/>'
        ),
    ]
