"""Signals: SIGKILL at random times, in each phase of a run, and at every system call of a save.

Also SIGTERM and Ctrl-C with some grace time.
"""

from __future__ import annotations

import random
import signal
import time
from dataclasses import replace
from functools import partial
from pathlib import Path

from surefoot.contract import commits, manifest
from surefoot.core.errors import EXIT_INTERRUPTED, EXIT_OK, EXIT_TERMINATED
from surefoot.prove.campaigns import strace
from surefoot.prove.campaigns.probe import EVALUATE_EVERY, EVERY, STEPS, VARIANTS, ProbedRun
from surefoot.prove.campaigns.strace import Tracer
from surefoot.prove.campaigns.workshop import KILLED, Child, Workshop, go_on, look_at
from surefoot.prove.outcome import Campaign, TrialResult

DEPTH = 3  # consecutive kills, of which only the first hits an undisturbed run
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


def kill(workshop: Workshop, seed: int, *, places: tuple[str, ...], depth: int) -> TrialResult:
    """Kill a run in one of `places`, then perhaps its recoveries, `depth` kills at most.

    Then the run must resume and end as if it had never been killed.
    """
    draws = random.Random(seed)
    place, variant = places[seed % len(places)], draws.choice(list(VARIANTS))
    golden, fell = workshop.golden(variant), 0
    with workshop.scratch("kill") as folder:
        attempt = ProbedRun(run=str(folder / "run"), variant=variant)
        if place in ("load", "recovery", "clearing"):  # these need a run that was killed before
            _break_off(workshop, attempt)
        for number in range(draws.randint(1, depth)):
            child = workshop.train(attempt)
            _come_to("recovery" if number else place, child, attempt.folder, draws)
            child.kill()
            fell += child.wait() == KILLED
            if (wrong := look_at(attempt.folder, golden)) is not None:
                return TrialResult(f"{place}: {wrong}", (place,))
        return (
            TrialResult(
                go_on(workshop, attempt, golden), (place, variant, f"{fell} kills"), fell > 0
            )
            if fell
            else TrialResult(fell=False)
        )


def _break_off(workshop: Workshop, attempt: ProbedRun) -> None:
    """Train a run and kill it at the start of its third save."""
    child = workshop.train(attempt)
    child.wait_for(f"draft {3 * EVERY}")
    child.kill()
    child.wait()


def _come_to(place: str, child: Child, run: Path, draws: random.Random) -> None:
    """Wait until a run comes to a phase, and a random moment longer."""
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


def preempt(workshop: Workshop, seed: int) -> TrialResult:
    """Send one signal, or two, in a phase of a run; then resume the run.

    With enough grace time no step may be lost, and the exit code must name the signal.
    """
    draws = random.Random(seed)
    place, grace_s = PLACES[seed % len(PLACES)], GRACES_S[seed // len(PLACES) % len(GRACES_S)]
    sent, times = (
        draws.choice((signal.SIGTERM, signal.SIGTERM, signal.SIGINT)),
        draws.choice((1, 1, 1, 2)),
    )
    golden = workshop.golden()
    with workshop.scratch("preempt") as folder:
        attempt = ProbedRun(run=str(folder / "run"))
        if place == "a resume":
            _break_off(workshop, attempt)
        child = workshop.train(attempt)
        _come_to(place, child, attempt.folder, draws)
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
        newest = max(manifest.steps(attempt.folder), default=0)
        wrong = look_at(attempt.folder, golden)
        if wrong is None and status not in allowed:
            wrong = f"it ended with {status}: {child.said[-300:]}"
        elif (
            wrong is None
            and status == CODES[sent]
            and times == 1
            and newest < max(child.steps, default=0)
        ):
            wrong = (
                f"it was given the time to save, did step {child.steps[-1]}, "
                f"and step {newest} is committed"
            )
        wrong = wrong or go_on(workshop, attempt, golden)
        return TrialResult(wrong and f"{', '.join(tags)}: {wrong}", tags, fell=status != EXIT_OK)


def kill_at_call(workshop: Workshop, seed: int) -> TrialResult:
    """Kill a run at one system call of a save, before the call is done; then resume the run.

    The call is, for example, the 7th `write`.
    """
    golden, calls = workshop.golden(), _calls(workshop)
    name, count = calls[seed * STRIDE % len(calls)]
    with workshop.scratch("call") as folder:
        attempt = _one_save(folder / "run")
        child = workshop.train(attempt)
        child.wait_for(f"paused {SAVED}")
        with Tracer(
            child,
            folder / "trace",
            "-e",
            f"trace={name}",
            "-e",
            f"inject={name}:signal=KILL:when={count}",
        ):
            child.go()
            child.wait()
        wrong = look_at(attempt.folder, golden) or go_on(
            workshop, replace(attempt, pauses=(), die_at=None), golden
        )
        fell = attempt.die_at not in child.steps
        return TrialResult(
            wrong and f"{name} for the {count}th time: {wrong}", (name,) if fell else (), fell
        )


def _one_save(run: Path) -> ProbedRun:
    """Return an attempt that waits, saves without background threads, and dies one step later.

    It dies so that a trace ends with the save.
    """
    return ProbedRun(run=str(run), background=False, pauses=(SAVED,), die_at=SAVED + 1)


def _calls(workshop: Workshop) -> list[tuple[str, int]]:
    """Return every system call from the pause to the end of the next step, as (name, count).

    The count is over calls of that name in the thread. Waits for other threads are left out: their
    count differs in every run, so that the kill would seldom take effect.
    """
    return sorted(
        {
            (name, number)
            for name, number, _ in strace.trace_a_save(workshop, SAVED)
            if name not in WAITS
        }
    )


CAMPAIGNS = (
    Campaign(
        case="F01",
        title="kill -9 at any time, every second one inside a save",
        few=20,
        trial=partial(kill, places=ANYWHERE, depth=1),
    ),
    Campaign(
        case="F02",
        title="kill -9 at every system call of a save and of the retention after it",
        trial=kill_at_call,
        few=12,
        sweep=lambda workshop: len(_calls(workshop)),
        missing=strace.missing,
    ),
    Campaign(
        case="F03",
        title="kill -9 in the first and last save, load, retention, and again while it recovers",
        few=10,
        trial=partial(kill, places=PHASES, depth=DEPTH),
    ),
    Campaign(
        case="F24",
        title="SIGTERM with 30, 5 and 0 s of grace, or twice; Ctrl-C",
        trial=preempt,
        few=10,
    ),
)
