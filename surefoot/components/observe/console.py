"""Terminal output of a run: a progress bar, and a table at the end of the run.

If the output is not a terminal, plain lines replace the progress bar.
"""

from __future__ import annotations

import contextlib
import itertools
import math
import sys
import textwrap
import time
from collections.abc import Mapping, Sequence
from typing import Any, TextIO

from rich.console import Console as RichConsole
from rich.progress import (
    BarColumn,
    Progress,
    ProgressColumn,
    Task,
    TaskID,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)
from rich.table import Column
from rich.text import Text

from surefoot.components.observe.meter import Summary
from surefoot.core.process.forked import call_in_children
from surefoot.core.units import (
    UNKNOWN,
    format_bytes,
    format_number,
    format_percent,
    format_seconds,
    format_throughput,
)

LINE_EVERY_S = 5.0  # least time between two plain lines
WIDE = 100  # columns from which the elapsed time is shown too
MIN_BAR = 8  # columns
MIN_SHARE = 0.005  # share of the time from which a phase is named
MAX_OUTLIERS = 3  # in the final table; `surefoot show` has more


def format_score(name: str, value: float | None, unit: str = "") -> str:
    """Return the name and value of a metric as text: `accuracy 99.4 %`, `perplexity 164.2`."""
    return f"{name} {format_percent(value) if unit == '%' else format_number(value)}"


class _Count(ProgressColumn):
    """Progress column with the number of completed steps or samples.

    It also shows the total if it is known.
    """

    def render(self, task: Task) -> Text:
        return Text(f"{task.completed:>7,.0f}" + (f"/{task.total:,.0f}" if task.total else ""))


