"""Small real tasks, a way to run them by the command line, and disks that are full or read-only."""

from __future__ import annotations

import math
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from surefoot.cli.main import main
from surefoot.components.data.sources.arrays import Arrays
from surefoot.components.metrics import Mean, accuracy
from surefoot.contract import events
from surefoot.contract.events import Ended, Event, Fault
from surefoot.contract.spec import RunSpec
from surefoot.contract.task import Loss
from surefoot.train.run import Run

SAMPLES, BATCH = 24, 4

# a whole task as a user writes one; a test changes one thing of it
TEXT = """
import torch
import torch.nn.functional as F
from torch import nn
from surefoot import Loss
from surefoot.data import Arrays

STEP = 0

class Mine:
    def __init__(self, width: int = 4):
        self.width = width

    def model(self):
        return nn.Sequential(nn.Linear(4, self.width), nn.ReLU(), nn.Linear(self.width, 3))

    def data(self, split):
        generator = torch.Generator().manual_seed(int(split == "train"))
        return Arrays(torch.randn(24, 4, generator=generator), torch.arange(24) % 3)

    def forward(self, model, batch):
        if model.training:
            global STEP
            STEP += 1
        # FORWARD
        return model(batch[0])

    def loss(self, output, batch):
        # LOSS
        return Loss.sum(F.cross_entropy(output, batch[1], reduction="sum"), len(batch[1]))
"""


class Small:
    """A network with dropout and BatchNorm as asked, on 24 samples.

    `poison` holds the ids of samples that are not a number.
    """

    def __init__(
        self, dropout: float = 0.0, norm: bool = False, poison: tuple[int, ...] = ()
    ) -> None:
        self.dropout, self.norm, self.poison = dropout, norm, poison

    def model(self) -> nn.Module:
        norm: nn.Module = nn.BatchNorm1d(8) if self.norm else nn.Identity()
        return nn.Sequential(
            nn.Linear(4, 8), norm, nn.ReLU(), nn.Dropout(self.dropout), nn.Linear(8, 3)
        )

    def data(self, split: str) -> Arrays:
        generator = torch.Generator().manual_seed(int(split == "train"))
        x, y = torch.randn(SAMPLES, 4, generator=generator), torch.arange(SAMPLES) % 3
        if split == "train":
            x[list(self.poison)] = torch.nan
        return Arrays(x, y)

    def augment(self, batch: Any, keys: Any) -> Any:
        return batch[0] + 0.1 * keys.uniform(4), batch[1]

    def forward(self, model: nn.Module, batch: Any) -> Tensor:
        output: Tensor = model(batch[0])
        return output

    def loss(self, output: Tensor, batch: Any) -> Loss:
        return Loss.sum(F.cross_entropy(output, batch[1], reduction="sum"), len(batch[1]))

    def metrics(self, output: Tensor, batch: Any) -> dict[str, Mean]:
        return {"accuracy": accuracy(output, batch[1])}


class Odd(Small):
    """Goes wrong from step 4 on, as `how` says, for `steps` steps."""

    def __init__(self, how: str, steps: int = 1) -> None:
        super().__init__(norm=True)
        self.how, self.last, self.now = how, 3 + steps, 0

    def forward(self, model: nn.Module, batch: Any) -> Tensor:
        self.now += model.training
        return super().forward(model, batch)

    def loss(self, output: Tensor, batch: Any) -> Loss:
        loss = super().loss(output, batch)
        (term,) = loss.terms
        if not output.requires_grad or not 4 <= self.now <= self.last:
            return loss
        if self.how == "inf loss, finite gradient":
            return Loss.sum(term.total + math.inf, term.count)
        if self.how == "nan loss, finite gradient":
            return Loss.sum(term.total + math.nan, term.count)
        if self.how == "finite loss, inf gradient":
            output.register_hook(lambda gradient: gradient * math.inf)
        if self.how == "one number of one gradient":
            output.register_hook(
                lambda gradient: gradient.index_put(
                    (torch.tensor(0), torch.tensor(0)), torch.tensor(math.nan)
                )
            )
        return loss


def spec(steps: int = 12, **tables: dict[str, Any]) -> RunSpec:
    """A run of some steps, four samples each, evaluated once."""
    train = {"length": f"{steps} steps", "batch": BATCH, **tables.pop("train", {})}
    evaluate = {"every": "1000 steps", **tables.pop("evaluate", {})}
    observe = {"tensorboard": False, **tables.pop("observe", {})}
    return RunSpec(train=train, evaluate=evaluate, observe=observe, **tables)


