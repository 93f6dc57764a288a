"""The records of a run in `events.jsonl`: one JSON object per line, append-only, with a version.

They are readable without torch. Every record has `v` (format version), `kind`, `generation` (number
of the attempt that wrote it) and `time_s` (seconds since 1970). Units are part of the names of
fields. A reader ignores a truncated last line. If several attempts recorded a step, it uses the
record of the newest generation.
"""

from __future__ import annotations

import errno
import io
import json
import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any, ClassVar, TextIO

from surefoot.contract.run_folder import files
from surefoot.contract.state import Compilation
from surefoot.core.errors import RunFolderError, hint_unread
from surefoot.core.units import LARGEST

VERSION = 1
FILE = "events.jsonl"
# the outcomes of a run that has nothing left to train, unless its loop was left early
CLOSED = ("finished", "stopped")
KILLED_FOR_MEMORY = "killed-for-memory"
# the faults with which the supervisor records how an attempt ended
ATTEMPT_FAULTS = (
    "hang",
    "different-collectives",
    "killed",
    KILLED_FOR_MEMORY,
    "crashed",
    "aborted",
    "failed",
    "exited",
    "disconnected",
)
PHASES = (
    "data",
    "copy",
    "forward",
    "backward",
    "optimizer",
    "communication",
    "checkpoint",
    "evaluation",
    "logging",
    "other",
)
RENAMED_PHASES = {"optimiser": "optimizer"}  # the previous release wrote the first


@dataclass(frozen=True, kw_only=True)
class Event:
    """Base class of all records, with the fields that all of them have.

    docs/reference/events.md describes the fields of each kind.
    """

    kind: ClassVar[str] = ""
    generation: int
    time_s: float

    def as_line(self) -> str:
        row = {"v": VERSION, "kind": self.kind, **vars(self)}
        try:
            return _encode(row) + "\n"
        except ValueError:  # a non-finite number
            return _encode(_replace_nonfinite(row)) + "\n"


@dataclass(frozen=True, kw_only=True)
class Started(Event):
    """Start of the first attempt of a run, or of a later one."""

    kind: ClassVar[str] = "started"
    spec_id: str
    spec: Mapping[str, Any]
    task: str
    code_digest: str
    data: Mapping[str, str]
    versions: Mapping[str, str]
    machine: Mapping[str, Any]
    place: Mapping[str, Any]
    variables: Mapping[str, str]
    command: tuple[str, ...]
    commit: str | None
    seed: int
    num_parameters: int
    total_steps: int | None
    steps_per_epoch: int | None
    first_step: int = 1
    notes: tuple[str, ...] = ()
    unit: str = "samples"
    parent: Mapping[str, Any] = field(default_factory=dict)
    precision: Mapping[str, Any] = field(default_factory=dict)
    modules: Mapping[str, str] = field(default_factory=dict)
    is_dirty: bool | None = None
    late_modules: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class Step(Event):
    """Summary of the `num_steps` steps since the previous record; `step` is the last of them."""

    kind: ClassVar[str] = "step"
    step: int
    epoch: float
    num_steps: int
    loss: float | None
    terms: Mapping[str, float | None]
    gradient_norm: float | None
    learning_rates: Mapping[str, float]
    num_applied: int
    num_samples: int
    num_items: float
    elapsed_s: float
    waiting_s: float
    samples_per_s: float | None
    items_per_s: float | None
    peak_bytes: int | None
    phases: Mapping[str, float] = field(default_factory=dict)
    step_s: tuple[float, ...] = ()
    outliers: tuple[Mapping[str, Any], ...] = ()
    device_memory: Mapping[str, int] = field(default_factory=dict)
    loss_scale: float | None = None
    noise: Mapping[str, float | None] = field(default_factory=dict)
    ranks: Mapping[str, tuple[float, ...]] = field(default_factory=dict)
    sources: Mapping[str, Mapping[str, float]] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class Dtypes(Event):
    """Dtypes of parameters and operators, observed in the first step of an attempt.

    Operators are recorded in the first step of the run only.
    """

    kind: ClassVar[str] = "dtypes"
    step: int
    parameters: tuple[Mapping[str, Any], ...]
    operators: Mapping[str, str]


