"""What lies in tars: every part of every sample is read and decoded once; the bad are named, the good are counted and measured."""

# H height, W width, C channels

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from surefoot.components.data.tars.decoders import DECODERS, IMAGES, decode
from surefoot.components.data.tars.shards import Sample, read_spans
from surefoot.core.errors import DataError

Tell = Callable[[int], None]  # bytes read since the last call


@dataclass(frozen=True)
class Bad:
    """A part that is not what it should be, or with no `key` a whole shard from somewhere on."""

    shard: str
    key: str
    reason: str


@dataclass
class Colours:
    """The colours of images, from 0 to 255: their sums and those of their squares, (2, 3), over so many pixels."""

    num_pixels: int = 0
    sums: np.ndarray = field(default_factory=lambda: np.zeros((2, 3)))

    def add(self, image_HWC: np.ndarray) -> None:
        levels = np.arange(256.0)
        counts = [np.bincount(image_HWC[..., colour].ravel(), minlength=256) for colour in range(3)]
        self.sums += np.stack([[count @ levels for count in counts], [count @ levels**2 for count in counts]])
        self.num_pixels += image_HWC.shape[0] * image_HWC.shape[1]

    @property
    def mean(self) -> list[float] | None:
        """Of red, green and blue; None without images."""
        return (self.sums[0] / self.num_pixels).tolist() if self.num_pixels else None

    @property
    def deviation(self) -> list[float] | None:
        """Their standard deviations; None without images."""
        if not self.num_pixels:
            return None
        mean, square = self.sums / self.num_pixels
        deviation: list[float] = np.sqrt(np.maximum(square - mean**2, 0.0)).tolist()
        return deviation


@dataclass
class Part:
    """All parts of one extension: the bytes of each, what they hold, and how many hold what another one did before."""

    sizes: list[int] = field(default_factory=list)
    num_again: int = 0
    num_words: int = 0
    classes: Counter[int] = field(default_factory=Counter)
    shapes: Counter[tuple[int, ...]] = field(default_factory=Counter)
    colours: Colours = field(default_factory=Colours)
    seen: set[bytes] = field(default_factory=set)


@dataclass
class Audit:
    """What was found: the samples that are whole, what is bad, and all that the parts hold by extension."""

    num_samples: int = 0
    num_bytes: int = 0
    bad: list[Bad] = field(default_factory=list)
    parts: dict[str, Part] = field(default_factory=dict)
    lacking: Counter[str] = field(default_factory=Counter)  # samples without an extension that others have


def find_tars(named: Sequence[str | Path]) -> list[Path]:
    """The tars named, and those in the folders named, in order. Raises DataError where there is none."""
    found: list[Path] = []
    for place in map(Path, named):
        try:
            inside = sorted(path for path in place.iterdir() if path.suffix == ".tar") if place.is_dir() else [place]
        except OSError as error:
            raise DataError(f"{place} cannot be read: {error.strerror}", hint="check who may read it") from None
        if not inside:
            raise DataError(f"{place} holds no tar", hint="name a folder of *.tar, or the files themselves")
        found += inside
    missing = [path for path in found if not path.is_file()]
    if missing:
        raise DataError(
            f"{missing[0]} is {'no file' if missing[0].exists() else 'missing'}", hint="name tars, or a folder of them"
        )
    return found


def audit(paths: Iterable[Path], *, tell: Tell | None = None) -> Audit:
    """Read and decode every part of every sample; what is bad is kept by name, and the rest of its shard is read where it can be."""
    found = Audit()
    extensions: Counter[frozenset[str]] = Counter()
    for path in paths:
        try:
            for sample, start, stop in read_spans(path):
                size = sum(map(len, sample.parts.values()))
                extensions[frozenset(sample.parts)] += 1
                found.num_bytes += size
                found.num_samples += _take(found, sample)
                if tell is not None:
                    tell(stop - start)
        except DataError as error:
            found.bad.append(Bad(path.name, "", _reason(error, path)))
    for group, count in extensions.items():
        for extension in found.parts.keys() - group:
            found.lacking[extension] += count
    return found


def _take(found: Audit, sample: Sample) -> bool:
    """Whether every part of the sample is whole."""
    is_whole = True
    for extension, content in sample.parts.items():
        part = found.parts.setdefault(extension, Part())
        part.sizes.append(len(content))
        kind = extension.rpartition(".")[2]
        if kind not in DECODERS:
            continue
        try:
            _measure(part, kind, decode(sample, extension))
        except DataError as error:
            is_whole = False
            found.bad.append(
                Bad(sample.shard.name, f"{sample.key}.{extension}", _reason(error, sample.shard, f"{sample.key}.{extension}"))
            )
            continue
        if kind != "cls":
            mark = hashlib.blake2b(content, digest_size=12).digest()
            part.num_again += mark in part.seen
            part.seen.add(mark)
    return is_whole


def _measure(part: Part, kind: str, value: Any) -> None:
    if kind == "cls":
        part.classes[value] += 1
    elif kind == "txt":
        part.num_words += len(value.split())
    elif isinstance(value, np.ndarray):
        part.shapes[value.shape] += 1
        if kind in IMAGES:
            part.colours.add(value)


def _reason(error: DataError, shard: Path, member: str = "") -> str:
    """The words of an error without what stands beside them."""
    words = str(error).splitlines()[0].removeprefix(str(shard)).lstrip(": ")
    return words.removeprefix(member).strip()
