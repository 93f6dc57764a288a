"""Tests of what goes to the host while the device does not need it.

The same bits, bytes counted; here the host is the device too.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from surefoot.components.memory import offload
from surefoot.components.memory.offload import Offloaded
from surefoot.contract.state import master_of
from surefoot.core.errors import SpecError
from surefoot.prove.bench.rehearsal import Rehearsal
from surefoot.train.run import Run, drive
from tests.train.small import OPTIMIZERS, Small, assert_same, spec, state_of

ROWS, WIDTH = 64, 512


def train(steps: int, **tables: Any) -> tuple[dict[str, Tensor], Rehearsal]:
    """Run so many steps of a small model with dropout and BatchNorm, outside of a run.

    Gives its weights and buffers.
    """
    stated = spec(
        steps, task={"use": "tests.train.small:Small", "dropout": 0.2, "norm": True}, **tables
    )
    with Rehearsal(stated, steps=steps) as rehearsal:
        for _ in range(steps):
            rehearsal.take("step")
        return {
            name: tensor.clone() for name, tensor in rehearsal.assembly.model.state_dict().items()
        }, rehearsal


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_an_optimizer_on_the_host_moves_the_weights_to_the_same_bits_and_leaves_no_gradient(
    name: str,
) -> None:
    tables = {
        "optim": {**OPTIMIZERS[name], "lr": 0.05, "ema": 0.9},
        "train": {"batch": 4, "microbatch": 2, "device": "cpu"},
    }
    plain, _ = train(6, **tables)
    offloaded, rehearsal = train(6, **tables, memory={"offload": "optimizer"})
    assert_same(plain, offloaded)
    model = rehearsal.assembly.model
    assert all(parameter.grad is None for parameter in model.parameters())
    own = {each.untyped_storage().data_ptr() for each in model.parameters()}
    masters = [master_of(each) for each in model.parameters()]
    # the device would hold one, the host the other
    assert not own & {each.untyped_storage().data_ptr() for each in masters}
    moved = [
        tensor for update in rehearsal.assembly.updates for tensor, _ in update.guarded.states()
    ]
    assert {id(each) for each in moved} <= {id(each) for each in masters}


def test_activations_on_the_host_give_the_same_gradients_and_are_counted() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()) for _ in range(3)))
    batch = torch.randn(ROWS, WIDTH)

    def loss(model: nn.Module, batch: Tensor) -> Tensor:
        return model(batch).square().sum()  # type: ignore[no-any-return]

    offloaded = Offloaded(loss)
    gradients = []
    for each in (loss, offloaded):
        model.zero_grad()
        each(model, batch).backward()
        gradients.append(
            [
                parameter.grad.clone()
                for parameter in model.parameters()
                if parameter.grad is not None
            ]
        )
    assert all(map(torch.equal, *gradients))
    # what Tanh keeps of each of three blocks, the inputs of the second and third Linear, and that
    # of the square
    assert offloaded.num_bytes == (3 + 2 + 1) * ROWS * WIDTH * 4


def test_activations_on_the_host_train_to_the_same_bits_with_dropout_and_batch_norm(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(offload, "MIN_BYTES", 1)
    tables = {"train": {"batch": 4, "microbatch": 2, "device": "cpu"}}
    plain, _ = train(4, **tables)
    offloaded, rehearsal = train(4, **tables, memory={"offload": "activations"})
    assert_same(plain, offloaded)
    loss = rehearsal.assembly.updates[0].loss
    assert isinstance(loss, Offloaded)
    assert loss.num_bytes > 0


def test_on_a_cpu_it_is_refused_since_nothing_would_be_gained(tmp_path: Path) -> None:
    for what in ("activations", "optimizer"):
        stated = spec(
            2, memory={"offload": what}, train={"batch": 4, "length": "2 steps", "device": "cpu"}
        )
        with (
            pytest.raises(SpecError, match="already in host memory"),
            Run(stated, Small(), folder=tmp_path / "run"),
        ):
            pass
    assert not (tmp_path / "run").exists()
    with pytest.raises(SpecError, match="collects gradients on the host"):
        spec(1, memory={"offload": "optimizer", "update_in_backward": True})


@pytest.mark.gpu
@pytest.mark.parametrize("what", ["activations", "optimizer"])
def test_a_gpu_trains_as_without_it_and_goes_on_without_it(what: str, tmp_path: Path) -> None:
    found = []
    for name, memories in (("plain", ("none", "none")), ("offloaded", (what, "none"))):
        for length, memory in zip((4, 8), memories, strict=True):
            stated = spec(
                8,
                memory={"offload": memory},
                train={"batch": 4, "length": "8 steps", "device": "cuda"},
            )
            # no BatchNorm: the gradient of a bias before it is rounding noise, scaled up by Adam
            with Run(stated, Small(), folder=tmp_path / name, quiet=True) as run:
                if length == 8:
                    drive(run)
                else:
                    for report in run.steps():
                        if report.step == length:
                            break
                found.append(state_of(run))
    for name, tensor in found[1].items():
        torch.testing.assert_close(found[3][name].to(tensor), tensor, rtol=1e-5, atol=1e-6)
