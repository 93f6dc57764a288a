"""Traces of torch.profiler, read from a file: slices of threads, and changes of memory.

Times are integer nanoseconds, so that the parts of an interval add up to it exactly. This module
does not import torch.
"""

from __future__ import annotations

import gzip
import json
import zlib
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple

from surefoot.contract.run_folder import files
from surefoot.core.errors import InputError

MAX_TEXT_BYTES = 4 << 30  # unpacked size; a longer file is not a trace of a window
LARGEST = 1e18  # as microseconds 30,000 years
MAX_ELEMENTS = 2**63  # torch counts the elements of a tensor in 63 bits
STEP_PREFIX = "ProfilerStep#"  # prefix of torch.profiler's own range of a step
OUR_STEP = "step "  # prefix of the step number; the warm-up step has no range
OPERATOR, PYTHON, RANGE = "cpu_op", "python_function", "user_annotation"
AUTOGRAD_NODE = "autograd::engine::evaluate_function"  # torch's range around an autograd node
DEVICE_WORK = ("kernel", "gpu_memcpy", "gpu_memset")
_HINT = "give one that surefoot profile or torch.profiler wrote: trace.json.gz"


class Slice(NamedTuple):
    """Event with a start and an end on a thread; `details` are its `args` in the trace."""

    start_ns: int
    end_ns: int
    name: str
    category: str
    thread: tuple[Any, Any]
    details: Mapping[str, Any]

    def mark(self, name: str) -> int | str | None:
        """Return `details[name]` if it is an int or a str, else None."""
        value = self.details.get(name)
        return value if isinstance(value, int | str) else None


class MemoryChange(NamedTuple):
    """Allocation or release of memory by an allocator of torch.

    `num_bytes` is positive for an allocation and negative for a release. `device` is the device
    index, -1 for the host.
    """

    time_ns: int
    address: int
    num_bytes: int
    device: int
    thread: tuple[Any, Any]


@dataclass(frozen=True)
class Trace:
    """Contents of a trace file.

    `slices` are sorted by start time; of slices with the same start, the longest comes first. A
    time of the trace plus `epoch_ns` is a time of the system clock, in nanoseconds.
    """

    slices: Sequence[Slice]
    changes: Sequence[MemoryChange]
    epoch_ns: int
    # number of complete steps: an interrupted loop has started one more
    most_steps: int | None = None

    @cached_property
    def steps(self) -> list[Slice]:
        """Slice of each step in the window.

        These are the ranges of surefoot, or those of torch.profiler if the trace has no ranges of
        surefoot. The list is empty if the trace has neither.
        """
        ranges = [each for each in self.slices if each.category == RANGE]
        ours = [
            each
            for each in ranges
            if each.name.startswith(OUR_STEP) and each.name.removeprefix(OUR_STEP).isdigit()
        ]
        return (ours or [each for each in ranges if each.name.startswith(STEP_PREFIX)])[
            : self.most_steps
        ]

    @cached_property
    def window(self) -> tuple[int, int]:
        """Start of the first step and end of the last step, in nanoseconds.

        If the trace has no steps, these are the start and end of all operators.
        """
        inside = self.steps or [each for each in self.slices if each.category == OPERATOR]
        return min(each.start_ns for each in inside), max(each.end_ns for each in inside)

    @cached_property
    def main_thread(self) -> tuple[Any, Any]:
        """Thread of the steps; without steps, the thread with the most operator time."""
        if self.steps:
            return self.steps[0].thread
        busy: Counter[tuple[Any, Any]] = Counter()
        for each in self.slices:
            if each.category == OPERATOR:
                busy[each.thread] += each.end_ns - each.start_ns
        return busy.most_common(1)[0][0]


def read(path: Path, *, most_steps: int | None = None) -> Trace:
    """Read a trace file, gzipped or not.

    If `most_steps` is not None, `Trace.steps` has at most that many steps. Raises InputError if the
    file is missing or truncated, or is not a trace of torch.profiler.
    """
    return _parse_trace(_load(path), path, most_steps)


def _load(path: Path) -> Any:
    try:
        with path.open("rb") as file:
            is_packed = file.read(2) == b"\x1f\x8b"
        with gzip.open(path) if is_packed else path.open("rb") as file:
            text = file.read(MAX_TEXT_BYTES + 1)
    except (EOFError, zlib.error, gzip.BadGzipFile):
        raise InputError(
            f"the trace {path} is truncated or damaged: it cannot be unpacked",
            hint="record it again",
        ) from None
    except OSError as error:
        raise InputError(f"the trace {path} cannot be read: {error.strerror}", hint=_HINT) from None
    if len(text) > MAX_TEXT_BYTES:
        raise InputError(
            f"the trace {path} is longer than {MAX_TEXT_BYTES >> 30} GiB", hint="record fewer steps"
        )
    try:
        # torch writes the bytes of a name as they are, also where they are not UTF-8
        return json.loads(text.decode(errors="replace"), strict=False)
    except json.JSONDecodeError as error:
        is_cut = error.pos >= len(text.rstrip()) - 1 or "Unterminated" in error.msg
        is_begun = text.lstrip()[:1] in (b"{", b"[")
        what = "is truncated" if is_cut and is_begun else "is not valid JSON"
        raise InputError(
            f"the trace {path} {what}: {error.msg} at character {error.pos:,}", hint=_HINT
        ) from None
    except (ValueError, RecursionError):
        raise InputError(
            f"{path} is not a trace of torch.profiler: it is not valid JSON", hint=_HINT
        ) from None


