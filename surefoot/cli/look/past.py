"""What is written in a run folder, as one value that every looking verb reads; nothing is written and nothing is imported but words."""

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
from surefoot.contract.events import Committed, Ended, Evaluated, Event, Fault, Memory, Started, Step
from surefoot.contract.run_folder import files
from surefoot.control.diagnose import Goodput, Health, Phases, find_goodput, find_health, find_phases
from surefoot.core.cost.roofline import FILE, Utilisation, read_utilisation
from surefoot.core.errors import RunFolderError
from surefoot.core.units import UNKNOWN, format_number, format_percent, format_throughput

UNREADABLE = "unreadable"


@dataclass(frozen=True, kw_only=True)
class Past:
    """One run: of each step what its newest generation wrote, and how its newest attempt ended (None: it did not say)."""

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
        """Finished, stopped, failed or interrupted, as its end says; running, stuck, dead or unknown without one."""
        return self.health.state

    @property
    def num_steps(self) -> int:
        ended = self.ended.step if self.ended is not None else 0
        return max([ended, *(each.step for each in self.steps[-1:])])

    @property
    def elapsed_s(self) -> float | None:
        """Seconds of the newest attempt, to its end or to the last that was written; None where the clock was set back."""
        return self.ended.elapsed_s if self.ended is not None else self.goodput.attempts[-1].elapsed_s

    @property
    def scored(self) -> list[Evaluated]:
        """The evaluations of the split that decides; those of other splits do not count."""
        stated = self.started.spec.get("evaluate")
        split = stated.get("split", "test") if isinstance(stated, Mapping) else "test"
        return [each for each in self.evaluations if each.split == split]

    @property
    def use(self) -> str | None:
        """What `[task] use` names; None for a task that was built in a script."""
        stated = self.started.spec.get("task")
        return stated.get("use") if isinstance(stated, Mapping) else None

    @property
    def last(self) -> Evaluated | None:
        return self.scored[-1] if self.scored else None

    @property
    def best(self) -> Evaluated | None:
        return next((each for each in reversed(self.scored) if each.best), None)

    @property
    def samples_per_s(self) -> float | None:
        """Samples per second of training, evaluations left out."""
        return self._per_s(sum(each.num_samples for each in self.steps))

    @property
    def items_per_s(self) -> float | None:
        """What the losses count, per second of training."""
        return self._per_s(sum(each.num_items for each in self.steps))

    def _per_s(self, count: float) -> float | None:
        elapsed_s = sum(each.elapsed_s for each in self.steps)
        return count / elapsed_s if elapsed_s > 0 else None

    @property
    def throughput(self) -> str:
        """Samples per second, and items where those are something else."""
        return format_throughput(self.samples_per_s, self.items_per_s, self.started.unit)

    @property
    def peak_bytes(self) -> int | None:
        found = [each.peak_bytes for each in (*self.steps[-1:], self.ended) if each is not None and each.peak_bytes is not None]
        return max(found, default=None)

    @property
    def device_memory(self) -> Mapping[str, Any] | None:
        """What the GPU held at the last record, its peak over all of them; None without one."""
        found = [each.device_memory for each in self.steps if each.device_memory]
        peaks = [peak for each in found if (peak := finite(each.get("peak_bytes"))) is not None]
        return {**found[-1], "peak_bytes": max(peaks, default=None)} if found else None

    def loss_at(self, step: int) -> float | None:
        """The mean training loss of the record that ends at `step`."""
        return next((number(each.loss) for each in self.steps if each.step == step), None)

    def utilisation(self) -> Utilisation | None:
        """What `surefoot roofline` counted of this run's step; None before it did."""
        try:
            return read_utilisation(files.read_text(self.folder, FILE))
        except (OSError, UnicodeDecodeError):
            return None

    def weights(self) -> list[int]:
        """The steps whose weights are on disk."""
        return manifest.steps(self.folder)

    def parent(self) -> Mapping[str, Any] | None:
        """What a fork came from, as its newest commit that reads says."""
        for step in reversed(self.weights()):
            with contextlib.suppress(RunFolderError):
                return manifest.read(manifest.step_folder(self.folder, step)).parent
        return None

    def as_row(self) -> dict[str, Any]:
        """What every looking verb says of a run, for machines."""
        last, best = self.last, self.best
        return {
            "run": str(self.folder), "task": self.started.task, "state": self.state, "spec_id": self.started.spec_id,
            "steps": self.num_steps, "total_steps": self.started.total_steps, "score": last.score if last else None,
            "value": value_of(last), "best_value": value_of(best), "best_step": best.step if best else None,
            "elapsed_s": self.elapsed_s, "began_s": self.began_s, "attempts": self.num_attempts, **self.health.as_row(),
        }  # fmt: skip


