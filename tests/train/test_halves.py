"""Before a run each loss is computed of a batch and of its halves, whatever the data come from.

What is no sum over samples is found.
"""

from __future__ import annotations

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
from surefoot.components.data.sources.iterated import Iterated
from surefoot.contract.events import Started
from surefoot.contract.spec import RunSpec
from surefoot.contract.task import Loss, Term
from surefoot.core.errors import TaskError
from surefoot.train.preflight.halves import cut_batch, double_batch, judge
from surefoot.train.run import Run
from tests.train.small import records

Parts = Callable[[nn.Module, Tensor, Tensor], Loss]


def samples() -> tuple[Tensor, Tensor]:
    draws = torch.Generator().manual_seed(1)
    return torch.randn(32, 4, generator=draws), torch.randn(32, generator=draws)


class Rows(Dataset[Any]):
    def __len__(self) -> int:
        return 32

    def __getitem__(self, number: int) -> dict[str, Tensor]:
        x, y = samples()
        return {"x": x[number], "y": y[number]}


class Noisy(Rows):
    def __getitem__(self, number: int) -> dict[str, Tensor]:
        row = super().__getitem__(number)
        return {"x": row["x"] + torch.randn(4), "y": row["y"]}


def in_batches() -> Any:
    x, y = samples()
    return Iterated([{"x": x[at : at + 8], "y": y[at : at + 8]} for at in range(0, 32, 8)])


SOURCES: dict[str, Callable[[], Any]] = {
    "arrays": lambda: Arrays(x=samples()[0], y=samples()[1]),
    "a DataLoader": lambda: DataLoader(Rows(), batch_size=8),
    "a DataLoader of single samples": lambda: DataLoader(Rows(), batch_size=1),
    "batches in a list": in_batches,
    "a dataset": Rows,
    "a dataset that draws": Noisy,
}


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(4, 8), nn.Linear(8, 1)

    def forward(self, x_BD: Tensor) -> Tensor:
        found: Tensor = self.b(F.relu(self.a(x_BD)))
        return found


class Task:
    def __init__(
        self,
        of: Parts,
        data: Callable[[], Any] = SOURCES["arrays"],
        net: Callable[[], nn.Module] = Net,
    ) -> None:
        self.of, self.make, self.net = of, data, net

    def model(self) -> nn.Module:
        return self.net()

    def data(self, split: str) -> Any:
        return self.make()

    def forward(self, model: nn.Module, batch: dict[str, Tensor]) -> tuple[nn.Module, Tensor]:
        return model, model(batch["x"])

    def loss(self, output: tuple[nn.Module, Tensor], batch: dict[str, Tensor]) -> Loss:
        return self.of(output[0], output[1], batch["y"])


def squares(model: nn.Module, output: Tensor, y: Tensor) -> Loss:
    return Loss.sum((output[:, 0] - y).square().sum(), len(y))


def mean(model: nn.Module, output: Tensor, y: Tensor) -> Loss:
    return Loss.sum((output[:, 0] - y).square().mean(), len(y))


def mean_of_some(model: nn.Module, output: Tensor, y: Tensor) -> Loss:
    """A mean over the items that count, of which each half has a different number."""
    return Loss.sum((output[:, 0] - y)[y > -0.2].square().mean(), len(y))


def mean_with_noise(model: nn.Module, output: Tensor, y: Tensor) -> Loss:
    return Loss.sum((output[:, 0] + 0.1 * torch.randn_like(y) - y).square().mean(), len(y))


def with_noise(model: nn.Module, output: Tensor, y: Tensor) -> Loss:
    return Loss.sum(
        (F.dropout(output[:, 0], 0.1) + 0.1 * torch.randn_like(y) - y).square().sum(), len(y)
    )


def contrast(model: nn.Module, output: Tensor, y: Tensor) -> Loss:
    return Loss.sum(
        F.cross_entropy(
            output @ output.T - (y[:, None] - y).abs(), torch.arange(len(y)), reduction="sum"
        ),
        len(y),
    )


def penalized(model: nn.Module, output: Tensor, y: Tensor) -> Loss:
    return Loss.sum(
        (output[:, 0] - y).square().sum() + sum(each.abs().sum() for each in model.parameters()),
        len(y),
    )


def broadcast(model: nn.Module, output: Tensor, y: Tensor) -> Loss:
    return Loss.sum((output - y).square().sum(), len(y))


def covariance(model: nn.Module, output: Tensor, y: Tensor) -> Loss:
    return Loss.sum((output[:, 0] * y).sum().square(), len(y))


