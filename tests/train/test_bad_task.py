"""A task that cannot be found or breaks the contract is refused with code 2 before the run."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.train.small import FEW, call, records, write_task
from tests.train.test_bad_input import Said, refused

# ---- the task's name and its parts, before the run

CALLS = {
    "no such file": ("elsewhere.py:Mine", "there is no task file"),
    "no such module": ("no.such.module:Mine", "No module named"),
    "no such class": ("mine.py:Mime", "has no class 'Mime'"),
    "no class named": ("mine.py:", "mine.py:"),
    "a module without a class": ("math:sqrt", "sqrt"),
    "a folder": (".", "is not a spec"),
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
        "{'test': 1}[split]; generator = ",
        ["task mine has no split 'train'", 'the training data from its data("train")'],
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
    "data is nothing": (
        "return Arrays(",
        "return None; return Arrays(",
        ["NoneType", "not a source"],
    ),
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
    "loss is a tensor": ("return Loss.sum(", "return max(", ["must be a Loss; got a Tensor"]),
    "loss is None": ("# LOSS", "return None", ["is None, and the task has no metrics"]),
    "loss is a vector": ('reduction="sum"', 'reduction="none"', ["scalar"]),
    "loss has no gradient": ('reduction="sum")', 'reduction="sum").detach()', ["gradient"]),
    "loss has no term": ("return Loss.sum(", "return Loss(); return Loss.sum(", ["has no term"]),
    "loss counts nothing": ("len(batch[1]))", "0)", ["returned the count 0"]),
    "loss counts infinity": (
        "len(batch[1]))",
        "float('inf'))",
        ["the loss term 'loss' must be finite", "got inf"],
    ),
    "loss counts no number": (
        "len(batch[1]))",
        "float('nan'))",
        ["the loss term 'loss' must be finite", "got nan"],
    ),
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
        "torch.ones(3).to_sparse()", "torch.sparse_coo, which a checkpoint cannot store"
    ),
    "model holds a name of the format": (
        "    def model(self):",
        NAMED,
        ["has the name '__metadata__'"],
    ),
    "loss counts less": (
        "len(batch[1]))",
        "-3)",
        ["the loss term 'loss' must be finite", "got -3"],
    ),
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
        ["are in no group"],
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
    "state is of a different order of bytes": (
        "def state(self): return {'a': __import__('numpy').ones(2, '>f4')}",
        ["array of >f4", "byte order"],
    ),
    "updates are none": ("def updates(self, model): return []", ["returned no Update"]),
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
    assert "set train.microbatch or train.batch above 1" in refused(
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
