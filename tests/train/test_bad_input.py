"""Bad input is told in words.

Before the run with code 2 and nothing written, during it with its own code and an Ended record.
"""

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
from tests.train.small import FEW, Small, call, end_of, entries, records, spec, write_task

Said = pytest.CaptureFixture[str]


def refused(monkeypatch: pytest.MonkeyPatch, capsys: Said, tmp_path: Path, *words: str) -> str:
    """Train, see that it is refused before anything was written, and give what was said."""
    monkeypatch.chdir(tmp_path)
    before = entries(tmp_path)
    assert call(monkeypatch, "train", *words) == 2
    said = capsys.readouterr()
    assert "Traceback" not in said.err
    lines = [
        line
        for line in said.err.splitlines()
        if not (line.startswith("warning: ") and " is given 2 times (" in line)
    ]
    assert lines[0].startswith("error: ")
    assert said.out == ""
    assert entries(tmp_path) == before
    return said.err


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


# ---- the task's name and its parts, before the run

CALLS = {
    "no such file": ("elsewhere.py:Mine", "there is no task file"),
    "no such module": ("no.such.module:Mine", "No module named"),
    "no such class": ("mine.py:Mime", "has no class 'Mime'"),
    "no class named": ("mine.py:", "mine.py:"),
    "a module without a class": ("math:sqrt", "sqrt"),
    "a folder": (".", "is no spec"),
    "no such task": ("digit", "did you mean 'digits'"),
}


@pytest.mark.parametrize("what", CALLS)
def test_a_task_that_cannot_be_found_is_refused(
    what: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Said
) -> None:
    write_task(tmp_path)
    use, expected = CALLS[what]
    said = refused(monkeypatch, capsys, tmp_path, use, *FEW)
    assert expected in said


def held(tensor: str, *said: str) -> tuple[str, str, list[str]]:
    """A change that registers a buffer."""
    return "nn.ReLU()", f"[made := nn.ReLU(), made.register_buffer('b', {tensor})][0]", list(said)


NAMED = """    def model(self):
        made = self.made()
        made.register_buffer("__metadata__", torch.ones(3))
        return made

    def made(self):"""
