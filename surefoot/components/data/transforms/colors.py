"""Color transforms by torchvision's formulas, each image with its factor; normalization.

The transforms are brightness, contrast, saturation and hue. uint8 images stay uint8 after each of
the four, as in torchvision, so that values are truncated to integers each time.
"""

# B batch, H height, W width, C channels

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from surefoot.components.data.order import Keys
from surefoot.components.data.transforms.checks import check_colors, check_images, check_range
from surefoot.core.errors import DataError

GRAY = (0.2989, 0.587, 0.114)  # weights of red, green and blue
PIECE = 1 << 15  # pixels processed together: their float32 copies stay in the cache of a core
MAX_FACTOR = 10.0


def adjust_brightness(images_BHWC: Tensor, factors_B: Tensor) -> Tensor:
    """Multiply each image by its factor."""
    return _apply_in_pieces(images_BHWC, factors_B, lambda images, factors: images * factors)


def adjust_contrast(images_BHWC: Tensor, factors_B: Tensor) -> Tensor:
    """Blend each image with the mean of its gray values: 0 gives the mean, 1 the image."""

    def blend(images: Tensor, factors: Tensor) -> Tensor:
        mean = _gray(images, images_BHWC.dtype).mean((1, 2, 3), keepdim=True)
        return factors * images + (1 - factors) * mean

    return _apply_in_pieces(images_BHWC, factors_B, blend)


def adjust_saturation(images_BHWC: Tensor, factors_B: Tensor) -> Tensor:
    """Blend each pixel with its gray value: 0 gives gray, 1 the image."""
    return _apply_in_pieces(
        images_BHWC,
        factors_B,
        lambda images, factors: factors * images + (1 - factors) * _gray(images, images_BHWC.dtype),
    )


def adjust_hue(images_BHWC: Tensor, turns_B: Tensor) -> Tensor:
    """Rotate the hues of each image by a part of the color circle, from -0.5 to 0.5.

    0 leaves the image unchanged, except for one level of rounding.
    """
    check_colors(images_BHWC)
    in_bytes = images_BHWC.dtype == torch.uint8

    def turn(images: Tensor, turns: Tensor) -> Tensor:
        hue, saturation, value = _to_hsv(images / 255 if in_bytes else images)
        turned = _to_rgb((hue + turns[..., 0]) % 1.0, saturation, value)
        # torchvision's conversion from 0..1 to uint8
        return turned * (256 - 1e-3) if in_bytes else turned

    return _apply_in_pieces(images_BHWC, turns_B, turn)


def color_jitter(
    images_BHWC: Tensor,
    *,
    brightness: Tensor | None = None,
    contrast: Tensor | None = None,
    saturation: Tensor | None = None,
    hue: Tensor | None = None,
) -> Tensor:
    """Change brightness, contrast, saturation and hue, in this order.

    Each argument is (B,) factors, or None for no change. torchvision draws an order for each call;
    this order is fixed, since a random order for each sample would split the batch 24 ways.
    """
    check_colors(images_BHWC)
    steps = (
        (adjust_brightness, brightness),
        (adjust_contrast, contrast),
        (adjust_saturation, saturation),
        (adjust_hue, hue),
    )
    for adjust, factors_B in steps:
        if factors_B is not None:
            images_BHWC = adjust(images_BHWC, factors_B)
    return images_BHWC


def normalize(images_BHWC: Tensor, mean: Sequence[float], deviation: Sequence[float]) -> Tensor:
    """Return (images - mean) / deviation as float32 (B, C, H, W), channels last in memory.

    `mean` and `deviation` are in the units of the images.
    """
    check_images(images_BHWC)
    _, _, width, channels = images_BHWC.shape
    if len(mean) != channels or len(deviation) != channels:
        raise DataError(
            f"{len(mean)} means and {len(deviation)} deviations are given for {channels} channels",
            hint="pass one mean and one deviation per channel",
        )
    # a whole row at once: three channels alone are too short for vector instructions
    means, deviations = (
        torch.tensor(each, device=images_BHWC.device).float().repeat(width)
        for each in (mean, deviation)
    )
    rows = images_BHWC.flatten(2).to(torch.float32, copy=True)
    return rows.sub_(means).div_(deviations).view(images_BHWC.shape).permute(0, 3, 1, 2)


def _apply_in_pieces(
    images_BHWC: Tensor, factors_B: Tensor, change: Callable[[Tensor, Tensor], Tensor]
) -> Tensor:
    """Apply `change` to a few images at a time, as float32, with their factors (B, 1, 1, 1).

    The results are clamped to the range of the images and have their dtype.
    """
    check_colors(images_BHWC)
    factors = factors_B.to(images_BHWC.device, torch.float32).view(-1, 1, 1, 1)
    changed = torch.empty_like(images_BHWC)
    most = 255 if images_BHWC.dtype == torch.uint8 else 1
    for piece in _pieces(images_BHWC):
        changed[piece] = change(images_BHWC[piece].float(), factors[piece]).clamp_(0, most)
    return changed


