"""Ctrl-C, break, exceptions, threads: a run says how it ended, and puts back what it set."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import surefoot
from surefoot.components.observe.console import Console
from surefoot.contract import manifest
from surefoot.contract.events import Evaluated, Step
from surefoot.core.errors import NumbersError, UserCodeError
from surefoot.core.place import child_environment
from surefoot.train.run import Run, drive
from tests.train.small import Small, end_of, records, spec, write_task


@pytest.fixture(autouse=True)
def _hears_interrupts() -> Iterator[None]:
    """As at a terminal, even where whatever started the tests ignores Ctrl-C."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


# ---- Ctrl-C


def test_the_first_interrupt_ends_after_the_step_with_weights_and_an_end(tmp_path: Path) -> None:
    with Run(spec(50), Small(), folder=tmp_path / "a", quiet=True) as run:
        for report in run.steps():
            if report.step == 7:
                signal.raise_signal(signal.SIGINT)
    end = end_of(tmp_path / "a")
    assert (end.outcome, end.step, end.exit_code, run.exit_code) == ("interrupted", 7, 130, 130)
    assert "Ctrl-C" in end.cause
    assert manifest.steps(tmp_path / "a") == [7]
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_a_step_in_which_the_interrupt_comes_is_done_first(tmp_path: Path) -> None:
    is_begun = False

    class Interrupted(Small):
        def forward(self, model: nn.Module, batch: Any) -> torch.Tensor:
            if model.training and is_begun:
                signal.raise_signal(signal.SIGINT)
            return super().forward(model, batch)

    with Run(spec(50), Interrupted(), folder=tmp_path / "a", quiet=True) as run:
        is_begun = True
        drive(run)
    assert (end_of(tmp_path / "a").step, run.is_stopping) == (1, "interrupted")
    # it ends now, not after a last evaluation
    assert not [event for event in records(tmp_path / "a") if isinstance(event, Evaluated)]


@pytest.mark.parametrize(
    "where", ["in the reader's loop", "in the middle of a step", "in an evaluation"]
)
def test_the_second_interrupt_stops_at_once_and_commits_nothing(where: str, tmp_path: Path) -> None:
    is_over = False

    class Interrupted(Small):
        def forward(self, model: nn.Module, batch: Any) -> torch.Tensor:
            if is_over and where == (
                "in the middle of a step" if model.training else "in an evaluation"
            ):
                signal.raise_signal(signal.SIGINT)
                signal.raise_signal(signal.SIGINT)
            return super().forward(model, batch)

    with (
        pytest.raises(KeyboardInterrupt),
        Run(spec(50), Interrupted(), folder=tmp_path / "a", quiet=True) as run,
    ):
        for report in run.steps():
            is_over = report.step == 7
            if is_over and where == "in the reader's loop":
                signal.raise_signal(signal.SIGINT)
                signal.raise_signal(signal.SIGINT)
            if is_over and where == "in an evaluation":
                run.evaluate()
    end = end_of(tmp_path / "a")
    assert (end.outcome, end.step, end.exit_code) == ("interrupted", 7, 130)
    assert "at once" in end.cause
    assert manifest.steps(tmp_path / "a") == []
    assert [event.step for event in records(tmp_path / "a") if isinstance(event, Step)][
        -1
    ] == 7  # what was measured is not lost


PRESS = """
import os, signal, sys
signal.signal(signal.SIGINT, signal.default_int_handler)
from surefoot.cli.main import main
sys.argv = ["surefoot", "train", *sys.argv[1:]]
main()
"""


@pytest.mark.quick("15")
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_signals_without_end_leave_a_record_of_the_end(
    number: signal.Signals, tmp_path: Path
) -> None:
    task = write_task(
        tmp_path, change=("# FORWARD", "print(STEP, flush=True) if model.training else 0")
    )
    environment = {
        **child_environment(threads=1),
        "PYTHONPATH": str(Path(__file__).resolve().parents[2]),
    }
    words = [
        "--steps",
        "1000000",
        "--run",
        str(tmp_path / "a"),
        "--set",
        "observe.tensorboard=false",
        "--set",
        "train.batch=4",
    ]
    with subprocess.Popen(
        [sys.executable, "-c", PRESS, task, *words],
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
    ) as process:
        assert process.stdout is not None
        for line in iter(process.stdout.readline, "3\n"):
            assert line
        while process.poll() is None:
            process.send_signal(number)
    assert end_of(tmp_path / "a").outcome == "interrupted"


