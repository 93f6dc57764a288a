"""Resizing of images: bilinear with antialiasing, by torch's kernel for uint8.

A separate window for each image is resized in a loop over the batch, with one call of that kernel
each, into one buffer: 20 µs for an image of 32 x 32, 0.1 ms for 224 x 224, on one core. Two matmuls
of the whole batch with weight matrices took 5 to 350 times as long.
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
    """Return the images resized to (height, width), in their dtype."""
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
    """Return the middle (height, width) of the images, rounded as in torchvision.

    Raises DataError for images that are smaller.
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
    """Return a box of each image resized to (height, width), in the dtype of the images.

    `boxes_B4` (int64) has the (top, left, rows, columns) of each box.
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
    """Return a random box (top, left, rows, columns) of each sample, (B, 4) int64.

    The definition is torchvision's. The area is drawn from `scale` of the image's area, the width
    over the height from `ratio`, uniformly in the logarithm; the first of 10 boxes that fit is put
    at a random position. If none fits the middle is used, as large as `ratio` allows.
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
    """Return the sides of 10 random boxes for each sample, (B, K) int64 each.

    The area is drawn from `scale` of `num_pixels`, the first side over the second from `ratio`,
    uniformly in the logarithm.
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
    """Return the first box that fits, at a random position: (top, left, rows, columns), (B, 4)."""
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
    """Resize of images to (height, width), bilinear with antialiasing.

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
        """Return the steps for evaluation: this step."""
        return (self,)


@dataclass(frozen=True)
class CenterCrop:
    """Crop of the middle of the images.

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
        """Return the steps for evaluation: this step."""
        return (self,)


@dataclass(frozen=True)
class Crop:
    """Random box of each image resized to (height, width): torchvision's RandomResizedCrop.

    The defaults are torchvision's.

    Args:
        height: Rows of the result, in pixels.
        width: Columns of the result, in pixels.
        scale: Range of the area of the box, as a share of the area of the image.
        ratio: Range of the width of the box over its height.
        kept: In evaluation, the images are resized to `height / kept`, `width / kept` (256 for 224
            pixels), and their middle is cropped.

    Raises:
        DataError: For sizes and ranges out of bounds.
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
