"""Throughput meter: sums and counts over the steps of a window, read once when the window ends.

| measure | formula | unit |
| --- | --- | --- |
| samples/s | samples consumed / wall seconds of the window | samples per second |
| items/s (tokens/s, bytes/s) | loss counts / wall seconds of the window | items per second |
| step time | wall seconds of the window / its steps | seconds |
| steps/s | steps of the window / its wall seconds | steps per second |
| waiting share | seconds waiting for data / wall seconds | share of 1 |
| phase share | seconds of the phase / wall seconds | share of 1 |
| applied share | applied steps / steps | share of 1 |
| goodput | productive seconds / all seconds since the first attempt started | share of 1 |
| model FLOPs utilization | model FLOPs of a sample x samples/s / peak FLOP/s | share of 1 |
| scaling efficiency | n/a on one process | share of 1 |

For a phase share, the wall seconds include evaluations and all time between steps. `surefoot why`
and `surefoot show` report goodput. `surefoot show` reports model FLOPs utilization after `surefoot
roofline` has run.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from surefoot.components.observe.memory_use import peak_resident_bytes, take_device_memory
from surefoot.contract import events
from surefoot.contract.state import StepReport, Timing, learning_rate_of


@dataclass(frozen=True, kw_only=True)
class Summary:
    """Sums and means over the steps of a window; a mean whose count is 0 is None.

    `step`, `epoch`, `gradient_norm`, `learning_rate` and `loss_scale` are those of the last step.
    """

    step: int
    epoch: float
    num_steps: int
    num_applied: int
    num_samples: int
    num_items: float
    loss: float | None
    terms: dict[str, float | None] = field(default_factory=dict)
    gradient_norm: float | None
    learning_rate: float | None
    elapsed_s: float
    waiting_s: float
    loss_scale: float | None = None

    @property
    def samples_per_s(self) -> float | None:
        return self.num_samples / self.elapsed_s if self.elapsed_s > 0 else None

    @property
    def items_per_s(self) -> float | None:
        return self.num_items / self.elapsed_s if self.elapsed_s > 0 else None


class Meter:
    """Collector of step reports for one window of steps.

    `take` reads the reports and starts a new window. It is the only method that waits for the
    device.
    """

    def __init__(self) -> None:
        self._reports: list[StepReport] = []
        self._since_s = time.perf_counter()

    def add(self, report: StepReport) -> None:
        self._reports.append(report)

    def __len__(self) -> int:
        return len(self._reports)

    def restart_clock(self) -> None:
        """Restart the clock of the window.

        Evaluations and checkpoints since the last step then do not lower the throughput.
        """
        self._since_s = time.perf_counter()

    def take(self) -> Summary | None:
        """Return the summary of the reports since the last call; None if there are no reports."""
        reports, self._reports = self._reports, []
        if not reports:
            return None
        sums: dict[str, tuple[float, float, float]] = {}
        applied = [report for report in reports if report.applied]
        # skipped steps are left out: their NaN would make the mean NaN
        for report in applied or reports:
            for name, (total, count, weight) in report.totals.items():
                old = sums.get(name, (0.0, 0.0, weight))
                sums[name] = (old[0] + float(total), old[1] + float(count), weight)
        terms = {name: total / count if count else None for name, (total, count, _) in sums.items()}
        losses = [weight * total / count for total, count, weight in sums.values() if count]
        now_s = time.perf_counter()
        elapsed_s, self._since_s = now_s - self._since_s, now_s
        last = reports[-1]
        firsts = [[*report.totals.values()][:1] for report in reports]
        return Summary(
            step=last.step,
            epoch=last.epoch,
            num_steps=len(reports),
            num_applied=len(applied),
            num_samples=sum([report.num_samples for report in reports]),
            num_items=sum([float(count) for row in firsts for _, count, _ in row]),
            loss=sum(losses) if losses else None,
            terms=terms,
            gradient_norm=last.gradient_norm,
            learning_rate=None if last.learning_rate is None else float(last.learning_rate),
            elapsed_s=elapsed_s,
            waiting_s=sum([report.waiting_s for report in reports]),
            loss_scale=last.loss_scale,
        )


def make_step_record(
    summary: Summary,
    timing: Timing,
    groups: Mapping[str, Sequence[Mapping[str, Any]]],
    *,
    generation: int,
    device: torch.device,
) -> events.Step:
    """Return the record of the steps that `summary` and `timing` summarize.

    `groups` are the parameter groups of each optimizer or update, by name; their learning rates are
    recorded, of the second group as `name.1`.
    """
    rates = {
        f"{name}.{number}" if number else name: float(rate)
        for name, rows in groups.items()
        for number, group in enumerate(rows)
        if (rate := learning_rate_of(group)) is not None
    }
    return events.Step(
        generation=generation,
        time_s=time.time(),
        step=summary.step,
        epoch=summary.epoch,
        num_steps=summary.num_steps,
        loss=summary.loss,
        terms=summary.terms,
        gradient_norm=summary.gradient_norm,
        learning_rates=rates,
        num_applied=summary.num_applied,
        num_samples=summary.num_samples,
        num_items=summary.num_items,
        elapsed_s=summary.elapsed_s,
        waiting_s=summary.waiting_s,
        samples_per_s=summary.samples_per_s,
        items_per_s=summary.items_per_s,
        peak_bytes=peak_resident_bytes(),
        phases=timing.phases,
        step_s=timing.step_s,
        outliers=timing.outliers,
        device_memory=take_device_memory(device),
        loss_scale=summary.loss_scale,
    )