CHANGES = {
    # what is wrong: (old text, new text, what must be said)
    "does not parse": ("STEP = 0", "STEP = = 0", ["mine.py", "is not Python"]),
    "does not import": (
        "STEP = 0",
        "import no_such_package",
        ["does not import", "no_such_package", "mine.py:"],
    ),
    "raises on import": (
        "STEP = 0",
        "STEP = 1 / 0",
        ["does not import", "ZeroDivisionError", "mine.py:"],
    ),
    "constructor exits": (
        "self.width = width",
        "exit()",
        ["cannot be built", "SystemExit", "in __init__"],
    ),
    "data exits": ("generator = ", "raise SystemExit; generator = ", ["SystemExit", "in data"]),
    "forward exits": ("# FORWARD", "exit(0)", ["SystemExit: 0", "in forward"]),
    "exits on import": ("STEP = 0", "import sys; sys.exit(0)", ["does not import", "SystemExit"]),
    "constructor raises": (
        "self.width = width",
        "raise RuntimeError('no luck')",
        ["no luck", "in __init__"],
    ),
    "no model": ("def model(", "def modell(", ["has no method model"]),
    "no data": ("def data(", "def date(", ["has no method data"]),
    "no forward": ("def forward(", "def forwards(", ["has no method forward"]),
    "no loss": ("def loss(", "def lost(", ["has no method loss"]),
    "model raises": (
        "return nn.Sequential(",
        "raise IndexError('layer 7'); return nn.Sequential(",
        ["layer 7", "in model"],
    ),
    "model is no module": (
        "return nn.Sequential(",
        "return [1]; return nn.Sequential(",
        ["list", "torch.nn.Module"],
    ),
    "data raises": (
        "generator = ",
        "raise RuntimeError('torn file'); generator = ",
        ["torn file", "in data"],
    ),
    "data raises a ValueError": (
        "generator = ",
        "raise ValueError('bad csv'); generator = ",
        ["data('t", "bad csv", "in data"],
    ),
    "data raises a KeyError": (
        "generator = ",
        "{}['label']; generator = ",
        ["data('t", "KeyError: 'label'", "in data"],
    ),
    "data knows no split": (
        "generator = ",
        "{'train': 1}[split]; generator = ",
        ["task mine has no split 'test'"],
    ),
    "data has no file": (
        "generator = ",
        "open('gone.csv'); generator = ",
        ["gone.csv", "in data", "--traceback"],
    ),
    "data lacks a package": (
        "generator = ",
        "import no_such_package; generator = ",
        ["no_such_package"],
    ),
    "data is nothing": ("return Arrays(", "return None; return Arrays(", ["NoneType", "no source"]),
    "data is empty": (
        "torch.randn(24, 4, generator=generator), torch.arange(24) % 3",
        "torch.randn(0, 4), torch.arange(0)",
        ["at least 1"],
    ),
    "data of two lengths": ("torch.arange(24)", "torch.arange(23)", ["(24, 4)", "(23,)"]),
    "forward raises": ("# FORWARD", "raise ValueError('odd batch')", ["odd batch", "in forward"]),
    "forward does not fit": (
        "nn.Linear(4, self.width)",
        "nn.Linear(5, self.width)",
        ["shapes", "in forward"],
    ),
    "loss raises": ("# LOSS", "raise KeyError('labels')", ["labels", "in loss"]),
    "loss is a mean": (
        'reduction="sum"',
        'reduction="mean"',
        ["is a mean, not a sum", 'reduction="sum"'],
    ),
    "loss is a tensor": ("return Loss.sum(", "return max(", ["is a Tensor, not a Loss"]),
    "loss is None": ("# LOSS", "return None", ["is a NoneType, not a Loss"]),
    "loss is a vector": ('reduction="sum"', 'reduction="none"', ["scalar"]),
    "loss has no gradient": ('reduction="sum")', 'reduction="sum").detach()', ["gradient"]),
    "loss has no term": ("return Loss.sum(", "return Loss(); return Loss.sum(", ["has no term"]),
    "loss counts nothing": ("len(batch[1]))", "0)", ["counts 0 items"]),
    "loss counts infinity": ("len(batch[1]))", "float('inf'))", ["count of term loss is inf"]),
    "loss counts no number": ("len(batch[1]))", "float('nan'))", ["count of term loss is nan"]),
    "model is lazy": (
        "nn.Linear(4, self.width)",
        "nn.LazyLinear(self.width)",
        ["0.weight, 0.bias", "no shape yet", "one batch"],
    ),
    "model is on no device": held(
        "torch.ones(3, device='meta')", "b is a tensor on the meta device"
    ),
    "model holds wide numbers": held(
        "torch.ones(3, dtype=torch.complex128)", "b is a tensor of torch.complex128"
    ),
    "model holds a sparse tensor": held(
        "torch.ones(3).to_sparse()", "torch.sparse_coo, which a checkpoint cannot hold"
    ),
    "model holds a name of the format": (
        "    def model(self):",
        NAMED,
        ["is called '__metadata__'"],
    ),
    "loss counts less": ("len(batch[1]))", "-3)", ["count of term loss is -3"]),
}


@pytest.mark.parametrize("what", CHANGES)
def test_a_task_that_breaks_the_contract_is_refused_before_the_run(
    what: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Said
) -> None:
    old, new, expected = CHANGES[what]
    task = write_task(tmp_path, change=(old, new))
    said = refused(monkeypatch, capsys, tmp_path, task, *FEW)
    for words in expected:
        assert words in said
    if any(words.startswith("in ") for words in expected):  # the user's own frame
        assert f"{tmp_path / 'mine.py'}:" in said