@pytest.mark.quick("1")
@pytest.mark.parametrize("presses", [1, 2])
def test_ctrl_c_at_the_command_line_ends_with_130_and_says_so(presses: int, tmp_path: Path) -> None:
    task = write_task(
        tmp_path,
        change=(
            "# FORWARD",
            "import time; (print(STEP, flush=True), time.sleep(0.2)) if model.training else 0",
        ),
    )
    environment = {
        **child_environment(threads=1),
        "PYTHONPATH": str(Path(__file__).resolve().parents[2]),
    }
    words = [
        "--steps",
        "1000",
        "--run",
        str(tmp_path / "a"),
        "--set",
        "observe.tensorboard=false",
        "--set",
        "train.batch=4",
    ]
    with subprocess.Popen(
        [sys.executable, "-c", PRESS, task, *words],
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    ) as process:
        assert process.stdout is not None
        assert process.stderr is not None
        for line in iter(process.stdout.readline, "3\n"):
            assert line
        process.send_signal(signal.SIGINT)
        said = ""
        while "again" not in said:
            said = process.stderr.readline()
            assert said
        if presses == 2:
            process.send_signal(signal.SIGINT)
        out, err = process.communicate()
    assert process.returncode == 130
    assert "Traceback" not in err
    end = end_of(tmp_path / "a")
    assert (end.outcome, end.exit_code) == ("interrupted", 130)
    assert manifest.steps(tmp_path / "a") == ([end.step] if presses == 1 else [])
    assert ("interrupted by Ctrl-C" in out) is (presses == 1)


def test_a_process_that_ignores_interrupts_goes_on(tmp_path: Path) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    with Run(spec(4), Small(), folder=tmp_path / "a", quiet=True) as run:
        for _ in run.steps():
            signal.raise_signal(signal.SIGINT)
    assert run.outcome == "finished"


def test_a_stop_does_not_hide_an_interrupt(tmp_path: Path) -> None:
    with Run(spec(50), Small(), folder=tmp_path / "a", quiet=True) as run:
        for _ in run.steps():
            signal.raise_signal(signal.SIGINT)
            run.stop("good enough")
    assert (run.outcome, run.exit_code) == ("interrupted", 130)


def test_an_interrupt_in_the_middle_of_a_line_of_our_own_is_no_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def enter_twice(self: Console, text: str) -> None:
        raise RuntimeError("reentrant call inside <_io.BufferedWriter name='<stderr>'>")

    with Run(spec(50), Small(), folder=tmp_path / "a", quiet=True) as run:
        monkeypatch.setattr(Console, "say", enter_twice)
        for _ in run.steps():
            signal.raise_signal(signal.SIGINT)
    assert run.outcome == "interrupted"


# ---- other ways out of the loop


def test_break_ends_the_run_and_says_at_which_step(tmp_path: Path) -> None:
    with Run(spec(50), Small(), folder=tmp_path / "a", quiet=True) as run:
        for report in run.steps():
            if report.step == 5:
                break
    end = end_of(tmp_path / "a")
    assert (end.outcome, end.cause, end.exit_code) == ("stopped", "the loop exited at step 5", 0)
    assert manifest.steps(tmp_path / "a") == [5]
    assert sum(event.num_steps for event in records(tmp_path / "a") if isinstance(event, Step)) == 5


def test_stop_ends_after_the_step_and_keeps_the_first_reason(tmp_path: Path) -> None:
    with Run(spec(50), Small(), folder=tmp_path / "a", quiet=True) as run:
        for report in run.steps():
            if report.step == 5:
                run.stop("good enough")
                run.stop("another reason")
    assert (run.outcome, run.cause, run.exit_code, run.step) == ("stopped", "good enough", 0, 5)


def test_an_exception_in_the_readers_loop_is_recorded_and_goes_on_to_the_reader(
    tmp_path: Path,
) -> None:
    with (
        pytest.raises(ZeroDivisionError),
        Run(spec(50), Small(), folder=tmp_path / "a", quiet=True) as run,
    ):
        for report in run.steps():
            if report.step == 5:
                1 / 0  # noqa: B018
    end = end_of(tmp_path / "a")
    assert (end.outcome, end.exit_code, end.step) == ("failed", 3, 5)
    assert f"{Path(__file__).name}:" in end.cause
    assert "ZeroDivisionError" in end.cause
    assert "after step 5" in end.cause
    assert [event.step for event in records(tmp_path / "a") if isinstance(event, Step)][-1] == 5


@pytest.mark.parametrize(("code", "expected"), [(0, 0), (9, 9), ("no", 1), (None, 0)])
def test_sys_exit_in_the_readers_loop_is_recorded_with_its_own_code(
    code: Any, expected: int, tmp_path: Path
) -> None:
    with (
        pytest.raises(SystemExit),
        Run(spec(50), Small(), folder=tmp_path / "a", quiet=True) as run,
    ):
        for report in run.steps():
            if report.step == 5:
                sys.exit(code)
    end = end_of(tmp_path / "a")
    assert (end.exit_code, end.step) == (expected, 5)
    assert "SystemExit" in end.cause


def test_a_run_that_is_left_before_its_first_step_says_so(tmp_path: Path) -> None:
    with Run(spec(50), Small(), folder=tmp_path / "a", quiet=True):
        pass
    end = end_of(tmp_path / "a")
    assert (end.outcome, end.step) == ("stopped", 0)
    assert manifest.steps(tmp_path / "a") == []


