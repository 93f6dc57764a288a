"""Augmentation moves whole pixels and nothing else."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from surefoot.components.data.transforms.moving import crop, mirror, reflect_pad, translate

IMAGES_BHWC = torch.from_numpy(
    np.random.default_rng(0).integers(0, 256, (7, 9, 8, 3), dtype=np.uint8)
)


@pytest.mark.parametrize("size", [0, 1, 2, 7])
def test_the_padded_border_mirrors_the_inside_as_numpy_does(size: int) -> None:
    expected = np.pad(
        IMAGES_BHWC.numpy(), ((0, 0), (size, size), (size, size), (0, 0)), mode="reflect"
    )
    assert np.array_equal(reflect_pad(IMAGES_BHWC, size).numpy(), expected)


def test_each_image_is_cropped_at_its_own_corner() -> None:
    corners = torch.tensor([[row % 5, row % 4] for row in range(7)])
    found = crop(IMAGES_BHWC, corners, 5, 5)
    for image, (top, left), cropped in zip(IMAGES_BHWC, corners.tolist(), found, strict=True):
        assert torch.equal(cropped, image[top : top + 5, left : left + 5])


def test_a_translated_image_keeps_its_size_and_the_middle_corner_leaves_it_as_it_is() -> None:
    assert torch.equal(translate(IMAGES_BHWC, torch.full((7, 2), 2), 2), IMAGES_BHWC)
    moved = translate(IMAGES_BHWC, torch.tensor([[1, 4]] * 7), 2)
    assert torch.equal(moved[:, 1:, :-2], IMAGES_BHWC[:, :-1, 2:])


def test_only_the_chosen_images_are_mirrored() -> None:
    chosen = torch.tensor([True, False, False, True, True, False, False])
    found = mirror(IMAGES_BHWC, chosen)
    for image, flag, result in zip(IMAGES_BHWC, chosen.tolist(), found, strict=True):
        assert torch.equal(result, image.flip(1) if flag else image)


@pytest.mark.parametrize("value", [True, False])
def test_all_or_none_may_be_chosen(value: bool) -> None:
    expected = IMAGES_BHWC.flip(2) if value else IMAGES_BHWC
    assert torch.equal(mirror(IMAGES_BHWC, torch.full((7,), value)), expected)
