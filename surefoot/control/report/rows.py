"""What a report draws: the records of runs, what was measured of them, and a ladder. Nothing is computed here."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from surefoot.contract.events import Committed, Evaluated, Fault, Step
from surefoot.control.diagnose import Goodput, MemoryUse, Phases
from surefoot.control.report.figure import Whole

Pairs = Sequence[tuple[str, str]]


@dataclass(frozen=True, kw_only=True)
class Table:
    """Rows under their headers; the columns named in `right` hold numbers. `swatches` numbers a style of the figure for each row; a
    narrow one stands beside the part's figure where there is room."""

    headers: Sequence[str]
    rows: Sequence[Sequence[str]]
    right: Sequence[str] = ()
    caption: str = ""
    swatches: Sequence[int] = ()
    is_narrow: bool = False


@dataclass(frozen=True, kw_only=True)
class Operator:
    """A row of `profile/operators.json`: what an operator took of the window, itself and with what it called."""

    name: str
    calls: float | None
    self_s: float | None
    total_s: float | None
    self_bytes: float | None
    flops: float | None


@dataclass(frozen=True, kw_only=True)
class Place:
    """A point of the roofline: a module or an operator, with the operations and bytes of its calls in the seconds that they took."""

    name: str
    kind: str
    calls: float | None
    flops: float | None
    num_bytes: float | None
    elapsed_s: float | None
    bound: str


@dataclass(frozen=True, kw_only=True)
class Roofline:
    """The peaks of a device, and where a step's parts stand below them; what is unknown is None."""

    device: str
    flops_per_s: Mapping[str, float]
    bytes_per_s: float | None
    places: Sequence[Place]
    mfu: float | None
    mfu_formula: str
    fusible_share: float | None


@dataclass(frozen=True, kw_only=True)
class Memory:
    """Bytes of each category at each time of a window."""

    times_s: Sequence[float]
    categories: Mapping[str, Sequence[float | None]]


@dataclass(frozen=True, kw_only=True)
class Flame:
    """A flame graph as a picture: `uri` holds it, `file` is where the one that can be zoomed lies."""

    title: str
    uri: Whole
    file: str


@dataclass(frozen=True, kw_only=True)
class Profile:
    """What `surefoot profile` left in a run folder; `notes` say what of it could not be read."""

    num_steps: int | None = None
    window_s: float | None = None
    operators: Sequence[Operator] = ()
    roofline: Roofline | None = None
    memory: Memory | None = None
    flames: Sequence[Flame] = ()
    notes: Sequence[str] = ()


@dataclass(frozen=True, kw_only=True)
class Ratio:
    """An effect with its interval, over n pairs."""

    estimate: float | None = None
    low: float | None = None
    high: float | None = None
    n: float | None = None


@dataclass(frozen=True, kw_only=True)
class Rung:
    """A step of the ladder: what was changed, what it brought against the rung below and against the start, and its standing.

    That is `kept`, `rejected` or `skipped`.
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
class Ladder:
    """What `surefoot ladder` found."""

    folder: str
    spec: str
    device: str
    conditions: str
    baseline: str
    rungs: Sequence[Rung]
    best: str
    num_runs: int | None = None
    num_samples: int | None = None


@dataclass(frozen=True, kw_only=True)
class RunRows:
    """One run: what is said of it in words, and its records; `evaluations` are those of the split that counts."""

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
class Report:
    """All of a page: one run or several side by side, in what they differ, and the ladder that belongs to them."""

    runs: Sequence[RunRows]
    differences: Table | None = None
    ladder: Ladder | None = None
    version: str = ""
