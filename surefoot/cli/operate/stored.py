"""Functions that find, list and check the checkpoints of a run, without torch."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator
from concurrent.futures import Executor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from surefoot.contract import commits, events, manifest
from surefoot.contract.manifest import Entry, Manifest
from surefoot.contract.run_folder import files
from surefoot.core.errors import InputError, RunFolderError

COMMIT_HINT = "give a checkpoint as RUN, RUN:STEP, RUN:best, or its folder RUN/checkpoints/step-..."
LEFT_OVERS = (".draft-", ".gone-", ".old-", ".bad-")


def find_commit(named: str, step: str = "last") -> Path:
    """Return the folder of a checkpoint.

    Args:
        named: the folder itself, RUN:STEP, or a run folder.
        step: for a run folder, the checkpoint: "best", "last" or a step number.

    Raises:
        RunFolderError: if there is no such checkpoint.
    """
    path = Path(named)
    if manifest.STEP_FOLDER.match(path.name) and path.is_dir():
        return path
    run, colon, after = named.rpartition(":")
    if colon and not path.exists():
        path, step = Path(run), after
    check_folder(path)
    return manifest.step_folder(path, commits.find_step(path, step))


def find_readable(named: str, step: str = "last") -> tuple[Path, Manifest, list[str]]:
    """Return the folder and manifest of a checkpoint, and errors about newer checkpoints.

    For the last step of a run, this is the newest checkpoint whose manifest can be read; the list
    has an error message for each newer one. Otherwise the checkpoint is that of `find_commit`, and
    the list is empty.

    Raises:
        RunFolderError: if there is no such checkpoint, or if its manifest cannot be read.
    """
    run = Path(named)
    troubles: list[str] = []
    if step == "last" and (run / manifest.FOLDER).is_dir():
        for number in reversed(manifest.named_steps(run)):
            folder = manifest.step_folder(run, number)
            try:
                return folder, manifest.read(folder), troubles
            except RunFolderError as error:
                troubles.append(error.message)
    folder = find_commit(named, step)
    return folder, manifest.read(folder), []


def check_folder(run: Path) -> None:
    """Raise RunFolderError if the run does not exist or has no folder of checkpoints."""
    if not run.exists():
        raise files.no_run(run, manifest.FOLDER)
    if not (run / manifest.FOLDER).is_dir():
        raise RunFolderError(
            f"{run} has no checkpoints: there is no {run / manifest.FOLDER}",
            hint=commits.SAVED_WHEN if (run / events.FILE).is_file() else COMMIT_HINT,
        )


def step_folders(run: Path) -> list[Path]:
    """Return the folders in a run that are named like checkpoints, sorted by step.

    Their contents are not checked.

    Raises:
        RunFolderError: if the run has no folder of checkpoints.
    """
    check_folder(run)
    return sorted(
        path for path in (run / manifest.FOLDER).iterdir() if manifest.STEP_FOLDER.match(path.name)
    )


def find_leftovers(run: Path) -> list[str]:
    """Return the names of hidden folders in the run's folder of checkpoints.

    They were left by interrupted saves and deletions, or contain damaged checkpoints that were
    renamed.
    """
    return sorted(
        path.name for path in (run / manifest.FOLDER).iterdir() if path.name.startswith(LEFT_OVERS)
    )


# ---- a list


def rows(run: Path) -> list[dict[str, Any]]:
    """Return a JSON-compatible dict for each checkpoint of a run, for `surefoot checkpoint list`.

    If a checkpoint cannot be read, its dict has only the keys `step` and `error`.
    """
    found = []
    folders = step_folders(run)
    best = commits.find_best(run, [_step_of(folder) for folder in folders])
    for folder in folders:
        try:
            made = manifest.read(folder)
        except RunFolderError as error:
            found.append({"step": _step_of(folder), "error": error.message})
            continue
        found.append({**row_of(folder, made), "best": made.step == best})
    return found


def row_of(folder: Path, made: Manifest) -> dict[str, Any]:
    """Return a JSON-compatible dict that describes a checkpoint.

    `linked` lists the files that an earlier checkpoint wrote and that did not change since;
    `linked_bytes` is their total size.
    """
    linked = [entry for entry in made.files if entry.since is not None and entry.since != made.step]
    age_s = None
    with contextlib.suppress(OSError):
        age_s = max(0.0, time.time() - (folder / manifest.FILE).stat().st_mtime)
    return {
        "step": made.step,
        "generation": made.generation,
        "bytes": made.num_bytes,
        "linked_bytes": sum(e.num_bytes for e in linked),
        "linked": [entry.name for entry in linked],
        "score": None if made.score is None else dict(made.score),
        "age_s": age_s,
        "whole_state": made.is_whole_state,
        "parent": None if made.parent is None else dict(made.parent),
        "folder": str(folder),
    }


def read_units(run: Path) -> dict[str, str]:
    """Return the unit of each metric in the run's event log; empty if no log can be read."""
    units: dict[str, str] = {}
    with contextlib.suppress(RunFolderError):
        for each in events.read(run, events.Evaluated, damaged=[]):
            units |= dict(each.units) if isinstance(each, events.Evaluated) else {}
    return units


