"""A term that is a constant in some batches adds its value, as in a plain loop."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from surefoot import Loss, Update
from surefoot.components.data.sources.arrays import Arrays
from surefoot.components.optim.update import GuardedUpdate
from surefoot.core.errors import SurefootError, TaskError
from surefoot.train.assemble import assemble
from surefoot.train.preflight import check
from surefoot.train.step.joined import whole
from tests.train.constant_terms import KINDS, Boxes, Only, assert_alike, plain, spec, train
from tests.train.test_whole_step import _anew, recompile_limit  # noqa: F401 - fixtures

IN_BACKWARD = {"memory": {"update_in_backward": True}, "stability": {"nonfinite": "stop"}}
NOTE = (
    "the term boxes of update loss has no gradient on the 8 samples of the check: there it does "
    "not train the model"
)


@pytest.mark.parametrize("microbatch", [None, 4, 2])
@pytest.mark.parametrize("kind", KINDS)
def test_a_constant_term_adds_its_value_and_no_gradient(
    kind: Any, microbatch: int | None, tmp_path: Path
) -> None:
    assert_alike(train(tmp_path / "run", kind(), spec(microbatch)), plain(kind()))


@pytest.mark.parametrize("kind", KINDS)
def test_an_update_inside_the_backward_pass_takes_a_constant_term(
    kind: Any, tmp_path: Path
) -> None:
    assert_alike(train(tmp_path / "run", kind(), spec(**IN_BACKWARD)), plain(kind()))


@pytest.mark.parametrize("microbatch", [None, 2])
def test_the_first_samples_may_all_be_without_a_gradient_of_a_term(
    microbatch: int | None, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert_alike(train(tmp_path / "run", Boxes(0), spec(microbatch)), plain(Boxes(0)))
    notes = [line for line in check(assemble(spec(microbatch), Boxes(0))) if "boxes" in line]
    assert notes == [NOTE]


def test_the_noise_scale_is_measured_with_a_microbatch_without_a_gradient(tmp_path: Path) -> None:
    class Late(Only):
        """The first microbatch of each batch has no boxes."""

        def boxes(self, output: Tensor, batch: Any) -> Tensor:
            return super().boxes(output, (*batch[:2], batch[3]))

        def data(self, split: str) -> Any:
            x, y, _ = super().data(split).read(torch.arange(24).numpy())
            return Arrays(x, y, torch.ones(24), (torch.arange(24) % 8 > 1).float())

    noisy = spec(2).replace(observe={"noise": True, "tensorboard": False})
    assert_alike(train(tmp_path / "run", Late(), noisy), plain(Late()))


def test_a_task_of_which_no_term_has_a_gradient_is_refused() -> None:
    class Detached(Boxes):
        def classes(self, output: Tensor, batch: Any) -> Tensor:
            return super().classes(output.detach(), batch)

        def boxes(self, output: Tensor, batch: Any) -> Tensor:
            return torch.zeros(())

    with pytest.raises(TaskError, match="the loss of update loss has no gradient"):
        check(assemble(spec(), Detached()))


@pytest.mark.parametrize("tables", [{}, IN_BACKWARD], ids=["", "in backward"])
def test_a_step_of_which_no_term_has_a_gradient_ends_the_run_as_the_plain_loop(
    tables: dict[str, Any], tmp_path: Path
) -> None:
    class Empty(Only):
        def __init__(self) -> None:
            Boxes.__init__(self, 8)

    with pytest.raises(RuntimeError, match="does not require grad"):
        plain(Empty())
    with pytest.raises(SurefootError, match=r"step 2: .*has no gradient: all of its terms"):
        train(tmp_path / "run", Empty(), spec(**tables))


def test_one_update_of_two_has_a_constant_term(tmp_path: Path) -> None:
    class Pair(Boxes):
        def updates(self, model: nn.Module) -> list[Update]:
            def whole(model: nn.Module, batch: Any) -> Loss:
                return self.loss(model(batch[0]), batch)

            return [
                Update("body", whole, model[0].parameters()),  # type: ignore[index]
                Update("head", whole, model[2].parameters()),  # type: ignore[index]
            ]

    found = train(tmp_path / "run", Pair(), spec(4))
    assert all(loss is not None for loss in found["losses"])


def test_a_compiled_step_takes_a_constant_term() -> None:
    """Whether a batch has boxes is a part of its structure, so each kind has a graph."""
    torch.manual_seed(0)
    models = [nn.Linear(4, 3), nn.Linear(4, 3)]
    models[1].load_state_dict(models[0].state_dict())
    optimizer = torch.optim.SGD(models[0].parameters(), lr=0.1)
    update = GuardedUpdate([torch.optim.SGD(models[1].parameters(), lr=0.1, fused=True)])

    def loss(model: nn.Module, batch: Any) -> Loss:
        x, boxes = batch
        output = model(x)
        total = (output[: len(boxes)] - boxes).square().sum() if len(boxes) else torch.zeros(())
        one, many = output.square().sum(), len(x)
        return Loss(*Loss.sum(one, many).terms, *Loss.sum(total, many, name="boxes").terms)

    step = whole.compile_step(models[1], loss, update)
    draw = torch.Generator().manual_seed(1)
    for num_boxes in (3, 0, 3, 0):
        batch = torch.randn(8, 4, generator=draw), torch.randn(num_boxes, 3, generator=draw)
        optimizer.zero_grad()
        one, other = loss(models[0], batch).terms
        ((one.total + other.total) / 8).backward()
        optimizer.step()
        terms, _, applied = step(batch)
        assert applied
        torch.testing.assert_close(terms[0].total, one.total.detach())
    torch.testing.assert_close(list(models[1].parameters()), list(models[0].parameters()))


def test_a_compiled_step_names_a_loss_without_a_gradient() -> None:
    model = nn.Linear(4, 3)
    update = GuardedUpdate([torch.optim.SGD(model.parameters(), lr=0.1, fused=True)])
    step = whole.compile_step(
        model, lambda model, batch: Loss.sum(model(batch).detach().sum(), len(batch)), update
    )
    with pytest.raises(TaskError, match="has no gradient: all of its terms"):
        step(torch.randn(8, 4))
