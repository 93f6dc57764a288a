"""Evaluation leaves no trace in the training, and its numbers do not depend on its batch."""

from __future__ import annotations

import copy
import math
import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from surefoot.components.data.sources.arrays import Arrays
from surefoot.components.metrics import bits_per_byte, perplexity
from surefoot.contract.events import Evaluated
from surefoot.contract.task import Loss, resolve
from surefoot.core.errors import UserCodeError
from surefoot.train.evaluate import evaluate
from surefoot.train.quiet import preserve_state
from surefoot.train.run import Run, drive
from tests.train.small import SAMPLES, Small, assert_same, records, spec, state_of


def test_training_after_an_evaluation_is_the_same_bit_for_bit(tmp_path: Path) -> None:
    class Drawing(Small):
        """An evaluation that draws from every stream there is."""

        def metrics(self, output: Tensor, batch: Any) -> Any:
            torch.rand(3), np.random.rand(3), random.random()  # noqa: NPY002
            return super().metrics(output, batch)

        def augment(self, batch: Any, keys: Any) -> Any:
            # not from its keys: from the stream that was put back
            return batch[0] + 0.1 * torch.rand_like(batch[0]), batch[1]

    made = []
    for every in (1000, 2):
        with Run(
            spec(12), Drawing(norm=True, dropout=0.5), folder=tmp_path / str(every), quiet=True
        ) as run:
            for report in run.steps():
                if report.step % every == 0:
                    run.evaluate()
                    run.evaluate("train")
            made.append(state_of(run))
    assert_same(*made)


@pytest.mark.parametrize("raises", [False, True])
def test_looking_at_a_model_leaves_mode_buffers_and_streams_as_they_were(raises: bool) -> None:
    class Replacing(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("seen", torch.zeros(2))
            self.norm = nn.BatchNorm1d(4)
            self.still = nn.Dropout().eval()

        def forward(self, x: Tensor) -> Tensor:
            self.seen = self.seen + 1  # another tensor in its place
            self.norm.running_mean += 1.0  # type: ignore[operator]
            return self.norm(x)

    model = Replacing()
    model.norm.eval()
    before, seen = copy.deepcopy(model.state_dict()), model.seen
    torch.manual_seed(3), np.random.seed(3), random.seed(3)  # noqa: NPY002
    try:
        with preserve_state(model):
            assert not model.training
            assert not model(torch.rand(4, 4)).requires_grad
            np.random.rand(), random.random()  # noqa: NPY002
            if raises:
                raise ValueError
    except ValueError:
        pass
    assert [module.training for module in (model, model.norm, model.still)] == [True, False, False]
    assert_same(before, model.state_dict())
    assert model.seen is seen
    drawn = torch.rand(1), np.random.rand(), random.random()  # noqa: NPY002
    torch.manual_seed(3), np.random.seed(3), random.seed(3)  # noqa: NPY002
    assert drawn == (torch.rand(1), np.random.rand(), random.random())  # noqa: NPY002


class Words(Small):
    """A language model's evaluation: counts differ from batch to batch."""

    def data(self, split: str) -> Arrays:
        generator = torch.Generator().manual_seed(3)
        targets = torch.randint(0, 3, (SAMPLES - 1, 5), generator=generator)
        targets[torch.rand(targets.shape, generator=generator) < 0.4] = -100
        return Arrays(torch.randn(SAMPLES - 1, 5, 4, generator=generator), targets)

    def loss(self, output: Tensor, batch: Any) -> Loss:
        return Loss.sum(
            F.cross_entropy(output.flatten(0, 1), batch[1].flatten(), reduction="sum"),
            int((batch[1] != -100).sum()),
        )

    def metrics(self, output: Tensor, batch: Any) -> Any:
        (term,) = self.loss(output, batch).terms
        return {
            "perplexity": perplexity(term.total, term.count),
            "bits": bits_per_byte(term.total, term.count),
            **super().metrics(output, batch),
        }


def test_the_batch_of_an_evaluation_changes_no_number_and_a_plain_loop_gives_the_same() -> None:
    torch.manual_seed(0)
    task = Words(dropout=0.5)
    model, source = task.model(), task.data("test")
    results = [
        evaluate(
            model, resolve(task), source, split="test", batch=batch, device=torch.device("cpu")
        )
        for batch in (1, 3, 7, SAMPLES, 100)
    ]
    total, count = 0.0, 0
    model.eval()
    with torch.no_grad():
        for number in range(len(source)):
            inputs, targets = source.read(np.array([number]))
            losses = F.cross_entropy(
                model(inputs).flatten(0, 1), targets.flatten(), reduction="none"
            )
            total, count = (
                total + float(losses.double().sum()),
                count + int((targets != -100).sum()),
            )
    for result in results:
        assert result.num_samples == len(source)
        assert result.loss == pytest.approx(total / count, rel=1e-6)
        assert result.metrics["perplexity"] == pytest.approx(math.exp(total / count), rel=1e-6)
        assert result.metrics["bits"] == pytest.approx(total / count / math.log(2), rel=1e-6)
        assert result.metrics["accuracy"] == results[0].metrics["accuracy"]


def test_a_perplexity_that_is_no_number_stays_none() -> None:
    assert math.isnan(perplexity(math.nan, 3).value() or 0.0)
    assert perplexity(1e6, 1).value() == math.inf
    assert perplexity(0.0, 0).value() is None


def test_an_evaluation_that_is_no_number_is_recorded_and_never_the_best(tmp_path: Path) -> None:
    class Sick(Small):
        def metrics(self, output: Tensor, batch: Any) -> Any:
            return {"perplexity": perplexity(math.nan, 3)}

    with Run(spec(4), Sick(), folder=tmp_path / "a", quiet=True) as run:
        drive(run)
    (found,) = [event for event in records(tmp_path / "a") if isinstance(event, Evaluated)]
    assert not found.best
    value = found.metrics["perplexity"]
    assert isinstance(value, float)
    assert math.isnan(value)


def test_an_error_in_an_evaluation_that_the_reader_catches_changes_nothing_of_the_training(
    tmp_path: Path,
) -> None:
    made = []
    for is_tried in (False, True):

        class Failing(Small):
            fails = False

            def metrics(self, output: Tensor, batch: Any) -> Any:
                if self.fails:
                    raise ValueError
                return super().metrics(output, batch)

        task = Failing(norm=True, dropout=0.5)
        with Run(
            spec(8, optim={"ema": 0.9}), task, folder=tmp_path / str(is_tried), quiet=True
        ) as run:
            for report in run.steps():
                task.fails = is_tried and report.step == 4
                if task.fails:
                    with pytest.raises(UserCodeError):
                        run.evaluate()
            made.append(state_of(run))
    assert_same(*made)
