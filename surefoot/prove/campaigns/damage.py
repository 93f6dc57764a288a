"""Campaigns that damage a file: flip a bit, zero a block, truncate, swap, replace or delete it.

Each trial then opens the run. It must load the state of the newest undamaged checkpoint, bitwise.
The check must name each damaged checkpoint, move it aside, and record it in one event. If a file
outside the checkpoints is damaged, either the same state must be loaded or the damage reported.
"""

from __future__ import annotations

import contextlib
import os
import random
import shutil
import subprocess
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from surefoot.contract import commits, ledger, manifest
from surefoot.core.errors import EXIT_OK, RunFolderError
from surefoot.prove.campaigns import jobs
from surefoot.prove.campaigns.outcome import TrialResult
from surefoot.prove.campaigns.probe import EVERY, STEPS, VARIANTS, ProbedRun
from surefoot.prove.campaigns.workshop import KILLED, Child, Workshop, read_faults

# step at which the run stops; it then has three checkpoints and that of its best evaluation
LEFT_AT = 3 * EVERY + 1
BLOCK_BYTES = 4096
TO_THE_END_EVERY = 40  # one in 40 trials resumes to the end, which takes longest


# ---- changes of a file, with draws that a seed repeats


@dataclass(frozen=True)
class MutationTarget:
    """File to damage, with the folders and the random generator that the damage uses.

    Args:
        path: The file, in a run.
        other: Folder of a different run, whose files have other values.
        outside: Folder outside of both runs.
        draws: Random generator with the seed of the trial.
    """

    path: Path
    other: Path
    outside: Path
    draws: random.Random

    @property
    def commits(self) -> Path:
        """Folder of all checkpoints if the file is in a checkpoint, else the run folder."""
        return (
            self.path.parents[1]
            if manifest.STEP_FOLDER.match(self.path.parent.name)
            else self.path.parent
        )


Kind = Callable[[MutationTarget], object]


def flip(at: MutationTarget) -> None:
    data = bytearray(at.path.read_bytes())
    data[at.draws.randrange(len(data))] ^= 1 << at.draws.randrange(8)
    at.path.write_bytes(data)


def zero_block(at: MutationTarget) -> None:
    data = bytearray(at.path.read_bytes())
    start = at.draws.randrange(len(data)) // BLOCK_BYTES * BLOCK_BYTES
    data[start : start + BLOCK_BYTES] = bytes(len(data[start : start + BLOCK_BYTES]))
    at.path.write_bytes(data)


def link_by_name(at: MutationTarget) -> None:
    """Move the target file elsewhere, and leave a symbolic link to it at its path."""
    at.path.symlink_to(at.path.rename(at.outside / "elsewhere"))


def replace_by(at: MutationTarget, make: Callable[[Path], object]) -> None:
    """Delete the target file, and create something else at its path, such as a folder or a pipe.

    A process that opens a pipe to read waits for a writer that never comes.
    """
    at.path.unlink()
    make(at.path)


def swap(at: MutationTarget) -> None:
    """Swap the contents of the target file and of a different file.

    The other file has the same size if there is one of that size.
    """
    own = at.path.read_bytes()
    others = [
        path
        for path in sorted(at.commits.rglob("*"))
        if path.is_file() and path.read_bytes() != own
    ]
    same = [path for path in others if path.stat().st_size == len(own)]
    other = at.draws.choice(same or others)
    at.path.write_bytes(other.read_bytes())
    other.write_bytes(own)


def splice(at: MutationTarget) -> None:
    """Overwrite the target file with a file of the same name from a different step or run."""
    runs = (at.commits, at.other)
    others = [
        path for run in runs for path in sorted(run.glob(f"**/{at.path.name}")) if path != at.path
    ]
    at.path.write_bytes(at.draws.choice(others).read_bytes())


def duplicate(at: MutationTarget) -> None:
    """Copy the checkpoint that contains the target file to the name of a later step.

    If the file is not in a checkpoint, the file itself is copied.
    """
    step = manifest.STEP_FOLDER.match(at.path.parent.name)
    if step is None:
        shutil.copy2(at.path, at.path.with_name("copy"))
    else:
        shutil.copytree(at.path.parent, at.path.parent.with_name(f"step-{int(step[1]) + 100:012d}"))


def link_the_folder(at: MutationTarget) -> None:
    """Move the checkpoint that contains the target file, and leave a symbolic link to it.

    A file that is not in a checkpoint is not changed.
    """
    if at.commits != at.path.parent:
        at.path.parent.symlink_to(at.path.parent.rename(at.outside / "folder"))


