"""Batches for `cifar10`, augmented and normalized, from the same decoded uint8 map.

They are made in surefoot's way, and in two by hand.
Every arm gives float32 (B, 3, 32, 32), each image moved by up to 2 pixels (its border mirrored) and
half of them mirrored.
"""

# B batch, H height, W width, C channels

from __future__ import annotations

import sys
from collections.abc import Iterator
from functools import cache

import numpy as np
import torch
from torch import Tensor

from surefoot.components.data.blocks import Order
from surefoot.components.data.feed import Feed
from surefoot.components.data.order import Keys
from surefoot.tasks.cifar10 import PIXEL_DEVIATION, PIXEL_MEAN, Cifar10, NormalizeImages
from surefoot.trial import Clock, write_report

BATCH, SHIFT, SIZE = 250, 2, 32
EPOCHS = 2  # timed, after one that is not
MEAN, DEVIATION = (torch.tensor(values).view(3, 1, 1) for values in (PIXEL_MEAN, PIXEL_DEVIATION))


def surefoot(task: Cifar10, epochs: int) -> Iterator[Tensor]:
    """Sample order, gather, augmentation keyed by sample, normalization.

    What a step of the run does before its model.
    """
    source, normalize = task.data("train"), NormalizeImages()
    feed = Feed(source, Order(len(source), 0), batch=BATCH)
    for step in range(epochs * feed.steps_per_epoch):
        window = feed.window(step)
        images, _ = task.augment(source.read(window.ids), Keys(0, window.epoch, window.ids))
        yield normalize(images)


def by_windows(task: Cifar10, epochs: int) -> Iterator[Tensor]:
    """Slices of the map in the order they lie.

    Every shift of every image as a view, one fancy index takes the wanted ones.
    """
    for batch, corners, flips in _slices(task, epochs):
        padded = _pad(batch)
        image, row, column, channel = padded.strides
        shape, strides = (
            (len(batch), 5, 5, *batch.shape[1:]),
            (image, row, column, row, column, channel),
        )
        windows = np.lib.stride_tricks.as_strided(padded, shape, strides, writeable=False)
        moved = windows[np.arange(len(batch)), corners[:, 0], corners[:, 1]]
        moved[flips] = moved[flips, :, ::-1]
        yield _normalize(moved)


def by_image(task: Cifar10, epochs: int) -> Iterator[Tensor]:
    """The same slices, one image after the other.

    Not vectorised at all, and as fast on bytes this small.
    """
    for batch, corners, flips in _slices(task, epochs):
        padded, moved = _pad(batch), np.empty_like(batch)
        for number, (row, column) in enumerate(corners):
            window = padded[number, row : row + SIZE, column : column + SIZE]
            moved[number] = window[:, ::-1] if flips[number] else window
        yield _normalize(moved)


def _slices(task: Cifar10, epochs: int) -> Iterator[tuple[np.ndarray, np.ndarray, np.ndarray]]:
    """Slices of the decoded map, not copied, and what is drawn for them.

    Corners (B, 2), flips (B,).
    """
    images, draws = _map(task), np.random.default_rng(0)
    for _ in range(epochs):
        for start in range(0, len(images), BATCH):
            batch_BHWC = images[start : start + BATCH]
            yield (
                batch_BHWC,
                draws.integers(0, 2 * SHIFT + 1, (len(batch_BHWC), 2)),
                draws.random(len(batch_BHWC)) < 0.5,
            )


def _pad(batch_BHWC: np.ndarray) -> np.ndarray:
    return np.pad(batch_BHWC, ((0, 0), (SHIFT, SHIFT), (SHIFT, SHIFT), (0, 0)), mode="reflect")


def _normalize(batch_BHWC: np.ndarray) -> Tensor:
    return torch.from_numpy(batch_BHWC).permute(0, 3, 1, 2).float().sub_(MEAN).div_(DEVIATION)


@cache
def _map(task: Cifar10) -> np.ndarray:
    """All training images (50,000, 32, 32, 3), decoded, in memory.

    By hand nothing is paid for reading the map.
    """
    images: np.ndarray = task.data("train").read(np.arange(50_000))[0].numpy()
    return images


WAYS = {"surefoot": surefoot, "by_windows": by_windows, "by_image": by_image}


def main() -> None:
    name, folder, report = sys.argv[1:]
    torch.set_num_threads(1)
    task = Cifar10(folder=folder)
    batches = WAYS[name]
    _take(batches(task, 1))
    with Clock() as clock:
        num_samples = _take(batches(task, EPOCHS))
    write_report(
        report,
        {
            "cpu_s_per_sample": clock.cpu_s / num_samples,
            "samples_per_cpu_s": num_samples / clock.cpu_s,
        },
    )


def _take(batches: Iterator[Tensor]) -> int:
    total = 0
    for batch in batches:
        assert batch.shape[1:] == (3, SIZE, SIZE)
        assert batch.dtype == torch.float32
        total += len(batch)
    return total


if __name__ == "__main__":
    main()
