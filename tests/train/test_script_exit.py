"""What a script that uses Run gives its scheduler.

The command's exit code, and a run that exists, finished, however often it is asked.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import surefoot
from surefoot.contract import manifest
from surefoot.contract.events import Ended, Started
from surefoot.core.errors import RunFolderError
from surefoot.train.run import Run
from tests.train.small import FEW, TEXT, Small, call, end_of, entries, records, spec, write_task

BEGIN = f"""{TEXT}
import atexit, os, signal, sys
from surefoot import Run, RunSpec

def train(folder="r", send=None, at=3):
    how = RunSpec(
        train={{"length": "6 steps", "batch": 4}},
        observe={{"tensorboard": False}},
        evaluate={{"every": "100 steps"}},
    )
    with Run(how, Mine(), folder=folder, quiet=True) as run:
        for report in run.steps():
            if report.step == at and send is not None:
                os.kill(os.getpid(), getattr(signal, send))
    return run

if __name__ == "__main__":
    # even where whatever started the tests ignores it
    signal.signal(signal.SIGINT, signal.default_int_handler)
    atexit.register(print, "at exit")
    file = open("kept.txt", "w")
    file.write("written")
"""
ENDS = {
    "SIGTERM": ("train(send='SIGTERM')", 143),
    "SIGINT": ("train(send='SIGINT')", 130),
    "SIGHUP": ("train(send='SIGHUP')", 129),
    "nothing": ("train()", 0),
    "another run after it": ("train(send='SIGTERM')\ntrain('other')", 143),
    "the same run, resumed": ("train(send='SIGTERM')\ntrain()", 0),
    "an exit with 0": ("train(send='SIGTERM')\nsys.exit(0)", 0),
    "an exit with 5": ("train(send='SIGTERM')\ntry:\n    sys.exit(5)\nfinally:\n    print()", 5),
    "an exit that is raised": ("train(send='SIGTERM')\nraise SystemExit(6)", 6),
    "an exit with the run's code": ("sys.exit(train(send='SIGHUP').exit_code)", 129),
    "an error of its own": ("train(send='SIGTERM')\nraise ValueError", 1),
    # it fails before the run, as the command says
    "an error in a step": ("Mine.forward = lambda *given: 1 / 0\ntrain()", 2),
    "an error in a later step": (
        "import helper\nMine.loss = helper.failing(Mine.loss)\ntrain()",
        3,
    ),
    "an error that is caught": (
        "Mine.forward = lambda *given: 1 / 0\ntry:\n    train()\nexcept Exception:\n    pass",
        0,
    ),
}
HELPER = """
def failing(loss):
    def with_count(self, output, batch):
        with_count.calls += output.requires_grad
        if with_count.calls > 40: raise ValueError("late")
        return loss(self, output, batch)
    with_count.calls = 0
    return with_count
