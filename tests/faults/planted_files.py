"""Bugs that a forked trial may ask for.

How tests show that a campaign on files and disks finds them.
"""

from __future__ import annotations

import contextlib
import importlib
import os
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

from surefoot.components import checkpoint
from surefoot.components.checkpoint import Commit
from surefoot.components.checkpoint.background import Saver
from surefoot.components.stability.guard import Guard
from surefoot.contract import commits, digest, ledger, manifest
from surefoot.contract.manifest import Entry
from surefoot.core.errors import RunFolderError, StorageError
from surefoot.train.record.telling import Telling
from surefoot.train.resume.keeper import CheckpointManager

load, save, tensors = (
    importlib.import_module(f"surefoot.components.checkpoint.{name}")
    for name in ("load", "save", "tensor_files")
)


def plant(bug: str) -> partial[None]:
    """What a trial does first, to have this bug."""
    return partial(break_something, bug)


def break_something(bug: str) -> None:
    place, name, broken = PLANTED[bug]
    setattr(place, name, broken)


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


def any_own(self: CheckpointManager, commit: Any) -> None: ...


def load_before_it_is_verified(
    run: Path, load: Any, *, at_most: int | None = None
) -> tuple[int | None, list[str]]:
    troubles = []
    for step in reversed(manifest.named_steps(run)):
        try:
            load(Commit(run, step))
        except RunFolderError as error:
            troubles.append(error.message)
            commits.set_aside(manifest.step_folder(run, step))
            continue
        return step, troubles
    return None, troubles


def load_the_newest(
    run: Path, load: Any, *, at_most: int | None = None
) -> tuple[int | None, list[str]]:
    newest = manifest.named_steps(run)[-1]
    commits.check(manifest.step_folder(run, newest))
    load(Commit(run, newest))
    return newest, []


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


def sync_again(self: ledger.AppendOnlyFile) -> None:
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


PLANTED: Mapping[str, tuple[Any, str, Any]] = {
    "files are opened whatever they are": (commits, "open_file", opened_anyhow),
    "any name will do": (manifest, "NAME", AnyName),
    "a pickle is loaded": (load.Commit, "json", run_what_is_there),
    "memory is taken before the file is looked at": (tensors, "read", allocated_first),
    "scores are not looked at": (manifest, "check_score", lambda row: None),
    "an odd state is not caught": (checkpoint, "as_run_folder_errors", contextlib.nullcontext),
    "fsync is tried again": (os, "fsync", tried_again),
    "fsync may fail": (os, "fsync", carry_on),
    "the ledger is synced again": (ledger.AppendOnlyFile, "sync", sync_again),
    "room is made before the save": (checkpoint, "commit", make_room_first),
    "a failed save ends the run": (Telling, "give_up", end_at_once),
    "a failed save is not told": (Telling, "fault", lambda self, fault: None),
    "a failed save is told twice": (Telling, "give_up", told_twice),
    "a save does not wait for the one before": (Saver, "finish", never_waits),
    "digests are not compared": (digest, "digest_of_bytes", lambda data: digest.combine([])),
    "the digest of a manifest is not its own": (manifest, "_digest", lambda row: ""),
    "a manifest that is gone is no damage": (manifest, "named_steps", manifest.steps),
    "neither size nor kind is looked at": (commits, "open_file", opened_anyhow),
    "what is damaged is deleted": (commits, "set_aside", commits.remove),
    "what is damaged is not told": (Telling, "fault", lambda self, fault: None),
    "the wrong commit is named": (
        Guard,
        "damaged_commit",
        lambda self, step, detail: self.storage_fault(step, "?", "one"),
    ),
    "a damaged commit ends the run": (checkpoint, "newest_loadable", load_the_newest),
    "the commit of another run is as good": (CheckpointManager, "_check_own", any_own),
    "a commit is loaded before it is verified": (
        checkpoint,
        "newest_loadable",
        load_before_it_is_verified,
    ),
}
