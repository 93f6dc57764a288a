"""Damaged files: what is loaded is a state that was saved, or the damage is named; and each campaign finds a bug that is planted."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from surefoot.components.checkpoint import Commit
from surefoot.components.stability import Guard
from surefoot.contract import commits, digest, manifest
from surefoot.prove.campaigns.files import damage
from surefoot.prove.campaigns.probe import VARIANTS
from surefoot.prove.campaigns.workshop import Workshop
from surefoot.prove.outcome import Campaign, Outcome, carry_out
from surefoot.train.record.telling import Telling
from surefoot.train.resume.keeper import Keeper

FLIP, FILE, ANOTHER = damage.CAMPAIGNS


@pytest.fixture(scope="module")
def workshop(tmp_path_factory: pytest.TempPathFactory) -> Workshop:
    """One for all: the damaged runs are opened in this process, so nothing is forked."""
    return Workshop(tmp_path_factory.mktemp("damage"))


def found(campaign: Campaign, workshop: Workshop, trials: int, seed: int = 0) -> Outcome:
    return carry_out(campaign, workshop, trials=trials, seed=seed, tell=print)


@pytest.mark.parametrize("campaign", damage.CAMPAIGNS, ids=lambda campaign: campaign.case)
def test_a_damaged_run_loads_what_was_saved_or_names_the_damage(campaign: Campaign, workshop: Workshop) -> None:
    outcome = found(campaign, workshop, campaign.few)
    assert outcome.failures == ()
    assert outcome.trials == campaign.few


@pytest.mark.faults
@pytest.mark.parametrize("campaign", damage.CAMPAIGNS, ids=lambda campaign: campaign.case)
def test_a_damaged_run_loads_what_was_saved_or_names_the_damage_in_the_large_count(
    campaign: Campaign, workshop: Workshop
) -> None:
    outcome = found(campaign, workshop, campaign.many, seed=campaign.few)
    assert outcome.failures == ()


# ---- the bugs that they must find


@contextlib.contextmanager
def without_size_or_kind(folder: Path, entry: manifest.Entry) -> Iterator[int]:
    descriptor = os.open(folder / entry.name, os.O_RDONLY | os.O_NONBLOCK)
    try:
        yield descriptor
    finally:
        os.close(descriptor)


def any_own(self: Keeper, commit: Any) -> None: ...


def load_before_it_is_verified(run: Path, load: Any, *, at_most: int | None = None) -> tuple[int | None, list[str]]:
    troubles = []
    for step in reversed(manifest.named_steps(run)):
        try:
            load(Commit(run, step))
        except damage.RunFolderError as error:
            troubles.append(error.message)
            commits.set_aside(manifest.step_folder(run, step))
            continue
        return step, troubles
    return None, troubles


PLANTED = {
    "digests are not compared": (FLIP, digest, "of_bytes", lambda data: digest.combine([])),
    "the digest of a manifest is not its own": (FLIP, manifest, "_digest", lambda row: ""),
    "a manifest that is gone is no damage": (FILE, manifest, "named_steps", manifest.steps),
    "neither size nor kind is looked at": (FILE, commits, "opened", without_size_or_kind),
    "what is damaged is deleted": (FLIP, commits, "set_aside", commits.remove),
    "what is damaged is not told": (FLIP, Telling, "fault", lambda self, fault: None),
    "the wrong commit is named": (FLIP, Guard, "damaged_commit", lambda self, step, detail: self.storage_fault(step, "?", "one")),
    "the commit of another run is as good": (ANOTHER, Keeper, "_check_own", any_own),
    "a commit is loaded before it is verified": (FLIP, "surefoot.components.checkpoint", "newest_loadable", load_before_it_is_verified),
}  # fmt: skip


@pytest.mark.parametrize("bug", PLANTED)
def test_a_planted_bug_is_found(bug: str, workshop: Workshop, monkeypatch: pytest.MonkeyPatch) -> None:
    campaign, place, name, broken = PLANTED[bug]
    for variant in VARIANTS:  # made before anything is broken
        damage.find_left(workshop, variant)
        damage.find_left(workshop, variant, seed=1)
    if isinstance(place, str):
        monkeypatch.setattr(f"{place}.{name}", broken)
    else:
        monkeypatch.setattr(place, name, broken)
    assert any(found(campaign, workshop, 1, seed=seed).failures for seed in range(80))