@dataclass(frozen=True, kw_only=True)
class Memory(Event):
    """Predicted and measured peak memory of a step.

    `error` is (predicted - measured) / measured.
    """

    kind: ClassVar[str] = "memory"
    step: int
    predicted_bytes: int | None
    measured_bytes: int | None
    error: float | None


@dataclass(frozen=True, kw_only=True)
class Evaluated(Event):
    """Evaluation of a split with the weights after `step`."""

    kind: ClassVar[str] = "evaluated"
    step: int
    split: str
    num_samples: int
    loss: float | None
    metrics: Mapping[str, float | None]
    score: str
    better: str
    best: bool
    elapsed_s: float
    units: Mapping[str, str] = field(default_factory=dict)
    precision: str | None = None


@dataclass(frozen=True, kw_only=True)
class Committed(Event):
    """Checkpoint of the state after `step` that is complete and synced to disk."""

    kind: ClassVar[str] = "committed"
    step: int
    folder: str
    num_bytes: int
    elapsed_s: float
    waited_s: float = 0.0
    late_modules: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class Compiled(Compilation, Event):
    """Compilation of code in the steps up to `step`.

    `why_again` is the reason for a recompilation (None for the first compilation), `ended_early`
    the reason for a graph break.
    """

    kind: ClassVar[str] = "compiled"
    step: int


@dataclass(frozen=True, kw_only=True)
class Fault(Event):
    """Fault in a run, and the action that was taken."""

    kind: ClassVar[str] = "fault"
    step: int
    fault: str
    rank: int
    host: str
    action: str
    detail: str


@dataclass(frozen=True, kw_only=True)
class Ended(Event):
    """End of an attempt.

    `outcome` is "finished", "stopped", "interrupted" or "failed"; `cause` is the reason in words.
    """

    kind: ClassVar[str] = "ended"
    step: int
    outcome: str
    cause: str
    exit_code: int
    elapsed_s: float
    num_samples: int
    samples_per_s: float | None
    peak_bytes: int | None
    summary: Mapping[str, Any] = field(default_factory=dict)
    was_left: bool = False


KINDS: dict[str, type[Event]] = {
    kind.kind: kind
    for kind in (Started, Step, Dtypes, Memory, Evaluated, Committed, Compiled, Fault, Ended)
}
UNREADABLE = "\ufffd"  # the replacement for bytes that are not UTF-8
HEAD = f'{{"v": {VERSION}, "kind": "'  # of every line
_TYPES = {
    name: {each.name: str(each.type) for each in fields(kind)} for name, kind in KINDS.items()
}
_encode = json.JSONEncoder(allow_nan=False).encode  # made once: a record is written every few steps
_NO_COUNTS = ("seed",)  # torch draws one of 64 bits for a process that sets none
_PLAIN: dict[str, type | tuple[type, ...]] = {
    "Any": object,
    "int": int,
    "float": (int, float),
    "str": str,
    "bool": bool,
    "None": type(None),
}


def _replace_nonfinite(value: Any) -> Any:
    """Return a value with non-finite numbers replaced by strings such as "nan", for JSON."""
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    if isinstance(value, Mapping):
        return {str(key): _replace_nonfinite(part) for key, part in value.items()}
    return (
        [_replace_nonfinite(part) for part in value] if isinstance(value, list | tuple) else value
    )


