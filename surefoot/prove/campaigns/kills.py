"""kill -9: at random times, in the middle of a save, of a load, of retention, and of the recovery from an earlier kill."""

from __future__ import annotations

import random
import time
from pathlib import Path

from surefoot.contract import manifest
from surefoot.prove.campaigns.probe import EVERY, STEPS, VARIANTS, Attempt
from surefoot.prove.campaigns.workshop import KILLED, Child, Golden, Workshop, find_damage, find_lost, go_on
from surefoot.prove.outcome import Campaign, Result

TRIES = 8  # of one kill: a fast run may end before it comes
DEPTH = 3  # kills in a row of which none but the first hits an undisturbed run
PHASES = ("first save", "last save", "load", "retention", "recovery", "clearing")


def kill_anywhere(workshop: Workshop, seed: int) -> Result:
    """One kill at a random time, every second one inside a save; then the run goes on and ends as if nothing had been."""
    draws = random.Random(seed)
    variant = draws.choice(list(VARIANTS))
    golden = workshop.golden(variant)
    for _ in range(TRIES):
        with workshop.scratch("kill") as folder:
            attempt = Attempt(run=str(folder / "run"), variant=variant)
            child = workshop.train(attempt)
            (_kill_in_a_save if seed % 2 else _kill_in_time)(child, draws, workshop)
            if child.wait() != KILLED:
                continue  # it came too late
            where = _find_where(child)
            wrong = _after_kill(attempt.folder, golden) or go_on(workshop, attempt, golden)
            return Result(wrong, (where, variant))
    return Result(fell=False)


def _kill_in_time(child: Child, draws: random.Random, workshop: Workshop) -> None:
    """Any time between the start and about the end of a run."""
    time.sleep(draws.uniform(0.0, _time_of_a_run(workshop)))
    child.kill()


def _kill_in_a_save(child: Child, draws: random.Random, workshop: Workshop) -> None:
    """From the moment on in which a save begins, for about as long as it takes."""
    step = draws.choice(range(EVERY, STEPS, EVERY))
    if child.wait_for(f"draft {step}"):
        time.sleep(draws.uniform(0.0, _time_of_a_save(workshop)))
        child.kill()


def _find_where(child: Child) -> str:
    """What went on when the kill fell, as far as the marks tell."""
    drafts, named = (sum(mark.startswith(word) for mark in child.marks) for word in ("draft", "name"))
    if "begun" not in child.marks:
        return "before the first step"
    return "inside a save" if drafts > named else "between saves"


def _after_kill(run: Path, golden: Golden) -> str | None:
    """Right after a kill, before anything mends it: what can be seen is whole, and what was committed is there."""
    return find_damage(run, golden) or find_lost(run)


def _time_of_a_run(workshop: Workshop) -> float:
    return _times(workshop)[0]


def _time_of_a_save(workshop: Workshop) -> float:
    return _times(workshop)[1]


def _times(workshop: Workshop) -> tuple[float, float]:
    """Seconds of a whole run and of one save here, measured once: kills are aimed by them."""
    if "times" not in workshop.kept:
        with workshop.scratch("times") as folder:
            started_s = time.monotonic()
            child = workshop.train(Attempt(run=str(folder / "run")), planted=False)
            child.wait_for(f"draft {EVERY}")
            begun_s = time.monotonic()
            child.wait_for(f"name {EVERY}")
            save_s = time.monotonic() - begun_s
            child.wait()
            workshop.kept["times"] = (time.monotonic() - started_s, save_s)
    times: tuple[float, float] = workshop.kept["times"]
    return times


def kill_in_phase(workshop: Workshop, seed: int) -> Result:
    """A kill in a phase of its own, then up to three more in the recoveries; each recovery may be broken off again."""
    draws = random.Random(seed)
    phase, variant = PHASES[seed % len(PHASES)], draws.choice(list(VARIANTS))
    golden = workshop.golden(variant)
    depth = draws.randint(1, DEPTH)
    with workshop.scratch("phase") as folder:
        attempt = Attempt(run=str(folder / "run"), variant=variant)
        if phase in ("load", "recovery", "clearing"):  # these need a run that was killed before
            first = workshop.train(attempt)
            if first.wait_for(f"draft {3 * EVERY}"):
                first.kill()
            first.wait()
        fell = 0
        for _ in range(depth):
            child = workshop.train(attempt)
            if child.wait_for(_mark_of(phase, attempt.folder)):
                time.sleep(draws.uniform(0.0, _time_of_a_save(workshop) / 4))
                child.kill()
            fell += child.wait() == KILLED
            if (wrong := _after_kill(attempt.folder, golden)) is not None:
                return Result(f"{phase}: {wrong}", (phase,))
            if phase in ("retention", "first save", "last save"):
                phase = "recovery"
        if not fell:
            return Result(fell=False)
        return Result(go_on(workshop, attempt, golden), (PHASES[seed % len(PHASES)], f"{fell} kills"))


def _mark_of(phase: str, run: Path) -> str:
    newest = max(manifest.steps(run), default=0)
    left = [path.name for path in (run / manifest.FOLDER).glob(".draft-*")]
    return {
        "first save": f"draft {EVERY}", "last save": f"draft {STEPS}", "retention": f"retire {EVERY}", "load": f"load {newest}",
        "recovery": "begun", "clearing": f"clear {int(left[0].rpartition('-')[2])}" if left else "begun",
    }[phase]  # fmt: skip


CAMPAIGNS = (
    Campaign(
        case="F01", title="kill -9 at any time, every second one inside a save", promises=(1, 3), trial=kill_anywhere, few=10, many=500
    ),
    Campaign(
        case="F03", title="kill -9 in the first and last save, load, retention, and again while it recovers", promises=(1, 3),
        trial=kill_in_phase, few=10, many=200,
    ),
)  # fmt: skip
