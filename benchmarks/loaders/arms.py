"""One arm: CIFAR-10's JPEGs to augmented float batches by two workers, and what that took.

python -m benchmarks.loaders.arms ARM TARS SETS REPORT
"""

from __future__ import annotations

import io
import os
import random
import sys
import time
from collections.abc import Callable, Iterator
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import torch
from torch import Tensor

from benchmarks.loaders.sets import stand_in_for_torchvision
from surefoot.components.data.blocks import Order
from surefoot.components.data.feed import Feed
from surefoot.components.data.loader.batches import LoaderSettings
from surefoot.components.data.loader.jobs import Reader
from surefoot.components.data.loader.loader import Loader
from surefoot.components.data.order import Keys
from surefoot.components.data.tars.source import Tars
from surefoot.components.data.transforms.moving import mirror, translate
from surefoot.tasks.cifar10 import PIXEL_DEVIATION, PIXEL_MEAN, Cifar10, NormalizeImages
from surefoot.trial import write_report

BATCH, WORKERS = 256, 2
WARM, TIMED = 40, 150  # batches: 10,240 and 38,400 images
SHIFT = 2
MEAN = np.array(PIXEL_MEAN, dtype=np.float32)
DEVIATION = np.array(PIXEL_DEVIATION, dtype=np.float32)
Batches = Iterator[Any]


def decode(jpeg: bytes) -> np.ndarray:
    """What every arm decodes with: Pillow."""
    from PIL import Image

    return np.asarray(Image.open(io.BytesIO(jpeg)))


def augment_one(image: np.ndarray) -> Tensor:
    """An image as a dataset makes it, one by one.

    It is shifted by up to two pixels with a mirrored border, mirrored half the time, and
    normalized.
    """
    padded = np.pad(image, ((SHIFT, SHIFT), (SHIFT, SHIFT), (0, 0)), mode="reflect")
    row, column = random.randint(0, 2 * SHIFT), random.randint(0, 2 * SHIFT)
    image = padded[row : row + 32, column : column + 32]
    if random.random() < 0.5:
        image = image[:, ::-1]
    return torch.from_numpy(((image - MEAN) / DEVIATION).transpose(2, 0, 1).copy())


def augment_all(images: Tensor, keys: Keys) -> Tensor:
    """The same of a whole batch, by draws that depend on the sample."""
    images = translate(images, keys.integers(0, 2 * SHIFT + 1, 2), SHIFT)
    images = mirror(images, keys.integers(0, 2, stream=1)[:, 0] == 1)
    made: Tensor = NORMALISE(images)
    return made


NORMALISE = NormalizeImages()


def augment_batch(batch: dict[str, Tensor], keys: Keys) -> dict[str, Tensor]:
    return {**batch, "image": augment_all(batch["image"], keys)}


def surefoot_processes(tars: Path, sets: Path) -> Batches:
    return _surefoot(tars, sets, "process")


def surefoot_threads(tars: Path, sets: Path) -> Batches:
    return _surefoot(tars, sets, "thread")


def _surefoot(tars: Path, sets: Path, kind: Any) -> Batches:
    source = Tars(sorted(tars.glob("train-*.tar")), cache=sets / "index", image="jpg", label="cls")
    feed = Feed(source, Order(len(source), 0), batch=BATCH)
    loader = Loader(
        feed, Reader(source, augment_batch, 0), LoaderSettings(workers=WORKERS, kind=kind)
    )
    number = 0
    while True:
        number += 1
        yield loader.take(number).batches[0]["image"]


def surefoot_decoded(tars: Path, sets: Path) -> Batches:
    """The set decoded once into a memory map, as the task `cifar10` has it; no worker."""
    images = Cifar10(str(tars), cache=str(sets / "decoded")).data("train")
    loader = Loader(
        Feed(images, Order(len(images), 0), batch=BATCH), Reader(images, augment_pair, 0)
    )
    number = 0
    while True:
        number += 1
        yield loader.take(number).batches[0][0]


def augment_pair(batch: tuple[Tensor, Tensor], keys: Keys) -> tuple[Tensor, Tensor]:
    return augment_all(batch[0], keys), batch[1]


class Files(torch.utils.data.Dataset[tuple[Tensor, int]]):
    """As ImageFolder: a file is opened and decoded each time it is asked for."""

    def __init__(self, folder: Path) -> None:
        self.paths = sorted(folder.glob("*/*.jpg"))
        self.labels = [int(path.parent.name) for path in self.paths]

    def __len__(self) -> int:
        return len(self.paths)

    def __getitem__(self, number: int) -> tuple[Tensor, int]:
        return augment_one(decode(self.paths[number].read_bytes())), self.labels[number]


def torch_loader(tars: Path, sets: Path) -> Batches:
    """torch's DataLoader over files in the folders of their classes."""
    loader = torch.utils.data.DataLoader(
        Files(sets / "files"),
        batch_size=BATCH,
        shuffle=True,
        num_workers=WORKERS,
        persistent_workers=True,
    )
    return _images(loader)


