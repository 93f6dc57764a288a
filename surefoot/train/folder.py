"""Which folder a run writes into: a new one, or an unfinished one of the same spec and code."""

from __future__ import annotations

import hashlib
import shutil
from dataclasses import dataclass
from pathlib import Path

from surefoot.contract import events, signature, spec_file
from surefoot.contract.events import Ended, Started
from surefoot.contract.spec import RunSpec
from surefoot.contract.task import find_use
from surefoot.core.errors import RunFolderError

SPEC_FILE = "spec.toml"
FINISHED = ("finished", "stopped")
LEAST_FREE_BYTES = 1 << 20


@dataclass(frozen=True)
class Chosen:
    """The folder of a run, whether an attempt at it exists, and what to tell the user about the choice."""

    folder: Path
    is_again: bool
    notes: tuple[str, ...] = ()


def code_digest(use: str | None, task: object) -> str:
    """SHA-256 of the source of the task's module; of its type's name where there is no source."""
    known = use or find_use(task)
    path = signature.find_source(known) if known else None
    if path is not None and path.is_file():
        return hashlib.sha256(path.read_bytes()).hexdigest()
    return hashlib.sha256(f"{type(task).__module__}.{type(task).__qualname__}".encode()).hexdigest()


def choose(wanted: Path | None, spec: RunSpec, name: str, digest: str, *, fresh: bool, accept_code_change: bool) -> Chosen:
    """Choose the folder; nothing is written.

    Raises RunFolderError for a folder that is something else, holds another spec, or a run of changed code.
    """
    if wanted is None:
        return Chosen(_next_free(Path("runs") / name), False)
    if not wanted.exists():
        return Chosen(wanted, False)
    if not wanted.is_dir():
        raise RunFolderError(f"{wanted} is a file, not a folder", hint="give another --run folder")
    if not (wanted / events.FILE).is_file():
        known = {SPEC_FILE, "run.lock"}
        if any(path.name not in known for path in wanted.iterdir()):
            raise RunFolderError(f"{wanted} is not empty and holds no run", hint="give a new or an empty folder with --run")
        return Chosen(wanted, False)
    if fresh:
        return Chosen(_next_free(wanted), False, (f"{wanted} is left as it is",))
    past = list(events.read(wanted))
    started = [event for event in past if isinstance(event, Started)]
    if not started:
        return Chosen(wanted, True)
    if started[-1].spec_id != spec.id:
        raise RunFolderError(
            f"{wanted} is the run of another spec ({started[-1].spec_id}, now {spec.id})",
            hint="give another --run folder, or --fresh",
        )
    ended = past[-1] if isinstance(past[-1], Ended) else None
    if ended is not None and ended.outcome in FINISHED:
        new = _next_free(wanted)
        return Chosen(new, False, (f"{wanted} is finished ({ended.cause}); this run goes to {new}",))
    if started[-1].code_digest != digest and not accept_code_change:
        raise RunFolderError(
            f"the task's code has changed since {wanted} was begun",
            hint="go on with --accept-code-change, or begin anew with --fresh",
        )
    return Chosen(
        wanted, True, (f"{wanted} is unfinished: going on in it, from the start, since no state to resume from is saved yet",)
    )


def _next_free(wanted: Path) -> Path:
    number = 1
    while (candidate := wanted.with_name(f"{wanted.name}-{number}")).exists():
        number += 1
    return candidate


def open_folder(chosen: Chosen, spec: RunSpec) -> None:
    """Create the folder and write `spec.toml`; raises RunFolderError when it cannot be written or the disk is full."""
    folder = chosen.folder
    try:
        folder.mkdir(parents=True, exist_ok=True)
        free = shutil.disk_usage(folder).free
        if free < LEAST_FREE_BYTES:
            raise RunFolderError(f"{folder} has {free} bytes of free space", hint="free some space, or give another --run folder")
        (folder / SPEC_FILE).write_text(spec_file.write(spec), encoding="utf-8")
    except OSError as error:
        raise RunFolderError(f"{folder} cannot be written: {error.strerror}", hint="give another --run folder") from error
