"""Record of the end of an attempt in the run's event log, if its ranks could not write one.

A rank that the kernel or the supervisor kills records no end. The supervisor then writes a `Fault`
record, once all ranks have ended. Where there is no supervisor, as under torchrun, the process that
detects a hang (`cli/watch`) writes the record.
"""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Callable
from pathlib import Path

from surefoot.contract import events, runlock
from surefoot.contract.run_folder import files
from surefoot.control.launch.decide import ExitKind
from surefoot.control.launch.elastic import AttemptEnd
from surefoot.core.errors import LostRank, RunFolderError

FAULTS = {
    ExitKind.HUNG: "hang",
    ExitKind.APART: "different-collectives",
    ExitKind.KILLED: "killed",
    ExitKind.SHORT: events.KILLED_FOR_MEMORY,
    ExitKind.CRASHED: "crashed",
    ExitKind.ABORTED: "aborted",
    ExitKind.RAISED: "failed",
    ExitKind.LEFT: "exited",
    ExitKind.PARTED: "disconnected",
}
WAIT_S, LOOK_S = 2.0, 0.02  # processes that a killed rank started may hold the lock a little longer


def record_fault(
    run: Path,
    end: AttemptEnd,
    *,
    after: int,
    say: Callable[[str], None],
    generation: int | None = None,
) -> None:
    """Append a `Fault` record on the end of an attempt to the event log of a run.

    Nothing is written if a signal to the supervisor ended the attempt, if the attempt recorded the
    error with which it ended, or if it ended before it wrote to the log.

    Args:
        run: folder of the run.
        end: end of the attempt.
        after: generation of the run before the attempt; each attempt increases it.
        say: prints a warning if the log cannot be written.
        generation: generation of the attempt, if it is known; a record on an attempt that a later
            one has followed is not written.
    """
    if end.is_asked or end.fault is None or end.fault.how not in FAULTS:
        return
    try:
        _wait_for_lock(run)
        with runlock.keep_out(run):
            newest = runlock.read_generation(run)
            is_other = newest <= after or generation not in (None, newest)
            if is_other or _has_recorded_end(run, newest):
                return
            fault = events.Fault(
                generation=newest,
                time_s=time.time(),
                step=end.step,
                fault=FAULTS[end.fault.how],
                rank=end.fault.rank,
                host=socket.gethostname(),
                action="all ranks were ended",
                detail=end.fault.cause,
            )
            _append(run, fault.as_line().encode())
    except RunFolderError as error:
        say(f"warning: the end of the ranks is not in the log: {error.message}")
    except OSError as error:
        say(f"warning: the end of the ranks is not in the log: {error.filename}: {error.strerror}")


def _wait_for_lock(run: Path) -> None:
    until_s = time.monotonic() + WAIT_S
    while runlock.is_held(run) and time.monotonic() < until_s:
        time.sleep(LOOK_S)


def _has_recorded_end(run: Path, generation: int) -> bool:
    """Return whether attempt `generation` recorded an end other than a lost rank.

    If the log does not have the start of this attempt, return True too: no fault could belong to
    it.
    """
    mine = [
        each
        for each in events.read(run, events.Started, events.Ended)
        if each.generation == generation
    ]
    ends = [each.exit_code for each in mine if isinstance(each, events.Ended)]
    return not mine or any(code != LostRank.exit_code for code in ends)


def _append(run: Path, line: bytes) -> None:
    """Append a line to the event log, and sync the log to disk.

    Raises:
        OSError: if the line cannot be written; the log is then unchanged.
    """
    descriptor = files.open_descriptor(run, events.FILE, os.O_RDWR | os.O_APPEND)
    try:
        files.cut_torn_line(descriptor)
        size = os.fstat(descriptor).st_size
        try:
            files.append_whole(descriptor, line)
            os.fsync(descriptor)
        except OSError as error:
            os.ftruncate(descriptor, size)
            error.filename = str(run / events.FILE)
            raise
    finally:
        os.close(descriptor)
