"""Averages of weights against torch's AveragedModel.

Without the ramp, with buffers, saved and loaded.
"""

from __future__ import annotations

import io
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

from surefoot.components.optim.average import WeightAverage
from surefoot.core.errors import RunFolderError
from tests.components.test_optim import gradients_of, network


def train(model: nn.Module, steps: range, after: Any) -> None:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in steps:
        gradients_of(model, step)
        optimizer.step()
        after(step)


@pytest.mark.parametrize("use_buffers", [False, True])
@pytest.mark.parametrize("on_device", [False, True])
def test_without_the_ramp_the_averages_are_those_of_averaged_model(
    use_buffers: bool, on_device: bool
) -> None:
    model = network()
    theirs = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.9), use_buffers=use_buffers)
    ours: list[WeightAverage] = []

    def after(step: int) -> None:
        if step == 0:  # torch's copies the weights at its first update
            ours.append(
                WeightAverage(
                    model.parameters(),
                    0.9,
                    ramp=False,
                    buffers=model.buffers() if use_buffers else (),
                )
            )
        else:
            ours[0].update(torch.tensor(True) if on_device else True)
        theirs.update_parameters(model)

    train(model, range(6), after)
    own = {name: value.clone() for name, value in model.state_dict().items()}
    with ours[0].swapped_in():
        for name, value in model.state_dict().items():
            if "num_batches" in name:  # a count, which torch's rounds down at every update
                assert int(value) == int(own[name])
                continue
            torch.testing.assert_close(
                value, theirs.module.state_dict()[name], rtol=1e-5, atol=1e-6
            )
    assert all(torch.equal(value, own[name]) for name, value in model.state_dict().items())


@pytest.mark.parametrize("ramp", [False, True])
@pytest.mark.parametrize("with_buffers", [False, True])
def test_averages_that_were_saved_and_loaded_continue_with_the_same_bits(
    ramp: bool, with_buffers: bool
) -> None:
    def make(model: nn.Module) -> WeightAverage:
        return WeightAverage(
            model.parameters(), 0.9, ramp=ramp, buffers=model.buffers() if with_buffers else ()
        )

    whole, parted = network(), network()
    expected, first = make(whole), make(parted)
    train(whole, range(8), lambda step: expected.update())
    train(parted, range(4), lambda step: first.update())
    file = io.BytesIO()
    torch.save(first.state_dict(), file)
    file.seek(0)
    second = make(parted)
    second.load_state_dict(torch.load(file))
    assert second.num_updates == 4
    train(parted, range(4, 8), lambda step: second.update())

    def every(given: WeightAverage) -> list[Tensor]:
        return [*given.averages, *given.buffer_averages]

    assert all(
        torch.equal(one, other) for one, other in zip(every(second), every(expected), strict=True)
    )


@pytest.mark.parametrize("applied", [False, torch.tensor(False)])
def test_a_step_that_was_skipped_moves_no_average(applied: bool | Tensor) -> None:
    model = network()
    average = WeightAverage(model.parameters(), 0.5, ramp=False, buffers=model.buffers())
    before = [each.clone() for each in (*average.averages, *average.buffer_averages)]
    train(model, range(2), lambda step: average.update(applied))
    assert all(map(torch.equal, before, (*average.averages, *average.buffer_averages)))
    assert average.num_updates == 0


def test_averages_of_other_parameters_are_refused_and_nothing_is_loaded() -> None:
    average, other = (
        WeightAverage(network().parameters(), 0.9),
        WeightAverage([torch.ones(3)], 0.9),
    )
    before = [each.clone() for each in average.averages]
    with pytest.raises(RunFolderError, match="of 1 parameters, with shapes"):
        average.load_state_dict(other.state_dict())
    assert all(map(torch.equal, before, average.averages))
