"""Recomputation changes memory and time and no bit besides.

It finds its blocks, and keeps within its budget.
"""

from __future__ import annotations

import contextlib
import copy
import math
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.nn.utils.parametrizations import spectral_norm
from torch.utils.flop_counter import FlopCounterMode

from benchmarks.step_cost.models import GPT
from surefoot import recompute
from surefoot.components.memory.blocks import find_blocks
from surefoot.components.memory.measure import Rise
from surefoot.components.memory.products import FlopsAllowance, ProductWork
from surefoot.core.errors import InputError, SpecError
from surefoot.core.recompute import peak_bytes
from surefoot.tasks.transformer import Transformer

HOWS = ("full", "every 2", "operators", "100 KiB")


class Block(nn.Module):
    """Norm over the batch, dropout, a residual.

    `mask` is a buffer that never moves, and an argument by name.
    """

    def __init__(self, width: int, wide: int) -> None:
        super().__init__()
        self.norm, self.first, self.second = (
            nn.BatchNorm1d(width),
            nn.Linear(width, wide),
            nn.Linear(wide, width),
        )
        self.dropout = nn.Dropout(0.3)

    def forward(self, x: Tensor, *, mask: Tensor) -> Tensor:
        return x + mask * self.dropout(self.second(F.gelu(self.first(self.norm(x)))))


class Deep(nn.Module):
    """Blocks of uneven widths between two linear layers."""

    def __init__(
        self,
        wides: tuple[int, ...] = (32, 128, 64, 256),
        block: Callable[[int, int], nn.Module] = Block,
    ) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(8, 16), nn.Linear(16, 3)
        self.blocks = nn.ModuleList(block(16, wide) for wide in wides)
        self.register_buffer("mask", torch.tensor([0.0, 1.0] * 8))

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        for block in self.blocks:
            x = block(x, mask=self.mask)
        return self.last(x)


def made(model: Callable[[], nn.Module] = Deep) -> nn.Module:
    torch.manual_seed(0)
    return model()


def trained(model: nn.Module, steps: int = 3) -> list[Tensor]:
    """All losses, gradients, weights and buffers of a few steps, and what is drawn after them."""
    draws = torch.Generator().manual_seed(1)
    torch.manual_seed(2)
    optimizer = torch.optim.SGD([each for each in model.parameters() if each.requires_grad], lr=0.1)
    found: list[Tensor] = []
    for _ in range(steps):
        optimizer.zero_grad()
        loss = F.cross_entropy(model(torch.randn(24, 8, generator=draws)), torch.arange(24) % 3)
        loss.backward()
        found += [
            loss.detach(),
            *(each.grad.clone() for each in model.parameters() if each.grad is not None),
        ]
        optimizer.step()
    return [
        *found,
        *(each.detach().clone() for each in [*model.parameters(), *model.buffers()]),
        torch.rand(3),
    ]


def assert_same_bits(one: list[Tensor], other: list[Tensor]) -> None:
    assert len(one) == len(other)
    assert all(map(torch.equal, one, other))


@pytest.mark.parametrize("how", HOWS)
def test_with_dropout_and_batch_norm_nothing_but_memory_changes(how: str) -> None:
    expected = trained(made())
    model = made()
    done = recompute(model, how)
    assert_same_bits(trained(model), expected)
    assert done.blocks == ("blocks.0", "blocks.1", "blocks.2", "blocks.3")
    assert done.names  # else nothing was tried
    assert not done.skipped


@pytest.mark.parametrize("how", HOWS)
def test_with_a_frozen_first_layer_and_frozen_blocks_the_others_keep_their_gradients(
    how: str,
) -> None:
    def frozen() -> nn.Module:
        model = Deep()
        model.first.requires_grad_(False)
        model.blocks[0].requires_grad_(False)
        return model

    expected = trained(made(frozen))
    model = made(frozen)
    recompute(model, how)
    assert_same_bits(trained(model), expected)


class Normed(Block):
    """Its forward pass uses a buffer that it changes: recomputing it would give other numbers."""

    def __init__(self, width: int, wide: int) -> None:
        super().__init__(width, wide)
        self.first = spectral_norm(self.first)


