"""Checks of the arguments of the transforms."""

from __future__ import annotations

from torch import Tensor

from surefoot.core.errors import DataError


def check_images(images_BHWC: Tensor) -> None:
    """Raise DataError unless the tensor is (B, H, W, C), uint8 or floating point.

    The values are not checked. They should be from 0 to 255 (uint8) or from 0 to 1 (floating
    point).
    """
    if images_BHWC.ndim != 4 or not (
        images_BHWC.dtype.is_floating_point or str(images_BHWC.dtype) == "torch.uint8"
    ):
        raise DataError(
            f"a tensor {tuple(images_BHWC.shape)} of {images_BHWC.dtype} is not a batch of images",
            hint="pass (B, H, W, C), uint8 from 0 to 255 or float from 0 to 1",
        )


def check_colors(images_BHWC: Tensor) -> None:
    """Raise DataError unless the tensor is a batch of RGB images (B, H, W, 3)."""
    check_images(images_BHWC)
    if images_BHWC.shape[-1] != 3:
        raise DataError(
            f"images {tuple(images_BHWC.shape)} have {images_BHWC.shape[-1]} channels",
            hint="give 3 in the last dimension: red, green and blue",
        )


def check_range(what: str, given: tuple[float, float], low: float, high: float) -> None:
    """Raise DataError unless low <= given[0] <= given[1] <= high.

    `what` names the range in the error message.
    """
    if len(given) != 2 or not low <= given[0] <= given[1] <= high:
        raise DataError(
            f"{what} of {given} is not a valid range",
            hint=f"give (least, most), with {low:g} <= least <= most <= {high:g}",
        )


def check_size(what: str, *sizes: int) -> None:
    """Raise DataError unless all sizes are integers of 1 or more.

    `what` names the sizes in the error message.
    """
    if not all(isinstance(size, int) and size >= 1 for size in sizes):
        raise DataError(
            f"{what} of {' x '.join(map(str, sizes))} pixels is not possible",
            hint="pass integers of 1 or more",
        )