def _pieces(images_BHWC: Tensor) -> Iterator[slice]:
    """Return slices of whole images, few enough to stay in a cache.

    On a device other than the CPU, which would wait for each slice, there is one slice.
    """
    batch, height, width, _ = images_BHWC.shape
    count = (
        max(1, PIECE // max(1, height * width))
        if images_BHWC.device.type == "cpu"
        else max(1, batch)
    )
    return (slice(start, start + count) for start in range(0, batch, count))


def _gray(images_BHWC: Tensor, dtype: torch.dtype) -> Tensor:
    red, green, blue = (images_BHWC[..., color : color + 1] for color in range(3))
    gray: Tensor = GRAY[0] * red + GRAY[1] * green + GRAY[2] * blue
    return gray.floor() if dtype == torch.uint8 else gray


def _to_hsv(images_BHWC: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return hue (in turns), saturation and value, (B, H, W) each, of images from 0 to 1."""
    red, green, blue = images_BHWC.unbind(-1)
    most, least = images_BHWC.amax(-1), images_BHWC.amin(-1)
    spread = most - least
    divisor = torch.where(spread == 0, 1.0, spread)
    sixths = torch.where(
        most == red,
        (green - blue) / divisor,
        torch.where(most == green, 2 + (blue - red) / divisor, 4 + (red - green) / divisor),
    )
    return (sixths / 6) % 1.0, spread / torch.where(spread == 0, 1.0, most), most


def _to_rgb(hue: Tensor, saturation: Tensor, value: Tensor) -> Tensor:
    """Return the colors of A. R. Smith's hexcone, as one expression for each n of 5, 3, 1.

    The color is value (1 - saturation max(0, min(k, 4 - k, 1))), with k = (6 hue + n) mod 6.
    """
    sixths, chroma = hue * 6, value * saturation
    colors = []
    for offset in (5, 3, 1):
        part = (sixths + offset) % 6
        colors.append(value - chroma * torch.minimum(part, 4 - part).clamp_(0, 1))
    return torch.stack(colors, dim=-1)


@dataclass(frozen=True)
class Jitter:
    """Random brightness, contrast, saturation and hue: torchvision's ColorJitter.

    The changes are made in the fixed order of `color_jitter`. In evaluation, images are unchanged.

    Args:
        brightness: Largest change x; the factor is drawn from 1 - x (at least 0) to 1 + x. 0 leaves
            the change out.
        contrast: As `brightness`.
        saturation: As `brightness`.
        hue: Largest change in turns, at most 0.5; the change is drawn from -hue to hue.

    Raises:
        DataError: For changes out of bounds.
    """

    brightness: float = 0.0
    contrast: float = 0.0
    saturation: float = 0.0
    hue: float = 0.0

    def __post_init__(self) -> None:
        for name in ("brightness", "contrast", "saturation"):
            check_range(f"a change of {name}", (0.0, getattr(self, name)), 0.0, MAX_FACTOR)
        check_range("a change of hue", (0.0, self.hue), 0.0, 0.5)

    def __call__(self, images_BHWC: Tensor, keys: Keys) -> Tensor:
        draws = keys.uniform(4).unbind(1)
        factors = {
            name: max(0.0, 1 - change) + (1 + change - max(0.0, 1 - change)) * draw
            for name, change, draw in zip(
                ("brightness", "contrast", "saturation"), self._changes, draws, strict=False
            )
            if change
        }
        hue = self.hue * (2 * draws[3] - 1) if self.hue else None
        return color_jitter(images_BHWC, **factors, hue=hue)

    @property
    def _changes(self) -> tuple[float, float, float]:
        return self.brightness, self.contrast, self.saturation

    def settled(self) -> tuple[Any, ...]:
        """Return the steps for evaluation: none."""
        return ()


@dataclass(frozen=True)
class Normalize:
    """Normalization to (images - mean) / deviation, float32 (B, C, H, W): the last step.

    Args:
        mean: One number per channel, in the units of the images.
        deviation: Standard deviation, one number above 0 per channel, in the units of the images.

    Raises:
        DataError: For different numbers of channels, and deviations that are not above 0.
    """

    mean: tuple[float, ...]
    deviation: tuple[float, ...]

    def __post_init__(self) -> None:
        if (
            len(self.mean) != len(self.deviation)
            or not self.mean
            or not all(each > 0 for each in self.deviation)
        ):
            raise DataError(
                f"mean {self.mean} and deviation {self.deviation} are not valid",
                hint="give one of each per channel, and deviations above 0",
            )

    def __call__(self, images_BHWC: Tensor, keys: Keys) -> Tensor:
        return normalize(images_BHWC, self.mean, self.deviation)

    def settled(self) -> tuple[Any, ...]:
        """Return the steps for evaluation: this step."""
        return (self,)