@pytest.mark.parametrize("how", HOWS)
def test_a_block_whose_numbers_depend_on_a_buffer_that_it_changes_keeps_its_bits(how: str) -> None:
    expected = trained(made(lambda: Deep(block=Normed)))
    model = made(lambda: Deep(block=Normed))
    recompute(model, how)
    assert_same_bits(trained(model), expected)


class InPlace(Block):
    """Changes what its products give, which cannot be kept then."""

    def forward(self, x: Tensor, *, mask: Tensor) -> Tensor:
        return x + mask * F.silu(self.second(F.relu(self.first(x), inplace=True)), inplace=True)


@pytest.mark.parametrize("how", HOWS)
def test_a_block_that_changes_its_products_in_place_keeps_its_bits(how: str) -> None:
    expected = trained(made(lambda: Deep(block=InPlace)))
    model = made(lambda: Deep(block=InPlace))
    recompute(model, how)
    assert_same_bits(trained(model), expected)


@pytest.mark.parametrize(
    ("end", "kept", "num_products"),
    [
        (nn.Identity(), ([True, False], [True, False]), (5, 5)),
        (nn.Tanh(), ([True, False], [True, True]), (6, 5)),
    ],
)
def test_no_product_is_computed_again_and_a_last_one_is_kept_once_it_was_asked_for(
    end: nn.Module, kept: tuple[list[bool], ...], num_products: tuple[int, ...]
) -> None:
    block = nn.Sequential(nn.Linear(8, 32), nn.GELU(), nn.Linear(32, 8), end)
    outputs: list[weakref.ref[Any]] = []
    for layer in (block[0], block[2]):
        layer.register_forward_hook(
            lambda module, args, output: outputs.append(weakref.ref(output.untyped_storage()))
        )
    model = nn.Sequential(block)
    recompute(model, "operators", blocks=[block])
    for step in range(2):
        outputs.clear()
        with FlopCounterMode(display=False) as counter:
            loss = model(torch.ones(4, 8)).sum()
            assert [each() is not None for each in outputs] == kept[step]
            loss.backward()
        # two forward, three gradients
        assert counter.get_total_flops() == num_products[step] * (2 * 4 * 8 * 32)


@pytest.mark.slow
def test_operators_save_six_tenths_of_what_full_saves_for_a_tenth_of_the_products_of_a_step() -> (
    None
):
    tokens = torch.arange(8 * 64).view(8, 64) % 17
    rises: dict[str, list[int]] = {}
    flops: dict[str, list[int]] = {}
    for how in ("none", "full", "operators"):
        model = made(lambda: GPT(layers=12, width=64, heads=2, vocabulary=17, tokens=64))
        recompute(model, how)
        rises[how], flops[how] = [], []
        for parameter in model.parameters():
            parameter.grad = torch.zeros_like(parameter)
        for step in range(4):
            rise, counter = Rise(), FlopCounterMode(display=False)
            with counter if step % 2 else contextlib.nullcontext():
                if not step % 2:
                    rise.start()
                F.cross_entropy(model(tokens).flatten(0, 1), tokens.flatten()).backward()
            (flops if step % 2 else rises)[how].append(
                counter.get_total_flops() if step % 2 else rise.stop()
            )
    for none, full, operators in zip(rises["none"], rises["full"], rises["operators"], strict=True):
        assert none - operators >= 0.6 * (none - full)
    for none, operators in zip(flops["none"], flops["operators"], strict=True):
        assert none < operators <= 1.1 * none


def test_blocks_recompute_the_products_cheapest_for_their_bytes_and_leave_the_next_the_rest() -> (
    None
):
    allowance = FlopsAllowance()
    # 8 of 32; the last is never among them
    work = [
        ProductWork(8, 4),
        ProductWork(4, 4),
        ProductWork(4, 2),
        ProductWork(math.inf, 9),
        ProductWork(16, 16),
    ]
    assert [set(allowance.choose(work)) for _ in range(2)] == [{1, 2}, {1, 2}]
    allowance = FlopsAllowance()
    # 8 of 32: 2 are left each time, and 16 are there at the fifth
    later = [ProductWork(6, 3), ProductWork(16, 8), ProductWork(10, 1)]
    assert [set(allowance.choose(later)) for _ in range(5)] == [{0}, {0}, {0}, {0}, {1}]


