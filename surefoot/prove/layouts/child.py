"""Process of a rank in a comparison of layouts, which trains a few steps.

After each step rank 0 reports loss, gradient norm, gradients and weights.

`python -m surefoot.prove.layouts.child SPEC --report FILE --run DIR --steps N --float64`

With `--record`, two lists of operators are reported as facts in JSON: `narrow`, those with outputs
narrower than float64, and `draws`, those that draw random numbers. They are reported even if the
run fails, together with the error as `failed`. With `--plain`, BatchNorm and dropout work as in
evaluation.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import statistics
import time
from collections.abc import Sequence
from dataclasses import asdict
from itertools import islice
from pathlib import Path

import numpy as np
import torch

from surefoot.components.parallel.shard.parts import gather_rows
from surefoot.contract import spec_file
from surefoot.contract.state import master_of, part_of
from surefoot.contract.task import resolve
from surefoot.prove.ladder.child import with_masters
from surefoot.prove.layouts.pass_record import PassRecord
from surefoot.prove.layouts.wide import Wide
from surefoot.train.assemble import load_task
from surefoot.train.failure.blame import describe
from surefoot.train.run import Run
from surefoot.trial import capture, write_report
from surefoot.trial.arm import mark_refused_specs


def main(words: Sequence[str] | None = None) -> None:
    """Run the steps that the arguments `words` request, and write the report.

    Without `words`, the arguments of the command line are used.
    """
    asked = _parser().parse_args(words)
    record = PassRecord() if asked.record else None
    facts: dict[str, str] = {}
    arrays: dict[str, np.ndarray] | None = {}
    with record or contextlib.nullcontext():
        try:
            arrays = _train(asked, record, facts)
        except Exception as error:
            if record is None:
                raise
            facts["failed"] = describe(error)
    if record is not None:
        facts |= {
            name: json.dumps([asdict(each) for each in getattr(record, name)])
            for name in ("narrow", "draws")
        }
    if arrays is not None:
        write_report(asked.report, {}, facts=facts, arrays=arrays)


def _train(
    asked: argparse.Namespace, record: PassRecord | None, facts: dict[str, str]
) -> dict[str, np.ndarray] | None:
    """Train, add facts of the run to `facts`, and return the tensors after each step.

    Returns None on ranks that report nothing.
    """
    spec = spec_file.read_written(asked.spec)
    found = load_task(spec)
    task = found
    if asked.float64 or asked.plain or record is not None:
        task = resolve(
            Wide(found, float64=asked.float64, record=record, plain=asked.plain),
            importable=found.importable,
        )
    arrays: dict[str, np.ndarray] = {}
    with mark_refused_specs(), Run(spec, task, folder=asked.run, quiet=True) as run:
        took_s: list[float] = []
        begun_s, largest = time.perf_counter(), 0
        for report in islice(run.steps(), asked.steps):
            step, largest = report.step, max(largest, report.num_samples)
            took_s.append(time.perf_counter() - begun_s)
            arrays |= _capture_whole(run, report.loss or 0.0, step)
            if report.gradient_norm is not None:
                arrays[f"norm/{step}"] = np.array(report.gradient_norm, dtype=np.float64)
            begun_s = time.perf_counter()
        facts |= {
            "batch": str(largest),
            "steps": str(run.step),
            "device": run.assembly.engine.device.type,
        }
        facts["step_s"] = str(statistics.median(took_s[1:] or took_s))
        return arrays if run.group.is_first else None


def _capture_whole(run: Run, loss: float, step: int) -> dict[str, np.ndarray]:
    """Return what `capture` returns in one process; sharded tensors are gathered from all ranks."""
    sharded = (
        run.assembly.engine.steps.collectives.ranks
        and run.assembly.engine.steps.collectives.ranks.sharded
    )
    if not sharded:
        return with_masters(run.model, capture(run.model, loss, step), step)
    taken = {f"loss/{step}": np.array(loss, dtype=np.float64)}
    taken |= {
        f"weight/{step}/{name}": buffer.numpy().copy() for name, buffer in run.model.named_buffers()
    }
    for name, parameter in run.model.named_parameters():
        master = master_of(parameter)
        part = part_of(master)
        assert part is not None or not parameter.requires_grad
        held = {"weight": parameter if part is None else master, "gradient": master.grad}
        for kind, tensor in held.items():
            if tensor is not None:
                whole = tensor if part is None else gather_rows(sharded.group, tensor, part)
                taken[f"{kind}/{step}/{name}"] = whole.detach().cpu().numpy().copy()
    return taken


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="surefoot.prove.layouts.child")
    parser.add_argument("spec", type=Path)
    parser.add_argument("--report", type=Path, required=True)
    parser.add_argument("--run", type=Path, required=True)
    parser.add_argument("--steps", type=int, required=True)
    for flag in ("--float64", "--record", "--plain"):
        parser.add_argument(flag, action="store_true")
    return parser


if __name__ == "__main__":
    torch.set_num_threads(1)
    main()
