"""Disks that are full, refuse a call, turn read-only or are slow cost the saves that they refuse.

And bugs that are planted are found.
"""

from __future__ import annotations

from collections.abc import Mapping

import pytest

from benchmarks.faults.run import MANY
from surefoot.prove.campaigns import CAMPAIGNS, failing
from surefoot.prove.campaigns.outcome import Campaign, CampaignOutcome, run_trials
from tests.faults.planted import PlantedWorkshop
from tests.faults.planted_files import plant

CASES = ("F07", "F08", "F09", "F10")
FULL, REFUSED, READ_ONLY, SLOW = DISKS = [each for each in CAMPAIGNS if each.case in CASES]


@pytest.fixture(scope="module")
def workshop(tmp_path_factory: pytest.TempPathFactory) -> PlantedWorkshop:
    return PlantedWorkshop(tmp_path_factory.mktemp("failing"))


def found(
    campaign: Campaign, workshop: PlantedWorkshop, trials: int, seed: int = 0
) -> CampaignOutcome:
    outcome = run_trials(campaign, workshop, trials=trials, seed=seed, tell=print)
    if outcome.not_here is not None:
        pytest.skip(outcome.not_here)
    return outcome


@pytest.mark.quick("F07")
@pytest.mark.parametrize("campaign", DISKS, ids=lambda campaign: campaign.case)
def test_a_failing_disk_costs_the_saves_that_it_refuses(
    campaign: Campaign, workshop: PlantedWorkshop
) -> None:
    outcome = found(campaign, workshop, campaign.few)
    assert outcome.failures == ()
    assert outcome.trials


@pytest.mark.faults
@pytest.mark.parametrize("campaign", DISKS, ids=lambda campaign: campaign.case)
def test_a_failing_disk_costs_the_saves_that_it_refuses_in_the_large_count(
    campaign: Campaign, workshop: PlantedWorkshop
) -> None:
    assert found(campaign, workshop, MANY[campaign.case]).failures == ()


def test_a_checkpoint_whose_rename_is_not_on_the_disk_is_none_and_costs_no_other(
    workshop: PlantedWorkshop,
) -> None:
    calls = failing.find_calls(workshop)
    last = max(call for call in calls if call[0] == "fsync")  # of the folder of checkpoints
    assert found(REFUSED, workshop, 1, calls.index(last)).failures == ()


PLANTED: Mapping[str, tuple[Campaign, str | int]] = {
    "a failed save ends the run": (FULL, 0),
    "a failed save is not told": (FULL, 0),
    "a failed save is told twice": (FULL, 0),
    "room is made before the save": (FULL, 0),
    "fsync is tried again": (REFUSED, "fsync"),
    "fsync may fail": (REFUSED, "fsync"),
    "the ledger is synced again": (REFUSED, "fsync"),
    "a save does not wait for the one before": (SLOW, 0),
}


@pytest.mark.parametrize("bug", PLANTED)
def test_a_planted_bug_is_found(
    bug: str, workshop: PlantedWorkshop, monkeypatch: pytest.MonkeyPatch
) -> None:
    campaign, seed = PLANTED[bug]
    found(campaign, workshop, 0)  # is it missing here?
    at = (
        seed
        if isinstance(seed, int)
        else [name for name, _ in failing.find_calls(workshop)].index(seed)
    )
    monkeypatch.setattr(workshop, "plant", plant(bug))
    assert found(campaign, workshop, 1, seed=at).failures
