"""The average of a run's weights and buffers.

As torch's AveragedModel makes it, in checkpoints, and after a kill.
"""

from __future__ import annotations

import contextlib
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

from surefoot import load
from surefoot.core.errors import SpecError
from surefoot.train.run import Run
from tests.train.small import Small, spec
from tests.world.ranks import run_ranks

STEPS = 8
# the bias before BatchNorm: its gradient is rounding noise, which moves it on some processors only
NOISE = "0.bias"


class Left(Exception):
    """The loop is left."""


def how(**optim: Any) -> Any:
    return spec(
        STEPS,
        optim={"name": "sgd", "lr": 0.1, "ema": 0.9, **optim},
        checkpoint={"every": "2 steps", "background": False, "keep": 9},
        train={"threads": 1},
    )


def averaged(folder: Path, table: dict[str, Any], *, leave_at: int | None = None) -> dict[str, Any]:
    """The averages after the run, those that torch makes of these weights, and a digest of all."""
    theirs: list[AveragedModel] = []
    with Run(how(**table), Small(norm=True), folder=folder, quiet=True) as run:
        if run.step == 0:
            theirs.append(
                AveragedModel(
                    run.model,
                    multi_avg_fn=get_ema_multi_avg_fn(0.9),
                    use_buffers=table.get("ema_buffers", False),
                )
            )
            theirs[0].update_parameters(run.model)  # its first call copies
        for report in run.steps():
            for each in theirs:
                each.update_parameters(run.model)
            if report.step == leave_at:
                raise Left
        average = run.assembly.engine.average
        assert average is not None
        with average.swapped_in():
            ours = {name: value.clone() for name, value in run.model.state_dict().items()}
        own = {name: value.clone() for name, value in run.model.state_dict().items()}
        digests = run.state_digests()
    return {
        "ours": ours,
        "own": own,
        "digests": digests,
        "theirs": theirs[0].module.state_dict() if theirs else None,
    }


@pytest.mark.parametrize("with_buffers", [False, True])
def test_without_the_ramp_a_run_averages_as_averaged_model_and_saves_and_resumes_it(
    with_buffers: bool, tmp_path: Path
) -> None:
    table = {"ema_ramp": False, "ema_buffers": with_buffers}
    whole = averaged(tmp_path / "whole", table)
    counts = [name for name in whole["ours"] if "num_batches" in name]  # which torch's rounds
    for name, value in whole["ours"].items():
        is_average = with_buffers or "running" not in name
        if name not in counts:
            expected = whole["theirs"][name] if is_average else whole["own"][name]
            torch.testing.assert_close(value, expected, rtol=1e-5, atol=1e-6)
            if name != NOISE:
                assert torch.equal(value, whole["own"][name]) is not is_average, name
    stored = load(tmp_path / "whole", STEPS, task=Small(norm=True)).state_dict()
    assert all(torch.equal(stored[name], value) for name, value in whole["ours"].items())
    with contextlib.suppress(Left):
        averaged(tmp_path / "left", table, leave_at=5)
    assert averaged(tmp_path / "left", table)["digests"] == whole["digests"]


def test_averages_of_buffers_are_the_same_on_every_rank(tmp_path: Path) -> None:
    table = {"ema_buffers": True}
    found = run_ranks(
        2,
        lambda rank: {
            name: each.tolist() for name, each in averaged(tmp_path / "run", table)["ours"].items()
        },
        tmp_path,
    )
    assert found[0] == found[1]
    assert "error" not in found[0]


def test_a_fork_does_not_switch_the_averages_of_buffers_on(tmp_path: Path) -> None:
    from surefoot.train.resume import changes

    found = changes.find(how(), how(ema_buffers=True))
    with pytest.raises(SpecError, match=r"optim\.ema_buffers is True, was False"):
        changes.check_fork(found)
