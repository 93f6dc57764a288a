"""Tests of augmentation by torchvision's definitions.

The formulas, image by image, as references; draws that depend on the sample alone.
"""

# B batch, H height, W width, C channels

from __future__ import annotations

import colorsys
import dataclasses
import itertools
import time
from collections.abc import Callable

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from surefoot.components.data.order import Keys
from surefoot.components.data.transforms.colors import (
    Jitter,
    Normalize,
    adjust_brightness,
    adjust_contrast,
    adjust_hue,
    adjust_saturation,
    normalize,
)
from surefoot.components.data.transforms.erasing import Cutout, Erase, cutout, erase
from surefoot.components.data.transforms.mixing import cutmix, draw_shares, mixup, soft_targets
from surefoot.components.data.transforms.moving import Mirror, Translate
from surefoot.components.data.transforms.pipeline import Pipeline, keys_of
from surefoot.components.data.transforms.resizing import (
    CenterCrop,
    Crop,
    Resize,
    center_crop,
    draw_boxes,
    random_resized_crop,
    resize,
)
from surefoot.core.errors import DataError

BYTES_BHWC = torch.from_numpy(
    np.random.default_rng(0).integers(0, 256, (12, 18, 14, 3), dtype=np.uint8)
)
BYTES_BHWC[:2] = BYTES_BHWC[:2, :1, :1]  # one color each
BYTES_BHWC[2, ..., 1:] = BYTES_BHWC[2, ..., :1]  # grey
FACTORS_B = torch.linspace(0.0, 2.0, 12)
KEYS = Keys(seed=1, epoch=2, ids=np.arange(12))
MANY = Keys(seed=3, epoch=1, ids=np.arange(20_000))


def grey_of(image: Tensor) -> Tensor:
    grey = 0.2989 * image[..., 0] + 0.587 * image[..., 1] + 0.114 * image[..., 2]
    return grey.to(image.dtype).float()[..., None]


def blend(image: Tensor, other: Tensor | float, factor: float) -> Tensor:
    """What torchvision calls so: cut to the range, and to whole levels where images are bytes."""
    most = 255 if image.dtype == torch.uint8 else 1
    return (factor * image + (1.0 - factor) * other).clamp(0, most).to(image.dtype)


REFERENCES: dict[
    str, tuple[Callable[[Tensor, Tensor], Tensor], Callable[[Tensor, float], Tensor]]
] = {
    "brightness": (adjust_brightness, lambda image, factor: blend(image, 0.0, factor)),
    "contrast": (
        adjust_contrast,
        lambda image, factor: blend(image, grey_of(image).mean(), factor),
    ),
    "saturation": (adjust_saturation, lambda image, factor: blend(image, grey_of(image), factor)),
}


@pytest.mark.parametrize("what", REFERENCES)
@pytest.mark.parametrize("images_BHWC", [BYTES_BHWC, BYTES_BHWC / 255], ids=["bytes", "floats"])
def test_colors_follow_the_formulas_of_torchvision_each_image_by_its_own_factor(
    what: str, images_BHWC: Tensor
) -> None:
    adjust, reference = REFERENCES[what]
    expected = torch.stack(
        [
            reference(image, float(factor))
            for image, factor in zip(images_BHWC, FACTORS_B, strict=True)
        ]
    )
    found = adjust(images_BHWC, FACTORS_B)
    assert found.dtype == images_BHWC.dtype
    assert torch.allclose(
        found.float(), expected.float(), rtol=0, atol=0 if found.dtype == torch.uint8 else 1e-6
    )


