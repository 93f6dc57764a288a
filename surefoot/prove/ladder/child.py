"""Child process that checks a rung (one optimization of a ladder) with several seeds.

It reports the tensors of a few steps, or the scores of short runs.

    python -m surefoot.prove.ladder.child tensors|scores|states SPEC
        --steps N --report FILE --run DIR --seed N ...
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Sequence
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from surefoot.contract import spec_file
from surefoot.contract.spec import RunSpec
from surefoot.contract.state import StepReport, master_of
from surefoot.core.errors import TaskError
from surefoot.train.run import Run
from surefoot.trial import capture, write_report
from surefoot.trial.arm import mark_refused_specs

COMPARED_STEPS = 2  # steps from a state: the second one uses the weights that the first one updated


def main(words: Sequence[str] | None = None) -> None:
    """Run the check that the arguments `words` name, and write its report.

    Without `words`, the arguments of the command line are used.
    """
    asked = _parser().parse_args(words)
    spec = spec_file.read_written(asked.spec)
    if asked.what == "scores":
        _report_scores(spec, asked)
        return
    with mark_refused_specs():
        arrays = _arrays(spec, asked)
    write_report(asked.report, {}, arrays=arrays)


def _arrays(spec: RunSpec, asked: argparse.Namespace) -> dict[str, np.ndarray]:
    if asked.what == "states":
        return states(spec, asked.run, seeds=asked.seed, steps=asked.steps, units=asked.unit or ())
    arrays: dict[str, np.ndarray] = {}
    for number, seed in enumerate(asked.seed):
        seeded = spec.replace(train={"seed": seed})
        arrays |= tensors(
            seeded,
            asked.run / str(number),
            steps=asked.steps if number == 0 else 1,
            number=number,
            unit=asked.unit[0] if asked.unit else None,
        )
    return arrays


def _report_scores(spec: RunSpec, asked: argparse.Namespace) -> None:
    measures: dict[str, float] = {}
    facts: dict[str, str] = {}
    for number, seed in enumerate(asked.seed):
        with Run(
            spec.replace(train={"seed": seed}), folder=asked.run / str(number), quiet=True
        ) as run:
            for _ in islice(run.steps(), asked.steps):
                pass
            found = run.evaluate()
        facts = {
            "score": found.score,
            "better": found.better,
            "unit": found.units.get(found.score, ""),
        }
        if found.value is not None and math.isfinite(found.value):
            measures[f"score_{number}"] = found.value
    write_report(asked.report, measures, facts=facts)


def tensors(
    spec: RunSpec, folder: Path, *, steps: int, number: int, unit: float | None
) -> dict[str, np.ndarray]:
    """Return loss, gradients and weights after the first and the last of `steps` steps.

    Args:
        spec: The spec.
        folder: Folder of the run.
        steps: Number of steps.
        number: Index of the seed. For an index above 0, only the gradients of step 1 are returned.
        unit: Multiply every weight, the output of every leaf module and its gradient by 1 + r with
            random |r| <= `unit`, which is at least the effect of rounding to a format with this
            unit; None for no change.

    Raises:
        TaskError: If the spec compiles, but nothing was compiled.
    """
    found: dict[str, np.ndarray] = {}
    with Run(spec, folder=folder, quiet=True) as run:
        engine = run.assembly.engine
        # a step that is recorded is not compiled, and the first step is compared
        engine.steps.record.is_on = engine.compiled is None
        if unit is not None:
            blur(run.model, unit, spec.train.seed)
        for report in islice(run.steps(), steps):
            taken = _take(run, report)
            if report.step == 1:
                found |= {
                    f"batch/{number}{name.removeprefix('gradient/1')}": each
                    for name, each in taken.items()
                    if "gradient" in name
                }
            if number == 0 and report.step in (1, steps):
                found |= taken
        _check_compiled(run)
    return found


def states(
    spec: RunSpec, folder: Path, *, seeds: Sequence[int], steps: int, units: Sequence[float]
) -> dict[str, np.ndarray]:
    """Return loss, gradients, weights and buffers of two steps from each of several states.

    The states are those after 0, `steps`, 2 x `steps`, ... plain steps. Plain steps are neither
    compiled nor changed at random. Each comparison therefore starts from the same bits, and
    differences have no time to grow.

    Args:
        spec: The spec.
        folder: Folder of the runs.
        seeds: Seed of each state.
        steps: Number of plain steps between two states.
        units: Unit of each draw of simulated rounding. The result also contains, as `floor/...`,
            each tensor from the draw that changed it most.

    Raises:
        TaskError: If the spec compiles, but nothing was compiled.
    """
    found: dict[str, np.ndarray] = {}
    for number, seed in enumerate(seeds):
        seeded = spec.replace(train={"seed": seed})
        start = _state(seeded, folder / f"{number}", number=number, plain_steps=number * steps)
        found |= start
        furthest = dict(start)
        for draw, unit in enumerate(units):
            moved = _state(
                seeded,
                folder / f"{number}-{draw}",
                number=number,
                plain_steps=number * steps,
                unit=unit,
                draw=draw,
            )
            for name, array in moved.items():
                if _distance(array, start[name]) > _distance(furthest[name], start[name]):
                    furthest[name] = array
        found |= {f"floor/{name}": array for name, array in furthest.items()} if units else {}
    return found


def _distance(one: np.ndarray, other: np.ndarray) -> float:
    return float(np.abs(one.astype(np.float64) - other.astype(np.float64)).max(initial=0.0))


def _state(
    spec: RunSpec,
    folder: Path,
    *,
    number: int,
    plain_steps: int,
    unit: float | None = None,
    draw: int = 0,
) -> dict[str, np.ndarray]:
    found: dict[str, np.ndarray] = {}
    with Run(spec, folder=folder, quiet=True) as run:
        parts = run.assembly.engine.steps
        parts.record.is_on = False  # a step that is recorded is not compiled
        steps = run.steps()
        with parts.eager():
            for _ in islice(steps, plain_steps):
                pass
        if unit is not None:
            blur(run.model, unit, draw)
        for report in islice(steps, COMPARED_STEPS):
            taken = _take(run, report)
            if report.step == plain_steps + 1:
                prefix = f"gradient/{report.step}"
                gradients = {name for name in taken if name.startswith("gradient")}
                found |= {
                    f"batch/{number}{name.removeprefix(prefix)}": taken.pop(name)
                    for name in gradients
                }
            found |= taken
        _check_compiled(run)
    return found


def _check_compiled(run: Run) -> None:
    compiled = run.assembly.engine.compiled
    if compiled is not None and not compiled.was_called:
        raise TaskError(
            "nothing was compiled: the steps call none of what was to be", hint="see compile.what"
        )


def _take(run: Run, report: StepReport) -> dict[str, np.ndarray]:
    return with_masters(run.model, capture(run.model, report.loss or 0.0, report.step), report.step)


def with_masters(
    model: torch.nn.Module, taken: dict[str, np.ndarray], step: int
) -> dict[str, np.ndarray]:
    """Replace captured weights and gradients by those of the fp32 master weights, if there are any.

    The optimizer step reads the gradients of the master weights and changes the master weights.
    """
    for name, parameter in model.named_parameters():
        master = master_of(parameter)
        if master is not parameter:
            taken[f"weight/{step}/{name}"] = master.detach().cpu().numpy().copy()
            taken |= (
                {}
                if master.grad is None
                else {f"gradient/{step}/{name}": master.grad.cpu().numpy().copy()}
            )
    return taken


def blur(model: torch.nn.Module, unit: float, seed: int) -> None:
    """Simulate rounding: change the weights now, and outputs and their gradients in later passes.

    Each weight, each output of a leaf module and each gradient of such an output changes by a
    random share up to `unit`. An output whose values all lie between -1 and 1 stays in that range,
    since rounding does not make a probability larger than 1 either.
    """
    generators: dict[torch.device, torch.Generator] = {}

    def blurred(tensor: Tensor) -> Tensor:
        if tensor.device not in generators:
            generators[tensor.device] = torch.Generator(tensor.device).manual_seed(seed)
        draws = torch.rand(tensor.shape, generator=generators[tensor.device], device=tensor.device)
        return tensor * (1.0 + unit * (2.0 * draws - 1.0)).to(tensor.dtype)

    def hook(module: torch.nn.Module, inputs: Any, output: Any) -> Any:
        if isinstance(output, Tensor) and output.is_floating_point():
            return _RoundingNoise.apply(output, blurred)  # type: ignore[no-untyped-call]
        return output

    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(blurred(parameter))
    for module in model.modules():
        if not any(True for _ in module.children()):
            module.register_forward_hook(hook)


class _RoundingNoise(torch.autograd.Function):
    """Autograd function that applies `blurred` to a tensor and, later, to its gradient."""

    @staticmethod
    def forward(ctx: Any, tensor: Tensor, blurred: Any) -> Tensor:
        ctx.blurred = blurred
        moved: Tensor = blurred(tensor)
        return moved.clamp(-1.0, 1.0) if bool((tensor.abs() <= 1.0).all()) else moved

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return ctx.blurred(gradient), None


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="surefoot.prove.ladder.child")
    parser.add_argument("what", choices=("tensors", "scores", "states"))
    parser.add_argument("spec", type=Path)
    parser.add_argument("--report", type=Path, required=True)
    parser.add_argument("--run", type=Path, required=True)
    parser.add_argument("--seed", type=int, action="append", required=True)
    parser.add_argument("--steps", type=int, required=True)
    parser.add_argument("--unit", type=float, action="append")
    return parser


if __name__ == "__main__":
    main()
