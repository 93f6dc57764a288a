"""Files and total size of a run folder, and exclusive access to it."""

from __future__ import annotations

import contextlib
import os
import stat
from collections.abc import Iterator
from pathlib import Path

from surefoot.contract import events, runlock
from surefoot.contract.run_folder import files
from surefoot.core.errors import RunFolderError


def list_files(run: Path) -> list[tuple[Path, os.stat_result]]:
    """Return every regular file below `run` with its `stat` result, sorted by path.

    Symbolic links are neither followed nor listed. Files that are deleted during the call are left
    out.
    """
    found = []
    for folder, inside, names in os.walk(run):
        inside.sort()
        for name in sorted(names):
            path = Path(folder) / name
            with contextlib.suppress(OSError):
                if stat.S_ISREG((status := path.lstat()).st_mode):
                    found.append((path, status))
    return found


def count_bytes(run: Path) -> int:
    """Return the total size of a run's files in bytes.

    A file that several checkpoints share by hard links counts once.
    """
    return sum(
        {(status.st_dev, status.st_ino): status.st_size for _, status in list_files(run)}.values()
    )


def check_is_run(run: Path) -> None:
    """Raise RunFolderError if `run` is not a run folder, or is a symbolic link to one."""
    log = run / events.FILE
    if run.is_symlink():
        raise RunFolderError(f"{run} is a link", hint="surefoot runs lists the runs below a folder")
    if log.is_symlink() or not log.is_file():
        raise files.no_run(run, events.FILE)


@contextlib.contextmanager
def lock_run(run: Path) -> Iterator[None]:
    """Prevent other processes from writing the run, inside the context.

    Raises:
        RunFolderError: if a process is writing the run, or if the run may be running on a different
            host, whose processes cannot be inspected from this host.
    """
    from surefoot.control.diagnose import find_health

    check_is_run(run)
    owner = runlock.find_owner(run)
    try:
        every = list(events.read(run))
    except RunFolderError:
        every = []  # damaged: it does not show whether the run is running, so the lock decides
    if (
        any(isinstance(event, events.Started) for event in every)
        and find_health(owner, every).state == "unknown"
    ):
        raise RunFolderError(
            (
                f"{run} may be running on {owner.host or 'another host'}, whose processes "
                "cannot be inspected from this host"
            ),
            hint="run this command on that host",
        )
    with runlock.keep_out(run):
        yield
