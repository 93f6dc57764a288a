"""Writing of a checkpoint into a hidden folder, which is renamed when it is complete.

RELIABILITY: a step folder is complete or absent. The order is: create the hidden draft folder;
write the files, hash them meanwhile, and fsync each; fsync the folder; write and fsync the
manifest; fsync the folder again; rename it; fsync its parent. Nothing changes after the rename. If
one of these actions fails, this checkpoint is discarded, and earlier checkpoints are unaffected. A
failed fsync is not retried.
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

from surefoot.components.checkpoint import tensor_files as files
from surefoot.contract import commits, digest
from surefoot.contract import manifest as manifests
from surefoot.contract.commits import sync_folder
from surefoot.contract.manifest import Entry, Manifest
from surefoot.contract.run_folder import files as run_files
from surefoot.core.errors import (
    NumbersError,
    RunFolderError,
    StorageError,
    SurefootError,
    TaskError,
)
from surefoot.runtime.comm.group import Group

# consecutive checkpoints that may link one file; then it is written again, so that one bad block
# cannot harm them all
FULL_EVERY = 8


@dataclass(frozen=True, kw_only=True)
class Content:
    """Content of one checkpoint.

    `tensors` are tensors on the host, by file and by name. `texts` are the contents of text files,
    by file name. `finite` names the tensors that must be finite. `parts` gives the first row of
    each tensor that is a shard, and the shape of the whole tensor.
    """

    step: int
    tensors: Mapping[str, Mapping[str, Tensor]]
    texts: Mapping[str, bytes] = field(default_factory=dict)
    finite: frozenset[str] = frozenset()
    # the rows of the whole, for each tensor that is a shard
    parts: files.Parts = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class Stamp:
    """Fields of a checkpoint's manifest besides the step and the files."""

    generation: int = 1
    spec_id: str = ""
    environment: Mapping[str, str] = field(default_factory=dict)
    score: Mapping[str, Any] | None = None
    parent: Mapping[str, Any] | None = None
    layout: Mapping[str, int] = field(default_factory=lambda: {"world_size": 1})


def commit(
    run: Path,
    content: Content,
    stamp: Stamp,
    *,
    may_commit: Callable[[], bool] = lambda: True,
    link: bool = True,
) -> Manifest:
    """Save `content` as a checkpoint in `run`, and return its manifest.

    A checkpoint of the same step is replaced when the new one is complete. If an error is raised,
    all earlier checkpoints are unchanged.

    Args:
        run: The run folder.
        content: The state.
        stamp: Further fields of the manifest.
        may_commit: Function that is called just before the checkpoint becomes visible. If it
            returns False, the save is canceled.
        link: Store a file as a hard link if all its bytes equal those of the newest earlier
            checkpoint.

    Raises:
        StorageError: If a file cannot be written, or if `may_commit` returns False.
        NumbersError: If a tensor that `content.finite` names is not finite.
        TaskError: If the step, the score, or the number of tensors is not valid.
    """
    if not 0 <= content.step < manifests.MAX_STEP:
        raise TaskError(
            f"step {content.step} cannot be saved",
            hint=f"use a step from 0 to {manifests.MAX_STEP - 1:,}",
        )
    _check_score(stamp)
    final = manifests.step_folder(run, content.step)
    draft = final.with_name(f"{commits.DRAFT}{final.name}")
    try:
        shutil.rmtree(draft, ignore_errors=True)
        _make_folders(run, draft)
        earlier = _newest(run, content.step) if link else None
        made = Manifest(
            step=content.step, files=tuple(_write_all(draft, content, earlier)), **vars(stamp)
        )
        _seal(run, draft, made, may_commit)
    except OSError as error:
        discard(draft)
        raise StorageError.of(
            error, f"step {content.step} could not be saved in {run}: {error.strerror}"
        ) from error
    except BaseException:
        discard(draft)
        raise
    return made