FLIPPED: Mapping[str, Kind] = {"a flipped bit": flip}
KINDS: Mapping[str, Kind] = {
    "truncated": lambda at: os.truncate(at.path, at.draws.randrange(at.path.stat().st_size)),
    "empty": lambda at: os.truncate(at.path, 0),
    "4 KiB zeroed": zero_block,
    "missing": lambda at: at.path.unlink(),
    "swapped": swap,
    "spliced": splice,
    "duplicated": duplicate,
    "symbolic link": link_by_name,
    "a folder": lambda at: replace_by(at, Path.mkdir),
    "a pipe": lambda at: replace_by(at, os.mkfifo),
    "folder linked": link_the_folder,
    # not damage: a file that no manifest names, and a hard link outside of the run
    "extra file": lambda at: at.path.with_name("more.safetensors").write_bytes(
        at.path.read_bytes()
    ),
    "linked elsewhere": lambda at: (at.outside / "linked").hardlink_to(at.path),
}


# ---- trials


def find_left(workshop: Workshop, variant: str, seed: int = 0) -> ProbedRun:
    """Return a run of `variant` that was stopped in the middle; it is made once and then cached.

    A different `seed` gives a different run, whose files have the same names and sizes.
    """

    def leave() -> ProbedRun:
        folder = workshop.fresh("left") / "run"
        attempt = ProbedRun(folder=folder, variant=variant, background=False, seed=seed)
        workshop.train(replace(attempt, die_at=LEFT_AT)).end_with(KILLED)
        return attempt

    return workshop.cached(("left", variant, seed), leave)


def find_changed(folder: Path, own: Path) -> list[Path]:
    """Return the files in a checkpoint folder whose bytes differ from the original folder `own`.

    Digests are not used. Returns the folder itself if `own` does not exist or `folder` is a link.
    """
    if not own.is_dir() or folder.is_symlink():
        return [folder]
    pairs = [(path, folder / path.name) for path in sorted(own.iterdir())]
    return [
        found
        for path, found in pairs
        if not found.is_file() or found.is_symlink() or found.read_bytes() != path.read_bytes()
    ]


def copy_run(source: Path, target: Path) -> None:
    """Copy a run folder; hard links between its files are preserved."""
    subprocess.run(["cp", "-a", str(source), str(target)], check=True)


