"""Reading of a run folder into a `Past` object, for all commands that inspect runs.

Reading writes nothing, and imports neither torch nor NumPy.
"""

from __future__ import annotations

import contextlib
import math
import os
import shlex
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from surefoot.contract import events, manifest, runlock
from surefoot.contract.events import (
    Committed,
    Ended,
    Evaluated,
    Event,
    Fault,
    Memory,
    Started,
    Step,
)
from surefoot.contract.run_folder import files
from surefoot.control.diagnose import (
    Goodput,
    Health,
    Phases,
    find_goodput,
    find_health,
    find_phases,
    with_first_causes,
)
from surefoot.core.cost.roofline import FILE, Utilization, read_utilization
from surefoot.core.errors import RunFolderError
from surefoot.core.units import UNKNOWN, format_number, format_percent, format_throughput

UNREADABLE = "unreadable"


@dataclass(frozen=True, kw_only=True)
class Past:
    """Records of a run, read from its folder.

    If a step was repeated after a restart, only its newest record is included. `ended` is None if
    the newest attempt (start or resume) recorded no end. `began_s` and `last_s` are the Unix times
    of the first start and of the last record.
    """

    folder: Path
    started: Started
    steps: tuple[Step, ...]
    evaluations: tuple[Evaluated, ...]
    commits: tuple[Committed, ...]
    faults: tuple[Fault, ...]
    memory: Memory | None
    ended: Ended | None
    goodput: Goodput
    phases: Phases | None
    health: Health
    began_s: float
    last_s: float

    @property
    def num_attempts(self) -> int:
        return len(self.goodput.attempts)

    @property
    def state(self) -> str:
        """State of the run, such as "finished" or "running".

        If the newest attempt recorded its end, the state is "finished", "stopped", "failed" or
        "interrupted"; otherwise it is "running", "stuck", "dead" or "unknown".
        """
        return self.health.state

    @property
    def cause(self) -> str | None:
        """Description of why the newest attempt (start or resume) ended; None if unknown."""
        return self.ended.cause if self.ended is not None else self.health.cause or None

    @property
    def num_steps(self) -> int:
        ended = self.ended.step if self.ended is not None else 0
        return max([ended, *(each.step for each in self.steps[-1:])])

    @property
    def elapsed_s(self) -> float | None:
        """Duration of the newest attempt in seconds, until its end or its last record.

        None if the system clock was set back during the attempt.
        """
        return (
            self.ended.elapsed_s if self.ended is not None else self.goodput.attempts[-1].elapsed_s
        )

    @property
    def scored(self) -> list[Evaluated]:
        """Evaluations of the first split of `evaluate.split`, which decide the score of the run."""
        stated = self.started.spec.get("evaluate")
        split = stated.get("split", "test") if isinstance(stated, Mapping) else "test"
        split = split if isinstance(split, str) else split[0]
        return [each for each in self.evaluations if each.split == split]

    @property
    def use(self) -> str | None:
        """Value of `task.use` in the spec; None for a task that was created in a Python script."""
        stated = self.started.spec.get("task")
        return stated.get("use") if isinstance(stated, Mapping) else None

    @property
    def has_spec(self) -> bool:
        """Return whether the run folder has a spec.toml.

        The folder of a user-written loop with `surefoot.attach` has none.
        """
        return (self.folder / "spec.toml").is_file()

    @property
    def last(self) -> Evaluated | None:
        return self.scored[-1] if self.scored else None

    @property
    def best(self) -> Evaluated | None:
        return next((each for each in reversed(self.scored) if each.best), None)

    @property
    def samples_per_s(self) -> float | None:
        """Training throughput in samples per second; the time of evaluations is excluded."""
        return self._per_training_second(sum(each.num_samples for each in self.steps))

    @property
    def items_per_s(self) -> float | None:
        """Training throughput in items per second; the time of evaluations is excluded.

        Items are what the loss is averaged over, such as samples or tokens.
        """
        return self._per_training_second(sum(each.num_items for each in self.steps))

    def _per_training_second(self, count: float) -> float | None:
        elapsed_s = sum(each.elapsed_s for each in self.steps)
        return count / elapsed_s if elapsed_s > 0 else None

    @property
    def throughput(self) -> str:
        """Training throughput as text, in samples per second.

        The items per second are added if items are not samples, but tokens for example.
        """
        return format_throughput(self.samples_per_s, self.items_per_s, self.started.unit)

    @property
    def peak_bytes(self) -> int | None:
        found = [
            each.peak_bytes
            for each in (*self.steps[-1:], self.ended)
            if each is not None and each.peak_bytes is not None
        ]
        return max(found, default=None)

    @property
    def device_memory(self) -> Mapping[str, Any] | None:
        """GPU memory statistics of the last record that has them; None if no record has any.

        `peak_bytes` is the maximum over all records.
        """
        found = [each.device_memory for each in self.steps if each.device_memory]
        peaks = [
            peak for each in found if (peak := finite_or_none(each.get("peak_bytes"))) is not None
        ]
        return {**found[-1], "peak_bytes": max(peaks, default=None)} if found else None

    def loss_at(self, step: int) -> float | None:
        """Return the mean training loss in the record of `step`; None if there is no such record.

        The mean covers the steps since the previous record.
        """
        return next((number(each.loss) for each in self.steps if each.step == step), None)

    def utilization(self) -> Utilization | None:
        """Return the FLOPs and the peak that `surefoot roofline` found for this run, or None."""
        try:
            return read_utilization(files.read_text(self.folder, FILE))
        except (OSError, UnicodeDecodeError):
            return None

    def weights(self) -> list[int]:
        """Return the steps that have a checkpoint in the run folder."""
        return manifest.steps(self.folder)

    def parent(self) -> Mapping[str, Any] | None:
        """Return the run and the step from which this run was forked; None if it is not a fork.

        They are read from the newest checkpoint with a readable manifest.
        """
        for step in reversed(self.weights()):
            with contextlib.suppress(RunFolderError):
                return manifest.read(manifest.step_folder(self.folder, step)).parent
        return None

    def as_row(self) -> dict[str, Any]:
        """Return the fields of the run that every inspecting command prints with `--json`."""
        last, best = self.last, self.best
        return {
            "run": str(self.folder),
            "task": self.started.task,
            "state": self.state,
            "spec_id": self.started.spec_id,
            "steps": self.num_steps,
            "total_steps": self.started.total_steps,
            "score": last.score if last else None,
            "value": value_of(last),
            "best_value": value_of(best),
            "best_step": best.step if best else None,
            "elapsed_s": self.elapsed_s,
            "began_s": self.began_s,
            "attempts": self.num_attempts,
            **self.health.as_row(),
        }


