"""Report of an arm's process to the harness: a JSON file, and tensors in a safetensors file.

    {"version": 1, "measures": {"cpu_s_per_step": 0.00031}, "facts": {"torch": "2.13.0"}}

The name of a measure contains its unit (`_s`, `_bytes`). Pickle is not used. An arm in a different
language can write the same files.
"""

from __future__ import annotations

import json
import math
import os
import resource
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import numpy as np
from safetensors import SafetensorError
from safetensors.numpy import load_file, save_file

from surefoot.core.errors import BadRecordError

VERSION = 1
MAX_BYTES = 1 << 20  # of the JSON: an arm reports numbers, not logs


@dataclass(frozen=True)
class ProcessReport:
    """Report of one process: measures by name, and other facts as text."""

    measures: Mapping[str, float] = field(default_factory=dict)
    facts: Mapping[str, str] = field(default_factory=dict)


def write_report(
    path: str | Path,
    measures: Mapping[str, float],
    *,
    facts: Mapping[str, str] | None = None,
    arrays: Mapping[str, Any] | None = None,
) -> None:
    """Write a report to `path`, and `arrays` (name -> NumPy array) to `arrays_of(path)`.

    The report file is replaced atomically.

    Raises:
        BadRecordError: If a measure is not finite, because JSON has no NaN.
    """
    bad = [name for name, value in measures.items() if not math.isfinite(value)]
    if bad:
        raise BadRecordError(
            f"the measure {bad[0]} is {measures[bad[0]]}", hint="report finite numbers only"
        )
    path = Path(path)
    if arrays is not None:
        save_file(
            {name: np.ascontiguousarray(array) for name, array in arrays.items()}, arrays_of(path)
        )
    row = {
        "version": VERSION,
        "measures": {name: float(value) for name, value in measures.items()},
        "facts": dict(facts or {}),
    }
    draft = path.with_name(f".{path.name}.draft")
    draft.write_text(json.dumps(row, allow_nan=False))
    draft.replace(path)


def read_report(path: Path) -> ProcessReport:
    """Return the report at `path`.

    Raises:
        BadRecordError: If the report is missing or invalid.
    """
    try:
        if path.stat().st_size > MAX_BYTES:
            raise BadRecordError(f"the report {path.name} is larger than 1 MiB")
        row = json.loads(path.read_text(encoding="utf-8"))
        measures = {str(name): float(value) for name, value in row["measures"].items()}
        facts = {str(name): str(value) for name, value in row.get("facts", {}).items()}
        version, finite = row["version"], all(map(math.isfinite, measures.values()))
    except OSError:
        raise BadRecordError(
            "no report was written",
            hint="the arm is to write one to the file it is given as {report}",
        ) from None
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        raise BadRecordError(
            f"the report is none: {type(error).__name__}: {error}",
            hint="see surefoot/trial/report.py",
        ) from None
    if version != VERSION or not finite:
        raise BadRecordError(
            f"the report has version {version}, or a measure that is not finite",
            hint=f"this reads {VERSION}",
        )
    return ProcessReport(measures, facts)


def arrays_of(path: Path) -> Path:
    """Return the path of the tensors that belong to the report at `path`."""
    return path.with_suffix(".safetensors")


def read_arrays(path: Path) -> dict[str, np.ndarray]:
    """Return the tensors that belong to the report at `path`.

    Raises:
        BadRecordError: If their file is missing or damaged.
    """
    try:
        return load_file(arrays_of(path))
    except FileNotFoundError:
        raise BadRecordError(
            "the arm reported no tensors", hint="give write_report its arrays"
        ) from None
    except (OSError, SafetensorError, KeyError) as error:
        raise BadRecordError(
            f"the tensors of the arm cannot be read: {error}",
            hint="float16 and bfloat16 go as float32",
        ) from None


def capture(model: Any, loss: float, step: int) -> dict[str, np.ndarray]:
    """Return copies of the loss, gradients, parameters and buffers of a torch module.

    Names are `loss/<step>`, `gradient/<step>/<parameter>` and `weight/<step>/<name>`. Half
    precision is converted to float32, which is exact.
    """
    found = {f"loss/{step}": np.array(loss, dtype=np.float64)}
    for name, parameter in model.named_parameters():
        if parameter.grad is not None:
            found[f"gradient/{step}/{name}"] = _array(parameter.grad)
    for name, tensor in (*model.named_parameters(), *model.named_buffers()):
        found[f"weight/{step}/{name}"] = _array(tensor)
    return found


def _array(tensor: Any) -> np.ndarray:
    tensor = tensor.detach().cpu()
    wide = tensor.float() if tensor.is_floating_point() and tensor.element_size() < 4 else tensor
    array: np.ndarray = wide.numpy().copy()
    return array


class Clock:
    """CPU seconds of this process (all threads) and wall seconds of a `with` block.

    >>> with Clock() as clock:
    ...     _ = sum(range(1000))
    >>> sorted(clock.per(10))
    ['cpu_s_per_step', 'wall_s_per_step']
    """

    def __enter__(self) -> Self:
        self._wall_s, self._cpu_s = time.perf_counter(), time.process_time()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.cpu_s, self.wall_s = (
            time.process_time() - self._cpu_s,
            time.perf_counter() - self._wall_s,
        )

    def leave_out(self, wall_s: float) -> None:
        """Subtract `wall_s` seconds from the wall time, such as a wait for another process."""
        self._wall_s += wall_s

    def per(self, steps: int) -> dict[str, float]:
        """Return the CPU and wall seconds per step, if the `with` block ran `steps` steps."""
        return {"cpu_s_per_step": self.cpu_s / steps, "wall_s_per_step": self.wall_s / steps}


def resident_bytes() -> int:
    """Return the resident memory of this process in bytes, or its peak if only that is known."""
    try:
        pages = int(Path("/proc/self/statm").read_text().split()[1])
    except OSError:
        return peak_bytes()
    return pages * os.sysconf("SC_PAGE_SIZE")


def peak_bytes() -> int:
    """Return the peak resident memory of this process in bytes."""
    try:
        status = Path("/proc/self/status").read_text()
        return (
            int(next(line for line in status.splitlines() if line.startswith("VmHWM")).split()[1])
            * 1024
        )
    except (OSError, StopIteration):
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
