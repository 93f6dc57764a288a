"""Several launchers in one run folder: one trains, the others end and name it; one that lost its lock commits nothing any more."""

from __future__ import annotations

import os
import random
import shutil
import time

from surefoot.contract import events, manifest, runlock
from surefoot.core.errors import EXIT_OK, RunFolderError, StorageError
from surefoot.prove.campaigns.probe import EVERY, Attempt
from surefoot.prove.campaigns.workshop import KILLED, LOOK_S, PATIENCE_S, Child, Golden, Workshop, find_difference, look_at
from surefoot.prove.outcome import Campaign, Result

KINDS = ("all at once", "the owner is killed", "the lock is lost")
HELD = 2 * EVERY + 1  # the step after which the owner waits while the others try
MOST, STAGGER_S = 8, 0.3


def launch_rivals(workshop: Workshop, seed: int) -> Result:
    """2 to 8 launchers at about the same time; then, by the seed, the owner goes on, is killed, or loses its lock to another."""
    draws = random.Random(seed)
    kind, count, golden = KINDS[seed % len(KINDS)], draws.randint(2, MOST), workshop.golden()
    with workshop.scratch("rivals") as folder:
        attempt = Attempt(run=str(folder / "run"), pauses=(HELD,))
        children = _launch(workshop, attempt, count, draws)
        owner, wrong = _find_owner(children)
        if owner is not None and wrong is None:
            wrong = _go_on_as(kind, workshop, attempt, owner, golden)
        for child in children:
            child.kill()
            child.wait()
        return Result(None if wrong is None else f"{count} launchers, {kind}: {wrong}", (kind, f"{count} launchers"))


def _launch(workshop: Workshop, attempt: Attempt, count: int, draws: random.Random) -> list[Child]:
    children = []
    for _ in range(count):
        children.append(workshop.train(attempt))
        time.sleep(draws.choice((0.0, draws.uniform(0.0, STAGGER_S))))
    return children


def _find_owner(children: list[Child]) -> tuple[Child | None, str | None]:
    """The one that trains, and what is wrong with the others: each must have ended by itself and have named it."""
    until_s = time.monotonic() + PATIENCE_S
    undecided = children
    while len(undecided) > 1 and time.monotonic() < until_s:
        undecided = [child for child in children if not child.ends_within(LOOK_S)]
        training = [child.pid for child in undecided if "begun" in child.marks]
        if len(training) > 1:
            return None, f"processes {training} train in one folder"
    if len(undecided) != 1:
        return None, f"{len(undecided)} neither train nor end: {[child.said[-200:] for child in children]}"
    owner = undecided[0]
    if not owner.wait_for(f"paused {HELD}"):
        return None, f"the owner ended: {owner.said[-300:]}"
    for child in children:
        if child is not owner:
            status = child.wait()
            if status != RunFolderError.exit_code or f"is being written by process {owner.pid}" not in child.said:
                return None, f"process {owner.pid} trains, and another ended with {status}: {child.said[-300:]}"
            if any(mark.startswith(("step", "draft")) for mark in child.marks):
                return None, f"one that was refused did {child.marks}"
    return owner, None


def _go_on_as(kind: str, workshop: Workshop, attempt: Attempt, owner: Child, golden: Golden) -> str | None:
    """What is wrong with how the run ends."""
    generations = [1]
    if kind == "the owner is killed":
        owner.kill()
        if owner.wait() != KILLED:  # as whoever starts a run again waits for its end: until then the kernel keeps the lock
            return "the owner could not be killed"
    if kind == "the lock is lost":  # as a file server forgets locks: the same bytes under the name, and another file
        lock = attempt.folder / runlock.FILE
        shutil.copyfile(lock, attempt.folder / "forgotten")
        os.replace(attempt.folder / "forgotten", lock)
    if kind != "all at once":
        generations.append(2)
        second = workshop.train(attempt)
        second.wait_for(f"paused {HELD}")
        if kind == "the lock is lost":
            before = _find_committed(attempt, generation=1)  # of the other one a save may be under way
            owner.go()
            status, after = owner.wait(), _find_committed(attempt, generation=1)
            if status != StorageError.exit_code or after != before:
                return f"it lost its lock, ended with {status} and has committed {after} instead of {before}: {owner.said[-300:]}"
        owner = second
    owner.go()
    if (status := owner.wait()) != EXIT_OK:
        return f"the owner ended with {status}: {owner.said[-300:]}"
    noted = sorted({event.generation for event in events.read(attempt.folder)})
    if noted != generations:
        return f"attempts {noted} wrote the log, {generations} trained"
    return look_at(attempt.folder, golden) or find_difference(attempt.folder, golden)


def _find_committed(attempt: Attempt, *, generation: int) -> list[int]:
    """The steps whose commits an attempt has made."""
    found = {step: manifest.read(manifest.step_folder(attempt.folder, step)) for step in manifest.steps(attempt.folder)}
    return [step for step, made in found.items() if made.generation == generation]


CAMPAIGNS = (
    Campaign(
        case="F29", title="2 to 8 launchers in one folder; a killed owner; a lost lock", trial=launch_rivals, few=6,
        many=200,
    ),
)  # fmt: skip
