"""Whether a run made good use of its memory: its peak beside what there is, and what would change it, each change with its effect."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Literal

from surefoot.contract.events import Ended, Event, Started, Step
from surefoot.control.diagnose.phases import newest_attempt, number_of
from surefoot.core.units import format_bytes, format_percent

TIGHT, ROOMY = 0.9, 0.5  # of the memory that is there
ASK = "not known; surefoot memory SPEC --set {} predicts it"
Verdict = Literal["tight", "fits", "roomy"]
MEANING: Mapping[Verdict, str] = {
    "tight": "little is left",
    "fits": "nothing needs to change",
    "roomy": "there is room for a larger batch, or a larger model",
}


@dataclass(frozen=True, kw_only=True)
class Shape:
    """What was predicted of a step: the bytes of its activations, and those that last, a parameter."""

    activation_bytes: float
    parameter_bytes: float


@dataclass(frozen=True, kw_only=True)
class Measured:
    """What a change of a spec came to elsewhere: `ratio` to the memory without it, or the peak of a `split`: batch and microbatch."""

    change: str
    source: str
    ratio: float | None = None
    peak_bytes: float = 0.0
    split: tuple[int, int] | None = None


@dataclass(frozen=True, kw_only=True)
class Remedy:
    """A change, by how many bytes the peak falls (rises, below 0; None: not known), and whence that is known."""

    change: str
    saved_bytes: float | None
    known: str

    @property
    def effect(self) -> str:
        """`12 MiB less, as measured: ...`."""
        if self.saved_bytes is None:
            return self.known
        return f"{format_bytes(abs(self.saved_bytes))} {'less' if self.saved_bytes >= 0 else 'more'}, {self.known}"


@dataclass(frozen=True, kw_only=True)
class MemoryUse:
    """The peak of the newest attempt beside the memory of `place`, and what follows from it. Of one process."""

    peak_bytes: float
    limit_bytes: float
    place: str
    verdict: Verdict
    remedies: tuple[Remedy, ...]

    @property
    def share(self) -> float:
        return self.peak_bytes / self.limit_bytes

    @property
    def words(self) -> str:
        there = f"{format_bytes(self.limit_bytes)} ({self.place})"
        return f"{format_bytes(self.peak_bytes)}, {format_percent(self.share)} of {there}: {MEANING[self.verdict]}"

    def as_row(self) -> dict[str, Any]:
        return {**asdict(self), "share": self.share}


def find_memory_use(
    events: Iterable[Event], *, limit_bytes: float | None = None, shape: Shape | None = None, measured: Sequence[Measured] = ()
) -> MemoryUse | None:
    """Judge the newest attempt among `events`, against `limit_bytes` or what its device has; None where one of the two is not known."""
    attempt = newest_attempt(events)
    started = attempt[0] if attempt else None
    if not isinstance(started, Started):
        return None
    of_device = [each.device_memory for each in attempt if isinstance(each, Step) and each.device_memory]
    if of_device:
        peaks, there, place = [each.get("peak_bytes") for each in of_device], of_device[-1].get("total_bytes"), "the GPU"
    else:
        peaks = [each.peak_bytes for each in attempt if isinstance(each, Step | Ended)]
        there, place = started.machine.get("memory_bytes"), "this host"
    peak, limit = max(map(number_of, peaks), default=0.0), number_of(there) if limit_bytes is None else limit_bytes
    if peak <= 0 or limit <= 0:
        return None
    verdict: Verdict = "tight" if peak > TIGHT * limit else "roomy" if peak < ROOMY * limit else "fits"
    found: Iterable[Remedy] = ()
    if verdict == "tight":
        found = _shrink(started, peak, shape, measured)
    elif verdict == "roomy":
        found = _grow(started, peak, TIGHT * limit, shape, measured)
    return MemoryUse(
        peak_bytes=peak, limit_bytes=limit, place=place if limit_bytes is None else "the limit", verdict=verdict, remedies=tuple(found),
    )  # fmt: skip


def _shrink(started: Started, peak: float, shape: Shape | None, measured: Sequence[Measured]) -> Iterator[Remedy]:
    """What takes less: as measured elsewhere, the most first; then what nobody measured, as predicted."""
    batch, microbatch = _sizes(started)
    there = [
        _as_measured(each, _before(started, peak, measured, each))
        for each in measured
        if each.split is None or each.split[0] == batch
    ]
    better = sorted((each for each in there if (each.saved_bytes or 0.0) > 0), key=lambda each: -(each.saved_bytes or 0.0))
    yield from better
    half = "HALF" if microbatch is None or microbatch % 2 else microbatch // 2
    for key, value, share, applies in (
        ("memory.recompute", "full", 1.0, _stated(started, "memory", "recompute") in (None, "none", "operators")),
        ("train.microbatch", half, 0.5, microbatch != 1),
        ("precision.compute", "bf16", 0.5, started.precision.get("compute") in ("fp32", "tf32")),
    ):
        if applies and not any(key in each.change for each in better):
            yield _as_predicted(f"{key}={value}", None if shape is None else share * shape.activation_bytes)


def _grow(started: Started, peak: float, most: float, shape: Shape | None, measured: Sequence[Measured]) -> Iterator[Remedy]:
    """What would use the rest: the largest batch that was measured and fits, or twice the batch; and a larger model."""
    batch, _ = _sizes(started)
    larger = [
        each for each in measured if each.split is not None and each.split[0] > (batch or 0) and 0 < each.peak_bytes <= most
    ]
    if larger:
        best = max(larger, key=lambda each: each.split or (0, 0))
        yield _as_measured(best, _before(started, peak, measured, best))
    else:
        change = f"train.batch={'TWICE' if batch is None else 2 * batch}"
        yield _as_predicted(change, None if shape is None else -shape.activation_bytes)
    known = "not known; surefoot memory SPEC predicts it"
    if shape is not None:
        known = f"{format_bytes(shape.parameter_bytes)} a parameter and its activations, as predicted of this one"
    yield Remedy(change="a larger model", saved_bytes=None, known=known)


def _as_predicted(change: str, saved_bytes: float | None) -> Remedy:
    known = ASK.format(change) if saved_bytes is None else "at most, as predicted of its activations"
    return Remedy(change=change, saved_bytes=saved_bytes, known=known)


def _as_measured(found: Measured, before: float) -> Remedy:
    there = found.peak_bytes if found.ratio is None else found.ratio * before
    return Remedy(change=found.change, saved_bytes=before - there, known=f"as measured: {found.source}")


def _before(started: Started, peak: float, measured: Sequence[Measured], found: Measured) -> float:
    """What a change is held against: the run's own split where it was measured beside it, else the peak of the run."""
    mine = [each.peak_bytes for each in measured if each.split == _sizes(started) and each.source == found.source]
    return mine[0] if mine and found.split is not None else peak


def _sizes(started: Started) -> tuple[int | None, int | None]:
    """Batch and microbatch that the spec states; a batch that is not stated is None."""
    batch, part = (_stated(started, "train", key) for key in ("batch", "microbatch"))
    batch, part = (value if isinstance(value, int) and value > 0 else None for value in (batch, part))
    return batch, part or batch


def _stated(started: Started, table: str, key: str) -> Any:
    keys = started.spec.get(table)
    return keys.get(key) if isinstance(keys, Mapping) else None
