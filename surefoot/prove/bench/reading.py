"""Speed of reading and decoding samples: cold and warm, with several numbers of workers.

Each sample is read and decoded once, in random order as in training, and then dropped. `cold` is
the first read after the files were removed from the page cache; `warm` reads the same samples
again.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from multiprocessing.pool import ThreadPool
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from surefoot.components.data.blocks import Order
from surefoot.components.data.disk.devices import Device, drop_cached, find_device
from surefoot.components.data.loader.batches import Kind
from surefoot.components.data.remote.names import is_url
from surefoot.components.data.sources.images import ImageFolder
from surefoot.components.data.tars.audit import find_tars
from surefoot.components.data.tars.decoders import DECODERS
from surefoot.components.data.tars.far import find_remote
from surefoot.components.data.tars.source import Tars
from surefoot.core.errors import DataError, InputError
from surefoot.core.units import format_bytes

BATCH = 16  # samples that a worker reads at a time
MAX_WORKERS = 64
Tell = Callable[[str], None]


class TimedSource(Protocol):
    """Source of samples that measures the time of its reads."""

    def explain(self, ids: np.ndarray) -> dict[str, float]: ...


@dataclass(frozen=True, kw_only=True)
class TimedReading:
    """Speed of reading in one state of the files: "cold", "warm", or "delay" (warm, with a delay).

    `bytes_per_s` counts bytes of files. `read`, `decode` and `delay` are shares of the workers'
    time.
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
class MeasuredReading:
    """Results of a measurement of reading.

    `what` describes the data. `dropped` is True if the system removed the files from its cache, so
    that "cold" measures the device.
    """

    what: str
    device: Device
    dropped: bool
    kind: Kind
    num_samples: int
    rows: tuple[TimedReading, ...]

    def as_row(self) -> dict[str, Any]:
        return asdict(self)


@dataclass(frozen=True)
class _SourceToMeasure:
    """Source to measure, with its files and the size of each sample in bytes."""

    source: TimedSource
    files: list[Path]
    sizes: np.ndarray
    folder: Path
    what: str


def measure(
    paths: Sequence[str],
    *,
    workers: Sequence[int] = (0, 2, 4),
    samples: int = 2000,
    seconds: float = 5.0,
    delay_s: float = 0.0,
    kind: Kind = "thread",
    tell: Tell = lambda text: None,
) -> MeasuredReading:
    """Read up to `samples` samples of tars, URLs or an image folder, for up to `seconds` per row.

    A row is a number of workers with cold or warm files. If `delay_s` is not 0, the warm files are
    read again with a sleep of `delay_s` seconds per sample, which simulates a slow disk. `kind`
    selects threads or processes as workers.

    Raises:
        InputError: For numbers with which nothing can be measured.
        DataError: For unreadable data.
    """
    if (
        not workers
        or min(workers) < 0
        or max(workers) > MAX_WORKERS
        or samples < 1
        or not 0 < seconds < 3600
        or not 0 <= delay_s < 60
    ):
        given = (
            f"{','.join(map(str, workers))} workers, {samples} samples, "
            f"{seconds} s and a delay of {delay_s} s"
        )
        raise InputError(
            f"{given} measure nothing",
            hint=f"use --workers 0,2,4 (up to {MAX_WORKERS}) --samples 2000 --seconds 5",
        )
    found = find(paths)
    ids = Order(len(found.sizes), 0).ids(0, 0, min(samples, len(found.sizes)))
    rows, dropped = list[TimedReading](), True
    states = {"cold": 0.0, "warm": 0.0} | ({"delay": delay_s} if delay_s else {})
    for number in dict.fromkeys(workers):
        chosen = ids
        for state, wait_s in states.items():
            tell(
                f"{number} workers, {state}"
                if not wait_s
                else f"{number} workers, {1000 * wait_s:g} ms more for each sample"
            )
            if state == "cold":
                dropped = drop_cached(path for path in found.files if path.is_file()) and dropped
            elif state == "warm":
                found.source.explain(chosen)  # so that all timed files are in the page cache
            rows.append(_time(found, chosen, number, state, seconds, wait_s, kind))
            chosen = ids[: rows[-1].samples]
    device = find_device(found.folder)
    return MeasuredReading(
        what=found.what,
        device=device,
        dropped=dropped,
        kind=kind,
        num_samples=len(found.sizes),
        rows=tuple(rows),
    )


