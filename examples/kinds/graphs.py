"""Graphs: which random trees have a hub.

A batch is one large graph of unconnected parts, as torch_geometric makes it.

python examples/kinds/graphs.py
surefoot train examples/kinds/graphs.py:Hubs --steps 40

Parts of a batch have different lengths (nodes, edges, graphs), so the data are a source that joins
the graphs it is asked for.
"""

from __future__ import annotations

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from surefoot import Loss, Run, RunSpec
from surefoot.metrics import Mean, accuracy

Batch = dict[str, Tensor]
SPEC = RunSpec(
    optim={"name": "adam", "lr": 3e-3, "weight_decay": 0.0},
    train={"length": "8 epochs", "batch": 32},
    evaluate={"every": "4 epochs"},
)


class Trees:
    """Random trees of 5 to 12 nodes; the label says whether a node has four neighbors or more."""

    guarantee = "proven"

    def __init__(self, count: int, seed: int) -> None:
        self.count, self.seed, self.digest = count, seed, f"trees-{count}-{seed}"

    def __len__(self) -> int:
        return self.count

    def describe(self) -> str:
        return f"{self.count} random trees"

    def read(self, ids: np.ndarray) -> Batch:
        edges, sizes, labels = [], [], []
        for number in ids:
            draws = np.random.default_rng((self.seed, int(number)))
            size = int(draws.integers(5, 13))
            pairs = np.array([(node, draws.integers(node)) for node in range(1, size)])
            labels.append(int(np.bincount(pairs.ravel()).max() >= 4))
            edges.append(np.concatenate([pairs, pairs[:, ::-1]]) + sum(sizes))
            sizes.append(size)
        graph = torch.arange(len(ids)).repeat_interleave(torch.tensor(sizes))
        joined = torch.from_numpy(np.concatenate(edges).T.copy())
        return {"edges": joined, "graph": graph, "labels": torch.tensor(labels)}


class Net(nn.Module):
    """Two rounds of sums over neighbors (Xu et al., 2019), then the largest value of each graph."""

    def __init__(self, width: int = 32) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(1, width), nn.Linear(width, width)
        self.head = nn.Linear(width, 2)

    def forward(self, edges: Tensor, graph: Tensor, num_graphs: int) -> Tensor:
        x = torch.ones(len(graph), 1, device=graph.device)
        for layer in (self.first, self.second):
            x = F.relu(layer(x.index_add(0, edges[1], x[edges[0]])))
        index = graph[:, None].expand_as(x)
        return self.head(x.new_zeros(num_graphs, x.shape[1]).scatter_reduce(0, index, x, "amax"))


class Hubs:
    def model(self) -> nn.Module:
        return Net()

    def data(self, split: str) -> Trees:
        return Trees(*{"train": (1000, 0), "test": (300, 1)}[split])

    def forward(self, model: nn.Module, batch: Batch) -> Tensor:
        return model(batch["edges"], batch["graph"], len(batch["labels"]))

    def loss(self, output: Tensor, batch: Batch) -> Loss:
        total = F.cross_entropy(output, batch["labels"], reduction="sum")
        return Loss.sum(total, count=len(output))

    def metrics(self, output: Tensor, batch: Batch) -> dict[str, Mean]:
        return {"accuracy": accuracy(output, batch["labels"])}


def main(folder: str | None = None) -> Run:
    with Run(SPEC, Hubs(), folder=folder) as run:
        for _ in run.steps():
            if run.evaluation_due:
                run.evaluate()
    return run


if __name__ == "__main__":
    main()
