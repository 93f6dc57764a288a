"""A run is resumed by the program that began it.

The task's file, the modules that it imports, the versions, the git commit.
"""

from __future__ import annotations

import hashlib
import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest
import torch

import surefoot
from surefoot.contract.events import Started
from surefoot.train.resume.program import Program, find_commit
from surefoot.train.run import Run
from tests.train.small import FEW, Small, call, records, spec, write_task

FORWARD = (
    "        # FORWARD\n",
    "        if STEP == 3: raise ValueError('not now')\n        # FORWARD\n",
)
NET = "SCALE = 1.0\n"
PATH_AND_IMPORT = """
import pathlib, sys
sys.path.append(str(pathlib.Path(__file__).parent / "venv" / "site-packages"))
import bought
"""
PROJECTS = {
    "a file beside the task": (
        "mine.py",
        "net.py",
        ("import torch\n", "import torch\nimport net\n"),
    ),
    "a module of a package": (
        "mine.py",
        "nets/deep/sizes.py",
        ("import torch\n", "import torch\nfrom nets.deep import sizes\n"),
    ),
    "imported by the loss alone": (
        "mine.py",
        "late.py",
        ("        # LOSS\n", "        import late\n"),
    ),
    "imported by its name": (
        "mine.py",
        "dyn.py",
        ("import torch\n", "import torch, importlib\nimportlib.import_module('dyn')\n"),
    ),
    "a file of the project, above the task's folder": (
        "tasks/mine.py",
        "shared_parts.py",
        (
            "import torch\n",
            (
                "import torch, sys, pathlib\n"
                "sys.path.append(str(pathlib.Path(__file__).parents[1]))\n"
                "import shared_parts\n"
            ),
        ),
    ),
}


def write_project(folder: Path, where: str) -> tuple[str, Path]:
    """A task that fails at step 3, with the module that it imports.

    Gives the task's name and the module's file.
    """
    task_file, module_file, change = PROJECTS[where]
    module = folder / module_file
    module.parent.mkdir(parents=True, exist_ok=True)
    (folder / task_file).parent.mkdir(exist_ok=True)
    module.write_text(NET)
    (folder / "pyproject.toml").write_text("")
    task = write_task(folder, change=FORWARD, name=task_file)
    path = Path(task.rpartition(":")[0])
    path.write_text(path.read_text().replace(*change, 1))
    return task, module


@pytest.fixture(autouse=True)
def clean(tmp_path: Path) -> Iterator[None]:
    yield
    forget(tmp_path)


def forget(folder: Path) -> None:
    """The modules below `folder` are imported anew, as by a fresh process."""
    for name, module in list(sys.modules.items()):
        if str(getattr(module, "__file__", None) or "").startswith(str(folder)) or name in (
            "nets",
            "nets.deep",
        ):
            del sys.modules[name]


