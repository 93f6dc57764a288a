"""Loop of a ladder: each rung is checked, measured, and kept or rejected.

A rung is one optimization, which is added to the rungs that were kept before; the first one is
added to a plain training loop, the baseline. The results of a rung are first checked in a separate
process. Then its runs are interleaved with those of the rung below and of the baseline, each in
fresh processes, until the confidence interval is clear. Finally the score of a rung that shows a
gain is compared with that of the baseline.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

from surefoot.contract import signature
from surefoot.contract.spec import RunSpec
from surefoot.core.errors import InputError, TaskError
from surefoot.core.statistics import FIRST_LOOK, Interval, looks, median
from surefoot.core.units import format_number, format_seconds
from surefoot.prove.attempts import find_last_error
from surefoot.prove.ladder import gate, rungs
from surefoot.prove.ladder.gate import Arrays, GateVerdict, Score, SeedScores
from surefoot.prove.ladder.rungs import Rung
from surefoot.prove.ladder.workbench import BELOW, START, LadderSettings, Measure, Tell, Workbench
from surefoot.trial import Trial, find_conditions
from surefoot.trial.arm import REFUSED, num_ranks

# least share of the baseline's items per sample; the last text of a run may be truncated (1 %)
SAME_WORK = 0.99
# the highest ratio to the rung below with which a rung is measured beyond an interim analysis
WORTH = 0.99
MEASURES: tuple[Measure, ...] = ("time", "wall", "memory", "startup")
PURPOSES: Mapping[str, Measure] = {"time": "time", "wall time": "wall", "memory": "memory"}
Standing = Literal["kept", "rejected", "skipped"]
Ratios = Mapping[Measure, Interval | None]


@dataclass(frozen=True, kw_only=True)
class RungResult:
    """Result of a rung (one optimization that a ladder tries).

    `step` contains the ratios of its measures to those of the rung below, and `total` the ratios to
    the baseline. A ratio is None if it was not measured.
    """

    rung: Rung
    standing: Standing
    reason: str
    parity: GateVerdict
    step: Ratios
    total: Ratios
    score: Score | None = None
    num_runs: int = 0

    @property
    def kept(self) -> bool:
        return self.standing == "kept"

    @property
    def is_measured(self) -> bool:
        """True if the rung's results or its time were measured."""
        return self.parity.verdict != "not measured" or any(
            ratio is not None for ratio in self.step.values()
        )


@dataclass(frozen=True, kw_only=True)
class Ladder:
    """State of a ladder: the optimizations (rungs) that were tried and their results.

    `best` is the spec with all kept rungs. `left_out` is, for each kept rung, the time of `best`
    over that of the spec without the rung; None if this was not measured.
    """

    spec: str
    start: RunSpec
    best: RunSpec
    device: str
    conditions: Mapping[str, str]
    num_samples: int
    results: tuple[RungResult, ...] = ()
    left_out: Mapping[str, Interval] | None = None
    num_runs: int = 0

    @property
    def kept(self) -> list[RungResult]:
        return [each for each in self.results if each.kept]