""".replace("> 40", "> 4")


def python(folder: Path, *words: str, text: str = "") -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    return subprocess.run(
        [sys.executable, *words],
        cwd=folder,
        env=environment,
        input=text,
        capture_output=True,
        text=True,
        check=False,
    )


def write_script(folder: Path, text: str, name: str = "s.py") -> None:
    (folder / "helper.py").write_text(HELPER)
    (folder / name).write_text(BEGIN + "".join(f"    {line}\n" for line in text.splitlines()))


@pytest.mark.quick("the same run, resumed")
@pytest.mark.parametrize("how", ENDS)
def test_a_script_ends_with_the_code_of_the_command_unless_it_decides_itself(
    how: str, tmp_path: Path
) -> None:
    text, code = ENDS[how]
    write_script(tmp_path, text)
    ended = python(tmp_path, "s.py")
    assert ended.returncode == code, ended.stderr
    assert ended.stdout.splitlines()[-1:] == ["at exit"]
    assert ended.stdout.count("at exit") == 1
    assert (tmp_path / "kept.txt").read_text() == "written"


def test_a_script_goes_on_after_an_interrupted_run_as_it_likes(tmp_path: Path) -> None:
    write_script(
        tmp_path,
        "run = train(send='SIGTERM')\n"
        "print(run.outcome, run.step, surefoot.load('r', 'last') is not None)",
    )
    script = (tmp_path / "s.py").read_text()
    (tmp_path / "s.py").write_text(f"import surefoot\n{script}")
    ended = python(tmp_path, "s.py")
    assert ended.returncode == 143, ended.stderr
    assert ended.stdout.splitlines() == ["interrupted 3 True", "at exit"]
    assert (tmp_path / "kept.txt").read_text() == "written"


RUN_PATH = "import runpy\nrunpy.run_path('s.py', run_name='__main__')"
RUN_MODULE = "import runpy\nrunpy.run_module('pkg.s', run_name='__main__')"
# words after `python`, the text on standard input, and the exit code; SCRIPT stands for the script
STARTS = {
    "standard input": (["-"], "SCRIPT", 143),
    "-c": (["-c", "SCRIPT"], "", 143),
    "a module": (["-m", "pkg.s"], "", 143),
    "standard input, no argument": ([], "SCRIPT", 143),
    "a package": (["-m", "pkg"], "", 143),
    "a folder": (["pkg"], "", 143),
    "runpy.run_path": (["-c", RUN_PATH], "", 143),
    "runpy.run_module": (["-c", RUN_MODULE], "", 143),
    "python -m runpy": (["-m", "runpy", "pkg.s"], "", 143),
    "exec": (["-c", "exec(open('s.py').read())"], "", 143),
    "runpy in a function": ([], f"def run():\n    exec({RUN_PATH!r})\nrun()", 143),
    "a profiler": (["-m", "cProfile", "-o", "profile", "s.py"], "", 143),
    "-c that exits": (["-c", f"{RUN_PATH}\nraise SystemExit(0)"], "", 0),
    "an interactive session": (["-i"], "exec(open('s.py').read())\n", 0),
    "a script before a session": (["-i", "s.py"], "", 0),
    "-c before a session": (["-i", "-c", "SCRIPT"], "", 0),
    "a console": (["-c", "import code\ncode.interact()"], f"{RUN_PATH}\n", 0),
}


@pytest.mark.quick("standard input", "-c")
@pytest.mark.parametrize("start", STARTS)
def test_a_script_has_the_exit_code_however_python_is_started_and_a_session_has_its_own(
    start: str, tmp_path: Path
) -> None:
    words, text, code = STARTS[start]
    (tmp_path / "pkg").mkdir()
    (tmp_path / "pkg" / "__init__.py").touch()
    for name in ("s.py", "pkg/s.py", "pkg/__main__.py"):
        write_script(tmp_path, "train(send='SIGTERM')", name)
    script = (tmp_path / "s.py").read_text()
    ended = python(
        tmp_path,
        *(word.replace("SCRIPT", script) for word in words),
        text=text.replace("SCRIPT", script),
    )
    assert ended.returncode == code, ended.stderr
    assert (end_of(tmp_path / "r").outcome, end_of(tmp_path / "r").exit_code) == (
        "interrupted",
        143,
    )


# ---- a run that is asked for again


def test_a_finished_run_that_is_asked_for_again_trains_nothing_writes_nothing_and_has_its_weights(
    tmp_path: Path,
) -> None:
    def run_again() -> Run:
        with Run(spec(6), Small(), folder=tmp_path / "a", quiet=True) as run:
            for _ in run.steps():
                pass
            if run.step > run.last_evaluated:
                run.evaluate()
        return run

    first = run_again()
    before = (tmp_path / "a" / "events.jsonl").read_bytes()
    for _ in range(2):
        again = run_again()
        assert (again.outcome, again.step, again.exit_code, again.folder) == (
            "finished",
            6,
            0,
            first.folder,
        )
        for one, other in zip(first.model.parameters(), again.model.parameters(), strict=True):
            assert torch.equal(one, other)
        assert again.summary["value"] == first.summary["value"]
    assert (tmp_path / "a" / "events.jsonl").read_bytes() == before
    assert [path.name for path in tmp_path.iterdir()] == ["a"]
    assert manifest.steps(tmp_path / "a") == [6]


@pytest.mark.parametrize("ranks", [(), ("--ranks", "2")], ids=["one process", "ranks"])
def test_the_commands_are_done_with_a_run_that_is_finished(
    ranks: tuple[str, ...],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    task = write_task(tmp_path)
    words = ("train", task, *FEW, "--run", str(tmp_path / "a"))
    assert call(monkeypatch, *words, "--json") == 0
    first, before = json.loads(capsys.readouterr().out), entries(tmp_path)
    (tmp_path / "mine.py").write_text((tmp_path / "mine.py").read_text() + "\nchanged = True\n")
    for command in (words, ("resume", str(tmp_path / "a"))):
        assert call(monkeypatch, *command, *ranks, "--json") == 0
        told = capsys.readouterr()
        assert json.loads(told.out) == first
        assert "nothing is left to train" in told.err
    assert entries(tmp_path) == before


def test_a_run_that_begins_with_weights_may_be_asked_for_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    task = write_task(tmp_path)
    assert call(monkeypatch, "train", task, *FEW, "--run", str(tmp_path / "a"), "--quiet") == 0
    words = (
        "train",
        task,
        *FEW,
        "--weights",
        str(tmp_path / "a"),
        "--run",
        str(tmp_path / "b"),
        "--quiet",
    )
    assert call(monkeypatch, *words) == 0
    assert call(monkeypatch, *words) == 0
    assert "nothing is left to train" in capsys.readouterr().err
    log = tmp_path / "b" / "events.jsonl"
    log.write_text("".join(log.read_text().splitlines(keepends=True)[:-1]))  # killed
    assert call(monkeypatch, *words) == 0
    assert end_of(tmp_path / "b").generation == 2
    assert not (tmp_path / "b-1").exists()


def test_a_run_that_was_stopped_is_done_and_one_whose_loop_was_left_is_resumed(
    tmp_path: Path,
) -> None:
    def train(name: str, leave_at: int, stop_at: int) -> Ended:
        with Run(spec(8), Small(), folder=tmp_path / name, quiet=True) as run:
            for report in run.steps():
                if report.step == stop_at:
                    run.stop("good enough")
                if report.step == leave_at:
                    break
        return end_of(tmp_path / name)

    end = train("left", leave_at=3, stop_at=0)
    assert (end.outcome, end.was_left, end.step, end.exit_code) == ("stopped", True, 3, 0)
    end = train("left", leave_at=0, stop_at=0)
    assert (end.outcome, end.was_left, end.step, end.generation) == ("finished", False, 8, 2)
    assert train("stopped", leave_at=0, stop_at=3).was_left is False
    assert (train("stopped", leave_at=0, stop_at=0).step, manifest.steps(tmp_path / "stopped")) == (
        3,
        [3],
    )
    assert sorted(path.name for path in tmp_path.iterdir()) == ["left", "stopped"]


def test_a_finished_run_without_a_checkpoint_is_not_trained_over(tmp_path: Path) -> None:
    with Run(spec(4), Small(), folder=tmp_path / "a", quiet=True) as run:
        for _ in run.steps():
            pass
    shutil.rmtree(tmp_path / "a" / "checkpoints")
    with (
        pytest.raises(RunFolderError, match="all of its checkpoints are damaged"),
        Run(spec(4), Small(), folder=tmp_path / "a"),
    ):
        pass


def test_an_attached_loop_that_was_finished_is_not_trained_again_and_can_be_made_longer(
    tmp_path: Path,
) -> None:
    def loop(epochs: int) -> int:
        torch.manual_seed(0)
        model = torch.nn.Linear(1, 1)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        run = surefoot.attach(
            model=model, optimizer=optimizer, data=list(torch.ones(4, 1)), folder=tmp_path / "a"
        )
        for _ in range(run.first_pass, epochs):
            for batch in run.batches():
                loss = model(batch).square().mean()
                loss.backward()
                optimizer.step()
                run.step_done(loss)
        run.close()
        return run.step

    assert [loop(2), loop(2), loop(3)] == [8, 8, 12]
    assert [path.name for path in tmp_path.iterdir()] == ["a"]
    assert [each.first_step for each in records(tmp_path / "a") if isinstance(each, Started)] == [
        1,
        9,
        9,
    ]
