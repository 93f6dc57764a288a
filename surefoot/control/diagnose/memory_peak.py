"""Peak memory of a run, compared with the capacity, and suggested changes of the spec."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Literal

from surefoot.contract.events import (
    KILLED_FOR_MEMORY,
    Ended,
    Event,
    Fault,
    Started,
    Step,
)
from surefoot.contract.spec import RunSpec
from surefoot.control.diagnose.phases import newest_attempt, number_of
from surefoot.core.errors import InputError, OutOfMemory
from surefoot.core.units import format_bytes, format_percent

TIGHT, ROOMY = 0.9, 0.5  # of the capacity
OWN_LOOP: Mapping[str, str] = {  # names of the changes for a run without a spec
    "memory.activation_checkpointing": "blocks computed again in the backward pass",
    "train.microbatch": "half the samples at a time",
    "precision.compute": "bf16",
    "train.batch": "twice the batch",
}
OWN_BATCHES: Mapping[
    str, str
] = {  # and for a task that brings whole batches, of which a spec changes nothing
    "train.microbatch": "half the batch_size of the task's DataLoader",
    "train.batch": "twice the batch_size of the task's DataLoader",
}
MEMORY_FAULTS = ("memory", KILLED_FOR_MEMORY)
Verdict = Literal["exhausted", "tight", "fits", "roomy"]
MEANING: Mapping[Verdict, str] = {
    "exhausted": "the run ran out of memory, in an allocation that this peak does not include",
    "tight": "little is left",
    "fits": "nothing needs to change",
    "roomy": "there is room for a larger batch, or a larger model",
}


@dataclass(frozen=True, kw_only=True)
class Shape:
    """Predicted memory of a training step.

    `activation_bytes` is the size of all activations. `parameter_bytes` is the size of weights,
    gradients and optimizer state per parameter.
    """

    activation_bytes: float
    parameter_bytes: float


@dataclass(frozen=True, kw_only=True)
class MeasuredMemory:
    """Memory of a changed spec, measured by an experiment.

    `change` is the change. Either `ratio` is set, the memory with the change divided by the memory
    without it, or `peak_bytes` and `split`, the (batch, microbatch) sizes. A change that was
    measured to save nothing is not suggested, even if a saving is predicted.
    """

    change: str
    source: str
    ratio: float | None = None
    peak_bytes: float = 0.0
    split: tuple[int, int] | None = None


@dataclass(frozen=True, kw_only=True)
class Remedy:
    """Suggested change of a spec, with its effect on the peak memory.

    `saved_bytes` is the decrease of the peak: negative if the peak rises, None if it is unknown.
    `known` says whether the effect was measured or predicted.
    """

    change: str
    saved_bytes: float | None
    known: str

    @property
    def effect(self) -> str:
        """Effect on the peak memory in words, such as `12 MiB less, as measured: ...`."""
        if self.saved_bytes is None:
            return self.known
        return (
            f"{format_bytes(abs(self.saved_bytes))} {'less' if self.saved_bytes >= 0 else 'more'}, "
            f"{self.known}"
        )


@dataclass(frozen=True, kw_only=True)
class MemoryUse:
    """Peak memory of one process in the newest attempt, compared with the capacity.

    `limit_bytes` is the capacity of `place`, such as the GPU. `remedies` are the suggested changes
    of the spec.
    """

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
        meaning = (
            f"{format_bytes(self.peak_bytes - self.limit_bytes)} too much"
            if self.share > 1
            else MEANING[self.verdict]
        )
        return (
            f"{format_bytes(self.peak_bytes)}, {format_percent(self.share)} of {there}: {meaning}"
        )

    def as_row(self) -> dict[str, Any]:
        return {**asdict(self), "share": self.share}


def find_memory_use(
    events: Iterable[Event],
    *,
    limit_bytes: float | None = None,
    shape: Shape | None = None,
    measured: Sequence[MeasuredMemory] = (),
    spec_file: str = "SPEC",
) -> MemoryUse | None:
    """Compare the peak memory of a run's newest attempt with the capacity, and suggest changes.

    Return None if the peak or the capacity is unknown.

    Args:
        events: records of the run, in the order written.
        limit_bytes: capacity to compare with; by default that of the GPU, or of the host without a
            GPU.
        shape: predicted memory of a step of this run.
        measured: results of experiments on this spec.
        spec_file: path of the run's spec, quoted for the shell, for suggested commands.
    """
    attempt = newest_attempt(events)
    started = attempt[0] if attempt else None
    if not isinstance(started, Started):
        return None
    of_device = [
        each.device_memory for each in attempt if isinstance(each, Step) and each.device_memory
    ]
    if of_device:
        peaks, there, place = (
            [each.get("peak_bytes") for each in of_device],
            of_device[-1].get("total_bytes"),
            "the GPU",
        )
    else:
        peaks = [each.peak_bytes for each in attempt if isinstance(each, Step | Ended)]
        there, place = started.machine.get("memory_bytes"), "this host"
    peak, limit = (
        max(map(number_of, peaks), default=0.0),
        number_of(there) if limit_bytes is None else limit_bytes,
    )
    if peak <= 0 or limit <= 0:
        return None
    verdict: Verdict = (
        "exhausted"
        if any(_is_out_of_memory(each) for each in attempt)
        else "tight"
        if peak > TIGHT * limit
        else "roomy"
        if peak < ROOMY * limit
        else "fits"
    )
    found: Iterable[Remedy] = ()
    if verdict in ("exhausted", "tight"):
        found = _shrink(started, peak, shape, measured, spec_file)
    elif verdict == "roomy":
        found = _suggest_larger(started, peak, TIGHT * limit, shape, measured, spec_file)
    return MemoryUse(
        peak_bytes=peak,
        limit_bytes=limit,
        place=place if limit_bytes is None else "the limit",
        verdict=verdict,
        remedies=tuple(found),
    )


def _is_out_of_memory(event: Event) -> bool:
    """Return whether a record says that a step or the attempt ran out of memory."""
    return (isinstance(event, Ended) and event.exit_code == OutOfMemory.exit_code) or (
        isinstance(event, Fault) and event.fault in MEMORY_FAULTS
    )


def _shrink(
    started: Started,
    peak: float,
    shape: Shape | None,
    measured: Sequence[MeasuredMemory],
    spec_file: str,
) -> Iterator[Remedy]:
    """Yield changes that save memory: measured ones, largest saving first, then predicted ones."""
    spec = _spec(started)
    batch, microbatch = _sizes(spec)
    there = [each for each in measured if each.split is None or each.split[0] == batch]
    better = [_as_measured(each, _find_peak_before(spec, peak, measured, each)) for each in there]
    yield from sorted(
        (each for each in better if (each.saved_bytes or 0.0) > 0),
        key=lambda each: -(each.saved_bytes or 0.0),
    )
    for key, value, share in (
        ("memory.activation_checkpointing", "full", 1.0),
        (
            "train.microbatch",
            part := _halve_microbatch(batch, microbatch),
            1 - part / microbatch if part and microbatch else 0.5,
        ),
        ("precision.compute", "bf16", 0.5),
    ):
        is_measured = any(f"{key}={value}" in each.change.split() for each in there) or (
            key == "train.microbatch"
            and any(each.split is not None and each.split[1] < (microbatch or 0) for each in there)
        )
        if not is_measured and _saves_memory(started, spec, key, value):
            saved = None if shape is None else share * shape.activation_bytes
            yield _as_predicted(started, f"{key}={value}", saved, spec_file)


def _suggest_larger(
    started: Started,
    peak: float,
    most: float,
    shape: Shape | None,
    measured: Sequence[MeasuredMemory],
    spec_file: str,
) -> Iterator[Remedy]:
    """Yield uses of free memory: a larger batch, and a larger model.

    The batch is the largest measured one whose peak is at most `most` bytes. If there is none, it
    is twice the batch of the run, unless that was measured and does not fit.
    """
    spec = _spec(started)
    batch, _ = _sizes(spec)
    larger = [
        each
        for each in measured
        if each.split is not None and batch is not None and each.split[0] > batch
    ]
    fitting = [each for each in larger if 0 < each.peak_bytes <= most]
    twice = None if batch is None else 2 * batch
    if fitting:
        best = max(fitting, key=lambda each: each.split or (0, 0))
        yield _as_measured(best, _find_peak_before(spec, peak, measured, best))
    elif not any(
        each.split is not None and each.split[0] == twice for each in larger
    ) and _is_valid(spec, "train.batch", twice):
        yield _as_predicted(
            started,
            f"train.batch={twice}",
            None if shape is None else -shape.activation_bytes,
            spec_file,
        )
    known = "not known; surefoot memory predicts it from the spec of that model"
    if shape is not None:
        known = (
            f"{format_bytes(shape.parameter_bytes)} a parameter and its activations, "
            "as predicted of this one"
        )
    yield Remedy(change="a larger model", saved_bytes=None, known=known)


def _saves_memory(started: Started, spec: RunSpec | None, key: str, value: Any) -> bool:
    """Return whether setting `key` to `value` saves memory in this run and is valid in its spec."""
    if key == "precision.compute":
        return started.precision.get("compute") in ("fp32", "tf32") and _is_valid(spec, key, value)
    if (
        key == "memory.activation_checkpointing"
        and spec is not None
        and spec.memory.activation_checkpointing not in ("none", "operators")
    ):
        return False
    return (value is not None or spec is None) and _is_valid(spec, key, value)


def _is_valid(spec: RunSpec | None, key: str, value: Any) -> bool:
    """Return whether the spec is valid with `key` set to `value`; True for a run without a spec."""
    if spec is None:
        return True
    if spec.compile.what == "step" and key in (
        "memory.activation_checkpointing",
        "train.microbatch",
    ):
        return False  # the whole step is one graph of one forward and backward pass
    table, _, name = key.partition(".")
    try:
        spec.replace(**{table: {name: value}})
    except InputError:
        return False
    return True


def _halve_microbatch(batch: int | None, microbatch: int | None) -> int | None:
    """Return the largest divisor of the batch size up to half the microbatch size, or None."""
    if batch is None or microbatch is None:
        return None
    return next((size for size in range(microbatch // 2, 0, -1) if batch % size == 0), None)


def _as_predicted(
    started: Started, change: str, saved_bytes: float | None, spec_file: str
) -> Remedy:
    """Return the change `key=value` as a suggestion, with its predicted effect.

    The change is described in words if `--set` cannot make it: in a run without a spec, and in a
    task that builds its batches itself.
    """
    spec, (key, _, _) = _spec(started), change.partition("=")
    if spec is None:
        return Remedy(
            change=OWN_LOOP[key],
            saved_bytes=None,
            known="not known; the run has no spec to predict it from",
        )
    has_own_batches = started.data.get("guarantee") == "replayed" and key in OWN_BATCHES
    words = OWN_BATCHES[key] if has_own_batches else change
    if saved_bytes is not None:
        return Remedy(
            change=words, saved_bytes=saved_bytes, known="at most, as predicted of its activations"
        )
    if has_own_batches:
        known = f"not known; after that change of the task surefoot memory {spec_file} predicts it"
    else:
        known = f"not known; surefoot memory {spec_file} --set {change} predicts it"
    return Remedy(
        change=words,
        saved_bytes=None,
        known="not known; the task was built in a script" if spec.task.use is None else known,
    )


def _as_measured(found: MeasuredMemory, before: float) -> Remedy:
    there = found.peak_bytes if found.ratio is None else found.ratio * before
    return Remedy(
        change=found.change, saved_bytes=before - there, known=f"as measured: {found.source}"
    )


def _find_peak_before(
    spec: RunSpec | None, peak: float, measured: Sequence[MeasuredMemory], found: MeasuredMemory
) -> float:
    """Return the peak in bytes with which the measured change `found` is compared.

    If the same source measured the run's own batch and microbatch, it is that peak; otherwise it is
    the peak of the run.
    """
    mine = [
        each.peak_bytes
        for each in measured
        if each.split == _sizes(spec) and each.source == found.source
    ]
    return mine[0] if mine and found.split is not None else peak


def _spec(started: Started) -> RunSpec | None:
    """Return the spec of the run; None for a user-written loop, and for an invalid spec."""
    try:
        return RunSpec.of_record(started.spec) if started.spec else None
    except InputError:
        return None


def _sizes(spec: RunSpec | None) -> tuple[int | None, int | None]:
    """Return the batch and microbatch sizes of a spec; (None, None) without a spec."""
    return (
        (None, None)
        if spec is None
        else (spec.train.batch, spec.train.microbatch or spec.train.batch)
    )
