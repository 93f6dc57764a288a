"""The process that forks trials, with bugs that a trial may ask for: how tests show that a campaign on files and disks finds them."""

from __future__ import annotations

import contextlib
import importlib
import os
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from surefoot.components import checkpoint
from surefoot.components.checkpoint.background import Saver
from surefoot.contract import commits, ledger, manifest
from surefoot.contract.manifest import Entry
from surefoot.core.errors import StorageError
from surefoot.prove.campaigns import server
from surefoot.train.record.telling import Telling

load, save, tensors = (importlib.import_module(f"surefoot.components.checkpoint.{name}") for name in ("load", "save", "tensors"))
SERVER = (sys.executable, "-m", "tests.faults.planted_files")


def put(place: Any, name: str, broken: Any) -> Callable[[], None]:
    return lambda: setattr(place, name, broken)


# ---- what opens files


@contextlib.contextmanager
def opened_anyhow(place: Path, entry: Entry) -> Any:
    descriptor = os.open(place / entry.name, os.O_RDONLY | os.O_NONBLOCK)
    try:
        yield descriptor
    finally:
        os.close(descriptor)


class AnyName:
    """A pattern that everything matches."""

    @staticmethod
    def match(text: str) -> bool:
        return True


def run_what_is_there(self: Any, name: str) -> Any:
    """What a reader does that takes a file for a pickle."""
    import pickle

    data = self.text(name)
    return pickle.loads(data) if data.startswith(b"c") else __import__("json").loads(data)


def allocated_first(place: Path, entry: Entry, give: Any, pool: Any) -> Any:
    for name, piece in (entry.tensors or {}).items():
        tensors.torch.empty(piece.shape, dtype=tensors.NAMES[piece.dtype])
        del name
    return real_read(place, entry, give, pool)


real_read = tensors.read


# ---- what saves


def tried_again(descriptor: int) -> None:
    try:
        real_fsync(descriptor)
    except OSError:
        real_fsync(descriptor)


def carry_on(descriptor: int) -> None:
    with contextlib.suppress(OSError):
        real_fsync(descriptor)


real_fsync = os.fsync


def sync_again(self: ledger.Appended) -> None:
    try:
        self._flush()
        os.fsync(self._descriptor)
    except OSError as error:
        raise StorageError(str(error)) from error
    self.num_synced += len(self._rows)
    self._rows, self._num_written = bytearray(), 0


def make_room_first(run: Path, content: Any, stamp: Any, **more: Any) -> Any:
    for step in manifest.steps(run)[:-1]:
        commits.remove(manifest.step_folder(run, step))
    newest = manifest.steps(run)
    if newest:
        (manifest.step_folder(run, newest[-1]) / "clock.json").unlink()
    return real_commit(run, content, stamp, **more)


real_commit = save.commit


def end_at_once(self: Telling, what: str, error: StorageError, step: int) -> None:
    raise error


def told_twice(self: Telling, what: str, error: StorageError, step: int) -> None:
    for _ in range(2):
        real_give_up(self, what, error, step)


real_give_up = Telling.give_up


def never_waits(self: Saver, *, wait: bool) -> Any:
    if self._thread is not None and self._confirmed.is_set():
        self._thread = None
    return None


PLANTED: Mapping[str, Callable[[], None]] = {
    "files are opened whatever they are": put(commits, "opened", opened_anyhow),
    "any name will do": put(manifest, "NAME", AnyName),
    "a pickle is loaded": put(load.Commit, "json", run_what_is_there),
    "memory is taken before the file is looked at": put(tensors, "read", allocated_first),
    "scores are not looked at": put(manifest, "check_score", lambda row: None),
    "an odd state is not caught": put(checkpoint, "taken_from", contextlib.nullcontext),
    "fsync is tried again": put(os, "fsync", tried_again),
    "fsync may fail": put(os, "fsync", carry_on),
    "the ledger is synced again": put(ledger.Appended, "sync", sync_again),
    "room is made before the save": put(checkpoint, "commit", make_room_first),
    "a failed save ends the run": put(Telling, "give_up", end_at_once),
    "a failed save is not told": put(Telling, "fault", lambda self, fault: None),
    "a failed save is told twice": put(Telling, "give_up", told_twice),
    "a save does not wait for the one before": put(Saver, "finish", never_waits),
}

if __name__ == "__main__":
    server.main(PLANTED)