def test_hues_turn_as_those_of_the_standard_library() -> None:
    images, turns = BYTES_BHWC[:, :4, :4] / 255, torch.linspace(-0.5, 0.5, 12)
    found = adjust_hue(images, turns)
    for image, turn, changed in zip(images.tolist(), turns.tolist(), found.tolist(), strict=True):
        for pixel, result in zip(itertools.chain(*image), itertools.chain(*changed), strict=True):
            hue, saturation, value = colorsys.rgb_to_hsv(*pixel)
            assert result == pytest.approx(
                colorsys.hsv_to_rgb((hue + turn) % 1.0, saturation, value), abs=1e-5
            )
    in_bytes = adjust_hue(BYTES_BHWC, turns)
    exact = torch.floor(adjust_hue(BYTES_BHWC / 255, turns) * 255.999)
    assert (in_bytes.float() - exact).abs().max() <= 1
    assert torch.equal(adjust_hue(BYTES_BHWC, torch.zeros(12)), BYTES_BHWC)


def weights_of(start: int, size: int, out: int, whole: int) -> Tensor:
    """Row i says what each of `whole` pixels weighs in pixel i of `out`.

    The weights are a triangle as wide as a pixel of the result, of the box alone.
    """
    scale = size / out
    support = max(scale, 1.0)
    rows = torch.zeros(out, whole, dtype=torch.float64)
    for number in range(out):
        center = scale * (number + 0.5)
        for pixel in range(
            max(int(center - support + 0.5), 0), min(int(center + support + 0.5), size)
        ):
            rows[number, start + pixel] = max(0.0, 1 - abs(pixel - center + 0.5) / support)
    return rows / rows.sum(1, keepdim=True)


@pytest.mark.parametrize("size", [(9, 20), (18, 14), (5, 3)])
def test_boxes_are_resized_by_the_triangles_of_torch_and_see_nothing_of_what_lies_outside(
    size: tuple[int, int],
) -> None:
    boxes_B4 = draw_boxes(KEYS, 18, 14, (0.08, 1.0), (3 / 4, 4 / 3))
    found = random_resized_crop(BYTES_BHWC, boxes_B4, *size)
    exact = random_resized_crop(BYTES_BHWC.double(), boxes_B4, *size)
    for image, (top, left, rows, columns), got, got_exact in zip(
        BYTES_BHWC, boxes_B4.tolist(), found, exact, strict=True
    ):
        down, across = weights_of(top, rows, size[0], 18), weights_of(left, columns, size[1], 14)
        expected = torch.einsum("hH,HWC,wW->hwC", down, image.double(), across)
        assert torch.allclose(got_exact, expected, atol=1e-9)
        # bytes are rounded after each direction
        assert (got.double() - expected).abs().max() < 1.01
    whole = resize(BYTES_BHWC, *size)
    assert torch.equal(
        whole, random_resized_crop(BYTES_BHWC, torch.tensor([[0, 0, 18, 14]] * 12), *size)
    )


def test_boxes_are_drawn_by_the_definition_of_torchvision() -> None:
    top, left, rows, columns = draw_boxes(MANY, 48, 40, (0.08, 1.0), (3 / 4, 4 / 3)).unbind(1)
    assert (top >= 0).all()
    assert (left >= 0).all()
    assert (top + rows <= 48).all()
    assert (left + columns <= 40).all()
    ratio, area = columns / rows, rows * columns / (48 * 40)
    assert (ratio > 0.7).all()
    assert (ratio < 1.42).all()
    # torchvision's own over 20,000 draws: mean area 0.4665 (large ones do not fit), mean top 9.20,
    # mean left 5.65
    assert float(area.mean()) == pytest.approx(0.4665, abs=0.01)
    assert float(top.double().mean()) == pytest.approx(9.20, abs=0.2)
    assert float(left.double().mean()) == pytest.approx(5.65, abs=0.15)


def test_where_no_box_fits_the_middle_is_taken() -> None:
    wide = draw_boxes(KEYS, 10, 100, (0.9, 1.0), (3 / 4, 4 / 3))
    assert wide.tolist() == [[0, 43, 10, 13]] * 12
    assert draw_boxes(KEYS, 100, 10, (0.9, 1.0), (3 / 4, 4 / 3)).tolist() == [[43, 0, 13, 10]] * 12


