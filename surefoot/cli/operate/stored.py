"""The commits of a folder as verbs tell them: found by name, listed, checked file by file; torch is not needed."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator
from concurrent.futures import Executor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from surefoot.contract import commits, manifest
from surefoot.contract.manifest import Entry, Manifest
from surefoot.core.errors import InputError, RunFolderError

COMMIT_HINT = "name a commit as RUN, RUN:STEP, RUN:best, or its folder RUN/checkpoints/step-..."
LEFT_OVERS = (".draft-", ".gone-", ".old-", ".bad-")


def find_commit(named: str, step: str = "last") -> Path:
    """The step folder that `named` means: itself, or a run's `step`, or that of RUN:STEP. Raises RunFolderError."""
    path = Path(named)
    if manifest.STEP_FOLDER.match(path.name) and path.is_dir():
        return path
    run, colon, after = named.rpartition(":")
    if colon and not path.exists():
        path, step = Path(run), after
    check_folder(path)
    return manifest.step_folder(path, commits.find_step(path, step))


def find_readable(named: str, step: str = "last") -> tuple[Path, Manifest, list[str]]:
    """The commit that `named` means, with its manifest; for a run's last the newest that can be read, and why newer ones cannot."""
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
    """Raise RunFolderError for a folder that holds no commits."""
    if not (run / manifest.FOLDER).is_dir():
        raise RunFolderError(f"{run} holds no commits: there is no {run / manifest.FOLDER}", hint=COMMIT_HINT)


def step_folders(run: Path) -> list[Path]:
    """Every folder that has the name of a commit, whether or not it is one, by step."""
    check_folder(run)
    return sorted(path for path in (run / manifest.FOLDER).iterdir() if manifest.STEP_FOLDER.match(path.name))


def left_overs(run: Path) -> list[str]:
    """What kills left and what was set aside, by name."""
    return sorted(path.name for path in (run / manifest.FOLDER).iterdir() if path.name.startswith(LEFT_OVERS))


# ---- a list


def rows(run: Path) -> list[dict[str, Any]]:
    """What `list` tells of each commit; one that cannot be read has `step` and `error`."""
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
    """A commit in one line; `linked_bytes` are those of files that an earlier commit wrote."""
    linked = [entry for entry in made.files if entry.since is not None and entry.since != made.step]
    age_s = None
    with contextlib.suppress(OSError):
        age_s = max(0.0, time.time() - (folder / manifest.FILE).stat().st_mtime)
    return {
        "step": made.step, "generation": made.generation, "bytes": made.num_bytes, "linked_bytes": sum(e.num_bytes for e in linked),
        "linked": [entry.name for entry in linked], "score": None if made.score is None else dict(made.score), "age_s": age_s,
        "whole_state": made.is_whole_state, "parent": None if made.parent is None else dict(made.parent), "folder": str(folder),
    }  # fmt: skip


def _step_of(folder: Path) -> int:
    return int(folder.name.removeprefix("step-"))


# ---- a check


@dataclass(frozen=True)
class Health:
    """One commit held against its manifest: what is damaged, by file, and what stands there that no manifest names."""

    folder: Path
    step: int
    damaged: tuple[str, ...]
    unknown: tuple[str, ...] = ()
    num_files: int = 0
    num_bytes: int = 0
    whole_state: bool = False
    names: tuple[str, ...] = field(default=(), compare=False)  # of the damaged files

    @property
    def is_sound(self) -> bool:
        return not self.damaged


def check_run(run: Path) -> Iterator[Health]:
    """Every commit of a run, the oldest first; every byte is read."""
    for folder in step_folders(run):
        yield check_commit(folder)


def check_commit(folder: Path) -> Health:
    """Hold every file of a commit against its manifest."""
    try:
        made = manifest.read(folder)
    except RunFolderError as error:
        return Health(folder, _step_of(folder), (error.message,), names=(manifest.FILE,))
    known = {manifest.FILE, *(entry.name for entry in made.files)}
    unknown = sorted(path.name for path in folder.iterdir() if path.name not in known)
    with commits.hashing() as pool:
        told = {entry.name: problem for entry in made.files if (problem := _problem(folder, entry, pool)) is not None}
    return Health(
        folder, made.step, tuple(told.values()), tuple(unknown), len(made.files), made.num_bytes, made.is_whole_state, tuple(told)
    )


def _problem(folder: Path, entry: Entry, pool: Executor) -> str | None:
    try:
        commits.check_file(folder, entry, pool)
    except RunFolderError as error:
        return error.message
    return None


def newest_sound(found: list[Health]) -> int | None:
    """The step that a run would go on after; None where no whole state is sound."""
    return max((each.step for each in found if each.is_sound and each.whole_state), default=None)


def check_not_written(run: Path) -> Any:
    """The lock of a run while its commits are moved, nothing where it never had one. Raises RunFolderError while it trains."""
    from surefoot.contract.runlock import FILE, RunLock

    try:
        return RunLock(run) if (run / FILE).is_file() else contextlib.nullcontext()
    except RunFolderError as error:  # whose hints are those of a run that trains
        is_disk = isinstance(error.__cause__, OSError)
        hint = "the disk must be writable, with some space" if is_disk else "wait until that process has ended"
        raise RunFolderError(error.message, hint=hint) from error


def parse_every(text: str, run: Path) -> tuple[int | None, float | None]:
    """A duration as steps of the run, found without its data, or as seconds. Raises InputError for one that cannot be told."""
    from surefoot.cli.look import past
    from surefoot.core.units import Duration

    duration = Duration.parse(text)
    if not duration.value:  # as the spec refuses it
        raise InputError(f"--keep-every is {text!r}, which is nothing", hint="use at least 1 step, or leave it out")
    if duration.unit == "s":
        return None, duration.value
    if duration.unit == "steps":
        return int(duration.value), None
    steps_per_epoch = past.read(run).started.steps_per_epoch if duration.unit == "epochs" else None
    if not steps_per_epoch:
        raise InputError(
            f"{text!r} cannot be counted in steps without the data", hint="say it in steps: --keep-every '100 steps'"
        )
    return max(1, duration.to_steps(steps_per_epoch, 1, None)), None
