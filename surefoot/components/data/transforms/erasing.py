"""Transforms that paint over parts of images: random erasing and cutout."""

# B batch, H height, W width, C channels, K tries

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from surefoot.components.data.order import Keys
from surefoot.components.data.transforms.checks import check_images, check_range, check_size
from surefoot.components.data.transforms.resizing import MAX_RATIO, draw_sides, place_boxes
from surefoot.core.errors import DataError


def erase(images_BHWC: Tensor, boxes_B4: Tensor, value: float | Sequence[float] = 0) -> Tensor:
    """Return a copy of the images in which one box per image is painted over.

    `boxes_B4` has (top, left, rows, columns) of each box. `value` is the color of the boxes: one
    number, or one number per channel. Parts of a box outside the image are ignored.
    """
    check_images(images_BHWC)
    channels = images_BHWC.shape[3]
    color = torch.as_tensor(value, dtype=images_BHWC.dtype)
    if color.ndim > 1 or color.numel() not in (1, channels):
        raise DataError(
            f"{value} is not a color of {channels} channels",
            hint="pass one number, or one per channel",
        )
    painted = images_BHWC.clone()
    for image, (top, left, rows, columns) in zip(painted, boxes_B4.tolist(), strict=True):
        image[max(0, top) : max(0, top + rows), max(0, left) : max(0, left + columns)] = color
    return painted


def cutout(
    images_BHWC: Tensor, centers_B2: Tensor, size: int, value: float | Sequence[float] = 0
) -> Tensor:
    """Return a copy of the images in which one square per image is painted over (DeVries, 2017).

    The squares have sides of `size` pixels. `centers_B2` has the (row, column) of each center, and
    `value` is the color: one number, or one per channel. Parts of a square outside the image are
    ignored.
    """
    corners = centers_B2 - size // 2
    return erase(images_BHWC, torch.cat([corners, torch.full_like(corners, size)], dim=1), value)


@dataclass(frozen=True)
class Erase:
    """Random erasing of a box in some of the images, like torchvision's RandomErasing.

    The defaults are torchvision's (Zhong et al., 2017). Of 10 random boxes, the first one that fits
    into the image is used; if none fits, the image is unchanged. In evaluation, images are
    unchanged.

    Args:
        probability: Probability that a box of an image is painted over.
        scale: Range of the area of the box, as a share of the area of the image.
        ratio: Range of the height of the box divided by its width.
        value: Color of the box, one number or one per channel, in the units of the images.

    Raises:
        DataError: If the probability or a range is out of bounds.
    """

    probability: float = 0.5
    scale: tuple[float, float] = (0.02, 0.33)
    ratio: tuple[float, float] = (0.3, 3.3)
    value: float | tuple[float, ...] = 0

    def __post_init__(self) -> None:
        check_range("a probability", (0.0, self.probability), 0.0, 1.0)
        check_range("the scale", self.scale, 0.0, 1.0)
        check_range("the ratio", self.ratio, 1 / MAX_RATIO, MAX_RATIO)

    def __call__(self, images_BHWC: Tensor, keys: Keys) -> Tensor:
        check_images(images_BHWC)
        return erase(
            images_BHWC, self.draw(keys, images_BHWC.shape[1], images_BHWC.shape[2]), self.value
        )

    def draw(self, keys: Keys, height: int, width: int) -> Tensor:
        """Draw the box to paint in each image: (top, left, rows, columns), (B, 4) int64.

        For an image that is not to be painted, all four numbers are 0.
        """
        rows, columns = draw_sides(keys, height * width, self.scale, self.ratio)
        fits = (rows < height) & (columns < width)
        boxes = place_boxes(keys, rows, columns, fits, height, width)
        chosen = fits.any(1, keepdim=True) & (keys.uniform(stream=3) < self.probability)
        return torch.where(chosen, boxes, 0)

    def settled(self) -> tuple[Any, ...]:
        """Return (), because this step is left out in evaluation."""
        return ()


@dataclass(frozen=True)
class Cutout:
    """Pipeline step that paints over a square around a random pixel of each image.

    The method is that of DeVries and Taylor, 2017. In evaluation, images are unchanged.

    Args:
        size: Side of the square, in pixels.
        value: Color of the square, one number or one per channel, in the units of the images.
    """

    size: int
    value: float | tuple[float, ...] = 0

    def __post_init__(self) -> None:
        check_size("a square", self.size)

    def __call__(self, images_BHWC: Tensor, keys: Keys) -> Tensor:
        check_images(images_BHWC)
        rows, columns = (
            keys.integers(0, size, stream=number)
            for number, size in enumerate(images_BHWC.shape[1:3])
        )
        return cutout(images_BHWC, torch.cat([rows, columns], dim=1), self.size, self.value)

    def settled(self) -> tuple[Any, ...]:
        """Return (), because this step is left out in evaluation."""
        return ()
