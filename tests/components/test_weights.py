"""Commits of weights: what is stored is what the model holds, however its tensors share storage."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
import torch
from torch import nn

from surefoot.components import checkpoint
from surefoot.components.checkpoint.tensor_files import is_finite
from surefoot.core.errors import NumbersError


class Sharing(nn.Module):
    """Tied, transposed, partial and empty parameters, and a buffer that is a parameter's view."""

    def __init__(self) -> None:
        super().__init__()
        self.whole = nn.Parameter(torch.randn(4, 4))
        self.tied = self.whole
        self.turned = nn.Parameter(self.whole.data.T)
        self.part = nn.Parameter(torch.randn(10)[:3])
        self.empty, self.also_empty = nn.Parameter(torch.empty(0)), nn.Parameter(torch.empty(0))
        self.flat: torch.Tensor
        self.register_buffer("flat", self.whole.data.view(16))


def test_tensors_that_share_storage_come_back_as_they_were(tmp_path: Path) -> None:
    model, other = Sharing(), Sharing()
    checkpoint.save(tmp_path, 3, {"model": model})
    checkpoint.load_into(other, tmp_path, 3)
    for name, tensor in model.state_dict().items():
        assert torch.equal(tensor, other.state_dict()[name]), name


@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
@pytest.mark.parametrize("name", ["whole", "part"])
def test_one_number_that_is_not_finite_is_never_committed(
    tmp_path: Path, name: str, value: float
) -> None:
    model = Sharing()
    getattr(model, name).data.view(-1)[1] = value
    with pytest.raises(NumbersError, match=name):
        checkpoint.save(tmp_path, 3, {"model": model})
    assert not list(tmp_path.rglob("*.safetensors"))


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("place", [0, 1, 300_000, -1])
def test_one_number_that_is_none_is_found_in_every_dtype_and_place(
    dtype: torch.dtype, place: int
) -> None:
    tensor = torch.full((300_001,), 6e4, dtype=dtype)  # whose sum overflows in 16 bits
    assert is_finite(tensor)
    for value in (math.nan, math.inf, -math.inf):
        spoiled = tensor.clone()
        spoiled[place] = value
        assert not is_finite(spoiled)
    assert is_finite(torch.tensor([3, 4]))
    assert is_finite(torch.empty(0))
