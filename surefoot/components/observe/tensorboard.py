"""TensorBoard beside the events: a thin reader of the same records. Loaded late, so that a run starts without it."""

from __future__ import annotations

import contextlib
import importlib.util
import os
import socket
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from surefoot.contract.events import PHASES, Evaluated, Event, Step
from surefoot.contract.run_folder import files
from surefoot.core.errors import MissingExtra, StorageError

FIRST_WRITE_S = 10.0  # importing TensorBoard costs about half a second: not before the first steps are done


class TensorBoard:
    """Writes scalars of Step and Evaluated records below `folder`; `purge_step` cuts off what an earlier attempt wrote from there on.

    The file is written here and now. TensorBoard's own writer has a thread for it, and whoever waits for that thread waits forever
    where it has ended: at a MemoryError between taking a record and saying so.

    `wanted` None means: when the extra is installed. Raises MissingExtra when it was asked for and is not.
    """

    def __init__(self, folder: Path, *, wanted: bool | None, purge_step: int | None = None) -> None:
        installed = importlib.util.find_spec("tensorboard") is not None
        if wanted and not installed:
            raise MissingExtra("tensorboard", extra="tensorboard", needed_for="observe.tensorboard")
        self._on = installed if wanted is None else wanted
        self._folder, self._purge_step = folder, purge_step
        self._waiting: list[Event] = []
        self._records: Any = None
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
            if self._records is None and self._waiting:
                self._open()
            for event in self._waiting:
                self._add(event.time_s, scalars(event))
            self._add(time.time(), phase_shares([event for event in self._waiting if isinstance(event, Step)]))
            if self._records is not None:
                self._records.flush()
        except Exception as error:
            raise self._given_up(error) from error
        self._waiting.clear()
        self._since_s = time.monotonic()

    def _open(self) -> None:
        """A new file of TensorBoard's name and form, which begins with its version, and with the step to cut at where there is one."""
        from tensorboard.compat.proto.event_pb2 import Event as Record
        from tensorboard.compat.proto.event_pb2 import SessionLog
        from tensorboard.summary.writer.record_writer import RecordWriter

        now_s = time.time()
        name = f"events.out.tfevents.{int(now_s):010d}.{socket.gethostname()}.{os.getpid()}.{time.monotonic_ns()}"
        folder = files.make_folder(self._folder.parent, self._folder.name)
        self._records = RecordWriter(files.open_new(folder, name))
        self._records.write(Record(wall_time=now_s, file_version="brain.Event:2").SerializeToString())
        if self._purge_step is not None:
            start = SessionLog(status=SessionLog.START)
            self._records.write(Record(wall_time=now_s, step=self._purge_step, session_log=start).SerializeToString())

    def _add(self, time_s: float, rows: Sequence[tuple[str, float, int]]) -> None:
        if not rows:
            return
        from tensorboard.compat.proto.event_pb2 import Event as Record
        from tensorboard.compat.proto.summary_pb2 import Summary

        summary = Summary(value=[Summary.Value(tag=name, simple_value=value) for name, value, _ in rows])
        self._records.write(Record(wall_time=time_s, step=rows[0][2], summary=summary).SerializeToString())

    def close(self) -> None:
        """Write what waits. Raises StorageError when the files cannot be written."""
        if not self._on:
            return
        self._flush()
        self._turn_off()

    def _given_up(self, error: Exception) -> StorageError:
        """A plot that cannot be written, for whatever reason, is no reason to end a run."""
        self._turn_off()
        return StorageError(f"TensorBoard's files in {self._folder} cannot be written: {error}")

    def _turn_off(self) -> None:
        self._on = False
        if self._records is not None:
            with contextlib.suppress(OSError):  # a disk that refused the content refuses the rest of it as well
                self._records.close()


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