def test_evaluation_first_training_afterwards_and_a_second_backward_pass_change_nothing() -> None:
    plain, again = made(), made()
    recompute(again)
    for model in (plain, again):
        model.eval()
        # no statistics move: which do is not learned from this
        model(torch.ones(4, 8)).sum().backward()
        model.train()
        model.zero_grad()
        torch.manual_seed(5)
        loss = model(torch.ones(4, 8).cumsum(0)).square().sum()
        loss.backward(retain_graph=True)
        loss.backward()
    assert_same_bits(
        [each.grad for each in plain.parameters()], [each.grad for each in again.parameters()]
    )
    assert_same_bits(list(plain.buffers()), list(again.buffers()))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("how", ["full", "operators"])
def test_a_transformer_keeps_its_bits_under_autocast_too(how: str, dtype: torch.dtype) -> None:
    def gradients(way: str) -> list[Tensor]:
        model = made(lambda: Transformer(17, layers=3, width=16, heads=2, length=8, dropout=0.2))
        recompute(model, way)
        torch.manual_seed(3)
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=dtype == torch.bfloat16):
            total = F.cross_entropy(
                model(torch.arange(32).view(4, 8) % 17).float().flatten(0, 1), torch.arange(32) % 5
            )
        total.backward()
        return [each.grad for each in model.parameters() if each.grad is not None]

    assert_same_bits(gradients(how), gradients("none"))


