"""Samples written as tars of a bounded size, each whole or not there, by a process that may be killed at any moment.

A shard is a draft that is synced and renamed; then a line of the progress file says how many samples it has and what its digest is. The
first line says of what source it is, with what settings. A process that finds such a file goes on behind the last line: shards
whose digest is as it says are kept, one that is missing or damaged is written again. What is written depends on source and settings
alone, so that the tars of a run that was killed are those of one that was not, byte for byte.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import json
import os
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, BinaryIO

from surefoot.components.data.blocks import Order
from surefoot.components.data.disk.encode import END, frame
from surefoot.components.data.disk.files import (
    check_room,
    digest_of,
    drafted,
    make_folder,
    nearest,
    sweep,
    write_sums,
    write_whole,
)
from surefoot.components.data.disk.given import Given
from surefoot.components.data.remote.shards import SUMS
from surefoot.contract.commits import sync_folder
from surefoot.core.errors import DataError

FORMAT = "surefoot convert 1"
PROGRESS = ".surefoot-convert"
LEAST_SHARD = 10 << 10  # bytes
MOST_SHARDS = 100_000  # names have five digits, so that their order is that of the samples
LEAST_DIGITS = 6  # of a sample's number
LOOKED_UP = 4096  # places of an order at a time
PLAIN = re.compile(r"[A-Za-z0-9][A-Za-z0-9_-]{0,63}")
Tell = Callable[[int], None]  # samples that are done since the last call
Say = Callable[[str], None]


@dataclass(frozen=True, kw_only=True)
class Layout:
    """How tars are cut and called: `NAME-00000.tar` and so on, of `shard_bytes` at the most but for a sample that is larger itself.

    In the order of the source, or shuffled by a seed: the order of the first epoch of a run with it. Raises DataError.
    """

    name: str = "shard"
    shard_bytes: int = 256 << 20
    shuffle: int | None = None

    def __post_init__(self) -> None:
        if self.shard_bytes < LEAST_SHARD:
            raise DataError(f"tars of {self.shard_bytes:,} bytes are too small", hint=f"give {LEAST_SHARD:,} bytes or more")
        if not PLAIN.fullmatch(self.name):
            raise DataError(
                f"tars cannot be called {self.name!r}", hint="a name has letters, digits, _ and -, and begins with one"
            )


@dataclass(frozen=True, kw_only=True)
class Written:
    """A shard: its name, its samples, its bytes and its digest."""

    name: str
    samples: int
    bytes: int
    sha256: str


@dataclass(frozen=True, kw_only=True)
class Converted:
    """The shards in order, and of how many `kept` were there already."""

    shards: tuple[Written, ...]
    kept: int
    num_samples: int = 0
    num_bytes: int = 0
    beside: tuple[str, ...] = ()


@dataclass(eq=False)
class _Samples:
    """The samples of a source in the order of the tars, from any place on; the one that found no room in a tar waits for the next."""

    given: Given
    shuffle: int | None
    _waiting: tuple[int, bytes] | None = None
    _block: tuple[int, list[int]] = field(default_factory=lambda: (0, []))

    def framed(self, place: int) -> bytes:
        if self._waiting is None or self._waiting[0] != place:
            number = self._number(place)
            digits = max(LEAST_DIGITS, len(str(len(self.given) - 1)))
            self._waiting = place, frame(f"{number:0{digits}}", self.given.sample(number))
        return self._waiting[1]

    def _number(self, place: int) -> int:
        if self.shuffle is None:
            return place
        begin, numbers = self._block
        if not begin <= place < begin + len(numbers):
            begin, stop = place, min(place + LOOKED_UP, len(self.given))
            numbers = Order(len(self.given), self.shuffle).ids(0, begin, stop).tolist()
            self._block = begin, numbers
        return numbers[place - begin]


def convert(
    given: Given, out: Path, layout: Layout, *, tell: Tell = lambda done: None, say: Say = lambda text: None
) -> Converted:
    """Write the samples as tars into the folder `out`, or go on there; `SHA256SUMS` is written last.

    Raises DataError, before anything is written, for an `out` that holds other tars or was begun of another source or with other
    settings, for one that another process writes, and for a disk without room; StorageError for what the disk refuses later.
    """
    if layout.shuffle is not None and not given.seekable:
        raise DataError("a source that is read in a row cannot be shuffled", hint="leave --shuffle out")
    if not (out / PROGRESS).exists():
        _check_empty(out, given)
        check_room(nearest(out), given.num_bytes or 0)
    make_folder(out)
    with _progress_of(out, given, layout) as (file, known):
        return _convert(given, out, layout, file, known, tell, say)


def _convert(given: Given, out: Path, layout: Layout, file: BinaryIO, known: list[Written], tell: Tell, say: Say) -> Converted:
    _check_others(out, layout, known)
    sweep(out, [*(f"{layout.name}-{number:05}.tar" for number in range(len(known) + 1)), *given.beside, SUMS])
    samples, place, shards, kept = _Samples(given, layout.shuffle), 0, list[Written](), 0
    is_whole = [(out / each.name).is_file() and digest_of(out / each.name) == each.sha256 for each in known]
    done_bytes = sum(each.bytes for each, whole in zip(known, is_whole, strict=True) if whole)
    if given.num_bytes is not None:
        check_room(out, given.num_bytes - done_bytes)
    for each, whole in zip(known, is_whole, strict=True):
        if whole:
            kept += 1
            tell(each.samples)
        else:
            say(f"{each.name} is {'damaged' if (out / each.name).exists() else 'missing'}, and written again")
            again = _write(out / each.name, samples, place, len(given), layout.shard_bytes, tell)
            if again != each:
                raise DataError(f"{each.name} became another one: the source has changed", hint="convert it into a new folder")
        shards.append(each)
        place += each.samples
    while place < len(given):
        if len(shards) == MOST_SHARDS:
            raise DataError(f"there are more than {MOST_SHARDS:,} tars", hint="give a larger --shard-size")
        path = out / f"{layout.name}-{len(shards):05}.tar"
        made = _write(path, samples, place, len(given), layout.shard_bytes, tell)
        file.write(json.dumps(asdict(made)).encode() + b"\n")
        file.flush()
        os.fsync(file.fileno())
        shards.append(made)
        place += made.samples
    for name, content in given.beside.items():
        write_whole(out / name, content)
    write_sums(
        out,
        {each.name: each.sha256 for each in shards}
        | {name: hashlib.sha256(content).hexdigest() for name, content in given.beside.items()},
    )
    num_bytes = sum(each.bytes for each in shards)
    return Converted(shards=tuple(shards), kept=kept, num_samples=place, num_bytes=num_bytes, beside=tuple(given.beside))


def _write(path: Path, samples: _Samples, place: int, end: int, most_bytes: int, tell: Tell) -> Written:
    """One shard from the sample at `place` on, as many as there is room for, and one at the least."""
    digest, size, begin = hashlib.sha256(), 0, place
    with drafted(path) as draft, draft.open("wb") as file:
        while place < end:
            framed = samples.framed(place)
            if place > begin and size + len(framed) + len(END) > most_bytes:
                break
            file.write(framed)
            digest.update(framed)
            size, place = size + len(framed), place + 1
            tell(1)
        file.write(END)
        digest.update(END)
        file.flush()  # drafted() syncs it
    return Written(name=path.name, samples=place - begin, bytes=size + len(END), sha256=digest.hexdigest())


@contextlib.contextmanager
def _progress_of(out: Path, given: Given, layout: Layout) -> Iterator[tuple[BinaryIO, list[Written]]]:
    """The progress file, ours alone while it is open, and the shards that it says are written."""
    try:
        file = (out / PROGRESS).open("a+b")
    except OSError as error:
        raise DataError(f"nothing can be written into {out}: {error.strerror}", hint="name another folder") from None
    with file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            raise DataError(f"another process writes into {out}", hint="wait for it, or name another folder") from None
        file.seek(0)
        content = file.read()
        lines = content[: content.rfind(b"\n") + 1].splitlines()
        head = {"format": FORMAT, "source": given.identity, "settings": asdict(layout)}
        if not lines:
            _check_empty(out, given)
            file.truncate(0)
            file.write(json.dumps(head).encode() + b"\n")
            file.flush()
            os.fsync(file.fileno())
            sync_folder(out)
            yield file, []
            return
        known = _read(out, lines, head)
        file.truncate(sum(len(line) + 1 for line in lines))  # a line that was cut
        yield file, known


def _read(out: Path, lines: list[bytes], head: Mapping[str, Any]) -> list[Written]:
    """The shards that a progress file tells of. Raises DataError where it is of another conversion."""
    try:
        begun = json.loads(lines[0])
        was, now = dict(begun["settings"]), dict(head["settings"])
        known = [Written(**json.loads(line)) for line in lines[1:]]
        same_format, same_source = begun["format"] == FORMAT, begun["source"] == head["source"]
    except (ValueError, KeyError, TypeError):
        raise DataError(f"{out / PROGRESS} is damaged", hint="convert into a new folder") from None
    hint = "run it as it was begun, or name a new folder"
    if not same_format:
        raise DataError(f"{out} was begun by another version", hint=hint)
    changed = [f"{name} {was.get(name)}, not {value}" for name, value in now.items() if was.get(name) != value]
    if changed:
        raise DataError(f"{out} was begun with {'; '.join(changed)}", hint=hint)
    if not same_source:
        raise DataError(f"{out} was begun of another source, or this one has changed since", hint=hint)
    if [each.name for each in known] != [f"{now['name']}-{number:05}.tar" for number in range(len(known))]:
        raise DataError(f"{out / PROGRESS} is damaged", hint="convert into a new folder")
    return known


def _check_empty(out: Path, given: Given) -> None:
    """Raise DataError for a folder that holds what we would write, and was not begun by us."""
    _refuse(out, [*out.glob("*.tar"), *(out / name for name in (*given.beside, SUMS))])


def _check_others(out: Path, layout: Layout, known: list[Written]) -> None:
    """Ours are the shards that are known, and the one that was renamed before its line was written."""
    ours = {f"{layout.name}-{number:05}.tar" for number in range(len(known) + 1)}
    _refuse(out, [path for path in out.glob("*.tar") if path.name not in ours])


def _refuse(out: Path, others: list[Path]) -> None:
    found = sorted(path.name for path in others if path.exists())
    if found:
        more = f" and {len(found) - 1:,} more" if len(found) > 1 else ""
        raise DataError(f"{out} holds {found[0]}{more}, which is of another set", hint="name a new folder")


def plain_name(folder: Path) -> str:
    """What tars of a folder are called: as it, where that is plain."""
    name = folder.resolve().name
    return name if PLAIN.fullmatch(name) else Layout.name


__all__ = ["Converted", "Layout", "Written", "convert", "plain_name"]