def train(task: Task, folder: Path, **train: Any) -> list[str]:
    """Train for two steps; the notes of the start."""
    if isinstance(task.data("train"), Arrays | Rows):
        train = {"batch": 16, **train}
    spec = RunSpec(
        train={"length": "2 steps", "threads": 1, **train}, observe={"tensorboard": False}
    )
    with Run(spec, task, folder=folder, quiet=True) as run:
        for _ in run.steps():
            pass
    started = records(folder)[0]
    assert isinstance(started, Started)
    return [note for note in started.notes if " a sum" in note]


@pytest.mark.parametrize("source", SOURCES)
@pytest.mark.parametrize("of", [mean, mean_of_some, mean_with_noise], ids=lambda of: of.__name__)
def test_a_mean_is_refused_whatever_the_data_come_from(
    of: Parts, source: str, tmp_path: Path
) -> None:
    if source == "a DataLoader of single samples" and of is not mean:
        pytest.skip("the mean over one sample, or over none")
    with pytest.raises(TaskError, match="is a mean, not a sum"):
        train(Task(of, SOURCES[source]), tmp_path / "run")


@pytest.mark.parametrize("source", SOURCES)
@pytest.mark.parametrize("of", [squares, with_noise], ids=lambda of: of.__name__)
def test_a_sum_is_found_to_be_one_whatever_the_data_come_from(
    of: Parts, source: str, tmp_path: Path
) -> None:
    if source == "a DataLoader of single samples" and of is with_noise:
        pytest.skip(
            "the noise of one sample is larger than its loss: "
            "that it could not be checked is reported"
        )
    assert train(Task(of, SOURCES[source]), tmp_path / "run") == []


NO_SUMS = [contrast, penalized, broadcast, covariance]


@pytest.mark.parametrize("of", NO_SUMS, ids=lambda of: of.__name__)
def test_a_loss_that_is_no_sum_is_refused_where_the_run_divides_its_batches(
    of: Parts, tmp_path: Path
) -> None:
    with pytest.raises(TaskError, match="is not a sum over samples"):
        train(Task(of), tmp_path / "run", microbatch=4)


def broadcast_in_torch(model: nn.Module, output: Tensor, y: Tensor) -> Loss:
    return Loss.sum(F.mse_loss(output, y, reduction="sum"), len(y))


def broadcast_the_other_way(model: nn.Module, output: Tensor, y: Tensor) -> Loss:
    return Loss.sum((output[:, 0] - y[:, None, None]).abs().sum(), len(y))


def indexed(model: nn.Module, output: Tensor, y: Tensor) -> Loss:
    return Loss.sum((output[torch.arange(len(y))][:, 0] * y).sum().square(), len(y))


@pytest.mark.parametrize(
    ("of", "words"),
    [
        (broadcast, "sub takes tensors of shapes (8, 1) and (8,)"),
        (broadcast_in_torch, "mse_loss takes tensors of shapes (8, 1) and (8,)"),
        (broadcast_the_other_way, "sub takes tensors of shapes (8,) and (8, 1, 1)"),
        (indexed, ""),
        (covariance, ""),
        (penalized, ""),
    ],
    ids=lambda of: getattr(of, "__name__", ""),
)
@pytest.mark.filterwarnings("ignore:Using a target size")
def test_shapes_that_broadcast_samples_against_each_other_are_named(
    of: Parts, words: str, tmp_path: Path
) -> None:
    with pytest.raises(TaskError, match="is not a sum over samples") as refused:
        train(Task(of), tmp_path / "split", microbatch=4)
    (note,) = train(Task(of), tmp_path / "whole")
    for told in (str(refused.value.hint), note):
        assert words in told
        assert ("give both the same shape" in told) is bool(words)


@pytest.mark.parametrize("source", ["arrays", "a DataLoader"])
@pytest.mark.parametrize("of", NO_SUMS, ids=lambda of: of.__name__)
def test_a_loss_that_is_no_sum_is_reported_on_the_screen_where_batches_stay_whole(
    of: Parts, source: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (note,) = train(Task(of, SOURCES[source]), tmp_path / "run")
    assert "is not a sum over samples" in note
    assert note in capsys.readouterr().err


def without_statistics() -> nn.Module:
    return nn.Sequential(
        nn.Linear(4, 8),
        nn.BatchNorm1d(8, track_running_stats=False),
        nn.Dropout(0.5),
        nn.Linear(8, 1),
    )


def with_dropout() -> nn.Module:
    return nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Dropout(0.5), nn.Linear(8, 1))


