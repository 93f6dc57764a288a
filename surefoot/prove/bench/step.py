"""Time of a step for combinations of settings, measured in fresh, interleaved processes.

There is one process per round for each variant and mode.
"""

from __future__ import annotations

import itertools
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from surefoot.contract import spec_file
from surefoot.contract.spec import RunSpec
from surefoot.core.errors import InputError, SpecError
from surefoot.core.statistics import Interval, mean, quantiles, standard_deviation
from surefoot.prove.bench.rehearsal import MODES, Mode
from surefoot.trial import Arm, Outcome, Trial, find_conditions, find_effect, run_rounds

MAX_ARMS, MAX_CALLS = 100, 10_000  # variants times modes; calls, since each is a line of the report
PERCENTILES = (0.5, 0.95, 0.99)


@dataclass(frozen=True, kw_only=True)
class Variant:
    """Spec and the values that distinguish it from the others, such as `{"task.width": "64"}`."""

    values: Mapping[str, str]
    spec: RunSpec


@dataclass(frozen=True, kw_only=True)
class TimedMode:
    """Times of one mode of one variant: "forward", "backward" (both passes) or "step".

    The times are over the `n` calls after the warm-up of each round. `cold_mean_s` is the mean of
    the first `n` calls of each process, including the warm-up. `first_s` is the median of the first
    calls. `against` compares the mean of each round with that of the first variant. If all rounds
    failed, `failure` has the error and the times are None.
    """

    mode: Mode
    values: Mapping[str, str]
    n: int = 0
    rounds: int = 0
    mean_s: float | None = None
    sd_s: float | None = None
    p50_s: float | None = None
    p95_s: float | None = None
    p99_s: float | None = None
    cold_mean_s: float | None = None
    first_s: float | None = None
    samples_per_s: float | None = None
    peak_bytes: float | None = None
    against: Interval | None = None
    failure: str | None = None

    def as_row(self) -> dict[str, Any]:
        row = {**asdict(self), "values": dict(self.values)}
        if self.against is not None:
            row["against"] = {**asdict(self.against), "verdict": self.against.verdict}
        return row


@dataclass(frozen=True, kw_only=True)
class Bench:
    """Results of `surefoot bench step`, with the conditions of the measurement."""

    rows: tuple[TimedMode, ...]
    warmup: int
    conditions: Mapping[str, str] = field(default_factory=dict)


def vary(
    make: Callable[[Sequence[tuple[str, Any, str]]], RunSpec], lists: Sequence[str]
) -> list[Variant]:
    """Return a variant for every combination of values in lists such as `key=value,value`.

    `make` returns the spec with the given overrides.

    Raises:
        SpecError: If a list is malformed, or a key or a spec is repeated.
    """
    keys = [text.partition("=")[0].strip() for text in lists]
    twice = next((key for number, key in enumerate(keys) if key in keys[:number]), None)
    if twice is not None:
        raise SpecError(
            f"--vary {twice} is given twice", hint=f"give all its values in one: --vary {twice}=A,B"
        )
    many = [
        Variant(values={key: str(value) for key, value, _ in chosen}, spec=make(chosen))
        for chosen in itertools.product(*map(_split, lists))
    ]
    if len({each.spec.id + str(each.spec.train.threads) for each in many}) < len(many):
        raise SpecError(
            f"--vary {' --vary '.join(lists)} names a spec twice", hint="give each value once"
        )
    return many


def _split(text: str) -> list[tuple[str, Any, str]]:
    """Return the values of a list such as `key=value,value`.

    They are read as a TOML list, or as words if that fails. Commas inside a list or a string do not
    separate values.

    >>> [value for _, value, _ in _split("task.sizes=[64, 64],[128]")]
    [[64, 64], [128]]
    >>> [value for _, value, _ in _split("precision.compute=fp32,bf16")]
    ['fp32', 'bf16']
    """
    wrong = SpecError(
        f"--vary {text!r} is not table.key=value,value", hint="for example --vary task.width=64,128"
    )
    key, _, values = text.partition("=")
    try:
        name, found, origin = spec_file.parse_set(f"{key}=[{values}]")
    except SpecError:
        raise wrong from None
    if isinstance(found, list):
        chosen = [(name, value, origin) for value in found]
    else:
        chosen = [spec_file.parse_set(f"{key}={value.strip()}") for value in values.split(",")]
    if not chosen or any(value == "" for _, value, _ in chosen):
        raise wrong
    return chosen


