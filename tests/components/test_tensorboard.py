"""TensorBoard's file: read by TensorBoard itself, and given up, told once, whatever stops it."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from surefoot.components.observe.journal import Journal
from surefoot.components.observe.tensorboard import TensorBoard, TensorBoardOfRun
from surefoot.contract.events import Started, Step
from surefoot.core.errors import StorageError

accumulators = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
records = pytest.importorskip("tensorboard.summary.writer.record_writer")
ROOT = Path(__file__).resolve().parents[2]


def step(number: int, **values: Any) -> Step:
    """The record of a step whose loss is its number."""
    same: dict[str, Any] = {
        "time_s": 1_700_000_000.0 + number,
        "epoch": 0.0,
        "num_steps": 1,
        "loss": float(number),
        "terms": {},
        "gradient_norm": None,
        "learning_rates": {"all": 0.5},
        "num_applied": 1,
        "num_samples": 8,
        "num_items": 8.0,
        "elapsed_s": 1.0,
        "waiting_s": 0.0,
        "samples_per_s": 8.0,
        "items_per_s": 8.0,
        "peak_bytes": None,
        "generation": 1,
    }
    return Step(step=number, **{**same, **values})


def write(folder: Path, *steps: Step, purge_step: int | None = None) -> None:
    board = TensorBoard(folder / "tensorboard", wanted=True, purge_step=purge_step)
    for each in steps:
        board.write(each)
    board.close()


def losses(folder: Path) -> list[tuple[int, float, float]]:
    board = accumulators.EventAccumulator(str(folder / "tensorboard"))
    board.Reload()
    return [(each.step, each.value, each.wall_time) for each in board.Scalars("train/loss")]


def test_tensorboard_reads_each_step_with_its_time(tmp_path: Path) -> None:
    write(tmp_path, step(1), step(2), step(3))
    assert losses(tmp_path) == [(n, float(n), 1_700_000_000.0 + n) for n in (1, 2, 3)]


def test_a_resume_takes_the_place_of_the_steps_after_it(tmp_path: Path) -> None:
    write(tmp_path, step(1), step(2), step(3))
    write(tmp_path, step(2, num_steps=7), purge_step=2)
    assert [each[0] for each in losses(tmp_path)] == [1, 2]


def test_a_number_that_is_none_or_no_number_does_not_stop_it(tmp_path: Path) -> None:
    write(tmp_path, step(1), step(2, gradient_norm=float("nan")), step(3, samples_per_s=1e300))
    assert [each[0] for each in losses(tmp_path)] == [1, 2, 3]


@pytest.mark.parametrize(
    "error",
    [MemoryError(), OSError(28, "No space left on device"), RuntimeError("another")],
    ids=repr,
)
@pytest.mark.parametrize("at", [1, 2, 4], ids=lambda at: f"record {at}")
def test_whatever_stops_a_record_is_told_once_and_nobody_waits(
    error: Exception, at: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("surefoot.components.observe.tensorboard.FIRST_WRITE_S", -1.0)
    before, written = records.RecordWriter.write, []

    def refuse(self: Any, data: bytes) -> None:
        written.append(data)
        if len(written) >= at:
            raise error
        before(self, data)

    monkeypatch.setattr(records.RecordWriter, "write", refuse)
    threads = threading.active_count()
    board = TensorBoard(tmp_path / "tensorboard", wanted=True)
    told = 0
    for number in range(1, 40):
        try:
            board.write(step(number))
        except StorageError as said:
            told += str(tmp_path) in str(said)
    board.close()
    assert (told, len(written)) == (1, at)
    assert threading.active_count() == threads


# ---- of a run, by a process of its own


def started() -> Started:
    empty: dict[str, Any] = {
        name: {} for name in ("spec", "data", "versions", "machine", "place", "variables")
    }
    return Started(
        generation=1,
        time_s=1.7e9,
        spec_id="",
        task="",
        code_digest="",
        command=(),
        commit=None,
        seed=0,
        num_parameters=1,
        total_steps=None,
        steps_per_epoch=None,
        **empty,
    )


def wait_until(is_so: Callable[[], bool]) -> None:
    left = time.monotonic() + 120.0
    while not is_so():
        assert time.monotonic() < left
        time.sleep(0.05)


@contextmanager
def of_run(
    folder: Path, monkeypatch: pytest.MonkeyPatch, first_write_s: float, purge: int | None = None
) -> Iterator[tuple[Journal, TensorBoardOfRun]]:
    monkeypatch.setattr("surefoot.components.observe.tensorboard.FIRST_WRITE_S", first_write_s)
    journal = Journal(folder)
    board = TensorBoardOfRun(folder, wanted=True, purge_step=purge)
    journal.begin(started())
    board.begin(1)
    yield journal, board
    journal.close()
    board.close()


@pytest.mark.parametrize("first_write_s", [0.0, 3600.0], ids=["by a process", "at the end"])
def test_the_files_of_a_run_hold_each_step_of_its_log(
    first_write_s: float, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with of_run(tmp_path, monkeypatch, first_write_s) as (journal, board):
        for number in range(1, 30):
            journal.write(step(number))
            board.write(step(number))
            assert (board._process is not None) == (first_write_s == 0.0)
    assert losses(tmp_path) == [(n, float(n), 1_700_000_000.0 + n) for n in range(1, 30)]


def test_a_later_attempt_takes_the_place_of_the_steps_after_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for first, purge in ((1, None), (3, 3)):
        with of_run(tmp_path, monkeypatch, 0.0, purge) as (journal, board):
            for number in range(first, first + 4):
                journal.write(step(number, loss=float(first)))
                board.write(step(number))
    assert [(n, value) for n, value, _ in losses(tmp_path)] == [
        (1, 1.0),
        (2, 1.0),
        *((n, 3.0) for n in range(3, 7)),
    ]


def test_a_killed_run_leaves_files_with_all_that_its_log_holds(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    read, write = os.pipe()
    pid = os.fork()
    if pid == 0:
        with of_run(tmp_path, monkeypatch, 0.0) as (journal, board):
            for number in range(1, 20):
                journal.write(step(number))
                board.write(step(number))
            assert board._process is not None
            os.write(write, str(board._process.pid).encode())
            os.kill(os.getpid(), signal.SIGKILL)
    os.waitpid(pid, 0)
    process = int(os.read(read, 100))
    wait_until(lambda: not Path(f"/proc/{process}").exists() or is_zombie(process))
    assert [each[0] for each in losses(tmp_path)] == list(range(1, 20))


def is_zombie(pid: int) -> bool:
    with contextlib.suppress(OSError):
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z"
    return True


def test_a_signal_to_all_processes_of_a_terminal_does_not_end_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with of_run(tmp_path, monkeypatch, 0.0) as (journal, board):
        journal.write(step(1))
        board.write(step(1))
        assert board._process is not None
        wait_until(lambda: bool(list(tmp_path.glob("tensorboard/*"))))
        for each in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            board._process.send_signal(each)
        journal.write(step(2))
        board.write(step(2))
    assert [each[0] for each in losses(tmp_path)] == [1, 2]


def kill(board: TensorBoardOfRun) -> None:
    assert board._process is not None
    board._process.kill()


@pytest.mark.parametrize(
    ("hinder", "words"),
    [
        (lambda folder, board: kill(board), "its process died"),
        (lambda folder, board: (folder / "tensorboard").write_text(""), "File exists"),
    ],
    ids=["its process is killed", "a file is where the folder would be"],
)
def test_what_stops_its_process_is_told_once_and_the_run_goes_on(
    hinder: Callable[[Path, TensorBoardOfRun], Any],
    words: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("surefoot.components.observe.tensorboard.FIRST_WRITE_S", 0.0)
    journal, board = Journal(tmp_path), TensorBoardOfRun(tmp_path, wanted=True)
    journal.begin(started())
    board.begin(1)
    told = list[str]()
    for number in range(1, 4):
        journal.write(step(number))
        try:
            board.write(step(number))
            if number == 1:
                hinder(tmp_path, board)
                assert board._process is not None
                if "died" in words:
                    board._process.wait(120.0)
        except StorageError as error:
            told.append(error.message)
    try:
        board.close()
    except StorageError as error:
        told.append(error.message)
    board.write(step(4))
    board.close()
    journal.close()
    assert [words in each and str(tmp_path) in each for each in told] == [True], told


def test_a_process_that_cannot_start_is_told_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("surefoot.components.observe.tensorboard.FIRST_WRITE_S", 0.0)
    monkeypatch.setattr(sys, "executable", str(tmp_path / "no interpreter"))
    journal, board = Journal(tmp_path), TensorBoardOfRun(tmp_path, wanted=True)
    journal.begin(started())
    board.begin(1)
    with pytest.raises(StorageError, match="cannot be written"):
        board.write(step(1))
    board.write(step(2))
    board.close()
    journal.close()


def test_a_training_process_imports_nothing_of_tensorboard(tmp_path: Path) -> None:
    words = (
        "import sys\n"
        "from pathlib import Path\n"
        "import surefoot.components.observe.tensorboard as module\n"
        "module.FIRST_WRITE_S = 0.0\n"
        "from tests.train.small import Small\n"
        "from surefoot.train.run import Run\n"
        "spec = {'train': {'length': '5 steps', 'batch': 8}, 'observe': {'every': '1 step'}}\n"
        f"with Run(spec, Small(), folder={str(tmp_path / 'a')!r}, quiet=True) as run:\n"
        "    for _ in run.steps(): pass\n"
        "print(sorted(name for name in sys.modules if name.split('.')[0] == 'tensorboard'))\n"
    )
    said = subprocess.run(
        [sys.executable, "-c", words], capture_output=True, text=True, cwd=ROOT, check=True
    )
    assert said.stdout == "[]\n"
    assert [each[0] for each in losses(tmp_path / "a")] == [1, 2, 3, 4, 5]


def test_a_process_that_is_forked_meanwhile_does_not_keep_it_waiting(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Such a process holds the pipe to it, as a worker of a DataLoader does."""
    monkeypatch.setattr("surefoot.components.observe.tensorboard.MAX_END_S", 3600.0)
    read, write = os.pipe()
    pid = 0
    with of_run(tmp_path, monkeypatch, 0.0) as (journal, board):
        journal.write(step(1))
        board.write(step(1))
        pid = os.fork()
        if pid == 0:
            os.close(write)
            os.read(read, 1)  # until the test closes its end
            os._exit(0)
    assert os.waitpid(pid, os.WNOHANG) == (0, 0)
    os.close(write)
    os.waitpid(pid, 0)
    assert [each[0] for each in losses(tmp_path)] == [1]


def test_it_starts_where_the_working_folder_is_gone_and_with_the_path_of_its_process(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    gone = tmp_path / "gone"
    gone.mkdir()
    monkeypatch.chdir(gone)
    gone.rmdir()
    monkeypatch.setattr(sys, "path", [*sys.path, str(tmp_path)])
    with of_run(tmp_path, monkeypatch, 0.0) as (journal, board):
        journal.write(step(1))
        board.write(step(1))
    monkeypatch.chdir(tmp_path)
    assert [each[0] for each in losses(tmp_path)] == [1]


def test_the_records_of_a_later_attempt_in_the_same_log_are_not_of_this_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with of_run(tmp_path, monkeypatch, 0.0) as (journal, board):
        journal.write(step(1))
        board.write(step(1))
        journal.write(step(2, generation=2))
    assert [each[0] for each in losses(tmp_path)] == [1]
