"""What stands in the place of BatchNorm: each sample by itself, with its scale and shift."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from surefoot.components.stability.norms import convert_batchnorm, find_batch_norms
from surefoot.core.errors import SpecError, TaskError


class Shared(nn.Module):
    """One norm under two names, and one inside a block."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 24, 3)
        self.norm = nn.BatchNorm2d(24, eps=1e-3)
        self.again = self.norm
        self.block = nn.Sequential(
            nn.Conv2d(24, 64, 3), nn.BatchNorm2d(64, affine=False), nn.ReLU()
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        made: torch.Tensor = self.block(self.again(self.norm(self.conv(x))))
        return made


def test_every_batchnorm_is_replaced_by_name_with_its_scale_and_shift() -> None:
    model = Shared()
    nn.init.uniform_(model.norm.weight)
    kept = model.norm.weight
    assert convert_batchnorm(model, "group") == ["norm", "again", "block.1"]
    assert find_batch_norms(model) == {}
    assert isinstance(model.norm, nn.GroupNorm)
    assert model.norm is model.again
    assert model.norm.weight is kept
    assert (model.norm.num_groups, model.norm.eps, model.block[1].num_groups) == (3, 1e-3, 8)
    assert not list(model.buffers()), "no running statistics are left"
    assert convert_batchnorm(model, "group") == []


@pytest.mark.parametrize("to", ["group", "layer"])
def test_a_sample_is_normed_by_itself_in_training_and_in_evaluation(to: str) -> None:
    model = Shared()
    convert_batchnorm(model, to)  # type: ignore[arg-type]
    x = torch.randn(6, 3, 8, 8)
    torch.testing.assert_close(model(x)[2:4], model(x[2:4]))
    assert torch.equal(model.eval()(x), model.train()(x))


def test_layer_is_the_layernorm_over_channels_and_positions() -> None:
    model = nn.Sequential(nn.BatchNorm2d(5))
    convert_batchnorm(model, "layer")
    x = torch.randn(4, 5, 3, 3)
    torch.testing.assert_close(model(x), nn.functional.layer_norm(x, (5, 3, 3)))


def test_what_cannot_be_converted_is_refused() -> None:
    with pytest.raises(TaskError, match="the model itself is a BatchNorm"):
        convert_batchnorm(nn.BatchNorm1d(3), "group")
    with pytest.raises(SpecError, match="cannot be made 'instance'"):
        convert_batchnorm(nn.Sequential(nn.BatchNorm1d(3)), "instance")  # type: ignore[arg-type]


def test_a_batchnorm_that_does_more_than_norm_is_refused_by_name() -> None:
    class Active(nn.BatchNorm2d):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return super().forward(x).relu()

    model = nn.Sequential(nn.Conv2d(3, 8, 3), Active(8))
    with pytest.raises(TaskError, match="1 is a Active, a BatchNorm with its own forward pass"):
        convert_batchnorm(model, "group")
    assert isinstance(model[1], Active)
