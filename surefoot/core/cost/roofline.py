"""The roofline model: the minimum time of operators on given peaks, and which peak limits them.

S. Williams, A. Waterman, D. Patterson, "Roofline", 2009: attainable FLOP/s = min(peak, intensity *
bandwidth). The intensity is the number of FLOPs per byte. A result that needs an unknown peak is
None.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Literal

from surefoot.core.hardware import Peaks
from surefoot.core.units import UNKNOWN, format_number, format_percent

VERSION = 1
FILE = "profile/roofline.json"  # in a run folder
Bound = Literal["compute", "memory"]
Kind = Literal["module", "operator"]
# what a compiler fuses into adjacent operators, saving memory traffic
FUSIBLE = {"pointwise", "normalization", "reduction", "move"}
MFU = "model FLOPs of a sample x samples/s / peak FLOP/s"


def attainable_flops_per_s(intensity: float, peak_flops_per_s: float, bytes_per_s: float) -> float:
    """Return the attainable FLOP/s at an arithmetic intensity in FLOPs per byte.

    >>> attainable_flops_per_s(2, 100e9, 10e9), attainable_flops_per_s(50, 100e9, 10e9)
    (20000000000.0, 100000000000.0)
    """
    return min(peak_flops_per_s, intensity * bytes_per_s)


def ridge(peak_flops_per_s: float, bytes_per_s: float) -> float:
    """Return the arithmetic intensity (FLOPs per byte) from which on compute is the limit.

    >>> ridge(100e9, 10e9)
    10.0
    """
    return peak_flops_per_s / bytes_per_s


@dataclass(frozen=True, kw_only=True)
class OperatorWork:
    """Work of all calls of one operator with one dtype in a step.

    `model_flops` are the FLOPs of the matmuls that the model itself requires, without
    recomputation.
    """

    operator: str
    dtype: str
    group: str
    calls: float
    flops: float
    model_flops: float
    num_bytes: float
    elapsed_s: float


@dataclass(frozen=True, kw_only=True)
class Point:
    """An operator or a module on the roofline.

    `least_s` is the minimum time that the peaks allow, in seconds. `bound` says whether compute or
    memory limits it.
    """

    name: str
    kind: Kind
    calls: float
    flops: float
    num_bytes: float
    elapsed_s: float
    dtype: str | None
    group: str | None
    least_s: float | None
    bound: Bound | None

    @property
    def intensity(self) -> float | None:
        """FLOPs per byte; None if the number of bytes is 0."""
        return self.flops / self.num_bytes if self.num_bytes else None

    @property
    def share_of_roof(self) -> float | None:
        """Minimum time divided by measured time; None if unknown.

        It is above 1 if the data was in a cache.
        """
        return (
            self.least_s / self.elapsed_s
            if self.least_s is not None and self.elapsed_s > 0
            else None
        )

    def as_row(self) -> dict[str, Any]:
        row = asdict(self)
        return {
            **row,
            "bytes": row.pop("num_bytes"),
            "intensity_flops_per_byte": self.intensity,
            "reached": self.share_of_roof,
        }


def find_point(name: str, kind: Kind, works: Sequence[OperatorWork], peaks: Peaks) -> Point:
    """Return the sum of `works` as one point.

    The point is bound by compute or by memory, whichever needs more time for all of `works` at the
    peaks of their dtypes.
    """
    compute_s: float | None = 0.0
    memory_s: float | None = 0.0
    least_s: float | None = 0.0
    for work in works:
        one, other = (
            _compute_s(work, peaks),
            None if peaks.bytes_per_s is None else work.num_bytes / peaks.bytes_per_s,
        )
        compute_s = None if compute_s is None or one is None else compute_s + one
        memory_s = None if memory_s is None or other is None else memory_s + other
        least_s = (
            None if least_s is None or one is None or other is None else least_s + max(one, other)
        )
    bound: Bound | None = None
    if compute_s is not None and memory_s is not None and max(compute_s, memory_s) > 0:
        bound = "compute" if compute_s > memory_s else "memory"
    dtypes, groups = {work.dtype for work in works}, {work.group for work in works}
    return Point(
        name=name,
        kind=kind,
        calls=sum(work.calls for work in works),
        flops=sum(work.flops for work in works),
        num_bytes=sum(work.num_bytes for work in works),
        elapsed_s=sum(work.elapsed_s for work in works),
        dtype=dtypes.pop() if len(dtypes) == 1 else None,
        group=groups.pop() if len(groups) == 1 else None,
        least_s=least_s,
        bound=bound,
    )


def _compute_s(work: OperatorWork, peaks: Peaks) -> float | None:
    if not work.flops:
        return 0.0
    peak = peaks.flops_per_s.get(work.dtype)
    return None if peak is None else work.flops / peak


def fusible_share(points: Iterable[Point]) -> float | None:
    """Return the fraction of operator time in memory-bound operators that a compiler could fuse.

    A compiler can fuse pointwise operators, norms, reductions and copies. None if the peaks are
    unknown.
    """
    operators = [point for point in points if point.kind == "operator"]
    total_s = sum(point.elapsed_s for point in operators)
    if not total_s or all(point.bound is None for point in operators):
        return None
    return (
        sum(
            point.elapsed_s
            for point in operators
            if point.bound == "memory" and point.group in FUSIBLE
        )
        / total_s
    )


def format_giga(value: float | None) -> str:
    """Return a number divided by 10^9 as text, for tables of FLOP/s and bytes/s.

    >>> format_giga(9.5e10), format_giga(None)
    ('95', 'n/a')
    """
    return format_number(None if value is None else value / 1e9)


@dataclass(frozen=True, kw_only=True)
class Utilization:
    """Terms of the model FLOPs utilization of a run; `source` is the origin of the peak."""

    flops_per_sample: float
    peak_flops_per_s: float | None
    dtype: str
    source: str

    def share(self, samples_per_s: float | None) -> float | None:
        """Return the fraction of the peak FLOP/s that the model's matmuls use.

        Recomputation is not counted. None if the peak or the throughput is unknown.
        """
        if samples_per_s is None or not self.peak_flops_per_s:
            return None
        return self.flops_per_sample * samples_per_s / self.peak_flops_per_s

    def words(self, samples_per_s: float | None) -> str:
        """Return the formula of the utilization with its values, as text.

        >>> Utilization(
        ...     flops_per_sample=2e6, peak_flops_per_s=1e11, dtype="fp32", source="measured"
        ... ).words(5000.0)
        '10 % = 0.002 GFLOP a sample x 5000 samples/s / 100 GFLOP/s (fp32, measured)'
        """
        terms = (
            f"{format_giga(self.flops_per_sample)} GFLOP a sample x {format_number(samples_per_s)} "
            "samples/s"
        )
        peak = f"{format_giga(self.peak_flops_per_s)} GFLOP/s ({self.dtype}, {self.source})"
        return f"{format_percent(self.share(samples_per_s))} = {terms} / {peak}"


def read_utilization(text: str) -> Utilization | None:
    """Return the utilization in the text of a `roofline.json`.

    None if the text is invalid or has a different format version.
    """
    try:
        row = json.loads(text)
        # the previous release wrote the second
        found: Mapping[str, Any] = row["utilization" if "utilization" in row else "utilisation"]
        peak = found["peak_flops_per_s"]
        if row["version"] != VERSION:
            return None
        return Utilization(
            flops_per_sample=float(found["flops_per_sample"]),
            peak_flops_per_s=None if peak is None else float(peak),
            dtype=str(found["dtype"]),
            source=str(found["source"]) or UNKNOWN,
        )
    except (ValueError, TypeError, KeyError, RecursionError):
        return None