def read(folder: Path, *only: type[Event], damaged: list[str] | None = None) -> Iterator[Event]:
    """Yield the events of a run in the order written.

    These lines are left out: a truncated last line, lines of zeros (after a power cut), other
    damaged lines, and events of kinds that only a later version knows.

    Args:
        folder: The run folder.
        *only: Kinds of events to read; other lines, of which there may be millions, are not
            parsed. If none is given, all kinds are read.
        damaged: List to which a message for each damaged line is appended.

    Raises:
        RunFolderError: If the folder has no events, no line is an event, or the format is
            newer.
    """
    path = folder / FILE
    passed = KINDS.keys() - {kind.kind for kind in only} if only else frozenset[str]()
    found, newer, num_events = [] if damaged is None else damaged, "", 0
    line = ""
    with _open(folder) as lines:
        for number, following in enumerate(lines, start=1):
            before, line = line, following
            if only and (kind := _kind_of(line)) in passed:
                num_events += 1
                if newer and kind != Started.kind:
                    found.append(newer)
                    newer = ""
                continue
            row = _row(line)
            if row is None:
                if "\0" in line:
                    continue  # left by a power cut: not synced, and so part of no checkpoint
                if not line.endswith("\n"):
                    break
                found.append(f"{path}:{number} is not an event: {line[:60].rstrip()!r}")
                continue
            # an attempt does not mix the formats of two versions
            if row.get("v", 0) > VERSION:
                told = f"{path}:{number} has format {row['v']}, newer than {VERSION}"
                if _is_of_attempt(before, row):
                    found.append(told)
                else:
                    newer = newer or told
                continue
            if newer and row["kind"] != Started.kind:
                found.append(newer)
                newer = ""
            event = (
                _parse(row, f"{path}:{number}", found)
                if row["kind"] in KINDS and row["kind"] not in passed
                else None
            )
            num_events += event is not None or row["kind"] in passed or row["kind"] not in KINDS
            if event is not None:
                yield event
    if newer:
        raise RunFolderError(newer, hint="use a newer surefoot")
    if found and not num_events:
        raise RunFolderError(
            f"{found[0]}; no line of the file is an event", hint="give the log of a run"
        )


def _is_of_attempt(line: str, row: Mapping[str, Any]) -> bool:
    """Return whether `line` has a format of this version, and the attempt of `row`."""
    before = _row(line) or {"v": VERSION + 1}
    return before.get("v", 0) <= VERSION and before.get("generation") == row.get("generation")


def parse_line(line: str) -> Event | None:
    """Return the event in a line; None if it is damaged, or of a kind or format not known."""
    row = _row(line)
    if row is None or row["kind"] not in KINDS or row.get("v", 0) > VERSION:
        return None
    return _parse(row, FILE, [])


def _open(folder: Path) -> TextIO:
    try:
        return io.TextIOWrapper(files.open_file(folder, FILE), encoding="utf-8", errors="replace")
    except OSError as error:
        if error.errno not in (errno.ENOENT, errno.ENOTDIR, errno.EINVAL):
            raise RunFolderError(
                f"{folder / FILE} cannot be read: {error.strerror}", hint=hint_unread(error)
            ) from None
        raise files.no_run(folder, FILE) from None


def _kind_of(line: str) -> str:
    """Return the kind of a complete line in the format of this version; "" for any other line."""
    return (
        line[len(HEAD) : line.find('"', len(HEAD))]
        if line.startswith(HEAD) and line.endswith("}\n")
        else ""
    )


def _rename_phases(row: dict[str, Any]) -> None:
    """Replace the old names of phases in a row, and in its summary, by the current names."""
    for held in (row, row.get("summary")):
        if not isinstance(held, dict):
            continue
        if isinstance(phases := held.get("phases"), dict):
            held["phases"] = {RENAMED_PHASES.get(name, name): s for name, s in phases.items()}
        outliers = held.get("outliers")
        for each in outliers if isinstance(outliers, list) else ():
            if isinstance(each, dict) and each.get("cause") in RENAMED_PHASES:
                each["cause"] = RENAMED_PHASES[each["cause"]]


def _row(line: str) -> dict[str, Any] | None:
    """Return the JSON object in a line; None if the line is not a valid record."""
    if UNREADABLE in line:
        return None
    try:
        row: dict[str, Any] = json.loads(line)
    except (ValueError, RecursionError):
        return None
    fits = (
        isinstance(row, dict)
        and isinstance(row.get("kind"), str)
        and isinstance(row.get("v", 0), int)
    )
    if not fits:
        return None
    if any(f'"{old}"' in line for old in RENAMED_PHASES):
        _rename_phases(row)
    return row


