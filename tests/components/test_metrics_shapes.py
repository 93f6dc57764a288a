"""Accuracy of shapes that were never meant: refused with both shapes, not broadcast."""

from __future__ import annotations

import re

import pytest
import torch

from surefoot.components.metrics import accuracy, top_k
from surefoot.core.errors import TaskError

REFUSED = {
    "labels as a column": ((8, 5), (8, 1), r"squeeze\(-1\)"),
    "one logit": ((8, 1), (8,), "mean_of"),
    "one logit and a column": ((8, 1), (8, 1), "mean_of"),
    "no classes": ((8,), (8,), "mean_of"),
    "labels as shares of classes": ((8, 5), (8, 5), "labels"),
    "other samples": ((8, 5), (4,), "labels"),
    "channels first": ((2, 5, 4, 4), (2, 4, 4), "movedim"),
    "channels first, as many as rows": ((2, 4, 4, 4), (2, 4, 4), "movedim"),
    "labels without time": ((2, 6, 5), (2,), "labels"),
    "labels of a time more": ((2, 6, 5), (2, 7), "labels"),
}


@pytest.mark.parametrize("kind", REFUSED)
@pytest.mark.parametrize("k", [1, 2])
def test_shapes_that_do_not_belong_together_are_refused_with_both(kind: str, k: int) -> None:
    logits, labels, hint = REFUSED[kind]
    with pytest.raises(TaskError) as caught:
        top_k(torch.randn(logits), torch.zeros(labels, dtype=torch.int64), k)
    assert str(logits) in caught.value.message
    assert str(labels) in caught.value.message
    assert re.search(hint, str(caught.value.hint))


@pytest.mark.parametrize("shape", [(8,), (2, 6), (3, 3), (2, 4, 5)])
def test_the_last_dimension_holds_the_classes(shape: tuple[int, ...]) -> None:
    labels = torch.randint(0, 3, shape)
    logits = torch.nn.functional.one_hot(labels, 3).float()
    assert accuracy(logits, labels).value() == 1.0
    assert accuracy(logits, (labels + 1) % 3).value() == 0.0


def test_the_hint_for_channels_first_is_right() -> None:
    labels = torch.randint(0, 5, (2, 4, 4))
    logits = torch.nn.functional.one_hot(labels, 5).float().movedim(-1, 1)
    assert accuracy(logits.movedim(1, -1).flatten(0, -2), labels.flatten()).value() == 1.0
