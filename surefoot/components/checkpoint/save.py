"""One commit: a hidden draft, every file synced, the manifest last, then the rename. RELIABILITY: a step folder is whole or not there.

Draft folder, files (digested while they are written), fsync of each, fsync of the folder, manifest, fsync, rename, fsync of the
parent; nothing is ever changed after the rename. What fails ends this commit and no earlier one; a failed fsync is not tried again.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
from collections.abc import Callable, Mapping
from concurrent.futures import Executor
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from torch import Tensor

from surefoot.components.checkpoint import tensors as files
from surefoot.contract import commits, digest
from surefoot.contract import manifest as manifests
from surefoot.contract.commits import sync_folder
from surefoot.contract.manifest import Entry, Manifest
from surefoot.contract.run_folder import files as run_files
from surefoot.core.errors import NumbersError, RunFolderError, StorageError, SurefootError, TaskError
from surefoot.runtime.comm import Group

FULL_EVERY = 8  # so many commits in a row may link a file: then it is written anew, so that one bad block cannot harm them all


@dataclass(frozen=True, kw_only=True)
class Content:
    """What one commit holds: tensors on the host by file and name, other files by name, and the names that must be finite."""

    step: int
    tensors: Mapping[str, Mapping[str, Tensor]]
    texts: Mapping[str, bytes] = field(default_factory=dict)
    finite: frozenset[str] = frozenset()
    parts: files.Parts = field(default_factory=dict)  # which rows of a whole those tensors are that are not all of it


@dataclass(frozen=True, kw_only=True)
class Stamp:
    """What a manifest says besides its files."""

    generation: int = 1
    spec_id: str = ""
    environment: Mapping[str, str] = field(default_factory=dict)
    score: Mapping[str, Any] | None = None
    parent: Mapping[str, Any] | None = None
    layout: Mapping[str, int] = field(default_factory=lambda: {"world_size": 1})


def commit(
    run: Path, content: Content, stamp: Stamp, *, may_commit: Callable[[], bool] = lambda: True, link: bool = True
) -> Manifest:
    """Commit `content` as a step of `run`; files whose every byte is that of the newest commit's are linked to it.

    What an earlier generation committed as the same step is replaced, once the new one is whole. `may_commit` is asked just before
    the rename. Raises StorageError, NumbersError for a tensor of `finite` that is not, and TaskError for a step that no folder can be
    named for; what was committed before stays as it is.
    """
    if not 0 <= content.step < manifests.MAX_STEP:
        raise TaskError(f"step {content.step} cannot be committed", hint=f"use a step from 0 to {manifests.MAX_STEP - 1:,}")
    _check_score(stamp)
    final = manifests.step_folder(run, content.step)
    draft = final.with_name(f"{commits.DRAFT}{final.name}")
    try:
        shutil.rmtree(draft, ignore_errors=True)
        _make_folders(run, draft)
        earlier = _newest(run, content.step) if link else None
        made = Manifest(step=content.step, files=tuple(_write_all(draft, content, earlier)), **vars(stamp))
        _seal(run, draft, made, may_commit)
    except OSError as error:
        discard(draft)
        raise StorageError.of(error, f"step {content.step} could not be saved in {run}: {error.strerror}") from error
    except BaseException:
        discard(draft)
        raise
    return made


def commit_together(
    run: Path, content: Content, stamp: Stamp, group: Group, *, may_commit: Callable[[], bool] = lambda: True
) -> Manifest:
    """The same by all ranks of `group`, each with a `content` of its own in files of other names; rank 0 gives the commit its name.

    Every rank calls this, and where one fails all of them raise what it did.
    """
    final = manifests.step_folder(run, content.step)
    draft = final.with_name(f"{commits.DRAFT}{final.name}")

    def begin() -> str:
        if group.is_first:
            _check_score(stamp)
            shutil.rmtree(draft, ignore_errors=True)
            _make_folders(run, draft)
        return ""

    def write() -> str:
        return json.dumps([asdict(entry) for entry in _write_all(draft, content, _newest(run, content.step))])

    def seal() -> str:
        if group.is_first:
            entries = tuple(manifests.entry_from(row) for rows in written for row in json.loads(rows))
            made = Manifest(step=content.step, files=entries, **vars(stamp))
            _seal(run, draft, made, may_commit)
        return ""

    try:
        _by_all(group, run, content.step, begin)
        written = _by_all(group, run, content.step, write)
        _by_all(group, run, content.step, seal)
    except BaseException:
        if group.is_first:
            discard(draft)
        raise
    return manifests.read(final)


def _by_all(group: Group, run: Path, step: int, job: Callable[[], str]) -> list[str]:
    """What `job` gives on each rank. Raises on every rank what the first one that failed did."""
    problem: SurefootError | None = None
    said = ""
    try:
        said = job()
    except OSError as error:
        problem = StorageError.of(error, f"step {step} could not be saved in {run}: {error.strerror}")
    except SurefootError as error:
        problem = error
    row: dict[str, Any] = {"said": said}
    if problem is not None:
        is_full = isinstance(problem, StorageError) and problem.is_full
        row = {"kind": type(problem).__name__, "words": problem.message, "hint": problem.hint, "is_full": is_full}
    rows = [json.loads(text) for text in group.exchange(json.dumps(row))]
    if problem is not None:
        raise problem
    for rank, each in enumerate(rows):
        if "kind" in each:
            kind = next((kind for kind in (NumbersError, TaskError) if kind.__name__ == each["kind"]), StorageError)
            theirs = kind(f"rank {rank} of {group.size}: {each['words']}", hint=each["hint"])
            if isinstance(theirs, StorageError):
                theirs.is_full = each["is_full"]
            raise theirs
    return [each["said"] for each in rows]


def _write_all(draft: Path, content: Content, earlier: Manifest | None) -> list[Entry]:
    """Write every file of `content`, or link it to that of `earlier`."""
    with commits.hashing() as pool:
        sound = {name: pool.submit(files.is_finite, tensor) for name, tensor in _that_must_be_finite(content)}
        written = [_write(draft, name, content, earlier, pool) for name in content.tensors]
        entries = [entry() for entry in written]
        _raise_unless_finite(content.step, {name: found.result() for name, found in sound.items()})
    return entries + [_write_text(draft / name, text) for name, text in content.texts.items()]


def _seal(run: Path, draft: Path, made: Manifest, may_commit: Callable[[], bool]) -> None:
    """The manifest last, and then the name."""
    sync_folder(draft)
    text = made.as_text().encode()
    if (excess := manifests.find_excess_text(text)) is not None:
        raise TaskError(
            f"there are more tensors than a checkpoint holds: no manifest is read that {excess}",
            hint="join small tensors into one",
        )
    _write_text(draft / manifests.FILE, text)
    sync_folder(draft)
    if not may_commit():
        raise StorageError(f"{run} is gone, or was taken over by a later attempt", hint="this attempt ends here")
    _replace(manifests.step_folder(run, made.step), draft)


def _check_score(stamp: Stamp) -> None:
    """Raise TaskError for a score that no reader takes; one that is not finite is written as none."""
    try:
        if stamp.score is not None:
            manifests.check_score({key: None if manifests.is_no_number(value) else value for key, value in stamp.score.items()})
    except RunFolderError as error:
        raise TaskError(
            f"a commit cannot have this score: {error.message}", hint='as {"name": "accuracy", "value": 0.5, "better": "higher"}'
        ) from None


def _make_folders(run: Path, draft: Path) -> None:
    """The draft, and what is above it where it is new: a folder is durable once its parent is synced."""
    parent = draft.parent
    new = [path for path in (parent, *parent.parents) if not path.exists()]
    run_files.make_folder(run, manifests.FOLDER)
    if new or not manifests.steps(run):  # what a killed attempt made may not have been synced
        for path in dict.fromkeys((run, *(each.parent for each in new))):
            sync_folder(path)
    draft.mkdir()


def _that_must_be_finite(content: Content) -> list[tuple[str, Tensor]]:
    return [(name, tensor) for held in content.tensors.values() for name, tensor in held.items() if name in content.finite]


def _raise_unless_finite(step: int, sound: Mapping[str, bool]) -> None:
    spoiled = [name for name, is_sound in sound.items() if not is_sound]
    if spoiled:
        raise NumbersError(f"step {step}: {spoiled[0]} is not finite", hint="lower optim.lr, or warm up longer")


def _newest(run: Path, step: int) -> Manifest | None:
    """The newest commit before `step` that reads, if one does: what may be linked to."""
    for number in reversed([each for each in manifests.steps(run) if each < step]):
        with contextlib.suppress(RunFolderError):
            return manifests.read(manifests.step_folder(run, number))
    return None


def _write(draft: Path, name: str, content: Content, earlier: Manifest | None, pool: Executor) -> Callable[[], Entry]:
    """Write a file, or link it to that of `earlier`; gives what waits for its entry."""
    tensors, parts = content.tensors[name], content.parts
    before = next((entry for entry in earlier.files if entry.name == name), None) if earlier is not None else None
    known: dict[str, str] = {}
    if before is not None and earlier is not None and tensors:
        is_same, known = files.find_unchanged(tensors, before, pool, parts)
        if is_same and _may_link(draft.parent, earlier, before) and _link(draft, earlier, before):
            return lambda: before
    return files.write(draft, name, tensors, step=content.step, pool=pool, known=known, parts=parts)


def _may_link(checkpoints: Path, earlier: Manifest, entry: Entry) -> bool:
    """Whether fewer than FULL_EVERY commits hold the same file: their number of links says it, without a list to keep."""
    path = checkpoints / f"step-{earlier.step:012d}" / entry.name
    try:
        status = path.stat()
    except OSError:
        return False
    return status.st_size == entry.num_bytes and status.st_nlink < FULL_EVERY


def _link(draft: Path, earlier: Manifest, entry: Entry) -> bool:
    """Link a file of an earlier commit; False where the file system has no links."""
    try:
        os.link(draft.parent / f"step-{earlier.step:012d}" / entry.name, draft / entry.name)
    except OSError:
        return False
    return True


def _write_text(path: Path, text: bytes) -> Entry:
    most = manifests.MAX_BYTES if path.name == manifests.FILE else manifests.MAX_TEXT_BYTES
    if len(text) > most:  # nobody would read it back
        raise StorageError(f"{path.name} of {path.parent.name} would have {len(text):,} bytes, and {most:,} are allowed")
    with path.open("xb") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
    return Entry(name=path.name, num_bytes=len(text), sha256=digest.of_bytes(text))


def discard(draft: Path) -> None:
    """Delete a draft, and the folder of commits where it holds nothing else."""
    shutil.rmtree(draft, ignore_errors=True)
    with contextlib.suppress(OSError):
        draft.parent.rmdir()


def _replace(final: Path, draft: Path) -> None:
    """Give the draft its name; what had it stands aside until that is synced, and comes back if it never is."""
    old = final.with_name(f"{commits.OLD}{final.name}")
    if final.exists():
        if old.exists():  # a kill left it: what took its place is whole
            commits.remove(old)
        final.rename(old)
    draft.rename(final)
    sync_folder(final.parent)
    if old.exists():
        commits.remove(old)


def clear_drafts(run: Path) -> None:
    """Delete what a killed attempt left of commits that it began or was deleting; what it was replacing comes back."""
    folder = run / manifests.FOLDER
    if folder.is_symlink() or not folder.is_dir():
        return
    for path in list(folder.glob(f"{commits.OLD}step-*")):
        final = path.with_name(path.name.removeprefix(commits.OLD))
        if not final.exists():
            path.rename(final)
            continue
        with contextlib.suppress(OSError):
            commits.remove(path)
    for path in list(folder.glob(f"{commits.DRAFT}*step-*")):
        with contextlib.suppress(OSError):
            commits.remove(path)  # renamed first: if somebody saves there after all, half of a draft never gets a name
    for path in list(folder.glob(f"{commits.GONE}*step-*")):
        shutil.rmtree(path, ignore_errors=True)
