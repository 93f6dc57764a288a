"""Report of a step that ran out of memory: its phase, the memory of each block, and remedies."""

from __future__ import annotations

import contextlib
import json
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from surefoot.components.data.sources.iterated import Iterated
from surefoot.components.observe.memory_use import peak_resident_bytes
from surefoot.components.profiler.phases.clock import BACKWARD, COPY, DATA, FORWARD, OPTIMIZER
from surefoot.contract import signature
from surefoot.contract.events import PHASES
from surefoot.contract.run_folder import files
from surefoot.core import place
from surefoot.core.errors import OutOfMemory, SurefootError
from surefoot.core.recompute import RecomputeChoice
from surefoot.core.units import format_bytes
from surefoot.train.assemble import Assembly
from surefoot.train.failure.blame import describe, find_place
from surefoot.train.preflight.predicted import Prediction, predict

FILE, SEGMENTS_FILE = "out-of-memory.json", "out-of-memory-segments.json"
VERSION = 1
NUM_BLOCKS, NUM_CHANGES = 5, 3
MIN_GAIN = 0.02  # of the predicted peak: smaller savings are not listed
PLACES = {
    DATA: "while its samples were read",
    COPY: "while its samples were copied to the device",
    FORWARD: "in the forward pass",
    BACKWARD: "in the backward pass",
    OPTIMIZER: "in the update",
}
UNITS = {"bytes": 1, "KiB": 1 << 10, "MiB": 1 << 20, "GiB": 1 << 30, "TiB": 1 << 40}
SMALLER_MODEL = "a smaller model"
# by the largest term of the predicted peak, if no change of the spec helps
REMEDIES = {
    "activations": "a smaller model, or smaller samples",
    "batches": "smaller samples",
    "temporaries": "a smaller model, or smaller samples",
    "optimizer": "an optimizer with less state, or a smaller model",
}
_ASKED_FOR = re.compile(rf"allocate ([\d.]+) ({'|'.join(UNITS)})")

Change = Mapping[str, Mapping[str, Any]]


@dataclass(frozen=True)
class MemoryShortage:
    """Facts about a failed allocation, without references to tensors.

    `raised` is the user's line of code that failed, or the whole error text for a MemoryError.
    """

    step: int
    phase: int
    error: str
    raised: str | None
    asked_bytes: int | None
    peak_bytes: int
    microbatch: int

    @property
    def words(self) -> str:
        asked = (
            ""
            if self.asked_bytes is None
            else f" the allocation asked for {format_bytes(self.asked_bytes)},"
        )
        where = PLACES.get(self.phase, f"in {PHASES[self.phase]}")
        most = format_bytes(self.peak_bytes)
        raised = "" if self.raised is None else f"; {self.raised}"
        return (
            f"out of memory {where} with microbatch "
            f"{self.microbatch}:{asked} the peak was {most}{raised}"
        )


def describe_shortage(error: Exception, assembly: Assembly, step: int) -> MemoryShortage:
    """Return facts about a failed allocation, before the memory of the step is released."""
    device, said = assembly.engine.device, _ASKED_FOR.search(str(error))
    peak = (
        torch.cuda.max_memory_allocated(device) if device.type == "cuda" else peak_resident_bytes()
    )
    asked = None if said is None else round(float(said[1]) * UNITS[said[2]])
    line, whole = find_place(error), describe(error)
    # messages of torch say how much memory was requested
    raised = whole if isinstance(error, MemoryError) else None if line is None else f"at {line}"
    return MemoryShortage(
        step,
        assembly.engine.steps.clock.phase,
        whole,
        raised,
        asked,
        peak,
        assembly.feed.microbatch,
    )


def write_segments(folder: Path, assembly: Assembly) -> None:
    """Write the memory snapshot of torch's CUDA allocator to the run folder; nothing on a CPU."""
    if assembly.engine.device.type == "cuda":
        with contextlib.suppress(OSError):
            segments = torch.cuda.memory_snapshot()  # type: ignore[no-untyped-call]
            files.write_whole(folder, SEGMENTS_FILE, json.dumps(segments, default=str).encode())


