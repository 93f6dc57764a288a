"""SIGTERM and SIGUSR1, as schedulers send them.

The state is saved at the step boundary, and the run goes on from there.
"""

from __future__ import annotations

import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from surefoot.contract import commits, manifest
from surefoot.contract.events import Committed, Evaluated
from surefoot.core.place import child_environment
from surefoot.train.run import Run, drive
from tests.train.small import Small, call, end_of, records, spec, write_task

CODES = {signal.SIGTERM: 143, signal.SIGHUP: 129, signal.SIGUSR2: 140, signal.SIGXCPU: 152}


@pytest.mark.parametrize("number", CODES)
def test_a_signal_to_end_ends_after_the_step_saved_and_with_a_code_of_its_own(
    number: signal.Signals, tmp_path: Path
) -> None:
    before = signal.getsignal(number)
    with Run(spec(50), Small(), folder=tmp_path / "a", quiet=True) as run:
        for report in run.steps():
            if report.step == 7:
                signal.raise_signal(number)
    end = end_of(tmp_path / "a")
    assert (end.outcome, end.step, end.exit_code, run.exit_code) == (
        "interrupted",
        7,
        CODES[number],
        CODES[number],
    )
    assert end.cause == f"ended by {number.name}"
    assert manifest.steps(tmp_path / "a") == [7]
    assert signal.getsignal(number) is before
    with Run(spec(50), Small(), folder=tmp_path / "a", quiet=True) as again:
        assert again.step == 7


@pytest.mark.parametrize("number", CODES)
def test_a_second_one_ends_at_once_and_further_ones_do_not_cut_off_what_is_written_of_it(
    number: signal.Signals, tmp_path: Path
) -> None:
    with (
        pytest.raises(SystemExit) as caught,
        Run(spec(50), Small(), folder=tmp_path / "a", quiet=True) as run,
    ):
        for report in run.steps():
            if report.step == 7:
                try:
                    signal.raise_signal(number)
                    signal.raise_signal(number)
                finally:
                    signal.raise_signal(number)
    assert caught.value.code == CODES[number]
    end = end_of(tmp_path / "a")
    assert (end.outcome, end.step, end.exit_code) == ("interrupted", 7, CODES[number])
    assert end.cause == f"ended by {number.name}, at once, after step 7"
    assert manifest.steps(tmp_path / "a") == []


@pytest.mark.parametrize("number", [signal.SIGUSR2, signal.SIGXCPU])
def test_a_handler_that_the_process_has_for_a_signal_of_its_scheduler_stays(
    number: signal.Signals, tmp_path: Path
) -> None:
    heard: list[int] = []
    # as submitit has one
    before = signal.signal(number, lambda number, frame: heard.append(number))
    try:
        with Run(spec(12), Small(), folder=tmp_path / "a", quiet=True) as run:
            for report in run.steps():
                if report.step == 7:
                    signal.raise_signal(number)
    finally:
        signal.signal(number, before)
    assert heard == [number]
    assert (end_of(tmp_path / "a").outcome, run.step) == ("finished", 12)


def test_a_process_that_ignores_hang_ups_goes_on(tmp_path: Path) -> None:
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)  # as under nohup
    try:
        with Run(spec(4), Small(), folder=tmp_path / "a", quiet=True) as run:
            for _ in run.steps():
                signal.raise_signal(signal.SIGHUP)
    finally:
        signal.signal(signal.SIGHUP, before)
    assert run.outcome == "finished"


class Terminated(Small):
    """Is sent SIGTERM in the second batch of an evaluation."""

    def forward(self, model: nn.Module, batch: Any) -> torch.Tensor:
        if not model.training and len(self.seen) == 1:
            signal.raise_signal(signal.SIGTERM)
        if not model.training and self.is_begun:
            self.seen.append(len(batch[0]))
        return super().forward(model, batch)

    seen: list[int]
    is_begun = False


@pytest.mark.parametrize("ema", [None, 0.9])
def test_sigterm_leaves_an_evaluation_in_the_middle_and_the_state_before_it_is_saved(
    ema: float | None, tmp_path: Path
) -> None:
    task = Terminated()
    task.seen = []
    how = spec(50, evaluate={"batch": 4}, optim={"ema": ema} if ema else {})
    with (
        pytest.raises(SystemExit) as caught,
        Run(how, task, folder=tmp_path / "a", quiet=True) as run,
    ):
        for report in run.steps():
            if report.step == 7:
                task.is_begun = True
                weights = run.model.get_parameter("4.bias").detach().clone()
                run.evaluate()
    assert caught.value.code == 143
    assert len(task.seen) == 2
    end = end_of(tmp_path / "a")
    assert (end.outcome, end.step, end.exit_code) == ("interrupted", 7, 143)
    assert not [event for event in records(tmp_path / "a") if isinstance(event, Evaluated)]
    # the average went back where it came from
    assert torch.equal(run.model.get_parameter("4.bias"), weights)
    assert manifest.steps(tmp_path / "a") == [7]