def _parse_trace(document: Any, path: Path, most_steps: int | None) -> Trace:
    header = document if isinstance(document, dict) else {}
    events = header.get("traceEvents") if header else document
    if not isinstance(events, list):
        raise InputError(f"{path} is not a trace: it has no list of traceEvents", hint=_HINT)
    slices, changes = [], []
    for event in events:
        if not isinstance(event, dict):
            continue
        if event.get("ph") == "X":
            slices.append(_slice(event))
        elif event.get("name") == "[memory]":
            changes.append(_change(event))
    known = sorted(
        (each for each in slices if each is not None),
        key=lambda each: (each.start_ns, -each.end_ns),
    )
    if not any(each.category == OPERATOR for each in known):
        raise InputError(
            f"the trace {path} holds no operator: it is not of torch.profiler, "
            "or its window was empty",
            hint=_HINT,
        )
    memory = sorted(each for each in changes if each is not None)
    damage = _find_damage(known, memory)
    if damage is not None:
        raise InputError(f"the trace {path} is damaged: {damage}", hint="record it again")
    base = header.get("baseTimeNanoseconds", 0)
    return Trace(known, memory, base if isinstance(base, int) else 0, most_steps)


def _find_damage(slices: Sequence[Slice], changes: Sequence[MemoryChange]) -> str | None:
    """Return a description of the first value that no tensor and no allocation can have.

    Return None if there is no such value.
    """
    odd = next(
        (
            each
            for each in slices
            if each.category == OPERATOR and has_odd_sizes(each.details.get("Input Dims"))
        ),
        None,
    )
    if odd is not None:
        return (
            f"{odd.name[:60]!a} was given a tensor of a negative size or of 2^63 elements or more"
        )
    return (
        "2^63 bytes or more were allocated at once"
        if any(abs(each.num_bytes) >= MAX_ELEMENTS for each in changes)
        else None
    )


def _slice(event: Mapping[str, Any]) -> Slice | None:
    start_ns, length_ns = _nanoseconds(event.get("ts")), _nanoseconds(event.get("dur"))
    if start_ns is None or length_ns is None or length_ns < 0:
        return None
    details = event.get("args")
    thread = (str(event.get("pid")), str(event.get("tid")))
    name, category = str(event.get("name", "")), str(event.get("cat", ""))
    return Slice(
        start_ns,
        start_ns + length_ns,
        name,
        category,
        thread,
        details if isinstance(details, dict) else {},
    )


def _change(event: Mapping[str, Any]) -> MemoryChange | None:
    time_ns, details = _nanoseconds(event.get("ts")), event.get("args")
    if time_ns is None or not isinstance(details, dict):
        return None
    address, num_bytes, device = (details.get(key) for key in ("Addr", "Bytes", "Device Id"))
    if not (isinstance(address, int) and isinstance(num_bytes, int) and isinstance(device, int)):
        return None
    return MemoryChange(
        time_ns, address, num_bytes, device, (str(event.get("pid")), str(event.get("tid")))
    )


def _nanoseconds(microseconds: Any) -> int | None:
    return round(microseconds * 1000) if is_finite(microseconds) else None


def is_finite(value: Any) -> bool:
    """Return whether `value` is a number below 1e18 in magnitude, usable as a time or duration."""
    return isinstance(value, int | float) and not isinstance(value, bool) and abs(value) < LARGEST


def is_shape(sizes: Any) -> bool:
    """Return whether `sizes` is the shape of a tensor that torch can represent.

    >>> is_shape([4, 0]), is_shape([4, -1]), is_shape([2**40, 2**40]), is_shape([[4]])
    (True, False, False, False)
    """
    if not isinstance(sizes, list):
        return False
    elements = 1
    for size in sizes:
        if type(size) is not int or size < 0 or elements * size >= MAX_ELEMENTS:
            return False
        elements *= max(size, 1)
    return True


def has_odd_sizes(shapes: Any) -> bool:
    """Return whether a list of integers in `shapes` is not a valid tensor shape.

    The shapes of a list of tensors are nested one level deeper. Entries that are not lists of
    integers are ignored.

    >>> has_odd_sizes([[2, 3], [], [[4], [5]]]), has_odd_sizes([[True], "x"])
    (False, False)
    >>> has_odd_sizes([[2, -3]]), has_odd_sizes([[[2**63]]])
    (True, True)
    """
    if not isinstance(shapes, list):
        return False
    inside = [each for each in shapes if each and isinstance(each, list)]
    tensors = inside + [sizes for each in inside for sizes in each if isinstance(sizes, list)]
    return any(
        all(type(size) is int for size in sizes) and not is_shape(sizes) for sizes in tensors
    )


def shrink(path: Path, limit_bytes: int) -> int | None:
    """Remove steps from the end of a gzipped trace file until it has at most `limit_bytes`.

    At least one step remains. Return the number of remaining steps, or None if the file was already
    small enough.
    """
    if path.stat().st_size <= limit_bytes:
        return None
    document, steps = _load(path), read(path).steps
    num_kept = len(steps)
    while num_kept > 1 and path.stat().st_size > limit_bytes:
        num_kept = min(
            num_kept - 1, max(1, int(0.9 * num_kept * limit_bytes / path.stat().st_size))
        )
        end_us = steps[num_kept - 1].end_ns / 1000
        events = [
            each
            for each in document["traceEvents"]
            if not isinstance(each.get("ts"), int | float) or each["ts"] <= end_us
        ]
        draft = path.with_name(files.draft_of(path.name))
        with (
            files.open_new(path.parent, draft.name) as raw,
            gzip.open(raw, "wt", encoding="utf-8") as file,
        ):
            json.dump({**document, "traceEvents": events}, file)
        draft.replace(path)
    return num_kept
