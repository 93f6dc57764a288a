"""Hardware of this host: processor, cores, memory, and measured or published peak performance.

A peak that was neither measured nor published is None and prints as n/a.
"""

from __future__ import annotations

import os
import platform
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path

from surefoot.core.process.memory_limits import find_limit


@dataclass(frozen=True, kw_only=True)
class Peaks:
    """Peak performance of a device.

    `flops_per_s` maps a dtype to the FLOP/s of dense matmuls. `bytes_per_s` is the bandwidth of a
    copy in memory (bytes read plus bytes written), and `cache_bytes_per_s` that of a copy within a
    cache. `threads` is the number of CPU threads used, None for other devices. `source` says where
    the values come from.
    """

    device: str
    threads: int | None
    flops_per_s: Mapping[str, float]
    bytes_per_s: float | None
    cache_bytes_per_s: float | None = None
    source: str

    def as_row(self) -> dict[str, object]:
        row = asdict(self)
        return {**row, "cores": row.pop("threads")}


_A100 = {"fp64": 19.5e12, "fp32": 19.5e12, "tf32": 156e12, "bf16": 312e12, "fp16": 312e12}
_H100 = {"fp64": 66.9e12, "fp32": 66.9e12, "tf32": 494.7e12, "bf16": 989.4e12, "fp16": 989.4e12}
_A100_SHEET = "NVIDIA A100 datasheet (1758950-r4), 2021-06; dense"
_H100_SHEET = "NVIDIA H100 architecture white paper, 2022-03, and datasheet, 2023; dense"
_PUBLISHED = (
    (
        "Tesla V100-SXM2-16GB",
        {"fp64": 7.8e12, "fp32": 15.7e12, "fp16": 125e12},
        900e9,
        "NVIDIA V100 datasheet, 2020-01; dense",
    ),
    (
        "Tesla V100-SXM2-32GB",
        {"fp64": 7.8e12, "fp32": 15.7e12, "fp16": 125e12},
        900e9,
        "NVIDIA V100 datasheet, 2020-01; dense",
    ),
    ("NVIDIA A100-SXM4-40GB", _A100, 1555e9, _A100_SHEET),
    ("NVIDIA A100-SXM4-80GB", _A100, 2039e9, _A100_SHEET),
    ("NVIDIA H100 80GB HBM3", _H100, 3350e9, _H100_SHEET),
    ("NVIDIA H200", _H100, 4800e9, "NVIDIA H200 datasheet, 2023-11; dense"),
)


def find_published(device: str) -> Peaks | None:
    """Return the published peaks of a GPU, given its full driver name; None for an unknown name.

    >>> find_published("NVIDIA H200").flops_per_s["bf16"], find_published("NVIDIA H200 NVL")
    (989400000000000.0, None)
    """
    for name, flops_per_s, bytes_per_s, source in _PUBLISHED:
        if name == device:
            return Peaks(
                device=name,
                threads=None,
                flops_per_s=flops_per_s,
                bytes_per_s=bytes_per_s,
                source=source,
            )
    return None


@dataclass(frozen=True, kw_only=True)
class Machine:
    """A host as described by the operating system.

    `cores` and `memory_bytes` are what this process may use; in a container they are the limits of
    the container.
    """

    system: str
    processor: str
    cores: int
    memory_bytes: int
    python: str

    def as_row(self) -> dict[str, str | int]:
        return asdict(self)


def count_cores() -> int:
    """Return the number of cores that this process may use."""
    return (
        len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else (os.cpu_count() or 1)
    )


def find_machine() -> Machine:
    """Return the description of this host."""
    return Machine(
        system=f"{platform.system()} {platform.release()}",
        processor=_processor_name() or platform.processor() or platform.machine(),
        cores=count_cores(),
        memory_bytes=find_limit().num_bytes,
        python=platform.python_version(),
    )


def find_processor_flags() -> frozenset[str]:
    """Return the instruction sets of the processor, such as `avx512_bf16`; empty if unknown."""
    listed = _read_cpuinfo("flags") or _read_cpuinfo("Features") or ""  # x86, ARM
    return frozenset(listed.split())


def _processor_name() -> str | None:
    return _read_cpuinfo("model name")


def _read_cpuinfo(key: str) -> str | None:
    """Return a value of /proc/cpuinfo for the first processor; None if it is missing."""
    try:
        text = Path("/proc/cpuinfo").read_text()
    except OSError:
        return None
    return next(
        (line.partition(":")[2].strip() for line in text.splitlines() if line.startswith(key)), None
    )
