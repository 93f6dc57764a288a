"""Readers for files that other commands wrote about a run, as untrusted input.

The files are those of `surefoot profile`, `roofline`, `memory`, `ladder` and `whatif batch`.
"""

from __future__ import annotations

import base64
import csv
import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, TypeVar

from surefoot.contract.events import RENAMED_PHASES
from surefoot.contract.run_folder import files
from surefoot.control.diagnose import MeasuredMemory, Shape
from surefoot.control.report.figure import Whole
from surefoot.control.report.rows import (
    Flame,
    LadderRows,
    MemoryRows,
    OperatorRow,
    Profile,
    Ratio,
    Roofline,
    RooflinePoint,
    RungRow,
)
from surefoot.control.report.rungs import format_ratio
from surefoot.core.errors import InputError, RunFolderError
from surefoot.core.units import LARGEST, format_bytes, format_number, format_percent

VERSION = 1
MAX_BYTES = 16 << 20
MAX_FLAME_BYTES = 4 << 20  # the page embeds it as an image
MAX_ROWS, MAX_RUNGS, MAX_TIMES = 5000, 200, 100_000
LADDER_FILE, SHAPE_FILE = "ladder.json", "shape.json"
LASTING = ("parameters", "masters", "gradients", "optimizer")
FLAMES = (
    ("By Python stack", "flame_stack.svg"),
    ("By module", "flame_module.svg"),
    ("On the device", "flame_device.svg"),
)

Made = TypeVar("Made")


def read_profile(run: Path) -> Profile:
    """Read the profile of a run, from the folder `profile` of the run folder.

    Missing parts are left out. `notes` has a message for each part that cannot be read.
    """
    folder, notes = run / "profile", list[str]()
    try:
        files.check_no_link(run, folder.name)
    except OSError as error:
        return Profile(notes=[f"{folder} is not read: {error.strerror}"])
    operators = _part(folder / "operators.json", lambda row: row, notes)
    rows = _rows(operators or {}, "rows")
    flames = [
        flame
        for title, name in FLAMES
        if (flame := _flame(title, folder / name, notes)) is not None
    ]
    return Profile(
        num_steps=_whole_number((operators or {}).get("num_steps")),
        window_s=_number((operators or {}).get("window_s")),
        operators=[_operator(row) for row in rows],
        roofline=_part(folder / "roofline.json", _roofline, notes),
        memory=_part(folder / "memory.json", _memory, notes),
        flames=flames,
        notes=notes,
    )


def read_ladder(folder: Path) -> LadderRows:
    """Read the results of `surefoot ladder` from their folder.

    Raises:
        InputError: if they are missing or cannot be read.
    """
    path = folder if folder.name == LADDER_FILE else folder / LADDER_FILE
    if not path.is_file():
        raise InputError(
            f"{folder} holds no {LADDER_FILE}",
            hint="surefoot ladder SPEC --out DIR writes one; give that DIR",
        )
    row = _read(path)
    return LadderRows(
        folder=str(path.parent),
        spec=_text(row.get("spec")),
        device=_text(row.get("device")),
        conditions=_text(row.get("conditions")),
        baseline=_settings(_mapping(row.get("baseline")).get("plain")),
        best=_text(row.get("best")),
        num_runs=_whole_number(row.get("num_runs")),
        num_samples=_whole_number(row.get("num_samples")),
        rungs=[_rung(each) for each in _rows(row, "rungs")[:MAX_RUNGS]],
    )


def read_shape(run: Path) -> Shape | None:
    """Read the predicted memory of a step from `shape.json` in a run folder; None without it."""
    return _part(run / SHAPE_FILE, _shape, [])