def test_normalized_images_are_those_of_the_formula_and_the_middle_is_the_middle() -> None:
    mean, deviation = (125.3, 123.0, 113.9), (62.5, 61.9, 66.5)
    found = normalize(BYTES_BHWC, mean, deviation)
    expected = (BYTES_BHWC.float() - torch.tensor(mean)) / torch.tensor(deviation)
    assert torch.equal(found, expected.permute(0, 3, 1, 2))
    assert torch.equal(center_crop(BYTES_BHWC, 10, 8), BYTES_BHWC[:, 4:14, 3:11])
    floats = BYTES_BHWC.float()
    normalize(floats, mean, deviation)
    assert torch.equal(floats, BYTES_BHWC.float())  # what was given stays as it was


def test_only_the_box_is_painted_and_only_in_the_images_chosen() -> None:
    boxes = Erase(0.5, value=(1.0, 2.0, 3.0)).draw(KEYS, 18, 14)
    found = Erase(0.5, value=(1.0, 2.0, 3.0))(BYTES_BHWC, KEYS)
    assert 0 < sum(row[2] > 0 for row in boxes.tolist()) < 12
    for image, (top, left, rows, columns), got in zip(
        BYTES_BHWC, boxes.tolist(), found, strict=True
    ):
        expected = image.clone()
        expected[top : top + rows, left : left + columns] = torch.tensor(
            [1, 2, 3], dtype=torch.uint8
        )
        assert torch.equal(got, expected)
    part = Erase(1.0).draw(MANY, 48, 40)[:, 2:].prod(1) / (48 * 40)
    assert float(part.mean()) == pytest.approx(0.1753, abs=0.005)  # torchvision's own
    boxes = Erase(1.0).draw(MANY, 20, 200)
    assert (boxes[:, :2] + boxes[:, 2:] <= torch.tensor([20, 200])).all()
    drawn = boxes[boxes[:, 2] > 0].double().mean(0)
    assert float(drawn[2]) == pytest.approx(14.32, abs=0.15)  # torchvision's own, of those that fit
    corner = cutout(BYTES_BHWC, torch.zeros(12, 2, dtype=torch.int64), 6, 9)
    assert (corner[:, :3, :3] == 9).all()
    assert torch.equal(corner[:, 3:], BYTES_BHWC[:, 3:])


@pytest.mark.parametrize("alpha", [0.1, 0.2, 1.0, 8.0])
def test_shares_have_the_beta_distribution(alpha: float) -> None:
    drawn = np.sort(draw_shares(MANY, alpha).double().numpy()).round(6)
    reference = np.sort(np.random.default_rng(0).beta(alpha, alpha, len(drawn))).round(6)
    assert drawn.var() == pytest.approx(1 / (4 * (2 * alpha + 1)), rel=0.02)
    both = np.concatenate([drawn, reference])
    distance = np.abs(
        np.searchsorted(drawn, both, "right") - np.searchsorted(reference, both, "right")
    ).max() / len(drawn)
    assert distance < 0.02  # Kolmogorov and Smirnov: 0.0195 in one case of a thousand


LABELS_B = torch.arange(12) % 4


def test_mixup_joins_neighbours_and_targets_by_the_same_share() -> None:
    images, targets = mixup(BYTES_BHWC, LABELS_B, KEYS, num_classes=4, alpha=1.0)
    share = draw_shares(keys_of(KEYS, "mixup"), 1.0)
    for number in range(12):
        partner = number ^ 1
        expected = share[number] * BYTES_BHWC[number] + (1 - share[number]) * BYTES_BHWC[partner]
        assert torch.allclose(images[number], expected, atol=1e-3)
        assert float(targets[number, LABELS_B[number]]) == pytest.approx(
            float(share[number]), abs=1e-6
        )
        assert float(targets[number].sum()) == pytest.approx(1.0)


