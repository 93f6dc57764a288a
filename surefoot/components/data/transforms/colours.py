"""Colours: brightness, contrast, saturation and hue by torchvision's formulas, each image with its own factor; and normalising.

Images of bytes stay bytes after each of the four, as in torchvision, so that the levels are cut to whole numbers each time.
"""

# B batch, H height, W width, C channels

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from surefoot.components.data.order import Keys
from surefoot.components.data.transforms.checks import check_colours, check_images, check_range
from surefoot.core.errors import DataError

GREY = (0.2989, 0.587, 0.114)  # what red, green and blue weigh
PIECE = 1 << 15  # pixels worked on together: 32-bit copies of them stay in the cache of a core
LARGEST_FACTOR = 10.0


def adjust_brightness(images_BHWC: Tensor, factors_B: Tensor) -> Tensor:
    """Each image times its factor."""
    return _in_pieces(images_BHWC, factors_B, lambda images, factors: images * factors)


def adjust_contrast(images_BHWC: Tensor, factors_B: Tensor) -> Tensor:
    """Each image moved from the mean of its greys, 0, by its factor; 1 leaves it."""

    def blend(images: Tensor, factors: Tensor) -> Tensor:
        mean = _grey(images, images_BHWC.dtype).mean((1, 2, 3), keepdim=True)
        return factors * images + (1 - factors) * mean

    return _in_pieces(images_BHWC, factors_B, blend)


def adjust_saturation(images_BHWC: Tensor, factors_B: Tensor) -> Tensor:
    """Each pixel moved from its own grey, 0, by its image's factor; 1 leaves it."""
    return _in_pieces(
        images_BHWC,
        factors_B,
        lambda images, factors: factors * images + (1 - factors) * _grey(images, images_BHWC.dtype),
    )


def adjust_hue(images_BHWC: Tensor, turns_B: Tensor) -> Tensor:
    """Each image's hues turned by so much of the circle, from -0.5 to 0.5; 0 leaves it, but for one level of rounding."""
    check_colours(images_BHWC)
    in_bytes = images_BHWC.dtype == torch.uint8

    def turn(images: Tensor, turns: Tensor) -> Tensor:
        hue, saturation, value = _to_hsv(images / 255 if in_bytes else images)
        turned = _to_rgb((hue + turns[..., 0]) % 1.0, saturation, value)
        return turned * (256 - 1e-3) if in_bytes else turned  # torchvision's way from 0..1 to bytes

    return _in_pieces(images_BHWC, turns_B, turn)


def color_jitter(
    images_BHWC: Tensor, *, brightness: Tensor | None = None, contrast: Tensor | None = None, saturation: Tensor | None = None,
    hue: Tensor | None = None,
) -> Tensor:  # fmt: skip
    """Brightness, contrast, saturation, hue, in this order, each (B,) factors or None for not at all.

    The order is fixed; torchvision draws one for each call. A drawn order of each sample would take the batch apart 24 ways.
    """
    check_colours(images_BHWC)
    steps = (
        (adjust_brightness, brightness), (adjust_contrast, contrast), (adjust_saturation, saturation), (adjust_hue, hue),
    )  # fmt: skip
    for adjust, factors_B in steps:
        if factors_B is not None:
            images_BHWC = adjust(images_BHWC, factors_B)
    return images_BHWC


def normalise(images_BHWC: Tensor, mean: Sequence[float], deviation: Sequence[float]) -> Tensor:
    """(images - mean) / deviation as float32 (B, C, H, W), channels last in memory; mean and deviation in the images' own units."""
    check_images(images_BHWC)
    _, _, width, channels = images_BHWC.shape
    if len(mean) != channels or len(deviation) != channels:
        raise DataError(
            f"{len(mean)} means and {len(deviation)} deviations are given for {channels} colours",
            hint="give one of each a colour",
        )
    # a whole row at once: three channels alone are too short a run for vector instructions
    means, deviations = (torch.tensor(each, device=images_BHWC.device).float().repeat(width) for each in (mean, deviation))
    rows = images_BHWC.flatten(2).to(torch.float32, copy=True)
    return rows.sub_(means).div_(deviations).view(images_BHWC.shape).permute(0, 3, 1, 2)