class Climb:
    """Decisions about the optimizations (rungs) of a ladder, each on top of the kept ones."""

    def __init__(self, start: RunSpec, bench: Workbench, tell: Tell) -> None:
        self.start = self.below = self._ground = start
        self._ground_name = START
        self._bench, self._tell = bench, tell
        self._kept: list[Rung] = []
        # tensors of the reference, by the size of the pieces of its batch
        self._tensors: dict[int | None, Arrays] = {}
        self._blurred: dict[tuple[int | None, float], Arrays] = {}
        self._scores: dict[range, SeedScores | None] = {}  # scores of the baseline, by the seeds

    def climb(self, rung: Rung) -> RungResult:
        """Check and measure an optimization (rung); later rungs are added to it if it is kept."""
        before = self._bench.num_runs
        if not rung.is_here:
            return _make_unmeasured_result(
                rung, "skipped", f"needs {rung.needs}, which this machine or spec does not have"
            )
        try:
            spec = rung.on(self.below)
        except InputError as error:
            return _make_unmeasured_result(rung, "skipped", error.message)
        self._tell(f"{rung.name}: checking its numbers")
        parity = self._check(rung, spec)
        if parity.verdict == "not measured":
            return _make_unmeasured_result(
                rung,
                _standing_of_refusal(parity.words),
                parity.words,
                self._bench.num_runs - before,
            )
        if parity.verdict == "fails" and not self._bench.settings.measures_refused:
            return _make_unmeasured_result(
                rung, "rejected", self._other_numbers(parity), self._bench.num_runs - before, parity
            )
        trial = self._bench.measure(
            rung.name,
            spec,
            self.below,
            lambda trial: self._is_over(trial, rung),
            decides=parity.verdict != "fails",
        )
        step = {
            measure: self._bench.ratio(trial, rung.name, BELOW, measure) for measure in MEASURES
        }
        total = {
            measure: self._bench.ratio(trial, rung.name, START, measure) for measure in MEASURES
        }
        reason, score = self._reason_against(rung, spec, trial, parity, step)
        result = RungResult(
            rung=rung,
            standing=_standing_of_refusal(reason),
            reason=reason or self._words(rung, step),
            parity=parity,
            step=step,
            total=step if self.below == self.start else total,
            score=score,
            num_runs=self._bench.num_runs - before,
        )
        if reason is None:
            self._keep(rung, spec)
        return result

    def _keep(self, rung: Rung, spec: RunSpec) -> None:
        self._kept.append(rung)
        self.below = spec
        if rung.kind == "algorithm":  # no rung above it computes what the baseline does
            self._ground, self._ground_name, self._tensors, self._blurred = spec, rung.name, {}, {}

    def _check(self, rung: Rung, spec: RunSpec) -> GateVerdict:
        """Return the verdict of the parity gate on the gradients and weights of a rung.

        The verdict is "not measured" if the rung crashes or its spec is refused. Several ranks
        compute a batch in pieces, with separate dropout and BatchNorm for each piece. Therefore
        their results are compared with those of one process that computes the same pieces. The
        score shows how the pieces change a run.
        """
        if rung.kind == "algorithm":
            return gate.judge(rung.kind, {}, {}, {})
        kind, unit = gate.bound_of(rung.kind, spec.precision.compute)
        piece = find_piece(spec)
        ground = (
            self._ground if piece is None else self._ground.replace(train={"microbatch": piece})
        )
        if piece not in self._tensors:
            self._tensors[piece] = self._bench.tensors(self._ground_name, ground)
        if (piece, unit) not in self._blurred:
            self._blurred[piece, unit] = self._floor(ground, unit)
        try:
            found = self._bench.tensors(rung.name, spec)
        except TaskError as error:
            return GateVerdict(
                verdict="not measured", words=_find_refusal(error.message) or f"it {error.message}"
            )
        return gate.judge(kind, self._tensors[piece], self._blurred[piece, unit], found)

    def _floor(self, ground: RunSpec, unit: float) -> Arrays:
        """Return the reference tensors under simulated rounding; {} if the reference fails.

        A model that checks its outputs to the last bit fails, for example.
        """
        try:
            return self._bench.tensors(f"{self._ground_name} blurred", ground, unit=unit)
        except TaskError as error:
            said = f"{self._describe_baseline} under simulated rounding {error.message}"
            self._tell(
                f"the effect of rounding cannot be measured, so no deviation is allowed: {said}"
            )
            return {}

    def _is_over(self, trial: Trial, rung: Rung) -> bool:
        """Return whether to stop the measurement of a rung.

        It stops if the rung crashed, if its interval is clear, or if too many pairs went against
        the rung for any interval to show a gain.
        """
        if trial.failure(rung.name) is not None:
            return True
        mine, theirs = trial.pairs(rung.name, BELOW, self._bench.key(PURPOSES[rung.purpose]))
        ratios = [one / other for one, other in zip(mine, theirs, strict=True)]
        if not ratios:
            return False
        self._tell(
            f"{rung.name}: pair {len(ratios)} of at most {trial.rounds}, "
            f"{format_number(median(ratios))} times so far"
        )
        return is_settled(ratios, trial.rounds)

    def _reason_against(
        self, rung: Rung, spec: RunSpec, trial: Trial, parity: GateVerdict, step: Ratios
    ) -> tuple[str | None, Score | None]:
        """Return why a rung is not kept (None if it is kept), and its score.

        The score is computed only if no other reason is found.
        """
        failure = trial.failure(rung.name)
        if failure is not None:
            ended, _, error = failure.partition(": ")
            said = find_last_error(error)
            return _find_refusal(said) or f"it {ended}: {said}", None
        if parity.verdict == "fails":
            return self._other_numbers(parity), None
        skipped = find_skipped_work(trial, rung.name)
        if skipped is not None:
            return skipped, None
        interval = step[PURPOSES[rung.purpose]]
        if interval is None or interval.verdict != "lower":
            return self._describe_no_gain(rung, interval), None
        score = self._score(rung, spec)
        if score is None:
            return "it, or the start, has no score", None
        return (f"its {score.words}" if score.is_worse else None), score

    def _score(self, rung: Rung, spec: RunSpec) -> Score | None:
        """Compare the scores of a few seeds with those of the baseline."""

        def take(seeds: range) -> tuple[SeedScores | None, SeedScores | None]:
            self._tell(
                f"{rung.name}: its score after {self._bench.num_samples:,} samples, "
                f"{len(seeds)} seeds"
            )
            if seeds not in self._scores:
                self._scores[seeds] = self._bench.scores(START, self.start, seeds)
            return self._scores[seeds], self._bench.scores(rung.name, spec, seeds)

        return gate.decide_by_scores(range(gate.MIN_SEEDS), take)

    def _other_numbers(self, parity: GateVerdict) -> str:
        return f"its results differ from those of {self._describe_baseline}: {parity.words}"

    @property
    def _describe_baseline(self) -> str:
        return "the baseline" if self._ground == self.start else f"the rung {self._ground_name}"

    def _words(self, rung: Rung, step: Ratios) -> str:
        return (
            f"it takes {step[PURPOSES[rung.purpose]]} of the {self._named(rung)} of the rung below"
        )

    def _describe_no_gain(self, rung: Rung, interval: Interval | None) -> str:
        if interval is None:
            return "no pair of runs was measured"
        said = {
            "too few": (
                f"{interval.count} pairs are too few to show a gain; {FIRST_LOOK} are needed"
            ),
            "higher": "it is larger" if rung.purpose == "memory" else "it is slower",
        }.get(interval.verdict, "no gain is shown")
        return f"{said}: it takes {interval} of the {self._named(rung)} of the rung below"

    def _named(self, rung: Rung) -> str:
        key = self._bench.key(PURPOSES[rung.purpose])
        return {"cpu_s_per_sample": "CPU time", "wall_s_per_sample": "time"}.get(key, "peak memory")

    def leave_one_out(self) -> dict[str, Interval]:
        """Return, for each kept rung, the time with all kept rungs over the time without it."""
        if len(self._kept) < 2:
            return {}
        specs = {"best": self.below}
        for rung in self._kept:
            specs[rung.name] = self.start
            for other in self._kept:
                if other is not rung:
                    specs[rung.name] = rungs.change(specs[rung.name], other.change)
        self._tell(f"leaving one out: {len(specs)} specs, {FIRST_LOOK} rounds")
        trial = self._bench.measure_all("leaving one out", specs, FIRST_LOOK)
        found = {
            rung.name: self._bench.ratio(trial, "best", rung.name, "time") for rung in self._kept
        }
        return {name: interval for name, interval in found.items() if interval is not None}


