"""A commit's manifest: which files it holds, their sizes and SHA-256. Read, checked and written without torch.

A commit exists only when its manifest does: `checkpoints/step-000000001234/manifest.json` is written last, inside a hidden draft
folder that is renamed only after everything in it is synced.
"""

from __future__ import annotations

import hashlib
import json
import math
import re
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from surefoot.core.errors import RunFolderError

FORMAT = 1
FILE = "manifest.json"
FOLDER = "checkpoints"
MAX_BYTES = 16 << 20
STEP_FOLDER = re.compile(r"^step-(\d{12})$")
NAME = re.compile(r"^[A-Za-z0-9][A-Za-z0-9._-]{0,127}$")


@dataclass(frozen=True, kw_only=True)
class Entry:
    """One file of a commit."""

    name: str
    num_bytes: int
    sha256: str


@dataclass(frozen=True, kw_only=True)
class Manifest:
    """What a commit says of itself; `score` is the evaluation that chose it, if one did."""

    step: int
    generation: int
    spec_id: str
    files: tuple[Entry, ...]
    environment: Mapping[str, str]
    score: Mapping[str, Any] | None = None
    format: int = FORMAT

    def as_text(self) -> str:
        """JSON with its own digest over everything else; a score that is no number is null, since JSON has none."""
        row = asdict(self)
        if row["score"] is not None:
            row["score"] = {key: None if _is_no_number(value) else value for key, value in row["score"].items()}
        return json.dumps({**row, "sha256": _digest(row)}, indent=1, sort_keys=True) + "\n"


def _is_no_number(value: Any) -> bool:
    return isinstance(value, float) and not math.isfinite(value)


def _digest(row: Mapping[str, Any]) -> str:
    return hashlib.sha256(json.dumps(row, sort_keys=True).encode()).hexdigest()


def step_folder(run: Path, step: int) -> Path:
    return run / FOLDER / f"step-{step:012d}"


def steps(run: Path) -> list[int]:
    """The steps of a run that have a folder with a manifest, ascending."""
    folder = run / FOLDER
    if not folder.is_dir():
        return []
    found = (STEP_FOLDER.match(path.name) for path in folder.iterdir() if (path / FILE).is_file())
    return sorted(int(match.group(1)) for match in found if match)


def read(folder: Path) -> Manifest:
    """The manifest of a step folder, its own digest, names and types checked; raises RunFolderError that names the file."""
    path = folder / FILE
    try:
        if path.stat().st_size > MAX_BYTES:
            raise RunFolderError(f"{path} is larger than 16 MiB, which no manifest is")
        row = json.loads(path.read_text(encoding="utf-8"))
        stated = row.pop("sha256")
        if row.get("format", 0) > FORMAT:
            raise RunFolderError(f"{path} is of format {row['format']}, newer than {FORMAT}", hint="use a newer surefoot")
        if stated != _digest(row):
            raise RunFolderError(f"{path} is damaged: its digest does not match")
        files = tuple(Entry(**entry) for entry in row.pop("files"))
        made = Manifest(files=files, **row)
        is_typed = _is_typed(made)
    except OSError as error:
        raise RunFolderError(f"{path} cannot be read: {error.strerror}") from None
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
        raise RunFolderError(f"{path} is no manifest") from None
    if not is_typed:
        raise RunFolderError(f"{path} is no manifest: a value has another type than it should")
    bad = [entry.name for entry in files if not NAME.match(entry.name) or entry.name == FILE]
    if bad:
        raise RunFolderError(f"{path} names the file {bad[0][:200]!r}, which is no plain name")
    named = STEP_FOLDER.match(folder.name)
    if named is not None and int(named.group(1)) != made.step:
        raise RunFolderError(f"{path} is the manifest of step {made.step}")
    return made


def _is_typed(made: Manifest) -> bool:
    """Whether every value has its type: a digest protects from accidents, not from a stranger."""
    fits = (
        isinstance(made.step, int), isinstance(made.generation, int), isinstance(made.spec_id, str), isinstance(made.format, int),
        isinstance(made.environment, Mapping), made.score is None or isinstance(made.score, Mapping),
        len({entry.name for entry in made.files}) == len(made.files),
    )  # fmt: skip
    return all(fits) and all(
        isinstance(each.name, str) and isinstance(each.sha256, str) and isinstance(each.num_bytes, int) and each.num_bytes >= 0
        for each in made.files
    )


def check(folder: Path) -> Manifest:
    """Read the manifest and hold every file against its size and digest; raises RunFolderError that names the file."""
    manifest = read(folder)
    for entry in manifest.files:
        path = folder / entry.name
        if path.is_symlink() or not path.is_file() or path.stat().st_size != entry.num_bytes:
            raise RunFolderError(f"{path} is missing or not of {entry.num_bytes} bytes")
        if file_sha256(path) != entry.sha256:
            raise RunFolderError(f"{path} is damaged: its digest does not match")
    return manifest


def file_sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
