"""Hostile commits run no code, touch nothing outside of the run and take little memory.

They take no more than they may; holes that are planted are found.
"""

from __future__ import annotations

import pytest

from benchmarks.faults.run import MANY
from surefoot.prove.campaigns import CAMPAIGNS, forge
from surefoot.prove.campaigns.outcome import CampaignOutcome, run_trials
from tests.faults.planted import PlantedWorkshop
from tests.faults.planted_files import plant

(CAMPAIGN,) = (each for each in CAMPAIGNS if each.case == "M01")


@pytest.fixture(scope="module")
def workshop(tmp_path_factory: pytest.TempPathFactory) -> PlantedWorkshop:
    return PlantedWorkshop(tmp_path_factory.mktemp("hostile"))


def found(workshop: PlantedWorkshop, trials: int, seed: int = 0) -> CampaignOutcome:
    return run_trials(CAMPAIGN, workshop, trials=trials, seed=seed, tell=print)


@pytest.mark.quick("0")
@pytest.mark.parametrize("first", range(3))  # each kind once; `surefoot prove` tries more
def test_a_hostile_commit_is_refused_in_words_and_nothing_of_it_runs(
    first: int, workshop: PlantedWorkshop
) -> None:
    kinds = len(forge.HOSTILE) + len(forge.BESIDE)
    assert CAMPAIGN.few >= kinds
    tried = [found(workshop, 1, seed) for seed in range(first, kinds, 3)]
    assert [each.failures for each in tried if not each.holds] == []


@pytest.mark.faults
def test_hostile_commits_are_refused_in_the_large_count(workshop: PlantedWorkshop) -> None:
    assert found(workshop, MANY[CAMPAIGN.case], seed=CAMPAIGN.few).failures == ()


HOLES = {
    "files are opened whatever they are": "a link outside",
    "any name will do": "a file outside",
    "a pickle is loaded": "a pickle as state.json",
    "memory is taken before the file is looked at": "a tensor larger than its file",
    "scores are not looked at": "a huge score",
    "an odd state is not caught": "a state without random",
}


@pytest.mark.parametrize("hole", HOLES)
def test_a_planted_hole_is_found(
    hole: str, workshop: PlantedWorkshop, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(workshop, "plant", plant(hole))
    (failure,) = found(workshop, 1, seed=list(forge.HOSTILE).index(HOLES[hole])).failures
    assert failure.what.startswith(HOLES[hole])
