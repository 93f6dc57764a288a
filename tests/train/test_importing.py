"""Importing a task never runs a script.

What runs already is used, and a run that an import would start is refused.
"""

from __future__ import annotations

import os
import subprocess
import sys
from multiprocessing import resource_tracker
from pathlib import Path

import pytest

from surefoot.contract.signature import find_unguarded_run
from tests.prove.forked import programs_are_forked
from tests.train.small import TEXT, call

__all__ = ["programs_are_forked"]

HEAD = (
    "import pathlib\npathlib.Path('executions').open('a').write('x')\n"
    "import surefoot\nfrom surefoot import Run, RunSpec\n" + TEXT
)
SPEC = "SPEC = RunSpec(train={'length': '2 steps', 'batch': 4}, observe={'tensorboard': False})\n"
TRAIN = """with Run(SPEC, Mine(), folder='r', quiet=True) as run:
    for _ in run.steps():
        pass
"""
FUNCTION = "def go():\n    " + TRAIN.replace("\n", "\n    ").rstrip() + "\n"

STARTS = {
    "a with statement": TRAIN,
    "a function that is called": f"{FUNCTION}go()\n",
    "a function that a function calls": (
        f"{FUNCTION}def main():\n    return go()\nexit_code = main()\n"
    ),
    "a loop over seeds": (
        "for seed in range(2):\n    with Run(SPEC, Mine()) as run:\n        pass\n"
    ),
    "a try statement": (
        "try:\n    with Run(SPEC, Mine()) as run:\n        pass\nfinally:\n    print('done')\n"
    ),
    "another name": "from surefoot import Run as R\nwith R(SPEC) as run:\n    pass\n",
    "the package under another name": (
        "import surefoot as sf\nwith sf.Run(SPEC) as run:\n    pass\n"
    ),
    "attach": "run = surefoot.attach(model=model, optimizer=optimizer, data=data)\n",
    "after a guard of something else": f"if 1 > 2:\n    print('odd')\n{TRAIN}",
}
STARTS_NOTHING = {
    "a guard": f"if __name__ == '__main__':\n    {TRAIN.replace(chr(10), chr(10) + '    ')}\n",
    "a function that is called under the guard": (
        f"{FUNCTION}if __name__ == '__main__':\n    go()\n"
    ),
    "a condition": f"import sys\nif 'fit' in sys.argv:\n    go()\n{FUNCTION}",
    "an end before": f"import sys\nif __name__ != '__main__':\n    sys.exit()\n{TRAIN}",
    "a method": (
        "class Other:\n    def go(self):\n        with Run(SPEC) as run:\n            pass\n"
    ),
    "another Run": "def Run(*given):\n    return open('x')\nwith Run() as run:\n    pass\n",
}


def write(folder: Path, text: str, name: str = "s.py") -> Path:
    path = folder / name
    path.write_text(f"{HEAD}{SPEC}{text}")
    return path


def python(folder: Path, *words: str) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    return subprocess.run(
        [sys.executable, *words],
        cwd=folder,
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )


def times(folder: Path) -> int:
    """How often the script was executed."""
    return len((folder / "executions").read_text())


@pytest.mark.parametrize("how", STARTS)
def test_a_script_that_starts_a_run_when_it_is_imported_is_found_by_its_text(
    how: str, tmp_path: Path
) -> None:
    assert find_unguarded_run(write(tmp_path, STARTS[how])) is not None


@pytest.mark.parametrize("how", STARTS_NOTHING)
def test_a_script_that_may_be_imported_is_not_refused_by_its_text(how: str, tmp_path: Path) -> None:
    assert find_unguarded_run(write(tmp_path, STARTS_NOTHING[how])) is None