def test_numbers_that_end_the_run_end_it_even_when_the_loop_is_left_before_they_are_read(
    tmp_path: Path,
) -> None:
    with (
        pytest.raises(NumbersError),
        Run(
            spec(50, optim={"lr": 1e9, "clip": 0.0}), Small(), folder=tmp_path / "a", quiet=True
        ) as run,
    ):
        for report in run.steps():
            if report.step == 9:
                break
    end = end_of(tmp_path / "a")
    assert (end.outcome, end.exit_code) == ("failed", 4)
    assert manifest.steps(tmp_path / "a") == []


def test_an_exception_in_metrics_shows_the_users_frame_and_leaves_the_model_as_it_was(
    tmp_path: Path,
) -> None:
    class Broken(Small):
        is_broken = False

        def metrics(self, output: torch.Tensor, batch: Any) -> Any:
            if self.is_broken:
                raise ValueError("no such class")
            return super().metrics(output, batch)

    task = Broken(norm=True, dropout=0.5)
    with (
        pytest.raises(UserCodeError) as caught,
        Run(spec(50), task, folder=tmp_path / "a", quiet=True) as run,
    ):
        for report in run.steps():
            if report.step == 5:
                task.is_broken = True
                run.evaluate()
    said = str(caught.value)
    assert "evaluation after step 5: ValueError: no such class" in said
    assert f"{Path(__file__).name}:" in said
    assert "in metrics" in said
    assert end_of(tmp_path / "a").cause in said
    assert run.model.training


# ---- what is put back


def settings() -> tuple[Any, ...]:
    return (
        torch.get_num_threads(),
        torch.are_deterministic_algorithms_enabled(),
        torch.is_deterministic_algorithms_warn_only_enabled(),
        torch.utils.deterministic.fill_uninitialized_memory,
        signal.getsignal(signal.SIGINT),
        threading.active_count(),
    )


@pytest.mark.parametrize("way", ["finished", "refused", "failed", "interrupted"])
def test_however_a_run_ends_the_process_is_as_it_was(way: str, tmp_path: Path) -> None:
    before, files = settings(), len(os.listdir("/proc/self/fd")) if sys.platform == "linux" else 0
    if way == "refused":
        (tmp_path / "a").write_text("a file")
    try:
        with Run(spec(6, train={"threads": 1}), Small(), folder=tmp_path / "a", quiet=True) as run:
            for _ in run.steps():
                if way == "failed":
                    raise ValueError
                if way == "interrupted":
                    signal.raise_signal(signal.SIGINT)
    except (surefoot.SurefootError, ValueError):
        pass
    assert settings() == before
    if sys.platform == "linux":
        assert len(os.listdir("/proc/self/fd")) == files


def test_a_run_works_outside_the_main_thread_and_leaves_signals_alone(tmp_path: Path) -> None:
    outcome: list[str] = []

    def work() -> None:
        with Run(spec(6), Small(), folder=tmp_path / "a", quiet=True) as run:
            drive(run)
        outcome.append(run.outcome)

    before = signal.getsignal(signal.SIGINT)
    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert outcome == ["finished"]
    assert signal.getsignal(signal.SIGINT) is before
    assert end_of(tmp_path / "a").outcome == "finished"


def weights_of(folder: Path, **tables: Any) -> dict[str, torch.Tensor]:
    with Run(spec(8, **tables), Small(dropout=0.5), folder=folder, quiet=True) as run:
        for _ in run.steps():
            pass
    return {name: tensor.clone() for name, tensor in run.model.state_dict().items()}


def test_a_run_inside_the_loop_of_another_changes_nothing_of_it(tmp_path: Path) -> None:
    alone = weights_of(tmp_path / "alone")
    with Run(spec(8), Small(dropout=0.5), folder=tmp_path / "outer", quiet=True) as outer:
        for report in outer.steps():
            if report.step == 3:
                weights_of(tmp_path / "inner", train={"seed": 5})
    for name, tensor in outer.model.state_dict().items():
        assert torch.equal(tensor, alone[name]), name


def test_steps_before_the_with_block_is_told_in_words() -> None:
    with pytest.raises(surefoot.SurefootError, match="with"):
        next(iter(Run(spec(2), Small()).steps()))


def test_a_terminal_that_goes_away_does_not_end_the_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    reading, writing = os.pipe()
    os.close(reading)
    with os.fdopen(writing, "w", buffering=1) as stream, monkeypatch.context() as patched:
        patched.setattr(sys, "stderr", stream)
        with Run(spec(20), Small(), folder=tmp_path / "a") as run:
            drive(run)
        patched.undo()
        with pytest.raises(BrokenPipeError):
            stream.flush()
        with open(
            os.devnull, "w"
        ) as nowhere:  # what is held back goes there when the stream is closed
            os.dup2(nowhere.fileno(), stream.fileno())
    assert run.outcome == "finished"