def read(folder: Path, *, stuck_after_s: float | None = None) -> Past:
    """The run in `folder`; `stuck_after_s` as `find_health` takes it.

    Raises RunFolderError for a folder that is no run, or whose events are damaged or begin nowhere.
    """
    owner = runlock.find_owner(folder)
    every, damaged = read_records(folder)
    starts = [event for event in every if isinstance(event, Started)]
    if not starts:
        raise RunFolderError(
            f"{folder} holds no run that began: its {events.FILE} has no record of a start{f'; {damaged[0]}' if damaged else ''}",
            hint=f"surefoot resume {shlex.quote(str(folder))} goes on after its newest commit, and records a start"
            if damaged
            else None,
        )
    kept = events.newest(every)
    last_start = max(index for index, event in enumerate(every) if isinstance(event, Started))
    ends = [event for event in every[last_start:] if isinstance(event, Ended)]
    compared = [event for event in kept if isinstance(event, Memory)]
    return Past(
        folder=folder, started=starts[-1], steps=tuple(event for event in kept if isinstance(event, Step)),
        evaluations=tuple(event for event in kept if isinstance(event, Evaluated)),
        commits=tuple(event for event in kept if isinstance(event, Committed)),
        faults=tuple(event for event in kept if isinstance(event, Fault)), memory=compared[-1] if compared else None,
        ended=ends[-1] if ends else None, goodput=find_goodput(every), phases=find_phases(every),
        health=find_health(owner, every, stuck_after_s=stuck_after_s),
        began_s=starts[0].time_s, last_s=every[-1].time_s,
    )  # fmt: skip


def read_records(folder: Path) -> tuple[list[Event], list[str]]:
    """All records of a run, and a line for each that is damaged, which is printed as a warning too. Raises RunFolderError."""
    damaged: list[str] = []
    every = list(events.read(folder, damaged=damaged))
    for line in damaged:
        print(f"warning: {line}; the line is left out", file=sys.stderr)
    return every, damaged


def find(root: Path) -> Iterator[Path]:
    """The run folders below `root` (or `root` itself), in order of name; hidden folders and insides of runs are passed over.

    Behind them come the folders that this user may not list: each may hold a run.
    """
    forbidden: list[OSError] = []
    for folder, inside, names in os.walk(root, onerror=forbidden.append):
        if events.FILE in names:
            inside.clear()
            yield Path(folder)
        else:
            inside[:] = sorted((name for name in inside if not name.startswith(".")), key=_by_number)
    yield from (Path(error.filename) for error in forbidden if isinstance(error, PermissionError))


def holds_runs(folder: Path) -> bool:
    """Whether `folder` is no run itself and has runs below it."""
    return not (folder / events.FILE).exists() and next(find(folder), None) is not None


def _by_number(name: str) -> tuple[str, int]:
    """`digits-10` after `digits-9`."""
    stem = name.rstrip("0123456789")
    return stem, int(name[len(stem) :] or 0)


def number(value: Any) -> float | None:
    """A number as events hold it: one that is not finite is written as its name."""
    if isinstance(value, bool) or not isinstance(value, int | float | str):
        return None
    try:
        return float(value)
    except ValueError:
        return None


def finite(value: Any) -> float | None:
    """The number, None for one that is not finite: JSON has no other."""
    found = number(value)
    return found if found is not None and math.isfinite(found) else None


def value_of(evaluated: Evaluated | None) -> float | None:
    """The value that counts of an evaluation."""
    if evaluated is None:
        return None
    return finite(evaluated.loss if evaluated.score == "loss" else evaluated.metrics.get(evaluated.score))


def format_value(value: Any, unit: str) -> str:
    """`99.4 %`, `164.2`."""
    return format_percent(number(value)) if unit == "%" else format_number(number(value))


def format_metric(name: str, evaluated: Evaluated) -> str:
    """One value of an evaluation, with its unit."""
    if name == "loss":
        return format_number(number(evaluated.loss))
    return format_value(evaluated.metrics.get(name), evaluated.units.get(name, ""))


def format_score(past: Past, *, with_best: bool = True) -> str:
    """`accuracy 99.4 %`, and the best beside it where that was another; n/a before the first evaluation."""
    last, best = past.last, past.best
    if last is None:
        return UNKNOWN
    text = f"{last.score} {format_metric(last.score, last)}"
    same = not with_best or best is None or value_of(best) == value_of(last)
    return text if same or best is None else f"{text} (best {format_metric(best.score, best)})"
