"""A run that trains nothing says so: a rate of 0, weights that have not moved.

Shares of the run as rhythms.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from surefoot import Run
from surefoot.contract.events import Committed, Evaluated
from surefoot.core.errors import SpecError
from surefoot.train.run import drive
from tests.train.small import Small, faults_of, records, spec


def kinds_of(folder: Path) -> list[str]:
    return [event.fault for event in faults_of(folder)]


class Still(Small):
    """Its loss does not depend on the weights."""

    def forward(self, model: Any, batch: Any) -> Any:
        return super().forward(model, batch) * 0.0


@pytest.mark.parametrize("kind", ["rate of 0", "gradient of 0", "frozen by a factor"])
def test_weights_that_have_not_moved_are_said(
    kind: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    table: dict[str, Any] = {
        "optim": {"name": "sgd", "lr": 0.1, "momentum": 0.0, "weight_decay": 0.0}
    }
    if kind != "gradient of 0":
        table["schedule"] = {"name": "constant", "factor": 0.0}
    with Run(
        spec(4, **table),
        Still() if kind == "gradient of 0" else Small(),
        folder=tmp_path / "a",
        quiet=True,
    ) as run:
        drive(run)
    assert kinds_of(tmp_path / "a") == ["no-movement"]
    said = capsys.readouterr().err
    assert "no weight changed in steps 1 to 4" in said
    assert ("the learning rate is 0 in all 4 steps" in said) == (kind != "gradient of 0")


@pytest.mark.parametrize(
    "optim",
    [
        {"name": "sgd", "momentum": 0.0},
        {"name": "adamw"},
        {"name": "adamw", "lr_multipliers": {"0.*": 5.0}},
        {"name": "adamw", "reference_batch": 8},
    ],
    ids=str,
)
def test_a_learning_rate_of_0_is_said_at_the_start(optim: dict[str, Any], tmp_path: Path) -> None:
    with Run(
        spec(4, optim={"lr": 0.0, **optim}), Small(), folder=tmp_path / "a", quiet=True
    ) as run:
        said = "\n".join(run.assembly.warnings)
    assert "the learning rate is 0 in all steps, so no weight changes: check optim.lr" in said
    with Run(spec(4, optim=optim), Small(), folder=tmp_path / "b", quiet=True) as run:
        assert "learning rate is 0" not in "\n".join(run.assembly.warnings)


def test_weights_that_moved_are_not_said_to_be_still(tmp_path: Path) -> None:
    for steps in (2, 4):  # and not by an attempt that goes on
        with Run(spec(4), Small(), folder=tmp_path / "a", quiet=True) as run:
            for _ in zip(range(steps), run.steps(), strict=False):
                pass
    assert kinds_of(tmp_path / "a") == []


def test_rhythms_may_be_shares_of_the_run(tmp_path: Path) -> None:
    shares = {
        "evaluate": {"every": "25 %"},
        "checkpoint": {"every": "50 %", "keep": 9},
        "schedule": {"warmup": "10 %"},
    }
    with Run(spec(8, **shares), Small(), folder=tmp_path / "a", quiet=True) as run:
        drive(run)
    found = records(tmp_path / "a")
    assert [event.step for event in found if isinstance(event, Evaluated)] == [2, 4, 6, 8]
    assert {4, 8} <= {event.step for event in found if isinstance(event, Committed)}


def test_a_share_is_no_length_of_a_run(tmp_path: Path) -> None:
    with pytest.raises(SpecError, match="a percentage of length"):
        spec(4).replace(train={"length": "50 %"})


def test_a_share_of_a_run_whose_length_is_a_time_is_a_time(tmp_path: Path) -> None:
    timed = spec(4).replace(
        train={"length": "2 s"}, evaluate={"every": "1 %"}, schedule={"name": "constant"}
    )
    with Run(timed, Small(), folder=tmp_path / "a", quiet=True) as run:
        drive(run)
    assert sum(isinstance(event, Evaluated) for event in records(tmp_path / "a")) > 1
    warm = timed.replace(schedule={"name": "constant", "warmup": "5 %"})
    with (
        pytest.raises(SpecError, match="a schedule cannot use the duration"),
        Run(warm, Small(), folder=tmp_path / "b", quiet=True),
    ):
        pass
