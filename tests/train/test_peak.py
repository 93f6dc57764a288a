"""A run that says what a step will hold, and how far off that was."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from surefoot.cli.look import past, story
from surefoot.contract.events import Memory
from surefoot.contract.spec import RunSpec
from surefoot.prove.memory import predict
from surefoot.train.record import peak
from surefoot.train.run import Run, drive
from tests.train.small import Small, records, spec

MAX_ERROR = 0.03


def test_by_step_3_the_predicted_peak_stands_beside_the_measured_one_and_no_number_moves(
    tmp_path: Path,
) -> None:
    stated = RunSpec(
        task={"use": "digits"},
        train={"length": "4 steps", "threads": 1, "device": "cpu"},
        observe={"tensorboard": False},
    )
    digests = {}
    for name, memory in (("plain", {}), ("told", {"predict": True})):
        with Run(stated.replace(memory=memory), folder=tmp_path / name, quiet=True) as run:
            np.random.rand(3)  # noqa: NPY002 - the stream is no longer where the seed puts it
            drive(run)
            digests[name] = run.state_digests()
    assert digests["plain"] == digests["told"]
    (told,) = [event for event in records(tmp_path / "told") if isinstance(event, Memory)]
    assert told.step == 3
    assert told.predicted_bytes == predict(stated).peak_bytes
    assert told.error is not None
    assert abs(told.error) <= MAX_ERROR
    assert (
        json.loads((tmp_path / "told" / peak.FILE).read_text())["peak_bytes"]
        == told.predicted_bytes
    )
    found = past.read(tmp_path / "told")
    assert story.as_row(found)["memory"] == {
        "step": 3,
        "predicted_bytes": told.predicted_bytes,
        "measured_bytes": told.measured_bytes,
        "error": told.error,
    }
    assert "in step 3, predicted 10.9 MiB: error" in dict(story.describe_end(found))["step memory"]


def test_what_cannot_be_predicted_is_said_and_measured_all_the_same(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    class Numbers(Small):
        def loss(self, output: object, batch: object) -> object:
            assert output.sum().item() < 1e6  # type: ignore[attr-defined]
            return super().loss(output, batch)  # type: ignore[arg-type]

    with Run(spec(3, memory={"predict": True}), Numbers(), folder=tmp_path / "run") as run:
        drive(run)
    assert (
        "the peak memory of a step is not predicted: the memory of this task cannot be predicted"
        in capsys.readouterr().err
    )
    (told,) = [event for event in records(tmp_path / "run") if isinstance(event, Memory)]
    assert (told.predicted_bytes, told.error) == (None, None)
    assert told.measured_bytes
    assert not (tmp_path / "run" / peak.FILE).exists()
