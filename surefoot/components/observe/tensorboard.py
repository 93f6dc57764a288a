"""TensorBoard writer for Step and Evaluated events, and the process that runs it beside a run.

The process reads the log of the run, so that the training process neither imports the tensorboard
package nor spends time on it.
"""

from __future__ import annotations

import contextlib
import importlib.util
import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from surefoot.contract import events
from surefoot.contract.events import PHASES, Evaluated, Event, Step
from surefoot.contract.run_folder import files
from surefoot.core import place
from surefoot.core.errors import MissingExtra, StorageError

FIRST_WRITE_S = 10.0  # importing TensorBoard takes about 0.5 s, so it waits for the first steps
MAX_END_S = 120.0  # for the process to write what is left, on a slow disk
MAX_ABANDON_S = 2.0  # the same after a failure, which does not wait for plots
CHILD = (
    "import json, sys; sys.path[:] = json.loads(sys.argv[1]); "
    f"from {__name__} import main; sys.exit(main(sys.argv[2]))"
)


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
        self._on = is_written(wanted)
        self._folder, self._purge_step = folder, purge_step
        self._waiting: list[Event] = []
        self._records: Any = None
        self._since_s = time.monotonic()

    def write(self, event: Event) -> None:
        """Buffer an event, and write the buffered events every `FIRST_WRITE_S` seconds.

        Raises StorageError if the files cannot be written. After that, the writer does nothing.
        """
        self.add(event)
        if self._on and self._waiting and time.monotonic() - self._since_s > FIRST_WRITE_S:
            self.flush()

    def add(self, event: Event) -> None:
        """Buffer an event until the next call of `flush`."""
        if self._on and isinstance(event, Step | Evaluated):
            self._waiting.append(event)

    def flush(self) -> None:
        """Write the buffered events. Raises StorageError as `write` does."""
        if not self._on:
            return
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
        self.flush()
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
        return _as_storage_error(self._folder, error)

    def _close_quietly(self) -> None:
        self._on = False
        if self._records is not None:
            with contextlib.suppress(OSError):  # a disk that refused a record refuses the rest too
                self._records.close()


def is_written(wanted: bool | None) -> bool:
    """Return whether TensorBoard files are written: as `wanted`, or if tensorboard is installed.

    Raises MissingExtra if they are wanted and tensorboard is not installed.
    """
    installed = importlib.util.find_spec("tensorboard") is not None
    if wanted and not installed:
        raise MissingExtra("tensorboard", extra="tensorboard", needed_for="observe.tensorboard")
    return installed if wanted is None else wanted


