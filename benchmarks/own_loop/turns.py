"""One of two live processes: 200 steps each time it reads a line, by hand or with surefoot.

python turns.py CASE DOOR FOLDER

The data object, the optimizer and the model of a case are the same for each DOOR.
"""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils import clip_grad_norm_
from torch.optim import AdamW, Optimizer
from torch.utils.data import DataLoader, IterableDataset, TensorDataset

import surefoot
from benchmarks.live import answering, root_of
from surefoot.contract.task import Loss
from surefoot.train.run import Run

STEPS, BATCH, READ_EVERY = 200, 32, 50
LEARNING_RATE, CLIP = 1e-3, 1.0
Step = Callable[[], object]


@dataclass(frozen=True)
class Case:
    """A user's loop: its data object, its optimizer and its model.

    `layers` linear layers of 32 x 32 follow each other before the last one, with `parameters` small
    parameters beside them.
    """

    data: str = "loader"
    fused: bool = False
    layers: int = 1
    parameters: int = 0


CASES = {
    "DataLoader": Case(),
    "DataLoader, fused optimizer": Case(fused=True),
    "DataLoader over an IterableDataset": Case(data="stream"),
    "DataLoader over a list of batches": Case(data="list"),
    "own source": Case(data="source"),
    "10 layers": Case(layers=10),
    "100 layers": Case(layers=100),
    "1,000 small parameters": Case(parameters=1000),
}
DOORS = ("plain", "surefoot", "attach", "fabric")


class Model(nn.Module):
    def __init__(self, case: Case) -> None:
        super().__init__()
        inner = chain.from_iterable((nn.Linear(32, 32), nn.ReLU()) for _ in range(case.layers - 1))
        self.layers = nn.Sequential(nn.Linear(32, 32), nn.ReLU(), *inner, nn.Linear(32, 10))
        self.small = nn.ParameterList(nn.Parameter(torch.zeros(4)) for _ in range(case.parameters))

    def forward(self, inputs: Tensor) -> Tensor:
        scores: Tensor = self.layers(inputs)
        if len(self.small):
            scores = scores + torch.stack(list(self.small)).sum()
        return scores


def make_samples() -> tuple[Tensor, Tensor]:
    draws = torch.Generator().manual_seed(1)
    return torch.randn(6400, 32, generator=draws), torch.randint(10, (6400,), generator=draws)


class Stream(IterableDataset[tuple[Tensor, Tensor]]):
    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        return zip(*make_samples(), strict=True)


class OwnSource:
    """Samples by number, as a user's class gives them."""

    guarantee = "proven"

    def __init__(self) -> None:
        self.inputs, self.targets = make_samples()

    def __len__(self) -> int:
        return len(self.inputs)

    def read(self, ids: np.ndarray) -> tuple[Tensor, Tensor]:
        rows = torch.from_numpy(ids)
        return self.inputs[rows], self.targets[rows]

    @property
    def digest(self) -> str:
        return "the samples of seed 1"

    def describe(self) -> str:
        return "6,400 points"


def make_data(case: Case) -> Any:
    if case.data == "stream":
        return DataLoader(Stream(), batch_size=BATCH)
    if case.data == "list":
        inputs, targets = make_samples()
        batches = list(zip(inputs.split(BATCH), targets.split(BATCH), strict=True))
        return DataLoader(batches, batch_size=None, shuffle=True)
    if case.data == "source":
        return OwnSource()
    return DataLoader(TensorDataset(*make_samples()), batch_size=BATCH, shuffle=True)


def make_optimizer(case: Case, parameters: Any) -> Optimizer:
    return AdamW(parameters, lr=LEARNING_RATE, fused=True if case.fused else None)


def begin(case: Case) -> tuple[nn.Module, Optimizer]:
    torch.manual_seed(0)
    model = Model(case)
    return model, make_optimizer(case, model.parameters())


def endless(data: Any) -> Iterator[tuple[Tensor, Tensor]]:
    """The batches of one epoch after another."""
    while True:
        if isinstance(data, OwnSource):
            order = torch.randperm(len(data)).numpy()
            yield from (data.read(order[n : n + BATCH]) for n in range(0, len(order), BATCH))
        else:
            yield from data


