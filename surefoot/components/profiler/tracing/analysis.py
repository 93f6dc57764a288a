"""Analysis of a trace of torch.profiler, and its result files; does not import torch."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from surefoot.components.profiler.tracing import fold, trace
from surefoot.components.profiler.tracing.collectives import CollectiveStats, find_collectives
from surefoot.components.profiler.tracing.flame import draw as draw_flame
from surefoot.components.profiler.tracing.memory import KnownBlocks, Timeline, find_timeline
from surefoot.components.profiler.tracing.operators import OperatorStats, find_operators
from surefoot.contract.run_folder import files
from surefoot.core.errors import InputError, hint_unwritten

TRACE_FILE, FACTS_FILE, OPERATORS_FILE, MEMORY_FILE = (
    "trace.json.gz",
    "facts.json",
    "operators.json",
    "memory.json",
)
STACK_FILE, MODULE_FILE, DEVICE_FILE = "flame_stack.svg", "flame_module.svg", "flame_device.svg"


@dataclass(frozen=True, kw_only=True)
class TraceAnalysis:
    """Analysis of the recorded steps of a trace; a field is None if the trace lacks its data.

    `by_stack`, `by_module` and `by_device` are trees of frames, from which flame graphs are drawn.
    `facts` is the contents of the facts file that the Profiler wrote beside the trace; it is empty
    for any other trace.
    """

    num_steps: int | None
    window_s: float
    operators: list[OperatorStats]
    by_stack: fold.StackFrame | None
    by_module: fold.StackFrame
    by_device: fold.StackFrame | None
    memory: Timeline | None
    facts: Mapping[str, Any]
    collectives: list[CollectiveStats] | None = None

    @property
    def slowdown(self) -> float | None:
        """Step time while the profiler recorded, divided by the step time before the profiler ran.

        None if one of the two times is unknown, for example because no step ran before the
        profiler.
        """
        step_times = self.facts.get("step_s") or {}
        before, inside = step_times.get("before"), step_times.get("inside")
        return inside / before if before and inside else None

    def as_row(self) -> dict[str, Any]:
        rows = [each.as_row() for each in self.operators]
        together = (
            None if self.collectives is None else [each.as_row() for each in self.collectives]
        )
        return {
            "version": 1,
            "num_steps": self.num_steps,
            "window_s": self.window_s,
            "first_step": self.facts.get("first_step"),
            "levels": self.facts.get("levels"),
            "step_s": self.facts.get("step_s"),
            "slowdown": self.slowdown,
            "rows": rows,
            "collectives": together,
        }


def analyze(path: Path) -> TraceAnalysis:
    """Read a trace file and return its analysis.

    For a file called trace.json.gz, the facts file that a Profiler wrote beside it is read, too.

    Raises:
        InputError: For a file that is not a complete trace, and for a damaged facts file.
    """
    facts = _facts(path.with_name(FACTS_FILE)) if path.name == TRACE_FILE else {}
    found = trace.read(path, most_steps=facts.get("num_steps"))
    first_ns, last_ns = found.window
    has_stacks = any(each.category == trace.PYTHON for each in found.slices)
    memory = facts.get("memory")
    return TraceAnalysis(
        num_steps=len(found.steps) or None,
        window_s=(last_ns - first_ns) / 1e9,
        operators=find_operators(found),
        by_stack=fold.by_stack(found) if has_stacks else None,
        by_module=fold.by_module(found),
        by_device=fold.by_device(found),
        memory=None
        if memory is None or not found.changes
        else find_timeline(found, KnownBlocks.of_row(memory)),
        facts=facts,
        collectives=find_collectives(found),
    )


def _facts(path: Path) -> dict[str, Any]:
    """Return the contents of the facts file that a Profiler wrote; an empty dict if there is none.

    A trace from a different program has no facts file. Raises InputError if the file is damaged.
    """
    try:
        facts = json.loads(files.read_bytes(path.parent, path.name))
    except FileNotFoundError:
        return {}
    except (OSError, ValueError, RecursionError):
        facts = None
    if not isinstance(facts, dict) or not _are_facts(facts):
        raise InputError(f"{path} is damaged", hint="record the profile again")
    return facts


def _are_facts(facts: Mapping[str, Any]) -> bool:
    """Return whether the values needed for calculations have the types that a Profiler writes."""
    step_times = facts.get("step_s") or {}
    if not isinstance(step_times, dict) or not isinstance(facts.get("memory"), dict | None):
        return False
    counts = (facts.get(name) for name in ("num_steps", "num_kept", "first_step"))
    return all(isinstance(each, int | None) for each in counts) and all(
        each is None or trace.is_finite(each) for each in step_times.values()
    )


def draw(found: TraceAnalysis, folder: Path) -> list[Path]:
    """Write the operator table, flame graphs and memory timeline of a trace; return their paths.

    Args:
        found: The analysis of the trace, as `analyze` returns it.
        folder: Folder of the files. It is created if necessary; files of an earlier profile in it
            are overwritten or removed.

    Raises:
        InputError: If the files cannot be written.
    """
    texts = {OPERATORS_FILE: json.dumps(found.as_row(), indent=1)}
    steps = f"{found.num_steps} steps" if found.num_steps else "the window"
    for name, root, title in (
        (STACK_FILE, found.by_stack, f"Python stacks over {steps}"),
        (MODULE_FILE, found.by_module, f"modules and operators over {steps}"),
        (DEVICE_FILE, found.by_device, f"device time by operator over {steps}"),
    ):
        if root is not None:
            texts[name] = draw_flame(root, title)
    if found.memory is not None:
        texts[MEMORY_FILE] = json.dumps(found.memory.as_row())
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for name in {STACK_FILE, MODULE_FILE, DEVICE_FILE, MEMORY_FILE} - texts.keys():
            (folder / name).unlink(missing_ok=True)  # files of an earlier profile
        for name, text in texts.items():
            files.write_whole(folder, name, text.encode())
    except OSError as error:
        raise InputError(
            f"the profile cannot be written into {folder}: {error.strerror}",
            hint=hint_unwritten(error),
        ) from error
    return [folder / name for name in texts]