class Console:
    """Display of a run: a progress bar on a terminal, or plain lines on any other stream.

    Args:
        total_steps: Number of steps of the run; None if it is unknown.
        unit: Unit of the throughput, such as "samples".
        quiet: Show only warnings.
        stream: Stream of the display; None for stderr.
        done_steps: Number of steps that earlier attempts of the run completed.
    """

    def __init__(
        self,
        *,
        total_steps: int | None,
        unit: str,
        quiet: bool = False,
        stream: TextIO | None = None,
        done_steps: int = 0,
    ) -> None:
        self._stream = stream or sys.stderr
        self._quiet, self._unit, self._total, self._done_before = (
            quiet,
            unit,
            total_steps,
            done_steps,
        )
        self._bar: Progress | None = None
        self._row: TaskID | None = None
        self._score = ""
        self._last: Summary | None = None
        self._last_line_s = 0.0
        self._has_count = False  # whether the last count of an evaluation is still to be shown
        self._started_s = time.monotonic()
        if not quiet and self._stream.isatty():
            self._start_bar()

    def _start_bar(self) -> None:
        console = RichConsole(file=self._stream)
        times = [TextColumn("left"), TimeRemainingColumn(table_column=Column(no_wrap=True))]
        if console.width >= WIDE:
            times.insert(0, TimeElapsedColumn(table_column=Column(no_wrap=True)))
        count = _Count(table_column=Column(no_wrap=True))
        self._bar = Progress(
            count,
            BarColumn(bar_width=None),
            TextColumn("{task.description}"),
            *times,
            console=console,
            expand=True,
        )
        self._row = self._bar.add_task("starting", total=self._total, completed=self._done_before)
        self._bar.start()
        call_in_children(self, Console._leave_to_parent)

    def _leave_to_parent(self) -> None:
        """Turn off the progress bar in a forked process, and restore its stdout and stderr.

        The thread that draws the bar may have held its lock at the time of the fork. Printing
        through the bar could then hang.
        """
        self._bar, self._quiet = None, True
        for name in ("stdout", "stderr"):
            setattr(sys, name, getattr(getattr(sys, name), "rich_proxied_file", getattr(sys, name)))

    def say(self, text: str) -> None:
        if not self._quiet:
            self._print(text)

    def warn(self, text: str) -> None:
        """Print a warning, even with `quiet`, because something was lost."""
        self._print(f"surefoot: {text}")

    def _print(self, text: str) -> None:
        """Print a line of text.

        An OSError, for example from a closed terminal, does not end the run: it turns off further
        output.
        """
        try:
            if self._bar is not None:
                self._bar.console.print(text, markup=False, highlight=False)
            else:
                print(text, file=self._stream, flush=True)
        except OSError:
            self._quiet = True

    def step(self, summary: Summary) -> None:
        """Show the current step, loss and throughput; called once for each window of steps."""
        if self._quiet:
            return
        now_s, self._last = time.monotonic(), summary
        if self._bar is not None and self._row is not None:
            self._bar.update(self._row, completed=summary.step, description=self._describe(summary))
        elif now_s - self._last_line_s > LINE_EVERY_S:
            self._last_line_s = now_s
            total = f"/{self._total:,}" if self._total else ""
            self.say(
                f"step {summary.step:,}{total}  {self._describe(summary)}{self._eta(summary.step)}"
            )

    def _free_columns(self) -> float:
        """Return the number of columns for text in the line of the progress bar.

        A longer text would cut off the numbers beside it. Without a progress bar, the number is
        infinite.
        """
        if self._bar is None:
            return math.inf
        width = self._bar.console.width
        count = 2 * max(7, len(f"{self._total or 0:,}")) + 1
        return width - count - MIN_BAR - (25 if width >= WIDE else 17)

    def _describe(self, summary: Summary) -> str:
        """Return loss, score, learning rate and throughput as text.

        If the line is too short for all of them, the last ones are left out.
        """
        parts = [
            f"loss {format_number(summary.loss)}",
            self._score,
            "" if summary.learning_rate is None else f"lr {format_number(summary.learning_rate)}",
            format_throughput(summary.samples_per_s, summary.items_per_s, self._unit),
        ]
        fits = list(itertools.accumulate((part for part in parts if part), "{}  {}".format))
        return max(
            (text for text in fits if len(text) <= self._free_columns()), key=len, default=""
        )

    def _eta(self, step: int) -> str:
        if not self._total or step <= self._done_before:
            return ""
        left_s = (
            (time.monotonic() - self._started_s) / (step - self._done_before) * (self._total - step)
        )
        return f"  left {format_seconds(left_s)}"

    def reading(self, split: str, done: int, total: int | None) -> None:
        """Show the number of processed samples of a split, in a run that has no steps."""
        if self._bar is not None and self._row is not None:
            self._bar.update(
                self._row, completed=done, total=total, description=f"samples of {split}"
            )
        else:
            self.evaluating(split, done, total)

    def evaluating(self, split: str, done: int, total: int | None) -> None:
        """Show the number of evaluated samples of a split, beside the steps of the run."""
        if self._quiet:
            return
        now_s = time.monotonic()
        text = f"{split} {done:,}/{total:,} samples" if total else f"{split} {done:,} samples"
        if self._bar is not None and self._row is not None:
            self._bar.update(
                self._row,
                description=text
                if len(text) <= self._free_columns()
                else text.removesuffix(" samples"),
            )
        elif now_s - self._last_line_s > LINE_EVERY_S or (done == total and self._has_count):
            self._last_line_s, self._has_count = now_s, done != total
            self.say(text)

    def evaluated(
        self, step: int, epoch: float, name: str, value: float | None, unit: str, best: bool
    ) -> None:
        self._score = format_score(name, value, unit)
        mark = "  (best so far)" if best else ""
        self.say(f"step {step:,}  epoch {format_number(epoch)}  {self._score}{mark}")
        if self._bar is not None and self._row is not None:
            self._bar.update(
                self._row, description="" if self._last is None else self._describe(self._last)
            )

    def close(self) -> None:
        bar, self._bar = self._bar, None
        if bar is not None:
            with contextlib.suppress(OSError):
                bar.stop()


def final_table(rows: list[tuple[str, str]], title: str, columns: int | None = None) -> str:
    """Return the table at the end of a run as text, aligned and without color.

    Values are wrapped between words, so that a line has at most `columns` characters. If `columns`
    is None, they are not wrapped.

    >>> print(final_table([("time went to", "forward 50 %, backward 50 %")], "digits: done", 32))
    digits: done
      time went to  forward 50 %,
                    backward 50 %
    """
    width = max(len(name) for name, _ in rows)
    room = sys.maxsize if columns is None else max(20, columns - width - 4)
    lines = [title]
    for name, value in rows:
        parts = textwrap.wrap(value, room, break_long_words=False, break_on_hyphens=False) or [""]
        lines += [
            f"  {label:<{width}}  {part}"
            for label, part in zip([name, *[""] * len(parts)], parts, strict=False)
        ]
    return "\n".join(lines)