MORE = {
    "metrics raise": (
        "def metrics(self, output, batch): raise KeyError('f1')",
        ["f1", "in metrics"],
    ),
    "metrics are numbers": (
        "def metrics(self, output, batch): return {'f1': 0.5}",
        ["'f1'", "does not merge"],
    ),
    "augment raises": (
        "def augment(self, batch, keys): raise KeyError('crop')",
        ["crop", "in augment"],
    ),
    "augment is no method": ("augment = 3", ["augment is not a method"]),
    "counts raise": ("def counts(self, batch): raise KeyError('mask')", ["mask", "in counts"]),
    "counts are others": ("def counts(self, batch): return 2 * len(batch[1])", ["counts"]),
    "schedule raises": (
        "def schedule(self, step, total_steps): raise KeyError('warm')",
        ["warm", "in schedule"],
    ),
    "schedule is not a number": ("def schedule(self, step, total_steps): return 'fast'", ["fast"]),
    "schedule is not finite": (
        "def schedule(self, step, total_steps): return float('nan')",
        ["nan"],
    ),
    "groups raise": (
        "def parameter_groups(self, model): raise KeyError('head')",
        ["head", "in parameter_groups"],
    ),
    "groups leave one out": (
        "def parameter_groups(self, model): return [{'params': [model[0].weight]}]",
        ["stand in no group"],
    ),
    "optimizer raises": (
        "def optimizer(self, groups): raise KeyError('beta')",
        ["beta", "in optimizer"],
    ),
    "optimizer is none": ("def optimizer(self, groups): return None", ["NoneType"]),
    "updates raise": (
        "def updates(self, model): raise KeyError('critic')",
        ["critic", "in updates"],
    ),
    "state is of another order of bytes": (
        "def state(self): return {'a': __import__('numpy').ones(2, '>f4')}",
        ["array of >f4", "order of bytes"],
    ),
    "updates are none": ("def updates(self, model): return []", ["gave none"]),
}


@pytest.mark.parametrize("what", MORE)
def test_an_optional_part_that_does_not_work_is_refused_before_the_run(
    what: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Said
) -> None:
    part, expected = MORE[what]
    task = write_task(tmp_path, change=("    def model(", f"    {part}\n\n    def model("))
    said = refused(monkeypatch, capsys, tmp_path, task, *FEW)
    for words in expected:
        assert words in said


def test_a_loss_that_is_no_sum_is_reported_where_no_batch_is_divided(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Said
) -> None:
    task = write_task(tmp_path, change=("# LOSS", "output = output * len(output) ** 0.3"))
    assert call(monkeypatch, "train", task, *FEW, "--run", str(tmp_path / "a")) == 0
    started = records(tmp_path / "a")[0]
    assert any("is not a sum over samples" in note for note in started.notes)  # type: ignore[attr-defined]


@pytest.mark.parametrize("batch", [1, 4])
def test_a_mean_for_a_sum_is_found_whatever_the_batch(
    batch: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Said
) -> None:
    task = write_task(tmp_path, change=('reduction="sum"', 'reduction="mean"'))
    assert "is a mean, not a sum" in refused(
        monkeypatch, capsys, tmp_path, task, *FEW, "--set", f"train.batch={batch}"
    )


@pytest.mark.slow
def test_samples_that_need_a_batch_of_one_leave_the_sum_unchecked(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Said
) -> None:
    task = write_task(tmp_path, change=("# FORWARD", "assert len(batch[0]) == 1"))
    settings = (
        "--set",
        "train.batch=1",
        "--set",
        "evaluate.split=train",
        "--set",
        "evaluate.batch=1",
    )
    Path(tmp_path / "mine.py").write_text((tmp_path / "mine.py").read_text().replace("24", "1"))
    assert call(monkeypatch, "train", task, *FEW, *settings, "--run", str(tmp_path / "a")) == 0
    started = records(tmp_path / "a")[0]
    assert any("is a sum could not be checked" in note for note in started.notes)  # type: ignore[attr-defined]


