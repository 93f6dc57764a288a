"""Resizing of images, bilinear with antialiasing, by torch's kernel for uint8.

`random_resized_crop` resizes a different box of each image. It calls the kernel once per image, in
a loop over the batch. On one core, a call takes 20 µs for 32 x 32 pixels and 0.1 ms for 224 x 224.
Two matmuls of the whole batch with weight matrices took 5 to 350 times as long.
"""

# B batch, H height, W width, C channels, K tries

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from surefoot.components.data.order import Keys
from surefoot.components.data.transforms.checks import check_images, check_range, check_size
from surefoot.core.errors import DataError

TRIES = 10  # boxes drawn for an image before the middle is used
MAX_RATIO = 100.0


def resize(images_BHWC: Tensor, height: int, width: int) -> Tensor:
    """Return the images resized to (height, width), with the same dtype."""
    check_images(images_BHWC)
    check_size("a size", height, width)
    if images_BHWC.shape[1:3] == (height, width):
        return images_BHWC
    return (
        _interpolate(images_BHWC.permute(0, 3, 1, 2), height, width)
        .permute(0, 2, 3, 1)
        .contiguous()
    )


def center_crop(images_BHWC: Tensor, height: int, width: int) -> Tensor:
    """Return the middle `height` x `width` pixels of the images.

    The position is rounded as in torchvision. Raises DataError for images smaller than the crop.
    """
    check_images(images_BHWC)
    check_size("a crop", height, width)
    _, rows, columns, _ = images_BHWC.shape
    if height > rows or width > columns:
        raise DataError(
            f"a crop of {height} x {width} is larger than images of {rows} x {columns}",
            hint="resize them first, or crop less",
        )
    top, left = round((rows - height) / 2), round((columns - width) / 2)
    return images_BHWC[:, top : top + height, left : left + width].contiguous()


def random_resized_crop(images_BHWC: Tensor, boxes_B4: Tensor, height: int, width: int) -> Tensor:
    """Crop one box of each image, and resize it to (height, width); keep the dtype.

    `boxes_B4` (int64) has (top, left, rows, columns) of each box. `draw_boxes` returns random
    boxes.
    """
    check_images(images_BHWC)
    check_size("a size", height, width)
    resized = images_BHWC.new_empty(len(images_BHWC), height, width, images_BHWC.shape[3])
    source, target = images_BHWC.permute(0, 3, 1, 2), resized.permute(0, 3, 1, 2)
    for number, (top, left, rows, columns) in enumerate(boxes_B4.tolist()):
        window = source[number : number + 1, :, top : top + rows, left : left + columns]
        target[number : number + 1] = _interpolate(window, height, width)
    return resized


def draw_boxes(
    keys: Keys, rows: int, columns: int, scale: tuple[float, float], ratio: tuple[float, float]
) -> Tensor:
    """Draw one random box (top, left, rows, columns) per sample, (B, 4) int64.

    The distribution is that of torchvision's RandomResizedCrop. The area is a share of the image's
    area, drawn from the range `scale`. The aspect ratio (width / height) is drawn from the range
    `ratio`, uniformly in the logarithm. The first of 10 such boxes that fits into the image is put
    at a random position. If none fits, the box is in the middle of the image, as large as `ratio`
    allows.
    """
    wide, high = draw_sides(keys, rows * columns, scale, ratio)
    fits = (wide >= 1) & (wide <= columns) & (high >= 1) & (high <= rows)
    boxes = place_boxes(keys, high, wide, fits, rows, columns)
    return torch.where(
        fits.any(1, keepdim=True), boxes, torch.tensor(_middle(rows, columns, ratio))
    )


def draw_sides(
    keys: Keys, num_pixels: int, scale: tuple[float, float], ratio: tuple[float, float]
) -> tuple[Tensor, Tensor]:
    """Draw the sides of 10 random boxes per sample, as two tensors (B, 10) int64.

    The area of a box is a share of `num_pixels`, drawn from the range `scale`. The first side
    divided by the second is drawn from the range `ratio`, uniformly in the logarithm.
    """
    area_BK = _spread(keys.uniform(TRIES, stream=0), *scale) * num_pixels
    aspect_BK = _spread(keys.uniform(TRIES, stream=1), *map(math.log, ratio)).exp()
    return (
        (area_BK * aspect_BK).sqrt().round().long(),
        (area_BK / aspect_BK).sqrt().round().long(),
    )


