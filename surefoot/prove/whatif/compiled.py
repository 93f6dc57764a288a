"""Time and memory of each way to compile a step on this machine, compared with eager mode.

All are measured in fresh, interleaved processes.
"""

from __future__ import annotations

import math
import tempfile
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, get_args

from surefoot.components.compiler.modes import why_default
from surefoot.contract.spec import CompileTable, RunSpec, key_names
from surefoot.core.errors import InputError
from surefoot.core.statistics import FIRST_LOOK, Interval, median
from surefoot.prove.ladder import rungs
from surefoot.prove.ladder.workbench import LadderSettings, Tell, Workbench
from surefoot.prove.whatif.trials import failure_of, make_steady_spec, median_of
from surefoot.trial import Trial, find_conditions

EAGER = "eager"
ROUNDS = FIRST_LOOK
WHATS = ("blocks", "model", "step")
MODES: tuple[str, ...] = get_args(CompileTable.model_fields["mode"].annotation)


@dataclass(frozen=True, kw_only=True)
class CompileTiming:
    """Measurements of one way to compile a step, or of eager mode.

    A value that was not measured is None, and `failure` is the reason. `compile_s` is measured with
    empty compiler caches; `again_s` is the median of later processes, which find the caches of the
    first one. `ratio` is the time of a step divided by that in eager mode. `pays_after` is the
    number of steps after which the saved time exceeds `compile_s`, for the ratio and for the bounds
    of its interval; None if no gain is shown.
    """

    what: str
    mode: str | None = None
    compile_s: float | None = None
    again_s: float | None = None
    step_s: float | None = None
    peak_bytes: float | None = None
    ratio: Interval | None = None
    pays_after: tuple[int, int, int] | None = None
    failure: str | None = None

    def as_row(self) -> dict[str, Any]:
        verdict = None if self.ratio is None else self.ratio.verdict
        return {**asdict(self), "verdict": verdict}


@dataclass(frozen=True, kw_only=True)
class Ways:
    """Results of all ways to compile, with the omitted modes and the reasons for omitting them."""

    ways: tuple[CompileTiming, ...]
    left_out: Mapping[str, str]
    rounds: int
    conditions: Mapping[str, str]

    @property
    def best(self) -> CompileTiming | None:
        """The way with the least time among those that show a gain; None if none does."""
        gains = [
            each for each in self.ways if each.ratio is not None and each.ratio.verdict == "lower"
        ]
        return min(
            gains, key=lambda way: way.ratio.estimate if way.ratio else math.inf, default=None
        )


def find_specs(spec: RunSpec, device: str) -> tuple[dict[str, RunSpec], dict[str, str]]:
    """Return a spec for each way to compile, by name, and the modes that are left out with reasons.

    A mode is left out if it is the same as the default on this device. If `spec` compiles nothing,
    blocks, model and step are tried, otherwise only the part that `spec` compiles.
    """
    whats = WHATS if spec.compile.what == "none" else (spec.compile.what,)
    reasons = {
        mode: why_default(mode, device, deterministic=spec.train.deterministic) for mode in MODES
    }
    left_out = {
        mode: f"it is default here, since {why}" for mode, why in reasons.items() if why is not None
    }
    specs = {
        f"{what} {mode}": rungs.change(
            spec, {"compile.what": what, "compile.mode": mode, "compile.on_failure": "stop"}
        )
        for what in whats
        for mode in MODES
        if mode not in left_out
    }
    return specs, left_out


def measure_ways(spec: RunSpec, *, rounds: int = ROUNDS, tell: Tell = lambda text: None) -> Ways:
    """Train with each way to compile for the same steps, `rounds` times, interleaved.

    Raises:
        TaskError: If eager mode does not run.
    """
    if rounds < 1:
        raise InputError(
            f"--rounds is {rounds}", hint=f"1 or more; {FIRST_LOOK} at least show a gain"
        )
    made = make_steady_spec(spec)
    eager = rungs.change(made, {f"compile.{key}": None for key in key_names("compile")})
    with tempfile.TemporaryDirectory(prefix="surefoot-whatif-") as work:
        bench = Workbench(eager, LadderSettings(pairs=rounds), Path(work))
        tell("eager mode alone, to see how long a step takes")
        bench.begin()
        bench.extend_warmup_for_compilation()
        specs, left_out = find_specs(made, bench.device)
        tell(
            f"{len(specs) + 1} arms in {rounds} rounds; "
            "in the first each compiles with empty caches"
        )
        trial = bench.measure_all(
            "compiling", {EAGER: eager, **specs}, rounds, caches=Path(work) / "caches", tell=tell
        )
    conditions = {
        **find_conditions(("torch", "surefoot"), threads=spec.train.threads or 1),
        "device": bench.device,
    }
    ways = (_measure_eager(trial), *(_measure_mode(bench, trial, name) for name in specs))
    return Ways(ways=ways, left_out=left_out, rounds=rounds, conditions=conditions)


def _measure_eager(trial: Trial) -> CompileTiming:
    return CompileTiming(
        what=EAGER,
        step_s=median_of(trial, EAGER, "wall_s_per_step"),
        peak_bytes=_peak(trial, EAGER),
        failure=failure_of(trial, EAGER),
    )


def _measure_mode(bench: Workbench, trial: Trial, name: str) -> CompileTiming:
    what, mode = name.split()
    compiled = trial.by_round(name, "compile_s")
    failure = failure_of(trial, name)
    if failure is None and not compiled:
        return CompileTiming(
            what=what,
            mode=mode,
            failure="nothing was compiled: the steps call none of what was to be",
        )
    if not compiled:
        return CompileTiming(what=what, mode=mode, failure=failure)
    first = min(compiled)
    later = [compile_s for number, compile_s in compiled.items() if number > first]
    ratio = bench.ratio(trial, name, EAGER, "wall")
    eager_s = median_of(trial, EAGER, "wall_s_per_step")
    return CompileTiming(
        what=what,
        mode=mode,
        compile_s=compiled[first] if first == 0 else None,
        again_s=median(later) if later else None,
        step_s=median_of(trial, name, "wall_s_per_step"),
        peak_bytes=_peak(trial, name),
        ratio=ratio,
        pays_after=find_break_even(compiled[first], eager_s, ratio)
        if first == 0 and eager_s and ratio
        else None,
        failure=failure,
    )


def find_break_even(
    compile_s: float, eager_s: float, ratio: Interval
) -> tuple[int, int, int] | None:
    """Return the number of steps after which compiled steps have saved the time of compilation.

    The three values are those for the ratio and for the two bounds of its interval. Returns None if
    no gain is shown.

    >>> find_break_even(30.0, 0.1, Interval(estimate=0.5, low=0.4, high=0.7, count=7, neutral=1.0))
    (600, 500, 1000)
    """
    if ratio.verdict != "lower" or ratio.low is None or ratio.high is None:
        return None
    after, least, most = (
        math.ceil(round(compile_s / (eager_s * (1 - each)), 6))
        for each in (ratio.estimate, ratio.low, ratio.high)
    )
    return after, least, most


def _peak(trial: Trial, name: str) -> float | None:
    """Return the peak of allocated memory on a GPU, or the largest resident size on a CPU.

    The resident size includes the compiler's memory.
    """
    on_device = median_of(trial, name, "device_peak_bytes")
    return median_of(trial, name, "peak_bytes") if on_device is None else on_device