def commit_together(
    run: Path,
    content: Content,
    stamp: Stamp,
    group: Group,
    *,
    may_commit: Callable[[], bool] = lambda: True,
) -> Manifest:
    """Save one checkpoint to which every rank of `group` contributes its own files.

    Every rank must call this function, with file names that no other rank uses. Rank 0 writes the
    manifest and makes the checkpoint visible. If one rank fails, all ranks raise an error.
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
        return json.dumps(
            [asdict(entry) for entry in _write_all(draft, content, _newest(run, content.step))]
        )

    def seal() -> str:
        if group.is_first:
            entries = tuple(
                manifests.parse_entry(row) for rows in written for row in json.loads(rows)
            )
            made = Manifest(step=content.step, files=entries, **vars(stamp))
            _seal(run, draft, made, may_commit)
        return ""

    try:
        _run_on_all_ranks(group, run, content.step, begin)
        written = _run_on_all_ranks(group, run, content.step, write)
        _run_on_all_ranks(group, run, content.step, seal)
    except BaseException:
        if group.is_first:
            discard(draft)
        raise
    return manifests.read(final)


def _run_on_all_ranks(group: Group, run: Path, step: int, job: Callable[[], str]) -> list[str]:
    """Run `job` on each rank, and return the results of all ranks, in rank order.

    A rank whose `job` fails raises its own error. The other ranks raise the error of the first rank
    that failed, in rank order.
    """
    problem: SurefootError | None = None
    said = ""
    try:
        said = job()
    except OSError as error:
        problem = StorageError.of(
            error, f"step {step} could not be saved in {run}: {error.strerror}"
        )
    except SurefootError as error:
        problem = error
    row: dict[str, Any] = {"said": said}
    if problem is not None:
        is_full = isinstance(problem, StorageError) and problem.is_full
        row = {
            "kind": type(problem).__name__,
            "words": problem.message,
            "hint": problem.hint,
            "is_full": is_full,
        }
    rows = [json.loads(text) for text in group.exchange(json.dumps(row))]
    if problem is not None:
        raise problem
    for rank, each in enumerate(rows):
        if "kind" in each:
            kind = next(
                (kind for kind in (NumbersError, TaskError) if kind.__name__ == each["kind"]),
                StorageError,
            )
            theirs = kind(f"rank {rank} of {group.size}: {each['words']}", hint=each["hint"])
            if isinstance(theirs, StorageError):
                theirs.is_full = each["is_full"]
            raise theirs
    return [each["said"] for each in rows]


def _write_all(draft: Path, content: Content, earlier: Manifest | None) -> list[Entry]:
    """Write every file of `content` into the folder `draft`, and return the manifest entries.

    A file with the same bytes as in the checkpoint `earlier` becomes a hard link to it. Raises
    NumbersError if a tensor that `content.finite` names is not finite.
    """
    with commits.hashing() as pool:
        sound = {
            name: pool.submit(files.is_finite, tensor)
            for name, tensor in _tensors_to_check(content)
        }
        written = [_write(draft, name, content, earlier, pool) for name in content.tensors]
        entries = [entry() for entry in written]
        _raise_unless_finite(content.step, {name: found.result() for name, found in sound.items()})
    return entries + [_write_text(draft / name, text) for name, text in content.texts.items()]


def _seal(run: Path, draft: Path, made: Manifest, may_commit: Callable[[], bool]) -> None:
    """Write the manifest into the folder `draft`, then rename the folder to its final name.

    Raises StorageError if `may_commit` returns False.
    """
    sync_folder(draft)
    text = made.as_text().encode()
    if (excess := manifests.find_excess_text(text)) is not None:
        raise TaskError(
            (
                "there are more tensors than a checkpoint can store: no "
                f"manifest is valid that {excess}"
            ),
            hint="concatenate small tensors",
        )
    _write_text(draft / manifests.FILE, text)
    sync_folder(draft)
    if not may_commit():
        raise StorageError(
            f"{run} was deleted, or a later attempt has taken its lock", hint="this attempt stops"
        )
    _replace(manifests.step_folder(run, made.step), draft)


def _check_score(stamp: Stamp) -> None:
    """Raise TaskError if a reader of the manifest would not accept the score.

    A non-finite value is allowed, since it is written as null.
    """
    try:
        if stamp.score is not None:
            manifests.check_score(
                {
                    key: None if manifests.is_no_number(value) else value
                    for key, value in stamp.score.items()
                }
            )
    except RunFolderError as error:
        raise TaskError(
            f"a checkpoint cannot have this score: {error.message}",
            hint='give a dict such as {"name": "accuracy", "value": 0.5, "better": "higher"}',
        ) from None


def _make_folders(run: Path, draft: Path) -> None:
    """Create the folder `draft` and its missing parents, and sync the parents.

    A new folder is on disk for certain only when its parent is synced.
    """
    parent = draft.parent
    new = [path for path in (parent, *parent.parents) if not path.exists()]
    run_files.make_folder(run, manifests.FOLDER)
    if new or not manifests.steps(run):  # folders of a killed attempt may not have been synced
        for path in dict.fromkeys((run, *(each.parent for each in new))):
            sync_folder(path)
    draft.mkdir()


def _tensors_to_check(content: Content) -> list[tuple[str, Tensor]]:
    return [
        (name, tensor)
        for held in content.tensors.values()
        for name, tensor in held.items()
        if name in content.finite
    ]


def _raise_unless_finite(step: int, sound: Mapping[str, bool]) -> None:
    spoiled = [name for name, is_sound in sound.items() if not is_sound]
    if spoiled:
        raise NumbersError(
            f"step {step}: {spoiled[0]} is not finite",
            hint="lower the learning rate, or warm up longer",
        )


def _newest(run: Path, step: int) -> Manifest | None:
    """Return the manifest of the newest readable checkpoint before `step`; None without one.

    Files of the new checkpoint may become hard links to the files of that checkpoint.
    """
    for number in reversed([each for each in manifests.steps(run) if each < step]):
        with contextlib.suppress(RunFolderError):
            return manifests.read(manifests.step_folder(run, number))
    return None


def _write(
    draft: Path, name: str, content: Content, earlier: Manifest | None, pool: Executor
) -> Callable[[], Entry]:
    """Write the tensor file `name`, or hard-link it to the same file of the checkpoint `earlier`.

    Returns a function that waits for the digests and returns the manifest entry of the file.
    """
    tensors, parts = content.tensors[name], content.parts
    before = (
        next((entry for entry in earlier.files if entry.name == name), None)
        if earlier is not None
        else None
    )
    known: dict[str, str] = {}
    if before is not None and earlier is not None and tensors:
        is_same, known = files.find_unchanged(tensors, before, pool, parts)
        if is_same and _may_link(draft.parent, earlier, before) and _link(draft, earlier, before):
            return lambda: before
    return files.write(draft, name, tensors, step=content.step, pool=pool, known=known, parts=parts)


def _may_link(checkpoints: Path, earlier: Manifest, entry: Entry) -> bool:
    """Return whether a further checkpoint may hard-link this file of the checkpoint `earlier`.

    At most FULL_EVERY checkpoints share a file. Their number is the link count of the file.
    """
    path = checkpoints / f"step-{earlier.step:012d}" / entry.name
    try:
        status = path.stat()
    except OSError:
        return False
    return status.st_size == entry.num_bytes and status.st_nlink < FULL_EVERY


def _link(draft: Path, earlier: Manifest, entry: Entry) -> bool:
    """Hard-link a file of the checkpoint `earlier` into the folder `draft`.

    Returns False if that fails, for example because the file system has no hard links.
    """
    try:
        os.link(draft.parent / f"step-{earlier.step:012d}" / entry.name, draft / entry.name)
    except OSError:
        return False
    return True


def _write_text(path: Path, text: bytes) -> Entry:
    most = manifests.MAX_BYTES if path.name == manifests.FILE else manifests.MAX_TEXT_BYTES
    if len(text) > most:  # no reader would accept it
        raise StorageError(
            f"{path.name} of {path.parent.name} would have {len(text):,} bytes, "
            f"and {most:,} are allowed"
        )
    with path.open("xb") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
    return Entry(name=path.name, num_bytes=len(text), sha256=digest.digest_of_bytes(text))


def discard(draft: Path) -> None:
    """Delete the incomplete checkpoint `draft`, and its parent folder if that is then empty."""
    shutil.rmtree(draft, ignore_errors=True)
    with contextlib.suppress(OSError):
        draft.parent.rmdir()


def _replace(final: Path, draft: Path) -> None:
    """Rename the folder `draft` to `final`, and sync the rename to disk.

    An existing folder `final` gets a temporary name until then, and is deleted afterwards. If the
    process is killed before the rename, `clear_drafts` restores the existing folder. If the sync
    fails, the renames are undone: no checkpoint is to be deleted for one that may be lost.
    """
    old = final.with_name(f"{commits.OLD}{final.name}")
    if final.exists():
        if old.exists():  # left by a killed attempt; the folder that replaced it is whole
            commits.remove(old)
        final.rename(old)
    draft.rename(final)
    try:
        sync_folder(final.parent)
    except OSError:
        with contextlib.suppress(OSError):
            final.rename(draft)
            if old.exists():
                old.rename(final)
        raise
    if old.exists():
        commits.remove(old)


def clear_drafts(run: Path) -> None:
    """Delete the incomplete and partly deleted checkpoints that a killed process left in `run`.

    A checkpoint that the process was about to replace is restored.
    """
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
            # `remove` renames first: if another process still saves there, an incomplete draft
            # never becomes visible
            commits.remove(path)
    for path in list(folder.glob(f"{commits.GONE}*step-*")):
        shutil.rmtree(path, ignore_errors=True)
