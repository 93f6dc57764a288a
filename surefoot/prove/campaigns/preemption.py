"""SIGTERM as schedulers send it: some seconds of grace, then kill -9; and the signals of an impatient user, twice."""

from __future__ import annotations

import random
import signal
import time

from surefoot.contract import manifest
from surefoot.core.errors import EXIT_INTERRUPTED, EXIT_OK, EXIT_TERMINATED
from surefoot.prove.campaigns.probe import EVALUATE_EVERY, EVERY, STEPS, Attempt
from surefoot.prove.campaigns.workshop import KILLED, Child, Workshop, go_on, look_at
from surefoot.prove.outcome import Campaign, Result

PLACES = ("any step", "a save", "an evaluation", "the first step", "going on")
GRACES_S = (30.0, 5.0, 0.0)
LATER_S = 0.02  # after the place, at most
CODES = {signal.SIGTERM: EXIT_TERMINATED, signal.SIGINT: EXIT_INTERRUPTED}


def preempt(workshop: Workshop, seed: int) -> Result:
    """One signal, or two, at a place; with grace no step is lost and the exit code says what happened; then the run goes on."""
    draws = random.Random(seed)
    place, grace_s = PLACES[seed % len(PLACES)], GRACES_S[seed // len(PLACES) % len(GRACES_S)]
    sent = draws.choice((signal.SIGTERM, signal.SIGTERM, signal.SIGINT))
    is_twice = draws.random() < 0.25
    golden = workshop.golden()
    with workshop.scratch("preempt") as folder:
        attempt = Attempt(run=str(folder / "run"))
        if place == "going on":
            _break_off(workshop, attempt)
        child = workshop.train(attempt)
        child.wait_for(_mark_of(place, draws))
        time.sleep(draws.uniform(0.0, LATER_S))
        for _ in range(2 if is_twice else 1):
            child.send(sent)
        if not child.ends_within(grace_s):
            child.kill()
        status = child.wait()
        tags = (place, f"{grace_s:.0f} s of grace", f"{sent.name}{' twice' if is_twice else ''}", f"ended with {status}")
        wrong = look_at(attempt.folder, golden) or _judge(child, attempt, status, sent, may_die=is_twice, had_grace=grace_s > 0)
        if wrong is None:
            wrong = go_on(workshop, attempt, golden)
        return Result(None if wrong is None else f"{', '.join(tags)}: {wrong}", tags, fell=status != EXIT_OK)


def _break_off(workshop: Workshop, attempt: Attempt) -> None:
    """Leave a run that was killed."""
    first = workshop.train(attempt)
    if first.wait_for(f"name {2 * EVERY}"):
        first.kill()
    first.wait()


def _mark_of(place: str, draws: random.Random) -> str:
    return {
        "any step": f"step {draws.randint(1, STEPS - 2)}", "a save": f"draft {draws.randrange(EVERY, STEPS, EVERY)}",
        "an evaluation": f"step {draws.randrange(EVALUATE_EVERY, STEPS, EVALUATE_EVERY)}", "the first step": "begun",
        "going on": "begun",
    }[place]  # fmt: skip


def _judge(child: Child, attempt: Attempt, status: int, sent: signal.Signals, *, may_die: bool, had_grace: bool) -> str | None:
    """What is wrong with how it ended: by a code of its own and without a lost step, or at once where it was told twice."""
    if status == EXIT_OK or (status == KILLED and not had_grace) or (status == -sent and may_die):
        return None
    if status != CODES[sent]:
        return f"it ended with {status}: {child.said[-300:]}"
    done = [int(mark.removeprefix("step ")) for mark in child.marks if mark.startswith("step ")]
    newest = max(manifest.steps(attempt.folder), default=0)
    if done and newest < done[-1] and not may_die:
        return f"it was given the time to save, did step {done[-1]}, and step {newest} is committed"
    return None


CAMPAIGNS = (
    Campaign(
        case="F24",
        title="SIGTERM with 30, 5 and 0 s of grace, or twice; Ctrl-C",
        trial=preempt,
        few=10,
        many=200,
    ),
)