def _step_of(folder: Path) -> int:
    return int(folder.name.removeprefix("step-"))


# ---- a check


@dataclass(frozen=True)
class CommitHealth:
    """Result of comparing the files of a checkpoint with its manifest.

    `damaged` describes each damaged file, and `names` are the names of these files. `unknown` are
    the names of files that are not in the manifest. `whole_state` is True if the checkpoint has the
    complete training state, not only weights.
    """

    folder: Path
    step: int
    damaged: tuple[str, ...]
    unknown: tuple[str, ...] = ()
    num_files: int = 0
    num_bytes: int = 0
    whole_state: bool = False
    names: tuple[str, ...] = field(default=(), compare=False)  # names of the damaged files

    @property
    def is_sound(self) -> bool:
        return not self.damaged


def check_run(run: Path) -> Iterator[CommitHealth]:
    """Check every checkpoint of a run, oldest first; every byte is read."""
    for folder in step_folders(run):
        yield check_commit(folder)


def check_commit(folder: Path) -> CommitHealth:
    """Compare every file of a checkpoint with the digests in its manifest."""
    try:
        made = manifest.read(folder)
    except RunFolderError as error:
        return CommitHealth(folder, _step_of(folder), (error.message,), names=(manifest.FILE,))
    known = {manifest.FILE, *(entry.name for entry in made.files)}
    unknown = sorted(path.name for path in folder.iterdir() if path.name not in known)
    with commits.hashing() as pool:
        told = {
            entry.name: problem
            for entry in made.files
            if (problem := _problem(folder, entry, pool)) is not None
        }
    return CommitHealth(
        folder,
        made.step,
        tuple(told.values()),
        tuple(unknown),
        len(made.files),
        made.num_bytes,
        made.is_whole_state,
        tuple(told),
    )


def _problem(folder: Path, entry: Entry, pool: Executor) -> str | None:
    try:
        commits.check_file(folder, entry, pool)
    except RunFolderError as error:
        return error.message
    return None


def newest_sound(found: list[CommitHealth]) -> int | None:
    """Return the step of the checkpoint from which a run would resume; None if there is none.

    It is the newest undamaged checkpoint with the complete training state.
    """
    return max((each.step for each in found if each.is_sound and each.whole_state), default=None)


def check_not_written(run: Path) -> Any:
    """Return a context manager that locks a run while its checkpoints are renamed or deleted.

    If the run has no lock file, the context manager does nothing.

    Raises:
        RunFolderError: if a process is training the run, or the lock cannot be taken.
    """
    from surefoot.contract.runlock import FILE, RunLock

    try:
        return RunLock(run) if (run / FILE).is_file() else contextlib.nullcontext()
    except RunFolderError as error:  # its hints are for training
        is_disk = isinstance(error.__cause__, OSError)
        hint = (
            "make the disk writable, with some free space"
            if is_disk
            else "wait until that process has ended"
        )
        raise RunFolderError(error.message, hint=hint) from error


def parse_every(text: str, run: Path) -> tuple[int | None, float | None]:
    """Convert a duration to (steps, None) or (None, seconds), without reading the data.

    Epochs are converted with the number of steps per epoch in the run's event log.

    Raises:
        InputError: if the duration is 0, or if the conversion needs the data.
    """
    from surefoot.cli.look import past
    from surefoot.core.units import Duration

    duration = Duration.parse(text)
    if not duration.value:  # the spec refuses 0, too
        raise InputError(
            f"--keep-every must be more than 0; got {text!r}",
            hint="use at least 1 step, or leave it out",
        )
    if duration.unit == "s":
        return None, duration.value
    if duration.unit == "steps":
        return int(duration.value), None
    steps_per_epoch = past.read(run).started.steps_per_epoch if duration.unit == "epochs" else None
    if not steps_per_epoch:
        raise InputError(
            f"{text!r} cannot be converted to steps without the data",
            hint="give the interval in steps: --keep-every '100 steps'",
        )
    return max(1, duration.to_steps(steps_per_epoch, 1, None)), None