def is_settled(ratios: Sequence[float], most: int) -> bool:
    """Return whether the pairs of runs so far decide about a rung (one optimization).

    They do at an interim analysis if the interval is clear, or if a gain can no longer be shown. A
    rung that gains less than a hundredth so far is given up: showing so small a gain takes more
    runs than it saves.

    Args:
        ratios: Time or memory of the rung over that of the rung below, by pair.
        most: Largest number of pairs.

    >>> is_settled([0.9] * 7, 15), is_settled([0.9] * 6, 15), is_settled([1.1] * 7, 15)
    (True, False, True)
    >>> is_settled([0.9] * 5 + [1.1] * 2, 15), is_settled([0.995] * 6 + [1.01], 15)
    (False, True)
    """
    ranks = looks(most)
    if len(ratios) not in ranks:
        return False
    against, favorable = sum(ratio >= 1 for ratio in ratios), sum(ratio <= 1 for ratio in ratios)
    return (
        min(against, favorable) <= ranks[len(ratios)]
        or against > max(ranks.values())
        or median(ratios) > WORTH
    )


def find_piece(spec: RunSpec) -> int | None:
    """Return the number of samples that one of several ranks computes in one pass.

    Returns None for one process, and for a batch that grows.
    """
    ranks = num_ranks(spec)
    if ranks == 1 or spec.train.ramp:
        return None
    return spec.train.microbatch or -(-spec.train.batch // ranks)


def _find_refusal(words: str) -> str:
    """Return the part of `words` that says why a spec is refused; "" if there is none."""
    _, refused, why = words.partition(REFUSED)
    return f"{refused}{why}"


def _standing_of_refusal(reason: str | None) -> Standing:
    """Return the standing of a rung with a `reason` against it; None means that it is kept.

    A rung that the task or the machine cannot run is skipped, any other is rejected.
    """
    return "kept" if reason is None else "skipped" if reason.startswith(REFUSED) else "rejected"


def find_skipped_work(trial: Trial, name: str) -> str | None:
    """Return a message if a rung (optimization) does less work per sample than the rung below.

    The work is the number of items of the loss and the share of optimizer steps that were applied.
    Returns None if it does not do less.
    """
    for measure, what, least in (
        ("items_per_sample", "items that its losses count", SAME_WORK),
        ("applied_share", "updates", 1.0),
    ):
        mine, theirs = trial.pairs(name, BELOW, measure)
        if mine and median(mine) < least * median(theirs):
            return (
                f"it skips work: {format_number(median(mine) / median(theirs))} times the {what}, "
                "for the same samples"
            )
    return None


def _make_unmeasured_result(
    rung: Rung,
    standing: Standing,
    reason: str,
    num_runs: int = 0,
    parity: GateVerdict | None = None,
) -> RungResult:
    nothing: Ratios = dict.fromkeys(MEASURES)
    parity = parity or GateVerdict(verdict="not measured", words=reason)
    return RungResult(
        rung=rung,
        standing=standing,
        reason=reason,
        parity=parity,
        step=nothing,
        total=nothing,
        num_runs=num_runs,
    )


def order_rungs(chosen: Sequence[Rung], given: Sequence[Rung]) -> list[Rung]:
    """Return the optimizations (rungs) `chosen`, then those `given`.

    Rungs with several ranks at the end of `chosen` come last, since they cannot take turns with
    others.
    """
    split = len(chosen)
    while split and chosen[split - 1].takes_ranks:
        split -= 1
    return [*chosen[:split], *given, *chosen[split:]]


def climb_ladder(
    name: str,
    spec: RunSpec,
    settings: LadderSettings,
    folder: Path,
    *,
    given: Sequence[Rung] = (),
    names: Sequence[str] | None = None,
    leave_one_out: bool = False,
    tell: Tell,
    decided: Callable[[Ladder], None],
) -> Ladder:
    """Try the optimizations (rungs) called `names`, then those `given`, and return the ladder.

    If `names` is None, all known rungs are tried, or only those `given` if there are any. `decided`
    is called after each rung. Rungs with several ranks at the end stay last.

    Raises:
        InputError: For a rung that no spec can have, before anything is measured.
        TaskError: For a baseline that does not run, before anything is measured.
    """
    start, cores = rungs.make_plain_spec(spec), int(find_conditions(())["cores"])
    named = (
        rungs.choose(names, rungs.find_rungs(start, device="cpu", cores=cores))
        if names is not None
        else ()
    )
    rungs.check_names([*named, *given])
    for rung in given:
        changed = rung.on(start)
        signature.check(changed.task.use or "", changed.task.parameters, {})
    bench = Workbench(start, settings, folder)
    tell(
        "the start: "
        + ", ".join(f"{key}={value}" for key, value in rungs.PLAIN.items() if value is not None)
    )
    step_s = bench.begin()
    tell(
        f"{format_seconds(step_s)} a step on {bench.device}; "
        f"each run is measured over {bench.num_samples:,} samples"
    )
    known = rungs.find_rungs(
        start, device=bench.device, cores=cores, devices=bench.devices, blocks=spec.memory.blocks
    )
    chosen = rungs.choose(names, known) if names is not None else () if given else known
    rungs.check_names([*chosen, *given])
    conditions = {
        **find_conditions(threads=1),
        "device": bench.device,
        "time": "CPU seconds" if bench.device == "cpu" else "wall seconds",
        "samples of a run": f"{bench.num_samples:,}",
        "warm-up": f"{bench.warmup_steps} steps",
        "pairs at most": str(settings.pairs),
        "load when begun": f"{os.getloadavg()[0]:.2f}",
    }
    ladder = Ladder(
        spec=name,
        start=start,
        best=start,
        device=bench.device,
        conditions=conditions,
        num_samples=bench.num_samples,
    )
    climb = Climb(start, bench, tell)
    for rung in order_rungs(chosen, given):
        result = climb.climb(rung)
        ladder = replace(
            ladder, results=(*ladder.results, result), best=climb.below, num_runs=bench.num_runs
        )
        decided(ladder)
    if leave_one_out:
        ladder = replace(ladder, left_out=climb.leave_one_out(), num_runs=bench.num_runs)
        decided(ladder)
    return ladder
