"""CIFAR-10: 60,000 photos of 32 x 32 pixels in 10 classes, and a small, fast convolutional net.

A. Krizhevsky, "Learning Multiple Layers of Features from Tiny Images", 2009. The net and its parts
(frozen whitening filters, identity initialization, alternating flip, averaging over views in
evaluation) follow K. Jordan, "94% on CIFAR-10 in 3.29 Seconds on a Single GPU", 2024, and its Muon
variant (https://github.com/KellerJordan/cifar10-airbench).
"""

# B batch, H height, W width, C channels, P patches, N numbers of a patch

from __future__ import annotations

import dataclasses
from collections import OrderedDict
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from surefoot.components.data.decoded import open_decoded
from surefoot.components.data.sources.arrays import Arrays
from surefoot.components.data.tars.decoders import decode_class, decode_jpeg
from surefoot.components.data.tars.shards import find_shards, read_shard
from surefoot.components.data.transforms.moving import mirror, reflect_pad, translate
from surefoot.components.metrics import Mean, accuracy
from surefoot.contract.task import Loss
from surefoot.core.errors import DataError, TaskError
from surefoot.core.place import cache_folder, whole_path

if TYPE_CHECKING:
    from surefoot.components.data.order import Keys

__all__ = ["Cifar10"]

SIZE, NUM_CLASSES = 32, 10
HOME = "cifar10-webdataset"
SPLITS = ("train", "test")
DECODER = "cifar10 jpg+cls 1"  # a different number when what is decoded changes
# of red, green, blue over the training images, 0 to 255
PIXEL_MEAN, PIXEL_DEVIATION = (125.3, 123.0, 113.9), (62.5, 61.9, 66.5)
NUM_WHITENED = 2000  # images whose patches, 1.9 million, give the whitening filters
WHITENING_FLOOR = 5e-4  # added to each variance, so that the faintest directions are not blown up
MAX_MEMBER_BYTES = 1 << 20  # a 32 x 32 JPEG has about 1 KB