def bench(
    variants: Sequence[Variant],
    *,
    modes: Sequence[Mode] = MODES,
    n: int = 30,
    warmup: int = 10,
    rounds: int = 3,
    tell: Callable[[str], None] = lambda text: None,
) -> Bench:
    """Time every mode of every variant in `rounds` rounds.

    In each round, `n` calls are timed after `warmup` calls.

    Raises:
        InputError: For counts with which nothing can be measured, or more than 100 combinations.
    """
    if n < 2 or warmup < 0 or rounds < 1 or n + warmup > MAX_CALLS:
        raise InputError(
            f"--calls {n}, --warmup {warmup} and --rounds {rounds} measure nothing",
            hint="use --calls 2 or more, and 1 round or more",
        )
    if len(variants) * len(modes) > MAX_ARMS:
        raise InputError(
            f"{len(variants)} variants in {len(modes)} modes are too many",
            hint=f"{MAX_ARMS} together at most",
        )
    arms = {
        _name(index, mode): _make_arm(_name(index, mode), variant.spec, mode, n + warmup)
        for index, variant in enumerate(variants)
        for mode in modes
    }
    outcomes: list[Outcome] = []
    for outcome in run_rounds(list(arms.values()), rounds=rounds, warmup_rounds=0):
        outcomes.append(_add_mean_call(outcome, warmup))
        tell(f"round {outcome.round + 1} of {rounds}: {outcome.arm}: {outcome.ended}")
    trial = Trial(title="step", arms=tuple(arms), rounds=rounds, seed=0, outcomes=tuple(outcomes))
    threads = next((each.facts["threads"] for each in outcomes if "threads" in each.facts), "1")
    rows = [
        _make_timed_mode(trial, index, variant, mode, n, warmup)
        for index, variant in enumerate(variants)
        for mode in modes
    ]
    return Bench(
        rows=tuple(rows),
        warmup=warmup,
        conditions=find_conditions(("torch", "surefoot"), threads=int(threads)),
    )


def _name(index: int, mode: Mode) -> str:
    return f"{mode} {index + 1}"


def _make_arm(name: str, spec: RunSpec, mode: Mode, calls: int) -> Arm:
    if spec.task.use is None:
        raise SpecError(
            "a fresh process needs a task that can be imported", hint="name one as [task] use"
        )
    command = (
        sys.executable,
        "-m",
        "surefoot.prove.bench.child",
        "{work}/spec.toml",
        "--report",
        "{report}",
    )
    return Arm(
        name=name,
        command=(*command, "--mode", mode, "--calls", str(calls)),
        files={"spec.toml": spec_file.write(spec)},
        threads=spec.train.threads or 1,
        timeout_s=3600.0,
    )


def _calls(outcome: Outcome) -> list[float]:
    return [value for name, value in sorted(outcome.measures.items()) if name.startswith("call_s/")]


def _add_mean_call(outcome: Outcome, warmup: int) -> Outcome:
    """Return the outcome with a measure `mean_s`: the mean of the calls after the warm-up."""
    calls = _calls(outcome)
    if not calls:
        return outcome
    return Outcome(
        **{**asdict(outcome), "measures": {**outcome.measures, "mean_s": mean(calls[warmup:])}}
    )


def _make_timed_mode(
    trial: Trial, index: int, variant: Variant, mode: Mode, n: int, warmup: int
) -> TimedMode:
    name, base = _name(index, mode), _name(0, mode)
    done = [each for each in trial.outcomes if each.arm == name and each.ended == "done"]
    if not done:
        return TimedMode(
            mode=mode, values=variant.values, failure=trial.failure(name) or "it was not run"
        )
    warm = [value for each in done for value in _calls(each)[warmup:]]
    p50, p95, p99 = quantiles(warm, PERCENTILES)
    against = None if name == base else find_effect(trial, name, base, "mean_s").interval
    return TimedMode(
        mode=mode,
        values=variant.values,
        n=n,
        rounds=len(done),
        mean_s=mean(warm),
        sd_s=standard_deviation(warm),
        p50_s=p50,
        p95_s=p95,
        p99_s=p99,
        cold_mean_s=mean([value for each in done for value in _calls(each)[:n]]),
        first_s=quantiles([_calls(each)[0] for each in done], [0.5])[0],
        samples_per_s=mean([each.measures["num_samples"] for each in done]) / mean(warm),
        peak_bytes=max(
            each.measures.get("device_peak_bytes", each.measures["peak_bytes"]) for each in done
        ),
        against=against,
        failure=trial.failure(name),
    )
