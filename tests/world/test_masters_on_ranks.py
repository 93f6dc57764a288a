"""fp32 masters and averages on several ranks."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from torch import nn

from surefoot.core import place
from surefoot.train.run import Run
from tests.world.ranks import run_ranks
from tests.world.test_run import Sentences, apart, spec, train


class Narrow(Sentences):
    starts_apart = False

    def model(self) -> nn.Module:
        model = super().model().float()
        for each in model.parameters() if self.starts_apart and place.here().rank else ():
            each.data.add_(0.25)
        return model


class StartsApart(Narrow):
    starts_apart = True


def test_weights_with_masters_are_trained_by_the_gradients_of_all_ranks(tmp_path: Path) -> None:
    """The gradient goes to the master.

    That of the parameter itself is gone before it could be summed.
    """
    given = spec(
        precision={"weights": "bf16", "compute": "bf16"},
        layout={"check_every": "1 step"},
        train={"length": "6 steps"},
    )
    (alone,) = run_ranks(
        1, lambda rank: train(tmp_path / "alone", Narrow(), given), tmp_path / "one"
    )
    for task in (Narrow, StartsApart):
        found = run_ranks(
            2,
            lambda rank, task=task: train(tmp_path / task.__name__, task(), given),
            tmp_path / f"ranks-{task.__name__}",
        )
        assert all("error" not in each for each in found), found
        assert found[0]["state"] == found[1]["state"]
        assert apart(alone, found[0]) < 0.02


def test_averages_begin_with_the_weights_that_all_ranks_begin_with(tmp_path: Path) -> None:
    def job(rank: int) -> Any:
        with Run(
            spec(optim={"ema": 0.9}), StartsApart(), folder=tmp_path / "run", quiet=True
        ) as run:
            average = run.assembly.engine.average
            assert average is not None
            return [each.tolist() for each in average.averages]

    first, second = run_ranks(2, job, tmp_path / "ranks")
    assert "error" not in first, first
    assert first == second


def test_masters_on_the_host_are_refused(tmp_path: Path) -> None:
    (first, _) = run_ranks(
        2,
        lambda rank: train(tmp_path / "run", None, spec(memory={"offload": "optimizer"})),
        tmp_path / "ranks",
    )
    assert "memory.offload is 'optimizer', but there are several ranks" in first["error"]
