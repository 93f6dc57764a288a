"""Modules that a run imports after its start, and the git commit, belong to its program too."""

from __future__ import annotations

import importlib
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

import surefoot
from surefoot.contract.events import Committed, Started
from surefoot.core.errors import RunFolderError
from surefoot.train.resume.program import Program
from surefoot.train.run import Run
from tests.train.small import FEW, Small, call, records, spec, write_task

CODE = "SCALE = 1.0\n"
LATE = {
    "in the loop": "scores_late",
    "a module of a package": "lately.deep.scores",
    "a package": "lately",
}
FORWARD = (
    "        # FORWARD\n",
    "        if STEP == 3: raise ValueError('not now')\n        # FORWARD\n",
)


@pytest.fixture(autouse=True)
def clean(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    yield
    forget()


def forget() -> None:
    """The late modules are imported anew, as by a fresh process."""
    for name in [name for name in sys.modules if name.split(".")[0] in ("scores_late", "lately")]:
        del sys.modules[name]
    importlib.invalidate_caches()


def write_module(folder: Path, where: str) -> Path:
    """The file of a module, in a package of the namespace or with its own `__init__`."""
    path = folder.joinpath(*LATE[where].split("."))
    path = path / "__init__.py" if where == "a package" else path.with_name(f"{path.name}.py")
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(CODE)
    return path


def train(folder: Path, steps: int, module: str | None = None, *, accept: bool = False) -> None:
    """Train some steps, import the module after the first of them, and stop as if killed."""
    asked = spec(12, checkpoint={"every": "1 steps"})
    with Run(asked, Small(), folder=folder, quiet=True, accept_code_change=accept) as run:
        for number, _ in enumerate(run.steps()):
            if number == 0 and module is not None:
                importlib.import_module(module)
            if number == steps - 1:
                break
    forget()


@pytest.mark.parametrize("where", LATE)
def test_a_late_module_that_changes_is_refused_by_name_unless_it_is_accepted(
    where: str, tmp_path: Path
) -> None:
    path = write_module(tmp_path, where)
    train(tmp_path / "a", 3, LATE[where])
    path.write_text(CODE.replace("1.0", "3.0"))
    told = f"the code has changed since .*: {path.relative_to(tmp_path)}"
    with pytest.raises(RunFolderError, match=told) as caught:
        train(tmp_path / "a", 1)
    assert "--accept-code-change" in (caught.value.hint or "")
    train(tmp_path / "a", 2, accept=True)
    train(tmp_path / "a", 2)  # the accepted file is the one to compare with


@pytest.mark.parametrize("what", ["unchanged", "deleted", "another file"])
def test_a_run_with_late_modules_resumes_twice(what: str, tmp_path: Path) -> None:
    path = write_module(tmp_path, "in the loop")
    train(tmp_path / "a", 3, LATE["in the loop"])
    if what == "deleted":
        path.unlink()
    elif what == "another file":
        (tmp_path / "other.py").write_text(CODE)
    train(tmp_path / "a", 2)
    train(tmp_path / "a", 2)
    found = [each.late_modules for each in records(tmp_path / "a") if isinstance(each, Committed)]
    assert [list(each) for each in found if each] == [["scores_late"]]


@pytest.mark.parametrize("name", ["../scores_late", "", ".", "a..b", "/etc/passwd", "a\0b"])
def test_a_name_in_a_log_that_is_no_module_is_not_looked_up(name: str, tmp_path: Path) -> None:
    write_module(tmp_path, "in the loop")
    program = Program("a" * 64, tmp_path / "mine.py")
    assert program._find_late([name, "scores_late"]).keys() == {"scores_late"}


def test_an_attempt_that_does_not_import_the_module_does_not_forget_it(tmp_path: Path) -> None:
    path = write_module(tmp_path, "in the loop")
    train(tmp_path / "a", 3, LATE["in the loop"])
    train(tmp_path / "a", 2)
    path.write_text(CODE + "x = 1\n")
    with pytest.raises(RunFolderError, match=r"scores_late\.py"):
        train(tmp_path / "a", 1)


def test_attach_names_a_late_module_that_changed(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = write_module(tmp_path, "in the loop")

    def loop() -> str:
        model = torch.nn.Linear(1, 1)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        with surefoot.attach(
            model=model, optimizer=optimizer, data=list(torch.ones(4, 1)), folder="run"
        ) as run:
            for batch in run.batches():
                loss = model(batch).square().mean()
                loss.backward()
                optimizer.step()
                run.step_done(loss)
                importlib.import_module("scores_late")
        forget()
        return capsys.readouterr().err

    loop()
    assert "scores_late" not in loop()
    path.write_text(CODE + "x = 1\n")
    assert "the code differs from that of the previous attempt: scores_late.py" in loop()
    assert "scores_late" not in loop()


@pytest.mark.parametrize("what", ["a new commit", "a modified file", "a new file", "no change"])
def test_a_changed_commit_is_noted_and_the_run_resumes(
    what: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def git(*words: str) -> str:
        name = ("-c", "user.name=n", "-c", "user.email=e")
        told = subprocess.run(
            ["git", "-C", str(tmp_path), *name, *words], check=True, capture_output=True, text=True
        )
        return told.stdout.strip()

    task = write_task(tmp_path, change=FORWARD, name="mine.py")
    (tmp_path / "README").write_text("a\n")
    git("init", "-q")
    git("add", "README", "mine.py")
    git("commit", "-qm", "one")
    first = git("rev-parse", "HEAD")[:12]
    words = ("train", task, *FEW, "--run", "a")
    assert call(monkeypatch, *words) == 3
    if what == "a new file":
        (tmp_path / "new").write_text("")
    elif what != "no change":
        (tmp_path / "README").write_text("b\n")
    if what == "a new commit":
        git("commit", "-qam", "two")
    assert call(monkeypatch, *words) == 3
    starts = [each for each in records(tmp_path / "a") if isinstance(each, Started)]
    noted = [each for each in starts[1].notes if "git commit" in each]
    assert noted == {
        "a new commit": [
            f"the git commit of the code is {git('rev-parse', 'HEAD')[:12]}, was {first}"
        ],
        "a modified file": [
            f"the git commit of the code is {first} with modified files, was {first}"
        ],
    }.get(what, [])
