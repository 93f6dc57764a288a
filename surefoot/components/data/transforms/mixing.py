"""Mixing of samples and their labels: mixup (Zhang et al., 2018) and cutmix (Yun et al., 2019).

Each sample is mixed with its neighbor in the batch, its partner: position 0 with 1, 2 with 3, and
so on. If the number of samples is odd, the last one is unchanged. The two samples of a pair have
separate random weights. The result does not depend on how a batch is split into ranks, workers or
microbatches, provided that each part has an even number of consecutive samples. Because the samples
are shuffled, partners differ from epoch to epoch.
"""

# B batch, H height, W width, C channels, N classes

from __future__ import annotations

from functools import lru_cache

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from surefoot.components.data.order import Keys
from surefoot.components.data.transforms.checks import check_images, check_range
from surefoot.components.data.transforms.pipeline import keys_of
from surefoot.core.errors import DataError

POINTS = 4097  # of the table of the Beta distribution: its inverse is accurate to 1e-4
MAX_ALPHA = 100.0


def soft_targets(labels_B: Tensor, num_classes: int) -> Tensor:
    """Return labels as rows of class probabilities, which torch's `cross_entropy` accepts.

    Args:
        labels_B: Class indices (B,), integers from 0 to N - 1, which are converted to one-hot rows.
            Probabilities (B, N) are returned unchanged.
        num_classes: Number of classes (N).

    Returns:
        Class probabilities (B, N), float32.

    Raises:
        DataError: If the labels are neither class indices nor probabilities (B, N).
    """
    if labels_B.ndim == 2 and labels_B.shape[1] == num_classes and labels_B.dtype.is_floating_point:
        return labels_B
    if (
        labels_B.ndim != 1
        or labels_B.dtype.is_floating_point
        or (len(labels_B) and not _are_classes(labels_B, num_classes))
    ):
        raise DataError(
            f"labels {tuple(labels_B.shape)} of {labels_B.dtype} are not classes from 0 to "
            f"{num_classes - 1}",
            hint="pass integers (B,), or rows (B, num_classes) of shares",
        )
    return F.one_hot(labels_B.long(), num_classes).float()


def mixup(
    images_BHWC: Tensor, labels_B: Tensor, keys: Keys, *, num_classes: int, alpha: float = 0.2
) -> tuple[Tensor, Tensor]:
    """Mix each image and its target with those of its neighbor in the batch.

    The result is s * image + (1 - s) * neighbor, where s is drawn from Beta(alpha, alpha) for each
    image. Neighbors are the images 0 and 1, 2 and 3, and so on. Zhang et al. 2018, arXiv
    1710.09412.

    Args:
        images_BHWC: Images of any shape (B, ...); they may be normalized already.
        labels_B: Class indices (B,), or class probabilities (B, N).
        keys: Random draws of the batch.
        num_classes: Number of classes (N).
        alpha: Parameter of the Beta distribution, from 0.01 to 100.

    Returns:
        The images, float32, and the targets (B, N).

    Raises:
        DataError: If the labels are invalid or not one per image, or if `alpha` is out of bounds.
    """
    share_B = draw_shares(keys_of(keys, "mixup"), alpha)
    partner_B, targets_BN = _pair(images_BHWC, labels_B, num_classes)
    share_B = torch.where(partner_B == torch.arange(len(partner_B)), 1.0, share_B).to(
        images_BHWC.device
    )
    ours = images_BHWC.float()
    mixed = torch.lerp(
        ours[partner_B.to(ours.device)], ours, share_B.view(-1, *[1] * (images_BHWC.ndim - 1))
    )
    return mixed, _join(targets_BN, partner_B, share_B)