def report_shortage(
    shortage: MemoryShortage, assembly: Assembly, folder: Path, then: str
) -> OutOfMemory:
    """Write the report to the run folder; return an OutOfMemory error that names the report.

    `then` is a text with the reason why the step is not repeated with half the microbatch. Values
    that cannot be predicted are left out of the message.
    """
    found, changes, unknown = _predict(assembly)
    row = {
        "version": VERSION,
        "rank": place.here().rank,
        **vars(shortage),
        "phase": PHASES[shortage.phase],
        "unknown": unknown,
        "predicted": None if found is None else found.as_row(),
        "changes": [
            {"change": words, "predicted_bytes": num_bytes} for words, num_bytes in changes
        ],
    }
    message = shortage.words
    if found is not None:
        largest = [
            f"{name} {format_bytes(size)}" for name, size in list(found.blocks.items())[:NUM_BLOCKS]
        ]
        message += f"; the blocks with the largest activations: {', '.join(largest)}"
    with contextlib.suppress(OSError):
        files.write_whole(folder, FILE, f"{json.dumps(row, indent=1)}\n".encode())
        message += f"; details: {folder / FILE}"
    return OutOfMemory(f"{message}{then}", hint=_hint(found, changes, unknown, not then))


def _hint(
    found: Prediction | None, changes: list[tuple[str, int]], unknown: str | None, can_halve: bool
) -> str:
    if found is None:
        return (
            "use a smaller train.microbatch, or memory.activation_checkpointing; "
            f"the memory that they would save is not known: {unknown}"
        )
    now = f"the predicted peak memory of a step is {format_bytes(found.peak_bytes)}"
    if not changes:
        kind = max(found.terms, key=lambda kind: found.terms[kind])
        return f"{now}, mostly {kind}: use {REMEDIES.get(kind, SMALLER_MODEL)}"
    is_possible = can_halve and any(words.startswith("train.microbatch") for words, _ in changes)
    by_itself = (
        '; memory.on_oom = "halve" halves the microbatch when memory runs out'
        if is_possible
        else ""
    )
    brought = ", ".join(f"{words} ({format_bytes(num_bytes)})" for words, num_bytes in changes)
    return f"{now}; changes with their predicted peak, the cheapest first: {brought}{by_itself}"


def _predict(assembly: Assembly) -> tuple[Prediction | None, list[tuple[str, int]], str | None]:
    """Return the predicted memory of the step, changes that reduce it, and an error text.

    Each change is given with the peak bytes that it leads to; the cheapest comes first. If the
    prediction fails, the result is None, no changes, and the reason.
    """
    spec, source = assembly.spec, assembly.feed.source
    if not isinstance(source, Iterated):
        spec = spec.replace(
            train={"microbatch": _or_none(assembly.feed.microbatch, assembly.feed.batch)}
        )
    try:
        found = predict(spec, assembly.task, source=source, num_ranks=assembly.feed.share.size)
    # the original error is reported, not this one
    except Exception as error:  # noqa: BLE001
        return None, [], error.message if isinstance(error, SurefootError) else describe(error)
    changes: list[tuple[str, int]] = []
    for change in _candidates(assembly):
        with contextlib.suppress(Exception):  # a change that does not fit this spec
            task = None if "task" in change else assembly.task
            then = predict(
                spec.replace(**change), task, source=source, num_ranks=assembly.feed.share.size
            ).peak_bytes
            if then <= (1 - MIN_GAIN) * found.peak_bytes:
                changes.append((_words(change), then))
        if len(changes) == NUM_CHANGES:
            break
    return found, changes, None


def _or_none(microbatch: int, batch: int) -> int | None:
    return microbatch if microbatch < batch else None


def halve_microbatch(microbatch: int) -> int:
    """Return the largest divisor of `microbatch` that is at most half of it.

    >>> halve_microbatch(32), halve_microbatch(15), halve_microbatch(7)
    (16, 5, 1)
    """
    return next(size for size in range(microbatch // 2, 0, -1) if microbatch % size == 0)


def _candidates(assembly: Assembly) -> Iterator[Change]:
    """Yield changes of the spec that may save memory, those that cost the least time first."""
    spec, microbatch = assembly.spec, assembly.feed.microbatch
    use = spec.task.use
    if use is not None and signature.has_parameter(use, "chunked_loss"):
        yield {"task": {"chunked_loss": True}}
    if microbatch > 1:
        yield {"train": {"microbatch": halve_microbatch(microbatch)}}
    kind = RecomputeChoice.parse(spec.memory.activation_checkpointing).kind
    if kind == "none":
        yield {"memory": {"activation_checkpointing": "operators"}}
    if kind != "full":
        yield {"memory": {"activation_checkpointing": "full"}}
    if spec.precision.compute in ("fp32", "tf32"):
        yield {"precision": {"compute": "bf16"}}


def _words(change: Change) -> str:
    return " and ".join(
        f"{table}.{key} = {json.dumps(value)}"
        for table, keys in change.items()
        for key, value in keys.items()
    )