def test_the_shares_of_cutmix_are_those_of_the_pixels() -> None:
    images, targets = cutmix(BYTES_BHWC, LABELS_B, KEYS, num_classes=4)
    kept = (images == BYTES_BHWC).all(-1).float().mean((1, 2))
    assert 0 < float(kept.min()) < 1
    ours = targets.gather(1, LABELS_B[:, None])[:, 0]
    # a pixel of another image may have the same color
    assert torch.allclose(ours[4:], kept[4:], atol=0.02)
    from_either = (images == BYTES_BHWC) | (images == BYTES_BHWC[torch.arange(12) ^ 1])
    assert from_either.all()


def test_torch_takes_soft_targets_and_gives_the_loss_of_the_mixture() -> None:
    scores, targets = (
        torch.randn(12, 4, generator=torch.Generator().manual_seed(0)),
        soft_targets(LABELS_B, 4),
    )
    half = 0.25 * targets + 0.75 * targets.flip(0)
    whole = F.cross_entropy(scores, half, reduction="sum")
    parts = [
        F.cross_entropy(scores, each, reduction="sum") for each in (LABELS_B, LABELS_B.flip(0))
    ]
    assert float(whole) == pytest.approx(float(0.25 * parts[0] + 0.75 * parts[1]), rel=1e-5)


def whole_chain(images_BHWC: Tensor, keys: Keys) -> tuple[Tensor, Tensor]:
    images_BHWC = PIPELINE(images_BHWC, keys)
    labels = torch.from_numpy(keys.ids % 4)
    mixed, targets = cutmix(images_BHWC, labels, keys, num_classes=4)
    return mixup(mixed, targets, keys, num_classes=4)


PIPELINE = Pipeline(
    Crop(16, 12), Mirror(), Translate(2), Jitter(0.4, 0.4, 0.4, 0.1), Erase(), Cutout(3), Cutout(3)
)


@pytest.mark.parametrize("cut", [2, 4, 6])
def test_however_a_batch_is_cut_into_even_pieces_the_pixels_are_the_same(cut: int) -> None:
    images, targets = whole_chain(BYTES_BHWC, KEYS)
    pieces = [
        whole_chain(
            BYTES_BHWC[start : start + cut],
            dataclasses.replace(KEYS, ids=KEYS.ids[start : start + cut]),
        )
        for start in range(0, 12, cut)
    ]
    assert torch.equal(images, torch.cat([piece for piece, _ in pieces]))
    assert torch.equal(targets, torch.cat([piece for _, piece in pieces]))


def test_nothing_is_drawn_from_the_generators_of_the_process() -> None:
    before = whole_chain(BYTES_BHWC, KEYS)
    torch.manual_seed(7)
    np.random.seed(7)  # noqa: NPY002 - the generator that nothing may draw from
    states = torch.get_rng_state(), np.random.get_state()[1].tolist()  # noqa: NPY002
    found = whole_chain(BYTES_BHWC, KEYS)
    assert torch.equal(states[0], torch.get_rng_state())
    assert states[1] == np.random.get_state()[1].tolist()  # noqa: NPY002
    assert all(torch.equal(one, other) for one, other in zip(before, found, strict=True))
    assert not torch.equal(whole_chain(BYTES_BHWC, dataclasses.replace(KEYS, epoch=3))[0], found[0])


def test_a_step_taken_out_leaves_the_draws_of_the_others() -> None:
    drawn: dict[str, list[Tensor]] = {}

    def first(images: Tensor, keys: Keys) -> Tensor:
        drawn.setdefault("first", []).append(keys.uniform())
        return images

    def second(images: Tensor, keys: Keys) -> Tensor:
        drawn.setdefault("second", []).append(keys.uniform())
        return images

    Pipeline(first, second, second)(BYTES_BHWC, KEYS)
    Pipeline(second)(BYTES_BHWC, KEYS)
    one, other, alone = drawn["second"]
    assert torch.equal(one, alone)
    assert not torch.equal(one, other)
    assert not torch.equal(one, drawn["first"][0])


