"""Data of a report: the records of runs, their profiles, and a ladder of experiments.

These classes compute nothing.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from surefoot.contract.events import Committed, Evaluated, Fault, Step
from surefoot.control.diagnose import Goodput, MemoryUse, Phases
from surefoot.control.report.figure import Whole

Pairs = Sequence[tuple[str, str]]


@dataclass(frozen=True, kw_only=True)
class TableRows:
    """Table of a report: rows under their headers; the columns named in `right` hold numbers.

    `swatches` are color indices, one per row, that match the figure beside the table. A table with
    `is_narrow` is placed beside the figure if the page is wide enough.
    """

    headers: Sequence[str]
    rows: Sequence[Sequence[str]]
    right: Sequence[str] = ()
    caption: str = ""
    swatches: Sequence[int] = ()
    is_narrow: bool = False


@dataclass(frozen=True, kw_only=True)
class OperatorRow:
    """Row of `profile/operators.json`: time, memory and FLOPs of an operator in the profiled steps.

    `self_s` excludes the operators that it calls, `total_s` includes them.
    """

    name: str
    calls: float | None
    self_s: float | None
    total_s: float | None
    self_bytes: float | None
    flops: float | None


@dataclass(frozen=True, kw_only=True)
class RooflinePoint:
    """Point of a roofline plot: a module or an operator with its FLOPs, bytes and seconds."""

    name: str
    kind: str
    calls: float | None
    flops: float | None
    num_bytes: float | None
    elapsed_s: float | None
    bound: str


@dataclass(frozen=True, kw_only=True)
class Roofline:
    """Peaks of a device, and the operators and modules of a step; unknown values are None."""

    device: str
    flops_per_s: Mapping[str, float]
    bytes_per_s: float | None
    points: Sequence[RooflinePoint]
    mfu: float | None
    mfu_formula: str
    fusible_share: float | None


@dataclass(frozen=True, kw_only=True)
class MemoryRows:
    """Bytes of each memory category at each of the times `times_s`, during the profiled steps."""

    times_s: Sequence[float]
    categories: Mapping[str, Sequence[float | None]]


@dataclass(frozen=True, kw_only=True)
class Flame:
    """Flame graph; `uri` is the image as a data URI, `file` the path of the zoomable original."""

    title: str
    uri: Whole
    file: str


@dataclass(frozen=True, kw_only=True)
class Profile:
    """Output of `surefoot profile`; `notes` has a message for each part that cannot be read."""

    num_steps: int | None = None
    window_s: float | None = None
    operators: Sequence[OperatorRow] = ()
    roofline: Roofline | None = None
    memory: MemoryRows | None = None
    flames: Sequence[Flame] = ()
    notes: Sequence[str] = ()


@dataclass(frozen=True, kw_only=True)
class Ratio:
    """Effect of a change as a ratio, with its confidence interval, over `n` pairs of runs."""

    estimate: float | None = None
    low: float | None = None
    high: float | None = None
    n: float | None = None


@dataclass(frozen=True, kw_only=True)
class RungRow:
    """Variant in the results of `surefoot ladder`: its change, its effects, and its standing.

    `standing` is "kept", "rejected" or "skipped". `time`, `memory`, `throughput` and `startup` are
    ratios to the variant below it in the ladder. `total_time` and `total_memory` are ratios to the
    baseline.
    """

    name: str
    kind: str
    standing: str
    reason: str
    change: str
    time: Ratio
    memory: Ratio
    throughput: Ratio
    startup: Ratio
    total_time: Ratio
    total_memory: Ratio
    score: str
    parity: str
    expected: str


@dataclass(frozen=True, kw_only=True)
class LadderRows:
    """Results of `surefoot ladder`, which measures one optimization after another."""

    folder: str
    spec: str
    device: str
    conditions: str
    baseline: str
    rungs: Sequence[RungRow]
    best: str
    num_runs: int | None = None
    num_samples: int | None = None


@dataclass(frozen=True, kw_only=True)
class RunRows:
    """Data of one run in a report: descriptions and event records.

    `evaluations` are those of the split that decides the score.
    """

    name: str
    headline: str
    unit: str
    summary: Pairs
    environment: Pairs
    commands: Sequence[tuple[str, Whole]]
    spec: Whole
    steps: Sequence[Step]
    evaluations: Sequence[Evaluated]
    commits: Sequence[Committed]
    faults: Sequence[Fault]
    goodput: Goodput
    phases: Phases | None
    memory: MemoryUse | None = None
    profile: Profile = field(default_factory=Profile)


@dataclass(frozen=True, kw_only=True)
class ReportPage:
    """Content of a report: runs, the differences between them, and a ladder of experiments."""

    runs: Sequence[RunRows]
    differences: TableRows | None = None
    ladder: LadderRows | None = None
    version: str = ""