def find(paths: Sequence[str]) -> _SourceToMeasure:
    """Open tars, folders or URLs of tars, or a folder of images by class.

    Raises:
        DataError: If the data cannot be read.
    """
    folder = Path(paths[0]).expanduser()
    if (
        len(paths) == 1
        and not is_url(paths[0])
        and folder.is_dir()
        and not any(folder.glob("*.tar"))
    ):
        images = ImageFolder(folder)
        files = [folder / name for name in images.names]
        return _SourceToMeasure(images, files, np.array(images.sizes), folder, images.describe())
    remote = find_remote(paths)
    tars = Tars(
        find_tars([Path(path).expanduser() for path in paths]) if remote is None else remote,
        any="cls",
    )
    index = tars.index
    shards, firsts, sizes = index.locate(np.arange(len(index)))
    members = tars.sample(int(shards[0]), int(firsts[0]), int(sizes[0])).parts
    tars.parts = {member: member for member in members if member.rpartition(".")[2] in DECODERS}
    if not tars.parts:
        raise DataError(
            "the first sample has no part that is decoded",
            hint=f"decoded are {', '.join(DECODERS)}",
        )
    total = format_bytes(int(sizes.sum()))
    what = (
        f"{len(index):,} samples in {len(index.shards):,} tars of {total}: {', '.join(tars.parts)}"
    )
    return _SourceToMeasure(
        tars, [index.folder / shard.name for shard in index.shards], sizes, index.folder, what
    )


_source: TimedSource  # what a worker reads


def _begin(source: TimedSource) -> None:
    global _source
    _source = source


def _explain(delay_s: float, ids: np.ndarray) -> tuple[float, float, float]:
    """Return the seconds to read and to decode a batch of samples, and those of the sleep."""
    costs = _source.explain(ids)
    begun_s = time.perf_counter()
    time.sleep(delay_s * len(ids))
    return costs["read"], costs["decode"], time.perf_counter() - begun_s if delay_s else 0.0


def _time(
    found: _SourceToMeasure,
    ids: np.ndarray,
    workers: int,
    state: str,
    seconds: float,
    delay_s: float,
    kind: Kind,
) -> TimedReading:
    """Read the samples once, for at most `seconds`; the start of the workers is not timed."""
    costs, samples, elapsed_s = np.zeros(3), 0, 0.0
    with contextlib.ExitStack() as stack:
        run: Callable[..., Any] = map
        if workers:
            make_pool: Any = ThreadPool if kind == "thread" else multiprocessing.Pool
            pool = stack.enter_context(make_pool(workers, _begin, (found.source,)))
            pool.map(abs, range(workers), chunksize=1)
            run = pool.imap
        else:
            _begin(found.source)
        batches = np.split(ids, range(BATCH, len(ids), BATCH))
        begun_s = time.perf_counter()
        for batch, cost in zip(batches, run(partial(_explain, delay_s), batches), strict=True):
            costs, samples, elapsed_s = (
                costs + cost,
                samples + len(batch),
                time.perf_counter() - begun_s,
            )
            if elapsed_s >= seconds:
                break
    read, decode, delay = (costs / max(costs.sum(), 1e-12)).tolist()
    return TimedReading(
        workers=workers,
        state=state,
        samples=samples,
        samples_per_s=samples / elapsed_s,
        read=read,
        decode=decode,
        delay=delay,
        bytes_per_s=int(found.sizes[ids[:samples]].sum()) / elapsed_s,
    )
