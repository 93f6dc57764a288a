"""Source of images in folders, one per class; images are decoded when they are read."""

# B batch, H height, W width

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
from torch import Tensor

from surefoot.components.data.order import check_ids
from surefoot.components.data.tars.decoders import IMAGES, decode
from surefoot.components.data.tars.shards import MAX_MEMBER_BYTES, Sample
from surefoot.components.data.tars.source import Transform, make_batch, time_stages
from surefoot.contract.task import Guarantee
from surefoot.core.errors import DataError
from surefoot.core.place import whole_path


class ImageFolder:
    """Source of images in one subfolder per class: `folder/cat/1.jpg` has the class `cat`.

    A batch is a dict of `images` (B, H, W, 3) uint8 and `labels` (B,) int64. Classes are numbered
    in the order of their names, and `classes` contains these names. Images may also be in deeper
    subfolders of a class. The formats are jpg, jpeg, png and webp; names that begin with a dot are
    ignored.

    Args:
        folder: The folder that contains the subfolders.
        transform: Function of the dict of each sample, called before batching, for example to bring
            images to one size.
        follow_links: Follow symbolic links, even out of the folder; otherwise, a link is an error.

    Raises:
        DataError: For a folder without classes, a class without images, and any file that is not an
            image. On reading, for images that are damaged, too large or of different sizes.
    """

    guarantee: Guarantee = "proven"
    thread_safe = True

    def __init__(
        self, folder: str | Path, *, transform: Transform | None = None, follow_links: bool = False
    ) -> None:
        self.folder, self._transform = whole_path(folder), transform
        files: list[tuple[str, int]] = []
        labels: list[int] = []
        try:
            self.classes = tuple(_find_classes(self.folder, follow_links))
            for label, name in enumerate(self.classes):
                found = sorted(_find_images(self.folder, name, follow_links, ()))
                if not found:
                    raise DataError(
                        f"{self.folder / name} contains no image",
                        hint=f"put {', '.join(IMAGES)} there, or remove it",
                    )
                files += found
                labels += [label] * len(found)
        except OSError as error:
            raise DataError(
                f"{error.filename or self.folder} cannot be read: {error.strerror}",
                hint="check the name, and your permission to read it",
            ) from None
        self.names, self.sizes, self._labels = (
            [name for name, _ in files],
            [size for _, size in files],
            labels,
        )
        self.digest = hashlib.sha256(
            "\n".join(f"{name} {size}" for name, size in files).encode("utf-8", "surrogateescape")
        ).hexdigest()

    def __len__(self) -> int:
        return len(self.names)

    def read(self, ids: np.ndarray) -> dict[str, Tensor | list[Any]]:
        samples = self._fetch(ids)
        return make_batch(self._decode(ids, samples), samples, self._transform)

    def explain(self, ids: np.ndarray) -> dict[str, float]:
        """Return the seconds that reading, decoding and transforming these images take."""
        return time_stages(
            lambda: self._fetch(ids), lambda samples: self._decode(ids, samples), self._transform
        )

    def _fetch(self, ids: np.ndarray) -> list[Sample]:
        ids = check_ids(ids, len(self))
        return [self.content(number) for number in ids.tolist()]

    def _decode(self, ids: np.ndarray, samples: list[Sample]) -> Iterator[dict[str, Any]]:
        for number, sample in zip(ids.tolist(), samples, strict=True):
            image = decode(sample, next(iter(sample.parts)))
            yield {"images": image, "labels": self._labels[number]}

    def describe(self) -> str:
        return (
            f"{len(self):,} images of {len(self.classes):,} classes in {self.folder.name}, "
            f"{sum(self.sizes) / 1e9:.3g} GB"
        )

    def label(self, number: int) -> int:
        """Return the class index of the image with this number."""
        return self._labels[number]

    def content(self, number: int) -> Sample:
        """Return the bytes of the file of the image with this number, as a sample.

        Raises DataError if the size of the file has changed since the folder was listed.
        """
        name, size = self.names[number], self.sizes[number]
        try:
            with (self.folder / name).open("rb") as file:
                content = file.read(size + 1)
        except OSError as error:
            raise DataError(
                f"{self.folder / name} cannot be read: {error.strerror}",
                hint="check that the file still exists",
            ) from None
        if len(content) != size:
            raise DataError(
                f"{self.folder / name} had {size:,} bytes when the folder was listed",
                hint="do not change images during training",
            )
        key, _, extension = name.rpartition(".")
        return Sample(self.folder, key, {extension.lower(): content})


def _find_classes(folder: Path, follow_links: bool) -> list[str]:
    names = []
    for entry in os.scandir(folder):
        if entry.name.startswith("."):
            continue
        _check_link(entry, follow_links)
        if not entry.is_dir():
            raise DataError(
                f"{entry.path} is not in the folder of a class",
                hint="put each image into the folder of its class: cat/1.jpg",
            )
        names.append(entry.name)
    if not names:
        raise DataError(
            f"{folder} contains no class folder",
            hint="put each image into the folder of its class: cat/1.jpg",
        )
    return sorted(names)


def _find_images(
    folder: Path, below: str, follow_links: bool, above: tuple[str, ...]
) -> Iterator[tuple[str, int]]:
    """Yield the name and the size in bytes of each image below the folder `below`.

    `above` are the real paths of its parent folders, to detect cycles of links. Names are relative
    to `folder`.
    """
    real = os.path.realpath(folder / below)
    if real in above:
        raise DataError(
            f"{folder / below} leads back to {real}", hint="remove the link that forms a cycle"
        )
    for entry in os.scandir(folder / below):
        if entry.name.startswith("."):
            continue
        _check_link(entry, follow_links)
        name = f"{below}/{entry.name}"
        if entry.is_dir():
            yield from _find_images(folder, name, follow_links, (*above, real))
            continue
        if entry.name.rpartition(".")[2].lower() not in IMAGES or not entry.is_file():
            raise DataError(
                f"{entry.path} is not an image",
                hint=f"images are files named {', '.join(IMAGES)}; move all other files away",
            )
        size = entry.stat().st_size
        if not 0 < size <= MAX_MEMBER_BYTES:
            raise DataError(
                f"{entry.path} has {size:,} bytes", hint=f"an image has 1 to {MAX_MEMBER_BYTES:,}"
            )
        yield name, size


def _check_link(entry: os.DirEntry[str], follow_links: bool) -> None:
    if entry.is_symlink() and not follow_links:
        hint = "give follow_links=True if you trust its target, or replace the link with the file"
        raise DataError(f"{entry.path} is a link to {os.readlink(entry.path)}", hint=hint)
