"""Conversion of a trial to JSON and back, and of its effects to Markdown."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, fields
from importlib import metadata
from pathlib import Path
from typing import Any

from surefoot.core.errors import BadRecordError
from surefoot.core.hardware import find_machine
from surefoot.core.units import UNKNOWN, format_bytes, format_number
from surefoot.trial.effect import Effect, Trial, format_measure
from surefoot.trial.process import Outcome

VERSION = 1
Row = Mapping[str, Any]


def as_json(trial: Trial) -> str:
    """Return the trial with its raw outcomes as one JSON object; the inverse is `from_json`."""
    row = {
        "version": VERSION,
        **{
            each.name: getattr(trial, each.name)
            for each in fields(trial)
            if each.name != "outcomes"
        },
    }
    head = json.dumps(row, allow_nan=False, indent=1)
    lines = ",\n".join(f"  {as_line(outcome)}" for outcome in trial.outcomes)
    return f'{head[:-2]},\n "outcomes": [\n{lines}\n ]\n}}\n'


def from_json(text: str) -> Trial:
    """Return the trial that `as_json` converted to `text`.

    Raises:
        BadRecordError: If `text` is not a trial.
    """
    try:
        row = json.loads(text)
        version = row.pop("version")
        outcomes = tuple(Outcome(**each) for each in row.pop("outcomes"))
        trial = Trial(outcomes=outcomes, **{**row, "arms": tuple(row["arms"])})
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        raise BadRecordError(
            f"this is not a trial: {type(error).__name__}: {error}",
            hint="see surefoot/trial/table.py",
        ) from None
    if version != VERSION:
        raise BadRecordError(
            f"the trial has version {version}", hint=f"this surefoot reads {VERSION}"
        )
    return trial


def as_line(outcome: Outcome) -> str:
    """Return an outcome as one line of JSON.

    Such lines are written during a trial, so that a killed trial leaves its outcomes.
    """
    return json.dumps(asdict(outcome), allow_nan=False)


def write_trial(trial: Trial, path: Path) -> None:
    """Write the trial as JSON to a temporary file, and rename the file to `path`."""
    draft = path.with_name(f".{path.name}.draft")
    draft.write_text(as_json(trial))
    draft.replace(path)


def read_trial(path: Path) -> Trial:
    """Return the trial in the file `path`.

    Raises:
        BadRecordError: If the file cannot be read or is not a trial.
    """
    try:
        return from_json(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError) as error:
        raise BadRecordError(f"{path} cannot be read: {error}") from None


def effect_rows(effects: Iterable[Effect]) -> list[dict[str, Any]]:
    """Return each effect as a dictionary of plain values, for JSON and for Markdown."""
    return [
        {
            "measure": effect.measure,
            "arm": effect.arm,
            "baseline": effect.baseline,
            "kind": effect.kind,
            "value": effect.value,
            "reference": effect.reference,
            "estimate": effect.interval.estimate if effect.interval else None,
            "low": effect.interval.low if effect.interval else None,
            "high": effect.interval.high if effect.interval else None,
            "count": effect.interval.count if effect.interval else 0,
            "verdict": effect.interval.verdict if effect.interval else "not measured",
            "failure": effect.failure,
        }
        for effect in effects
    ]


def effects_markdown(effects: Sequence[Effect]) -> str:
    """Return effects as a Markdown table, followed by the error of each failed arm."""
    table = [
        (
            effect.measure,
            effect.arm,
            format_measure(effect.measure, effect.value),
            _format_effect(effect),
            _count(effect),
            _verdict(effect),
        )
        for effect in effects
    ]
    failures = {effect.arm: effect.failure for effect in effects if effect.failure}
    below = "".join(
        f"\n`{arm}` {failure.splitlines()[0]}\n\n```text\n{failure}\n```\n"
        for arm, failure in failures.items()
    )
    return (
        markdown(("measure", "arm", "median", "against the baseline (95 %)", "n", "verdict"), table)
        + below
    )


def markdown(header: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """Return a Markdown table; a vertical bar inside a cell is escaped.

    >>> print(markdown(["a", "b"], [["1", "2|3"]]), end="")
    | a | b |
    | --- | --- |
    | 1 | 2\\|3 |
    """
    lines = [header, ["---"] * len(header), *rows]
    return "".join(
        f"| {' | '.join(cell.replace('|', chr(92) + '|') for cell in line)} |\n" for line in lines
    )


def find_conditions(
    packages: Iterable[str] = ("torch", "numpy"), *, threads: int = 1
) -> dict[str, str]:
    """Return the conditions of a measurement on this machine, as text by name.

    They are the hardware, the operating system, the Python version, the number of threads and the
    versions of `packages`.
    """
    machine = find_machine()
    found = {
        "processor": machine.processor,
        "cores": str(machine.cores),
        "memory": format_bytes(machine.memory_bytes),
        "system": machine.system,
        "python": machine.python,
        "threads": str(threads),
    }
    for package in packages:
        try:
            found[package] = metadata.version(package)
        except metadata.PackageNotFoundError:
            found[package] = UNKNOWN
    return found


def _format_effect(effect: Effect) -> str:
    interval = effect.interval
    if interval is None:
        return UNKNOWN
    if effect.kind == "ratio":
        low, middle, high = map(format_number, (interval.low, interval.estimate, interval.high))
    else:
        low, middle, high = (
            format_measure(effect.measure, value)
            for value in (interval.low, interval.estimate, interval.high)
        )
    return f"{middle} ({low} to {high})"


def _count(effect: Effect) -> str:
    return str(effect.interval.count if effect.interval else 0)


def _verdict(effect: Effect) -> str:
    return effect.interval.verdict if effect.interval else "not measured"
