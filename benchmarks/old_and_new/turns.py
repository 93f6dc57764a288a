"""One of two live processes: does a turn of a workload each time it reads a line.

It does so with the surefoot that PYTHONPATH leads to.

python turns.py WORKLOAD FOLDER

answers each line of its input with the CPU seconds of a turn, as one line of JSON.
"""

from __future__ import annotations

import contextlib
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import surefoot
from benchmarks.live import answering, root_of
from surefoot.components.data.sources.arrays import Arrays
from surefoot.contract.spec import RunSpec
from surefoot.contract.task import Loss
from surefoot.train.run import Run

STEPS = {"mlp": 200, "loader": 200, "convnet": 8, "gpt": 8}  # of one turn
BATCH = {"mlp": 32, "convnet": 64, "gpt": 8, "wide": 32}
SAVES, READS = 2, 500


class Tiny(nn.Module):
    """A GPT of 2 layers, width 128, over 128 tokens of 256 kinds."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.places = nn.Embedding(256, 128), nn.Parameter(torch.zeros(128, 128))
        self.layers = nn.ModuleList(
            nn.TransformerEncoderLayer(128, 4, 512, 0.0, batch_first=True, norm_first=True)
            for _ in range(2)
        )
        self.head = nn.Linear(128, 256)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens) + self.places
        for layer in self.layers:
            x = layer(x)
        logits: Tensor = self.head(x)
        return logits


def make_model(name: str) -> nn.Module:
    torch.manual_seed(0)
    if name == "convnet":
        return nn.Sequential(
            nn.Conv2d(3, 32, 3, padding=1),
            nn.BatchNorm2d(32),
            nn.ReLU(),
            nn.MaxPool2d(2),
            nn.Conv2d(32, 64, 3, padding=1),
            nn.BatchNorm2d(64),
            nn.ReLU(),
            nn.AdaptiveAvgPool2d(1),
            nn.Flatten(),
            nn.Linear(64, 10),
        )
    if name == "gpt":
        return Tiny()
    width = 60_000 if name == "wide" else 64
    return nn.Sequential(nn.Linear(32, width), nn.ReLU(), nn.Linear(width, 10))


def make_samples(name: str) -> tuple[Tensor, Tensor]:
    draws = torch.Generator().manual_seed(1)
    if name == "gpt":
        tokens = torch.randint(256, (400, 128), generator=draws)
        return tokens, tokens.roll(-1, 1)
    shape, count = ((3, 32, 32), 3200) if name == "convnet" else ((32,), 6400)
    return torch.randn(count, *shape, generator=draws), torch.randint(10, (count,), generator=draws)


class Costed:
    """One of the models on data in memory, or in a DataLoader."""

    def __init__(self, name: str, loader: bool = False) -> None:
        self.name, self.loader = name, loader

    def model(self) -> nn.Module:
        return make_model(self.name)

    def data(self, split: str) -> Any:
        samples = make_samples(self.name)
        return (
            DataLoader(TensorDataset(*samples), batch_size=32, shuffle=True)
            if self.loader
            else Arrays(*samples)
        )

    def forward(self, model: nn.Module, batch: Any) -> Tensor:
        output: Tensor = model(batch[0])
        return output

    def loss(self, output: Tensor, batch: Any) -> Loss:
        targets = batch[1].flatten()
        return Loss.sum(
            F.cross_entropy(output.flatten(0, -2), targets, reduction="sum"), targets.numel()
        )


@contextlib.contextmanager
def begin(folder: Path, name: str, *, loader: bool = False) -> Iterator[Run]:
    train = {"length": "1000000 steps", "seed": 0, "threads": 1} | (
        {} if loader else {"batch": BATCH[name]}
    )
    spec = RunSpec(
        task={"use": f"{__file__}:Costed", "name": name, "loader": loader},
        optim={"lr": 1e-3},
        schedule={"name": "constant"},
        train=train,
        observe={"tensorboard": False},
        checkpoint={"every": "1000000 steps"},
    )
    with Run(spec, folder=folder, quiet=True) as run:
        yield run


@contextlib.contextmanager
def workload(name: str, folder: Path) -> Iterator[Callable[[], object]]:
    """What one turn of the workload does."""
    if name in STEPS:
        with begin(folder, "mlp" if name == "loader" else name, loader=name == "loader") as run:
            steps = run.steps()
            yield lambda: [next(steps) for _ in range(STEPS[name])]
    elif name == "save":
        with begin(folder, "wide") as run:
            steps = run.steps()

            def save() -> None:
                for _ in range(SAVES):
                    next(steps)
                    run.save()

            yield save
    elif name == "load":
        with begin(folder, "wide") as run:
            next(run.steps())
            run.save()
            yield lambda: surefoot.load(folder)
    else:
        source, draws = Arrays(*make_samples("convnet")), np.random.default_rng(0)
        yield lambda: [source.read(draws.integers(3200, size=64)) for _ in range(READS)]


def main() -> None:
    torch.set_num_threads(1)
    with (
        answering() as answer,
        tempfile.TemporaryDirectory(dir=sys.argv[2]) as folder,
        workload(sys.argv[1], Path(folder) / "run") as turn,
    ):
        answer(turn, {"surefoot": root_of(surefoot)})


if __name__ == "__main__":
    main()
