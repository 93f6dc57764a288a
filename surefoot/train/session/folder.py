"""Choice of the run folder: a new one, or an existing one of the same spec and code."""

from __future__ import annotations

import contextlib
import os
import shlex
import shutil
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from surefoot.components import checkpoint
from surefoot.contract import commits, events, ledger, manifest, spec_file
from surefoot.contract.events import Committed, Ended, Started
from surefoot.contract.run_folder import files, removals
from surefoot.contract.runlock import FILE as LOCK_FILE
from surefoot.contract.runlock import RunLock, describe_missing_lock, is_held
from surefoot.contract.spec import RunSpec
from surefoot.core.errors import RunFolderError, StorageError, hint_unread, hint_unwritten
from surefoot.train import environment
from surefoot.train.resume.program import Program, late_modules_after, tell_commit, tell_versions

SPEC_FILE = spec_file.FILE
DRAFT_FILE = files.draft_of(SPEC_FILE)
MIN_FREE_BYTES = 1 << 20
MAX_TRIES = 100  # attempts to find a new name that no other launcher takes


@dataclass(frozen=True)
class Chosen:
    """Folder that was chosen for a run, and facts about earlier attempts in it.

    Args:
        folder: The folder.
        is_again: Whether the folder holds an attempt at the run.
        notes: Notes for the user.
        is_numbered: Whether the name was made for this run; creating the folder then fails if it
            exists, so that two launchers never use the same folder.
        generation: Number of the newest attempt.
        data_digest: Digest of the training data of the newest attempt.
        parent: Checkpoint of a different run from which the first attempt started.
        stated: Tables of the spec of the newest attempt.
        done: Outcome and cause of a run that has nothing left to train; None for any other run.
        done_after: Last step of a run that has nothing left to train.
        damaged: Messages on lines of the log that cannot be read, and on missing records.
    """

    folder: Path
    is_again: bool
    notes: tuple[str, ...] = ()
    is_numbered: bool = False
    generation: int = 0
    data_digest: str | None = None
    parent: Mapping[str, Any] = field(default_factory=dict)
    stated: Mapping[str, Any] = field(default_factory=dict)
    done: tuple[str, str] | None = None
    done_after: int | None = None
    damaged: tuple[str, ...] = ()

    def describe_start(self, step: int | None) -> tuple[str, ...]:
        """Return a note on the start of this attempt: after `step`, or at step 0 if it is None."""
        if step is not None:
            return (f"resuming after step {step:,}",)
        return ("no checkpoint was found: the run starts from step 0",) if self.is_again else ()


def make_absolute(path: Path) -> Callable[[], Path]:
    """Return a function that returns `path` as long as the working folder does not change.

    After a change the function returns the absolute path of the same folder.
    """
    base = Path.cwd()
    return lambda: path if path.is_absolute() or Path.cwd() == base else base / path


class RunFolderRequest:
    """Requested run folder; None for a new folder in runs/.

    Relative paths refer to the working folder at the time when the object was created.
    """

    def __init__(self, path: str | Path | None) -> None:
        self._path = None if path is None else make_absolute(Path(path))
        self._runs = make_absolute(Path("runs"))

    def __call__(self) -> Path | None:
        return None if self._path is None else self._path()

    @property
    def runs(self) -> Path:
        """Folder in which new run folders are created."""
        return self._runs()


def choose(
    asked: RunFolderRequest,
    spec_id: str,
    name: str,
    program: Program,
    *,
    fresh: bool,
    accept_code_change: bool,
    closed_by: Collection[str] = events.CLOSED,
    is_fork: bool = False,
    checks_log: bool = True,
    spec: RunSpec | None = None,
) -> Chosen:
    """Choose the run folder without writing anything.

    Args:
        asked: The requested folder.
        spec_id: Digest of the spec.
        name: Beginning of the name of a new folder.
        program: The program that trains, with the digest of its code.
        fresh: Choose a new folder beside the requested one.
        accept_code_change: Accept a run whose code has changed.
        closed_by: Outcomes of a run that has nothing left to train.
        is_fork: Accept a folder that contains only the start of a fork that was killed before its
            first checkpoint.
        checks_log: Read all records of the log, of which a long run has many; otherwise only those
            of starts and ends.
        spec: The spec, to name the keys that differ in an error; None to name none.

    Raises:
        RunFolderError: If the folder holds something other than a run, a run of a different spec or
            of changed code, or if it cannot be written.
    """
    wanted = asked()
    try:
        chosen = _choose_folder(
            wanted,
            spec_id,
            name,
            program,
            fresh=fresh,
            accept_code_change=accept_code_change,
            closed_by=closed_by,
            is_fork=is_fork,
            checks_log=checks_log,
            spec=spec,
            runs=asked.runs,
        )
    except OSError as error:
        raise RunFolderError(
            f"{wanted} cannot be inspected: {error.strerror}", hint="give another --run folder"
        ) from None
    _check_writable(chosen.folder)
    return chosen


