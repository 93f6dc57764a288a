"""Input that goes wrong during a run ends it with its own code and an Ended record."""

from __future__ import annotations

import runpy
from pathlib import Path

import pytest
from torch import nn

from surefoot.contract import manifest
from surefoot.contract.events import Ended, Step
from surefoot.core.errors import (
    BadRecordError,
    DataError,
    NumbersError,
    StorageError,
    SurefootError,
    TaskError,
    UserCodeError,
)
from surefoot.core.process import frames
from surefoot.train.failure import blame
from surefoot.train.run import Run
from tests.train.small import FEW, Small, call, end_of, records, spec, write_task
from tests.train.test_bad_input import Said


def failed(
    monkeypatch: pytest.MonkeyPatch, capsys: Said, tmp_path: Path, code: int, task: str, *words: str
) -> tuple[str, Ended]:
    """Train, see that it ends with `code` and that the record of its end holds the cause.

    Gives what was said and the record.
    """
    assert call(monkeypatch, "train", task, *FEW, "--run", str(tmp_path / "a"), *words) == code
    said, end = capsys.readouterr().err, end_of(tmp_path / "a")
    assert "Traceback" not in said
    assert (end.outcome, end.exit_code) == ("failed", code)
    assert end.cause.splitlines()[0] in said
    return said, end


# ---- during the run

AT_STEP_7 = {
    "forward raises": (
        "# FORWARD",
        "if STEP == 7: raise ValueError('odd batch')",
        3,
        ["step 7: ValueError: odd batch", "in forward"],
    ),
    "loss raises": (
        "# LOSS",
        "if STEP == 7: raise IndexError('label 11')",
        3,
        ["step 7: IndexError: label 11", "in loss"],
    ),
    "loss is None": ("# LOSS", "if STEP == 7: return None", 3, ["step 7", "NoneType"]),
    "loss has no gradient": (
        "# LOSS",
        "output = output.detach() if STEP == 7 else output",
        3,
        ["step 7", "grad"],
    ),
    "a file is gone": (
        "# FORWARD",
        "if STEP == 7: open('/no/such/shard')",
        6,
        ["step 7", "/no/such/shard", "in forward"],
    ),
    "out of memory": (
        "# FORWARD",
        "if STEP == 7: raise MemoryError('the cache is full')",
        7,
        [
            "step 7: out of memory in the forward pass",
            "MemoryError: the cache is full",
            "in forward",
        ],
    ),
    "an exit": (
        "# FORWARD",
        "if STEP == 7: raise SystemExit(5)",
        3,
        ["step 7: SystemExit: 5", "in forward"],
    ),
    "an exit that says all is well": (
        "# LOSS",
        "if STEP == 7: import sys; sys.exit(0)",
        3,
        ["step 7: SystemExit: 0", "in loss"],
    ),
    "loss counts below nothing": (
        "# LOSS",
        "if STEP == 7: return Loss.sum(output.sum(), -4)",
        3,
        ["step 7", "the loss term 'loss' must be finite and at least 0; got -4"],
    ),
    "loss counts no number": (
        "# LOSS",
        "if STEP == 7: return Loss.sum(output.sum(), float('nan'))",
        3,
        ["step 7", "must be finite and at least 0; got nan"],
    ),
}


@pytest.mark.parametrize("what", AT_STEP_7)
def test_what_goes_wrong_at_step_7_ends_the_run_with_the_users_own_frame(
    what: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Said
) -> None:
    old, new, code, expected = AT_STEP_7[what]
    task = write_task(tmp_path, change=(old, new))
    said, end = failed(monkeypatch, capsys, tmp_path, code, task)
    for words in expected:
        assert words in said
        assert words in end.cause
    if any(words.startswith("in ") for words in expected):
        line = next(
            number
            for number, text in enumerate((tmp_path / "mine.py").read_text().splitlines(), 1)
            if new in text
        )
        assert f"{tmp_path / 'mine.py'}:{line}, in " in said
    assert end.step == 6
    assert [event.step for event in records(tmp_path / "a") if isinstance(event, Step)][-1] == 6


def test_traceback_shows_where_it_was_raised(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Said
) -> None:
    task = write_task(tmp_path, change=("# FORWARD", "if STEP == 7: raise ValueError('odd batch')"))
    assert call(monkeypatch, "train", task, *FEW, "--run", str(tmp_path / "a"), "--traceback") == 3
    said = capsys.readouterr().err
    assert "Traceback" in said
    assert "in forward" in said
    assert "error: step 7: ValueError: odd batch" in said