def result_rows(summary: dict[str, Any]) -> list[tuple[str, str]]:
    """Return the rows of the final table from the summary of an Ended event."""
    unit, rows = summary.get("unit", ""), list[tuple[str, str]]()
    if summary["value"] is not None:
        rows.append(("score", format_score(summary["score"], summary["value"], unit)))
    if summary.get("best_step") not in (None, summary["step"]):
        best = format_score(summary["score"], summary["best_value"], unit)
        rows.append(("best", f"{best} at step {summary['best_step']:,}"))
    epochs = format_number(summary["epochs"])
    rows += [
        ("steps", f"{summary['step']:,} ({epochs} epochs, {summary['num_samples']:,} samples)"),
        ("time", format_seconds(summary["elapsed_s"])),
        (
            "throughput",
            format_throughput(
                summary.get("samples_per_s"),
                summary.get("items_per_s"),
                summary.get("items", "samples"),
            ),
        ),
        ("peak memory", format_bytes(summary.get("peak_bytes"))),
    ]
    if summary.get("phases"):
        rows += [
            ("time by phase", phase_shares(summary["phases"])),
            ("a step", format_percentiles(summary["step_s"])),
        ]
    if summary.get("outliers"):
        rows.append(("slow steps", format_outliers(summary["outliers"])))
    if summary.get("num_skipped"):
        rows.append(("skipped steps", str(summary["num_skipped"])))
    if summary.get("noise"):
        rows.append(("gradient noise", format_noise(summary["noise"])))
    rows += [("ended", summary["cause"]), ("run folder", summary["folder"])]
    return rows


def format_noise(row: Mapping[str, Any]) -> str:
    """Return the gradient noise scale as text: `812 samples [600, 1100]: a batch of 64 ...`.

    An unknown value is shown as n/a.
    """
    scale, low, high = (
        "n/a" if row[name] is None else f"{row[name]:,.0f}" for name in ("scale", "low", "high")
    )
    return f"{scale} samples [{low}, {high}]: {row['advice']}"


def phase_shares(phases: Mapping[str, float]) -> str:
    """Return the share of each phase of the total time as text, the largest share first.

    Phases with less than 0.5 % are summed as "the rest".

    >>> phase_shares({"data": 0.001, "forward": 0.6, "backward": 0.399})
    'forward 60 %, backward 39.9 %, the rest 0.1 %'
    """
    total = sum(phases.values())
    shares = sorted(
        ((seconds / total, name) for name, seconds in phases.items() if total > 0), reverse=True
    )
    told = [(share, name) for share, name in shares if share >= MIN_SHARE]
    rest = sum(share for share, _ in shares) - sum(share for share, _ in told)
    told += [(rest, "the rest")] if len(told) < len(shares) else []
    return (
        ", ".join(f"{name} {format_number(round(100 * share, 1))} %" for share, name in told)
        or UNKNOWN
    )


def format_percentiles(row: Mapping[str, float | None]) -> str:
    """Return named durations in seconds as text: `p50 1.2 ms, p95 1.4 ms, p99 3 ms`."""
    return ", ".join(f"{name} {format_seconds(seconds)}" for name, seconds in row.items())


def format_outliers(rows: Sequence[Mapping[str, Any]]) -> str:
    """Return the first outlier steps of `rows` as text, each with its cause.

    The rows must be sorted, with the slowest step first.

    >>> format_outliers([{"step": 12, "elapsed_s": 0.5, "cause": "checkpoint"}])
    'step 12 500 ms (checkpoint)'
    """
    told = [
        f"step {row['step']:,} {format_seconds(row['elapsed_s'])} ({row['cause']})"
        for row in rows[:MAX_OUTLIERS]
    ]
    return ", ".join(told)