class TensorBoardOfRun:
    """TensorBoard files of a run, written from its log by a process of their own.

    The process starts `FIRST_WRITE_S` seconds after the run. The files of a run that ends before
    are written by the run itself. A run that is killed leaves files with all that is in its log.

    Args:
        home: The folder of the log; the files are in its folder `tensorboard`.
        wanted: Whether to write; None writes if tensorboard is installed.
        purge_step: The step from which TensorBoard hides the events of earlier attempts; None hides
            no events.

    Raises:
        MissingExtra: If `wanted` is true and tensorboard is not installed.
    """

    def __init__(self, home: Path, *, wanted: bool | None, purge_step: int | None = None) -> None:
        self._on, self._home, self._purge_step = is_written(wanted), home, purge_step
        self._process: subprocess.Popen[str] | None = None
        self._waiting: list[Event] = []
        self._offset = self._generation = 0
        self._since_s = time.monotonic()

    def begin(self, generation: int) -> None:
        """Take the events of `generation` in the rest of the log as those of this attempt."""
        self._generation = generation
        if self._on:
            self._offset = (self._home / events.FILE).stat().st_size

    def write(self, event: Event) -> None:
        """Let the process write `event`, which is in the log.

        Raises StorageError if the files cannot be written. After that, the writer does nothing.
        """
        if not self._on:
            return
        if self._process is not None:
            if self._process.poll() is not None:
                self._end_process(is_early=True)
        elif time.monotonic() - self._since_s < FIRST_WRITE_S:
            self._waiting.append(event)
        else:
            self._waiting.clear()
            self._start()

    def _start(self) -> None:
        given = [str(self._home), self._offset, self._generation, self._purge_step]
        try:
            self._process = subprocess.Popen(
                [sys.executable, "-P", "-c", CHILD, json.dumps(sys.path), json.dumps(given)],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,
                text=True,
                process_group=0,
                env=place.child_environment(threads=1),
            )
        except (OSError, TypeError, ValueError) as error:  # without an interpreter, or a folder
            self._on = False
            raise _as_storage_error(self._home / "tensorboard", error) from error

    def close(self) -> None:
        """Write the rest of the log and end the process.

        Raises StorageError if the files cannot be written.
        """
        if not self._on:
            return
        if self._process is not None:
            self._end_process()
            return
        self._on, board = False, self._open_board()
        for event in self._waiting:
            board.write(event)
        board.close()

    def _open_board(self) -> TensorBoard:
        return TensorBoard(self._home / "tensorboard", wanted=True, purge_step=self._purge_step)

    def _end_process(self, *, is_early: bool = False) -> None:
        """Let the process write the rest and end. Raises StorageError if it failed.

        With `is_early` it has ended already, which is a failure.
        """
        process, self._process, self._on = self._process, None, False
        assert process is not None
        try:
            # a line, since processes that are forked meanwhile keep the pipe open
            said, _ = process.communicate("end\n", timeout=MAX_END_S)
        except subprocess.TimeoutExpired:
            process.kill()
            said = f"they are not written after {MAX_END_S:g} s"
        if process.wait() or is_early:
            raise _as_storage_error(self._home / "tensorboard", said.strip() or "its process died")

    def abandon(self) -> None:
        """Let the process write the rest of the log, and wait for it only for a moment."""
        process, self._process, self._on = self._process, None, False
        if process is not None:
            with contextlib.suppress(subprocess.TimeoutExpired, OSError):
                process.communicate("end\n", timeout=MAX_ABANDON_S)


def _as_storage_error(folder: Path, error: object) -> StorageError:
    return StorageError(f"TensorBoard's files in {folder} cannot be written: {error}")


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


def follow_log(home: Path, offset: int, generation: int, purge_step: int | None) -> None:
    """Write TensorBoard files from the log in `home`, until standard input has a line or ends.

    It also ends with its parent process. The events of `generation` are read, from the byte
    `offset` of the log. Raises StorageError if the files cannot be written.
    """
    parent = os.getppid()
    board = TensorBoard(home / "tensorboard", wanted=True, purge_step=purge_step)
    is_over, rest, ended = False, b"", threading.Event()

    def wait_for_end() -> None:  # in a thread, since Windows cannot wait for a pipe with a timeout
        while (data := os.read(0, 1024)) and b"\n" not in data:
            pass
        ended.set()

    threading.Thread(target=wait_for_end, daemon=True).start()
    with files.open_file(home, events.FILE) as log:
        log.seek(offset)
        while not is_over:
            is_over = ended.wait(FIRST_WRITE_S) or os.getppid() != parent
            *lines, rest = (rest + log.read()).split(b"\n")
            for line in lines:
                event = events.parse_line(line.decode(errors="replace"))
                if event is not None and event.generation == generation:
                    board.add(event)
            board.flush()
    board.close()


def main(words: str) -> int:
    """Follow the log that `words` name, as JSON; print the reason of a failure."""
    for name in ("SIGINT", "SIGTERM", "SIGHUP"):  # no SIGHUP on Windows
        if hasattr(signal, name):  # the end of the run ends this process
            signal.signal(getattr(signal, name), signal.SIG_IGN)
    home, *given = json.loads(words)
    try:
        follow_log(Path(home), *given)
    except StorageError as error:
        print(error.message.partition(" cannot be written: ")[2] or error.message)
        return 1
    except OSError as error:
        print(error.strerror or error)
        return 1
    return 0
