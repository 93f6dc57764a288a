"""Tests of recomputation inside compiled code.

The same numbers, less memory, and blocks that are alike share their code.
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from torch import nn

from surefoot import recompute
from surefoot.components.compiler.regions import CompiledRegions, compile_regions
from surefoot.components.memory.blocks import find_blocks
from surefoot.tasks.transformer import Transformer
from tests.components.test_recompute import (
    Deep,
    InPlace,
    assert_same_bits,
    kept_bytes,
    made,
    trained,
)

NUM_BLOCKS = 10  # torch gives up after 8 graphs of one function


@pytest.fixture(autouse=True)
def _anew() -> Iterator[None]:
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


def deep() -> nn.Module:
    return Deep((64,) * NUM_BLOCKS)


def compiled(model: nn.Module, what: str) -> CompiledRegions:
    """Graphs are made as always, and run by torch's own kernels."""
    torch._dynamo.reset()
    regions = {"model": model} if what == "model" else find_blocks(model)
    return compile_regions(regions, backend="aot_eager", on_failure="stop")


@pytest.mark.quick("150 KiB-blocks-2", "operators-blocks-1")
@pytest.mark.parametrize(
    ("how", "what", "kinds"),
    [
        ("full", "blocks", 1),
        ("operators", "blocks", 1),
        ("operators", "model", 1),
        ("every 2", "blocks", 2),
        ("150 KiB", "blocks", 2),
    ],
)
def test_what_is_compiled_has_the_bits_of_eager_mode_and_one_graph_for_each_kind_of_block(
    how: str, what: str, kinds: int
) -> None:
    expected = trained(made(deep))
    model = made(deep)
    done = recompute(model, how)
    if done.budget is not None:
        model(torch.randn(24, 8))  # is measured
        model.load_state_dict(made(deep).state_dict())
    plan = compiled(model, what)
    assert_same_bits(trained(model), expected)
    assert 0 < len(done.names) <= NUM_BLOCKS
    told = plan.steward.take()
    assert len([each for each in told if not each.is_backward]) == kinds
    assert not [each.ended_early for each in told if each.ended_early]


def test_a_compiled_block_that_changes_its_products_in_place_has_the_bits_of_eager_mode() -> None:
    expected = trained(made(lambda: Deep(block=InPlace)))
    model = made(lambda: Deep(block=InPlace))
    recompute(model, "operators")
    compiled(model, "model")
    assert_same_bits(trained(model), expected)


@pytest.mark.slow
@pytest.mark.parametrize("what", ["blocks", "model"])
def test_operators_keep_less_than_none_and_full_keeps_least_when_compiled(what: str) -> None:
    def kept(how: str) -> int:
        model = made(lambda: Transformer(17, layers=2, width=16, heads=2, length=32))
        recompute(model, how)
        compiled(model, what)
        return kept_bytes(model, torch.arange(256).view(8, 32) % 17)

    none, operators, full = map(kept, ("none", "operators", "full"))
    assert full < 0.3 * operators
    assert operators < 0.6 * none


def test_a_compiled_block_that_is_given_more_than_was_measured_is_computed_again() -> None:
    model = made(deep)
    done = recompute(model, "1 GiB")
    model(torch.randn(24, 8))
    assert done.names == ()
    plan = compiled(model, "blocks")
    few, many = (kept_bytes(model, torch.randn(rows, 8)) for rows in (24, 48))
    assert many < 0.7 * few
    assert plan.steward.take()[-1].why_again
