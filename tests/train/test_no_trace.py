"""What surefoot does for its own purposes in the middle of a run leaves no trace.

Data, model, buffers, random states and files are as they were.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader

from surefoot import Loss, Run, RunSpec
from surefoot.components.data.sources.arrays import Arrays
from surefoot.train.preflight import check
from surefoot.train.record.peak import make_step_function


class Stream:
    """Keeps its own place, and has no way to put it back."""

    def __init__(self) -> None:
        self.next = 0

    def __len__(self) -> int:
        return 9

    def __iter__(self) -> Iterator[Tensor]:
        while self.next < 9:
            self.next += 1
            yield torch.randn(4, 3, generator=torch.Generator().manual_seed(self.next))
        self.next = 0


class Task:
    """What a look might move: BatchNorm, dropout, a state, draws of all global streams."""

    def __init__(self, data: Callable[[], Any]) -> None:
        self.make, self.passes = data, torch.zeros(())

    def state(self) -> dict[str, Tensor]:
        return {"passes": self.passes}

    def model(self) -> nn.Module:
        return nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Dropout(0.3), nn.Linear(4, 1))

    def data(self, split: str) -> Any:
        return self.make() if split == "train" else Arrays(torch.ones(6, 3))

    def forward(self, model: nn.Module, batch: Any) -> Tensor:
        self.passes += 1
        rows = batch[0] if isinstance(batch, list | tuple) else batch
        return model(rows + torch.rand(()) + random.random() + float(np.random.rand()))  # type: ignore[no-any-return]  # noqa: NPY002

    def loss(self, output: Tensor, batch: Any) -> Loss:
        return Loss.sum((output - 1).square().sum(), count=len(output))


ROWS = torch.randn(36, 3, generator=torch.Generator().manual_seed(0))
DATA: dict[str, Callable[[], Any]] = {
    "a stream": Stream,
    "a loader": lambda: DataLoader(
        list(ROWS), 4, shuffle=True, generator=torch.Generator().manual_seed(1)
    ),  # type: ignore[arg-type]
    "arrays": lambda: Arrays(ROWS),
}


def nothing(run: Run) -> None: ...


ACTIONS: dict[str, Callable[[Run], Any]] = {
    "an evaluation": lambda run: run.evaluate(),
    "an evaluation of another split": lambda run: run.evaluate("other"),
    "a save": lambda run: run.save(),
    "digests of the state": lambda run: run.state_digests(),
    "the checks before a run": lambda run: check(run.assembly),
    "the prediction of memory": lambda run: make_step_function(
        run.assembly, run.session.telling, run.folder
    ),
}


def trained(folder: Path, data: Callable[[], Any], action: Callable[[Run], Any]) -> list[Any]:
    spec = RunSpec(
        train={"length": "14 steps", "threads": 1, "batch": 4}
        if data is DATA["arrays"]
        else {"length": "14 steps", "threads": 1},
        evaluate={"every": "1000 steps"},
        checkpoint={"every": "never"},
        observe={"tensorboard": False},
    )
    found: list[Any] = []
    with Run(spec, Task(data), folder=folder, quiet=True) as run:
        for report in run.steps():
            found.append(report.loss)
            if report.step == 5:
                modes = [module.training for module in run.model.modules()]
                streams = (
                    torch.get_rng_state(),
                    random.getstate(),
                    np.random.get_state()[1].tolist(),  # noqa: NPY002
                )  # type: ignore[index]
                action(run)
                assert modes == [module.training for module in run.model.modules()]
                assert torch.equal(streams[0], torch.get_rng_state())
                assert streams[1:] == (random.getstate(), np.random.get_state()[1].tolist())  # type: ignore[index]  # noqa: NPY002
        found += [value.tolist() for value in run.model.state_dict().values()]
        found.append(float(run.assembly.task.task.passes))
    return found


@pytest.mark.quick("a loader")
@pytest.mark.parametrize("kind", DATA)
def test_what_is_done_in_the_middle_of_a_run_leaves_no_trace(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    plain = trained(tmp_path / "plain", DATA[kind], nothing)
    for number, (name, action) in enumerate(ACTIONS.items()):
        if kind == "a stream" and name == "the checks before a run":
            continue  # they are made once, before the first batch is trained on, and keep that one
        assert trained(tmp_path / str(number), DATA[kind], action) == plain, name
    assert list((tmp_path / "here").iterdir()) == []
