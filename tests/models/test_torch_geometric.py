"""Models of torch_geometric train as in a plain PyTorch loop.

On one graph, and on batches of graphs.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from tests.models import samples as s
from tests.models.compared import Case, check

geometric = pytest.importorskip("torch_geometric", reason="needs torch_geometric: the extra models")
from torch_geometric.data import Batch, Data  # noqa: E402
from torch_geometric.loader import DataLoader  # noqa: E402
from torch_geometric.nn import GAT, GCN, GIN, GraphSAGE, global_mean_pool  # noqa: E402

WIDTH = 6


def graph(draw: torch.Generator, nodes: int) -> Any:
    edges = torch.randint(0, nodes, (2, 3 * nodes), generator=draw)
    x = torch.randn(nodes, WIDTH, generator=draw, dtype=torch.float64)
    return Data(x=x, edge_index=edges)


def graphs() -> list[Any]:
    """Graphs of unlike sizes, each with a class."""
    draw = s.draws()
    found = []
    for number in range(s.NUM_SAMPLES):
        made = graph(draw, 3 + number % 5)
        made.y = torch.tensor([number % s.LABELS])
        found.append(made)
    return found


def citations() -> list[Any]:
    """One graph whose nodes have classes, half of them for training."""
    draw = s.draws()
    made = graph(draw, 40)
    made.y, made.train_mask = torch.arange(40) % s.LABELS, torch.arange(40) % 2 == 0
    return [made]


class Pooled(nn.Module):
    """A model of the package over nodes, pooled to a class for each graph."""

    def __init__(self, body: nn.Module, pool: Any = global_mean_pool) -> None:
        super().__init__()
        self.body, self.pool, self.head = body, pool, nn.Linear(8, s.LABELS)

    def forward(self, data: Any) -> Tensor:
        hidden = self.body(data.x, data.edge_index)
        output: Tensor = self.head(self.pool(hidden, data.batch))
        return output


def of_graphs(
    body: Callable[[float], nn.Module], pool: Any = global_mean_pool, **more: Any
) -> Case:
    return Case(
        model=lambda drops: Pooled(body(0.2 if drops else 0.0), pool),
        samples=graphs,
        collate=Batch.from_data_list,
        count=lambda batch: batch.num_graphs,
        forward=lambda model, batch: model(batch),
        mean=lambda output, batch: F.cross_entropy(output, batch.y),
        **({"stage": 2} | more),
    )


def of_nodes(body: Callable[[float], nn.Module], **more: Any) -> Case:
    one_sample = "has 1 microbatch for 2 ranks"
    return Case(
        model=lambda drops: body(0.2 if drops else 0.0),
        samples=citations,
        source=lambda case: DataLoader(case.samples(), batch_size=1),
        count=lambda batch: int(batch.train_mask.sum()),
        forward=lambda model, batch: model(batch.x, batch.edge_index),
        mean=lambda output, batch: F.cross_entropy(
            output[batch.train_mask], batch.y[batch.train_mask]
        ),
        refused={
            "two ranks": one_sample,
            "two ranks sharded": one_sample,
        },
        stage=2,
        **more,
    )


CASES: dict[str, Case] = {
    "GCN, classes of nodes": of_nodes(lambda rate: GCN(WIDTH, 8, 2, s.LABELS, dropout=rate)),
    "GCN, cached": of_nodes(lambda rate: GCN(WIDTH, 8, 2, s.LABELS, dropout=rate, cached=True)),
    "GAT, classes of nodes": of_nodes(
        lambda rate: GAT(WIDTH, 8, 2, s.LABELS, heads=2, dropout=rate)
    ),
    "GIN, classes of graphs": of_graphs(
        lambda rate: GIN(WIDTH, 8, 2, dropout=rate, norm="batch_norm"), joins_samples=True
    ),
    "GraphSAGE, classes of graphs": of_graphs(lambda rate: GraphSAGE(WIDTH, 8, 2, dropout=rate)),
    "GAT, classes of graphs": of_graphs(lambda rate: GAT(WIDTH, 8, 2, heads=2, dropout=rate)),
}
CHEAP = {"GIN, classes of graphs", "GCN, classes of nodes"}


@pytest.mark.quick("GCN, classes of nodes")
@pytest.mark.parametrize(
    "name",
    [pytest.param(name, marks=[] if name in CHEAP else [pytest.mark.slow]) for name in CASES],
)
def test_a_model_of_torch_geometric_trains_as_in_a_plain_loop(name: str) -> None:
    check(CASES[name])