@pytest.mark.parametrize("net", [with_dropout, without_statistics], ids=lambda net: net.__name__)
def test_norms_over_the_batch_and_dropout_refuse_no_microbatches(
    net: Callable[[], nn.Module], tmp_path: Path
) -> None:
    notes = train(Task(squares, net=net), tmp_path / "run", microbatch=4)
    assert [note for note in notes if "could not be checked" not in note] == []
    assert bool(notes) == (net is without_statistics)


def test_a_generator_that_nobody_knows_of_refuses_nothing(tmp_path: Path) -> None:
    draws = np.random.default_rng(0)

    def noisy(model: nn.Module, output: Tensor, y: Tensor) -> Loss:
        return Loss.sum(float(draws.uniform(1, 3)) * (output[:, 0] - y).square().sum(), len(y))

    (note,) = train(Task(noisy), tmp_path / "run", microbatch=4)
    assert "could not be checked" in note


def test_a_batch_that_cannot_be_cut_is_reported_on_the_screen(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    data = Iterated([{"x": samples()[0][:8], "y": samples()[1][:8], "shape": torch.ones(3)}])
    (note,) = train(Task(mean, lambda: data), tmp_path / "run")
    assert "the first batch cannot be cut in halves" in note
    assert note in capsys.readouterr().err


def test_a_term_that_is_the_same_for_every_batch_is_trained(tmp_path: Path) -> None:
    def bounded(model: nn.Module, output: Tensor, y: Tensor) -> Loss:
        return Loss(
            *squares(model, output, y).terms,
            Term("edge", model(torch.ones(2, 4)).square().sum(), 2),
        )

    assert train(Task(bounded), tmp_path / "run") == []


X = torch.arange(24.0).reshape(8, 3)
CUT: dict[str, tuple[Any, Any]] = {
    # what is given, and its first half
    "a tensor": (X, X[:4]),
    "a tuple of tensors": ((X, X[:, 0]), (X[:4], X[:4, 0])),
    "a dict with a number and names": (
        {"x": X, "n": 3, "names": list("abcdefgh")},
        {"x": X[:4], "n": 3, "names": list("abcd")},
    ),
    "images of several sizes": (
        [list(range(8)), [X[:n] for n in range(1, 9)]],
        [list(range(4)), [X[:n] for n in range(1, 5)]],
    ),
    "an array in a dict in a list": ([{"x": X.numpy()}, X], [{"x": X.numpy()[:4]}, X[:4]]),
    "a scalar beside it": ({"x": X, "t": torch.tensor(2.0)}, {"x": X[:4], "t": torch.tensor(2.0)}),
}


def listed(batch: Any) -> Any:
    if isinstance(batch, Tensor | np.ndarray):
        return batch.tolist()
    if isinstance(batch, dict):
        return {key: listed(part) for key, part in batch.items()}
    return [listed(part) for part in batch] if isinstance(batch, list | tuple) else batch


@pytest.mark.parametrize("what", CUT)
def test_a_batch_is_cut_in_halves(what: str) -> None:
    batch, half = CUT[what]
    found = cut_batch(batch)
    assert found is not None
    assert listed(found[0]) == listed(half)
    assert type(found[0]) is type(batch)


class Graph:
    def __init__(self) -> None:
        self.x = X


@pytest.mark.parametrize(
    "batch",
    [
        (X, X[:5]),
        Graph(),
        [X, Graph()],
        "text",
        X[:1],
        torch.tensor(1.0),
        [[1, 2], X[:1]],
        [[X[0]] * 8, [1] * 8],
    ],
)
def test_a_batch_whose_samples_cannot_be_told_apart_is_not_cut(batch: Any) -> None:
    assert cut_batch(batch) is None


def test_a_batch_of_one_sample_is_doubled_and_no_other() -> None:
    assert listed(double_batch({"x": X[:1], "name": ["a"]})) == {
        "x": [[0.0, 1.0, 2.0]] * 2,
        "name": ["a", "a"],
    }
    assert double_batch(X) is None


JUDGED = {
    (10.0, 4.0, 6.0): "sum",
    (5.0, 4.0, 6.0): "mean",
    (4.5, 4.0, 6.0): "mean",
    (7.0, 5.0, 5.0): "other",
    (10.05, 4.0, 6.0): "unknown",
    (0.0, 0.0, 0.0): "unknown",
    (float("nan"), 1.0, 1.0): "unknown",
    (2.0, 5.0, -3.0): "sum",
    (-5.0, -4.0, -6.0): "mean",
}


@pytest.mark.parametrize("values", JUDGED)
def test_a_term_is_judged_by_its_values(values: tuple[float, float, float]) -> None:
    assert judge(np.array([values])) == JUDGED[values]
