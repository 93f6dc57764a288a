"""Check of tars: every file of every sample is read and decoded, and damage is reported."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from surefoot.components.data.tars.decoders import DECODERS, decode
from surefoot.components.data.tars.shards import read_spans
from surefoot.core.errors import DataError

Tell = Callable[[int], None]  # called with the bytes read since the last call


@dataclass(frozen=True)
class DamagedSample:
    """Damage that an audit found in a tar.

    `key` is the name of the damaged member. If it is empty, the tar itself is damaged, and the rest
    of it was not read.
    """

    shard: str
    key: str
    reason: str


@dataclass
class Audit:
    """Result of an audit of tars.

    `num_samples` counts the undamaged samples, `num_bytes` the bytes of all members that were read.
    `bad` lists the damage.
    """

    num_samples: int = 0
    num_bytes: int = 0
    bad: list[DamagedSample] = field(default_factory=list)


def find_tars(named: Sequence[str | Path]) -> list[Path]:
    """Return the given tars, and for a given folder the tars in it, sorted by name.

    Raises DataError for a path that is missing or cannot be read, and for a folder without tars.
    """
    found: list[Path] = []
    for place in map(Path, named):
        try:
            inside = (
                sorted(path for path in place.iterdir() if path.suffix == ".tar")
                if place.is_dir()
                else [place]
            )
        except OSError as error:
            raise DataError(
                f"{place} cannot be read: {error.strerror}", hint="check your permission to read it"
            ) from None
        if not inside:
            raise DataError(
                f"{place} contains no tar", hint="give a folder of *.tar files, or the files"
            )
        found += inside
    missing = next((path for path in found if not path.is_file()), None)
    if missing is not None:
        what = "not a regular file" if missing.exists() else "missing"
        raise DataError(f"{missing} is {what}", hint="give tars, or a folder of tars")
    return found


def audit(paths: Iterable[Path], *, tell: Tell = lambda done: None) -> Audit:
    """Read and decode all samples of the tars; return the damage that was found.

    After a damaged member, the audit continues with the next member; after other damage in a tar,
    with the next tar. Members with an extension that has no decoder are only read. `tell` is called
    with the number of bytes read since its last call.
    """
    found = Audit()
    for path in paths:
        try:
            for sample, start, stop in read_spans(path):
                num_bad = len(found.bad)
                for extension, content in sample.parts.items():
                    found.num_bytes += len(content)
                    if extension.rpartition(".")[2] in DECODERS:
                        try:
                            decode(sample, extension)
                        except DataError as error:
                            member = f"{sample.key}.{extension}"
                            found.bad.append(
                                DamagedSample(path.name, member, _reason(error, path, member))
                            )
                found.num_samples += len(found.bad) == num_bad
                tell(stop - start)
        except DataError as error:
            found.bad.append(DamagedSample(path.name, "", _reason(error, path)))
    return found


def _reason(error: DataError, shard: Path, member: str = "") -> str:
    """Return the first line of an error message, without the names of the shard and the member."""
    words = str(error).splitlines()[0].removeprefix(str(shard)).lstrip(": ")
    return words.removeprefix(member).strip()
