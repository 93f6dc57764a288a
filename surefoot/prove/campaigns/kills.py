"""kill -9: at random times, at every system call of a save, in a load, in retention, and in the recovery from an earlier kill."""

from __future__ import annotations

import random
import time
from dataclasses import replace
from pathlib import Path

from surefoot.contract import manifest
from surefoot.prove.campaigns.power import trace
from surefoot.prove.campaigns.power.trace import Tracer
from surefoot.prove.campaigns.probe import EVERY, STEPS, VARIANTS, Attempt
from surefoot.prove.campaigns.workshop import KILLED, Child, Workshop, go_on, look_at
from surefoot.prove.outcome import Campaign, Result

TRIES = 8  # of one kill: a fast run may end before it comes
DEPTH = 3  # kills in a row of which none but the first hits an undisturbed run
SAVED = 4 * EVERY  # the step whose save is killed at every call: commits are retired after it
STRIDE = 1_000_003  # a prime: seeds that follow one another fall far apart, and all seeds of a sweep on each place once
WAITS = ("futex", "sched_yield")  # as often as the threads of this moment need them; they change nothing outside the process
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
            wrong = look_at(attempt.folder, golden) or go_on(workshop, attempt, golden)
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
            if (wrong := look_at(attempt.folder, golden)) is not None:
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


def kill_at_call(workshop: Workshop, seed: int) -> Result:
    """A kill at one system call of a save, before it is done: `write` the 7th time, say. Then the run goes on."""
    golden, places = workshop.golden(), _places(workshop)
    name, count = places[seed * STRIDE % len(places)]
    with workshop.scratch("call") as folder:
        attempt = _one_save(folder / "run")
        child = workshop.train(attempt)
        child.wait_for(f"paused {SAVED}")
        with Tracer(child, folder / "trace", "-e", f"trace={name}", "-e", f"inject={name}:signal=KILL:when={count}"):
            child.go()
            child.wait()
        wrong = look_at(attempt.folder, golden) or go_on(workshop, replace(attempt, pauses=(), die_at=None), golden)
        fell = f"step {attempt.die_at}" not in child.marks
        return Result(None if wrong is None else f"{name} for the {count}th time: {wrong}", (name,) if fell else (), fell)


def _one_save(run: Path) -> Attempt:
    """An attempt that waits before it saves, saves without threads of its own, and dies one step later, so that a trace ends there."""
    return Attempt(run=str(run), background=False, pauses=(SAVED,), die_at=SAVED + 1)


def _places(workshop: Workshop) -> list[tuple[str, int]]:
    """Every system call from the wait to the end of the next step, as its name and how many of that name a thread had made.

    Waits for another thread are none: their number is another in every run, so that the kill would seldom fall.
    """
    if "places" not in workshop.kept:
        with workshop.scratch("places") as folder:
            child = workshop.train(_one_save(folder / "run"), planted=False)
            child.wait_for(f"paused {SAVED}")
            with Tracer(child, folder / "trace") as tracer:
                child.go()
                child.wait()
                calls = [call for call in tracer.calls() if call.name not in WAITS]
            workshop.kept["places"] = sorted(
                {place for thread in {call.thread for call in calls} for place in trace.names(calls, thread)}
            )
    places: list[tuple[str, int]] = workshop.kept["places"]
    return places


def _count_places(workshop: Workshop) -> int:
    return len(_places(workshop))


CAMPAIGNS = (
    Campaign(
        case="F01", title="kill -9 at any time, every second one inside a save", trial=kill_anywhere, few=20, many=500
    ),
    Campaign(
        case="F02", title="kill -9 at every system call of a save and of the retention after it", trial=kill_at_call,
        few=12, many=10_000, sweep=_count_places, missing=trace.missing,
    ),
    Campaign(
        case="F03", title="kill -9 in the first and last save, load, retention, and again while it recovers",
        trial=kill_in_phase, few=10, many=200,
    ),
)  # fmt: skip
