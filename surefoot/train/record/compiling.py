"""Report of a run's compilations: first summary, recompilations with reasons, fallbacks, budget."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from torch import nn

from surefoot.components.compiler.modes import why_default
from surefoot.components.compiler.regions import CompiledRegions, compile_regions
from surefoot.components.memory.blocks import find_blocks
from surefoot.components.memory.recompute import RecomputeHandle
from surefoot.components.precision.policy import Policy
from surefoot.contract.spec import CompileTable, RunSpec
from surefoot.contract.state import Compilation
from surefoot.contract.task import ResolvedTask
from surefoot.core.errors import SpecError, TaskError
from surefoot.core.units import format_seconds
from surefoot.train.step import LiveUpdate
from surefoot.train.step.joined.whole import WholeStep, check
from surefoot.train.step.program import EAGER_STEPS

GIVEN_UP = "recompile limit"  # message of torch for code that it has compiled too often


@dataclass(frozen=True)
class CompileNotices:
    """Compilations in some steps, lines to print, and faults as (finding, action)."""

    compilations: list[Compilation]
    lines: list[str]
    faults: list[tuple[str, str]]


class Compiling:
    """Monitor of the compilations of a run, and of the budget for recompilations."""

    def __init__(self, compiled: CompiledRegions, table: CompileTable) -> None:
        self._compiled, self._table = compiled, table
        self._told: set[str] = set()
        self._again: list[Compilation] = []
        self._has_begun = self._is_over = False
        self._compiling_s = 0.0

    def take(self, step: int) -> CompileNotices:
        """Return the compilations and messages since the last call, after `step`.

        The first step is observed in eager mode, and is not compiled.
        """
        new = self._compiled.steward.take()
        again = [each for each in new if each.why_again is not None]
        lines, faults = [each.words for each in again], []
        if new and not self._has_begun:
            lines = [_sum_up(new), *lines, *self._breaks(new)]
        self._compiling_s += sum(each.elapsed_s for each in new)
        paid = self._compiled.pace.take(self._compiling_s)
        lines += [] if paid is None else [paid]
        given_up = [each for each in new if GIVEN_UP in (each.ended_early or "")]
        faults += [
            (
                f"torch.compile stopped compiling: {each.ended_early}",
                "code that is not compiled yet runs in eager mode",
            )
            for each in given_up
        ]
        for name, why in self._compiled.failed.items():
            if name not in self._told:
                faults.append((f"{name} cannot be compiled: {why}", "it runs in eager mode"))
                self._told.add(name)
        is_late = step > (EAGER_STEPS if self._table.what == "step" else 1)
        if not self._has_begun and is_late and not self._compiled.was_called:
            found = "nothing was compiled: the steps call no module that compile.what selects"
            faults.append((found, 'set compile.what to "blocks" or "model"'))
        self._has_begun = self._has_begun or is_late
        self._again += again
        if len(self._again) > self._table.budget and not self._is_over:
            self._is_over = True
            action = "the run continues" if self._table.over_budget == "warn" else "the run ends"
            faults.append((self._describe_over_budget, action))
        return CompileNotices(new, lines, faults)

    def _breaks(self, compilations: list[Compilation]) -> list[str]:
        broken = dict.fromkeys(
            each.ended_early for each in compilations if each.ended_early is not None
        )
        return [f"graph break: {reason}" for reason in broken]

    @property
    def _describe_over_budget(self) -> str:
        return (
            f"{len(self._again)} recompilations, compile.budget is "
            f"{self._table.budget}; the last one: {self._again[-1].words}"
        )

    def raise_if_over(self) -> None:
        """Raise TaskError if the compile budget is exceeded and `compile.over_budget` is "stop"."""
        if self._is_over and self._table.over_budget == "stop":
            raise TaskError(
                self._describe_over_budget,
                hint=(
                    "pad batches to one size, or to a few; or set "
                    "compile.dynamic = true; or give a larger compile.budget"
                ),
            )


def compile_as_specified(
    spec: RunSpec,
    task: ResolvedTask,
    model: nn.Module,
    policy: Policy,
    updates: list[LiveUpdate],
    recomputed: RecomputeHandle | None,
) -> tuple[CompiledRegions, WholeStep | None]:
    """Compile what the [compile] table selects, with the recomputation that was set up before.

    The second result is the compiled step, if the step is one graph.

    Raises InputError if there are no blocks to compile, if the step cannot be one graph, or for a
    region inside a block whose operators are recomputed.
    """
    table = spec.compile
    if table.what == "step":
        check(spec, updates, policy, model)
        whole = WholeStep(model, updates[0], policy, table, deterministic=spec.train.deterministic)
        return whole.plan, whole
    named = table.blocks or (list(task.blocks(model)) if task.blocks is not None else [])
    regions = (
        {"model": model}
        if table.what == "model"
        else find_blocks(model, named, key="compile.blocks")
    )
    if recomputed is not None:
        _check_around(regions, recomputed)
    regions_made = compile_regions(
        regions,
        mode=table.mode,
        dynamic=table.dynamic,
        on_failure=table.on_failure,
        deterministic=spec.train.deterministic,
    )
    return regions_made, None


def _check_around(regions: Iterable[str], recomputed: RecomputeHandle) -> None:
    """Raise SpecError for a compiled region inside a block that recomputes single operators.

    Compiled code overwrites its intermediate results, so that they cannot be saved for the backward
    pass.
    """
    blocks = recomputed.blocks if recomputed.how.kind == "operators" else ()
    for region in regions:
        block = next((each for each in blocks if region.startswith(f"{each}.")), None)
        if block is not None:
            raise SpecError(
                'memory.activation_checkpointing = "operators" recomputes operators of '
                f"{block}, and {region} inside it is compiled",
                hint=(
                    f'compile the whole block: compile.blocks = ["{block}"], or '
                    'compile.what = "model"; '
                    'or set memory.activation_checkpointing = "full"'
                ),
            )


def describe_mode(spec: RunSpec, device: str) -> list[str]:
    """Return a message with the reason if `compile.mode` has no effect on `device`."""
    table = spec.compile
    why = why_default(table.mode, device, deterministic=spec.train.deterministic)
    return [] if why is None else [f'compile.mode = "{table.mode}" runs as "default", since {why}']


def _sum_up(new: list[Compilation]) -> str:
    functions = {(each.file, each.function) for each in new if not each.is_backward}
    elapsed_s = sum(each.elapsed_s for each in new)
    return (
        f"compiled {len(functions)} function{'s' * (len(functions) != 1)} in {len(new)} graphs, "
        f"{format_seconds(elapsed_s)}"
    )
