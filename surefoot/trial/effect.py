"""Effects in a trial: each arm is compared with a baseline per round.

An interval that includes the neutral value (1 for a ratio, 0 for a difference) is no effect.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

from surefoot.core.errors import InputError
from surefoot.core.statistics import Interval, median_interval, paired_difference, paired_ratio
from surefoot.core.units import format_bytes, format_number, format_percent, format_seconds
from surefoot.trial.process import Outcome

Kind = Literal["ratio", "difference"]
Standing = Literal["holds", "fails", "undecided", "not measured"]


@dataclass(frozen=True, kw_only=True)
class Trial:
    """Outcomes of interleaved runs of several variants (arms), with the measurement conditions."""

    title: str
    arms: tuple[str, ...]
    rounds: int
    seed: int
    conditions: Mapping[str, str] = field(default_factory=dict)
    outcomes: tuple[Outcome, ...] = ()

    def by_round(self, arm: str, measure: str) -> dict[int, float]:
        """Return the values of `measure` of one arm, by number of the round.

        Rounds that failed and warm-up rounds are left out.
        """
        return {
            outcome.round: outcome.measures[measure]
            for outcome in self.outcomes
            if outcome.arm == arm
            and outcome.ended == "done"
            and not outcome.is_warmup
            and measure in outcome.measures
        }

    def pairs(self, arm: str, baseline: str, measure: str) -> tuple[list[float], list[float]]:
        """Return the values of the arm and of the baseline, for the rounds that have both."""
        mine, theirs = self.by_round(arm, measure), self.by_round(baseline, measure)
        shared = sorted(mine.keys() & theirs.keys())
        return [mine[number] for number in shared], [theirs[number] for number in shared]

    def failure(self, arm: str) -> str | None:
        """Return the arm's first failure with the end of its error output; None without one."""
        return next(
            (f"{o.ended}: {o.error}" for o in self.outcomes if o.arm == arm and o.ended != "done"),
            None,
        )


@dataclass(frozen=True, kw_only=True)
class Effect:
    """Comparison of one measure of a variant (arm) with that of the baseline.

    Args:
        value: Median of the arm.
        reference: Median of the baseline.
        interval: Median of the ratios or differences per round, with its 95 % interval; None if no
            round has values of both.
        failure: First failure of the arm or the baseline; None without failures.
    """

    arm: str
    baseline: str
    measure: str
    kind: Kind = "ratio"
    value: float | None = None
    reference: float | None = None
    interval: Interval | None = None
    failure: str | None = None

    @property
    def words(self) -> str:
        """The result as a sentence.

        An interval that includes the neutral value (1 or 0) is reported as "no effect".
        """
        if self.interval is None:
            return f"{self.arm} was not measured: {self.failure or 'no round has both arms'}"
        what, bounds = _describe_measure(self.measure), _bounds(self)
        if self.interval.verdict == "no effect":
            return f"no effect of {self.arm} on {what}: {bounds}"
        if self.interval.verdict == "too few":
            return f"too few rounds to say anything of {self.arm} and {what}: {bounds}"
        change, size = (
            "less" if self.interval.verdict == "lower" else "more",
            self.interval.estimate,
        )
        shown = (
            format_percent(abs(size - 1))
            if self.kind == "ratio"
            else format_measure(self.measure, abs(size))
        )
        return f"{self.arm} takes {shown} {change} {what} than {self.baseline}: {bounds}"


@dataclass(frozen=True, kw_only=True)
class Bar:
    """Upper limit of an effect: a multiple of the baseline, or a difference in its unit.

    An effect is the comparison of one measure of a variant (arm) with that of the baseline.
    """

    arm: str
    baseline: str
    measure: str
    most: float
    kind: Kind = "ratio"

    def standing(self, effect: Effect) -> Standing:
        """Return "holds" if the interval is at most `most`, "fails" if above, else "undecided".

        It is "not measured" if the effect has no interval.
        """
        interval = effect.interval
        if interval is None:
            return "not measured"
        low, high = (
            interval.estimate if bound is None else bound for bound in (interval.low, interval.high)
        )
        if high <= self.most:
            return "holds"
        return "fails" if low > self.most else "undecided"


def find_effect(
    trial: Trial, arm: str, baseline: str, measure: str, kind: Kind = "ratio"
) -> Effect:
    """Compare one measure of `arm` with that of `baseline`, over the rounds that have both.

    Raises InputError for an unknown arm.
    """
    for name in (arm, baseline):
        if name not in trial.arms:
            raise InputError(
                f"the trial {trial.title!r} has no arm {name!r}",
                hint=f"it has: {', '.join(trial.arms)}",
            )
    mine, theirs = trial.pairs(arm, baseline, measure)
    failure = trial.failure(arm) or trial.failure(baseline)
    if not mine:
        return Effect(arm=arm, baseline=baseline, measure=measure, kind=kind, failure=failure)
    compare = paired_ratio if kind == "ratio" else paired_difference
    return Effect(
        arm=arm,
        baseline=baseline,
        measure=measure,
        kind=kind,
        value=median_interval(mine).estimate,
        reference=median_interval(theirs).estimate,
        interval=compare(mine, theirs, seed=trial.seed),
        failure=failure,
    )


def find_effects(
    trial: Trial, baseline: str, measures: Iterable[str], kind: Kind = "ratio"
) -> list[Effect]:
    """Return the effects of all variants except the baseline; failed ones are included.

    The order is that of `measures`, then that of the arms in the trial.
    """
    others = [arm for arm in trial.arms if arm != baseline]
    return [
        find_effect(trial, arm, baseline, measure, kind) for measure in measures for arm in others
    ]


def judge(trial: Trial, bars: Sequence[Bar]) -> list[tuple[Bar, Effect, Standing]]:
    """Return, for each limit in `bars`, the limit, its effect and whether the limit holds."""
    judged = []
    for bar in bars:
        effect = find_effect(trial, bar.arm, bar.baseline, bar.measure, bar.kind)
        judged.append((bar, effect, bar.standing(effect)))
    return judged


def format_measure(measure: str, value: float | None) -> str:
    """Return a value with its unit, which is taken from the name of the measure.

    >>> format_measure("cpu_s_per_step", 0.0004), format_measure("peak_bytes", 2**30)
    ('400 us', '1 GiB')
    >>> format_measure("samples_per_cpu_s", 250.0)
    '250'
    """
    words = measure.replace("/", "_").partition("_per_")[0].split("_")
    if value is None or "bytes" in words:
        return format_bytes(value)
    if "s" not in words:
        return format_number(value)
    return f"-{format_seconds(-value)}" if value < 0 else format_seconds(value)


def _bounds(effect: Effect) -> str:
    interval = effect.interval
    if interval is None:
        return ""
    show = (
        format_number
        if effect.kind == "ratio"
        else lambda value: format_measure(effect.measure, value)
    )
    between = (
        f" ({show(interval.low)} to {show(interval.high)})" if interval.low is not None else ""
    )
    return (
        f"{show(interval.estimate)}{' times' if effect.kind == 'ratio' else ''}{between}, "
        f"n = {interval.count}"
    )


def _describe_measure(measure: str) -> str:
    """Return the name of a measure as words, such as `cpu per step` for `cpu_s_per_step`."""
    words = measure.replace("/", " ").replace("_", " ").split()
    return " ".join(word for word in words if word not in ("s", "bytes"))