def _in_pieces(images_BHWC: Tensor, factors_B: Tensor, change: Callable[[Tensor, Tensor], Tensor]) -> Tensor:
    """`change` of some images at a time as float32, with their factors (B, 1, 1, 1), cut to the images' range and dtype."""
    check_colours(images_BHWC)
    factors = factors_B.to(images_BHWC.device, torch.float32).view(-1, 1, 1, 1)
    changed = torch.empty_like(images_BHWC)
    most = 255 if images_BHWC.dtype == torch.uint8 else 1
    for piece in _pieces(images_BHWC):
        changed[piece] = change(images_BHWC[piece].float(), factors[piece]).clamp_(0, most)
    return changed


def _pieces(images_BHWC: Tensor) -> Iterator[slice]:
    """Slices of whole images, few enough to stay in a cache; all of them on a device that would wait for each."""
    batch, height, width, _ = images_BHWC.shape
    count = max(1, PIECE // max(1, height * width)) if images_BHWC.device.type == "cpu" else max(1, batch)
    return (slice(start, start + count) for start in range(0, batch, count))


def _grey(images_BHWC: Tensor, dtype: torch.dtype) -> Tensor:
    red, green, blue = (images_BHWC[..., colour : colour + 1] for colour in range(3))
    grey: Tensor = GREY[0] * red + GREY[1] * green + GREY[2] * blue
    return grey.floor() if dtype == torch.uint8 else grey


def _to_hsv(images_BHWC: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Hue (in turns), saturation and value, (B, H, W) each, of images from 0 to 1."""
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
    """A. R. Smith's hexcone, as one expression for each colour n of 5, 3, 1: value (1 - saturation max(0, min(k, 4 - k, 1)))."""
    sixths, chroma = hue * 6, value * saturation
    colours = []
    for offset in (5, 3, 1):
        part = (sixths + offset) % 6
        colours.append(value - chroma * torch.minimum(part, 4 - part).clamp_(0, 1))
    return torch.stack(colours, dim=-1)


@dataclass(frozen=True)
class Jitter:
    """Random brightness, contrast, saturation (factors from 1 - x to 1 + x) and hue (turns from -x to x): torchvision's ColorJitter.

    A change that is 0 is left out. The order is that of `color_jitter`: fixed. In evaluation nothing happens.
    """

    brightness: float = 0.0
    contrast: float = 0.0
    saturation: float = 0.0
    hue: float = 0.0

    def __post_init__(self) -> None:
        for name in ("brightness", "contrast", "saturation"):
            check_range(f"a change of {name}", (0.0, getattr(self, name)), 0.0, LARGEST_FACTOR)
        check_range("a change of hue", (0.0, self.hue), 0.0, 0.5)

    def __call__(self, images_BHWC: Tensor, keys: Keys) -> Tensor:
        draws = keys.uniform(4).unbind(1)
        factors = {
            name: max(0.0, 1 - change) + (1 + change - max(0.0, 1 - change)) * draw
            for name, change, draw in zip(("brightness", "contrast", "saturation"), self._changes, draws, strict=False)
            if change
        }
        hue = self.hue * (2 * draws[3] - 1) if self.hue else None
        return color_jitter(images_BHWC, **factors, hue=hue)

    @property
    def _changes(self) -> tuple[float, float, float]:
        return self.brightness, self.contrast, self.saturation

    def settled(self) -> tuple[Any, ...]:
        """What stands for it in evaluation: nothing."""
        return ()


@dataclass(frozen=True)
class Normalise:
    """(images - mean) / deviation as float32 (B, C, H, W): the last step. `mean` and `deviation` a colour, in the images' own units."""

    mean: tuple[float, ...]
    deviation: tuple[float, ...]

    def __post_init__(self) -> None:
        if len(self.mean) != len(self.deviation) or not self.mean or not all(each > 0 for each in self.deviation):
            raise DataError(
                f"mean {self.mean} and deviation {self.deviation} cannot normalise",
                hint="give as many of each as colours, and deviations above 0",
            )

    def __call__(self, images_BHWC: Tensor, keys: Keys) -> Tensor:
        return normalise(images_BHWC, self.mean, self.deviation)

    def settled(self) -> tuple[Any, ...]:
        """What stands for it in evaluation: itself."""
        return (self,)
