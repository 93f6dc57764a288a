"""The manifest of a checkpoint: its files, the tensors in each, and their digests.

It is read, checked and written without torch. A checkpoint exists only when its manifest does:
`checkpoints/step-000000001234/manifest.json` is written last, inside a hidden draft folder that is
renamed only after everything in it is synced. docs/reference/checkpoints.md specifies the format
for other programs.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
import re
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from surefoot.contract.run_folder import files
from surefoot.core.errors import RunFolderError, hint_unread

FORMAT = 1
FILE = "manifest.json"
FOLDER = "checkpoints"
UNLINK = (
    "put the whole run folder on the other disk and link the run folder; or mount "
    "the disk at checkpoints/"
)
MAX_BYTES = 64 << 20
# lists and objects in a manifest; with four and a digest per tensor MAX_BYTES hold fewer
MAX_NESTED = 1 << 20
MAX_TEXT_BYTES = 1 << 30  # of a file without tensors, which is read whole
MAX_COUNT = 2**48  # elements of a tensor, bytes of a file: more is not a plausible checkpoint
MAX_DIMS = 64
MAX_STEP = 10**12  # the name of a folder has twelve digits
# \d would match the digits of other scripts, $ a newline
STEP_FOLDER = re.compile(r"^step-([0-9]{12})\Z")
NAME = re.compile(r"^[A-Za-z0-9][A-Za-z0-9._-]{0,127}$")
# the part of a file that one of several ranks wrote
RANK_FILE = re.compile(r"^(.+)\.rank-[0-9]{5}\.safetensors\Z")
BETTER = ("higher", "lower")
# the dtype names of safetensors, and their bytes
ITEM_BYTES = {
    **dict.fromkeys(("BOOL", "U8", "I8", "F8_E4M3", "F8_E5M2"), 1),
    **dict.fromkeys(("I16", "U16", "F16", "BF16"), 2),
    **dict.fromkeys(("I32", "U32", "F32"), 4),
    **dict.fromkeys(("I64", "U64", "F64", "C64"), 8),
}


@dataclass(frozen=True, kw_only=True)
class Piece:
    """Tensor in a file, or the part of a tensor that one rank stored.

    The part has the shape `shape` and is at the indices `offset` of a tensor of shape `whole`.
    `owner` is the rank that stored it. `start` is the position of its data in bytes, counted from
    the end of the header.
    """

    dtype: str
    shape: tuple[int, ...]
    start: int
    sha256: str
    whole: tuple[int, ...]
    offset: tuple[int, ...]
    owner: int = 0

    @property
    def num_bytes(self) -> int:
        return math.prod(self.shape) * ITEM_BYTES[self.dtype]

    @property
    def is_part(self) -> bool:
        return self.shape != self.whole


@dataclass(frozen=True, kw_only=True)
class Entry:
    """File of a checkpoint; for a safetensors file, `tensors` describes its tensors.

    `since` is the step for which the file was written. It is an earlier step if the file was
    hard-linked from an earlier checkpoint.
    """

    name: str
    num_bytes: int
    sha256: str
    tensors: Mapping[str, Piece] | None = None
    since: int | None = None


@dataclass(frozen=True, kw_only=True)
class Manifest:
    """Content of a manifest.

    `score` is the score of an evaluation at this step, None if there was none. `parent` is the
    origin of a forked run.
    """

    step: int
    generation: int
    spec_id: str
    files: tuple[Entry, ...]
    environment: Mapping[str, str]
    score: Mapping[str, Any] | None = None
    layout: Mapping[str, int] = field(default_factory=lambda: {"world_size": 1})
    parent: Mapping[str, Any] | None = None
    format: int = FORMAT

    @property
    def num_bytes(self) -> int:
        return sum(entry.num_bytes for entry in self.files)

    @property
    def is_whole_state(self) -> bool:
        """True if a run can resume from this checkpoint, False if it holds only the weights."""
        return any(entry.name == "state.json" for entry in self.files)

    def as_text(self) -> str:
        """Return the manifest as JSON, with a digest of everything else in it.

        A non-finite score becomes null, since JSON has no such numbers.
        """
        row = asdict(self)
        if row["score"] is not None:
            row["score"] = {
                key: None if is_no_number(value) else value for key, value in row["score"].items()
            }
        return json.dumps({**row, "sha256": _digest(row)}, indent=1, sort_keys=True) + "\n"


def find_excess(shape: Sequence[int]) -> str | None:
    """Return a description of what is too large in a tensor's shape; None if nothing is.

    >>> find_excess([1] * 65), find_excess([2, 3])
    ('65 dimensions, more than 64', None)
    """
    if len(shape) > MAX_DIMS:
        return f"{len(shape):,} dimensions, more than {MAX_DIMS}"
    # sizes beside a 0 count too: code that makes such a tensor multiplies them
    count = math.prod(max(size, 1) for size in shape)
    return f"{count:,} elements, more than {MAX_COUNT:,}" if count > MAX_COUNT else None


def is_no_number(value: Any) -> bool:
    return isinstance(value, float) and not math.isfinite(value)


def file_of(name: str) -> str:
    """Return the name of a checkpoint file without the suffix of the rank that wrote it.

    A name without such a suffix is returned unchanged.

    >>> file_of("optimizer.rank-00001.safetensors"), file_of("model.safetensors")
    ('optimizer.safetensors', 'model.safetensors')
    """
    part = RANK_FILE.match(name)
    return f"{part.group(1)}.safetensors" if part else name


def name_of_rank(file: str, rank: int) -> str:
    """Return the name of the part of `file` that `rank` writes."""
    return f"{file.removesuffix('.safetensors')}.rank-{rank:05d}.safetensors"


def _digest(row: Mapping[str, Any]) -> str:
    return hashlib.sha256(json.dumps(row, sort_keys=True).encode()).hexdigest()


def step_folder(run: Path, step: int) -> Path:
    return run / FOLDER / f"step-{step:012d}"


def steps(run: Path) -> list[int]:
    """Return the steps of a run that have a folder with a manifest, ascending."""
    return [step for step in named_steps(run) if (step_folder(run, step) / FILE).is_file()]


def named_steps(run: Path) -> list[int]:
    """Return the steps of a run that have a folder, with or without a manifest, ascending.

    A folder gets its name only after its manifest is written, so one without a manifest has lost
    it. Raises RunFolderError if checkpoints/ is a symbolic link or cannot be read.
    """
    folder = run / FOLDER
    if folder.is_symlink():
        raise RunFolderError(
            f"{folder} is a symbolic link, and checkpoints are not read or written "
            "through symbolic links",
            hint=UNLINK,
        )
    if not folder.is_dir():
        return []
    try:
        found = [STEP_FOLDER.match(path.name) for path in folder.iterdir() if path.is_dir()]
    except PermissionError as error:
        raise RunFolderError(
            f"{folder} cannot be read: {error.strerror}", hint=hint_unread(error)
        ) from None
    return sorted(int(match.group(1)) for match in found if match)


def read(folder: Path) -> Manifest:
    """Return the manifest in a step's folder, after checking its digest, names, sizes and types.

    Raises RunFolderError, which names the file.
    """
    path = folder / FILE
    for each in (folder, *([folder.parent] if folder.parent.name == FOLDER else [])):
        if each.is_symlink():
            raise RunFolderError(
                f"{each} is a link, but a checkpoint must be a folder", hint=UNLINK
            )
    row = _read_row(path)
    try:
        made = _parse(row)
    except RunFolderError as error:
        raise RunFolderError(f"{path} is not a manifest: {error.message}") from None
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise RunFolderError(f"{path} is not a manifest: {_short(error)}") from None
    named = STEP_FOLDER.match(folder.name)
    if named is not None and int(named.group(1)) != made.step:
        raise RunFolderError(f"{path} is the manifest of step {made.step}")
    return made


def _short(error: Exception) -> str:
    return f"{type(error).__name__}: {error}"[:200]


def _read_row(path: Path) -> dict[str, Any]:
    try:
        row = parse_json(_read_text(path), path)
        stated = row.pop("sha256")
        if isinstance(row.get("format"), int) and row["format"] > FORMAT:
            raise RunFolderError(
                f"{path} has format {row['format']}, newer than {FORMAT}",
                hint="use a newer surefoot",
            )
        if stated != _digest(row):
            raise RunFolderError(f"{path} is damaged: its digest does not match")
    except OSError as error:
        raise RunFolderError(f"{path} cannot be read: {error.strerror}") from None
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise RunFolderError(f"{path} is not a manifest: {_short(error)}") from None
    return dict(row)


def _read_text(path: Path) -> bytes:
    """Return the bytes of a manifest: a regular file of at most `MAX_BYTES`."""
    with files.open_file(path.parent, path.name) as file:
        # memory is allocated before a byte is read
        text = file.read(min(os.fstat(file.fileno()).st_size, MAX_BYTES) + 1)
    if (excess := find_excess_text(text)) is not None:
        raise RunFolderError(f"{path} is not a manifest: it {excess}")
    return text


def find_excess_text(text: bytes) -> str | None:
    """Return in words why the text of a manifest is too large; None if it is not."""
    if len(text) > MAX_BYTES:
        return f"is larger than {MAX_BYTES >> 20} MiB"
    # each takes twenty times its text in memory
    too_many = text.count(b"[") + text.count(b"{") > MAX_NESTED
    return f"holds more than {MAX_NESTED:,} lists and objects" if too_many else None


def parse_json(text: bytes, path: Path) -> Any:
    """Return the value of JSON text, in which no object may have a key twice.

    Raises RunFolderError, which names the file `path`.
    """
    try:
        return json.loads(text.decode(), object_pairs_hook=reject_duplicate_keys)
    except RunFolderError as error:
        raise RunFolderError(f"{path} cannot be read: {error.message}") from None
    except (ValueError, RecursionError, MemoryError) as error:
        raise RunFolderError(f"{path} is not valid JSON: {_short(error)}") from None


def reject_duplicate_keys(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """Return a JSON object as a dict. Raises RunFolderError if a key is given twice."""
    row = dict(pairs)
    if len(row) != len(pairs):
        raise RunFolderError("a key is given twice, and two readers could read different values")
    return row


def _parse(row: dict[str, Any]) -> Manifest:
    """Return the manifest of a JSON object, after checking the type and range of every value.

    The digest detects accidental damage, but not a manifest that an attacker made.
    """
    files = tuple(parse_entry(entry) for entry in _check_type(row.pop("files"), list))
    names = [entry.name for entry in files]
    _require(len(set(names)) == len(names), "a file is named twice")
    _check_parts(files)
    made = Manifest(files=files, **row)
    _require(0 <= _check_type(made.step, int) < MAX_STEP, "its step is not valid")
    _require(
        0 <= _check_type(made.generation, int) < 10**12 and _check_type(made.format, int) > 0,
        "its generation or format is not a valid number",
    )
    _check_type(made.spec_id, str)
    _require(
        all(
            isinstance(key, str) and isinstance(value, str)
            for key, value in _check_type(made.environment, dict).items()
        ),
        "environment",
    )
    _check_layout(_check_type(made.layout, dict))
    if made.score is not None:
        check_score(_check_type(made.score, dict))
    _require(
        made.parent is None
        or all(_is_plain(value) for value in _check_type(made.parent, dict).values()),
        "parent",
    )
    return made


def _is_plain(value: Any) -> bool:
    """Return whether a value is null, a string, or a number in the range of a float."""
    return (
        value is None
        or isinstance(value, str)
        or (isinstance(value, int | float) and abs(value) <= sys.float_info.max)
    )


def _check_layout(row: Mapping[str, Any]) -> None:
    _require(
        all(type(value) is int and value > 0 for value in row.values()) and "world_size" in row,
        "layout",
    )


def check_score(row: Mapping[str, Any]) -> None:
    """Raise RunFolderError if checkpoints cannot be ranked by a score.

    A valid score has a value that is finite or null, "higher" or "lower" for `better`, and a name.
    """
    value = row.get("value")
    is_number = _is_plain(value) and not isinstance(value, str | bool)
    _require(is_number, f"the value of its score is {str(value)[:40]}, which is no finite number")
    _require(
        row.get("better") in BETTER,
        f"its score says {str(row.get('better'))[:40]!r} for better, "
        f"which is none of {', '.join(BETTER)}",
    )
    _require(
        isinstance(row.get("name"), str) and isinstance(row.get("split", ""), str),
        "its score has no name",
    )


def _check_parts(files: Sequence[Entry]) -> None:
    """Check that the parts of each tensor together contain every row exactly once."""
    found: dict[tuple[str, str], list[Piece]] = {}
    for entry in files:
        for name, piece in (entry.tensors or {}).items():
            found.setdefault((file_of(entry.name), name), []).append(piece)
    for (file, name), pieces in found.items():
        if len(pieces) == 1 and not pieces[0].is_part:
            continue
        whole, end = pieces[0].whole, 0
        _require(
            all((each.whole, each.dtype) == (whole, pieces[0].dtype) for each in pieces),
            f"{file}: the parts of {name} differ",
        )
        for piece in sorted(
            (each for each in pieces if each.shape[:1] != (0,)), key=lambda each: each.offset
        ):
            is_rows = bool(whole) and piece.shape[1:] == whole[1:] and not any(piece.offset[1:])
            _require(
                is_rows and piece.offset[0] == end,
                f"{file}: the parts of {name} are not consecutive rows",
            )
            end += piece.shape[0]
        _require(end == whole[0], f"{file}: rows of {name} are missing")


def parse_entry(row: dict[str, Any]) -> Entry:
    """Return the entry of one file in a manifest, after checking its values.

    Raises RunFolderError.
    """
    tensors = row.get("tensors")
    pieces = (
        None
        if tensors is None
        else {
            _check_type(name, str): _piece(piece)
            for name, piece in _check_type(tensors, dict).items()
        }
    )
    made = Entry(**{**row, "tensors": pieces})
    if not NAME.fullmatch(_check_type(made.name, str)) or made.name == FILE:
        raise RunFolderError(
            f"it names the file {made.name[:100]!r}, which is not a plain file name"
        )
    _require(
        0 <= _check_type(made.num_bytes, int) <= MAX_COUNT
        and len(_check_type(made.sha256, str)) == 64,
        f"{made.name} has no size or digest",
    )
    _require(made.since is None or _check_type(made.since, int) >= 0, "since")
    if pieces is None:
        _require(
            made.num_bytes <= MAX_TEXT_BYTES,
            f"{made.name} is larger than {MAX_TEXT_BYTES >> 30} GiB and holds no tensors",
        )
    else:
        _check_tiling(made.name, pieces, made.num_bytes)
    return made


def _piece(row: dict[str, Any]) -> Piece:
    shapes = {
        key: tuple(_size(size) for size in _check_type(row[key], list))
        for key in ("shape", "whole", "offset")
    }
    made = Piece(**{**row, **shapes})
    _require(
        made.dtype in ITEM_BYTES and len(_check_type(made.sha256, str)) == 64,
        "a tensor has no known dtype or no digest",
    )
    _require(
        len(made.shape) == len(made.whole) == len(made.offset),
        "the shapes of a tensor have other dimensions",
    )
    _require(
        all(o + s <= w for o, s, w in zip(made.offset, made.shape, made.whole, strict=True)),
        "a piece exceeds its tensor",
    )
    excess = find_excess(made.whole)
    _require(excess is None, f"a tensor of {excess}")
    _require(0 <= _check_type(made.start, int) <= MAX_COUNT, "a tensor has no valid offset")
    _require(_check_type(made.owner, int) >= 0, "owner")
    return made


def _size(value: Any) -> int:
    _require(0 <= _check_type(value, int) <= MAX_COUNT, f"a dimension of {str(value)[:40]}")
    return int(value)


def _check_tiling(name: str, pieces: Mapping[str, Piece], num_bytes: int) -> None:
    """Check that the tensors follow one another without gap or overlap.

    Every byte of the file then belongs to one tensor, or to the header.
    """
    end = 0
    for piece in sorted(pieces.values(), key=lambda each: (each.start, each.num_bytes)):
        _require(piece.start == end, f"{name}: tensors overlap or leave a gap")
        end += piece.num_bytes
    _require(end <= num_bytes, f"{name}: its tensors are larger than the file")


def _check_type(value: Any, kind: type) -> Any:
    if not isinstance(value, kind) or (kind is int and isinstance(value, bool)):
        raise RunFolderError(f"{str(value)[:40]!r} is no {kind.__name__}")
    return value


def _require(holds: bool, otherwise: str) -> None:
    if not holds:
        raise RunFolderError(otherwise)