def test_evaluation_draws_nothing() -> None:
    pipeline = Pipeline(
        Crop(14, 14), Mirror(), Jitter(0.4), Erase(), Normalize((0.0,) * 3, (255.0,) * 3)
    ).evaluation()
    assert pipeline is not None
    assert pipeline.steps == (
        Resize(16, 16),
        CenterCrop(14, 14),
        Normalize((0.0,) * 3, (255.0,) * 3),
    )
    found = [pipeline(BYTES_BHWC, dataclasses.replace(KEYS, epoch=epoch)) for epoch in (1, 2)]
    assert torch.equal(*found)
    assert Pipeline(Mirror(), Cutout(2), Translate(1)).evaluation() is None
    with pytest.raises(DataError, match=r"has no method settled\(\)"):
        Pipeline(lambda images, keys: images).evaluation()


def test_the_table_of_costs_shows_the_costliest_first() -> None:
    def slow(images: Tensor, keys: Keys) -> Tensor:
        time.sleep(0.005)
        return images

    costs = Pipeline(Mirror(), slow).costs(BYTES_BHWC, KEYS)
    assert [cost.name for cost in costs] == ["slow", "Mirror"]
    assert 400 < costs[0].ms_per_1000 < 4000
    assert costs[0].share + costs[1].share == pytest.approx(1.0)


def test_the_last_of_an_odd_number_stays_alone() -> None:
    images, targets = mixup(
        BYTES_BHWC[:3], LABELS_B[:3], dataclasses.replace(KEYS, ids=KEYS.ids[:3]), num_classes=4
    )
    assert torch.equal(images[2], BYTES_BHWC[2].float())
    assert targets[2].tolist() == [0, 0, 1, 0]


WRONG: dict[str, tuple[Callable[[], object], str]] = {
    "a size": (lambda: Crop(0, 4), "a size of 0 x 4 pixels is not possible"),
    "a scale": (lambda: Crop(4, 4, scale=(0.5, 1.5)), "the scale of"),
    "a hue": (lambda: Jitter(hue=0.7), "a change of hue"),
    "a probability": (lambda: Mirror(1.5), "a probability"),
    "a deviation": (lambda: Normalize((1.0,), (0.0,)), "are not valid"),
    "colors": (
        lambda: normalize(BYTES_BHWC, (1.0,), (1.0,)),
        "1 means and 1 deviations are given for 3 channels",
    ),
    "a class": (lambda: soft_targets(LABELS_B, 3), "are not classes from 0 to 2"),
    "labels": (
        lambda: mixup(BYTES_BHWC, LABELS_B[:3], KEYS, num_classes=4),
        "12 images have 3 labels",
    ),
    "alpha": (lambda: mixup(BYTES_BHWC, LABELS_B, KEYS, num_classes=4, alpha=0.0), "alpha of"),
    "a crop": (lambda: center_crop(BYTES_BHWC, 40, 4), "is larger than images of 18 x 14"),
    "a shift": (lambda: Translate(14)(BYTES_BHWC, KEYS), "cannot be shifted by 14 pixels"),
    "images": (lambda: resize(BYTES_BHWC[0], 4, 4), "is not a batch of images"),
    "whole numbers": (lambda: resize(BYTES_BHWC.long(), 4, 4), "is not a batch of images"),
    "grey images": (lambda: Jitter(0.1)(BYTES_BHWC[..., :1], KEYS), "have 1 channels"),
    "a color": (
        lambda: erase(BYTES_BHWC, torch.zeros(12, 4).long(), (1.0, 2.0)),
        "is not a color of 3 channels",
    ),
    "no step": (Pipeline, "needs a step"),
    "a class as a step": (lambda: Pipeline(Mirror), "pass steps"),
}


@pytest.mark.parametrize("what", WRONG)
def test_what_cannot_be_is_told_in_words(what: str) -> None:
    make, says = WRONG[what]
    with pytest.raises(DataError, match=says):
        make()
