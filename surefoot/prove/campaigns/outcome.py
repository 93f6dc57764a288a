"""Results of a fault campaign: its trials, the seed that replays each trial, and its failures."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from surefoot.core.errors import SurefootError
from surefoot.prove.campaigns.workshop import Workshop

# after n clean trials the failure rate is below 3/n with 95 % confidence
# (Hanley & Lippman-Hand, JAMA 1983)
RULE_OF_THREE = 3.0
Tell = Callable[[str], None]


@dataclass(frozen=True)
class TrialResult:
    """Result of one trial of a campaign.

    Args:
        wrong: The error; None if there is none.
        tags: Texts that describe the trial, which the campaign counts.
        fell: Whether the fault took effect.
    """

    wrong: str | None = None
    tags: tuple[str, ...] = ()
    fell: bool = True


@dataclass(frozen=True, kw_only=True)
class Failure:
    """Trial in which an error was found; the same case and seed replay it."""

    case: str
    seed: int
    what: str


@dataclass(frozen=True, kw_only=True)
class Campaign:
    """Fault and the trial that injects it.

    Args:
        case: Name of the campaign, such as `F01`.
        title: Description of the fault.
        trial: Function of a workshop, a seed and a new folder, which is deleted afterwards.
        few: Number of trials that take only seconds.
        sweep: Function that returns the number of different trials; None if they are unlimited.
        missing: Function that returns why the trials are impossible on this machine, or None.
    """

    case: str
    title: str
    trial: Callable[[Workshop, int, Path], TrialResult]
    few: int
    sweep: Callable[[Workshop], int] | None = None
    missing: Callable[[], str | None] = lambda: None


@dataclass(frozen=True, kw_only=True)
class CampaignOutcome:
    """Results of a campaign.

    `trials` is the number of trials in which the fault took effect. `counts` is the number of
    trials by tag. `not_here` is the reason why the trials are impossible on this machine.
    """

    case: str
    title: str
    seed: int
    trials: int
    failures: tuple[Failure, ...] = ()
    counts: Mapping[str, int] = field(default_factory=dict)
    elapsed_s: float = 0.0
    not_here: str | None = None

    @property
    def holds(self) -> bool:
        """True if there were trials and none of them failed."""
        return bool(self.trials) and not self.failures

    @property
    def bound(self) -> float | None:
        """Upper bound of the failure rate with 95 % confidence: 3/n after n clean trials.

        None if there were no trials, or one failed.

        >>> CampaignOutcome(case="F01", title="kill", seed=0, trials=500).bound
        0.006
        """
        return RULE_OF_THREE / self.trials if self.holds else None


def run_trials(
    campaign: Campaign,
    workshop: Workshop,
    *,
    trials: int,
    seed: int,
    tell: Tell = lambda text: None,
) -> CampaignOutcome:
    """Run `trials` trials with the seeds `seed`, `seed + 1`, ..., and report failures to `tell`.

    A trial that raises a SurefootError has failed. If the run ended before its fault took effect,
    one more trial is made with the next seed, up to a tenth of `trials`.
    """
    case, title = campaign.case, campaign.title
    if (missing := campaign.missing()) is not None:
        return CampaignOutcome(case=case, title=title, seed=seed, trials=0, not_here=missing)
    places = trials + trials // 10 if campaign.sweep is None else campaign.sweep(workshop)
    trials, most = min(trials, places), min(trials + trials // 10, places)
    started_s = time.perf_counter()
    failures, counts, fell, number = [], Counter[str](), 0, seed
    while fell < trials and number < seed + most:
        try:
            with workshop.scratch(case) as folder:
                result = campaign.trial(workshop, number, folder)
        except SurefootError as error:
            result = TrialResult(error.message)
        counts.update(result.tags)
        fell += result.fell
        if result.wrong is not None:
            failures.append(Failure(case=case, seed=number, what=result.wrong))
            tell(f"--case {case} --seed {number}: {result.wrong}")
        number += 1
    tell(f"{case}: {fell} trials with seeds {seed} to {number - 1}, {len(failures)} failures")
    return CampaignOutcome(
        case=case,
        title=title,
        seed=seed,
        trials=fell,
        failures=tuple(failures),
        counts=dict(sorted(counts.items())),
        elapsed_s=time.perf_counter() - started_s,
    )
