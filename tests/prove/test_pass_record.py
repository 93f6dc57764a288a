"""Which operators of a float64 pass are noted as narrower, and which as drawing numbers.

With module and line.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from surefoot.prove.layouts.pass_record import PassRecord
from surefoot.prove.layouts.wide import make_plain


class Called(nn.Module):
    """A module whose forward pass is a function."""

    def __init__(self, function: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.function = function

    def forward(self, x: Tensor) -> Tensor:
        return self.function(x)


class NarrowBackward(torch.autograd.Function):
    """A step whose gradient alone is rounded."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x * 1.0

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Tensor:
        return gradients[0].half().double()


def watch(function: Callable[[Tensor], Tensor]) -> PassRecord:
    model = nn.Sequential(nn.Linear(4, 4), Called(function)).double()
    record = PassRecord()
    record.know(model)
    batch = torch.randn(6, 4, dtype=torch.float64)
    with record:
        model(batch).sum().backward()
    return record


@pytest.mark.parametrize(
    ("function", "dtype", "module"),
    [
        (lambda x: x.float().double(), "float32", "1"),
        (lambda x: x.to(torch.bfloat16), "bfloat16", "1"),
        (lambda x: F.softmax(x, dim=-1, dtype=torch.float32), "float32", "1"),
        (lambda x: x.sum(0, dtype=torch.float32), "float32", "1"),
        (lambda x: x * torch.arange(4, dtype=torch.uint8).float(), "float32", "1"),
        (lambda x: x @ torch.ones(4, 4, dtype=torch.float32).double(), "float32", "1"),
        (NarrowBackward.apply, "float16", ""),
    ],
)
def test_an_operator_in_fewer_bits_is_noted_with_its_module_and_line(
    function: Callable[[Tensor], Tensor], dtype: str, module: str
) -> None:
    found = watch(function)
    assert {each.dtype for each in found.narrow} == {dtype}
    assert found.narrow[0].module == module
    assert all(each.line.startswith(f"{__file__}:") for each in found.narrow)
    assert not found.draws


@pytest.mark.parametrize(
    "function",
    [
        lambda x: x * 2,
        lambda x: torch.sigmoid(x) @ x.T,
        lambda x: F.scaled_dot_product_attention(*[x[None, None]] * 3),
    ],
)
def test_a_pass_in_float64_alone_has_nothing_to_note(function: Callable[[Tensor], Tensor]) -> None:
    found = watch(function)
    assert (found.narrow, found.draws) == ((), ())


@pytest.mark.parametrize(
    "function",
    [
        torch.nn.functional.dropout,
        lambda x: x + torch.randn_like(x),
        lambda x: x[torch.randperm(len(x))],
        lambda x: F.scaled_dot_product_attention(*[x[None, None]] * 3, dropout_p=0.1),
    ],
)
def test_an_operator_that_draws_is_noted(function: Callable[[Tensor], Tensor]) -> None:
    assert watch(function).draws


def test_plain_layers_neither_draw_nor_join_samples_and_put_back_nothing_of_the_rest() -> None:
    model = nn.Sequential(nn.BatchNorm1d(4), nn.Dropout(0.5), nn.Identity(), nn.AlphaDropout(0.5))
    make_plain(model)
    x = torch.randn(6, 4)
    assert torch.equal(model.train()(x), nn.BatchNorm1d(4).eval()(x))
    assert model[2].training
