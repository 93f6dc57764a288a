"""Color transforms with one factor per image, by torchvision's formulas, and normalization.

The color transforms change brightness, contrast, saturation and hue. Each of the four returns uint8
images for uint8 images, as in torchvision. Values are therefore truncated to integers after each
transform.
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
    """Multiply each image by its factor, and clamp the result to the range of the images."""
    return _apply_in_pieces(images_BHWC, factors_B, lambda images, factors: images * factors)


def adjust_contrast(images_BHWC: Tensor, factors_B: Tensor) -> Tensor:
    """Blend each image with the mean of its gray values.

    A factor of 0 gives the mean, a factor of 1 the unchanged image.
    """

    def blend(images: Tensor, factors: Tensor) -> Tensor:
        mean = _gray(images, images_BHWC.dtype).mean((1, 2, 3), keepdim=True)
        return factors * images + (1 - factors) * mean

    return _apply_in_pieces(images_BHWC, factors_B, blend)


def adjust_saturation(images_BHWC: Tensor, factors_B: Tensor) -> Tensor:
    """Blend each pixel with its gray value.

    A factor of 0 gives a gray image, a factor of 1 the unchanged image.
    """
    return _apply_in_pieces(
        images_BHWC,
        factors_B,
        lambda images, factors: factors * images + (1 - factors) * _gray(images, images_BHWC.dtype),
    )


def adjust_hue(images_BHWC: Tensor, turns_B: Tensor) -> Tensor:
    """Rotate the hues of each image by a fraction of the color circle, from -0.5 to 0.5.

    A fraction of 0 leaves an image unchanged, except for rounding errors of up to 1/255.
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

    Each argument is a tensor (B,) with one factor per image (for `hue`, a fraction of the color
    circle), or None for no change. The order is fixed, although torchvision draws an order for each
    call: a random order for each sample would split the batch into up to 24 parts.
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
    """Return (images - mean) / deviation as float32 (B, C, H, W), in channels-last memory format.

    `mean` and `deviation` have one value per channel, in the units of the images.
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
    """Apply `change(images, factors)` to the batch, a few images at a time, as float32.

    `factors` has the shape (images, 1, 1, 1). The results are clamped to the range of the images,
    from 0 to 255 or from 0 to 1, and converted back to their dtype.
    """
    check_colors(images_BHWC)
    factors = factors_B.to(images_BHWC.device, torch.float32).view(-1, 1, 1, 1)
    changed = torch.empty_like(images_BHWC)
    most = 255 if images_BHWC.dtype == torch.uint8 else 1
    for piece in _pieces(images_BHWC):
        changed[piece] = change(images_BHWC[piece].float(), factors[piece]).clamp_(0, most)
    return changed


def _pieces(images_BHWC: Tensor) -> Iterator[slice]:
    """Return slices of the batch, each with few enough images to stay in a CPU cache.

    On devices other than the CPU, the only slice is the whole batch, because the device would wait
    for each slice.
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
    """Return hue, saturation and value, each (B, H, W), of images with values from 0 to 1.

    The hue is in turns of the color circle, from 0 to 1.
    """
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
    """Convert hue, saturation and value, each (B, H, W), to RGB (B, H, W, 3).

    The formula is that of A. R. Smith's hexcone model. The red, green and blue values are value *
    (1 - saturation * max(0, min(k, 4 - k, 1))) with k = (6 * hue + n) mod 6, where n is 5, 3 and 1.
    """
    sixths, chroma = hue * 6, value * saturation
    colors = []
    for offset in (5, 3, 1):
        part = (sixths + offset) % 6
        colors.append(value - chroma * torch.minimum(part, 4 - part).clamp_(0, 1))
    return torch.stack(colors, dim=-1)


@dataclass(frozen=True)
class Jitter:
    """Random change of brightness, contrast, saturation and hue, like torchvision's ColorJitter.

    The changes are made in the fixed order of `color_jitter`. In evaluation, images are unchanged.

    Args:
        brightness: Maximum change x, from 0 to 10. The factor is drawn from max(0, 1 - x) to 1 + x.
            With 0, the brightness is not changed.
        contrast: Maximum change of the contrast, defined as for `brightness`.
        saturation: Maximum change of the saturation, defined as for `brightness`.
        hue: Maximum rotation of the hue in turns, from 0 to 0.5. The rotation is drawn from -hue to
            hue.

    Raises:
        DataError: If a maximum change is out of bounds.
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
        """Return (), because this step is left out in evaluation."""
        return ()


@dataclass(frozen=True)
class Normalize:
    """Pipeline step that returns (images - mean) / deviation as float32 (B, C, H, W).

    It must be the last step, since the other steps expect images (B, H, W, C).

    Args:
        mean: One number per channel, in the units of the images.
        deviation: Standard deviation, one number above 0 per channel, in the units of the images.

    Raises:
        DataError: If `mean` and `deviation` are empty or have different lengths, or if a deviation
            is not above 0.
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
        """Return `(self,)`, because evaluation uses this step unchanged."""
        return (self,)
