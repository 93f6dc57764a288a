"""Memory, throughput and optimizer steps of pairs of batch and microbatch sizes.

Each pair is measured in fresh processes.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from surefoot.contract.spec import RunSpec
from surefoot.core.errors import InputError
from surefoot.core.statistics import mean
from surefoot.prove.memory import check_divisible
from surefoot.trial import Outcome, Trial, find_conditions, run_rounds, spec_arm

WARMUP_STEPS, MAX_ROWS, MAX_PARTS = 2, 60, 8
QUIET: dict[str, dict[str, Any]] = {
    "observe": {"tensorboard": False, "noise": False},
    "checkpoint": {"store": None},
}


@dataclass(frozen=True, kw_only=True)
class Split:
    """Measurements of a batch of `num_microbatches` microbatches of `microbatch` samples.

    `peak_bytes` is the peak of allocated memory on a GPU, and the largest resident size on a CPU.
    Gradients are summed over ranks once per optimizer step, so that `communications_per_epoch`
    equals `updates_per_epoch`, however the batch is split. If all rounds failed, `failure` has the
    error and the values are None.
    """

    batch: int
    microbatch: int
    rounds: int = 0
    peak_bytes: float | None = None
    samples_per_s: float | None = None
    items_per_s: float | None = None
    updates_per_epoch: int | None = None
    communications_per_epoch: int | None = None
    failure: str | None = None

    @property
    def num_microbatches(self) -> int:
        return self.batch // self.microbatch

    def as_row(self) -> dict[str, Any]:
        return {**asdict(self), "num_microbatches": self.num_microbatches}


@dataclass(frozen=True, kw_only=True)
class Splits:
    """Results of all pairs of sizes, with the conditions of the measurement."""

    rows: tuple[Split, ...]
    conditions: Mapping[str, str] = field(default_factory=dict)


def find_splits(batches: Sequence[int], microbatches: Sequence[int]) -> list[tuple[int, int]]:
    """Return every pair (batch, microbatch) in which the microbatch divides the batch.

    Without `microbatches`, the batch itself, its half, its quarter and its eighth are used.

    Raises:
        InputError: If none of the microbatches divides a batch; the hint names sizes that do.

    >>> find_splits([8, 12], []), find_splits([8, 12], [4, 3])
    ([(8, 8), (8, 4), (8, 2), (8, 1), (12, 12), (12, 6), (12, 3)], [(8, 4), (12, 4), (12, 3)])
    """
    if min([*batches, *microbatches], default=0) < 1:
        raise InputError(
            f"batches of {list(batches)} and microbatches of {list(microbatches)}",
            hint="give sizes of 1 or more",
        )
    pairs = []
    for batch in dict.fromkeys(batches):
        parts = microbatches or [
            batch // count for count in (1, 2, 4, MAX_PARTS) if batch % count == 0
        ]
        mine = [(batch, part) for part in dict.fromkeys(parts) if batch % part == 0]
        if not mine:
            legal = [size for size in range(1, batch + 1) if batch % size == 0]
            raise InputError(
                f"no microbatch of {list(microbatches)} divides a batch of {batch}",
                hint=f"these do: {legal}",
            )
        pairs += mine
    if len(pairs) > MAX_ROWS:
        raise InputError(f"{len(pairs)} rows are too many", hint=f"{MAX_ROWS} at most")
    return pairs


def measure(
    spec: RunSpec,
    pairs: Sequence[tuple[int, int]],
    *,
    updates: int = 10,
    rounds: int = 3,
    tell: Callable[[str], None] = lambda text: None,
) -> Splits:
    """Train each pair for `updates` optimizer steps after a warm-up, in interleaved rounds.

    A pair is a batch and a microbatch size; each is trained `rounds` times.
    """
    if updates < 1 or rounds < 1:
        raise InputError(
            f"{updates} updates in {rounds} rounds measure nothing", hint="use 1 or more of each"
        )
    check_divisible(
        spec, "train.batch cannot be varied", "surefoot bench step times a step of its batches"
    )
    arms = [
        spec_arm(
            f"{batch} by {part}",
            spec.replace(
                train={"batch": batch, "accumulate": 1, "microbatch": part, "ramp": ()}, **QUIET
            ),
            steps=updates,
            warmup=WARMUP_STEPS,
            timeout_s=3600.0,
            whole_length=True,
        )
        for batch, part in pairs
    ]
    outcomes: list[Outcome] = []
    for outcome in run_rounds(arms, rounds=rounds, warmup_rounds=0):
        outcomes.append(outcome)
        tell(f"round {outcome.round + 1} of {rounds}: {outcome.arm}: {outcome.ended}")
    trial = Trial(
        title="batches",
        arms=tuple(arm.name for arm in arms),
        rounds=rounds,
        seed=0,
        outcomes=tuple(outcomes),
    )
    rows = tuple(
        _row(trial, arm.name, batch, part) for arm, (batch, part) in zip(arms, pairs, strict=True)
    )
    return Splits(
        rows=rows,
        conditions=find_conditions(("torch", "surefoot"), threads=spec.train.threads or 1),
    )


def peak_of(measures: Mapping[str, float]) -> float:
    """Return the peak of allocated memory on a GPU, or the largest resident size on a CPU."""
    return measures.get("device_peak_bytes", measures["peak_bytes"])


def _row(trial: Trial, arm: str, batch: int, part: int) -> Split:
    done = [
        each.measures
        for each in trial.outcomes
        if each.arm == arm and each.ended == "done" and "num_samples" in each.measures
    ]
    if not done:
        return Split(
            batch=batch,
            microbatch=part,
            failure=trial.failure(arm) or "the run was over before its first measured update",
        )
    if batch > done[0]["samples_per_epoch"]:
        return Split(
            batch=batch,
            microbatch=part,
            failure=(
                f"there are {done[0]['samples_per_epoch']:,.0f} samples, "
                f"fewer than one batch of {batch:,}"
            ),
        )
    samples_per_s = 1 / mean([each["wall_s_per_sample"] for each in done])
    updates = math.ceil(done[0]["samples_per_epoch"] / batch)
    return Split(
        batch=batch,
        microbatch=part,
        rounds=len(done),
        peak_bytes=max(map(peak_of, done)),
        samples_per_s=samples_per_s,
        items_per_s=samples_per_s * done[0]["items_per_sample"],
        updates_per_epoch=updates,
        communications_per_epoch=updates,
        failure=trial.failure(arm),
    )