@pytest.mark.usefixtures("programs_are_forked")
def test_a_command_refuses_an_unguarded_script_before_anything_of_it_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    write(tmp_path, f"import shutil\nshutil.rmtree('r', ignore_errors=True)\n{TRAIN}")
    assert python(tmp_path, "s.py").returncode == 0
    for words in (("evaluate", "r"), ("predict", "r"), ("train", "s.py:Mine", "--run", "new")):
        assert call(monkeypatch, *words) == 2
        told = capsys.readouterr().err
        assert "s.py:" in told
        assert 'if __name__ == "__main__":' in told
    assert times(tmp_path) == 1
    assert (tmp_path / "r" / "spec.toml").is_file()
    assert not (tmp_path / "new").exists()


@pytest.mark.parametrize(
    "start",
    [
        f"if 2 > 1:\n    {TRAIN.replace(chr(10), chr(10) + '    ')}\n",
        "run = Run(SPEC, Mine(), folder='new', quiet=True)\nwith run:\n    pass\n",
        (
            "import contextlib\nstack = contextlib.ExitStack()\n"
            "stack.enter_context(Run(SPEC, Mine(), folder='new', quiet=True))\n"
        ),
        "import helper\nhelper.go(Run, SPEC, Mine())\n",
    ],
    ids=["under a condition", "entered later", "entered by a stack", "in another module"],
)
def test_a_run_that_only_the_import_shows_is_refused_when_it_starts(
    start: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "helper.py").write_text(
        "def go(Run, *given):\n    with Run(*given, folder='new', quiet=True):\n        pass\n"
    )
    write(tmp_path, start)
    assert call(monkeypatch, "train", "s.py:Mine", "--run", "other") == 2
    assert 'if __name__ == "__main__":' in capsys.readouterr().err
    assert not [path.name for path in tmp_path.iterdir() if path.name in ("new", "r", "other")]


def test_a_script_takes_back_its_own_run_with_the_class_that_it_holds_and_runs_once(
    tmp_path: Path,
) -> None:
    after = """
from pathlib import Path
from surefoot.train.look_back import evaluate_run, load_with_task
import surefoot
surefoot.load('r')
evaluate_run(Path('r'), 'last', None, None)
assert type(load_with_task(Path('r'), 'last')[1].task) is Mine
with Run(surefoot.read_spec('r/spec.toml').spec, folder='again', quiet=True) as run:
    assert type(run.task.task) is Mine
"""
    write(tmp_path, TRAIN + after)
    ended = python(tmp_path, "s.py")
    assert ended.returncode == 0, ended.stderr
    assert times(tmp_path) == 1


@pytest.mark.usefixtures("programs_are_forked")
def test_a_module_that_python_runs_by_its_name_is_used_too(tmp_path: Path) -> None:
    (tmp_path / "pkg").mkdir()
    (tmp_path / "pkg" / "__init__.py").touch()
    write(tmp_path, TRAIN + "surefoot.load('r')\n", "pkg/s.py")
    ended = python(tmp_path, "-m", "pkg.s")
    assert ended.returncode == 0, ended.stderr
    assert times(tmp_path) == 1


@pytest.mark.usefixtures("programs_are_forked")
def test_a_script_that_loads_its_own_run_at_its_top_is_imported_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    guarded = STARTS_NOTHING["a guard"]
    write(tmp_path, guarded)
    assert python(tmp_path, "s.py").returncode == 0
    write(tmp_path, f"{guarded}TEACHER = surefoot.load('r')\n")
    assert call(monkeypatch, "evaluate", "r", "--quiet") == 0
    assert times(tmp_path) == 2  # the script itself, and the command


@pytest.mark.usefixtures("programs_are_forked")
def test_a_spawned_process_that_imports_an_unguarded_script_starts_no_run(tmp_path: Path) -> None:
    text = """
import multiprocessing, os
def work(): pass
run = Run(SPEC, Mine(), folder=f'r-{os.getpid()}', quiet=True)
with run:
    child = multiprocessing.get_context('spawn').Process(target=work)
    child.start()
    child.join()
"""
    write(tmp_path, text)
    resource_tracker.ensure_running()  # of this process: it is not the program's
    ended = python(tmp_path, "s.py")
    assert 'if __name__ == "__main__":' in ended.stderr
    assert len(list(tmp_path.glob("r-*"))) == 1
