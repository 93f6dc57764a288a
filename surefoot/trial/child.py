"""Process of an arm that trains a spec: `python -m surefoot.trial.child`."""

from __future__ import annotations

import argparse
import math
import time
import traceback
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from itertools import islice
from pathlib import Path

import numpy as np
import torch

from surefoot.components.compiler.steward import Steward
from surefoot.contract import events, spec_file
from surefoot.contract.spec import RunSpec
from surefoot.contract.state import StepReport
from surefoot.core.errors import OutOfMemory
from surefoot.train.failure.blame import is_out_of_memory
from surefoot.train.run import Run
from surefoot.train.step.program import EAGER_STEPS
from surefoot.trial.arm import mark_refused_specs
from surefoot.trial.report import Clock, capture, peak_bytes, resident_bytes, write_report
from surefoot.trial.turns import Turns


def main(words: Sequence[str] | None = None) -> None:
    """Train the spec that the arguments `words` name, and write a report of the measurements.

    Without `words`, the arguments of the command line are used.
    """
    asked = _parser().parse_args(words)
    measures = {"imported_bytes": float(resident_bytes())}
    spec = spec_file.read_written(asked.spec)
    found: dict[str, np.ndarray] = {}
    measured: list[StepReport] = []
    turns, steward = Turns(asked.turns), Steward()
    with exit_if_out_of_memory(), mark_refused_specs(), Run(spec, folder=asked.run) as run:
        device, feed = run.assembly.engine.device, run.assembly.feed
        measures["samples_per_epoch"] = float(feed.order.n - feed.dropped)
        if run.assembly.course.total_steps is not None:
            measures["total_steps"] = float(run.assembly.course.total_steps)
        steps, clock, settle = run.steps(), Clock(), partial(wait_for, device)
        alike, waited_s = first_regular_step(spec), 0.0
        for report in islice(steps, asked.warmup):
            if report.step == alike and asked.started is not None:
                wait_for(device)
                measures["startup_s"] = time.perf_counter() - asked.started - waited_s
            _keep(found, run, report, asked.capture)
            waited_s += turns.after_step(settle)
        wait_for(device)  # otherwise the clock would time kernel launches
        with clock:
            for report in islice(steps, asked.steps):
                measured.append(report)
                _keep(found, run, report, asked.capture)
                clock.leave_out(turns.after_step(settle))
            wait_for(device)
        cpu_s = run.group.add(
            torch.tensor(clock.cpu_s, dtype=torch.float64, device=run.group.device)
        )
        clock.cpu_s = float(cpu_s)
    loss = measured[-1].loss if measured else None
    if loss is not None and math.isfinite(loss):
        measures["loss"] = loss
    if measured and not found:  # copying tensors is not part of a step
        measures |= clock.per(len(measured)) | _measures_per_sample(measured, clock)
    measures["peak_bytes"] = float(peak_bytes())
    compiled = steward.take()
    if compiled:
        measures["compile_s"] = sum(each.elapsed_s for each in compiled)
    if device.type == "cuda":
        measures["device_peak_bytes"] = device_peak_bytes(
            asked.run, torch.cuda.max_memory_allocated(device)
        )
    facts = {"outcome": run.outcome, "cause": run.cause, "spec": spec.id, "device": device.type}
    facts["devices"] = str(torch.cuda.device_count() if device.type == "cuda" else 1)
    write_report(asked.report, measures, facts=facts, arrays=found or None)


def device_peak_bytes(run: Path, now_bytes: int) -> float:
    """Return the peak of allocated GPU memory over a whole run, in bytes.

    Each step record of the run contains the peak since the record before.

    Args:
        run: Folder of the run.
        now_bytes: Peak since the last record.
    """
    told = [
        event.device_memory
        for event in events.read(run)
        if isinstance(event, events.Step) and event.device_memory
    ]
    return float(max([now_bytes, *(each["peak_bytes"] for each in told)]))


@contextmanager
def exit_if_out_of_memory() -> Iterator[None]:
    """Return a context that exits with the exit code of OutOfMemory on any out-of-memory error."""
    try:
        yield
    except Exception as error:
        if not isinstance(error, OutOfMemory) and not is_out_of_memory(error):
            raise
        traceback.print_exc()
        raise SystemExit(OutOfMemory.exit_code) from None


def first_regular_step(spec: RunSpec) -> int:
    """Return the number of the first step that runs like all later ones.

    It is 1 without compilation, otherwise the first compiled step, which follows eager steps.
    """
    return {"none": 1, "step": EAGER_STEPS + 1}.get(spec.compile.what, 2)


def wait_for(device: torch.device) -> None:
    """Wait until all kernels that were launched on `device` have ended."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def _measures_per_sample(reports: Sequence[StepReport], clock: Clock) -> dict[str, float]:
    """Return the time per sample of the measured steps, and counts of steps, samples and items."""
    samples = sum(report.num_samples for report in reports)
    items = sum(float(count) for report in reports for _, count, _ in report.totals.values())
    if not samples:
        return {}
    return {
        "num_steps": float(len(reports)),
        "num_samples": float(samples),
        "cpu_s_per_sample": clock.cpu_s / samples,
        "wall_s_per_sample": clock.wall_s / samples,
        "items_per_sample": items / samples,
        "applied_share": sum(report.applied for report in reports) / len(reports),
    }


def _keep(found: dict[str, np.ndarray], run: Run, report: StepReport, wanted: list[int]) -> None:
    loss = report.loss if report.step in wanted else None
    if loss is not None:
        found |= capture(run.model, loss, report.step)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="surefoot.trial.child")
    parser.add_argument("spec", type=Path)
    parser.add_argument("--report", type=Path, required=True)
    parser.add_argument("--run", type=Path, required=True)
    parser.add_argument("--warmup", type=int, default=0)
    parser.add_argument("--steps", type=int, help="measured steps; none: to the run's end")
    parser.add_argument("--capture", type=int, action="append", default=[])
    parser.add_argument(
        "--started", type=float, help="the harness's clock when it started this process"
    )
    parser.add_argument(
        "--turns",
        type=_descriptor,
        help="the channel by which it takes turns with others, or: alone",
    )
    return parser


def _descriptor(word: str) -> int | None:
    return None if word == "alone" else int(word)


if __name__ == "__main__":
    main()