def read_measured(path: Path) -> list[MeasuredMemory]:
    """Read the measured memory of changed specs.

    `path` is the folder of a ladder, or a table that `surefoot whatif batch --csv` wrote. A variant
    of a ladder is included only if the interval of its memory ratio is below 1, or at least 1.

    Raises:
        InputError: if `path` is a different file, or cannot be read.
    """
    if path.is_dir() or path.name == LADDER_FILE:
        rungs = [
            (rung, rung.memory.low, rung.memory.high)
            for rung in read_ladder(path).rungs
            if rung.change
        ]
        return [
            MeasuredMemory(
                change=rung.change,
                ratio=rung.memory.estimate,
                source=f"{format_ratio(rung.memory)}, {rung.standing} by {path}",
            )
            for rung, low, high in rungs
            if low is not None and high is not None and (high < 1 or low >= 1)
        ]
    try:
        table = csv.DictReader(_open(path, MAX_BYTES).decode("utf-8-sig").splitlines())
        if "peak_bytes" not in (table.fieldnames or ()):
            raise KeyError("peak_bytes")
        rows = list(table)[:MAX_ROWS]
        splits = [
            (int(row["batch"]), int(row["microbatch"]), float(row["peak_bytes"]))
            for row in rows
            if row["peak_bytes"]
        ]
        return [
            MeasuredMemory(
                change=f"train.batch={size} train.microbatch={part}",
                source=str(path),
                peak_bytes=peak,
                split=(size, part),
            )
            for size, part, peak in splits
            if 0 < peak < LARGEST
        ]
    except (KeyError, TypeError, ValueError, csv.Error):
        raise RunFolderError(
            f"{path} is not a table of batches",
            hint="surefoot whatif batch SPEC 64,128 --csv FILE writes one",
        ) from None


def _part(path: Path, make: Callable[[Mapping[str, Any]], Made], notes: list[str]) -> Made | None:
    if not path.exists():
        return None
    try:
        return make(_read(path))
    except InputError as error:
        notes.append(error.message)
        return None


def _open(path: Path, limit: int) -> bytes:
    """Read a regular file of at most `limit` bytes.

    Raises:
        RunFolderError: if the file is larger or cannot be read.
    """
    try:
        with files.open_file(path.parent, path.name) as file:
            text = file.read(limit + 1)
    except OSError as error:
        raise RunFolderError(f"{path} cannot be read: {error.strerror}") from None
    if len(text) > limit:
        raise RunFolderError(
            f"{path} is larger than {format_bytes(limit)}, which is too much for a page"
        )
    return text


def _read(path: Path) -> Mapping[str, Any]:
    """Read the JSON object in a file.

    Raises:
        RunFolderError: if the file is damaged, or its version is not `VERSION`.
    """
    try:
        text = _open(path, MAX_BYTES).decode()
        for old, new in RENAMED_PHASES.items():
            text = text.replace(f'"{old}"', f'"{new}"')
        row = json.loads(text)
    except (ValueError, RecursionError, MemoryError):
        raise RunFolderError(f"{path} is damaged: it is not valid JSON") from None
    if not isinstance(row, dict):
        raise RunFolderError(f"{path} is damaged: it is not a JSON object")
    if row.get("version") != VERSION:
        raise RunFolderError(
            f"{path} is of version {str(row.get('version'))[:20]}, "
            f"and version {VERSION} is known here"
        )
    return row


def _flame(title: str, path: Path, notes: list[str]) -> Flame | None:
    """Read a flame graph as a data URI; return None if the file is missing or invalid.

    A message about an invalid file is appended to `notes`. An SVG in an `img` element can neither
    run a script nor fetch anything.
    """
    if not path.exists():
        return None
    try:
        picture = _open(path, MAX_FLAME_BYTES)
    except RunFolderError as error:
        notes.append(error.message)
        return None
    if b"<svg" not in picture[:2000]:
        notes.append(f"{path} is damaged: it is not an SVG")
        return None
    uri = Whole(f"data:image/svg+xml;base64,{base64.b64encode(picture).decode()}")
    return Flame(title=title, uri=uri, file=str(path))


def _operator(row: Mapping[str, Any]) -> OperatorRow:
    return OperatorRow(
        name=_text(row.get("name")),
        calls=_number(row.get("calls")),
        self_s=_number(row.get("self_s")),
        total_s=_number(row.get("total_s")),
        self_bytes=_number(row.get("self_bytes")),
        flops=_number(row.get("flops")),
    )


def _roofline(row: Mapping[str, Any]) -> Roofline:
    peaks = _mapping(row.get("peaks"))
    rates = {
        _text(name): _number(peak) for name, peak in _mapping(peaks.get("flops_per_s")).items()
    }
    points = [
        RooflinePoint(
            name=_text(each.get("name")),
            kind=_text(each.get("kind")),
            calls=_number(each.get("calls")),
            flops=_number(each.get("flops")),
            num_bytes=_number(each.get("bytes")),
            elapsed_s=_number(each.get("elapsed_s")),
            bound=_text(each.get("bound")),
        )
        for each in _rows(row, "points")
    ]
    return Roofline(
        device=_text(row.get("device")),
        flops_per_s={name: peak for name, peak in rates.items() if peak is not None},
        bytes_per_s=_number(peaks.get("bytes_per_s")),
        points=points,
        mfu=_number(row.get("mfu")),
        mfu_formula=_text(row.get("mfu_formula")),
        fusible_share=_number(row.get("fusible_share")),
    )


