"""Texts of differing length are padded to few widths, and only real tokens count.

What padding costs is told.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from surefoot.components.data.blocks import Order
from surefoot.components.data.sources.packed import Packed
from surefoot.components.data.sources.texts import Texts, join_texts
from surefoot.contract.task import Source
from surefoot.core.errors import DataError

DRAW = np.random.default_rng(0)
TEXTS = [DRAW.integers(1, 50, size=size) for size in (3, 70, 1, 20, 16, 17, 33, 8, 2)]


def test_a_batch_is_as_wide_as_the_bound_above_its_longest_text_and_holds_each_text_whole() -> None:
    source = Texts(*join_texts(TEXTS), labels=np.arange(9) * 10)
    assert source.bounds == (16, 32, 64, 70)
    for ids, width in (([0, 2, 7], 16), ([4], 16), ([5, 0], 32), ([6], 64), ([1, 0], 70)):
        batch = source.read(np.array(ids))
        assert batch["inputs"].shape == batch["targets"].shape == (len(ids), width)
        assert batch["labels"].tolist() == [10 * number for number in ids]
        for row, number in enumerate(ids):
            text = TEXTS[number].tolist()
            missing = width - len(text)
            assert batch["lengths"][row] == len(text)
            assert batch["inputs"][row].tolist() == text + [0] * missing
            assert batch["targets"][row].tolist() == text[1:] + [-100] * (missing + 1)
    assert isinstance(source, Source)


def test_a_loss_counts_real_tokens_alone_whatever_the_padding() -> None:
    table = torch.randn(50, 50, generator=torch.Generator().manual_seed(0))
    losses = []
    for bounds in (None, (128,)):
        batch = Texts(*join_texts(TEXTS), bounds=bounds).read(np.array([0, 3, 6]))
        total = F.cross_entropy(
            table[batch["inputs"]].flatten(0, 1), batch["targets"].flatten(), reduction="sum"
        )
        losses.append((float(total), int((batch["targets"] != -100).sum())))
    assert losses[0][1] == losses[1][1] == 2 + 19 + 32
    assert losses[0][0] == pytest.approx(losses[1][0], rel=1e-6)


def test_texts_together_are_of_about_one_length_each_once_and_pad_little() -> None:
    lengths = DRAW.integers(1, 500, size=1003)
    texts = [np.full(length, number) for number, length in enumerate(lengths)]
    ids, offsets = join_texts(texts)
    bounds = tuple(range(32, 513, 32))
    alone, grouped = (
        Texts(ids, offsets, bounds=bounds),
        Texts(ids, offsets, bounds=bounds, together=16),
    )
    order = Order(len(grouped), seed=3).ids(0, 0, len(grouped))
    batches = [grouped.read(order[place : place + 1]) for place in range(len(grouped))]
    seen = [int(row[0]) for batch in batches for row in batch["inputs"]]
    assert sorted(seen) == list(range(1003))
    padded = sum(batch["inputs"].numel() for batch in batches)
    assert grouped.efficiency() == pytest.approx(len(ids) / padded, rel=1e-9)
    assert grouped.efficiency() > 0.93 > 0.60 > alone.efficiency(16)
    assert grouped.digest != alone.digest


def test_the_efficiency_of_random_batches_is_that_of_drawing_many() -> None:
    texts = [np.zeros(length, dtype=np.int64) for length in DRAW.integers(1, 300, size=400)]
    source = Texts(*join_texts(texts), bounds=(64, 128, 192, 256, 300))
    draw, real, padded = np.random.default_rng(5), 0, 0
    for _ in range(400):
        batch = source.read(draw.choice(400, size=4))
        real, padded = real + int(batch["lengths"].sum()), padded + batch["inputs"].numel()
    assert source.efficiency(4) == pytest.approx(real / padded, abs=0.01)
    assert f"about {source.efficiency(32):.0%}" in source.describe()


BAD: dict[str, tuple[Any, str]] = {
    "none": (lambda: join_texts([]), "no text"),
    "an empty one": (lambda: join_texts([[1], []]), "text 1 is float64 of shape"),
    "floats": (lambda: join_texts([[1.5, 2.0]]), "text 0 is float64"),
    "nested": (lambda: join_texts([[[1, 2]]]), "text 0 is int64 of shape"),
    "longer than the last bound": (
        lambda: Texts(*join_texts(TEXTS), bounds=(16, 64)),
        "text 1 has 70 tokens, but the last bound is 64",
    ),
    "bounds that fall": (
        lambda: Texts(*join_texts(TEXTS), bounds=(128, 64)),
        "bounds .* are not possible",
    ),
    "no bounds": (lambda: Texts(*join_texts(TEXTS), bounds=()), "bounds .* are not possible"),
    "labels of a different number": (
        lambda: Texts(*join_texts(TEXTS), labels=np.arange(3)),
        "for 9 texts",
    ),
    "none together": (lambda: Texts(*join_texts(TEXTS), together=0), "groups of 0 texts"),
    "a number beyond": (
        lambda: Texts(*join_texts(TEXTS)).read(np.array([9])),
        "sample 9 was requested",
    ),
}


@pytest.mark.parametrize("what", BAD)
def test_what_are_no_texts_is_refused_in_words(what: str) -> None:
    make, says = BAD[what]
    with pytest.raises(DataError, match=says) as caught:
        make()
    assert caught.value.hint


def test_a_list_of_texts_packs_too() -> None:
    source = Packed(*join_texts(TEXTS), 16)
    targets = source.read(np.arange(len(source)))["targets"]
    assert int((targets != -100).sum()) == sum(len(text) - 1 for text in TEXTS)