class Cifar10:
    """CIFAR-10 classification from WebDataset tars.

    Batches are (images uint8 (B, 32, 32, 3), labels (B,)).

    Args:
        folder: Folder with train-*.tar and test-*.tar, or with a folder cifar10-webdataset that
            contains them.
        cache: Folder in which decoded images are stored; None for $XDG_CACHE_HOME/surefoot.
        widths: Channels of the three blocks.
        translate: Largest random shift, in pixels.
        smoothing: Label smoothing.
        views: Number of views averaged in evaluation: 1, 2 (mirrored) or 6 (mirrored and shifted).

    Raises:
        DataError: For damaged shards.
        MissingExtra: Without Pillow.
    """

    def __init__(
        self,
        folder: str | None = None,
        cache: str | None = None,
        widths: tuple[int, int, int] = (64, 256, 256),
        translate: int = 2,
        smoothing: float = 0.2,
        views: int = 6,
    ) -> None:
        if (
            len(widths) != 3
            or min(widths) < 1
            or not 0 <= translate < SIZE
            or not 0 <= smoothing < 1
            or views not in (1, 2, 6)
        ):
            raise TaskError(
                f"cifar10 with widths {list(widths)}, translate {translate}, "
                f"smoothing {smoothing}, views {views} cannot be built",
                hint=(
                    f"use 3 positive widths, 0 <= translate < {SIZE}, 0 <= smoothing < 1, "
                    "and 1, 2 or 6 views"
                ),
            )
        self.folder = None if folder is None else str(whole_path(folder))
        self.cache = whole_path(cache) if cache else cache_folder() / "cifar10"
        self.widths, self.translate, self.smoothing, self.views = (
            tuple(widths),
            translate,
            smoothing,
            views,
        )
        self._sources: dict[str, Arrays] = {}

    def data(self, split: str) -> Arrays:
        if split not in SPLITS:
            raise DataError(f"cifar10 has no split {split!r}", hint='use "train" or "test"')
        if split not in self._sources:
            shards = find_shards(self.folder, f"{split}-*.tar", home=HOME)
            decoded = open_decoded(shards, self.cache, decoder=DECODER, decode=_decode_shard)
            source = Arrays(decoded.arrays["images"], decoded.arrays["labels"].astype(np.int64))
            source.digest = decoded.digest
            self._sources[split] = source
        return self._sources[split]

    def model(self) -> nn.Module:
        train = self.data("train")
        images, _ = train.read(np.arange(min(NUM_WHITENED, len(train)), dtype=np.int64))
        normalize = NormalizeImages()
        whiten = Whiten(find_whitening_filters(normalize(images)))
        sizes = [whiten.num_channels, *self.widths]
        blocks = [
            (f"block{number}", ResidualBlock(sizes[number - 1], sizes[number]))
            for number in (1, 2, 3)
        ]
        head = nn.Linear(self.widths[-1], NUM_CLASSES, bias=False)
        pool = nn.MaxPool2d(3)  # 32 pixels: 31 whitened, 15, 7, 3, 1
        return nn.Sequential(
            OrderedDict(
                normalize=normalize,
                whiten=whiten,
                **dict(blocks),
                pool=pool,
                flatten=nn.Flatten(),
                head=head,
            )
        )

    def augment(self, batch: tuple[Tensor, Tensor], keys: Keys) -> tuple[Tensor, Tensor]:
        """Shift each image by a random offset, and mirror half of the images.

        The images that are not mirrored in one epoch are mirrored in the next epoch.
        """
        images, labels = batch
        if self.translate:
            images = translate(
                images,
                keys.integers(0, 2 * self.translate + 1, 2),
                self.translate,
            )
        # alternating flip (Jordan 2024): drawn once for each sample, then alternated, so that two
        # epochs have both orientations of every image
        first = dataclasses.replace(keys, epoch=0).integers(0, 2, stream=1)[:, 0]
        return mirror(images, (first + keys.epoch) % 2 == 1), labels

    def forward(self, model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
        """Return class scores (B, 10); in evaluation, they are averaged over several views.

        The shifted views together have half of the weight.
        """
        images = batch[0]
        if model.training or self.views == 1:
            return _mean_scores(model, images)
        here = _mean_scores(model, images, images.flip(2))
        if self.views == 2:
            return here
        padded = reflect_pad(images, 1)
        up_left, down_right = padded[:, :SIZE, :SIZE], padded[:, 2:, 2:]
        shifted = _mean_scores(model, up_left, up_left.flip(2), down_right, down_right.flip(2))
        return torch.lerp(here, shifted, 0.5)

    def loss(self, output: Tensor, batch: tuple[Tensor, Tensor]) -> Loss:
        """Return the cross-entropy with label smoothing, which is also used in evaluation.

        Because of the smoothing, its minimum is above 0.
        """
        total = F.cross_entropy(
            output.float(), batch[1], label_smoothing=self.smoothing, reduction="sum"
        )
        return Loss.sum(total, len(batch[1]))

    def metrics(self, output: Tensor, batch: tuple[Tensor, Tensor]) -> dict[str, Mean]:
        return {"accuracy": accuracy(output, batch[1])}


def _decode_shard(shard: Path) -> dict[str, np.ndarray]:
    images, labels = [], []
    for sample in read_shard(shard, needs=("jpg", "cls"), max_member_bytes=MAX_MEMBER_BYTES):
        images.append(decode_jpeg(sample, height=SIZE, width=SIZE))
        labels.append(decode_class(sample, num_classes=NUM_CLASSES))
    return {"images": np.stack(images), "labels": np.array(labels, dtype=np.uint8)}


def _mean_scores(model: nn.Module, *views: Tensor) -> Tensor:
    return torch.stack([model(view) for view in views]).mean(0)


def find_whitening_filters(images_BCHW: Tensor) -> Tensor:
    """Return filters (12, 3, 2, 2) that whiten 2 x 2 patches of the images.

    The filters are the principal axes of the patches, divided by the standard deviations.
    """
    patches_PN = (
        images_BCHW.unfold(2, 2, 1).unfold(3, 2, 1).permute(0, 2, 3, 1, 4, 5).reshape(-1, 12)
    )
    variances_N, axes_NN = torch.linalg.eigh((patches_PN.T @ patches_PN / len(patches_PN)).double())
    filters: Tensor = axes_NN.T / (variances_N[:, None] + WHITENING_FLOOR).sqrt()
    return filters.reshape(12, 3, 2, 2).float()


class NormalizeImages(nn.Module):
    """Conversion of uint8 (B, H, W, C) to float (B, C, H, W) with mean 0 and variance 1.

    The result is channels last in memory, which is fastest for convolutions on a CPU.
    """

    mean: Tensor
    deviation: Tensor

    def __init__(self) -> None:
        super().__init__()
        # a whole row at once: three channels alone are too short a run for vector instructions, and
        # take 3 times as long
        self.register_buffer("mean", torch.tensor(PIXEL_MEAN).repeat(SIZE), persistent=False)
        self.register_buffer(
            "deviation", torch.tensor(PIXEL_DEVIATION).repeat(SIZE), persistent=False
        )

    def forward(self, images_BHWC: Tensor) -> Tensor:
        rows = images_BHWC.flatten(2).float()
        return rows.sub_(self.mean).div_(self.deviation).view(images_BHWC.shape).permute(0, 3, 1, 2)


class Whiten(nn.Module):
    """Convolution with fixed whitening filters and their negatives; only the bias is trained."""

    filters: Tensor

    def __init__(self, filters: Tensor) -> None:
        super().__init__()
        self.register_buffer("filters", torch.cat([filters, -filters]))
        self.num_channels = len(self.filters)
        self.bias = nn.Parameter(torch.zeros(self.num_channels))

    def forward(self, images_BCHW: Tensor) -> Tensor:
        return F.silu(F.conv2d(images_BCHW, self.filters, self.bias))


class ResidualBlock(nn.Module):
    """A 3 x 3 convolution with max pooling, then two convolutions with a residual connection.

    The weights are initialized with `nn.init.dirac_`, so that the block starts near the identity.
    """

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__()
        self.conv1, self.norm1 = _convolution(inputs, outputs), nn.BatchNorm2d(outputs)
        self.conv2, self.norm2 = _convolution(outputs, outputs), nn.BatchNorm2d(outputs)
        self.conv3, self.norm3 = _convolution(outputs, outputs), nn.BatchNorm2d(outputs)

    def forward(self, x: Tensor) -> Tensor:
        x = F.silu(self.norm1(F.max_pool2d(self.conv1(x), 2)))
        y = F.silu(self.norm2(self.conv2(x)))
        return x + F.silu(self.norm3(self.conv3(y)))


def _convolution(inputs: int, outputs: int) -> nn.Conv2d:
    made = nn.Conv2d(inputs, outputs, 3, padding=1, bias=False)
    nn.init.dirac_(made.weight.data[:inputs])
    return made