def _shape(row: Mapping[str, Any]) -> Shape | None:
    terms = {str(name): _number(size) or 0.0 for name, size in _mapping(row.get("terms")).items()}
    parameters = _number(row.get("num_parameters"))
    if not terms or not parameters:
        return None
    return Shape(
        activation_bytes=sum(
            size for name, size in terms.items() if name.startswith("activations")
        ),
        parameter_bytes=sum(terms.get(name, 0.0) for name in LASTING) / parameters,
    )


def _memory(row: Mapping[str, Any]) -> MemoryRows:
    times = [_number(value) for value in _list(row.get("times_s"))[:MAX_TIMES]]
    if any(value is None for value in times):
        raise RunFolderError("profile/memory.json is damaged: a time is not a number")
    categories = {
        _text(name): [_number(value) for value in _list(values)[:MAX_TIMES]]
        for name, values in _mapping(row.get("categories")).items()
    }
    return MemoryRows(times_s=[value or 0.0 for value in times], categories=categories)


def _rung(row: Mapping[str, Any]) -> RungRow:
    parity = _mapping(row.get("parity"))
    ratios = {
        name: _ratio(row.get(f"{name}_ratio"))
        for name in ("time", "memory", "throughput", "startup", "total_time", "total_memory")
    }
    return RungRow(
        name=_text(row.get("name")),
        kind=_text(row.get("kind")),
        standing=_text(row.get("standing")),
        reason=_text(row.get("reason")),
        change=_settings(row.get("change")),
        score=_score(row.get("score")),
        parity=", ".join(
            part for part in (_text(parity.get("verdict")), _text(parity.get("words"))) if part
        ),
        expected=_text(row.get("expected")),
        **ratios,
    )


def _ratio(value: Any) -> Ratio:
    row = _mapping(value)
    return Ratio(
        estimate=_number(row.get("estimate")),
        low=_number(row.get("low")),
        high=_number(row.get("high")),
        n=_number(row.get("n")),
    )


def _score(value: Any) -> str:
    """Format a score, such as `accuracy 99.4 % (start 99.2 %)`."""
    row = _mapping(value)
    show = format_percent if row.get("unit") == "%" else format_number
    found, start = _number(row.get("value")), _number(row.get("start"))
    return "" if found is None else f"{_text(row.get('name'))} {show(found)} (start {show(start)})"


def _settings(value: Any) -> str:
    """Format settings as `--set` accepts them, such as `optim.fused=true, train.threads=2`."""
    return ", ".join(
        f"{name}={_text(part)}"
        for name, part in list(_mapping(value).items())[:20]
        if part is not None
    )


def _mapping(value: Any) -> Mapping[str, Any]:
    return value if isinstance(value, dict) else {}


def _list(value: Any) -> list[Any]:
    return value if isinstance(value, list) else []


def _rows(row: Mapping[str, Any], key: str) -> list[Mapping[str, Any]]:
    return [each for each in _list(row.get(key))[:MAX_ROWS] if isinstance(each, dict)]


def _number(value: Any) -> float | None:
    """Return the value as a float if it is a number of magnitude below 1e300, otherwise None."""
    if isinstance(value, bool) or not isinstance(value, int | float) or not abs(value) < 1e300:
        return None
    return float(value)


def _whole_number(value: Any) -> int | None:
    return None if (number := _number(value)) is None else round(number)


def _text(value: Any) -> str:
    """Format a value from JSON as text.

    A string is returned unchanged, a number is shortened, and an object becomes names and values.
    """
    if value is None:
        return ""
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, int | float):
        return format_number(number) if (number := _number(value)) is not None else str(value)[:40]
    if isinstance(value, dict):
        return ", ".join(
            f"{name} {_text(part)}"
            for name, part in list(value.items())[:20]
            if not isinstance(part, dict | list)
        )
    if isinstance(value, list):
        return ", ".join(_text(part) for part in value[:20] if not isinstance(part, dict | list))
    return str(value)
