"""The private way through autograd and the public one give the same gradients, bit for bit."""

from __future__ import annotations

import sys

import pytest
import torch
from torch import Tensor, nn

from surefoot.components.optim.backward import backward


def gradients(model: nn.Module, run: object) -> list[Tensor]:
    inputs, targets = (
        torch.randn(8, 6, generator=torch.Generator().manual_seed(1)),
        torch.arange(8) % 3,
    )
    model.zero_grad()
    for part in (slice(0, 5), slice(5, 8)):  # twice, so that accumulation is seen too
        total = nn.functional.cross_entropy(model(inputs[part]), targets[part], reduction="sum")
        run([total], [torch.tensor(0.125)])  # type: ignore[operator]
    return [
        parameter.grad.clone() for parameter in model.parameters() if parameter.grad is not None
    ]


@pytest.mark.parametrize("gone", [False, True], ids=["with the private call", "without it"])
def test_the_direct_call_of_the_engine_gives_the_gradients_of_the_public_one(
    gone: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if gone:
        monkeypatch.setattr(sys.modules[backward.__module__], "_run", None)
    model = nn.Sequential(nn.Linear(6, 5), nn.Tanh(), nn.Linear(5, 3))
    own, public = gradients(model, backward), gradients(model, torch.autograd.backward)
    assert len(own) == 4
    assert all(torch.equal(one, other) for one, other in zip(own, public, strict=True))