def damage(
    workshop: Workshop, seed: int, folder: Path, *, kinds: Mapping[str, Kind]
) -> TrialResult:
    """Damage one file of a copied run, then open the run and check the result.

    Consecutive seeds go through the types of damage in `kinds`.
    """
    draws = random.Random(seed)
    kind, variant = list(kinds)[seed % len(kinds)], draws.choice(list(VARIANTS))
    left, other = find_left(workshop, variant), find_left(workshop, variant, seed=1)
    files = sorted(path for path in left.folder.rglob("*") if path.is_file())
    name = files[seed // len(kinds) % len(files)].relative_to(left.folder)
    copy_run(left.folder, folder / "run")
    path = folder / "run" / name
    kinds[kind](MutationTarget(path, other.folder, folder, draws))
    wrong = find_wrong(workshop, left, path, to_the_end=seed % TO_THE_END_EVERY == 0)
    return TrialResult(
        wrong and f"{kind}: {name} ({variant}): {wrong}",
        (path.name if len(kinds) == 1 else kind,),
    )


def take_another_run_s_commit(workshop: Workshop, seed: int, folder: Path) -> TrialResult:
    """Replace the newest checkpoint of a run by that of a different run, whose digests are valid.

    The run must refuse the checkpoint and load nothing.
    """
    variant = list(VARIANTS)[seed % len(VARIANTS)]
    left, other = find_left(workshop, variant), find_left(workshop, variant, seed=1)
    copy_run(left.folder, folder / "run")
    newest = manifest.step_folder(folder / "run", step := max(manifest.steps(left.folder)))
    shutil.rmtree(newest)
    shutil.copytree(manifest.step_folder(other.folder, step), newest)
    child = workshop.fork(jobs.open_run, replace(left, folder=folder / "run"))
    if child.wait() != RunFolderError.exit_code or newest.name not in child.said:
        return TrialResult(f"the commit of another run was taken: {child.said[-300:]}")
    return TrialResult()


# ---- what must hold


def find_wrong(
    workshop: Workshop, left: ProbedRun, touched: Path, *, to_the_end: bool
) -> str | None:
    """Return the error that a run shows after one of its files was changed; None if it is correct.

    Args:
        workshop: Provider of processes and of uninterrupted runs.
        left: The run before the change.
        touched: Path of the changed file.
        to_the_end: Train the changed run to its end and compare it with an uninterrupted run.
    """
    run = next(path for path in touched.parents if path.name == "run")
    attempt, golden = replace(left, folder=run), workshop.golden(left)
    changed = {
        folder: find_changed(folder, left.folder / manifest.FOLDER / folder.name)
        for folder in sorted((run / manifest.FOLDER).glob("step-*"))
    }
    # if the manifest is valid but that of a different run, either the manifest or the other files
    # may be misplaced
    foreign = {
        folder
        for folder, files in changed.items()
        if folder / manifest.FILE in files and _is_manifest(folder)
    }
    before, num_rows = {folder: _bytes_of(folder) for folder in changed}, _count_rows(run)
    child = workshop.fork(jobs.open_run, attempt)
    status = child.wait()
    if (wrong := _find_wrong_verdict(changed, foreign, child)) is not None:
        return wrong
    if status == RunFolderError.exit_code:
        # a file outside the checkpoints may have been swapped with one in a checkpoint
        named_file = touched if any(changed.values()) else run
        is_told = touched.parent == run and str(named_file) in child.said.rpartition("Error: ")[2]
        return None if is_told else f"the run was refused: {child.said[-600:]}"
    whole = max((_step(folder) for folder, files in changed.items() if not files), default=0)
    if status != EXIT_OK or golden.marks[whole] not in child.marks:
        return (
            f"step {whole} is whole, and the loaded state differs from the saved one: {status}, "
            f"{child.said[-600:]}"
        )
    damaged = [folder for folder, files in changed.items() if files and _step(folder) > whole]
    if (wrong := _find_wrong_events(run, damaged, before, child)) is not None:
        return wrong
    if num_rows < whole and f"the rows of {whole - num_rows} steps" not in child.said:
        return f"the rows of {whole - num_rows} steps are missing, and no record reports it"
    if not to_the_end:
        return None
    is_same = workshop.train(attempt).wait() == EXIT_OK and not golden.find_differing(run, STEPS)
    return None if is_same else "the resumed run is not bitwise identical"


def _find_wrong_verdict(
    changed: Mapping[Path, Collection[Path]], foreign: Collection[Path], child: Child
) -> str | None:
    """Return the first checkpoint whose check does not say what was `changed` in it."""
    for folder, files in changed.items():
        marks = (mark for mark in child.marks if mark.startswith(("whole", "damaged")))
        verdict = next((mark for mark in marks if folder.name in mark.split()), "")
        named = [folder] if folder in foreign else files
        is_named = not files or any(str(path) in verdict for path in named)
        if verdict.startswith("damaged") != bool(files) or not is_named:
            return (
                f"of {folder.name} {[path.name for path in files]} are damaged, "
                f"and the check says: {verdict}"
            )
    return None


def _find_wrong_events(
    run: Path, damaged: list[Path], before: Mapping[Path, Mapping[str, bytes]], child: Child
) -> str | None:
    told = [event.detail for event in read_faults(run, "damaged-commit")]
    if len(told) != len(damaged) or any(
        sum(f"{folder}" in detail for detail in told) != 1 for folder in damaged
    ):
        return f"{len(damaged)} commits are damaged, and the events tell of {told}"
    if any(detail not in child.said for detail in told):
        return f"the console says {child.said!r} of {told}"
    for folder in damaged:
        aside = folder.with_name(f"{commits.BAD}{folder.name}")
        if folder.exists() or not aside.is_dir() or _bytes_of(aside) != before[folder]:
            return f"{folder.name} is damaged, and was not set aside as it was"
    return None


def _count_rows(run: Path) -> int:
    """Return the number of ledger rows with which the run will resume.

    It is 0 if the header is damaged, since the ledger is then set aside.
    """
    with contextlib.suppress(RunFolderError):
        ledger.read_plan(run)
        num_bytes = (run / ledger.FILE).stat().st_size - ledger.count_header_bytes(run)
        return max(0, num_bytes) // ledger.ROW.size
    return 0


def _is_manifest(folder: Path) -> bool:
    with contextlib.suppress(RunFolderError):
        return bool(manifest.read(folder))
    return False


def _bytes_of(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in sorted(folder.iterdir()) if path.is_file()}


def _step(folder: Path) -> int:
    return int(folder.name.removeprefix("step-"))
