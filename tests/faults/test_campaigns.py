"""The promises hold in every trial of the fault campaigns.

And each campaign is seen to catch what it is there to catch.
"""

from __future__ import annotations

import itertools
import os
import random
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest

from benchmarks.faults.run import MANY
from surefoot.prove.campaigns import CAMPAIGNS, jobs
from surefoot.prove.campaigns import workshop as places
from surefoot.prove.campaigns.outcome import (
    Campaign,
    CampaignOutcome,
    Failure,
    TrialResult,
    run_trials,
)
from surefoot.prove.campaigns.probe import EVERY, STEPS, ProbedRun
from surefoot.prove.campaigns.workshop import Workshop
from surefoot.prove.promises import PROMISES
from tests.faults import planted
from tests.faults.planted import PlantedWorkshop

LARGE_SEED = 10_000  # the large counts have trials of their own
CASES = ("F01", "F02", "F03", "F24", "F04", "F29")
BY_CASE = {campaign.case: campaign for campaign in CAMPAIGNS if campaign.case in CASES}
# campaign, what is broken, the seed of the first trial, and how many of them must be enough
PLANTS = [
    ("F01", "a_last_bit_off_on_resume", 1, 8),
    ("F01", "begun_anew_on_resume", 1, 8),
    ("F01", "a_pointer_taken_as_truth", 1, 8),
    ("F02", "old_ones_deleted_first", 0, 12),
    ("F03", "a_loaded_commit_is_used_up", 2, 6),
    ("F04", "no_sync_of_files", 0, 100),
    ("F04", "no_sync_of_folders", 0, 100),
    ("F04", "no_sync_of_new_parents", 0, 100),
    ("F04", "rename_before_sync", 0, 200),
    ("F24", "deaf_to_sigterm", 0, 2),
    ("F24", "nothing_saved_at_the_end", 0, 12),
    ("F29", "no_lock", 0, 1),
    ("F29", "a_stale_attempt_may_commit", 2, 1),
]


@pytest.fixture(scope="module")
def workshop() -> Iterator[PlantedWorkshop]:
    """In memory where it can be.

    A kill loses nothing that was written, synced or not, and a real disk costs the tests a minute.
    """
    memory = "/dev/shm" if os.access("/dev/shm", os.W_OK) else None
    with tempfile.TemporaryDirectory(prefix="surefoot-faults-", dir=memory) as folder:
        yield PlantedWorkshop(Path(folder))


def tried(campaign: Campaign, workshop: PlantedWorkshop, trials: int, seed: int) -> CampaignOutcome:
    """What came of it; skips where it cannot be tried."""
    found = run_trials(campaign, workshop, trials=trials, seed=seed)
    if found.not_here is not None:
        pytest.skip(found.not_here)
    return found