def _choose_folder(
    wanted: Path | None,
    spec_id: str,
    name: str,
    program: Program,
    *,
    fresh: bool,
    accept_code_change: bool,
    closed_by: Collection[str],
    is_fork: bool,
    checks_log: bool,
    spec: RunSpec | None,
    runs: Path,
) -> Chosen:
    if wanted is None:
        return Chosen(_next_free(runs / name), False, is_numbered=True)
    if not wanted.exists():
        return Chosen(wanted, False)
    if not wanted.is_dir():
        raise RunFolderError(f"{wanted} is a file, not a folder", hint="give another --run folder")
    names = {path.name for path in wanted.iterdir()}
    _check_no_links(wanted)
    if events.FILE not in names:
        return _chosen_without_log(wanted, names, spec_id, is_fork=is_fork)
    if fresh:
        return Chosen(_next_free(wanted), False, (f"{wanted} stays unchanged",), is_numbered=True)
    past, late, damaged = _read_log(wanted, checks_log=checks_log)
    started = [event for event in past if isinstance(event, Started)]
    if started and started[-1].spec_id != spec_id:
        from surefoot.train.resume import changes

        raise changes.other_spec(wanted, started[-1], spec_id, spec)
    ended = past[-1] if past and isinstance(past[-1], Ended) else None
    done = (
        (ended.outcome, ended.cause)
        if ended is not None and ended.outcome in closed_by and not ended.was_left
        else None
    )
    if done is not None and is_fork:
        new = _next_free(wanted)
        return Chosen(
            new,
            False,
            (f"{wanted} is {done[0]} ({done[1]}); this run goes to {new}",),
            is_numbered=True,
        )
    changed = ", ".join(program.changes(started[-1], late)) if started else ""
    if changed and not accept_code_change and done is None:
        raise RunFolderError(
            f"the code has changed since {wanted} was started: {changed}",
            hint="resume with --accept-code-change, or start a new run from step 0 with --fresh",
        )
    notes = (
        f"{wanted} {_describe_state(ended, is_done=done is not None)}",
        *((f"the code differs from that of the previous attempt: {changed}",) if changed else ()),
    )
    if not started:
        return Chosen(wanted, True, notes, damaged=tuple(damaged))
    newest, parent = started[-1], started[0].parent
    notes += (
        *tell_versions(newest.versions, environment.versions()),
        *tell_commit(newest, program),
    )
    return Chosen(
        wanted,
        True,
        notes,
        generation=newest.generation,
        data_digest=newest.data.get("digest"),
        parent=parent,
        stated=newest.spec,
        done=done,
        done_after=None if done is None or ended is None else ended.step,
        damaged=tuple(damaged),
    )


def _read_log(
    run: Path, *, checks_log: bool
) -> tuple[list[Started | Ended], dict[str, str], list[str]]:
    """Return the starts and ends in the log of a run, `late_modules`, and messages on its damage.

    `late_modules` are the digests of the modules that its newest attempt imported after its start.
    """
    from surefoot.contract.run_folder import log_end  # a new run does not need it

    damaged: list[str] = []
    steps, last = manifest.steps(run), 0
    past, late = list[Started | Ended](), dict[str, str]()
    kinds = () if checks_log else (Started, Committed, Ended)
    for event in events.read(run, *kinds, damaged=damaged):
        last = max(last, log_end.last_step_of(event))
        late = late_modules_after(late, event)
        if isinstance(event, Started | Ended):
            past.append(event)
    starts = [event for event in past if isinstance(event, Started)]
    if checks_log and not damaged:
        missing = log_end.find_unlogged_checkpoints(run, steps, starts, last)
        damaged += [f"{run / events.FILE}: {each}" for each in missing]
    return past, late, damaged


