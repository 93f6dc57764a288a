"""Writer of `events.jsonl`, which appends complete lines, each with one write.

If the disk is full, lines are buffered, and are written before the next line. A full disk ends the
run only when more than `MAX_HELD_BYTES` are buffered.
"""

from __future__ import annotations

import contextlib
import os
from pathlib import Path

from surefoot.contract import events
from surefoot.contract.commits import sync_folder
from surefoot.contract.run_folder import files
from surefoot.core.errors import StorageError, hint_unwritten
from surefoot.core.place import close_in_children

MAX_HELD_BYTES = 1 << 20  # hours of a run with one record per second


class NoJournal:
    """Journal that records nothing, for a finished run that is opened again."""

    def begin(self, event: events.Event) -> None: ...

    def write(self, event: events.Event) -> str | None:
        return None

    def flush(self) -> None: ...

    def sync(self) -> None: ...

    def close(self) -> None: ...

    def abandon(self) -> None: ...


class Journal:
    """Writer that appends events to a run's `events.jsonl`.

    Raises StorageError if the disk refuses lines for too long. The lines that were written before
    stay complete.
    """

    def __init__(self, folder: Path) -> None:
        self._path, self._descriptor = folder / events.FILE, -1
        close_in_children(self)
        self._held = b""
        self._lost_sync = False
        try:
            self._descriptor = files.open_descriptor(
                folder, events.FILE, os.O_RDWR | os.O_APPEND | os.O_CREAT
            )
        except OSError as error:
            raise self._write_error(error) from error
        try:
            files.cut_torn_line(self._descriptor)
        except OSError as error:
            os.close(self._descriptor)
            raise self._write_error(error) from error

    def _write_error(self, error: OSError) -> StorageError:
        return StorageError(
            f"{self._path} cannot be written: {error.strerror}", hint=hint_unwritten(error)
        )

    def begin(self, event: events.Event) -> None:
        """Write the first record of an attempt, and sync it and its folder to disk.

        No later record can then survive a power failure without it. Raises StorageError if the disk
        refuses the record.
        """
        self._held = event.as_line().encode()
        self.sync()
        try:
            sync_folder(self._path.parent)
        except OSError as error:
            raise self._write_error(error) from error

    def write(self, event: events.Event) -> str | None:
        """Append a record; return a warning if the disk starts to refuse lines, otherwise None.

        Raises StorageError if more than `MAX_HELD_BYTES` are buffered.
        """
        was_held = bool(self._held)
        self._held += event.as_line().encode()
        error = self._write_held()
        if error is not None and len(self._held) > MAX_HELD_BYTES:
            raise self._write_error(error) from error
        return (
            None
            if error is None or was_held
            else f"{self._write_error(error).message}; its lines are kept in memory until it can"
        )

    def flush(self) -> None:
        """Write the buffered lines if the disk takes them."""
        self._write_held()

    def _write_held(self) -> OSError | None:
        """Write all buffered lines or none of them; return the error if the disk refuses them."""
        if not self._held:
            return None
        try:
            files.append_whole(self._descriptor, self._held)
        except OSError as error:
            return error
        self._held = b""
        return None

    def sync(self) -> None:
        """Write the buffered lines, and fsync the file.

        It is called before a checkpoint, so that the steps of the checkpoint are in the log even
        after a power failure. Raises StorageError if it fails. After a failed fsync, later calls do
        not call fsync again, because a second fsync would not report the data that the first one
        lost.
        """
        unwritten = self._write_held()
        if unwritten is not None:
            raise self._write_error(unwritten) from unwritten
        if self._lost_sync:
            return
        try:
            os.fsync(self._descriptor)
        except OSError as error:
            self._lost_sync = True
            raise self._write_error(error) from error

    def close(self) -> None:
        """Write the buffered lines, sync and close the file.

        Raises StorageError if the lines do not reach the disk.
        """
        if self._descriptor < 0:
            return
        try:
            self.sync()
        finally:
            os.close(self._descriptor)
            self._descriptor = -1

    def abandon(self) -> None:
        """Close the file after a different error, without raising StorageError."""
        with contextlib.suppress(StorageError):
            self.close()