@pytest.mark.quick("F01", "F02", "F24", "F29")
@pytest.mark.parametrize("case", BY_CASE)
def test_the_promises_hold_in_a_few_trials(case: str, workshop: PlantedWorkshop) -> None:
    # `surefoot prove` tries all of these, make test-faults more
    few = min(-(-BY_CASE[case].few // 2), 5)
    found = tried(BY_CASE[case], workshop, few, 0)
    assert found.failures == ()
    assert found.trials >= 0.8 * few  # a fault may come too late


@pytest.mark.faults
@pytest.mark.parametrize("case", BY_CASE)
def test_the_promises_hold_in_many_trials(case: str, workshop: PlantedWorkshop) -> None:
    found = tried(BY_CASE[case], workshop, MANY[case], LARGE_SEED)
    assert found.failures == ()
    assert found.holds


@pytest.mark.parametrize(
    ("case", "plant", "seed", "trials"),
    PLANTS,
    ids=[f"{case}-{plant}" for case, plant, _, _ in PLANTS],
)
def test_a_campaign_catches_what_is_planted(
    case: str, plant: str, seed: int, trials: int, workshop: PlantedWorkshop
) -> None:
    found = first_failure(BY_CASE[case], workshop, plant, range(seed, seed + trials))
    assert found is not None


def first_failure(
    campaign: Campaign, workshop: PlantedWorkshop, plant: str, seeds: range
) -> Failure | None:
    workshop.plant = getattr(planted, plant)
    try:
        for seed in seeds:
            failures = tried(campaign, workshop, 1, seed).failures
            if failures:
                return failures[0]
    finally:
        workshop.plant = None
    return None


def test_every_campaign_is_shown_to_catch_something() -> None:
    assert {case for case, *_ in PLANTS} == set(BY_CASE)


def test_every_promise_names_campaigns_that_there_are_and_every_campaign_has_a_promise() -> None:
    named = {case for promise in PROMISES for case in promise.cases}
    assert named == {campaign.case for campaign in CAMPAIGNS}
    assert all(promise.cases for promise in PROMISES)


def test_a_trial_is_replayed_by_its_seed(workshop: PlantedWorkshop) -> None:
    if BY_CASE["F04"].missing():
        pytest.skip(BY_CASE["F04"].missing())
    first, again = (tried(BY_CASE["F04"], workshop, 5, 7).counts for _ in range(2))
    assert first == again


def test_a_trial_that_waits_for_ever_has_failed(
    workshop: PlantedWorkshop, monkeypatch: pytest.MonkeyPatch
) -> None:
    def wait(workshop: Workshop, seed: int, folder: Path) -> TrialResult:
        os.mkfifo(folder / "run")
        workshop.fork(read_pipe, ProbedRun(folder=folder / "run")).wait()
        return TrialResult()

    monkeypatch.setattr(places, "PATIENCE_S", 0.2)
    found = run_trials(
        Campaign(case="F00", title="a pipe", trial=wait, few=1), workshop, trials=2, seed=5
    )
    assert [(each.seed, each.what) for each in found.failures] == [
        (seed, "a trial hung after []: ") for seed in (5, 6)
    ]


def read_pipe(attempt: ProbedRun, line: jobs.Line) -> int:
    return len(attempt.folder.read_bytes())


@pytest.mark.parametrize(
    ("misses", "fell", "tried"), [((), 20, 20), ((3, 7), 20, 22), (range(10, 20), 12, 22)]
)
def test_a_fault_that_did_not_fall_is_made_up_for(
    misses: Sequence[int], fell: int, tried: int, workshop: PlantedWorkshop
) -> None:
    seeds = []

    def kill(workshop: Workshop, seed: int, folder: Path) -> TrialResult:
        seeds.append(seed)
        return TrialResult(fell=seed - 100 not in misses)

    found = run_trials(
        Campaign(case="F00", title="late kills", trial=kill, few=1), workshop, trials=20, seed=100
    )
    assert (found.trials, seeds) == (fell, list(range(100, 100 + tried)))


def test_trials_leave_nothing_behind(workshop: PlantedWorkshop) -> None:
    workshop.golden(ProbedRun(folder=Path()))  # is kept
    before = set(os.listdir(workshop.folder))
    tried(BY_CASE["F29"], workshop, 1, 3)
    assert set(os.listdir(workshop.folder)) == before


# ---- clocks: steps are ordered by their number and attempts by their generation, never by a time

DAY_S, TEN_YEARS_S, YEARS_70_S = 86_400.0, 315_576_000.0, 2**31
CLOCKS = {  # how far a clock is off when it is read for the nth time, in seconds
    "a day back": lambda n: -DAY_S,
    "ten years on": lambda n: TEN_YEARS_S,
    "backwards": lambda n: -2.0 * n,
    "to and fro": lambda n: TEN_YEARS_S if n % 2 else -DAY_S,
}


def set_clock(jump: str, also: str | None) -> None:
    """The time of day as a machine has it whose clock was set.

    And the time since its start as one has it that was started anew.
    """
    real, since, calls, begun_s = time.time, time.monotonic, itertools.count(1), time.monotonic()
    time.time = lambda: real() + CLOCKS[jump](next(calls))
    time.monotonic = lambda: since() - begun_s
    if also is not None:
        getattr(planted, also)()


def under_wrong_clocks(workshop: PlantedWorkshop, seed: int, also: str | None = None) -> str | None:
    """Each attempt has another wrong clock, and between them every file gets a random time."""
    draws, golden = random.Random(seed), workshop.golden(ProbedRun(folder=Path()))
    first, second, last = draws.sample(sorted(CLOCKS), 3)
    try:
        with workshop.scratch("clock") as folder:
            # so that a seed always leaves the same commits
            attempt = ProbedRun(folder=folder / "run", background=False)
            for clock, step in zip(
                (first, second), sorted(draws.sample(range(EVERY, STEPS, EVERY), 2)), strict=True
            ):
                workshop.plant = partial(set_clock, clock, also)
                workshop.train(replace(attempt, die_at=step + 1)).wait()
                for path in sorted(attempt.folder.rglob("*")):
                    os.utime(path, (draws.randrange(YEARS_70_S),) * 2)
                if (wrong := places.check_after_fault(attempt.folder, golden)) is not None:
                    return wrong
            workshop.plant = partial(set_clock, last, also)
            return places.restart_and_compare(workshop, attempt, golden)
    finally:
        workshop.plant = None


@pytest.mark.parametrize(
    "seed", [*range(4), *(pytest.param(seed, marks=pytest.mark.faults) for seed in range(4, 30))]
)
def test_a_wrong_clock_changes_nothing(seed: int, workshop: PlantedWorkshop) -> None:
    assert under_wrong_clocks(workshop, seed) is None


def test_commits_that_are_ordered_by_time_are_found(workshop: PlantedWorkshop) -> None:
    assert any(under_wrong_clocks(workshop, seed, "the_newest_by_time") for seed in range(4))
