"""A clock that jumps: steps are ordered by their number and attempts by their generation, never by a time."""

from __future__ import annotations

import os
import random
from dataclasses import replace
from pathlib import Path

from surefoot.prove.campaigns.jobs import CLOCKS
from surefoot.prove.campaigns.probe import EVERY, STEPS, Attempt
from surefoot.prove.campaigns.workshop import Workshop, go_on, look_at
from surefoot.prove.outcome import Campaign, Result

NUM_KILLS = 2
YEARS_70_S = 2**31


def set_clock(workshop: Workshop, seed: int) -> Result:
    """Each attempt at a run has another wrong clock, and between them every file gets a random time."""
    draws = random.Random(seed)
    golden, clocks = workshop.golden(), tuple(draws.sample(sorted(CLOCKS), NUM_KILLS + 1))
    with workshop.scratch("clock") as folder:
        attempt = Attempt(run=str(folder / "run"), background=False)  # so that a seed always leaves the same commits
        for clock, step in zip(clocks, sorted(draws.sample(range(EVERY, STEPS, EVERY), NUM_KILLS)), strict=False):
            child = workshop.train(replace(attempt, clock=clock, die_at=step + 1))
            child.wait()
            _shuffle_times(attempt.folder, draws)
            if (wrong := look_at(attempt.folder, golden)) is not None:
                return Result(f"{clock}: {wrong}", clocks)
        wrong = go_on(workshop, replace(attempt, clock=clocks[-1]), golden)
        return Result(None if wrong is None else f"{', '.join(clocks)}: {wrong}", clocks)


def _shuffle_times(run: Path, draws: random.Random) -> None:
    for path in sorted(run.rglob("*")):
        time_s = draws.randrange(YEARS_70_S)
        os.utime(path, (time_s, time_s))


CAMPAIGNS = (
    Campaign(
        case="F25",
        title="a clock a day back, ten years on, running backwards, to and fro",
        trial=set_clock,
        few=4,
        many=30,
    ),
)
