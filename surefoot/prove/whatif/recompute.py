"""Activation recomputation by block: the bytes that it frees, and the time that it costs.

Each way to recompute is compared with no recomputation.
"""

from __future__ import annotations

import tempfile
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from surefoot.contract.spec import RunSpec
from surefoot.core.errors import InputError, SpecError
from surefoot.core.recompute import RecomputeChoice, RecomputeCost, peak_bytes, smallest_budget
from surefoot.core.statistics import FIRST_LOOK, Interval
from surefoot.prove.bench.rehearsal import Rehearsal
from surefoot.prove.ladder import rungs
from surefoot.prove.ladder.workbench import LadderSettings, Tell, Workbench
from surefoot.prove.memory.measured import compare
from surefoot.prove.whatif.trials import failure_of, make_steady_spec, median_of
from surefoot.trial import Trial, find_conditions

NONE = "none"
ROUNDS = FIRST_LOOK
SPARSEST = 4  # the sparsest choice that is tried is every 4th block
EVERYTHING = "1000 TiB"  # a budget with which the blocks are measured, but nothing is recomputed


@dataclass(frozen=True, kw_only=True)
class BlockCost:
    """Memory that a block keeps for its backward pass, and the seconds to recompute it.

    `input_bytes` is the size of its inputs, and `inner_bytes` what it keeps in addition.
    """

    name: str
    inner_bytes: int
    input_bytes: int
    again_s: float

    @property
    def bytes_per_s(self) -> float | None:
        return self.inner_bytes / self.again_s if self.again_s else None

    def as_row(self) -> dict[str, Any]:
        return {**asdict(self), "bytes_per_s": self.bytes_per_s}


@dataclass(frozen=True, kw_only=True)
class RecomputeTiming:
    """Measurements of one value of `memory.activation_checkpointing`.

    A number that was not measured is None, and `failure` is the reason. `held_bytes` is the largest
    memory that the blocks keep, computed from their measured costs; None for "operators", which
    keeps parts of each block. `peak_bytes` is the peak memory of a step: all allocated memory on a
    GPU, all tensors on a CPU. `ratio` is the time of a step over that without recomputation.
    """

    how: str
    held_bytes: int | None = None
    step_s: float | None = None
    peak_bytes: float | None = None
    ratio: Interval | None = None
    failure: str | None = None

    def as_row(self) -> dict[str, Any]:
        return {**asdict(self), "verdict": None if self.ratio is None else self.ratio.verdict}


@dataclass(frozen=True, kw_only=True)
class Recomputing:
    """Results for the blocks in order, and for the ways from none to full recomputation."""

    blocks: tuple[BlockCost, ...]
    ways: tuple[RecomputeTiming, ...]
    rounds: int
    conditions: Mapping[str, str]


def find_costs(spec: RunSpec) -> list[RecomputeCost]:
    """Return the cost of each block of the model, measured on a microbatch.

    Raises:
        InputError: If the model has no blocks.
    """
    with Rehearsal(
        rungs.change(spec, {"memory.activation_checkpointing": EVERYTHING}), steps=1
    ) as rehearsal:
        rehearsal.take("forward")
        recomputed = rehearsal.assembly.engine.recomputed
        assert recomputed is not None  # as the spec says
        assert recomputed.budget is not None
        return recomputed.budget.costs