def write_task(folder: Path, *, change: tuple[str, str] = ("", ""), name: str = "mine.py") -> str:
    """The task above in a file of its own, one piece of its text changed; gives `file.py:Mine`."""
    old, new = change
    assert old in TEXT
    path = folder / name
    path.write_text(TEXT.replace(old, new, 1) if old else TEXT)
    return f"{path}:Mine"


# for `write_task`: the task's data is a DataLoader of whole batches
WHOLE_BATCHES = (
    "Arrays(torch.randn(24, 4, generator=generator), torch.arange(24) % 3)",
    (
        "torch.utils.data.DataLoader([(torch.randn(4, generator=generator), place % 3) for place "
        "in range(24)], batch_size=9)"
    ),
)
FEW = ("--steps", "8", "--set", "train.batch=4", "--set", "observe.tensorboard=false")


def call(monkeypatch: pytest.MonkeyPatch, *words: str) -> int:
    """Run `surefoot words...` in this process; gives the exit code."""
    monkeypatch.setattr(sys, "argv", ["surefoot", *words])
    monkeypatch.setattr(sys, "path", list(sys.path))
    with pytest.raises(SystemExit) as left:
        main()
    assert isinstance(left.value.code, int)
    return left.value.code


def entries(folder: Path) -> list[str]:
    """Everything below a folder."""
    return sorted(
        path.relative_to(folder).as_posix()
        for path in folder.rglob("*")
        if "__pycache__" not in path.parts
    )


def records(folder: Path) -> list[Event]:
    return list(events.read(folder))


def faults_of(folder: Path) -> list[Fault]:
    """The faults that a run noted, but saves that took longer than the time between them.

    They do on a busy machine.
    """
    return [
        event
        for event in records(folder)
        if isinstance(event, Fault) and event.fault != "slow-save"
    ]


def end_of(folder: Path) -> Ended:
    last = records(folder)[-1]
    assert isinstance(last, Ended)
    return last


@contextmanager
def mounted(folder: Path, *options: str) -> Iterator[Path]:
    """A file system of its own on `folder`.

    The test is skipped, visibly, where mounting is not permitted.
    """
    folder.mkdir(exist_ok=True)
    done = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", ",".join(options), "none", str(folder)],
        capture_output=True,
        check=False,
    )
    if done.returncode:
        pytest.skip(
            f"mounting a small file system is not permitted here: {done.stderr.decode().strip()}"
        )
    try:
        yield folder
    finally:
        subprocess.run(["umount", "-l", str(folder)], check=True)


def fill(folder: Path, *, leaving: int = 0) -> Path:
    """Fill the disk below `folder` but for some bytes; gives the file that takes the space."""
    path = folder / ".ballast"
    with path.open("wb", buffering=0) as file:
        size = 1 << 16
        while size:
            try:
                if file.write(b"\0" * size) < size:
                    raise OSError
            except OSError:
                size >>= 4
    with path.open("r+b") as file:
        file.truncate(max(0, path.stat().st_size - leaving))
    return path


OPTIMIZERS = {
    "adamw": {"name": "adamw"},
    "adam": {"name": "adam", "weight_decay": 0.1},
    "sgd": {"name": "sgd", "momentum": 0.9, "nesterov": True},
    "plain sgd": {"name": "sgd", "momentum": 0.0},
    "muon": {"name": "muon"},
    "lars": {"name": "lars", "lr": 1.0},
    "lamb": {"name": "lamb"},
}


def state_of(run: Run) -> dict[str, Tensor]:
    """All that a step may move: weights, buffers, optimizer state, averages."""
    found = {f"model.{name}": tensor for name, tensor in run.model.state_dict().items()}
    for update in run.assembly.updates:
        for number, optimizer in enumerate(update.guarded.optimizers):
            for key, row in optimizer.state_dict()["state"].items():
                found |= {
                    f"{number}.{key}.{name}": torch.as_tensor(value) for name, value in row.items()
                }
    average = run.assembly.engine.average
    if average is not None:
        found |= {f"average.{number}": tensor for number, tensor in enumerate(average.averages)}
        found["average.t"] = torch.tensor(average.num_updates)
    return {name: tensor.detach().clone() for name, tensor in found.items()}


def assert_same(one: dict[str, Tensor], other: dict[str, Tensor]) -> None:
    assert one.keys() == other.keys()
    for name, tensor in one.items():
        assert torch.equal(tensor, other[name]), name