@pytest.mark.parametrize("where", PROJECTS)
def test_a_module_that_changes_between_two_attempts_is_refused_by_name_unless_it_is_accepted(
    where: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    task, module = write_project(tmp_path, where)
    words = ("train", task, *FEW, "--run", "a")
    assert call(monkeypatch, *words) == 3
    module.write_text(NET.replace("1.0", "3.0"))
    forget(tmp_path)
    capsys.readouterr()
    assert call(monkeypatch, *words) == 2
    told = capsys.readouterr().err
    assert f"the code has changed since a was started: {module.relative_to(tmp_path)}\n" in told
    assert "--accept-code-change" in told
    forget(tmp_path)
    assert call(monkeypatch, *words, "--accept-code-change") == 3
    assert (
        f"the code differs from that of the previous attempt: {module.relative_to(tmp_path)}"
        in capsys.readouterr().err
    )


@pytest.mark.parametrize(
    "what",
    [
        "a file that is not imported",
        "an installed package",
        "a log without modules",
        "a moved project",
    ],
)
def test_what_is_the_same_program_is_resumed(
    what: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    project = tmp_path / "project"
    project.mkdir()
    monkeypatch.chdir(project)
    task, module = write_project(project, "a file beside the task")
    installed = project / "venv" / "site-packages" / "bought.py"
    installed.parent.mkdir(parents=True)
    installed.write_text(NET)
    (project / "net.py").write_text(PATH_AND_IMPORT)
    words = ["train", task, *FEW, "--run", str(tmp_path / "a")]
    assert call(monkeypatch, *words) == 3
    if what == "a file that is not imported":
        (project / "other.py").write_text("x = 1\n")
    elif what == "an installed package":
        installed.write_text(NET + "x = 1\n")
    elif what == "a log without modules":
        log = tmp_path / "a" / "events.jsonl"
        rows = [json.loads(line) for line in log.read_text().splitlines()]
        assert rows[0].pop("modules").keys() == {"net"}
        log.write_text("".join(f"{json.dumps(row)}\n" for row in rows))
        module.write_text((project / "net.py").read_text() + "x = 1\n")
    else:
        project.rename(tmp_path / "moved")
        monkeypatch.chdir(tmp_path / "moved")
        words[1] = f"{tmp_path / 'moved' / 'mine.py'}:Mine"
        (tmp_path / "moved" / "mine.py").touch()
    forget(tmp_path)
    # its own fault at step 3: it was resumed
    assert call(monkeypatch, *words) == 3, capsys.readouterr().err
    assert len([each for each in records(tmp_path / "a") if isinstance(each, Started)]) == 2


def test_attach_names_the_modules_that_changed_and_resumes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    (tmp_path / "looped.py").write_text(NET)

    def loop() -> None:
        __import__("looped")
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
                break

    loop()
    (tmp_path / "looped.py").write_text(NET + "x = 1\n")
    forget(tmp_path)
    loop()
    assert "looped.py" in capsys.readouterr().err
    newest = [each for each in records(tmp_path / "run") if isinstance(each, Started)][-1]
    assert "the code differs from that of the previous attempt: looped.py" in newest.notes


@pytest.mark.parametrize("name", ["python", "torch", "numpy", "surefoot"])
def test_another_version_than_before_is_noted_and_the_run_resumes(
    name: str, tmp_path: Path
) -> None:
    with Run(spec(8), Small(), folder=tmp_path / "a", quiet=True) as run:
        next(run.steps())
    log = tmp_path / "a" / "events.jsonl"
    rows = [json.loads(line) for line in log.read_text().splitlines()]
    rows[0]["versions"][name] = "0.0.1"
    log.write_text("".join(f"{json.dumps(row)}\n" for row in rows[:-1]))  # as if it had been killed
    with Run(spec(8), Small(), folder=tmp_path / "a", quiet=True) as run:
        next(run.steps())
    newest = [each for each in records(tmp_path / "a") if isinstance(each, Started)][-1]
    assert newest.generation == 2
    assert (
        f"{name} is version {newest.versions[name]}, was 0.0.1: results may differ in the last bits"
        in newest.notes
    )


@pytest.mark.parametrize("where", ["a clone", "a worktree", "packed references", "a folder inside"])
def test_the_commit_is_found_and_whether_tracked_files_differ_from_it(
    where: str, tmp_path: Path
) -> None:
    def git(*words: str) -> str:
        told = subprocess.run(
            ["git", "-C", str(tmp_path / "p"), *words], check=True, capture_output=True, text=True
        )
        return told.stdout.strip()

    (tmp_path / "p" / "inside").mkdir(parents=True)
    (tmp_path / "p" / "inside" / "net.py").write_text(NET)
    assert find_commit(tmp_path / "p") == (None, None)
    git("init", "-q")
    git("add", ".")
    git("-c", "user.name=n", "-c", "user.email=e", "commit", "-qm", "one")
    folder = tmp_path / "p" / ("inside" if where == "a folder inside" else "")
    if where == "packed references":
        git("pack-refs", "--all")
    elif where == "a worktree":
        git("worktree", "add", "-q", str(tmp_path / "w"))
        folder = tmp_path / "w"
    commit = git("rev-parse", "HEAD")
    (folder / "new.txt").write_text("untracked, as runs are")
    assert find_commit(folder) == (commit, False)
    (folder / ("net.py" if where == "a folder inside" else "inside/net.py")).write_text(
        NET + "x = 1\n"
    )
    assert find_commit(folder) == (commit, True)
    if where in ("a clone", "a folder inside"):
        assert find_commit(folder, asks_git=False) == (commit, None)


TAKEN = {
    "of an installed package": pytest,
    "of torch": torch.nn,
    "of the standard library": subprocess,
    "of surefoot": surefoot,
}


@pytest.mark.parametrize("whose", TAKEN)
def test_a_module_that_takes_the_name_of_one_of_no_project_is_recorded(
    whose: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "net.py").write_text(NET)
    program, name = Program("a" * 64, tmp_path / "mine.py"), TAKEN[whose].__name__
    assert name not in program.modules()  # and what is found once is not looked at again
    mine = ModuleType(name)
    mine.__file__ = str(tmp_path / "net.py")
    monkeypatch.setitem(sys.modules, name, mine)
    found = program.modules()
    assert found[name] == hashlib.sha256(NET.encode()).hexdigest()
    monkeypatch.setitem(sys.modules, name, TAKEN[whose])
    assert program.modules() == {each: found[each] for each in found if each != name}