def find_ways(costs: list[RecomputeCost]) -> dict[str, int | None]:
    """Return every distinct way to recompute, with the bytes that the blocks then keep.

    The bytes that "every 2" keeps are also tried as a budget. If blocks are uneven, a budget
    recomputes those that take less time.

    >>> first, second = RecomputeCost("a", 1024, 9216, 3.0), RecomputeCost("b", 1024, 9216, 1.0)
    >>> find_ways([first, second, RecomputeCost("c", 1024, 4096, 1.0)])
    {'none': 25600, 'every 2': 16384, '16 KiB': 16384, 'operators': None, 'full': 11264}
    """
    sparse = [f"every {number}" for number in range(SPARSEST, 1, -1) if number < len(costs)]
    held: dict[str, int | None] = {how: _held_bytes(costs, how) for how in (NONE, *sparse)}
    if sparse:
        budget = -(-(held[sparse[-1]] or 0) // 1024)
        if budget * 1024 >= smallest_budget(costs):
            held[f"{budget} KiB"] = budget * 1024
    return {**held, "operators": None, "full": _held_bytes(costs, "full")}


def _held_bytes(costs: list[RecomputeCost], how: str) -> int:
    parsed = RecomputeChoice.parse(how)
    step = {"none": len(costs) + 1, "full": 1, "every": parsed.number}[parsed.kind]
    return peak_bytes(costs, range(0, len(costs), step) if parsed.kind != "none" else ())


def measure_recomputing(
    spec: RunSpec, *, rounds: int = ROUNDS, tell: Tell = lambda text: None
) -> Recomputing:
    """Measure the blocks, then train each way to recompute for the same steps.

    The ways are interleaved in `rounds` rounds.

    Raises:
        InputError: If the model has no blocks.
        SpecError: For `compile.what = "step"`.
        TaskError: If the spec does not run.
    """
    if rounds < 1:
        raise InputError(
            f"--rounds is {rounds}", hint=f"1 or more; {FIRST_LOOK} at least show what it costs"
        )
    if spec.compile.what == "step":
        raise SpecError(
            'compile.what = "step" goes with no recomputation',
            hint='use compile.what = "model", or leave it out',
        )
    costs = find_costs(spec)
    held = find_ways(costs)
    made = make_steady_spec(spec)
    none = rungs.change(made, {"memory.activation_checkpointing": None, "memory.blocks": None})
    with tempfile.TemporaryDirectory(prefix="surefoot-whatif-") as work:
        bench = Workbench(none, LadderSettings(pairs=rounds), Path(work))
        tell("the spec without recomputation, to see how long a step takes")
        bench.begin()
        specs = {
            how: none
            if how == NONE
            else rungs.change(made, {"memory.activation_checkpointing": how})
            for how in held
        }
        tell(f"{len(specs)} ways in {rounds} rounds")
        trial = bench.measure_all("recomputing", specs, rounds, tell=tell)
        peaks = {how: _peak(bench, trial, how, each) for how, each in specs.items()}
    conditions = {
        **find_conditions(("torch", "surefoot"), threads=spec.train.threads or 1),
        "device": bench.device,
    }
    blocks = tuple(
        BlockCost(
            name=each.name,
            inner_bytes=each.inner_bytes,
            input_bytes=each.input_bytes,
            again_s=each.again_s,
        )
        for each in costs
    )
    ways = tuple(
        _measure_choice(bench, trial, how, held_bytes, peaks[how])
        for how, held_bytes in held.items()
    )
    return Recomputing(blocks=blocks, ways=ways, rounds=rounds, conditions=conditions)


def _peak(bench: Workbench, trial: Trial, how: str, spec: RunSpec) -> float | None:
    """Return the peak memory of a step in bytes; on a CPU it is measured in this process.

    In a fresh process on a CPU, the memory used at its start would hide the few bytes of a small
    model's blocks.
    """
    if trial.failure(how) is not None:
        return None
    return (
        float(compare(spec, None).measured_bytes)
        if bench.device == "cpu"
        else median_of(trial, how, bench.key("memory"))
    )


def _measure_choice(
    bench: Workbench, trial: Trial, how: str, held_bytes: int | None, peak: float | None
) -> RecomputeTiming:
    return RecomputeTiming(
        how=how,
        held_bytes=held_bytes,
        peak_bytes=peak,
        step_s=median_of(trial, how, "wall_s_per_step"),
        ratio=None if how == NONE else bench.ratio(trial, how, NONE, "time"),
        failure=failure_of(trial, how),
    )
