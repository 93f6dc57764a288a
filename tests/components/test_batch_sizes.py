"""How many samples a batch holds: known, or not told, and never guessed."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader

from surefoot import Loss, RunSpec, attach
from surefoot.components.data.feed import size_of
from surefoot.train.run import Run


class Pair(NamedTuple):
    image: Tensor
    label: Tensor


images = [torch.zeros(3, 8, 8 + number) for number in range(8)]
boxes = [{"boxes": torch.zeros(number % 4, 4), "kind": number} for number in range(8)]

KNOWN = {
    "a tensor": (torch.zeros(8, 3), 8),
    "inputs and labels": ([torch.zeros(8, 3, 4, 4), torch.zeros(8)], 8),
    "a number before the inputs": ({"scale": torch.tensor(2.0), "x": torch.zeros(8, 3)}, 8),
    "a named tuple": (Pair(torch.zeros(8, 3), torch.zeros(8)), 8),
    "arrays": ({"x": np.zeros((8, 3)), "y": np.zeros(8)}, 8),
    "images of unlike sizes and dicts": ((images, boxes), 8),
    "tuples of them, as zip gives": (
        tuple(zip(*[(image, box) for image, box in zip(images, boxes, strict=True)], strict=True)),
        8,
    ),
    "texts and labels": ({"text": ["a"] * 8, "label": torch.zeros(8)}, 8),
    "texts alone": ({"text": ["a"] * 8}, 8),
    "a nested tensor": (
        torch.nested.nested_tensor([torch.zeros(number + 1, 4) for number in range(8)]),
        8,
    ),
    "a packed sequence": (nn.utils.rnn.pack_sequence([torch.zeros(3, 2)] * 8), 8),
    "graphs": (
        SimpleNamespace(num_graphs=8, x=torch.zeros(40, 3), edge_index=torch.zeros(2, 99)),
        8,
    ),
    "graphs beside labels": ((SimpleNamespace(num_graphs=8), torch.zeros(8)), 8),
    "dimensions of batches": (SimpleNamespace(batch_size=torch.Size([8, 2])), 8),
}
UNKNOWN = {
    "nothing": (),
    "time first": (torch.zeros(7, 8, 3), torch.zeros(8)),
    "nodes and edges": {
        "x": torch.zeros(40, 3),
        "edges": torch.zeros(2, 99),
        "label": torch.zeros(8),
    },
    "images of one size, and masks": ([torch.zeros(3, 8, 8)] * 8, [torch.zeros(3, 8, 8)] * 8),
    "a list of images": [torch.zeros(3, 8, 8)] * 8,
    "a list of samples": [(torch.zeros(3, 8), number) for number in range(8)],
    "a number": torch.tensor(3.0),
    "an object": object(),
}


@pytest.mark.parametrize("name", KNOWN)
def test_a_batch_says_how_many_samples_it_holds(name: str) -> None:
    batch, size = KNOWN[name]
    assert size_of(batch) == size


@pytest.mark.parametrize("name", UNKNOWN)
def test_where_a_batch_does_not_say_it_nothing_is_guessed(name: str) -> None:
    assert size_of(UNKNOWN[name]) is None


class Sums:
    """A mean over whatever `collate` makes of 20 samples, 8 at a time.

    `wraps` gives a loader of somebody else's.
    """

    def __init__(self, collate: Any, wraps: Any = lambda loader: loader) -> None:
        self.collate, self.wraps = collate, wraps

    def model(self) -> nn.Module:
        return nn.Linear(4, 2)

    def data(self, split: str) -> Any:
        draw = torch.Generator().manual_seed(0)
        rows = [(torch.randn(3, 4, generator=draw), number % 2) for number in range(20)]
        return self.wraps(DataLoader(rows, batch_size=8, collate_fn=self.collate))  # type: ignore[arg-type]

    def forward(self, model: Any, batch: Any) -> Tensor:
        rows = batch["rows"] if isinstance(batch, dict) else batch[0]
        return model(
            torch.stack(list(rows)).mean(1) if not isinstance(rows, Tensor) else rows.mean(1)
        )

    def loss(self, output: Tensor, batch: Any) -> Loss:
        return Loss.sum(output.square().sum(), count=len(output))


class Wrapped:
    def __init__(self, loader: Any) -> None:
        self.loader = loader

    def __len__(self) -> int:
        return len(self.loader)

    def __iter__(self) -> Any:
        return iter(self.loader)


COLLATES = {
    "lists": lambda rows: ([row for row, _ in rows], [label for _, label in rows]),
    "tuples": lambda rows: tuple(zip(*rows, strict=True)),
    "dict of lists": lambda rows: {"rows": [row for row, _ in rows], "edges": torch.zeros(2, 9)},
    "first a number": lambda rows: {
        "scale": torch.tensor(1.0),
        "rows": torch.stack([row for row, _ in rows]),
    },
}


@pytest.mark.parametrize(
    "wraps", [lambda loader: loader, Wrapped], ids=["watched", "unknown loader"]
)
@pytest.mark.parametrize("name", COLLATES)
def test_steps_evaluations_and_loops_count_the_samples_of_any_collate(
    name: str, wraps: Any, tmp_path: Path
) -> None:
    spec = RunSpec(train={"length": "5 steps", "threads": 1})
    with Run(spec, Sums(COLLATES[name], wraps), folder=tmp_path / "run", quiet=True) as run:
        assert [report.num_samples for report in run.steps()] == [8, 8, 4, 8, 8]
        assert run.evaluate().num_samples == 20


@pytest.mark.quick("tuples")
@pytest.mark.parametrize("name", COLLATES)
def test_attach_counts_what_a_loader_drew(name: str, tmp_path: Path) -> None:
    task = Sums(COLLATES[name])
    model = task.model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with attach(
        model=model, optimizer=optimizer, data=task.data("train"), folder=tmp_path / "loop"
    ) as loop:
        for batch in loop.batches():
            loss = task.loss(task.forward(model, batch), batch).terms[0].total / 8
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            loop.step_done(loss)
    assert loop.session.progress.num_samples == 20
