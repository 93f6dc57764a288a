"""TensorBoard beside the events: a thin reader of the same records. Loaded late, so that a run starts without it."""

from __future__ import annotations

import importlib.util
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from surefoot.contract.events import PHASES, Evaluated, Event, Step
from surefoot.contract.run_folder import files
from surefoot.core.errors import MissingExtra, StorageError

FIRST_WRITE_S = 10.0  # importing TensorBoard costs about half a second: not before the first steps are done


class TensorBoard:
    """Writes scalars of Step and Evaluated records below `folder`; `purge_step` cuts off what an earlier attempt wrote from there on.

    `wanted` None means: when the extra is installed. Raises MissingExtra when it was asked for and is not.
    """

    def __init__(self, folder: Path, *, wanted: bool | None, purge_step: int | None = None) -> None:
        installed = importlib.util.find_spec("tensorboard") is not None
        if wanted and not installed:
            raise MissingExtra("tensorboard", extra="tensorboard", needed_for="observe.tensorboard")
        self._on = installed if wanted is None else wanted
        self._folder, self._purge_step = folder, purge_step
        self._waiting: list[Event] = []
        self._writer: Any = None
        self._hook_before: Callable[[threading.ExceptHookArgs], Any] | None = None
        self._since_s = time.monotonic()

    def write(self, event: Event) -> None:
        """Take a record up, and write now and then. Raises StorageError once, when the files cannot be written; then it is off."""
        if not self._on or not isinstance(event, Step | Evaluated):
            return
        self._waiting.append(event)
        if time.monotonic() - self._since_s > FIRST_WRITE_S:
            self._flush()

    def _flush(self) -> None:
        try:
            if self._writer is None and self._waiting:
                from torch.utils.tensorboard import SummaryWriter

                files.check_no_link(self._folder.parent, self._folder.name)
                self._hush_writers()
                self._writer = SummaryWriter(str(self._folder), purge_step=self._purge_step)
            for event in self._waiting:
                for name, value, step in scalars(event):
                    self._writer.add_scalar(name, value, step, walltime=event.time_s)
            for name, value, step in phase_shares([event for event in self._waiting if isinstance(event, Step)]):
                self._writer.add_scalar(name, value, step)
        except Exception as error:
            raise self._given_up(error) from error
        self._waiting.clear()
        self._since_s = time.monotonic()

    def close(self) -> None:
        """Write what waits. Raises StorageError when the files cannot be written."""
        if not self._on:
            return
        self._flush()
        try:
            if self._writer is not None:
                self._writer.close()
        except Exception as error:
            raise self._given_up(error) from error
        self._turn_off()

    def _given_up(self, error: Exception) -> StorageError:
        """A plot that cannot be written, for whatever reason, is no reason to end a run."""
        self._turn_off()
        return StorageError(f"TensorBoard's files in {self._folder} cannot be written: {error}")

    def _hush_writers(self) -> None:
        """TensorBoard's own thread raises what the disk refused, and hands it to whoever writes next: told once is enough."""
        before = threading.excepthook

        def hook(arguments: threading.ExceptHookArgs) -> None:
            if not type(arguments.thread).__module__.startswith("tensorboard."):
                before(arguments)

        threading.excepthook, self._hook_before = hook, before

    def _turn_off(self) -> None:
        self._on = False
        if self._hook_before is not None:
            threading.excepthook, self._hook_before = self._hook_before, None


def scalars(event: Event) -> list[tuple[str, float, int]]:
    """(name, value, step) of each number of a record that is one."""
    if isinstance(event, Step):
        rows: dict[str, Any] = {
            "train/loss": event.loss, "train/gradient_norm": event.gradient_norm, "train/samples_per_s": event.samples_per_s,
            **{f"train/rate/{name}": rate for name, rate in event.learning_rates.items()},
        }  # fmt: skip
        if len(event.terms) > 1:
            rows |= {f"train/loss/{name}": value for name, value in event.terms.items()}
        return [(name, float(value), event.step) for name, value in rows.items() if isinstance(value, int | float)]
    if isinstance(event, Evaluated):
        rows = {"loss": event.loss, **event.metrics}
        return [
            (f"{event.split}/{name}", float(value), event.step) for name, value in rows.items() if isinstance(value, int | float)
        ]
    return []


def phase_shares(steps: Sequence[Step]) -> list[tuple[str, float, int]]:
    """(name, share of the wall time, step) of each phase over these records: one point for all of them, which costs less than one each."""
    sums = {name: sum(event.phases.get(name, 0.0) for event in steps) for name in PHASES}
    total = sum(sums.values())
    return [(f"phases/{name}", seconds / total, steps[-1].step) for name, seconds in sums.items() if seconds]
