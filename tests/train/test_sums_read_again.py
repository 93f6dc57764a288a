"""A loss that is no sum is refused where the run divides its batches, whatever a batch is made of.

Batches that cannot be cut are read again in halves, and random draws are confirmed by more seeds.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import Dataset

from surefoot.components.data.sources.wrapped import TorchDataset
from surefoot.contract.spec import RunSpec
from surefoot.contract.task import Loss
from surefoot.core.errors import TaskError
from surefoot.train.run import Run


class Graphs:
    """A batch of graphs: the nodes in one tensor, and the graph of each node in another."""

    def __init__(self, nodes_NF: Tensor, graph_N: Tensor, y_B: Tensor) -> None:
        self.nodes_NF, self.graph_N, self.y_B = nodes_NF, graph_N, y_B

    def to(self, device: Any, **_: Any) -> Graphs:
        return self


class Rows(Dataset[Any]):
    def __init__(self, draws: str) -> None:
        self.draws = draws
        self.generator = torch.Generator().manual_seed(1)
        self.x, self.y = torch.randn(32, 5, 4, generator=self.generator), torch.arange(32) % 3

    def __len__(self) -> int:
        return 32

    def __getitem__(self, number: int) -> tuple[Tensor, Tensor]:
        x = self.x[number, : 5 if number == 0 else 2 + number % 3]
        if self.draws:
            own = self.generator if self.draws == "by itself" else None
            x = x + torch.randn(x.shape, generator=own)
        return x, self.y[number]


def as_graphs(rows: list[tuple[Tensor, Tensor]]) -> Graphs:
    graph = torch.cat([torch.full((len(x),), at) for at, (x, _) in enumerate(rows)])
    return Graphs(torch.cat([x for x, _ in rows]), graph, torch.stack([y for _, y in rows]))


def with_weights(rows: list[tuple[Tensor, Tensor]]) -> dict[str, Tensor]:
    return {
        "x": torch.stack([x.mean(0) for x, _ in rows]),
        "y": torch.stack([y for _, y in rows]),
        "weights": torch.tensor([1.0, 2.0, 0.5]),
    }


def padded(rows: list[tuple[Tensor, Tensor]]) -> dict[str, Any]:
    x = nn.utils.rnn.pad_sequence([x for x, _ in rows], batch_first=True)
    return {"x": x, "y": torch.stack([y for _, y in rows]), "weights": torch.ones(3)}


class Task:
    def __init__(self, collate: Any, loss: str, draws: str = "") -> None:
        self.collate, self.kind, self.draws = collate, loss, draws

    def model(self) -> nn.Module:
        torch.manual_seed(0)
        return nn.Linear(4, 3)

    def data(self, split: str) -> Any:
        return TorchDataset(Rows(self.draws), collate=self.collate)

    def forward(self, model: nn.Module, batch: Any) -> Tensor:
        if isinstance(batch, Graphs):
            sums = torch.zeros(len(batch.y_B), 4).index_add(0, batch.graph_N, batch.nodes_NF)
            output: Tensor = model(sums)
            return output
        output = model(batch["x"])
        return output.logsumexp(1) if output.ndim == 3 else output

    def loss(self, output: Tensor, batch: Any) -> Loss:
        y = batch.y_B if isinstance(batch, Graphs) else batch["y"]
        if self.kind == "sum":
            return Loss.sum(F.cross_entropy(output, y, reduction="sum"), len(y))
        if self.kind == "random views":
            output = F.normalize(output + 0.1 * torch.randn_like(output), dim=1)
        pairs = F.normalize(output, dim=1) @ F.normalize(output, dim=1).T
        return Loss.sum(F.cross_entropy(pairs, torch.arange(len(y)), reduction="sum"), len(y))


def prepare(task: Task, folder: Path) -> list[str]:
    spec = RunSpec(
        train={"length": "1 step", "batch": 16, "microbatch": 4, "threads": 1},
        data={"shuffle": False},
        observe={"tensorboard": False},
    )
    with Run(spec, task, folder=folder, quiet=True) as run:
        return [note for note in run.assembly.warnings if " a sum" in note]


def stacked(rows: list[tuple[Tensor, Tensor]]) -> dict[str, Tensor]:
    whole = with_weights(rows)
    return {"x": whole["x"], "y": whole["y"]}


REFUSED = {
    "a batch of graphs": Task(as_graphs, "contrast"),
    "weights of classes in the batch": Task(with_weights, "contrast"),
    "random views": Task(stacked, "random views"),
    "random views of graphs": Task(as_graphs, "random views"),
    # each sample is drawn alike, whatever is read with it
    "a dataset that draws": Task(as_graphs, "contrast", draws="by sample"),
}


@pytest.mark.parametrize("what", REFUSED)
def test_a_loss_that_compares_samples_is_refused_with_microbatches(
    what: str, tmp_path: Path
) -> None:
    with pytest.raises(TaskError, match="is not a sum over samples") as refused:
        prepare(REFUSED[what], tmp_path / "run")
    assert "additive=False" in str(refused.value.hint)


REPORTED = {
    "a dataset that draws from its own": Task(as_graphs, "contrast", draws="by itself"),
    "batches that are padded": Task(padded, "contrast"),
}


@pytest.mark.parametrize("what", REPORTED)
def test_what_another_reading_may_have_caused_is_only_reported(what: str, tmp_path: Path) -> None:
    (note,) = prepare(REPORTED[what], tmp_path / "run")
    assert "is not a sum over samples" in note or "could not be checked" in note


@pytest.mark.parametrize("collate", [as_graphs, with_weights], ids=lambda each: each.__name__)
def test_a_sum_is_trained(collate: Any, tmp_path: Path) -> None:
    assert prepare(Task(collate, "sum"), tmp_path / "run") == []
