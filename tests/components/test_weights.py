"""Commits of weights: what is stored is what the model holds, however its tensors share storage."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import nn

from surefoot.components import checkpoint
from surefoot.core.errors import NumbersError


class Sharing(nn.Module):
    """Tied, transposed, partial and empty parameters, and a buffer that is a view of a parameter."""

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
def test_one_number_that_is_not_finite_is_never_committed(tmp_path: Path, name: str, value: float) -> None:
    model = Sharing()
    getattr(model, name).data.view(-1)[1] = value
    with pytest.raises(NumbersError, match=name):
        checkpoint.save(tmp_path, 3, {"model": model})
    assert not list(tmp_path.rglob("*.safetensors"))