def place_boxes(
    keys: Keys, high_BK: Tensor, wide_BK: Tensor, fits_BK: Tensor, rows: int, columns: int
) -> Tensor:
    """Put the first box of each sample that fits at a random position in the image.

    Args:
        keys: Random draws of the batch.
        high_BK: Heights of the K boxes of each sample.
        wide_BK: Widths of these boxes.
        fits_BK: True for the boxes that fit.
        rows: Height of the image.
        columns: Width of the image.

    Returns:
        The box (top, left, rows, columns) of each sample, (B, 4) int64. If no box of a sample fits,
            its row is meaningless.
    """
    first = fits_BK.long().argmax(1, keepdim=True)
    size = torch.cat([high_BK.gather(1, first), wide_BK.gather(1, first)], dim=1)
    free = (torch.tensor([rows, columns]) - size).clamp(min=0)
    corner = torch.minimum((keys.uniform(2, stream=2) * (free + 1)).long(), free)
    return torch.cat([corner, size], dim=1)


def _spread(uniform: Tensor, low: float, high: float) -> Tensor:
    return low + (high - low) * uniform.double()


def _middle(rows: int, columns: int, ratio: tuple[float, float]) -> tuple[int, int, int, int]:
    high, wide = rows, columns
    if columns / rows < ratio[0]:
        high = min(rows, max(1, round(columns / ratio[0])))
    elif columns / rows > ratio[1]:
        wide = min(columns, max(1, round(rows * ratio[1])))
    return (rows - high) // 2, (columns - wide) // 2, high, wide


def _interpolate(images_BCHW: Tensor, height: int, width: int) -> Tensor:
    # only the CPU has a kernel for uint8
    if images_BCHW.dtype == torch.uint8 and images_BCHW.device.type != "cpu":
        return (
            _interpolate(images_BCHW.float(), height, width).round().clamp(0, 255).to(torch.uint8)
        )
    return F.interpolate(images_BCHW, (height, width), mode="bilinear", antialias=True)


@dataclass(frozen=True)
class Resize:
    """Pipeline step that resizes images to (height, width), bilinear with antialiasing.

    Args:
        height: Rows of the result, in pixels.
        width: Columns of the result, in pixels.
    """

    height: int
    width: int

    def __post_init__(self) -> None:
        check_size("a size", self.height, self.width)

    def __call__(self, images_BHWC: Tensor, keys: Keys) -> Tensor:
        return resize(images_BHWC, self.height, self.width)

    def settled(self) -> tuple[Any, ...]:
        """Return `(self,)`, because evaluation uses this step unchanged."""
        return (self,)


@dataclass(frozen=True)
class CenterCrop:
    """Pipeline step that crops the middle of the images.

    Args:
        height: Rows of the crop, in pixels.
        width: Columns of the crop, in pixels.
    """

    height: int
    width: int

    def __post_init__(self) -> None:
        check_size("a crop", self.height, self.width)

    def __call__(self, images_BHWC: Tensor, keys: Keys) -> Tensor:
        return center_crop(images_BHWC, self.height, self.width)

    def settled(self) -> tuple[Any, ...]:
        """Return `(self,)`, because evaluation uses this step unchanged."""
        return (self,)


@dataclass(frozen=True)
class Crop:
    """Random crop of each image, resized to (height, width), like torchvision's RandomResizedCrop.

    The defaults are torchvision's.

    Args:
        height: Rows of the result, in pixels.
        width: Columns of the result, in pixels.
        scale: Range of the area of the crop, as a share of the area of the image.
        ratio: Range of the width of the crop divided by its height.
        kept: Share of each side that the center crop in evaluation retains. Images are first
            resized to (`height / kept`, `width / kept`), which is 256 for 224 pixels.

    Raises:
        DataError: If a size or a range is out of bounds.
    """

    height: int
    width: int
    scale: tuple[float, float] = (0.08, 1.0)
    ratio: tuple[float, float] = (3 / 4, 4 / 3)
    kept: float = field(default=0.875, kw_only=True)

    def __post_init__(self) -> None:
        check_size("a size", self.height, self.width)
        check_range("the scale", self.scale, 1e-6, 1.0)
        check_range("the ratio", self.ratio, 1 / MAX_RATIO, MAX_RATIO)
        check_range("the part that evaluation keeps", (self.kept, self.kept), 0.01, 1.0)

    def __call__(self, images_BHWC: Tensor, keys: Keys) -> Tensor:
        check_images(images_BHWC)
        boxes_B4 = draw_boxes(
            keys, images_BHWC.shape[1], images_BHWC.shape[2], self.scale, self.ratio
        )
        return random_resized_crop(images_BHWC, boxes_B4, self.height, self.width)

    def settled(self) -> tuple[Any, ...]:
        """Return the steps for evaluation: a resize to a larger size, and a crop of the middle."""
        larger = Resize(round(self.height / self.kept), round(self.width / self.kept))
        return larger, CenterCrop(self.height, self.width)
