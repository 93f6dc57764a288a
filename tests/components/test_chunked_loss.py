"""Tests of the chunked linear and cross-entropy.

The sum, the count and the gradients of the plain way, without its logits.
"""

from __future__ import annotations

import sys
from itertools import islice
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from surefoot import Run, linear_cross_entropy
from surefoot.contract import spec_file
from surefoot.contract.spec import RunSpec
from surefoot.core.errors import InputError
from surefoot.prove.ladder import find_rungs
from surefoot.tasks.transformer import HiddenAndHead, Transformer, nats

WIDTH, WORDS, ROWS = 16, 203, 37
TOLERANCE = {torch.float64: 1e-12, torch.float32: 1e-6, torch.bfloat16: 2**-7}


def draw(
    dtype: torch.dtype = torch.float32, *, ignored: int = 5
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    draws = torch.Generator().manual_seed(0)
    hidden, weight, bias = (
        torch.randn(*shape, generator=draws, dtype=torch.float64).to(dtype).requires_grad_()
        for shape in ((ROWS, WIDTH), (WORDS, WIDTH), (WORDS,))
    )
    targets = torch.randint(0, WORDS, (ROWS,), generator=draws)
    targets[torch.randperm(ROWS, generator=draws)[:ignored]] = -100
    return hidden, weight, bias, targets


def plain(
    hidden: Tensor, weight: Tensor, bias: Tensor | None, targets: Tensor, **how: Any
) -> Tensor:
    logits = F.linear(hidden, weight, bias)
    return F.cross_entropy(
        logits.to(torch.promote_types(logits.dtype, torch.float32)), targets, reduction="sum", **how
    )


def assert_near(one: Tensor, other: Tensor, tolerance: float) -> None:
    assert (one.dtype, one.shape) == (other.dtype, other.shape)
    assert (one - other).abs().max() <= tolerance * max(1.0, other.detach().abs().max().item())


@pytest.mark.parametrize("chunk", [1, 8, ROWS, 1000, None])
@pytest.mark.parametrize("smoothing", [0.0, 0.1])
@pytest.mark.parametrize("dtype", list(TOLERANCE))
def test_sum_count_and_gradients_are_those_of_the_plain_way(
    dtype: torch.dtype, smoothing: float, chunk: int | None
) -> None:
    hidden, weight, bias, targets = draw(dtype)
    total, count = linear_cross_entropy(
        hidden, weight, targets, bias, chunk=chunk, label_smoothing=smoothing
    )
    expected = plain(hidden, weight, bias, targets, label_smoothing=smoothing)
    assert count == ROWS - 5
    assert_near(total, expected, TOLERANCE[dtype])
    scale = torch.tensor(0.37, dtype=total.dtype)
    own = torch.autograd.grad(total, (hidden, weight, bias), scale)
    for mine, theirs in zip(
        own, torch.autograd.grad(expected, (hidden, weight, bias), scale), strict=True
    ):
        assert_near(mine, theirs, TOLERANCE[dtype])


@pytest.mark.parametrize(
    "trained", [(True, False, False), (False, True, False), (False, False, True)]
)
def test_only_what_is_trained_gets_a_gradient(trained: tuple[bool, bool, bool]) -> None:
    *parts, targets = draw()
    for part, is_trained in zip(parts, trained, strict=True):
        part.requires_grad_(is_trained)
    linear_cross_entropy(parts[0], parts[1], targets, parts[2], chunk=8)[0].backward()
    own = [part.grad for part in parts]
    assert [grad is not None for grad in own] == list(trained)
    for part in parts:
        part.grad = None
    plain(*parts, targets).backward()
    index = trained.index(True)
    assert_near(own[index], parts[index].grad, TOLERANCE[torch.float32])


def test_a_weight_that_is_also_the_embedding_gets_both_its_gradients() -> None:
    _, weight, _, targets = draw(ignored=0)
    ids = targets.roll(1)
    linear_cross_entropy(F.embedding(ids, weight), weight, targets, chunk=8)[0].backward()
    own, weight.grad = weight.grad, None
    plain(F.embedding(ids, weight), weight, None, targets).backward()
    assert_near(own, weight.grad, TOLERANCE[torch.float32])


def test_other_shapes_another_ignored_index_and_no_rows_at_all() -> None:
    hidden, weight, _, targets = draw(ignored=0)
    total, count = linear_cross_entropy(
        hidden[:36].view(4, 9, WIDTH), weight, targets[:36].view(4, 9), ignore_index=int(targets[3])
    )
    expected = plain(hidden[:36], weight, None, targets[:36], ignore_index=int(targets[3]))
    assert count == (targets[:36] != targets[3]).sum()
    assert_near(total, expected, TOLERANCE[torch.float32])
    total, count = linear_cross_entropy(hidden[:0], weight, targets[:0])
    total.backward()
    assert (total.item(), count.item(), weight.grad.count_nonzero().item()) == (0.0, 0, 0)
    with pytest.raises(RuntimeError, match="index -1 is out of bounds"):
        linear_cross_entropy(hidden, weight, torch.full((ROWS,), -1))


def test_under_autocast_it_computes_in_its_dtype_and_the_gradients_keep_that_of_the_weights() -> (
    None
):
    hidden, weight, bias, targets = draw()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        total, _ = linear_cross_entropy(hidden, weight, targets, bias, chunk=8)
        expected = plain(hidden, weight, bias, targets)
    assert total.dtype == torch.float32
    own = torch.autograd.grad(total, (hidden, weight, bias))
    assert all(grad.dtype == torch.float32 for grad in own)
    assert_near(total, expected, TOLERANCE[torch.bfloat16])
    for mine, theirs in zip(
        own, torch.autograd.grad(expected, (hidden, weight, bias)), strict=True
    ):
        assert (mine - theirs).norm() <= TOLERANCE[torch.bfloat16] * theirs.norm()


def test_a_second_derivative_and_sizes_that_do_not_fit_are_refused_in_words() -> None:
    hidden, weight, bias, targets = draw()
    total, _ = linear_cross_entropy(hidden, weight, targets)
    with pytest.raises(InputError, match="can be differentiated once"):
        torch.autograd.grad(total, hidden, create_graph=True)
    for wrong in (
        (hidden, weight.T, targets),
        (hidden, weight, targets[1:]),
        (hidden, weight, targets, bias[1:]),
    ):
        with pytest.raises(InputError, match=r"fit|bias"):
            linear_cross_entropy(*wrong)
    with pytest.raises(InputError, match=r"the targets are torch\.float32"):
        linear_cross_entropy(hidden, weight, targets.float())
    with pytest.raises(InputError, match="chunk is 0"):
        linear_cross_entropy(hidden, weight, targets, chunk=0)
    with pytest.raises(InputError, match="label_smoothing is 1"):
        linear_cross_entropy(hidden, weight, targets, label_smoothing=1.0)


class Largest(TorchDispatchMode):
    """The number of elements of the largest tensor that any operator gave."""

    elements = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        made = func(*args, **(kwargs or {}))
        self.elements = max(
            [
                self.elements,
                *(each.numel() for each in tree_leaves(made) if isinstance(each, Tensor)),
            ]
        )
        return made


def test_no_tensor_has_more_than_a_chunk_of_logits() -> None:
    hidden, weight, bias, targets = draw()
    with Largest() as largest:
        linear_cross_entropy(hidden, weight, targets, bias, chunk=8)[0].backward()
    assert largest.elements == max(8 * WORDS, WORDS * WIDTH)
    with Largest() as largest:
        plain(hidden, weight, bias, targets).backward()
    assert largest.elements == ROWS * WORDS


def test_a_transformer_with_it_has_the_gradients_of_one_without_and_logits_in_evaluation() -> None:
    made = {}
    ids, targets = torch.arange(24).view(2, 12) % 11, torch.arange(24).view(2, 12) % 7
    targets[0, 3] = -100
    for chunked in (False, True):
        torch.manual_seed(0)
        model = Transformer(11, layers=1, width=8, heads=2, length=12, chunked_loss=chunked)
        output = model(ids)
        assert isinstance(output, HiddenAndHead) is chunked
        total, count = nats(output, targets)
        total.backward()
        made[chunked] = [total, count, *(parameter.grad for parameter in model.parameters())]
        assert model.eval()(ids).shape == (2, 12, 11)
    for own, expected in zip(made[True], made[False], strict=True):
        assert_near(own.detach(), expected.detach(), 1e-5)


def test_a_run_switches_it_on_with_a_line_of_the_spec_and_has_the_same_losses(
    tmp_path: Path,
) -> None:
    losses = []
    for chunked in (False, True):
        changes = [
            (f"task.{name}", value, "")
            for name, value in {"layers": 1, "width": 32, "heads": 2, "length": 32}.items()
        ]
        changes += [
            ("task.chunked_loss", chunked, ""),
            ("data.folder", str(Path(sys.modules["json"].__file__).parent), ""),
        ]
        changes += [
            ("precision.compute", "fp32", ""),
            ("train.batch", 4, ""),
            ("evaluate.batch", 64, ""),
        ]
        with Run(
            spec_file.read("pycorpus", changes).spec, folder=tmp_path / str(chunked), quiet=True
        ) as run:
            losses.append([report.loss for report in islice(run.steps(), 3)])
    assert losses[1] == pytest.approx(losses[0], rel=1e-5)


def test_its_rung_is_there_for_tasks_that_have_it() -> None:
    for task, is_here in (("pycorpus", True), ("digits", False)):
        found = {
            rung.name: rung
            for rung in find_rungs(RunSpec(task={"use": task}), device="cpu", cores=2)
        }
        assert found["chunked loss"].is_here is is_here


def test_in_16_bits_what_flows_into_the_loss_is_not_rounded_to_them() -> None:
    """1 / 3 rounded to bf16 is longer by 0.13 %, and so were all gradients of hidden.

    Each is rounded once, and to both sides.
    """
    for count in (3, 7, 11):
        hidden, weight, bias, targets = draw(torch.bfloat16, ignored=0)
        total, _ = linear_cross_entropy(hidden, weight, targets, bias)
        (whole,) = torch.autograd.grad(total, hidden, retain_graph=True)
        (mean,) = torch.autograd.grad(total / count, hidden)
        ratio = (mean.double() * whole.double()).sum() / whole.double().square().sum()
        assert float(ratio * count) == pytest.approx(1.0, abs=5e-4)