def kept_bytes(model: nn.Module, x: Tensor) -> int:
    """Bytes that the graph of a forward pass holds, without the model's own tensors."""
    own = {each.untyped_storage().data_ptr() for each in [*model.parameters(), *model.buffers()]}
    kept: dict[int, torch.UntypedStorage] = {}

    def keep(tensor: Tensor) -> Tensor:
        kept[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage()
        return tensor

    with saved_tensors_hooks(keep, lambda tensor: tensor):
        model(x)
    return sum(each.nbytes() for address, each in kept.items() if address not in own)


def test_full_keeps_least_and_each_other_way_lies_between() -> None:
    x = torch.randn(64, 8)
    found = {}
    for how in ("none", "every 2", "full"):
        model = made(lambda: Deep((256,) * 6))
        recompute(model, how)
        found[how] = kept_bytes(model, x)
    assert found["full"] < 0.1 * found["none"]
    assert found["full"] < found["every 2"] < found["none"]


# ---- budgets


@pytest.mark.parametrize("wides", [(32, 128, 64, 256), (256, 16, 16, 16, 256, 16), (64,) * 8])
def test_what_the_blocks_keep_of_a_forward_pass_is_never_above_the_budget_and_ten_budgets_are_met(
    wides: tuple[int, ...],
) -> None:
    x = torch.randn(64, 8)
    costs = measured(made(lambda: Deep(wides)), x)
    least, whole = peak_bytes(costs, range(len(wides))), peak_bytes(costs, ())
    outside = kept_bytes(made(lambda: Deep(wides)), x) - whole
    for share in range(10):
        budget = least + (whole - least) * share // 9
        model = made(lambda: Deep(wides))
        done = recompute(model, f"{budget} B")
        model(x)
        assert kept_bytes(model, x) - outside <= budget
        assert len(done.names) < len(wides)


def measured(model: nn.Module, x: Tensor) -> list[Any]:
    done = recompute(model, "1 TiB")
    model(x)
    assert done.budget is not None
    assert done.names == ()
    return done.budget.costs


def test_a_budget_that_cannot_be_met_is_told_in_the_first_batch_with_one_that_can() -> None:
    model = made()
    recompute(model, "1 KiB")
    with pytest.raises(
        SpecError,
        match=(
            r"memory.activation_checkpointing is 1 KiB, and the blocks hold .* "
            "even when each is computed again"
        ),
    ):
        model(torch.randn(24, 8))


def test_a_larger_batch_is_measured_anew_and_a_smaller_one_is_not() -> None:
    model = made()
    done = recompute(model, "260 KiB")
    model(torch.randn(24, 8))
    few = done.names
    model(torch.randn(96, 8))
    many = done.names
    model(torch.randn(24, 8))
    assert few == ()
    assert done.names == many != ()


# ---- blocks


def test_blocks_are_the_outermost_modules_that_repeat() -> None:
    def conv() -> nn.Module:
        return nn.Sequential(nn.Conv2d(3, 3, 3), nn.ReLU())

    stages = nn.Sequential(
        nn.Conv2d(3, 3, 3),
        nn.Sequential(conv(), conv()),
        nn.Sequential(conv(), conv()),
        nn.Flatten(),
    )
    assert list(find_blocks(stages)) == ["1.0", "1.1", "2.0", "2.1"]
    assert list(find_blocks(Transformer(5, layers=2, width=8, heads=2, length=4))) == [
        "blocks.0",
        "blocks.1",
    ]
    assert list(find_blocks(Deep(), ["blocks.?", "last"])) == [
        "last",
        "blocks.0",
        "blocks.1",
        "blocks.2",
        "blocks.3",
    ]
    assert list(find_blocks(Deep(), ["blocks*", "blocks.0.first"])) == [
        "blocks.0",
        "blocks.1",
        "blocks.2",
        "blocks.3",
    ]
    deep = Deep()
    assert list(find_blocks(deep, [deep.blocks[2]])) == ["blocks.2"]


def test_a_pattern_that_matches_nothing_and_a_model_without_blocks_are_refused() -> None:
    with pytest.raises(InputError, match=r"memory.blocks: 'layer\*' matches no module"):
        recompute(Deep(), blocks=["layer*"])
    with pytest.raises(InputError, match="no block repeats in this Sequential"):
        recompute(nn.Sequential(nn.Linear(2, 2), nn.ReLU(), nn.Linear(2, 2)))
    lonely = Transformer(5, layers=1, width=8, heads=2, length=4)
    with pytest.raises(InputError, match="no block repeats in this Transformer") as refused:
        find_blocks(lonely)
    assert refused.value.hint == (
        'name its blocks, for example memory.activation_checkpointing = "full" with '
        'memory.blocks = ["blocks.*"]'
    )
    assert list(find_blocks(lonely, ["blocks.*"])) == ["blocks.0"]


def test_a_block_that_changes_its_inputs_is_refused_and_never_computed_from_the_changed_ones() -> (
    None
):
    class Spoils(Block):
        def forward(self, x: Tensor, *, mask: Tensor) -> Tensor:
            return super().forward(x.mul_(2.0), mask=mask)

    model = made(lambda: Deep(block=Spoils))
    recompute(model, "1 MiB")
    with pytest.raises(InputError, match=r"blocks.0 changes its inputs in place"):
        model(torch.randn(24, 8))
    model = made(lambda: Deep(block=Spoils))
    recompute(model)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        model(torch.randn(24, 8)).sum().backward()


def test_names_types_hooks_and_copies_of_the_model_stay_what_they_are() -> None:
    model = made()
    names, calls = list(model.state_dict()), []
    done = recompute(model)
    model.blocks[0].register_forward_hook(lambda module, args, output: calls.append(module))
    copied = copy.deepcopy(model)
    assert list(model.state_dict()) == names
    assert isinstance(model.blocks[0], Block)
    assert "BatchNorm1d" in repr(model)
    trained(model, steps=1)
    assert calls == [model.blocks[0]]  # not once more when it is computed again
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()
    # its own weights, not those of the model it was copied from
    assert trained(copied, steps=1)[0] > 1.0
    done.undo()
    done.undo()  # which is no error
    assert type(model.blocks[0]) is Block
    recompute(model, "every 2")
    with pytest.raises(
        InputError, match="no block can be computed again: it is computed again already"
    ):
        recompute(model)