NORM = ("nn.Linear(4, self.width), ", "nn.Linear(4, self.width), nn.BatchNorm1d(self.width), ")


def test_a_norm_over_the_batch_is_refused_where_a_batch_has_one_sample(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Said
) -> None:
    task = write_task(tmp_path, change=NORM)
    said = refused(monkeypatch, capsys, tmp_path, task, "--set", "train.batch=23")
    assert "1 (BatchNorm1d) cannot be trained on a batch of one sample" in said
    assert 'data.last_batch = "drop"' in said
    assert "more than one sample" in refused(
        monkeypatch, capsys, tmp_path, task, "--set", "train.batch=1"
    )


@pytest.mark.parametrize(
    "words",
    [
        ["train.batch=22"],
        ["train.batch=23", "data.last_batch=drop"],
        ["train.batch=23", "train.length=1 step"],
    ],
)
def test_a_norm_over_the_batch_is_let_be_where_no_batch_has_one_sample(
    words: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    task = write_task(tmp_path, change=NORM)
    flags = [
        word
        for each in ("train.length=3 steps", "observe.tensorboard=false", *words)
        for word in ("--set", each)
    ]
    assert call(monkeypatch, "train", task, *flags, "--run", str(tmp_path / "a")) == 0


# ---- the spec, through the command line

VALUES = {
    "not a number": ("optim.lr=nan", ["optim.lr is nan", "finite"]),
    "infinite": ("optim.lr=inf", ["optim.lr is inf", "finite"]),
    "negative": ("optim.lr=-0.1", ["optim.lr is -0.1", "greater than or equal to 0"]),
    "negative steps": ("train.length='-5 steps'", ["train.length", "-5"]),
    "no steps": ("train.length='0 steps'", ["train.length: 0 steps is nothing", "at least 1 step"]),
    "no epochs": ("train.length='0 epochs'", ["train.length: 0 epochs is nothing"]),
    "over before it begins": (
        "train.length='0.0001 s'",
        ["length = 0.0001 s is over before the first step", "1 step"],
    ),
    "evaluated every nothing": (
        "evaluate.every='0 steps'",
        ["evaluate.every: 0 steps is nothing", "at least 1 step"],
    ),
    "saved every nothing": ("checkpoint.every='0 s'", ["checkpoint.every: 0 s is nothing"]),
    "kept every nothing": (
        "checkpoint.keep_every='0 epochs'",
        ["checkpoint.keep_every: 0 epochs is nothing"],
    ),
    "told every nothing": ("observe.every='0 steps'", ["observe.every: 0 steps is nothing"]),
    "no unit": ("train.length=5", ["train.length: 5 is no duration"]),
    "an unknown unit": ("train.length='5 years'", ["train.length", "years"]),
    "not a number of steps": ("train.length='nan steps'", ["train.length", "nan"]),
    "a text for a number": ("optim.lr=fast", ["optim.lr is 'fast'", "number"]),
    "a number for a text": ("evaluate.split=3", ["evaluate.split is 3", "string"]),
    "a fraction of a batch": ("train.batch=2.5", ["train.batch is 2.5", "integer"]),
    "no batch": ("train.batch=0", ["train.batch is 0", "greater than 0"]),
    "a word for a switch": ("data.shuffle=yes", ["data.shuffle is 'yes'"]),
    "an unknown key": (
        "optim.learning_rate=1",
        ["'learning_rate' is no key in [optim]", "allowed: "],
    ),
    "an unknown table": ("optimizer.lr=1", ["'optimizer' is no table", "did you mean 'optim'"]),
    "an unknown parameter": ("task.widht=2", ["no parameter 'widht'", "did you mean 'width'"]),
    "a parameter of another type": ("task.width=wide", ["task.width is 'wide'", "int"]),
    "two ways to clip": ("optim.clip_value=1.0", ["clip", "contradict"]),
    "a microbatch that does not divide": (
        "train.microbatch=3",
        ["microbatch = 3 does not divide batch = 4", "[1, 2, 4]"],
    ),
    "a schedule longer than the run": ("schedule.warmup='100 steps'", ["schedule.warmup", "100"]),
    "an unknown score": ("evaluate.score=f1", ["evaluate.score is 'f1'"]),
    "a pattern that fits nothing": (
        "optim.freeze=['head.*']",
        ["optim.freeze", "'head.*'", "matches no parameter"],
    ),
    "all of it frozen": ("optim.freeze=['*']", ["trains no parameter"]),
    "a folder the task does not take": ("data.folder=here", ["has no parameter 'folder'"]),
    "no value": ("optim.lr", ["is not table.key=value"]),
    "no table": ("lr=0.1", ["is not table.key=value"]),
    "a device that is not here": ("train.device=tpu", ["train.device is 'tpu'"]),
    "a seed below zero": ("train.seed=-1", ["train.seed is -1"]),
}


@pytest.mark.parametrize("what", VALUES)
def test_a_spec_that_makes_no_sense_is_refused(
    what: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Said
) -> None:
    change, expected = VALUES[what]
    said = refused(
        monkeypatch,
        capsys,
        tmp_path,
        write_task(tmp_path),
        "--set",
        "train.batch=4",
        "--set",
        change,
    )
    for words in expected:
        assert words in said
    assert "hint: " in said


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (("--steps", "-5"), "-5"),
        (("--steps", "0"), "at least 1 step"),
        (("--steps", "many"), "valid integer"),
        (("--seed", "-1"), "train.seed is -1"),
        (("--data", "/no/such/folder"), "no parameter 'folder'"),
        (("--sett", "a.b=1"), "--set"),
        (("two", "three"), "three"),
    ],
)
def test_a_flag_that_makes_no_sense_is_refused(
    words: tuple[str, ...],
    expected: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: Said,
) -> None:
    task = write_task(tmp_path)
    monkeypatch.chdir(tmp_path)
    assert call(monkeypatch, "train", task, *words) == 2
    said = capsys.readouterr().err
    assert expected in said
    assert "Traceback" not in said
    assert entries(tmp_path) == ["mine.py"]