def test_an_evaluation_that_sigterm_left_is_the_first_thing_that_the_next_attempt_does(
    tmp_path: Path,
) -> None:
    def attempt(folder: str, *, is_terminated: bool) -> None:
        task = Terminated()
        task.seen = [] if is_terminated else [0, 0]  # it is sent in the second batch
        with Run(spec(9, evaluate={"batch": 4}), task, folder=tmp_path / folder, quiet=True) as run:
            for report in run.steps():
                if report.step == 7:
                    task.is_begun = True
                    run.evaluate()

    with pytest.raises(SystemExit):
        attempt("left", is_terminated=True)
    attempt("left", is_terminated=False)
    attempt("whole", is_terminated=False)
    evaluated = {
        name: [
            (event.step, event.loss, event.best)
            for event in records(tmp_path / name)
            if isinstance(event, Evaluated)
        ]
        for name in ("left", "whole")
    }
    assert evaluated["left"] == evaluated["whole"] == [(7, evaluated["whole"][0][1], True)]
    assert (
        commits.find_step(tmp_path / "left", "best")
        == commits.find_step(tmp_path / "whole", "best")
        == 7
    )


def test_sigusr1_saves_and_the_run_goes_on(tmp_path: Path) -> None:
    with Run(spec(20), Small(), folder=tmp_path / "a", quiet=True) as run:
        for report in run.steps():
            if report.step in (4, 9):
                signal.raise_signal(signal.SIGUSR1)
    assert end_of(tmp_path / "a").outcome == "finished"
    assert [event.step for event in records(tmp_path / "a") if isinstance(event, Committed)] == [
        4,
        9,
        20,
    ]


def test_sigterm_at_the_command_line_ends_with_143_and_the_same_command_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    task = write_task(
        tmp_path,
        change=(
            "# FORWARD",
            (
                "import time; "
                "(print(STEP, flush=True), time.sleep(0.2)) if model.training and STEP < 9 else 0"
            ),
        ),
    )
    environment = {
        **child_environment(threads=1),
        "PYTHONPATH": str(Path(__file__).resolve().parents[2]),
    }
    words = [
        "train",
        task,
        "--steps",
        "30",
        "--run",
        str(tmp_path / "a"),
        "--set",
        "observe.tensorboard=false",
        "--set",
        "train.batch=4",
    ]
    command = [sys.executable, "-m", "surefoot", *words]
    with subprocess.Popen(
        command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None
        for line in iter(process.stdout.readline, "5\n"):
            assert line
        process.send_signal(signal.SIGTERM)
        _, err = process.communicate()
    assert process.returncode == 143, err
    assert "Traceback" not in err
    saved = manifest.steps(tmp_path / "a")
    assert saved == [end_of(tmp_path / "a").step]
    code = call(monkeypatch, *words)
    said = capsys.readouterr().err
    assert code == 0, said
    assert f"resuming after step {saved[0]}" in said


EARLY = """
import runpy, signal, sys
class Early:
    def find_spec(self, name, path=None, target=None):
        if name == "surefoot.cli.main":
            signal.raise_signal(signal.SIGNAL)
sys.meta_path.insert(0, Early())
sys.argv = ["surefoot", "spec", "--help"]
runpy.run_module("surefoot", run_name="__main__", alter_sys=True)
"""


@pytest.mark.parametrize(("name", "code"), [("SIGINT", 130), ("SIGUSR1", 0)])
def test_a_signal_while_the_program_is_imported_has_its_code_and_no_traceback(
    name: str, code: int
) -> None:
    environment = {
        **child_environment(threads=1),
        "PYTHONPATH": str(Path(__file__).resolve().parents[2]),
    }
    command = [sys.executable, "-c", EARLY.replace("SIGNAL", name)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (code, "")


def test_a_run_driven_to_its_end_is_not_disturbed_by_listening(tmp_path: Path) -> None:
    with Run(spec(8), Small(), folder=tmp_path / "a", quiet=True) as run:
        drive(run)
    assert run.exit_code == 0