def test_what_is_input_before_the_run_is_an_error_of_the_run_during_it() -> None:
    for error, kind, code in (
        (DataError("the shard ended"), BadRecordError, 6),
        (TaskError("two terms of one name"), UserCodeError, 3),
        (SurefootError("odd"), SurefootError, 70),
        (StorageError("full"), StorageError, 5),
        (OSError(5, "I/O error"), BadRecordError, 6),
    ):
        made = blame.as_run_error(error, "step 7:")
        assert type(made) is kind
        assert made.exit_code == code
        assert made.message.startswith("step 7: ")


@pytest.mark.parametrize("folder", ["surefoot_experiments", "surefoot-2"])
def test_a_task_whose_folder_begins_like_ours_is_the_users(
    folder: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(frames, "PACKAGE", str(tmp_path / "surefoot"))
    (tmp_path / folder).mkdir()
    path = tmp_path / folder / "mine.py"
    path.write_text("def loss():\n    raise ValueError('odd')\n")
    space = runpy.run_path(str(path))
    with pytest.raises(ValueError, match="odd") as caught:
        space["loss"]()
    frame = frames.find_user_frame(caught.value)
    assert frame is not None
    assert (frame.filename, frame.name) == (str(path), "loss")


@pytest.mark.parametrize("verb", ["evaluate", "predict"])
def test_a_task_that_exits_is_no_success_of_a_verb_that_looks_back(
    verb: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Said
) -> None:
    task = write_task(tmp_path)
    assert call(monkeypatch, "train", task, *FEW, "--run", str(tmp_path / "a"), "--quiet") == 0
    write_task(tmp_path, change=("# FORWARD", "raise SystemExit(0)"))
    capsys.readouterr()
    assert call(monkeypatch, verb, str(tmp_path / "a")) == 3
    assert "the task ended the process: SystemExit: 0 (" in capsys.readouterr().err


def test_predict_refuses_one_number_for_a_whole_batch(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Said
) -> None:
    task = write_task(tmp_path)
    assert call(monkeypatch, "train", task, *FEW, "--run", str(tmp_path / "a"), "--quiet") == 0
    write_task(tmp_path, change=("# FORWARD", "return model(batch[0]).mean()"))
    capsys.readouterr()
    assert call(monkeypatch, "predict", str(tmp_path / "a")) == 2
    assert "forward returned a Tensor without a row for each sample" in capsys.readouterr().err


# ---- numbers


def test_a_loss_that_is_never_a_number_ends_the_run_with_the_cause(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Said
) -> None:
    task = write_task(tmp_path, change=("# LOSS", "output = output * float('nan')"))
    said, end = failed(monkeypatch, capsys, tmp_path, 4, task)
    assert "the loss is nan" in said
    assert "5 steps in a row, before any update was applied" in said
    assert end.step == 5
    assert manifest.steps(tmp_path / "a") == []


class Network(Small):
    """One of several kinds of network, each of which a giant rate breaks in a different way."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind = kind

    def model(self) -> nn.Module:
        if self.kind == "convolutions":
            return nn.Sequential(
                nn.Unflatten(1, (1, 2, 2)),
                nn.Conv2d(1, 4, 3, padding=1),
                nn.BatchNorm2d(4),
                nn.ReLU(),
                nn.Flatten(),
                nn.Linear(16, 3),
            )
        if self.kind == "normalized":
            return nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 3))
        if self.kind == "bounded":
            return nn.Sequential(
                nn.Linear(4, 8),
                nn.Tanh(),
                nn.Linear(8, 3),
                nn.LayerNorm(3, elementwise_affine=False),
            )
        return nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 3))


@pytest.mark.parametrize("optimizer", ["adamw", "sgd", "muon"])
@pytest.mark.parametrize("kind", ["plain", "normalized", "convolutions", "bounded"])
@pytest.mark.parametrize("clip", [0.0, 1.0])
def test_a_learning_rate_of_a_billion_ends_with_the_cause_within_few_steps(
    kind: str, optimizer: str, clip: float, tmp_path: Path
) -> None:
    how = spec(500, optim={"name": optimizer, "lr": 1e9, "clip": clip})
    with (
        pytest.raises(NumbersError) as caught,
        Run(how, Network(kind), folder=tmp_path / "a", quiet=True) as run,
    ):
        for _ in run.steps():
            pass
    end = end_of(tmp_path / "a")
    assert end.cause == caught.value.message
    assert (end.outcome, end.exit_code) == ("failed", 4)
    assert end.step <= 30
    assert caught.value.hint is not None
    assert "optim.lr" in caught.value.hint
    assert manifest.steps(tmp_path / "a") == []
