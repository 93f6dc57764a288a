"""Position of a spec's training step on the roofline of this machine.

The peaks of the machine are measured, the step is timed, and its FLOPs and bytes are counted.
"""

from __future__ import annotations

import os
import time
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch

from surefoot.components.profiler.counts import WHOLE, Counter
from surefoot.components.profiler.peaks import measure_peaks
from surefoot.contract.spec import RunSpec
from surefoot.core.cost.roofline import (
    MFU,
    VERSION,
    OperatorWork,
    Point,
    Utilization,
    find_point,
    fusible_share,
)
from surefoot.core.errors import InputError
from surefoot.core.hardware import Peaks, find_published
from surefoot.core.statistics import median
from surefoot.prove.bench.rehearsal import Rehearsal

# untimed warm-up steps; steps that are counted, the first of them as a warm-up
WARMUP, COUNTED = 3, 5
Tell = Callable[[str], None]


@dataclass(frozen=True, kw_only=True)
class MeasuredRooflinePoint:
    """Training step on the roofline of this machine.

    `step_s` is the median over steps without operator counting. `model_flops` are the FLOPs of the
    model without recomputation. `rule_flops` is the rule of thumb, 6 x parameters x tokens plus
    attention; it is None if the number of tokens is unknown. `load` is the load average of the
    system in the minute before the measurement, which other processes have caused.
    """

    peaks: Peaks
    one_core: Peaks | None
    published: Peaks | None
    points: tuple[Point, ...]
    step_s: float
    num_steps: int
    num_samples: int
    flops: float
    model_flops: float
    again_flops: float
    rule_flops: float | None
    utilization: Utilization
    fusible_share: float | None
    unknown: tuple[str, ...]
    load: float | None

    @property
    def samples_per_s(self) -> float:
        return self.num_samples / self.step_s

    @property
    def operators_s(self) -> float:
        """Seconds of a step inside operators; the remainder is Python and operator calls."""
        return sum(point.elapsed_s for point in self.points if point.kind == "operator")

    def as_row(self) -> dict[str, Any]:
        """Return the contents of `roofline.json`."""
        use = self.utilization
        return {
            "version": VERSION,
            "device": self.peaks.device,
            "peaks": self.peaks.as_row(),
            "one_core": self.one_core.as_row() if self.one_core else None,
            "published": self.published.as_row() if self.published else None,
            "points": [point.as_row() for point in self.points],
            "step_s": self.step_s,
            "num_steps": self.num_steps,
            "num_samples": self.num_samples,
            "operators_s": self.operators_s,
            "flops": self.flops,
            "model_flops": self.model_flops,
            "recomputed_flops": self.again_flops,
            "rule_of_thumb_flops": self.rule_flops,
            "mfu": use.share(self.samples_per_s),
            "mfu_formula": f"{MFU}: {use.words(self.samples_per_s)}",
            "utilization": {
                "flops_per_sample": use.flops_per_sample,
                "peak_flops_per_s": use.peak_flops_per_s,
                "dtype": use.dtype,
                "source": use.source,
            },
            "fusible_share": self.fusible_share,
            "without_formula": list(self.unknown),
            "load": self.load,
        }


def find_peaks(device: torch.device, threads: int, tell: Tell) -> tuple[Peaks, Peaks | None]:
    """Measure the peak performance of the device, and that of one CPU core.

    The second value is None on a GPU.
    """
    tell(
        f"measuring the peaks of {device.type}"
        + (f" with {threads} threads" if device.type == "cpu" else "")
    )
    peaks = measure_peaks(device, threads=threads)
    if device.type != "cpu" or threads == 1:
        return peaks, peaks if device.type == "cpu" else None
    tell("measuring the peaks of one core")
    return peaks, measure_peaks(device, threads=1)


def place(spec: RunSpec, *, steps: int, tell: Tell = lambda text: None) -> MeasuredRooflinePoint:
    """Time `steps` steps of the spec, and count the operators of a few more.

    Raises:
        InputError: If `steps` is less than 1.
    """
    if steps < 1:
        raise InputError(f"--steps is {steps}", hint="use --steps 1 or more")
    load = os.getloadavg()[0] if hasattr(os, "getloadavg") else None
    with Rehearsal(spec, steps=WARMUP + steps + COUNTED) as rehearsal:
        peaks, one_core = find_peaks(rehearsal.device, torch.get_num_threads(), tell)
        tell(f"timing {steps} steps")
        elapsed_s = [_time_steps(rehearsal) for _ in range(WARMUP + steps)][WARMUP:]
        tell(f"counting {COUNTED} steps")
        counters = [_count_operators(rehearsal) for _ in range(COUNTED)][1:]
        return replace(
            _make_roofline_point(rehearsal, counters, peaks, one_core, elapsed_s), load=load
        )


