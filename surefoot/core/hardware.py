"""What this machine is: processor, cores, memory. A peak that nobody measured is None and prints n/a."""

from __future__ import annotations

import os
import platform
from dataclasses import asdict, dataclass
from pathlib import Path

import psutil


@dataclass(frozen=True, kw_only=True)
class Machine:
    """One host as the operating system describes it; `memory_bytes` is installed memory, `cores` what this process may use."""

    system: str
    processor: str
    cores: int
    memory_bytes: int
    python: str

    def as_row(self) -> dict[str, str | int]:
        return asdict(self)


def find_machine() -> Machine:
    """Describe this host."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else (os.cpu_count() or 1)
    return Machine(
        system=f"{platform.system()} {platform.release()}",
        processor=_processor_name() or platform.processor() or platform.machine(),
        cores=cores,
        memory_bytes=psutil.virtual_memory().total,
        python=platform.python_version(),
    )


def _processor_name() -> str | None:
    try:
        text = Path("/proc/cpuinfo").read_text()
    except OSError:
        return None
    names = (line.partition(":")[2].strip() for line in text.splitlines() if line.startswith("model name"))
    return next(names, None)