def _chosen_without_log(
    wanted: Path, names: Collection[str], spec_id: str, *, is_fork: bool
) -> Chosen:
    """Choose a folder in which no attempt has written a record yet."""
    if _is_new_fork(wanted, names, spec_id):
        note = f"{wanted} is a fork that was interrupted as it started: resuming it"
        return Chosen(wanted, True, (note,))
    # if the lock is held, the error of the lock names its owner
    if not _is_barely_begun(wanted, names) and not is_held(wanted):
        raise _no_run(wanted, names)
    if {SPEC_FILE, manifest.FOLDER} <= {*names} and not is_fork and not is_held(wanted):
        raise RunFolderError(
            f"{wanted} is a fork that was interrupted before its first checkpoint",
            hint="run the command that made this fork again, or give another folder",
        )
    return Chosen(wanted, False)


def _check_no_links(folder: Path) -> None:
    """Raise RunFolderError if a file that a run writes is a symbolic link in `folder`.

    A link made by another user could redirect writes to a path outside the folder.
    """
    written = events.FILE, SPEC_FILE, ledger.FILE, LOCK_FILE, removals.FILE, manifest.FOLDER
    try:
        for name in written:
            files.check_no_link(folder, name)
    except OSError as error:
        hint = (
            manifest.UNLINK
            if Path(str(error.filename)).name == manifest.FOLDER
            else hint_unread(error)
        )
        raise RunFolderError(
            f"{error.filename} cannot be opened: {error.strerror}", hint=hint
        ) from None


def _describe_state(ended: Ended | None, *, is_done: bool) -> str:
    if is_done and ended is not None:
        return f"is {ended.outcome} ({ended.cause}): nothing is left to train"
    # the length of a user's own loop is not known
    if ended is not None and ended.outcome == "finished":
        return f"was finished ({ended.cause}): training continues after its last step"
    return "is unfinished: resuming it"


def _no_run(folder: Path, names: Collection[str]) -> RunFolderError:
    """Return the error for a folder that is not a run folder, or whose log is missing."""
    if SPEC_FILE in names and manifest.steps(folder):
        return RunFolderError(
            f"{folder} has checkpoints and no {events.FILE}: without that log no run "
            "can resume in this folder",
            hint=(
                f"surefoot resume {shlex.quote(str(folder))} --fork "
                "NEW resumes from the newest checkpoint in a new folder"
            ),
        )
    return RunFolderError(
        f"{folder} is not empty and is not a run folder",
        hint="name a new or an empty folder with --run",
    )


def _is_barely_begun(folder: Path, names: Collection[str]) -> bool:
    """Return whether the folder holds only files that an attempt writes before its log.

    A power failure or a kill may leave any of them. A fork writes the ledger with its history and
    the checkpoints folder before its spec.
    """
    if not {SPEC_FILE, DRAFT_FILE, LOCK_FILE, ledger.FILE, manifest.FOLDER}.issuperset(names):
        return False
    if manifest.FOLDER in names and not all(
        path.name.startswith(commits.DRAFT) for path in (folder / manifest.FOLDER).iterdir()
    ):
        return False
    is_fork = SPEC_FILE not in names or manifest.FOLDER in names
    return (
        ledger.FILE not in names
        or is_fork
        or (folder / ledger.FILE).stat().st_size <= ledger.count_header_bytes(folder)
    )


def _is_new_fork(folder: Path, names: Collection[str], spec_id: str) -> bool:
    """Return whether the folder holds the first checkpoint of a fork of `spec_id` and no log."""
    if (
        SPEC_FILE not in names
        or manifest.FOLDER not in names
        or len(steps := manifest.steps(folder)) != 1
    ):
        return False
    with contextlib.suppress(RunFolderError):
        first = manifest.read(manifest.step_folder(folder, steps[0]))
        return bool(first.parent) and first.spec_id == spec_id
    return False


def _next_free(wanted: Path) -> Path:
    number = 1
    while (candidate := wanted.with_name(f"{wanted.name}-{number}")).exists():
        number += 1
    return candidate


def _check_writable(folder: Path) -> None:
    """Raise RunFolderError if `folder` cannot be created or written, or if its disk is full.

    Only permissions and free space are read; nothing is written.
    """
    there = next((path for path in (folder, *folder.absolute().parents) if path.exists()), folder)
    if not there.is_dir():
        raise RunFolderError(f"{there} is a file, not a folder", hint="give another --run folder")
    if not os.access(there, os.W_OK | os.X_OK):
        raise RunFolderError(
            f"{folder} cannot be written: {there} is read-only", hint="give another --run folder"
        )
    free = shutil.disk_usage(there).free
    if free < MIN_FREE_BYTES:
        raise RunFolderError(
            f"{folder} cannot be written: {there} has {free} bytes of free space",
            hint="free some space, or give another --run folder",
        )


