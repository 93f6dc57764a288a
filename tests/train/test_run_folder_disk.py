"""A run folder on a disk that is read-only, too small or full, from the start or during the run."""

from __future__ import annotations

import contextlib
import json
import re
import shutil
import signal
from pathlib import Path

import pytest

import surefoot
from surefoot.contract import commits, manifest
from surefoot.contract.events import Committed, Started
from surefoot.core.errors import RunFolderError, StorageError
from surefoot.train.run import Run
from tests.train.small import (
    FEW,
    Small,
    call,
    end_of,
    entries,
    faults_of,
    fill,
    mounted,
    records,
    spec,
    write_task,
)
from tests.train.test_run_folder import train


def test_a_read_only_disk_is_refused_before_the_data_is_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    task = write_task(
        tmp_path,
        change=(
            "generator = torch.Generator()",
            "print('data was read'); generator = torch.Generator()",
        ),
    )
    with mounted(tmp_path / "disk", "size=4M,ro"):
        assert (
            call(monkeypatch, "train", task, *FEW, "--run", str(tmp_path / "disk" / "deep" / "a"))
            == 2
        )
        said = capsys.readouterr()
        assert "cannot be written" in said.err
        assert "data was read" not in said.out
        assert entries(tmp_path / "disk") == []


@pytest.mark.parametrize("leaving", [0, 8 << 10])
def test_a_full_disk_is_refused_at_the_start_and_nothing_is_left(
    leaving: int,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    with mounted(tmp_path / "disk", "size=2M") as disk:
        task = write_task(tmp_path)
        fill(disk, leaving=leaving)
        assert call(monkeypatch, "train", task, *FEW, "--run", str(disk / "deep" / "a")) == 2
        said = capsys.readouterr().err
        assert "free" in said
        assert "Traceback" not in said
        assert entries(disk) == [".ballast"]


def test_a_disk_that_fills_up_while_the_folder_is_opened_leaves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # so that the disk itself refuses
    monkeypatch.setattr("surefoot.train.session.folder.MIN_FREE_BYTES", 0)
    with mounted(tmp_path / "disk", "size=64k") as disk:
        for leaving in (0, 4 << 10, 8 << 10):  # a page each for the lock, the spec and the log
            ballast = fill(disk, leaving=leaving)
            with pytest.raises(RunFolderError):
                train(disk / "a")
            assert entries(disk) == [".ballast"]
            ballast.unlink()


def test_a_disk_without_free_files_is_refused_and_nothing_is_left(tmp_path: Path) -> None:
    with mounted(tmp_path / "disk", "size=4M", "nr_inodes=3") as disk:
        with pytest.raises(RunFolderError):
            train(disk / "a")
        assert entries(disk) == []


# ---- the disk fills up while the run goes on


def test_a_disk_too_small_for_the_commits_is_told_before_the_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    usage = shutil.disk_usage(tmp_path)
    for free, is_told in ((usage.free, False), (2 << 20, True)):
        monkeypatch.setattr(shutil, "disk_usage", lambda path, free=free: usage._replace(free=free))
        with Run(
            spec(1, checkpoint={"keep": 5_000}), Small(), folder=tmp_path / str(free), quiet=True
        ):
            pass
        (started,) = (
            event for event in records(tmp_path / str(free)) if isinstance(event, Started)
        )
        told = [
            note
            for note in started.notes
            if re.match(
                r"5002 checkpoints of about .* need .* MiB, and 2 MiB are free: saves may fail",
                note,
            )
        ]
        assert len(told) == is_told, started.notes


def test_a_disk_that_is_full_at_a_commit_costs_that_commit_and_not_the_run(tmp_path: Path) -> None:
    with mounted(tmp_path / "disk", "size=4M") as disk:
        with Run(
            spec(12, checkpoint={"every": "4 steps", "background": False}),
            Small(),
            folder=disk / "a",
            quiet=True,
        ) as run:
            for report in run.steps():
                if report.step == 4:
                    # room for a line of the log, none for a file
                    ballast = fill(disk, leaving=6 << 10)
                if report.step == 9:
                    ballast.unlink()
        past = records(disk / "a")
        assert [event.step for event in past if isinstance(event, Committed)] == [12]
        faults = faults_of(disk / "a")
        assert [(fault.step, fault.fault) for fault in faults] == [(4, "storage"), (8, "storage")]
        assert "the run continues" in faults[0].action
        assert not list((disk / "a" / "checkpoints").glob(".*"))
        assert end_of(disk / "a").outcome == "finished"
        surefoot.load(disk / "a")


@pytest.mark.parametrize("interrupted", [False, True])
def test_a_run_whose_last_state_is_not_saved_has_failed_and_the_same_run_again_ends_whole(
    interrupted: bool, tmp_path: Path
) -> None:
    folder = tmp_path / "a"
    with (
        pytest.raises(StorageError, match="the state after step 6 was not saved"),
        Run(spec(6), Small(), folder=folder, quiet=True) as run,
    ):
        (folder / "checkpoints").write_text("a file where the folder should be")
        for report in run.steps():
            if report.step == 6 and interrupted:
                signal.raise_signal(signal.SIGTERM)
    end = end_of(folder)
    assert (end.outcome, end.exit_code, run.exit_code) == ("failed", 5, 5)
    (folder / "checkpoints").unlink()
    assert train(folder).outcome == "finished"
    assert manifest.steps(folder) == [6]


def test_a_disk_that_is_full_under_the_log_ends_the_run_with_whole_lines_and_whole_weights(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    task = write_task(tmp_path, change=("# FORWARD", "fill(STEP)"))
    path = tmp_path / "mine.py"
    with mounted(tmp_path / "disk", "size=4M") as disk:
        lines = "from pathlib import Path\nfrom tests.train.small import fill as fill_disk\n"
        lines += f"def fill(step):\n    if step == 5: fill_disk(Path({str(disk)!r}))\n"
        path.write_text(lines + path.read_text())
        words = (
            "--set",
            "checkpoint.every='2 steps'",
            "--set",
            "observe.every='1 step'",
            "--steps",
            "200",
        )
        assert call(monkeypatch, "train", task, *FEW, *words, "--run", str(disk / "a")) == 5
        said = capsys.readouterr().err
        assert "cannot be written" in said
        assert "step" in said
        assert "Traceback" not in said
        text = (disk / "a" / "events.jsonl").read_text()
        assert text.endswith("\n")
        assert all(json.loads(line)["v"] == 1 for line in text.splitlines())
        assert manifest.steps(disk / "a")[0] in (2, 4)
        for step in manifest.steps(disk / "a"):
            commits.check(manifest.step_folder(disk / "a", step))
        (disk / ".ballast").unlink()


def test_a_line_that_only_fits_by_half_is_taken_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # so that few steps fill the memory that holds lines
    monkeypatch.setattr("surefoot.components.observe.journal.MAX_HELD_BYTES", 1 << 15)
    with mounted(tmp_path / "disk", "size=4M") as disk:
        with (
            pytest.raises(StorageError),
            Run(
                spec(4000, observe={"every": "1 step"}), Small(), folder=disk / "a", quiet=True
            ) as run,
        ):
            for report in run.steps():
                if report.step == 2:
                    fill(disk, leaving=4 << 10)
        text = (disk / "a" / "events.jsonl").read_text()
        assert text.endswith("}\n")
        (disk / ".ballast").unlink()
        assert run.exit_code == 5


def test_tensorboard_on_a_full_disk_is_given_up_and_the_run_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("tensorboard")
    monkeypatch.setattr("surefoot.components.observe.tensorboard.FIRST_WRITE_S", -1.0)
    (tmp_path / "a").mkdir()
    with Run(
        spec(4, observe={"every": "1 step", "tensorboard": True}),
        Small(),
        folder=tmp_path / "a",
        quiet=True,
    ) as run:
        (tmp_path / "a" / "tensorboard").write_text("a file where the folder should be")
        for _ in run.steps():
            pass
    end = end_of(tmp_path / "a")
    assert end.outcome == "finished"
    assert ["TensorBoard" in event.detail for event in faults_of(tmp_path / "a")] == [True]


def test_tensorboard_is_given_up_once_where_the_disk_fills_under_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("tensorboard")
    monkeypatch.setattr("surefoot.components.observe.tensorboard.FIRST_WRITE_S", -1.0)
    how = spec(300, observe={"every": "1 step", "tensorboard": True})
    with (
        contextlib.ExitStack() as until_the_end,
        Run(how, Small(), folder=tmp_path / "a", quiet=True) as run,
    ):
        disk = until_the_end.enter_context(mounted(tmp_path / "a" / "tensorboard", "size=1M"))
        fill(disk, leaving=4096)
        for _ in run.steps():
            pass
    assert run.outcome == "finished"
    assert capsys.readouterr().err.count("TensorBoard was abandoned, the run continues") == 1
