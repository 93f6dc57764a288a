"""The promises hold on several ranks.

And each campaign with ranks is seen to catch what it is there to catch.
"""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from benchmarks.faults.run import MANY
from surefoot.prove.campaigns import CAMPAIGNS, ranks
from surefoot.prove.campaigns.outcome import run_trials
from surefoot.prove.campaigns.workshop import Workshop
from tests.faults import planted_ranks

CASES = ("F26", "F12", "F13", "F20", "F23", "F01-loop")
BY_CASE = {campaign.case: campaign for campaign in CAMPAIGNS if campaign.case in CASES}
LARGE_SEED = 10_000
QUICK = ("F13",)  # that is tried each time: a trial takes seconds of a core for each rank
# campaign, what is broken, in which task, and the seed of the trial that must see it
PLANTS: list[tuple[str, str, dict[str, Any], int]] = [
    ("F26", "MovedOnResume", {}, 0),
    ("F12", "NoGuard", {}, 0),
    ("F13", "NoGuard", {}, 0),
    ("F20", "", {"STALL_S": 30.0, "NAMED_S": -26.0}, 0),
    ("F20", "MovedOnResume", {}, 0),
    ("F23", "Outlives", {"GONE_S": 3.0}, 0),
    ("F01-loop", "", {"RESTARTS": 5}, 0),
]


@pytest.fixture(scope="module")
def workshop() -> Iterator[Workshop]:
    with tempfile.TemporaryDirectory(prefix="surefoot-faults-") as folder:
        yield Workshop(Path(folder))


@pytest.mark.parametrize(
    "case",
    [each if each in QUICK else pytest.param(each, marks=pytest.mark.faults) for each in BY_CASE],
)
def test_the_promises_hold_on_several_ranks(case: str, workshop: Workshop) -> None:
    found = run_trials(BY_CASE[case], workshop, trials=1, seed=0)
    assert (found.failures, found.trials) == ((), 1)


@pytest.mark.faults
@pytest.mark.parametrize("case", BY_CASE)
def test_the_promises_hold_in_many_trials(case: str, workshop: Workshop) -> None:
    found = run_trials(BY_CASE[case], workshop, trials=MANY[case], seed=LARGE_SEED)
    assert found.failures == ()


@pytest.mark.faults
@pytest.mark.parametrize(
    ("case", "plant", "names", "seed"),
    PLANTS,
    ids=[f"{case}-{plant}" for case, plant, *_ in PLANTS],
)
def test_a_campaign_catches_what_is_planted(
    case: str,
    plant: str,
    names: dict[str, Any],
    seed: int,
    workshop: Workshop,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    if case in ("F26", "F20", "F23"):
        sound = workshop.golden(ranks.run_on(Path(), 1))
        monkeypatch.setattr(workshop, "golden", lambda attempt: sound)
    if case == "F12":
        monkeypatch.setattr(
            ranks,
            "find_wrong_end",
            lambda child, attempt, golden: None if child.wait() >= 0 else "it was killed",
        )
        monkeypatch.setattr(workshop, "golden", lambda attempt: None)
    if plant:
        monkeypatch.setattr(ranks, "TASK", f"{planted_ranks.__name__}:{plant}")
    for name, value in names.items():
        monkeypatch.setattr(ranks, name, value)
    assert run_trials(BY_CASE[case], workshop, trials=1, seed=seed).failures != ()


def test_every_campaign_is_shown_to_catch_something() -> None:
    assert {case for case, *_ in PLANTS} == set(BY_CASE)
