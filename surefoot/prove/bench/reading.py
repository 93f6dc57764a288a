"""How fast the samples of files are read and decoded where they lie: from the device and from memory, by several numbers of workers.

A sample is read and decoded as training would, in random order, each once; then it is dropped. What stands for the device is the first
reading after the system was asked to forget the files (`cold`); then the same samples are read again (`warm`).
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import torch

from surefoot.components.data.blocks import Order
from surefoot.components.data.disk.devices import Device, drop_cached, find_device
from surefoot.components.data.feed import Feed
from surefoot.components.data.loader import Kind, Loader, Reader, Settings
from surefoot.components.data.remote import is_url
from surefoot.components.data.sources import ImageFolder
from surefoot.components.data.tars import Tars
from surefoot.components.data.tars.audit import find_tars
from surefoot.components.data.tars.decoders import DECODERS
from surefoot.components.data.tars.far import find_remote
from surefoot.contract.task import Guarantee
from surefoot.core.errors import DataError, InputError
from surefoot.core.units import format_bytes

BATCH = 16  # samples that a worker reads at a time
MOST_WORKERS = 64
COSTS = ("read", "decode", "delay")
Tell = Callable[[str], None]


class Explained(Protocol):
    """A source that tells what reading takes."""

    digest: str

    def __len__(self) -> int: ...

    def explain(self, ids: np.ndarray) -> dict[str, float]: ...


@dataclass(frozen=True, kw_only=True)
class Timed:
    """One way of reading: with `workers`, from a `state` (cold, warm, or with a delay), so many samples and bytes of files a second.

    `read`, `decode` and `delay` are the shares of the workers' time.
    """

    workers: int
    state: str
    samples: int
    samples_per_s: float
    bytes_per_s: float
    read: float
    decode: float
    delay: float


@dataclass(frozen=True, kw_only=True)
class Measured:
    """What was measured, and on what. `dropped` says whether the system forgot the files, so that `cold` is of the device."""

    what: str
    device: Device
    dropped: bool
    kind: Kind
    num_samples: int
    rows: tuple[Timed, ...]

    def as_row(self) -> dict[str, Any]:
        return asdict(self)


class Dropped:
    """A source whose samples are read and decoded and dropped; a batch is what that took, and the bytes of the files that it read."""

    guarantee: Guarantee = "proven"
    thread_safe = True

    def __init__(self, source: Explained, sizes: np.ndarray, delay_s: float) -> None:
        self.source, self.sizes, self.delay_s, self.digest = source, sizes, delay_s, source.digest

    def __len__(self) -> int:
        return len(self.sizes)

    def read(self, ids: np.ndarray) -> dict[str, torch.Tensor]:
        costs = self.source.explain(ids)
        begun_s = time.perf_counter()
        if self.delay_s:
            time.sleep(self.delay_s * len(ids))
        costs["delay"] = time.perf_counter() - begun_s if self.delay_s else 0.0
        return {
            "costs": torch.tensor([[costs[name] for name in COSTS]], dtype=torch.float64),
            "bytes": torch.tensor([int(self.sizes[ids].sum())]),
            "samples": torch.tensor([len(ids)]),
        }

    def describe(self) -> str:
        return f"{len(self):,} samples, read and dropped"


@dataclass(frozen=True)
class _Found:
    """A source that is measured, its files, and the bytes of each sample."""

    source: Explained
    files: list[Path]
    sizes: np.ndarray
    folder: Path
    what: str


def measure(
    paths: Sequence[str], *, workers: Sequence[int] = (0, 2, 4), samples: int = 2000, seconds: float = 5.0, delay_s: float = 0.0,
    kind: Kind = "thread",
    tell: Tell = lambda text: None,
) -> Measured:  # fmt: skip
    """Read up to `samples` of tars, URLs or an image folder, for up to `seconds` a row, by threads or processes.

    With a delay also the warm files with so many seconds slept for each sample, which stands in for a slow disk. Raises InputError for
    numbers that measure nothing, DataError for what cannot be read.
    """
    if (
        not workers
        or min(workers) < 0
        or max(workers) > MOST_WORKERS
        or samples < 1
        or not 0 < seconds < 3600
        or not 0 <= delay_s < 60
    ):
        given = f"{','.join(map(str, workers))} workers, {samples} samples, {seconds} s and a delay of {delay_s} s"
        raise InputError(
            f"{given} measure nothing", hint=f"use --workers 0,2,4 (up to {MOST_WORKERS}) --samples 2000 --seconds 5"
        )
    found = find(paths)
    ids = Order(len(found.sizes), 0).ids(0, 0, min(samples, len(found.sizes)))
    rows, dropped = list[Timed](), True
    for number in dict.fromkeys(workers):
        tell(f"{number} workers, cold")
        dropped = _drop(found.files) and dropped
        rows.append(_time(found, ids, number, "cold", seconds, 0.0, kind))
        tell(f"{number} workers, warm")
        found.source.explain(ids[: rows[-1].samples])  # what is timed is in memory
        rows.append(_time(found, ids[: rows[-1].samples], number, "warm", seconds, 0.0, kind))
        if delay_s:
            tell(f"{number} workers, {1000 * delay_s:g} ms more for each sample")
            rows.append(_time(found, ids[: rows[-1].samples], number, "delay", seconds, delay_s, kind))
    device = find_device(found.folder)
    return Measured(what=found.what, device=device, dropped=dropped, kind=kind, num_samples=len(found.sizes), rows=tuple(rows))


def find(paths: Sequence[str]) -> _Found:
    """Tars and folders of them, URLs of tars, or a folder of images by class. Raises DataError for anything else."""
    folder = Path(paths[0]).expanduser()
    if len(paths) == 1 and not is_url(paths[0]) and folder.is_dir() and not any(folder.glob("*.tar")):
        images = ImageFolder(folder)
        files = [folder / name for name in images.names]
        return _Found(images, files, np.array(images.sizes), folder, images.describe())
    remote = find_remote(paths)
    given: Any = find_tars([Path(path).expanduser() for path in paths]) if remote is None else remote
    first = Tars(given, cls="cls")
    index = first.index
    parts = [
        kind
        for kind in first.sample(*(int(each[0]) for each in index.locate(np.array([0])))).parts
        if kind.rpartition(".")[2] in DECODERS
    ]
    if not parts:
        raise DataError("the first sample has no part that is decoded", hint=f"decoded are {', '.join(DECODERS)}")
    named: dict[str, Any] = {kind: kind for kind in parts}  # none of which is a parameter of Tars
    tars = Tars(given, **named)
    sizes = index.locate(np.arange(len(index)))[2]
    what = f"{len(index):,} samples in {len(index.shards):,} tars of {format_bytes(int(sizes.sum()))}: {', '.join(parts)}"
    return _Found(tars, [index.folder / shard.name for shard in index.shards], sizes, index.folder, what)


def _drop(files: Sequence[Path]) -> bool:
    return drop_cached(path for path in files if path.is_file())


def _time(found: _Found, ids: np.ndarray, workers: int, state: str, seconds: float, delay_s: float, kind: Kind) -> Timed:
    """Read these samples, each once; the time begins when workers stand ready and ends with the last sample, or when it is over."""
    source = Dropped(found.source, found.sizes, delay_s)
    costs, samples, num_bytes = np.zeros(len(COSTS)), 0, 0
    begun_s = time.perf_counter()
    elapsed_s = 0.0
    for batch in _batches(source, ids, workers, kind):
        if batch is None:
            begun_s = time.perf_counter()
            continue
        costs += batch["costs"].numpy()[0]
        samples, num_bytes = samples + int(batch["samples"]), num_bytes + int(batch["bytes"])
        elapsed_s = time.perf_counter() - begun_s
        if elapsed_s >= seconds:
            break
    read, decode, delay = costs / max(costs.sum(), 1e-12)
    return Timed(
        workers=workers, state=state, samples=samples, samples_per_s=samples / elapsed_s, bytes_per_s=num_bytes / elapsed_s,
        read=float(read), decode=float(decode), delay=float(delay),
    )  # fmt: skip


class _Chosen:
    """The samples `ids` of a source, as a source; before them stand `ahead` that are none, for workers to begin with."""

    guarantee: Guarantee = "proven"
    thread_safe = True

    def __init__(self, source: Dropped, ids: np.ndarray, ahead: int) -> None:
        self.source, self.ids, self.ahead, self.digest = source, ids, ahead, source.digest

    def __len__(self) -> int:
        return self.ahead + len(self.ids)

    def read(self, ids: np.ndarray) -> dict[str, torch.Tensor]:
        if ids[0] < self.ahead:
            return {}
        return self.source.read(self.ids[ids - self.ahead])

    def describe(self) -> str:
        return self.source.describe()


def _batches(source: Dropped, ids: np.ndarray, workers: int, kind: Kind) -> Iterator[dict[str, torch.Tensor] | None]:
    """What batches took, by so many workers; None when these stand ready, before the first."""
    settings = Settings(workers=workers, kind=kind)
    ahead = BATCH * workers  # each worker has been there once
    chosen = _Chosen(source, ids, ahead)
    feed = Feed(chosen, Order(len(chosen), 0, shuffle=False), batch=BATCH)
    steps = feed.steps_per_epoch or 0
    with contextlib.closing(Loader(feed, Reader(chosen, None, 0), settings, last=steps)) as loader:
        for number in range(1, steps + 1):
            if number == 1 + bool(workers):
                yield None
            for batch in loader.take(number).batches:
                if batch:
                    yield batch
