"""A loss that the model computes in training mode only: metrics alone evaluate the task."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from surefoot import Loss, Run
from surefoot.contract.events import Evaluated
from surefoot.core.errors import SpecError, TaskError
from surefoot.train.run import drive
from tests.train.detectors import NUM_IMAGES, Detection, InUpdates, Segmentation
from tests.train.small import records, spec
from tests.world.ranks import run_ranks

BATCH, STEPS, LR = 8, 6, 0.1
KINDS: dict[str, Callable[[], Detection]] = {
    "detector": Detection,
    "detector with BatchNorm": lambda: Detection(norm=True),
    "segmentation": Segmentation,
    "in updates": InUpdates,
}


def detection_spec(steps: int = STEPS, **tables: Any) -> Any:
    return spec(
        steps,
        train={"batch": BATCH, **tables.pop("train", {})},
        optim={"name": "sgd", "lr": LR, "momentum": 0.0, "weight_decay": 0.0, "clip": 0},
        schedule={"name": "constant"},
        data={"shuffle": False},
        **tables,
    )


def weights_of_run(task: Any, folder: Path, given: Any) -> dict[str, Tensor]:
    with Run(given, task, folder=folder, quiet=True) as run:
        drive(run)
        return {name: each.detach().clone() for name, each in run.model.state_dict().items()}


def weights_of_plain_loop(task: Detection) -> dict[str, Tensor]:
    torch.manual_seed(0)
    model, source = task.model(), task.data("train")
    optimizer = torch.optim.SGD(model.parameters(), lr=LR)
    for step in range(STEPS):
        ids = (np.arange(BATCH) + step * BATCH) % NUM_IMAGES
        optimizer.zero_grad()
        images, targets = source.read(ids)
        losses: Any = model(images, targets)
        num = task.counts((images, targets)) if isinstance(task, Segmentation) else 1
        (sum(losses.values()) / num).backward()
        optimizer.step()
    return model.state_dict()


@pytest.mark.parametrize("kind", KINDS)
def test_weights_equal_those_of_a_plain_loop_and_metrics_alone_evaluate(
    kind: str, tmp_path: Path
) -> None:
    task = KINDS[kind]()
    expected = weights_of_plain_loop(task)
    sizes = [BATCH] if "Norm" in kind else [BATCH, 2]
    for microbatch in sizes:
        folder = tmp_path / str(microbatch)
        found = weights_of_run(task, folder, detection_spec(train={"microbatch": microbatch}))
        for name, weight in expected.items():
            torch.testing.assert_close(found[name], weight, rtol=1e-5, atol=1e-6)
        (evaluated,) = [each for each in records(folder) if isinstance(each, Evaluated)]
        assert evaluated.loss is None
        assert evaluated.score in ("box_error", "right")
        assert evaluated.metrics[evaluated.score] is not None
        assert evaluated.best


def test_patience_counts_evaluations_by_the_metric(tmp_path: Path) -> None:
    class Same(Detection):
        def metrics(self, output: Any, batch: Any) -> Any:
            found = super().metrics([*output], batch)
            return {"fixed": type(found["box_error"])(1.0, 1.0, "lower")}

    given = detection_spec(20, evaluate={"every": "1 step", "patience": 2})
    with Run(given, Same(), folder=tmp_path / "run", quiet=True) as run:
        drive(run)
        assert run.step == 3  # step 1 is the best; two evaluations are no better


def test_a_resumed_run_has_the_weights_of_an_unbroken_one(tmp_path: Path) -> None:
    given = detection_spec(checkpoint={"every": "2 steps"}, evaluate={"every": "2 steps"})
    whole = weights_of_run(Detection(dropout=0.2), tmp_path / "whole", given)
    with (
        pytest.raises(KeyboardInterrupt),
        Run(given, Detection(dropout=0.2), folder=tmp_path / "run", quiet=True) as run,
    ):
        for report in run.steps():
            if run.evaluation_due:
                run.evaluate()
            if report.step == 3:
                raise KeyboardInterrupt
    again = weights_of_run(Detection(dropout=0.2), tmp_path / "run", given)
    assert all(torch.equal(again[name], weight) for name, weight in whole.items())


def test_two_ranks_train_and_share_the_evaluation(tmp_path: Path) -> None:
    given = detection_spec(train={"threads": 1})

    def on_rank(rank: int) -> Any:
        with Run(given, Detection(), folder=tmp_path / "two", quiet=True) as run:
            drive(run)
            found = {name: each.tolist() for name, each in run.model.state_dict().items()}
            return found, run.evaluate().metrics

    (weights, metrics), (others, _) = run_ranks(2, on_rank, tmp_path / "ranks")
    assert weights == others
    with Run(given, Detection(), folder=tmp_path / "one", quiet=True) as run:
        drive(run)
        for name, weight in run.model.state_dict().items():
            torch.testing.assert_close(torch.tensor(weights[name]), weight)
        assert run.evaluate().metrics == pytest.approx(metrics)


class Raises(Detection):
    def loss(self, output: Any, batch: Any) -> Loss | None:
        return Loss.sum(sum(output.values()), len(batch[0]))


class Constant(Detection):
    def loss(self, output: Any, batch: Any) -> Loss | None:
        return super().loss(output, batch) or Loss.sum(torch.zeros(()), len(batch[0]))


class Bare(Detection):
    metrics = None  # type: ignore[assignment]


class Forgotten(Detection):
    def loss(self, output: Any, batch: Any) -> Loss | None:
        super().loss(output, batch)
        return None


@pytest.mark.parametrize(
    ("task", "message", "hint"),
    [
        (Raises, "has no attribute 'values'", "return None from loss in evaluation"),
        (Bare, "is None, and the task has no metrics", "metrics(output, batch)"),
        (Forgotten, "must be a Loss; got a NoneType", "return Loss.sum"),
    ],
)
def test_a_refusal_leads_to_a_loss_in_training_only(
    task: type[Detection], message: str, hint: str, tmp_path: Path
) -> None:
    with (
        pytest.raises(TaskError) as caught,
        Run(detection_spec(), task(), folder=tmp_path / "run", quiet=True),
    ):
        pass
    assert message in caught.value.message
    assert hint in (caught.value.hint or "")
    assert not (tmp_path / "run").exists()


def test_a_constant_in_evaluation_is_tried_in_training_mode(tmp_path: Path) -> None:
    with Run(detection_spec(), Constant(), folder=tmp_path / "run", quiet=True) as run:
        drive(run)
    assert run.outcome == "finished"


def test_the_loss_cannot_be_the_score(tmp_path: Path) -> None:
    given = detection_spec(evaluate={"score": "loss"})
    with pytest.raises(SpecError) as caught, Run(given, Detection(), folder=tmp_path / "run"):
        pass
    assert caught.value.hint == "use one of box_error"


class Averaged(Detection):
    def loss(self, output: Any, batch: Any) -> Loss | None:
        if isinstance(output, list):
            return None
        return Loss.sum(output["classifier"] + output["box_reg"], len(batch[0]))

    def counts(self, batch: Any) -> Any:
        return len(batch[0])


def test_a_mean_is_found_in_training_mode_too(tmp_path: Path) -> None:
    with (
        pytest.raises(TaskError, match="is a mean"),
        Run(detection_spec(), Averaged(), folder=tmp_path / "run", quiet=True),
    ):
        pass


def test_batchnorm_in_microbatches_is_named_without_a_measurement(tmp_path: Path) -> None:
    given = detection_spec(train={"microbatch": 4})
    with Run(given, Detection(norm=True), folder=tmp_path / "run", quiet=True) as run:
        modes = [each.training for each in run.model.modules() if isinstance(each, nn.BatchNorm1d)]
        assert modes == [True]
    assert any("which changes its gradient" in str(each) for each in records(tmp_path / "run"))
