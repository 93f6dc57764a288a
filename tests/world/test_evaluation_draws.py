"""What an evaluation draws is a matter of the seed, the split and the batch.

Not of the step, the ranks, the workers or the verb.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset

from surefoot.components.data.sources.arrays import Arrays
from surefoot.contract.task import Loss
from surefoot.train.look_back import evaluate_run, predict_run
from surefoot.train.run import Run
from tests.train.small import spec
from tests.world.ranks import run_ranks

STREAMS: dict[str, Callable[[Tensor], Tensor]] = {
    "torch": torch.randn_like,
    "numpy": lambda x: torch.from_numpy(np.random.standard_normal(x.shape)).to(x),  # noqa: NPY002 - a task may draw from it
    "python": lambda x: torch.full_like(x, random.random()),
    "dropout": lambda x: F.dropout(torch.ones_like(x), 0.5, training=True),
}


class Drawn(Dataset[Any]):
    """Samples that are drawn anew each time."""

    def __len__(self) -> int:
        return 22

    def __getitem__(self, number: int) -> Any:
        return torch.randn(4) + float(np.random.rand()), number % 3  # noqa: NPY002


class Noisy:
    """Takes noise in the forward pass, as a diffusion model does.

    `source` draws too where it is not "arrays".
    """

    def __init__(self, stream: str = "torch", source: str = "arrays") -> None:
        self.stream, self.source = stream, source

    def model(self) -> nn.Module:
        return nn.Linear(4, 3)

    def data(self, split: str) -> Any:
        if self.source == "arrays" or split == "train":
            generator = torch.Generator().manual_seed(1)
            return Arrays(torch.randn(22, 4, generator=generator), torch.arange(22) % 3)
        if self.source == "dataset":
            return Drawn()
        return DataLoader(
            Drawn(),
            batch_size=4,
            shuffle=True,
            num_workers=int(self.source == "loader with a worker"),
        )

    def forward(self, model: nn.Module, batch: Any) -> Tensor:
        noise = torch.zeros_like(batch[0]) if model.training else STREAMS[self.stream](batch[0])
        made: Tensor = model(batch[0] + noise)
        return made

    def loss(self, output: Tensor, batch: Any) -> Loss:
        return Loss.sum(F.cross_entropy(output, batch[1], reduction="sum"), len(batch[1]))

    def metrics(self, output: Tensor, batch: Any) -> dict[str, Any]:
        return {}


def scores(folder: Path, task: Noisy, lr: float = 0.0, **tables: Any) -> list[str]:
    """The bits of the losses of three evaluations, with other splits and draws between them."""
    given = spec(
        3,
        optim={"name": "sgd", "lr": lr},
        train={"seed": tables.pop("seed", 0)},
        evaluate={"batch": 4},
        **tables,
    )
    found = []
    with Run(given, task, folder=folder, quiet=True) as run:
        for _ in run.steps():
            torch.rand(3), random.random(), np.random.rand()  # noqa: NPY002
            found.append(float(run.evaluate().loss or 0.0).hex())
    return found


@pytest.mark.parametrize(
    ("stream", "source"),
    [*((stream, "arrays") for stream in STREAMS), ("torch", "dataset"), ("torch", "loader")],
)
def test_weights_that_do_not_move_have_one_score(stream: str, source: str, tmp_path: Path) -> None:
    assert len(set(scores(tmp_path / "run", Noisy(stream, source)))) == 1


def test_another_seed_and_another_split_draw_other_numbers(tmp_path: Path) -> None:
    assert scores(tmp_path / "zero", Noisy())[0] != scores(tmp_path / "one", Noisy(), seed=1)[0]
    with Run(spec(1), Noisy(), folder=tmp_path / "run", quiet=True) as run:
        assert run.evaluate("test").loss != run.evaluate("validation").loss  # the same samples


def test_two_batches_of_one_evaluation_draw_other_numbers(tmp_path: Path) -> None:
    seen = []

    class Seen(Noisy):
        def forward(self, model: nn.Module, batch: Any) -> Tensor:
            if not model.training:
                seen.append(torch.rand(1).item())
            return super().forward(model, batch)

    with Run(spec(1, evaluate={"batch": 4}), Seen(), folder=tmp_path / "run", quiet=True) as run:
        seen.clear()
        run.evaluate()
    assert len(seen) == len(set(seen)) == 6


@pytest.mark.parametrize("source", ["dataset", "loader"])
def test_workers_of_a_run_and_evaluate_read_the_same_draws(source: str, tmp_path: Path) -> None:
    alone = scores(tmp_path / "alone", Noisy(source=source))
    if source == "loader":
        assert (
            scores(tmp_path / "worked", Noisy(source="loader with a worker"))[0]
            == scores(tmp_path / "again", Noisy(source="loader with a worker"))[0]
        )
    else:
        assert (
            scores(
                tmp_path / "worked", Noisy(source=source), loader={"workers": 2, "kind": "process"}
            )
            == alone
        )


class Importable(Noisy):
    """Built by name, so that verbs can build it again."""

    def __init__(self) -> None:
        super().__init__(source="dataset")


def test_evaluate_and_predict_draw_as_the_run_did(tmp_path: Path) -> None:
    given = spec(
        3, task={"use": f"{__name__}:Importable"}, evaluate={"batch": 4, "every": "3 steps"}
    )
    with Run(given, folder=tmp_path / "run", quiet=True) as run:
        for _ in run.steps():
            torch.rand(3)
        told = run.evaluate().loss
    for _ in range(2):
        (found,), _ = evaluate_run(tmp_path / "run", "last", None, None)
        assert found.loss == told
    one, two = (
        predict_run(tmp_path / "run", "last", None, None, tmp_path / f"{name}.npz")[0]
        for name in ("one", "two")
    )
    for name in (first := np.load(one)):
        assert np.array_equal(first[name], np.load(two)[name])


def test_two_ranks_have_the_scores_of_one(tmp_path: Path) -> None:
    """A stream in two folders: the ranks of one run share one."""

    def scored(folder: str) -> dict[str, list[str]]:
        return {stream: scores(tmp_path / folder / stream, Noisy(stream)) for stream in STREAMS}

    alone = scored("alone")
    for rank, found in enumerate(run_ranks(2, lambda _: scored("two"), tmp_path / "told")):
        assert found == alone, rank