def _time_steps(rehearsal: Rehearsal) -> float:
    started_s = time.perf_counter()
    rehearsal.take("step")
    return time.perf_counter() - started_s


def _count_operators(rehearsal: Rehearsal) -> Counter:
    with Counter(rehearsal.assembly.model) as counter:
        rehearsal.take("step")
    return counter


def _make_roofline_point(
    rehearsal: Rehearsal,
    counters: list[Counter],
    peaks: Peaks,
    one_core: Peaks | None,
    elapsed_s: list[float],
) -> MeasuredRooflinePoint:
    whole, published = _median_work(counters, WHOLE), find_published(peaks.device)
    points = _points(counters, whole, peaks)
    model_flops = sum(work.model_flops for work in whole)
    return MeasuredRooflinePoint(
        peaks=peaks,
        one_core=one_core,
        published=published,
        points=points,
        step_s=median(elapsed_s),
        num_steps=len(elapsed_s),
        num_samples=rehearsal.num_samples,
        flops=sum(work.flops for work in whole),
        model_flops=model_flops,
        again_flops=counters[-1].again_flops,
        rule_flops=_rule_flops(rehearsal, whole),
        utilization=_utilization(whole, model_flops / rehearsal.num_samples, published or peaks),
        fusible_share=fusible_share(points),
        unknown=tuple(sorted(counters[-1].unknown)),
        load=None,
    )


def _median_work(counters: list[Counter], module: str) -> list[OperatorWork]:
    """Return the operators in a module in the last counted step, the longest first.

    The time of an operator is the median over all counted steps.
    """
    times: dict[tuple[str, str, str], list[float]] = defaultdict(list)
    for counter in counters:
        for work in counter.of(module):
            times[work.operator, work.dtype, work.group].append(work.elapsed_s)
    last = [
        replace(work, elapsed_s=median(times[work.operator, work.dtype, work.group]))
        for work in counters[-1].of(module)
    ]
    return sorted(last, key=lambda work: -work.elapsed_s)


def _points(counters: list[Counter], whole: list[OperatorWork], peaks: Peaks) -> tuple[Point, ...]:
    """Return a point per operator and dtype, then a point per module, the longest first.

    A module includes its backward pass and its submodules.
    """
    operators = [find_point(work.operator, "operator", [work], peaks) for work in whole]
    modules = [
        find_point(name, "module", _median_work(counters, name), peaks)
        for name in counters[-1].modules()
    ]
    return (*operators, *sorted(modules, key=lambda point: -point.elapsed_s))


def _utilization(whole: list[OperatorWork], flops_per_sample: float, peaks: Peaks) -> Utilization:
    """Return the utilization relative to the peak of the dtype with most of the model's FLOPs.

    The peak is that of the manufacturer for a known GPU, else the one measured on this machine.
    """
    by_dtype: dict[str, float] = {}
    for work in whole:
        by_dtype[work.dtype] = by_dtype.get(work.dtype, 0.0) + work.model_flops
    dtype = max(by_dtype, key=by_dtype.__getitem__, default="fp32")
    threads = (
        ""
        if peaks.threads is None
        else f", {peaks.threads} thread{'' if peaks.threads == 1 else 's'}"
    )
    return Utilization(
        flops_per_sample=flops_per_sample,
        peak_flops_per_s=peaks.flops_per_s.get(dtype),
        dtype=dtype,
        source=f"{peaks.source}{threads}",
    )


def _rule_flops(rehearsal: Rehearsal, whole: list[OperatorWork]) -> float | None:
    tokens = rehearsal.assembly.course.tokens_per_sample
    if tokens is None:
        return None
    parameters = sum(each.numel() for each in rehearsal.assembly.model.parameters())
    attention = sum(work.model_flops for work in whole if work.group == "attention")
    return 6 * parameters * tokens * rehearsal.num_samples + attention
