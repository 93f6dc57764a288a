"""Tests of the code that inductor makes.

How many kernels stand for how many operators, what is in each, and the bytes that no longer travel.
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from torch import Tensor, nn

from surefoot.components.compiler.kernels import Graph, watch_kernels
from surefoot.components.compiler.regions import compile_regions

N = 1 << 16
FLOATS = 4 * N  # bytes of a row of them


@pytest.fixture(autouse=True)
def _anew(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """The C++ is written as always.

    Compiling it takes tens of seconds, and nobody looks at its numbers in these tests.
    """
    from torch._inductor.async_compile import AsyncCompile  # seconds; not while tests are collected

    monkeypatch.setattr(AsyncCompile, "cpp_pybinding", lambda *source: lambda *pointers: None)
    torch._dynamo.reset()
    with torch._inductor.config.patch(compile_threads=1):  # else it keeps threads that nobody ends
        yield
    torch._dynamo.reset()


class Chain(nn.Module):
    """Four pointwise operators that each read N floats and write N alone; the mean reads N more."""

    def forward(self, row: Tensor) -> tuple[Tensor, Tensor]:
        chained = torch.relu(row * 2 + 1).exp()
        return chained, chained.sum()


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(64, 64)

    def forward(self, rows: Tensor) -> Tensor:
        return nn.functional.gelu(self.linear(rows))


def graphs_of(model: nn.Module, rows: Tensor, *, trains: bool = False) -> list[Graph]:
    compile_regions(model, on_failure="stop")
    with watch_kernels() as graphs:
        if trains:
            model(rows).sum().backward()
        else:
            with torch.no_grad():
                model(rows)
    return graphs


def test_a_chain_of_five_operators_is_one_kernel_that_moves_a_quarter_of_their_bytes() -> None:
    (graph,) = graphs_of(Chain(), torch.linspace(-1, 1, N))
    assert graph.name == "graph-1-forward"
    assert (graph.num_operators, graph.eager_bytes) == (5, 9 * FLOATS + 4)
    (kernel,) = graph.kernels
    assert kernel.operators == ("mul", "add", "relu", "exp", "sum")
    assert not kernel.is_library
    assert (kernel.num_bytes, kernel.eager_bytes) == (2 * FLOATS + 4, graph.eager_bytes)
    assert "cpp_fused" in graph.source
    assert "#include" in graph.source


def test_an_operator_that_is_taken_apart_counts_once_and_a_product_is_called() -> None:
    rows = torch.randn(32, 64)
    forward, backward = graphs_of(Layer(), rows, trains=True)
    size, weight, bias = 4 * 32 * 64, 4 * 64 * 64, 4 * 64
    assert [(each.operators, each.is_library) for each in forward.kernels] == [
        (("addmm",), True),
        (("gelu",), False),
    ]
    assert forward.num_operators == 2
    assert forward.eager_bytes == forward.num_bytes == (2 * size + weight + bias) + 2 * size
    assert backward.name == "graph-2-backward"
    assert backward.num_operators == 3  # of gelu, the product for the weight, the sum for the bias
    assert {name for each in backward.kernels for name in each.operators} == {
        "gelu_backward",
        "gelu again",
        "mm",
        "sum",
    }
    assert backward.eager_bytes > backward.num_bytes


def test_nothing_is_watched_once_the_block_is_left() -> None:
    model = Chain()
    compile_regions(model, backend="aot_eager")
    with watch_kernels() as graphs:
        model(torch.ones(4))
    from torch._inductor.graph import GraphLowering

    assert graphs == []
    assert GraphLowering.save_output_code is None
