"""One update of an optimizer over a workload's weights, and one whole run of a spec for its score.

python -m benchmarks.large_batch.arms step NAME MODEL,MODEL REPORT
python -m benchmarks.large_batch.arms score SPEC RUN REPORT
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from benchmarks.step_cost.models import WORKLOADS
from surefoot.components.compiler.regions import compile_function
from surefoot.components.optim.build import build as build_optimizer
from surefoot.components.optim.groups import find_trained
from surefoot.components.optim.update import GuardedUpdate
from surefoot.contract import spec_file
from surefoot.contract.spec import OptimTable
from surefoot.train import environment
from surefoot.train.run import Run, drive
from surefoot.train.step.joined.arithmetic import UpdateRule, move
from surefoot.trial import Clock, write_report

WARMUP, UPDATES = 50, 2000
CLIP = 1.0


def make_update(name: str, model: nn.Module) -> Callable[[], object]:
    """The guarded update of surefoot.

    Norm, guard, clipping and update, or with `compiled` in the name all that as one graph.
    """
    kind, _, compiled = name.partition(" ")
    built = build_optimizer(
        OptimTable.model_validate({"name": kind, "lr": 1e-4}), find_trained(model)
    )
    guarded = GuardedUpdate(built.optimizers, clip=CLIP)
    return _compile(kind, guarded) if compiled else guarded.step_if_finite


def _compile(kind: str, guarded: GuardedUpdate) -> Callable[[], object]:
    """The end of a step that is one graph, by itself.

    In a run it is a part of the graph of the whole step.
    """
    rules = [UpdateRule.of(kind, group) for group in guarded.groups]
    loss = torch.zeros(())

    def whole(held: Any, grads: Any, rates: Any) -> Any:
        with torch.no_grad():
            norm, applied, limited = move(rules, held, grads, rates, [loss], CLIP, None)
            # in place, as the fused kernels leave them
            for grad, each in zip(grads, limited, strict=True):
                grad.copy_(each)
            return norm, applied

    _, compiled = compile_function("the update", whole, on_failure="stop", on_cpu=True)

    def update() -> object:
        norm, applied = compiled(
            guarded.held(),
            [parameter.grad for parameter in guarded.parameters],
            guarded.begin_traced(),
        )
        return guarded.end_traced(norm, applied)

    return update


def measure_step(name: str, models: str, report: str) -> None:
    """CPU seconds of an update whose gradients are there already, of each model."""
    torch.set_num_threads(1)
    environment.keep_freed_memory()  # as every run does
    measures: dict[str, float] = {}
    for model in models.split(","):
        measures |= {
            f"{model}/{key}": value for key, value in _step(name, WORKLOADS[model].model()).items()
        }
    write_report(report, measures)


def _step(name: str, model: nn.Module) -> dict[str, float]:
    generator = torch.Generator().manual_seed(0)
    for parameter in model.parameters():
        parameter.grad = 1e-3 * torch.randn(parameter.shape, generator=generator)
    update = make_update(name, model)
    for _ in range(WARMUP):
        update()
    with Clock() as clock:
        for _ in range(UPDATES):
            update()
    return clock.per(UPDATES)


def measure_score(spec: str, folder: str, report: str) -> None:
    """The score of the last evaluation of a run."""
    with Run(spec_file.read(spec).spec, folder=folder, quiet=True) as run:
        drive(run)
    write_report(
        report,
        {
            "score": float(run.summary["value"]),
            "training_s": run.session.progress.training_s,
            "updates": float(run.step),
        },
    )


def main() -> None:
    what, *words = sys.argv[1:]
    {"step": measure_step, "score": measure_score}[what](*words)


if __name__ == "__main__":
    main()