@dataclass(frozen=True)
class _LockedFolder:
    """Locked run folder.

    `there` holds the names of the files that were in it before, `created` the folders that were
    created for it, innermost first.
    """

    chosen: Chosen
    lock: RunLock
    there: frozenset[str]
    created: tuple[Path, ...]

    def give_back(self, old_spec: bytes | None = None) -> None:
        """Remove the files and folders that were created for the run, and release the lock.

        If `old_spec` is given, it is written to `spec.toml` again.
        """
        with contextlib.suppress(OSError):
            if old_spec is not None and files.read_bytes(self.chosen.folder, SPEC_FILE) != old_spec:
                _write_spec(self.chosen.folder, old_spec)
        with contextlib.suppress(OSError):
            for name in {events.FILE, ledger.FILE, SPEC_FILE, DRAFT_FILE, LOCK_FILE} - self.there:
                (self.chosen.folder / name).unlink(missing_ok=True)
            _remove_empty(self.created)
        self.lock.release()


@contextlib.contextmanager
def acquire_run_folder(
    choice: Callable[[], Chosen], spec: RunSpec | None
) -> Iterator[tuple[Chosen, RunLock]]:
    """Create and lock the folder that `choice` returns and write `spec.toml` if `spec` is given.

    A failure inside the context restores the previous state of the folder. Raises RunFolderError if
    the folder cannot be written or another process writes it.
    """
    mine = _take(choice)
    before: bytes | None = None
    try:
        if not mine.chosen.is_again:  # from an attempt that was killed before it wrote its log
            (mine.chosen.folder / ledger.FILE).unlink(missing_ok=True)
        if spec is not None:
            if (mine.chosen.folder / SPEC_FILE).is_file():
                before = files.read_bytes(mine.chosen.folder, SPEC_FILE)
            _write_spec(mine.chosen.folder, spec_file.write(spec).encode())
        for path in (mine.chosen.folder, *(made.parent for made in mine.created)):
            checkpoint.sync_folder(path)  # checkpoints are durable only if the folder is
        yield replace(mine.chosen, notes=(*mine.chosen.notes, *describe_missing_lock())), mine.lock
    except (OSError, StorageError) as error:
        mine.give_back(before)
        text = (
            f"{mine.chosen.folder} cannot be written: {error.strerror}"
            if isinstance(error, OSError)
            else error.message
        )
        cause = error if isinstance(error, OSError) else error.__cause__ or error
        raise RunFolderError(
            text, hint=hint_unwritten(cause, "give another --run folder")
        ) from error
    except BaseException:
        mine.give_back(before)
        raise


def _take(choice: Callable[[], Chosen]) -> _LockedFolder:
    for _ in range(MAX_TRIES):
        chosen = choice()
        folder = chosen.folder
        there = (
            frozenset(path.name for path in folder.iterdir()) if folder.is_dir() else frozenset()
        )
        missing = tuple(path for path in (folder, *folder.parents) if not path.exists())
        try:
            folder.mkdir(parents=True, exist_ok=not chosen.is_numbered)
            lock = RunLock(folder, after=chosen.generation)
        except FileExistsError:  # another launcher took the number
            continue
        except (OSError, RunFolderError) as error:
            _remove_empty(missing)
            if isinstance(error, RunFolderError):
                raise
            raise RunFolderError(
                f"{folder} cannot be written: {error.strerror}", hint="give another --run folder"
            ) from error
        mine = _LockedFolder(chosen, lock, there, missing)
        try:
            if _is_still_chosen(chosen, choice):
                return mine
        except BaseException:
            mine.give_back()
            raise
        lock.release()  # another launcher was here between the choice and the lock
    raise RunFolderError("no unused name for the run folder was found", hint="give one with --run")


def _remove_empty(folders: tuple[Path, ...]) -> None:
    with contextlib.suppress(OSError):
        for path in folders:
            path.rmdir()


def _is_still_chosen(chosen: Chosen, choice: Callable[[], Chosen]) -> bool:
    return not (chosen.folder / events.FILE).exists() if chosen.is_numbered else choice() == chosen


def announce_fork(folder: Path, spec: RunSpec) -> None:
    """Create the empty checkpoints folder of a fork, then write its spec.

    That order distinguishes a fork from a new run, whose spec is written before its checkpoints
    folder.
    """
    files.make_folder(folder, manifest.FOLDER)
    checkpoint.sync_folder(folder)
    _write_spec(folder, spec_file.write(spec).encode())


def _write_spec(folder: Path, text: bytes) -> None:
    """Write the spec and rename the file into place: a full disk cannot empty an older spec."""
    files.write_whole(folder, SPEC_FILE, text, sync=True)
