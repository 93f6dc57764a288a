"""Several launchers in one run folder: one trains, the others exit and name it.

A process that lost its lock commits no further checkpoint.
"""

from __future__ import annotations

import os
import random
import shutil
import time

from surefoot.contract import events, manifest, runlock
from surefoot.core.errors import EXIT_OK, RunFolderError, StorageError
from surefoot.prove.campaigns.probe import EVERY, ProbedRun
from surefoot.prove.campaigns.workshop import (
    LOOK_S,
    PATIENCE_S,
    Child,
    Golden,
    Workshop,
    find_difference,
)
from surefoot.prove.outcome import Campaign, TrialResult

KINDS = ("all at once", "the owner is killed", "the lock is lost")
HELD = 2 * EVERY + 1  # the step after which the owner waits while the others start
MOST, STAGGER_S = 8, 0.3


def launch_rivals(workshop: Workshop, seed: int) -> TrialResult:
    """Start 2 to 8 launchers at about the same time.

    Then, by the seed, the owner continues, is killed, or loses its lock to another process.
    """
    draws = random.Random(seed)
    kind, count, golden = KINDS[seed % len(KINDS)], draws.randint(2, MOST), workshop.golden()
    with workshop.scratch("rivals") as folder:
        attempt = ProbedRun(run=str(folder / "run"), pauses=(HELD,))
        children = []
        for _ in range(count):
            children.append(workshop.train(attempt))
            time.sleep(draws.choice((0.0, draws.uniform(0.0, STAGGER_S))))
        owner, wrong = _find_owner(children)
        wrong = wrong or _go_on_as(kind, workshop, attempt, owner, golden)
        for child in children:
            child.kill()
            child.wait()
        return TrialResult(
            wrong and f"{count} launchers, {kind}: {wrong}", (kind, f"{count} launchers")
        )


def _find_owner(children: list[Child]) -> tuple[Child, str | None]:
    """Return the process that trains, and what is wrong with the others.

    Each other process must have exited by itself and have named the owner.
    """
    until_s = time.monotonic() + PATIENCE_S
    left = children
    while len(left) > 1 and time.monotonic() < until_s:
        left = [child for child in children if not child.ends_within(LOOK_S)]
        if len(training := [child.pid for child in left if "begun" in child.marks]) > 1:
            return left[0], f"processes {training} train in one folder"
    if len(left) != 1 or not left[0].wait_for(f"paused {HELD}"):
        return children[
            0
        ], f"{len(left)} neither train nor end: {[child.said[-200:] for child in children]}"
    for child in children:
        if child is not left[0]:
            status = child.wait()
            if (
                status != RunFolderError.exit_code
                or f"is being written by process {left[0].pid}" not in child.said
            ):
                return (
                    left[0],
                    (
                        f"process {left[0].pid} trains, and another ended with {status}: "
                        f"{child.said[-300:]}"
                    ),
                )
            if any(mark.startswith(("step", "draft")) for mark in child.marks):
                return left[0], f"one that was refused did {child.marks}"
    return left[0], None


def _go_on_as(
    kind: str, workshop: Workshop, attempt: ProbedRun, owner: Child, golden: Golden
) -> str | None:
    """Let the run continue as `kind` says; return what is wrong with its end."""
    last = owner
    if kind == "the owner is killed":
        owner.kill()
        # a user who restarts a run also waits for its end: until then the kernel keeps the lock
        owner.wait()
    if kind == "the lock is lost":
        # a file server loses locks like this: the same name and bytes, but another file
        lock = attempt.folder / runlock.FILE
        os.replace(shutil.copyfile(lock, attempt.folder / "forgotten"), lock)
    if kind != "all at once":
        last = workshop.train(attempt)
        last.wait_for(f"paused {HELD}")
    if kind == "the lock is lost":
        before = _find_committed(attempt)  # the other process may be saving
        owner.go()
        status, after = owner.wait(), _find_committed(attempt)
        if status != StorageError.exit_code or after != before:
            return (
                f"it lost its lock, ended with {status} and has committed {after} instead of "
                f"{before}: {owner.said[-300:]}"
            )
    last.go()
    if (status := last.wait()) != EXIT_OK:
        return f"the owner ended with {status}: {last.said[-300:]}"
    noted = {event.generation for event in events.read(attempt.folder)}
    if noted != ({1} if last is owner else {1, 2}):
        return f"attempts {noted} wrote the log"
    return find_difference(attempt.folder, golden)


def _find_committed(attempt: ProbedRun) -> list[int]:
    """Return the steps whose checkpoints the first attempt has made."""
    found = {
        step: manifest.read(manifest.step_folder(attempt.folder, step))
        for step in manifest.steps(attempt.folder)
    }
    return [step for step, made in found.items() if made.generation == 1]


CAMPAIGNS = (
    Campaign(
        case="F29",
        title="2 to 8 launchers in one folder; a killed owner; a lost lock",
        trial=launch_rivals,
        few=6,
    ),
)
