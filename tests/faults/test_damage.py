"""Damaged files: what is loaded is a state that was saved, or the damage is named.

And each campaign finds a bug that is planted.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from benchmarks.faults.run import MANY
from surefoot.contract import commits, events, manifest
from surefoot.prove.campaigns import CAMPAIGNS, damage
from surefoot.prove.campaigns.outcome import Campaign, CampaignOutcome, run_trials
from surefoot.prove.campaigns.probe import ProbedRun
from tests.faults.planted import PlantedWorkshop
from tests.faults.planted_files import plant

CASES = ("F05", "F06", "F06-run")
FLIP, FILE, ANOTHER = DAMAGES = [each for each in CAMPAIGNS if each.case in CASES]


@pytest.fixture(scope="module")
def workshop(tmp_path_factory: pytest.TempPathFactory) -> PlantedWorkshop:
    return PlantedWorkshop(tmp_path_factory.mktemp("damage"))


def found(
    campaign: Campaign, workshop: PlantedWorkshop, trials: int, seed: int = 0
) -> CampaignOutcome:
    return run_trials(campaign, workshop, trials=trials, seed=seed, tell=print)


@pytest.mark.quick("F06")
@pytest.mark.parametrize("campaign", DAMAGES, ids=lambda campaign: campaign.case)
def test_a_damaged_run_loads_what_was_saved_or_names_the_damage(
    campaign: Campaign, workshop: PlantedWorkshop
) -> None:
    few = campaign.few // 4  # `surefoot prove` tries all of these, make test-faults more
    outcome = found(campaign, workshop, few)
    assert outcome.failures == ()
    assert outcome.trials == few


@pytest.mark.faults
@pytest.mark.parametrize("campaign", DAMAGES, ids=lambda campaign: campaign.case)
def test_a_damaged_run_loads_what_was_saved_or_names_the_damage_in_the_large_count(
    campaign: Campaign, workshop: PlantedWorkshop
) -> None:
    outcome = found(campaign, workshop, MANY[campaign.case], seed=campaign.few // 4)
    assert outcome.failures == ()


# ---- what is no fault of the run


@pytest.fixture
def copied(workshop: PlantedWorkshop) -> Iterator[tuple[ProbedRun, Path]]:
    """A run that was left in the middle, and a copy of it to damage."""
    left = damage.find_left(workshop, "plain")
    with workshop.scratch("copied") as folder:
        damage.copy_run(left.folder, folder / "run")
        yield left, folder / "run"


def exchange(one: Path, other: Path) -> None:
    own = one.read_bytes()
    one.write_bytes(other.read_bytes())
    other.write_bytes(own)


def test_a_step_that_is_saved_anew_on_the_way_to_the_end_is_no_damaged_commit(
    copied: tuple[ProbedRun, Path], workshop: PlantedWorkshop
) -> None:
    left, run = copied
    best, newest = (manifest.step_folder(run, step) for step in manifest.steps(left.folder)[-2:])
    exchange(newest / "state.json", best / "state.json")
    assert damage.find_wrong(workshop, left, newest / "state.json", to_the_end=True) is None
    assert commits.check(best).step == manifest.steps(left.folder)[-2]


def test_the_manifest_of_another_run_names_the_first_file_that_it_contradicts(
    copied: tuple[ProbedRun, Path], workshop: PlantedWorkshop
) -> None:
    left, run = copied
    other = damage.find_left(workshop, "plain", seed=1).folder
    touched, foreign = (
        manifest.step_folder(each, manifest.steps(left.folder)[-1]) / manifest.FILE
        for each in (run, other)
    )
    touched.write_bytes(foreign.read_bytes())
    assert damage.find_wrong(workshop, left, touched, to_the_end=False) is None


def test_a_log_that_changed_places_with_a_manifest_is_refused_by_its_name(
    copied: tuple[ProbedRun, Path], workshop: PlantedWorkshop
) -> None:
    left, run = copied
    exchange(
        run / events.FILE,
        manifest.step_folder(run, manifest.steps(left.folder)[-1]) / manifest.FILE,
    )
    assert damage.find_wrong(workshop, left, run / events.FILE, to_the_end=False) is None


def test_a_run_that_is_refused_for_a_damaged_commit_alone_is_a_failure(
    copied: tuple[ProbedRun, Path], workshop: PlantedWorkshop, monkeypatch: pytest.MonkeyPatch
) -> None:
    left, run = copied
    path = manifest.step_folder(run, manifest.steps(left.folder)[-1]) / "state.json"
    path.unlink()
    monkeypatch.setattr(workshop, "plant", plant("a damaged commit ends the run"))
    wrong = damage.find_wrong(workshop, left, path, to_the_end=False)
    assert wrong is not None
    assert wrong.startswith("the run was refused: ")
    assert str(path) in wrong


# ---- the bugs that they must find

PLANTED = {
    "digests are not compared": FLIP,
    "the digest of a manifest is not its own": FLIP,
    "a manifest that is gone is no damage": FILE,
    "neither size nor kind is looked at": FILE,
    "what is damaged is deleted": FLIP,
    "what is damaged is not told": FLIP,
    "the wrong commit is named": FLIP,
    "the commit of another run is as good": ANOTHER,
    "a commit is loaded before it is verified": FLIP,
}
# the seed of the first damage that shows the bug; none of those before it does
FIRST = {"the wrong commit is named": 11, "what is damaged is not told": 11}


@pytest.mark.quick("the wrong commit is named", "what is damaged is not told")
@pytest.mark.parametrize("bug", PLANTED)
def test_a_planted_bug_is_found(
    bug: str, workshop: PlantedWorkshop, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(workshop, "plant", plant(bug))
    seeds = range(FIRST.get(bug, 0), 80)
    assert any(found(PLANTED[bug], workshop, 1, seed=seed).failures for seed in seeds)
