"""TensorBoard writer for Step and Evaluated events.

The tensorboard package is imported after the first steps, so that a run starts without waiting for
it.
"""

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

FIRST_WRITE_S = 10.0  # importing TensorBoard takes about 0.5 s, so it waits for the first steps


class TensorBoard:
    """Writer of the scalars of Step and Evaluated events to TensorBoard files in `folder`.

    The file is written in the calling thread. TensorBoard's own writer uses a second thread. If
    that thread has died, for example because of a MemoryError, waiting for it hangs forever.

    Args:
        folder: The folder of the event files.
        wanted: Whether to write; None writes if tensorboard is installed.
        purge_step: The step from which TensorBoard hides the events of earlier attempts; None hides
            no events.

    Raises:
        MissingExtra: If `wanted` is true and tensorboard is not installed.
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
        """Buffer an event, and write the buffered events every `FIRST_WRITE_S` seconds.

        Raises StorageError if the files cannot be written. After that, the writer does nothing.
        """
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
            self._add(
                time.time(),
                phase_shares([event for event in self._waiting if isinstance(event, Step)]),
            )
            if self._records is not None:
                self._records.flush()
        except Exception as error:
            raise self._disable(error) from error
        self._waiting.clear()
        self._since_s = time.monotonic()

    def _open(self) -> None:
        """Create an event file with TensorBoard's name and format.

        Its first record is the version. Next comes the purge step, if it is not None.
        """
        from tensorboard.compat.proto.event_pb2 import SessionLog
        from tensorboard.summary.writer.record_writer import RecordWriter

        now_s = time.time()
        name = (
            f"events.out.tfevents.{int(now_s):010d}.{socket.gethostname()}."
            f"{os.getpid()}.{time.monotonic_ns()}"
        )
        folder = files.make_folder(self._folder.parent, self._folder.name)
        self._records = RecordWriter(files.open_new(folder, name))
        self._write_record(now_s, version="brain.Event:2")
        if self._purge_step is not None:
            self._write_record(
                now_s, step=self._purge_step, start=SessionLog(status=SessionLog.START)
            )

    def _add(self, time_s: float, rows: Sequence[tuple[str, float, int]]) -> None:
        if not rows:
            return
        from tensorboard.compat.proto.summary_pb2 import Summary

        summary = Summary(
            value=[Summary.Value(tag=name, simple_value=value) for name, value, _ in rows]
        )
        self._write_record(time_s, step=rows[0][2], summary=summary)

    def _write_record(
        self,
        time_s: float,
        *,
        step: int | None = None,
        version: str | None = None,
        start: Any = None,
        summary: Any = None,
    ) -> None:
        """Write one record: the file version, the start of an attempt at `step`, or scalars."""
        from tensorboard.compat.proto.event_pb2 import Event as Record

        record = Record(
            wall_time=time_s, step=step, file_version=version, session_log=start, summary=summary
        )
        self._records.write(record.SerializeToString())

    def close(self) -> None:
        """Write the buffered events and close the file.

        Raises StorageError if the files cannot be written.
        """
        if not self._on:
            return
        self._flush()
        try:
            if self._records is not None:
                self._records.close()
        except OSError as error:  # some file systems report at the close what they could not write
            raise self._disable(error) from error
        self._close_quietly()

    def _disable(self, error: Exception) -> StorageError:
        """Turn the writer off and return the StorageError to raise.

        The caller continues the run, which does not need its plots.
        """
        self._close_quietly()
        return StorageError(f"TensorBoard's files in {self._folder} cannot be written: {error}")

    def _close_quietly(self) -> None:
        self._on = False
        if self._records is not None:
            with contextlib.suppress(OSError):  # a disk that refused a record refuses the rest too
                self._records.close()


def scalars(event: Event) -> list[tuple[str, float, int]]:
    """Return (name, value, step) for each numeric value of an event; None values are left out."""
    if isinstance(event, Step):
        rows: dict[str, Any] = {
            "train/loss": event.loss,
            "train/gradient_norm": event.gradient_norm,
            "train/samples_per_s": event.samples_per_s,
            **{f"train/rate/{name}": rate for name, rate in event.learning_rates.items()},
        }
        if len(event.terms) > 1:
            rows |= {f"train/loss/{name}": value for name, value in event.terms.items()}
        return [
            (name, float(value), event.step)
            for name, value in rows.items()
            if isinstance(value, int | float)
        ]
    if isinstance(event, Evaluated):
        rows = {"loss": event.loss, **event.metrics}
        return [
            (f"{event.split}/{name}", float(value), event.step)
            for name, value in rows.items()
            if isinstance(value, int | float)
        ]
    return []


def phase_shares(steps: Sequence[Step]) -> list[tuple[str, float, int]]:
    """Return (name, share of the wall time, step) for each phase, summed over `steps`.

    The step is the last of `steps`. One point for all steps costs less than one point for each
    step.
    """
    sums = {name: sum(event.phases.get(name, 0.0) for event in steps) for name in PHASES}
    total = sum(sums.values())
    return [
        (f"phases/{name}", seconds / total, steps[-1].step)
        for name, seconds in sums.items()
        if seconds
    ]
