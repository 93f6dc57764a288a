"""Campaigns with signals, and with several launchers in one run folder.

A run is killed at random times, in each phase, and at every system call of a save. It gets SIGTERM
or Ctrl-C with some time to end. If several launchers start, one trains; the others exit and name
it. A process that lost its lock makes no further checkpoint.
"""

from __future__ import annotations

import os
import random
import shutil
import signal
import time
from dataclasses import replace
from pathlib import Path

from surefoot.contract import commits, events, manifest, runlock
from surefoot.core.errors import (
    EXIT_INTERRUPTED,
    EXIT_OK,
    EXIT_TERMINATED,
    RunFolderError,
    StorageError,
)
from surefoot.prove.campaigns import strace
from surefoot.prove.campaigns.outcome import TrialResult
from surefoot.prove.campaigns.probe import EVALUATE_EVERY, EVERY, STEPS, VARIANTS, ProbedRun
from surefoot.prove.campaigns.workshop import (
    KILLED,
    LOOK_S,
    PATIENCE_S,
    Child,
    Golden,
    Workshop,
    check_after_fault,
    find_wrong_end,
    restart_and_compare,
)

DEPTH = 3  # consecutive kills; only the first one hits a run that was not killed
LATER_S = 0.02  # longest wait before the kill, about as long as a save
SAVED = 4 * EVERY  # the step whose save is killed at every call; checkpoints are retired after it
# a prime: consecutive seeds select distant calls, and a whole sweep selects each call once
STRIDE = 1_000_003
# their number depends on thread timing; they change nothing outside the process
WAITS = ("futex", "sched_yield")
ANYWHERE = ("any step", "a save")
PHASES = ("first save", "last save", "load", "retention", "recovery", "clearing")
PLACES = ("any step", "a save", "an evaluation", "the first step", "a resume")
GRACES_S = (30.0, 5.0, 0.0)
CODES = {signal.SIGTERM: EXIT_TERMINATED, signal.SIGINT: EXIT_INTERRUPTED}
KINDS = ("all at once", "the owner is killed", "the lock is lost")
HELD = 2 * EVERY + 1  # the step after which the owner waits while the others start
MOST, STAGGER_S = 8, 0.3


def kill(
    workshop: Workshop, seed: int, folder: Path, *, places: tuple[str, ...], depth: int
) -> TrialResult:
    """Kill a run in one of the phases `places`, and perhaps its resumed attempts.

    There are at most `depth` kills. Afterwards the run must resume and end with the results of a
    run that was never killed.
    """
    draws = random.Random(seed)
    place, variant = places[seed % len(places)], draws.choice(list(VARIANTS))
    attempt, fell = ProbedRun(folder=folder / "run", variant=variant), 0
    golden = workshop.golden(attempt)
    if place in ("load", "recovery", "clearing"):  # these need a run that was killed before
        _kill_in_third_save(workshop, attempt)
    for number in range(draws.randint(1, depth)):
        child = workshop.train(attempt)
        _wait_for_phase("recovery" if number else place, child, attempt.folder, draws)
        child.kill()
        fell += child.wait() == KILLED
        if (wrong := check_after_fault(attempt.folder, golden)) is not None:
            return TrialResult(f"{place}: {wrong}", (place,))
    if not fell:
        return TrialResult(fell=False)
    return TrialResult(
        restart_and_compare(workshop, attempt, golden), (place, variant, f"{fell} kills")
    )


def _kill_in_third_save(workshop: Workshop, attempt: ProbedRun) -> None:
    """Train a run and kill it at the start of its third save."""
    child = workshop.train(attempt)
    child.wait_for(f"draft {3 * EVERY}")
    child.kill()
    child.wait()


def _wait_for_phase(place: str, child: Child, run: Path, draws: random.Random) -> None:
    """Wait until a run reaches the phase `place`, and then for a short random time."""
    drafts = list((run / manifest.FOLDER).glob(f"{commits.DRAFT}*"))
    child.wait_for(
        {
            "any step": f"step {draws.randint(1, STEPS - 2)}",
            "a save": f"draft {draws.randrange(EVERY, STEPS, EVERY)}",
            "an evaluation": f"step {draws.randrange(EVALUATE_EVERY, STEPS, EVALUATE_EVERY)}",
            "first save": f"draft {EVERY}",
            "last save": f"draft {STEPS}",
            "retention": f"retire {EVERY}",
            "load": f"load {max(manifest.steps(run), default=0)}",
            "clearing": f"clear {int(drafts[0].name.rpartition('-')[2])}" if drafts else "begun",
        }.get(place, "begun")
    )
    time.sleep(draws.uniform(0.0, LATER_S))


