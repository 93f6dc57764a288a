"""What one rank meets all ranks decide together: stops, signals, errors and steps to skip."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from surefoot.contract import manifest
from surefoot.contract.task import Loss
from surefoot.core.errors import EXIT_TERMINATED
from surefoot.runtime.comm.group import Group
from surefoot.train.run import Run
from tests.world.ranks import run_ranks
from tests.world.test_run import Sentences, spec, train


def test_a_stop_that_one_rank_asks_for_is_taken_by_all_after_the_same_step(tmp_path: Path) -> None:
    def job(rank: int) -> Any:
        with Run(spec(), Sentences(), folder=tmp_path / "run", quiet=True) as run:
            for report in run.steps():
                if report.step == 4 and rank == 1:
                    run.stop("good enough")
        return [run.step, run.outcome, run.cause, run.exit_code]

    first, second = run_ranks(2, job, tmp_path / "ranks")
    assert first == [4, "stopped", "another rank ended the run", 0]
    assert second == [4, "stopped", "good enough", 0]
    assert manifest.steps(tmp_path / "run")[-1] == 4


def test_a_signal_to_one_rank_ends_all_after_one_step_with_its_code(tmp_path: Path) -> None:
    def job(rank: int) -> Any:
        with Run(spec(), Sentences(), folder=tmp_path / "run", quiet=True) as run:
            for report in run.steps():
                if report.step == 3 and rank == 1:
                    os.kill(os.getpid(), signal.SIGTERM)
        return [run.step, run.outcome, run.exit_code]

    assert run_ranks(2, job, tmp_path / "ranks") == [[3, "interrupted", EXIT_TERMINATED]] * 2


def test_ranks_that_end_for_unlike_reasons_end_alike(tmp_path: Path) -> None:
    """Who is interrupted evaluates no more.

    The other, which only stops, must not wait for it in an evaluation.
    """

    def job(rank: int) -> Any:
        with Run(spec(), Sentences(), folder=tmp_path / "run", quiet=True) as run:
            for report in run.steps():
                if report.step == 3 and rank == 0:
                    run.stop("good enough")
                if report.step == 3 and rank == 1:
                    os.kill(os.getpid(), signal.SIGTERM)
            if run.is_stopping != "interrupted":
                run.evaluate()
        return [run.step, run.outcome, run.exit_code]

    assert (
        run_ranks(2, job, tmp_path / "ranks", within_s=20)
        == [[3, "interrupted", EXIT_TERMINATED]] * 2
    )


def test_a_number_that_is_none_in_one_rank_s_data_skips_the_step_on_all(tmp_path: Path) -> None:
    class Poisoned(Sentences):
        def forward(self, model: Any, batch: dict[str, Tensor]) -> Tensor:
            output = super().forward(model, batch)
            bad = (batch["words"] == self.data("train").read(np.array([7]))["words"]).all(1).any()
            return output * torch.where(bad, torch.nan, 1.0)

    whole = train(tmp_path / "one", Poisoned(), spec(stability={"max_skips": 20}))
    found = run_ranks(
        2,
        lambda rank: train(tmp_path / "run", Poisoned(), spec(stability={"max_skips": 20})),
        tmp_path / "ranks",
    )
    assert found[0]["state"] == found[1]["state"]
    assert all(np.isfinite(each).all() for each in found[0]["state"].values())
    skipped = [not np.isfinite(each) for each in found[0]["losses"]]
    assert 0 < sum(skipped) < 13
    assert skipped == [not np.isfinite(each) for each in whole["losses"]]


def test_an_error_of_the_task_on_one_rank_is_told_with_its_place_and_ends_the_others(
    tmp_path: Path,
) -> None:
    class Failing(Sentences):
        rank = 0

        def loss(self, output: Tensor, batch: dict[str, Tensor]) -> Loss:
            if self.rank == 1 and torch.is_grad_enabled() and self.calls > 12:
                raise ValueError("planted")
            self.calls += 1
            return super().loss(output, batch)

        calls = 0

    def job(rank: int) -> Any:
        task = Failing()
        task.rank = rank
        return train(tmp_path / "run", task)

    first, second = run_ranks(2, job, tmp_path / "ranks")
    assert second["error"].startswith("rank 1 of 2, step ")
    assert "ValueError: planted" in second["error"]
    assert second["code"] == 3
    assert "rank 1 has exited, after " in first["error"]
    assert first["code"] == 8


def test_a_signal_that_comes_while_ranks_agree_is_not_forgotten(tmp_path: Path) -> None:
    def job(rank: int) -> Any:
        most, calls = Group.most, list[int]()

        def interrupted(self: Group, values: Any) -> list[float]:
            found = most(self, values)
            if run.step == 3 and not calls:
                calls.append(1)
                os.kill(os.getpid(), signal.SIGTERM)
            return found

        with (
            pytest.MonkeyPatch.context() as patch,
            Run(spec(), Sentences(), folder=tmp_path / "run", quiet=True) as run,
        ):
            patch.setattr(Group, "most", interrupted)
            for _ in run.steps():
                pass
        return [run.step, run.outcome, run.exit_code]

    assert run_ranks(2, job, tmp_path / "ranks") == [[4, "interrupted", EXIT_TERMINATED]] * 2