def read(folder: Path, *, stuck_after_s: float | None = None) -> Past:
    """Read the run in `folder`.

    Args:
        folder: run folder.
        stuck_after_s: seconds without a new record after which a running run counts as stuck; by
            default derived from the run's records (see `find_health`).

    Raises:
        RunFolderError: if the folder is not a run, its events are damaged, or its event log has no
            record of a start.
    """
    owner = runlock.find_owner(folder)
    every, damaged = read_records(folder)
    starts = [event for event in every if isinstance(event, Started)]
    if not starts:
        raise RunFolderError(
            f"{folder} holds no run that started: "
            f"its {events.FILE} has no 'started' record{f'; {damaged[0]}' if damaged else ''}",
            hint=(
                f"surefoot resume {shlex.quote(str(folder))} resumes from the newest "
                "checkpoint and writes the record"
            )
            if damaged and (folder / "spec.toml").is_file()
            else None,
        )
    kept = events.newest(every)
    last_start = max(index for index, event in enumerate(every) if isinstance(event, Started))
    ends = [event for event in every[last_start:] if isinstance(event, Ended)]
    compared = [event for event in kept if isinstance(event, Memory)]
    health = find_health(owner, every, stuck_after_s=stuck_after_s)
    return Past(
        folder=folder,
        started=starts[-1],
        steps=tuple(event for event in kept if isinstance(event, Step)),
        evaluations=tuple(event for event in kept if isinstance(event, Evaluated)),
        commits=tuple(event for event in kept if isinstance(event, Committed)),
        faults=tuple(event for event in kept if isinstance(event, Fault)),
        memory=compared[-1] if compared else None,
        ended=ends[-1] if ends else None,
        goodput=find_goodput(every, health),
        phases=find_phases(every),
        health=health,
        began_s=starts[0].time_s,
        last_s=every[-1].time_s,
    )