def _parse(row: Mapping[str, Any], place: str, damaged: list[str]) -> Event | None:
    """Return the event of a row; None if a value is missing or has a wrong type.

    If it is None, a message that begins with `place` is appended to `damaged`.
    """
    kind: Callable[..., Event] = KINDS[row["kind"]]
    types = _TYPES[row["kind"]]
    values = {
        key: _read_numbers(key, value, types[key]) for key, value in row.items() if key in types
    }
    counted = {
        key: value
        for key, value in values.items()
        if key not in _NO_COUNTS or not isinstance(value, int)
    }
    wrong = next(
        (key for key, value in counted.items() if not _has_annotated_type(value, types[key])), None
    )
    try:
        if wrong is None:
            return kind(**values)
        damaged.append(f"{place} is not an event: {wrong} is not {types[wrong]}")
    except TypeError as error:
        damaged.append(f"{place} is not an event: {error}")
    return None


def _has_annotated_type(value: Any, type_: str) -> bool:
    """Return whether a value has the annotated type `type_`.

    An integer that is larger in magnitude than `LARGEST` fits only "Any".
    """
    if type_.startswith("Mapping[str, "):
        return isinstance(value, dict) and all(
            _has_annotated_type(part, type_[13:-1]) for part in value.values()
        )
    if type_.startswith("tuple["):
        return isinstance(value, list) and all(
            _has_annotated_type(part, type_[6:-6]) for part in value
        )
    if " | " in type_:
        return any(_has_annotated_type(value, one) for one in type_.split(" | "))
    if isinstance(value, bool):
        return type_ in ("bool", "Any")
    return isinstance(value, _PLAIN[type_]) and not (
        isinstance(value, int) and type_ != "Any" and abs(value) > LARGEST
    )


def _read_numbers(key: str, value: Any, type_: str) -> Any:
    """Return a value in which "nan", "inf" and "-inf" in float fields are converted to numbers."""
    if isinstance(value, Mapping) and type_ == "Mapping[str, Any]" and key == "summary":
        names = ("loss", "value", "best_value")
        return {
            name: _read_numbers(name, part, "float" if name in names else "Any")
            for name, part in value.items()
        }
    if isinstance(value, Mapping) and type_.startswith("Mapping[str, float"):
        return {name: _read_numbers(name, part, "float") for name, part in value.items()}
    return float(value) if type_.startswith("float") and value in ("nan", "inf", "-inf") else value


def find_end(folder: Path, spec_id: str) -> Ended | None:
    """Return the Ended event of the newest attempt if the run has nothing left to train; else None.

    Args:
        folder: The run folder.
        spec_id: Digest of the spec; for a run with a different spec the result is None.
    """
    past = list(read(folder, Started, Ended)) if (folder / FILE).is_file() else []
    starts = [event for event in past if isinstance(event, Started)]
    end = past[-1] if past else None
    if not isinstance(end, Ended) or not starts or starts[-1].spec_id != spec_id:
        return None
    return end if end.outcome in CLOSED and not end.was_left else None


def is_finished(folder: Path) -> bool:
    """Return whether the newest attempt of a run finished."""
    past = list(read(folder, Started, Ended)) if (folder / FILE).is_file() else []
    return bool(past) and isinstance(past[-1], Ended) and past[-1].outcome == "finished"


def newest(events: Iterable[Event]) -> list[Event]:
    """Return the events, without those of steps that a later attempt repeated.

    Faults and ends of all attempts are kept.
    """
    kept: list[Event] = []
    for event in events:
        if isinstance(event, Started):
            kept = [
                old
                for old in kept
                if getattr(old, "step", 0) < event.first_step or isinstance(old, Fault | Ended)
            ]
        kept.append(event)
    return kept