def webdataset(tars: Path, sets: Path) -> Batches:
    """The same tars, by webdataset, with its buffer of 1,000 images to shuffle."""
    import webdataset as wds

    shards = [str(path) for path in sorted(tars.glob("train-*.tar"))]
    data = (
        wds.WebDataset(shards, shardshuffle=len(shards), nodesplitter=wds.split_by_node)
        .shuffle(1000)
        .to_tuple("jpg", "cls")
        .map_tuple(lambda jpeg: augment_one(decode(jpeg)), int)
        .batched(BATCH)
    )
    return _images(
        wds.WebLoader(data, batch_size=None, num_workers=WORKERS, persistent_workers=True)
    )


def litdata(tars: Path, sets: Path) -> Batches:
    """litdata's StreamingDataset and StreamingDataLoader over chunks on this disk."""
    from litdata import StreamingDataLoader, StreamingDataset

    class Images(StreamingDataset):  # type: ignore[misc]
        def __getitem__(self, index: Any) -> tuple[Tensor, int]:
            row = super().__getitem__(index)
            return augment_one(decode(row["jpg"])), row["cls"]

    data = Images(str(sets / "litdata"), shuffle=True, drop_last=False)
    return _images(
        StreamingDataLoader(data, batch_size=BATCH, num_workers=WORKERS, persistent_workers=True)
    )


def streaming(tars: Path, sets: Path) -> Batches:
    """mosaicml-streaming's StreamingDataset under torch's DataLoader."""
    stand_in_for_torchvision()
    from streaming import StreamingDataset

    class Images(StreamingDataset):  # type: ignore[misc]
        def __getitem__(self, index: Any) -> tuple[Tensor, int]:
            row = super().__getitem__(index)
            return augment_one(decode(row["jpg"])), row["cls"]

    data = Images(local=str(sets / "streaming"), shuffle=True, batch_size=BATCH)
    return _images(
        torch.utils.data.DataLoader(
            data, batch_size=BATCH, num_workers=WORKERS, persistent_workers=True
        )
    )


def _images(loader: Any) -> Batches:
    while True:
        for batch in loader:
            yield batch[0]


def ceiling(tars: Path, sets: Path) -> Callable[[int], None]:
    """By hand: two processes read, decode and augment every other batch, and give it to nobody."""
    source = Tars(sorted(tars.glob("train-*.tar")), cache=sets / "index", image="jpg", label="cls")
    files = [os.open(path, os.O_RDONLY) for path in sorted(tars.glob("train-*.tar"))]
    places = [
        _place_of_jpeg(files, *place)
        for place in zip(
            *map(np.ndarray.tolist, source.index.locate(np.arange(len(source)))), strict=True
        )
    ]

    def read(number: int) -> None:
        ids = np.random.default_rng(number).integers(0, len(places), BATCH)
        images = [
            decode(os.pread(files[shard], count, start))
            for shard, start, count in (places[each] for each in ids)
        ]
        augment_all(torch.from_numpy(np.stack(images)), Keys(0, 0, ids))

    return read


def _place_of_jpeg(files: list[int], shard: int, first: int, count: int) -> tuple[int, int, int]:
    """Where the JPEG of a sample lies."""
    at = first
    while b".jpg" not in os.pread(files[shard], 100, at):
        at += 512 + -(-int(os.pread(files[shard], 11, at + 124), 8) // 512) * 512
        assert at < first + count
    return shard, at + 512, int(os.pread(files[shard], 11, at + 124), 8)


def main() -> None:
    arm, tars, sets, report = sys.argv[1], Path(sys.argv[2]), Path(sys.argv[3]), sys.argv[4]
    torch.set_num_threads(1)
    (_by_hand if arm == "ceiling" else _timed)(arm, tars, sets, report)


def _timed(arm: str, tars: Path, sets: Path, report: str) -> None:
    made = iter(globals()[arm](tars, sets))
    for batch in islice(made, WARM):
        assert tuple(batch.shape[1:]) == (3, 32, 32), batch.shape
    begun_s, before_s, images = time.perf_counter(), _cpu_s(), 0
    for batch in islice(made, TIMED):
        images += len(batch)
        float(batch[0, 0, 0, 0])
    took_s, used_s = time.perf_counter() - begun_s, _cpu_s() - before_s
    write_report(
        report, {"wall_s_per_sample": took_s / images, "cpu_s_per_sample": used_s / images}
    )
    sys.stdout.flush()
    os._exit(0)  # some peers take seconds to end their workers


def _by_hand(arm: str, tars: Path, sets: Path, report: str) -> None:
    read = ceiling(tars, sets)
    for number in range(4):
        read(number)
    begun_s, children = time.perf_counter(), []
    for worker in range(WORKERS):
        child = os.fork()
        if child == 0:
            for number in range(worker, TIMED, WORKERS):
                read(number)
            os._exit(0)
        children.append(child)
    used_s = sum(sum(os.wait4(child, 0)[2][:2]) for child in children)
    images = TIMED * BATCH
    took_s = time.perf_counter() - begun_s
    write_report(
        report, {"wall_s_per_sample": took_s / images, "cpu_s_per_sample": used_s / images}
    )


def _cpu_s() -> float:
    """Of this process and all that it began."""
    processes = [psutil.Process(), *psutil.Process().children(recursive=True)]
    return sum(sum(each.cpu_times()[:2]) for each in processes)


if __name__ == "__main__":
    main()
