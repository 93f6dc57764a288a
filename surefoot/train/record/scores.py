"""Evaluations of a run: when they are due, which one is the best, and when to stop early."""

from __future__ import annotations

import math
import time
from collections.abc import Mapping
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from surefoot.components.observe.memory_use import peak_resident_bytes
from surefoot.contract import events
from surefoot.contract.state import Timing
from surefoot.core.statistics import quantiles
from surefoot.train.assemble import Assembly
from surefoot.train.assemble.lengths import RunSchedule
from surefoot.train.evaluate import Evaluation

if TYPE_CHECKING:
    from surefoot.train.session.session import RunSession


class _Interval:
    """Interval between two evaluations, in steps or as a time."""

    def __init__(self, course: RunSchedule, text: str) -> None:
        every = course.duration(text)
        self._every_s = every.value if every.unit == "s" else None
        self._rhythm = None if self._every_s is not None else course.rhythm(text)
        self.begin()

    def begin(self) -> None:
        self._last_s = time.perf_counter()

    def is_due(self, step: int) -> bool:
        if self._rhythm is not None:
            return self._rhythm(step)
        return self._every_s is not None and time.perf_counter() - self._last_s >= self._every_s


class Scores:
    """Evaluation schedule, best and last result, and early stopping of a run."""

    def __init__(self, assembly: Assembly) -> None:
        self._assembly = assembly
        self._intervals = {
            split: _Interval(assembly.course, text)
            for split, text in assembly.evaluation_intervals.items()
        }
        self._steps: dict[str, int] = {}  # last evaluated step of each split
        self._since_best = 0
        self.best: Evaluation | None = None
        self.best_step: int | None = None
        self.last: Evaluation | None = None
        self.last_step = 0
        # items that the losses counted in all attempts; None if an older version did not save it
        self.num_items: float | None = 0.0
        # of a fork: training seconds, samples and items of its parent
        self._of_parent: dict[str, float] = {}
        # split whose evaluation SIGTERM interrupted; the next attempt starts with it
        self.owed: str | None = None

    def state(self) -> dict[str, Any]:
        """Return the state that a checkpoint stores."""
        return {
            "best": _without_time(self.best),
            "best_step": self.best_step,
            "since_best": self._since_best,
            "last": _without_time(self.last),
            "last_step": self.last_step,
            "steps": self._steps,
            "owed": self.owed,
            "num_items": self.num_items,
        }

    def restore(self, state: Mapping[str, Any] | None, clock: Mapping[str, float]) -> None:
        """Restore the `state` and `clock` of a checkpoint, with the best score of all attempts."""
        self._of_parent = {name: value for name, value in clock.items() if name != "training_s"}
        if state is None:
            return
        self.best = Evaluation(**state["best"]) if state["best"] else None
        self.last = Evaluation(**state["last"]) if state["last"] else None
        self.best_step = state["best_step"]
        self.last_step = state["last_step"]
        first = self._assembly.spec.evaluate.first_split
        # an older version saved the step of the first split alone
        self._steps = dict(state.get("steps", {first: self.last_step}))
        self._since_best = state["since_best"]
        self.owed, self.num_items = state.get("owed"), state.get("num_items")

    def clock(self, training_s: float) -> dict[str, float]:
        """Return the training time, and in a fork the totals of the parent run, for a checkpoint.

        The throughput of a fork excludes the training time, samples and items of the parent.
        """
        return {"training_s": training_s, **self._of_parent}

    def begin_fork(self, num_samples: int, training_s: float) -> None:
        """Exclude the parent's samples and training time from the throughput of a fork."""
        items = {} if self.num_items is None else {"parent_items": self.num_items}
        self._of_parent = {"parent_s": training_s, "parent_samples": float(num_samples), **items}

    def count(self, num_items: float) -> None:
        """Add a number of items that losses have counted."""
        self.num_items = None if self.num_items is None else self.num_items + num_items

    def take_owed(self) -> str | None:
        """Return the split whose evaluation SIGTERM interrupted; None if there is none.

        It must be evaluated before the next step, because the best checkpoint and a plateau
        schedule depend on it. Later calls return None.
        """
        owed, self.owed = self.owed, None
        return owed

    def due(self, step: int, *, is_last: bool = False) -> tuple[str, ...]:
        """Return the splits that are due after a step; at the end of the run, all of them."""
        return tuple(
            split for split, interval in self._intervals.items() if is_last or interval.is_due(step)
        )

    def left(self, step: int) -> tuple[str, ...]:
        """Return the splits that were not evaluated after `step`."""
        return tuple(split for split in self._intervals if self._steps.get(split) != step)

    def note(self, split: str, step: int) -> None:
        """Record that a split was evaluated after a step."""
        if split in self._intervals:
            self._intervals[split].begin()
            self._steps[split] = step

    def add(self, step: int, result: Evaluation) -> bool:
        """Add an evaluation and advance a plateau schedule; return whether it is the best."""
        self.last, self.last_step = result, step
        self._assembly.schedule.observe(math.nan if result.value is None else result.value)
        if result.value is None or not math.isfinite(result.value) or not self._is_better(result):
            self._since_best += 1
            return False
        self.best, self.best_step, self._since_best = result, step, 0
        return True

    def _is_better(self, result: Evaluation) -> bool:
        if self.best is None or self.best.value is None or result.value is None:
            return True
        return (
            result.value > self.best.value
            if result.better == "higher"
            else result.value < self.best.value
        )

    def reason_to_stop(self) -> str | None:
        patience = self._assembly.spec.evaluate.patience
        if patience is None or self._since_best < patience or self.last is None:
            return None
        of = f"{self.last.split} " if len(self._intervals) > 1 else ""
        if self.best is None:
            return f"{of}{self.last.score} was NaN or Inf in {patience} evaluations"
        return f"no better {of}{self.best.score} in {patience} evaluations"

    def score_of(self, step: int) -> dict[str, Any] | None:
        """Return the score for the manifest of `step`; None if that step was not evaluated."""
        if self.last is None or self.last_step != step:
            return None
        return {
            "name": self.last.score,
            "value": self.last.value,
            "better": self.last.better,
            "split": self.last.split,
        }

    def make_ended_record(self, session: RunSession) -> events.Ended:
        """Return the Ended record of an attempt."""
        result = session.result
        return events.Ended(
            generation=session.lock.generation,
            time_s=time.time(),
            step=session.progress.step,
            outcome=result.outcome,
            cause=result.cause,
            exit_code=result.exit_code,
            elapsed_s=result.summary["elapsed_s"],
            num_samples=session.progress.num_samples,
            samples_per_s=result.summary["samples_per_s"],
            peak_bytes=result.summary["peak_bytes"],
            summary=result.summary,
            was_left=result.outcome == "stopped" and session.stops.outcome is None,
        )

    def summary(self, session: RunSession, timing: Timing) -> dict[str, Any]:
        """Return the rows of the final table; `timing` covers the whole attempt."""
        task, progress, result = self._assembly.task, session.progress, session.result
        elapsed_s = time.perf_counter() - session.started_s
        last, best = self.last, self.best
        own_s = progress.training_s - self._of_parent.get("parent_s", 0.0)
        own_samples = progress.num_samples - self._of_parent.get("parent_samples", 0.0)
        own_items = (
            None
            if self.num_items is None
            else self.num_items - self._of_parent.get("parent_items", 0.0)
        )
        return {
            "task": task.name,
            "folder": str(session.folder()),
            "step": progress.step,
            "epochs": self._assembly.feed.epoch_of(progress.step),
            "score": last.score if last else "score",
            "value": last.value if last else None,
            "unit": last.units.get(last.score, "") if last else "",
            "better": last.better if last else None,
            "best_value": best.value if best else None,
            "best_step": self.best_step,
            "loss": last.loss if last else None,
            "num_samples": progress.num_samples,
            "elapsed_s": elapsed_s,
            "training_s": progress.training_s,
            "samples_per_s": _per_s(own_samples, own_s),
            "items_per_s": _per_s(own_items, own_s),
            "items": task.unit,
            "peak_bytes": peak_resident_bytes(),
            "num_skipped": progress.guard.num_skipped,
            "cause": result.cause,
            "outcome": result.outcome,
            **timing_rows(timing),
            **_noise_row(self._assembly),
        }


def _per_s(count: float | None, elapsed_s: float) -> float | None:
    return None if count is None or elapsed_s <= 0 else count / elapsed_s


def _noise_row(assembly: Assembly) -> dict[str, Any]:
    """Return the gradient noise with advice on the batch size; empty if it is not known."""
    noise = assembly.noise
    return (
        {}
        if noise is None
        else {"noise": {**asdict(noise), "advice": noise.advise(assembly.feed.batch)}}
    )


def timing_rows(timing: Timing) -> dict[str, Any]:
    """Return the timing rows of a summary: phases, outliers, and percentiles of the step time.

    The percentiles are None without steps.
    """
    percentiles = quantiles(timing.step_s, (0.5, 0.95, 0.99)) if timing.step_s else (None,) * 3
    return {
        "phases": timing.phases,
        "step_s": dict(zip(("p50", "p95", "p99"), percentiles, strict=True)),
        "outliers": timing.outliers,
    }


def _without_time(result: Evaluation | None) -> dict[str, Any] | None:
    """Return an evaluation's fields with elapsed_s = 0, so that they depend only on the steps."""
    return None if result is None else {**asdict(result), "elapsed_s": 0.0}
