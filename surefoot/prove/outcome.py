"""What a fault campaign found: its trials, each with the seed that replays it, and how often the promise did not hold."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from surefoot.core.errors import SurefootError

if TYPE_CHECKING:
    from surefoot.prove.campaigns.workshop import Workshop

RULE_OF_THREE = 3.0  # n clean trials: the failure rate is below 3/n with 95 % confidence (Hanley & Lippman-Hand, JAMA 1983)
Tell = Callable[[str], None]


@dataclass(frozen=True)
class Result:
    """One trial: what did not hold (None: all did), what happened in it, to be counted, and whether the fault fell at all."""

    wrong: str | None = None
    tags: tuple[str, ...] = ()
    fell: bool = True


@dataclass(frozen=True, kw_only=True)
class Failure:
    """A trial in which something did not hold; the same case and seed replay it."""

    case: str
    seed: int
    what: str


@dataclass(frozen=True, kw_only=True)
class Campaign:
    """A fault, and a trial of it: `trial(workshop, seed)`; `few` trials show it in seconds.

    `sweep` returns how many trials there are in all where they can be counted, `missing` why they cannot be made on this machine.
    """

    case: str
    title: str
    trial: Callable[[Workshop, int], Result]
    few: int
    sweep: Callable[[Workshop], int] | None = None
    missing: Callable[[], str | None] = lambda: None


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """What came of a campaign: in `trials` of them the fault fell. `bound` is the failure rate that it excludes with 95 % confidence."""

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
        """Whether there were trials, and all of them ended well."""
        return bool(self.trials) and not self.failures

    @property
    def bound(self) -> float | None:
        """3/n after n clean trials, None where there was none or one failed.

        >>> Outcome(case="F01", title="kill", seed=0, trials=500).bound
        0.006
        """
        return RULE_OF_THREE / self.trials if self.holds else None


def carry_out(campaign: Campaign, workshop: Workshop, *, trials: int, seed: int, tell: Tell = lambda text: None) -> Outcome:
    """Make that many trials with the seeds `seed`, `seed + 1` ...; each failure is passed to `tell` as it is found.

    A trial that raises has failed. One whose fault did not fall, since the run was over before it, is made up for by the next seed;
    a tenth more are tried at most.
    """
    case, title = campaign.case, campaign.title
    if (missing := campaign.missing()) is not None:
        return Outcome(case=case, title=title, seed=seed, trials=0, not_here=missing)
    places = trials + trials // 10 if campaign.sweep is None else campaign.sweep(workshop)
    trials, most = min(trials, places), min(trials + trials // 10, places)
    started_s = time.perf_counter()
    failures, counts, fell, number = [], Counter[str](), 0, seed
    while fell < trials and number < seed + most:
        try:
            result = campaign.trial(workshop, number)
        except SurefootError as error:
            result = Result(error.message)
        counts.update(result.tags)
        fell += result.fell
        if result.wrong is not None:
            failures.append(Failure(case=case, seed=number, what=result.wrong))
            tell(f"--case {case} --seed {number}: {result.wrong}")
        number += 1
    tell(f"{case}: {fell} trials with seeds {seed} to {number - 1}, {len(failures)} failures")
    return Outcome(
        case=case, title=title, seed=seed, trials=fell, failures=tuple(failures), counts=dict(sorted(counts.items())),
        elapsed_s=time.perf_counter() - started_s,
    )  # fmt: skip