def by_hand(case: Case, folder: Path) -> Step:
    """The loop that people write, which clips as the spec does."""
    (model, optimizer), batches = begin(case), endless(make_data(case))
    read: list[float] = []

    def steps() -> None:
        for number in range(STEPS):
            inputs, targets = next(batches)
            optimizer.zero_grad()
            loss = F.cross_entropy(model(inputs), targets)
            loss.backward()
            clip_grad_norm_(model.parameters(), CLIP)
            optimizer.step()
            if number % READ_EVERY == 0:
                read.append(loss.item())

    return steps


def with_fabric(case: Case, folder: Path) -> Step:
    """The same through Lightning Fabric."""
    from lightning.fabric import Fabric

    fabric = Fabric(accelerator="cpu", devices=1)
    fabric.launch()
    model, optimizer = fabric.setup(*begin(case))
    data = make_data(case)
    batches = endless(data if isinstance(data, OwnSource) else fabric.setup_dataloaders(data))
    read: list[float] = []

    def steps() -> None:
        for number in range(STEPS):
            inputs, targets = next(batches)
            optimizer.zero_grad()
            loss = F.cross_entropy(model(inputs), targets)
            fabric.backward(loss)
            fabric.clip_gradients(model, optimizer, max_norm=CLIP)
            optimizer.step()
            if number % READ_EVERY == 0:
                read.append(loss.item())

    return steps


def with_attach(case: Case, folder: Path) -> Step:
    """The same with `surefoot.attach` around it."""
    (model, optimizer), data = begin(case), make_data(case)
    run = surefoot.attach(model=model, optimizer=optimizer, data=data, folder=folder, save=None)

    def batches_of(run: surefoot.train.attach.AttachedLoop) -> Iterator[Any]:
        while True:
            yield from run.batches()

    batches = batches_of(run)

    def steps() -> None:
        for _ in range(STEPS):
            inputs, targets = next(batches)
            optimizer.zero_grad()
            loss = F.cross_entropy(model(inputs), targets)
            loss.backward()
            clip_grad_norm_(model.parameters(), CLIP)
            optimizer.step()
            run.step_done(loss)

    return steps


class Task:
    """The case as a task of surefoot, with the same data object and optimizer."""

    def __init__(self, case: Case) -> None:
        self.case = case

    def model(self) -> nn.Module:
        return Model(self.case)

    def data(self, split: str) -> Any:
        return make_data(self.case)

    def optimizer(self, groups: Sequence[dict[str, Any]]) -> Optimizer:
        return make_optimizer(self.case, groups)

    def parameter_groups(self, model: nn.Module) -> Sequence[dict[str, Any]]:
        return [{"params": list(model.parameters())}]

    def forward(self, model: nn.Module, batch: Any) -> Tensor:
        scores: Tensor = model(batch[0])
        return scores

    def loss(self, scores: Tensor, batch: Any) -> Loss:
        return Loss.sum(F.cross_entropy(scores, batch[1], reduction="sum"), len(batch[1]))


def with_surefoot(case: Case, folder: Path) -> Step:
    """The same as a run, with all that is on by default."""
    sized = {"batch": BATCH} if case.data == "source" else {}
    spec = {
        "train": {"length": "1000000 steps", "seed": 0, "threads": 1, **sized},
        "schedule": {"name": "constant"},
        "observe": {"tensorboard": False},
        "checkpoint": {"every": "never"},
        "evaluate": {"every": "1000000 steps"},
    }
    run = Run(spec, Task(case), folder=folder, quiet=True).__enter__()
    reports = run.steps()
    return lambda: [next(reports) for _ in range(STEPS)]


BEGINNINGS = dict(zip(DOORS, (by_hand, with_surefoot, with_attach, with_fabric), strict=True))


def main() -> None:
    torch.set_num_threads(1)
    name, door, place = sys.argv[1:]
    with answering() as answer, tempfile.TemporaryDirectory(dir=place) as folder:
        turn = BEGINNINGS[door](CASES[name], Path(folder) / "run")
        count = sum(1 for _ in Model(CASES[name]).parameters())
        answer(turn, {"surefoot": root_of(surefoot), "parameters": count})


if __name__ == "__main__":
    main()