def preempt(workshop: Workshop, seed: int, folder: Path) -> TrialResult:
    """Send a signal once or twice in a phase of a run; then resume the run.

    If there is enough time to save, no step may be lost, and the exit code must name the signal.
    """
    draws = random.Random(seed)
    place, grace_s = PLACES[seed % len(PLACES)], GRACES_S[seed // len(PLACES) % len(GRACES_S)]
    sent, times = (
        draws.choice((signal.SIGTERM, signal.SIGTERM, signal.SIGINT)),
        draws.choice((1, 1, 1, 2)),
    )
    attempt = ProbedRun(folder=folder / "run")
    golden = workshop.golden(attempt)
    if place == "a resume":
        _kill_in_third_save(workshop, attempt)
    child = workshop.train(attempt)
    _wait_for_phase(place, child, attempt.folder, draws)
    for _ in range(times):
        child.send(sent)
    if not child.ends_within(grace_s):
        child.kill()
    status = child.wait()
    tags = (
        place,
        f"{grace_s:.0f} s of grace",
        f"{sent.name}{' twice' * (times - 1)}",
        f"ended with {status}",
    )
    allowed = {
        EXIT_OK,
        CODES[sent],
        *([KILLED] if grace_s == 0 else []),
        *([-sent] if times == 2 else []),
    }
    newest, done = max(manifest.steps(attempt.folder), default=0), max(child.steps, default=0)
    wrong = check_after_fault(attempt.folder, golden)
    if wrong is None and status not in allowed:
        wrong = f"it ended with {status}: {child.said[-300:]}"
    elif wrong is None and status == CODES[sent] and times == 1 and newest < done:
        wrong = f"it was given the time to save, did step {done}, and step {newest} is committed"
    wrong = wrong or restart_and_compare(workshop, attempt, golden)
    return TrialResult(wrong and f"{', '.join(tags)}: {wrong}", tags, fell=status != EXIT_OK)


def kill_at_call(workshop: Workshop, seed: int, folder: Path) -> TrialResult:
    """Kill a run at one system call of a save, before the call takes effect; then resume the run.

    The call is, for example, the 7th `write`.
    """
    calls = find_calls(workshop)
    name, count = calls[seed * STRIDE % len(calls)]
    attempt = strace.make_paused_save(folder, SAVED)
    golden, child = workshop.golden(attempt), workshop.train(attempt)
    child.wait_for(f"paused {SAVED}")
    injection = f"inject={name}:signal=KILL:when={count}"
    with strace.trace_child(child, folder / "trace", "-e", f"trace={name}", "-e", injection):
        child.go()
        child.wait()
    wrong = check_after_fault(attempt.folder, golden) or restart_and_compare(
        workshop, replace(attempt, pauses=(), die_at=None), golden
    )
    fell = attempt.die_at not in child.steps
    return TrialResult(
        wrong and f"{name} for the {count}th time: {wrong}", (name,) if fell else (), fell
    )


def find_calls(workshop: Workshop) -> list[tuple[str, int]]:
    """Return every system call of a save as a pair of its name and its number.

    The number counts the calls of that name in a thread, from the pause before the save to the end
    of the next step. Calls that wait for other threads are left out: their number differs in every
    run, so that a kill would seldom take effect.
    """
    traced = strace.trace_a_save(workshop, SAVED)
    return sorted({(name, number) for name, number, _ in traced if name not in WAITS})


# ---- several launchers


def launch_rivals(workshop: Workshop, seed: int, folder: Path) -> TrialResult:
    """Start 2 to 8 launchers in one run folder at about the same time.

    One of them trains. Depending on the seed, it then continues, is killed, or loses its lock to
    another process.
    """
    draws = random.Random(seed)
    kind, count = KINDS[seed % len(KINDS)], draws.randint(2, MOST)
    attempt = ProbedRun(folder=folder / "run", pauses=(HELD,))
    golden, children = workshop.golden(attempt), list[Child]()
    for _ in range(count):
        children.append(workshop.train(attempt))
        time.sleep(draws.choice((0.0, draws.uniform(0.0, STAGGER_S))))
    owner, wrong = _find_owner(children)
    wrong = wrong or _continue_as(kind, workshop, attempt, owner, golden)
    return TrialResult(
        wrong and f"{count} launchers, {kind}: {wrong}", (kind, f"{count} launchers")
    )


def _find_owner(children: list[Child]) -> tuple[Child, str | None]:
    """Return the process that trains, and an error of the other processes or None.

    Each of the others must exit by itself and name the process that trains.
    """
    until_s, left = time.monotonic() + PATIENCE_S, children
    while len(left) > 1 and time.monotonic() < until_s:
        left = [child for child in children if not child.ends_within(LOOK_S)]
        if len(training := [child.pid for child in left if "begun" in child.marks]) > 1:
            return left[0], f"processes {training} train in one folder"
    if len(left) != 1 or not left[0].wait_for(f"paused {HELD}"):
        said = [child.said[-200:] for child in children]
        return children[0], f"{len(left)} neither train nor end: {said}"
    (owner,) = left
    for child in children:
        if child is owner:
            continue
        status, words = child.wait(), f"is being written by process {owner.pid}"
        if status != RunFolderError.exit_code or words not in child.said:
            ended = f"another ended with {status}: {child.said[-300:]}"
            return owner, f"process {owner.pid} trains, and {ended}"
        if any(mark.startswith(("step", "draft")) for mark in child.marks):
            return owner, f"one that was refused did {child.marks}"
    return owner, None


def _continue_as(
    kind: str, workshop: Workshop, attempt: ProbedRun, owner: Child, golden: Golden
) -> str | None:
    """Let the run continue as `kind` says; return the error at its end, or None."""
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
    wrong = find_wrong_end(last, attempt, golden)
    noted = {event.generation for event in events.read(attempt.folder)}
    if wrong is None and noted != ({1} if last is owner else {1, 2}):
        return f"attempts {noted} wrote the log"
    return wrong


def _find_committed(attempt: ProbedRun) -> list[int]:
    """Return the steps whose checkpoints were made by the first attempt of the run."""
    run = attempt.folder
    return [
        step
        for step in manifest.steps(run)
        if manifest.read(manifest.step_folder(run, step)).generation == 1
    ]
