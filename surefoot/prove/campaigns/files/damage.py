"""Damaged files: one bit flipped, a block zeroed, a file cut, swapped, taken from elsewhere or gone; then the run is opened again.

What is loaded is the state of the newest commit that is still whole, bit for bit. Each damaged one is named by the check, set aside and
told in one event. What stands beside the commits is damaged, too: then the same state is loaded, or the damage is told in words.
"""

from __future__ import annotations

import contextlib
import io
import os
import random
import shutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from surefoot.contract import commits, events, ledger, manifest
from surefoot.contract.events import Fault
from surefoot.core.errors import RunFolderError, SurefootError
from surefoot.prove.campaigns.files import mutate
from surefoot.prove.campaigns.files.mutate import KINDS, Place
from surefoot.prove.campaigns.probe import EVERY, VARIANTS, Attempt
from surefoot.prove.campaigns.workshop import Workshop
from surefoot.prove.outcome import Campaign, Result
from surefoot.train.run import Run, drive

LEFT_AT = 3 * EVERY + 1  # where the run was left: it then has the commits of three saves and that of its best evaluation
TO_THE_END_EVERY = 40  # of so many trials one goes on to the end, which takes longest
Digests = Mapping[str, str]


@dataclass(frozen=True)
class Left:
    """A run that was left in the middle: its folder, the digests of its state after each step, those of its end."""

    attempt: Attempt
    states: Mapping[int, Digests]
    end: Digests

    @property
    def steps(self) -> list[int]:
        return manifest.steps(self.attempt.folder)

    def find_files(self) -> list[str]:
        """Every file, named from the run folder on."""
        run = self.attempt.folder
        return sorted(path.relative_to(run).as_posix() for path in run.rglob("*") if path.is_file())

    def find_changed(self, folder: Path) -> list[Path]:
        """The files of a step folder that are not as they were here: told by the bytes alone, not by a digest of ours.

        The folder itself where it was none, or is a link.
        """
        own = self.attempt.folder / manifest.FOLDER / folder.name
        if not own.is_dir() or folder.is_symlink():
            return [folder]
        return [
            found
            for path in sorted(own.iterdir())
            if not (found := folder / path.name).is_file() or found.is_symlink() or found.read_bytes() != path.read_bytes()
        ]


def find_left(workshop: Workshop, variant: str, seed: int = 0) -> Left:
    """The run of this variant, made once; of another `seed` it is another run with files of the same names and sizes."""
    key = f"left {variant} {seed}"
    if key not in workshop.kept:
        folder = workshop.fresh("left")
        attempt = Attempt(run=str(folder / "whole"), variant=variant, background=False)
        spec = attempt.spec().replace(train={"seed": seed})
        with quiet(), Run(spec, attempt.task(), folder=attempt.folder, quiet=True) as run:
            states = {0: run.state_digests()}
            for report in run.steps():
                if run.evaluation_due:
                    run.evaluate()
                states[report.step] = run.state_digests()
                if report.step == LEFT_AT:
                    copy_run(attempt.folder, folder / "left")
            end = run.state_digests()
        workshop.kept[key] = Left(replace(attempt, run=str(folder / "left")), states, end)
    left: Left = workshop.kept[key]
    return left


def quiet() -> contextlib.redirect_stderr[io.StringIO]:
    """What a run says on the way, kept."""
    return contextlib.redirect_stderr(io.StringIO())


def copy_run(source: Path, target: Path) -> None:
    """A copy in which files that were one stay one."""
    known: dict[int, Path] = {}
    for folder, _, names in os.walk(source):
        into = target / Path(folder).relative_to(source)
        into.mkdir(mode=0o700)
        for name in names:
            path, made = Path(folder, name), into / name
            first = known.setdefault(path.lstat().st_ino, made)
            if first is made:
                shutil.copy2(path, made)
            else:
                made.hardlink_to(first)


# ---- the trials