def cutmix(
    images_BHWC: Tensor, labels_B: Tensor, keys: Keys, *, num_classes: int, alpha: float = 1.0
) -> tuple[Tensor, Tensor]:
    """Paste a box of its neighbor in the batch into each image, and mix the targets by area.

    The box covers the share 1 - s of the image, where s is drawn from Beta(alpha, alpha) for each
    image. It is centered at a random pixel and cut at the border; the weights of the targets are
    the areas after the cut. Neighbors are the images 0 and 1, 2 and 3, and so on. Yun et al. 2019,
    arXiv 1905.04899.

    Args:
        images_BHWC: Images (B, H, W, C), uint8 or floating point.
        labels_B: Class indices (B,), or class probabilities (B, N).
        keys: Random draws of the batch.
        num_classes: Number of classes (N).
        alpha: Parameter of the Beta distribution, from 0.01 to 100.

    Returns:
        The images, of the same shape and dtype, and the targets (B, N).

    Raises:
        DataError: If a tensor is not a batch of images, if the labels are invalid or not one per
            image, or if `alpha` is out of bounds.
    """
    check_images(images_BHWC)
    own = keys_of(keys, "cutmix")
    _, height, width, _ = images_BHWC.shape
    partner_B, targets_BN = _pair(images_BHWC, labels_B, num_classes)
    side = (1 - draw_shares(own, alpha)).sqrt()
    places = own.uniform(2, stream=1)
    edges = []
    for axis, size in enumerate((height, width)):
        center, half = (places[:, axis] * size).long(), (side * size).long() // 2
        edges.append((torch.clamp(center - half, min=0), torch.clamp(center + half, max=size)))
    mixed, share_B = images_BHWC.clone(), torch.ones(len(images_BHWC))
    rows = zip(partner_B.tolist(), *(each.tolist() for pair in edges for each in pair), strict=True)
    for number, (partner, top, bottom, left, right) in enumerate(rows):
        if partner != number:
            mixed[number, top:bottom, left:right] = images_BHWC[partner, top:bottom, left:right]
            share_B[number] = 1 - (bottom - top) * (right - left) / (height * width)
    return mixed, _join(targets_BN, partner_B, share_B.to(images_BHWC.device))


def draw_shares(keys: Keys, alpha: float) -> Tensor:
    """Draw one number per sample from Beta(alpha, alpha), by the inverse CDF: (B,) float32."""
    check_range("alpha", (alpha, alpha), 0.01, MAX_ALPHA)
    points, reached = _beta(alpha)
    drawn = keys.uniform()[:, 0].double().numpy()
    lesser = np.interp(np.minimum(drawn, 1 - drawn), reached, points)
    if alpha < 1:
        lesser **= 1 / alpha
    return torch.from_numpy(np.where(drawn < 0.5, lesser, 1 - lesser).astype(np.float32))


@lru_cache(maxsize=8)
def _beta(alpha: float) -> tuple[np.ndarray, np.ndarray]:
    """Return a table of the CDF of Beta(alpha, alpha): points from 0 to 1/2, and the CDF at each.

    If alpha < 1, the density is unbounded at 0. The points are then values of x ** alpha, not of x.
    """
    if alpha < 1:
        points = np.linspace(0, 0.5**alpha, POINTS)
        density = (1 - points ** (1 / alpha)) ** (alpha - 1)
    else:
        points = np.linspace(0, 0.5, POINTS)
        density = (4 * points * (1 - points)) ** (alpha - 1)
    reached = np.concatenate([[0.0], np.cumsum((density[1:] + density[:-1]) / 2)])
    return points, reached * (0.5 / reached[-1])


def _pair(images: Tensor, labels_B: Tensor, num_classes: int) -> tuple[Tensor, Tensor]:
    """Return the index of each sample's partner (B,), and the targets (B, N)."""
    if len(images) != len(labels_B):
        raise DataError(
            f"{len(images)} images have {len(labels_B)} labels", hint="give one label per image"
        )
    places = torch.arange(len(images))
    partner_B = places ^ 1
    return torch.where(partner_B < len(images), partner_B, places), soft_targets(
        labels_B, num_classes
    )


def _join(targets_BN: Tensor, partner_B: Tensor, share_B: Tensor) -> Tensor:
    share = share_B.to(targets_BN.device, targets_BN.dtype)[:, None]
    return share * targets_BN + (1 - share) * targets_BN[partner_B.to(targets_BN.device)]


def _are_classes(labels_B: Tensor, num_classes: int) -> bool:
    return int(labels_B.min()) >= 0 and int(labels_B.max()) < num_classes