def test_a_spec_file_with_nothing_right_names_file_and_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Said
) -> None:
    write_task(tmp_path)
    (tmp_path / "mine.toml").write_text(
        '[task]\nuse = "mine.py:Mine"\n\n[optim]\nname = "adamw"\nlr = nan\n'
    )
    said = refused(monkeypatch, capsys, tmp_path, str(tmp_path / "mine.toml"))
    assert "mine.toml:6: optim.lr is nan" in said


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
        ["step 7", "the count of term loss is -4"],
    ),
    "loss counts no number": (
        "# LOSS",
        "if STEP == 7: return Loss.sum(output.sum(), float('nan'))",
        3,
        ["step 7", "loss is nan"],
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
    assert "forward gave a Tensor without a row for each sample" in capsys.readouterr().err


# ---- numbers


def test_a_loss_that_is_not_a_number_at_step_1_ends_the_run_with_the_cause(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Said
) -> None:
    task = write_task(tmp_path, change=("# LOSS", "output = output * float('nan')"))
    said, end = failed(monkeypatch, capsys, tmp_path, 4, task)
    assert "the loss is nan" in said
    assert "before any update was applied" in said
    assert end.step == 1
    assert manifest.steps(tmp_path / "a") == []


class Network(Small):
    """One of several kinds of network, each of which a giant rate breaks in another way."""

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
        if self.kind == "normalised":
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
@pytest.mark.parametrize("kind", ["plain", "normalised", "convolutions", "bounded"])
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