def read_records(folder: Path) -> tuple[list[Event], list[str]]:
    """Return all event records of a run, and a message for each damaged record.

    The messages are also printed as warnings. If an attempt ended because a rank failed, the cause
    in its end record is replaced by the error of that rank, if the rank or the supervisor recorded
    it.

    Raises:
        RunFolderError: if the event log cannot be read.
    """
    damaged: list[str] = []
    every = list(events.read(folder, damaged=damaged))
    for line in damaged:
        print(f"warning: {line}; the line is ignored", file=sys.stderr)
    return with_first_causes(every, lambda: _read_ends_of_other_ranks(folder)), damaged


def _read_ends_of_other_ranks(folder: Path) -> dict[int, list[Ended]]:
    """Return the `Ended` records of each rank except rank 0; unreadable logs are skipped."""
    found: dict[int, list[Ended]] = {}
    with contextlib.suppress(OSError):
        files.check_no_link(folder, files.RANKS)
        for each in (folder / files.RANKS).iterdir():
            if each.name.isascii() and each.name.isdecimal() and not each.is_symlink():
                with contextlib.suppress(RunFolderError):
                    ends = events.read(each, Ended, damaged=[])
                    found[int(each.name)] = [end for end in ends if isinstance(end, Ended)]
    return found


def find(root: Path) -> Iterator[Path]:
    """Yield the run folders below `root`, or `root` itself, sorted by name.

    Hidden folders and folders inside runs are skipped. A folder without an event log is a run too
    if it has a lock file and a folder with the logs of ranks. Folders that this user may not list
    come last, because each may contain a run.
    """
    forbidden: list[OSError] = []
    for folder, inside, names in os.walk(root, onerror=forbidden.append):
        if events.FILE in names or (runlock.FILE in names and files.RANKS in inside):
            inside.clear()
            yield Path(folder)
        else:
            inside[:] = sorted(
                (name for name in inside if not name.startswith(".")), key=_numeric_sort_key
            )
    yield from (Path(error.filename) for error in forbidden if isinstance(error, PermissionError))


def holds_runs(folder: Path) -> bool:
    """Return whether `folder` is not a run itself but contains run folders."""
    return not (folder / events.FILE).exists() and next(find(folder), None) is not None


def _numeric_sort_key(name: str) -> tuple[str, int]:
    """Return a sort key that puts `digits-10` after `digits-9`."""
    stem = name.rstrip("0123456789")
    return stem, int(name[len(stem) :] or 0)


def number(value: Any) -> float | None:
    """Convert a value of an event record to a float; return None if it is not a number.

    Event records store non-finite values as strings, which are converted too.
    """
    if isinstance(value, bool) or not isinstance(value, int | float | str):
        return None
    try:
        return float(value)
    except ValueError:
        return None


def finite_or_none(value: Any) -> float | None:
    """Convert a value of an event record to a float; return None if it is not a finite number."""
    found = number(value)
    return found if found is not None and math.isfinite(found) else None


def value_of(evaluated: Evaluated | None) -> float | None:
    """Return the value of an evaluation's score, which is its loss or a metric.

    Return None if the value is not finite, or without an evaluation.
    """
    if evaluated is None:
        return None
    return finite_or_none(
        evaluated.loss if evaluated.score == "loss" else evaluated.metrics.get(evaluated.score)
    )


def format_value(value: Any, unit: str) -> str:
    """Format a value with its unit, for example `99.4 %` or `164.2`."""
    return format_percent(number(value)) if unit == "%" else format_number(number(value))


def format_metric(name: str, evaluated: Evaluated) -> str:
    """Format a metric of an evaluation with its unit; the name "loss" selects the loss."""
    if name == "loss":
        return format_number(number(evaluated.loss))
    return format_value(evaluated.metrics.get(name), evaluated.units.get(name, ""))


def format_score(past: Past, *, with_best: bool = True) -> str:
    """Format the last score of a run, for example `accuracy 99.4 %`; `n/a` if there is none.

    If `with_best` is set, the best score is appended if it differs from the last one.
    """
    last, best = past.last, past.best
    if last is None:
        return UNKNOWN
    text = f"{last.score} {format_metric(last.score, last)}"
    same = not with_best or best is None or value_of(best) == value_of(last)
    return text if same or best is None else f"{text} (best {format_metric(best.score, best)})"