def flip_a_bit(workshop: Workshop, seed: int) -> Result:
    """One bit of one file: every file of each variant in turn, any bit of it."""
    draws = random.Random(seed)
    left = find_left(workshop, list(VARIANTS)[seed % len(VARIANTS)])
    name = (files := left.find_files())[seed // len(VARIANTS) % len(files)]
    with workshop.scratch("flip") as folder:
        copy_run(left.attempt.folder, folder / "run")
        path = folder / "run" / name
        mutate.flip(path, draws.randrange(8 * path.stat().st_size))
        wrong = find_wrong(left, folder / "run", path, to_the_end=seed % TO_THE_END_EVERY == 0)
        return Result(wrong and f"a bit of {name} ({left.attempt.variant}): {wrong}", (path.name,))


def damage_a_file(workshop: Workshop, seed: int) -> Result:
    """One thing done to one file of a commit, or to one beside the commits."""
    draws = random.Random(seed)
    left = find_left(workshop, draws.choice(list(VARIANTS)))
    other = find_left(workshop, left.attempt.variant, seed=1)
    kind, name = list(KINDS)[seed % len(KINDS)], draws.choice(left.find_files())
    with workshop.scratch("damage") as folder:
        copy_run(left.attempt.folder, folder / "run")
        path = folder / "run" / name
        KINDS[kind](Place(path, other.attempt.folder, folder, draws))
        wrong = find_wrong(left, folder / "run", path, to_the_end=seed % TO_THE_END_EVERY == 0)
        return Result(wrong and f"{kind}: {name} ({left.attempt.variant}): {wrong}", (kind,))


def take_another_run_s_commit(workshop: Workshop, seed: int) -> Result:
    """The whole commit of another run, right in every digest, stands in the place of one: it is refused, and nothing is loaded."""
    draws = random.Random(seed)
    variant = draws.choice(list(VARIANTS))
    left, other = find_left(workshop, variant), find_left(workshop, variant, seed=1)
    with workshop.scratch("another") as folder:
        copy_run(left.attempt.folder, folder / "run")
        newest = manifest.step_folder(folder / "run", left.steps[-1])
        shutil.rmtree(newest)
        shutil.copytree(manifest.step_folder(other.attempt.folder, left.steps[-1]), newest)
        opened = reopen(left, folder / "run", to_the_end=False)
        if opened.error is None or newest.name not in opened.error:
            return Result(f"the commit of another run was taken: step {opened.step}, {opened.error}")
    return Result()


# ---- what must hold


@dataclass(frozen=True)
class Opened:
    """A run that was opened again: after which step it stood, its state then and at its end; or why it was refused."""

    step: int = 0
    state: Digests | None = None
    end: Digests | None = None
    error: str | None = None
    untyped: str | None = None
    said: str = ""


def reopen(left: Left, run: Path, *, to_the_end: bool) -> Opened:
    with quiet() as said:
        try:
            with Run(left.attempt.spec(), left.attempt.task(), folder=run, quiet=True) as again:
                step, state = again.step, again.state_digests()
                if to_the_end:
                    drive(again)
                    return Opened(step, state, again.state_digests(), said=said.getvalue())
        except SurefootError as error:
            return Opened(error=error.message)
        except Exception as error:  # noqa: BLE001 - what no caller is told to expect is what is looked for
            return Opened(untyped=repr(error))
    return Opened(step, state, said=said.getvalue())


def find_wrong(left: Left, run: Path, touched: Path, *, to_the_end: bool) -> str | None:
    """What does not hold of a run of which one file was touched."""
    changed = {folder: left.find_changed(folder) for folder in sorted((run / manifest.FOLDER).glob("step-*"))}
    for folder, files in changed.items():
        if (wrong := _find_wrong_check(folder, files)) is not None:
            return wrong
    before = {folder.name: _bytes_of(folder) for folder in changed}
    num_rows = _count_rows(run)
    opened = reopen(left, run, to_the_end=to_the_end)
    if opened.untyped is not None:
        return f"an error that nobody expects: {opened.untyped}"
    if opened.error is not None:
        named = (
            touched if any(changed.values()) else run
        )  # a file beside the commits may have changed places with one of a commit
        is_told = touched.parent == run and str(named) in opened.error
        return None if is_told else f"the run was refused: {opened.error}"
    whole = max((_step(folder) for folder, files in changed.items() if not files), default=0)
    damaged = [folder for folder, files in changed.items() if files and _step(folder) > whole]
    if opened.step != whole or opened.state != left.states[whole]:
        return f"step {whole} is whole, and what was loaded is another state than it had, after step {opened.step}"
    if to_the_end and opened.end != left.end:
        return "the run went on to other bits"
    if (wrong := _find_wrong_events(run, damaged, before, opened.said, to_the_end=to_the_end)) is not None:
        return wrong
    lost = whole - num_rows
    return (
        f"rows of {lost} steps are lost, and nothing says so"
        if lost > 0 and f"the rows of {lost} steps" not in opened.said
        else None
    )


def _count_rows(run: Path) -> int:
    """How many rows the run will go on with: none where the header is damaged, since the ledger is then set aside."""
    if not _passes(ledger.read_plan, run):
        return 0
    return max(0, (run / ledger.FILE).stat().st_size - ledger.HEADER_BYTES) // ledger.ROW.size


def _find_wrong_check(folder: Path, changed: list[Path]) -> str | None:
    try:
        commits.check(folder)
    except RunFolderError as error:
        if not changed:
            return f"{folder.name} is whole and does not verify: {error.message}"
        # of a manifest that is whole, but another run's, nothing tells whether it or the files beside it are in the wrong place
        is_another = folder / manifest.FILE in changed and _passes(manifest.read, folder)
        named = [folder] if is_another else changed
        is_named = any(str(path) in error.message for path in named)
        return None if is_named else f"{', '.join(map(str, named))} damaged and not named: {error.message}"
    except Exception as error:  # noqa: BLE001 - see above
        return f"the check ended with {error!r}"
    return f"{folder.name} is damaged and verifies" if changed else None


def _find_wrong_events(
    run: Path, damaged: list[Path], before: Mapping[str, Mapping[str, bytes]], said: str, *, to_the_end: bool
) -> str | None:
    told = [event.detail for event in events.read(run) if isinstance(event, Fault) and event.fault == "damaged-commit"]
    if len(told) != len(damaged) or any(sum(f"{folder}" in detail for detail in told) != 1 for folder in damaged):
        return f"{len(damaged)} commits are damaged, and the events tell of {told}"
    if any(detail not in said for detail in told):
        return f"the console says {said!r} of {told}"
    for folder in damaged:
        aside = folder.with_name(f"{commits.BAD}{folder.name}")
        is_left = folder.exists() and not (to_the_end and _passes(commits.check, folder))  # on its way it may save that step anew
        if is_left or not aside.is_dir() or _bytes_of(aside) != before[folder.name]:
            return f"{folder.name} is damaged, and was not set aside as it was"
    return None


def _passes(look: Callable[[Path], object], folder: Path) -> bool:
    try:
        look(folder)
    except RunFolderError:
        return False
    return True


def _bytes_of(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in sorted(folder.iterdir()) if path.is_file()}


def _step(folder: Path) -> int:
    return int(folder.name.removeprefix("step-"))


CAMPAIGNS = (
    Campaign(case="F05", title="one flipped bit in any file of a run", trial=flip_a_bit, few=200, many=4_000),
    Campaign(
        case="F06", title="files cut, emptied, zeroed, swapped, spliced, doubled, lost, added, linked",
        trial=damage_a_file, few=50, many=500,
    ),
    Campaign(
        case="F06-run", title="the commit of another run in the place of one", trial=take_another_run_s_commit,
        few=4, many=40,
    ),
)  # fmt: skip
