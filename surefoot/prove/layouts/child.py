"""What each rank runs while layouts are compared: a few steps, after each of which rank 0 reports loss, norm, gradients and weights.

`python -m surefoot.prove.layouts.child SPEC --report FILE --run DIR --steps N --float64`
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Sequence
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from surefoot.components.data import as_source
from surefoot.components.data.feed import map_tensors
from surefoot.components.parallel import gather_rows
from surefoot.contract import spec_file
from surefoot.contract.state import master_of, part_of
from surefoot.contract.task import Batch, Resolved, Source, resolve
from surefoot.prove.ladder.child import with_masters
from surefoot.train.assemble import load_task
from surefoot.train.run import Run
from surefoot.trial import capture, write_report
from surefoot.trial.arm import told_apart


class Wide:
    """A task whose model and batches are float64: what is then left of a difference is no rounding."""

    def __init__(self, found: Resolved) -> None:
        self._task, own = found.task, found.augment
        self.augment = None if own is None else lambda batch, keys: map_tensors(own(batch, keys), _wide)

    def model(self) -> nn.Module:
        made: nn.Module = self._task.model()
        return made.double()

    def data(self, split: str) -> Source:
        made: Any = WideSource(as_source(self._task.data(split)))
        return made  # type: ignore[no-any-return]

    def __getattr__(self, name: str) -> Any:
        return getattr(self._task, name)


class WideSource:
    """A source whose numbers are float64."""

    def __init__(self, source: Source) -> None:
        self._source = source

    def __len__(self) -> int:
        return len(self._source)

    def read(self, ids: np.ndarray) -> Batch:
        return map_tensors(self._source.read(ids), _wide)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._source, name)


def _wide(tensor: Tensor) -> Tensor:
    return tensor.double() if tensor.is_floating_point() else tensor


def main(words: Sequence[str] | None = None) -> None:
    """Do what `words` (the command line's) ask for, and report it."""
    asked = _parser().parse_args(words)
    spec = spec_file.read(str(asked.spec)).spec
    found = load_task(spec)
    task = resolve(Wide(found), importable=found.importable) if asked.float64 else found
    arrays: dict[str, np.ndarray] = {}
    with told_apart(), Run(spec, task, folder=asked.run, quiet=True) as run:
        took_s: list[float] = []
        begun_s = time.perf_counter()
        for report in islice(run.steps(), asked.steps):
            step = report.step
            took_s.append(time.perf_counter() - begun_s)
            arrays |= _capture_whole(run, report.loss or 0.0, step)
            if report.gradient_norm is not None:
                arrays[f"norm/{step}"] = np.array(report.gradient_norm, dtype=np.float64)
            begun_s = time.perf_counter()
        facts = {"batch": str(run.assembly.feed.largest), "steps": str(run.step), "device": run.assembly.engine.device.type}
        facts["step_s"] = str(statistics.median(took_s[1:] or took_s))
        is_first = run.group.is_first
    if is_first:
        write_report(asked.report, {}, facts=facts, arrays=arrays)


def _capture_whole(run: Run, loss: float, step: int) -> dict[str, np.ndarray]:
    """What `capture` gives of one process; where ranks hold rows, these are joined."""
    sharded = run.assembly.engine.stepper.ranks and run.assembly.engine.stepper.ranks.sharded
    if not sharded:
        return with_masters(run.model, capture(run.model, loss, step), step)
    taken = {f"loss/{step}": np.array(loss, dtype=np.float64)}
    taken |= {f"weight/{step}/{name}": buffer.numpy().copy() for name, buffer in run.model.named_buffers()}
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
    parser.add_argument("--float64", action="store_true")
    return parser


if __name__ == "__main__":
    torch.set_num_threads(1)
    main()
