"""A disk without room for one more checkpoint.

The oldest makes room where retention allows it, one verified commit always stays.
"""

from __future__ import annotations

import errno
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import surefoot
from surefoot.components import checkpoint
from surefoot.contract import commits, manifest
from surefoot.contract.events import Committed, Fault
from surefoot.contract.run_folder import retention
from surefoot.contract.spec import RunSpec
from surefoot.core.errors import SpecError, StorageError
from surefoot.train.resume.disk_trouble import Patience
from surefoot.train.run import Run, drive
from tests.train.small import Small, call, end_of, fill, mounted, records, write_task

WIDTH = 20_000  # so that a commit takes about 1.9 MB: weights, and two moments of each
TWO_OF_THREE, ONE_OF_TWO = "size=5M", "size=3M"


class Wide(Small):
    def model(self) -> nn.Module:
        return nn.Sequential(nn.Linear(4, WIDTH), nn.ReLU(), nn.Linear(WIDTH, 3))


def wide(steps: int, *, evaluate: str = "1000 steps", **saving: Any) -> RunSpec:
    table = {"every": "2 steps", "background": False, **saving}
    return RunSpec(
        train={"length": f"{steps} steps", "batch": 4, "threads": 1},
        optim={"name": "adamw", "lr": 1e-4},
        checkpoint=table,
        evaluate={"every": evaluate},
    )


def saved(folder: Path) -> list[int]:
    return [event.step for event in records(folder) if isinstance(event, Committed)]


def faults(folder: Path, kind: str) -> list[Fault]:
    return [event for event in records(folder) if isinstance(event, Fault) and event.fault == kind]


def all_verify(folder: Path) -> bool:
    return all(commits.check(manifest.step_folder(folder, step)) for step in manifest.steps(folder))


@pytest.mark.parametrize("background", [False, True])
def test_with_room_for_two_commits_of_three_no_save_is_lost(
    background: bool, tmp_path: Path
) -> None:
    with mounted(tmp_path / "disk", TWO_OF_THREE) as disk:
        run = disk / "a"
        with Run(wide(20, background=background), Wide(), folder=run, quiet=True) as opened:
            for _ in opened.steps():
                assert len(manifest.steps(run)) >= min(1, len(saved(run)))
        assert saved(run) == [*range(2, 21, 2)]
        assert (faults(run, "storage"), end_of(run).outcome) == ([], "finished")
        told = faults(run, "full-disk")
        assert [fault.step for fault in told] == [*range(6, 21, 2)]
        assert (told[0].detail, told[0].action) == (
            "the disk had no space for the checkpoint of step 6",
            "the checkpoint of step 2 was deleted early, the run continues",
        )
        assert manifest.steps(run) == [18, 20]
        assert all_verify(run)


def test_a_run_that_was_killed_on_a_full_disk_resumes_from_its_last_save_to_the_same_bits(
    tmp_path: Path,
) -> None:
    with Run(wide(12), Wide(), folder=tmp_path / "whole", quiet=True) as whole:
        drive(whole)
    with mounted(tmp_path / "disk", TWO_OF_THREE) as disk:
        with (
            pytest.raises(ZeroDivisionError),
            Run(wide(12), Wide(), folder=disk / "a", quiet=True) as run,
        ):
            for report in run.steps():
                report.step // (report.step - 9)
        assert manifest.steps(disk / "a")[-1] == 8
        with Run(wide(12), Wide(), folder=disk / "a", quiet=True) as again:
            assert again.step == 8
            drive(again)
        for name, tensor in whole.model.state_dict().items():
            assert torch.equal(tensor, again.model.state_dict()[name]), name


def test_the_best_stays_and_the_newest_makes_room_for_its_successor(tmp_path: Path) -> None:
    with mounted(tmp_path / "disk", TWO_OF_THREE) as disk:
        run = disk / "a"
        with Run(wide(12), Wide(), folder=run, quiet=True) as opened:
            for report in opened.steps():
                if report.step == 2:
                    opened.evaluate()
        assert saved(run)[-1] == 12
        assert manifest.steps(run) == [2, 12]
        assert faults(run, "storage") == []


def test_milestones_stay_and_where_no_other_may_go_the_save_is_given_up(tmp_path: Path) -> None:
    with mounted(tmp_path / "disk", TWO_OF_THREE) as disk:
        run = disk / "a"
        with Run(wide(8, keep_every="2 steps"), Wide(), folder=run, quiet=True) as opened:
            for report in opened.steps():
                if report.step == 7:
                    assert manifest.steps(run) == [2, 4]
                    assert [fault.step for fault in faults(run, "storage")] == [6]
                    commits.remove(manifest.step_folder(run, 2))  # as a user makes room
        assert (saved(run), faults(run, "full-disk")) == ([2, 4, 8], [])


def test_the_only_commit_never_makes_room(tmp_path: Path) -> None:
    with mounted(tmp_path / "disk", ONE_OF_TWO) as disk:
        run = disk / "a"
        lost = pytest.raises(StorageError, match="the state after step 6 was not saved")
        with lost, Run(wide(6), Wide(), folder=run, quiet=True) as opened:
            drive(opened)
        assert (saved(run), manifest.steps(run)) == ([2], [2])
        assert {fault.step for fault in faults(run, "storage")} == {4, 6}
        assert faults(run, "full-disk") == []
        assert all_verify(run)


def test_nothing_is_deleted_for_a_damaged_commit_or_where_it_would_not_be_enough(
    tmp_path: Path,
) -> None:
    with mounted(tmp_path / "disk", "size=9M") as disk:
        with Run(wide(6), Wide(), folder=disk / "a", quiet=True) as run:
            drive(run)
        assert manifest.steps(run.folder) == [2, 4, 6]
        need = manifest.read(manifest.step_folder(run.folder, 2)).num_bytes
        assert retention.find_in_the_way(run.folder, need, 0) == [2]
        assert retention.find_in_the_way(run.folder, need, need // 2) == [2]
        assert retention.find_in_the_way(run.folder, 2 * need, need // 2) == [2, 4]
        assert retention.find_in_the_way(run.folder, 9 * need, 0) == []
        # a quota, or inodes: room is not what is missing
        assert retention.find_in_the_way(run.folder, need, 9 * need) == [2]
        assert retention.find_in_the_way(run.folder, need, 0, every=2) == []
        weights = manifest.step_folder(run.folder, 6) / "model.safetensors"
        weights.write_bytes(weights.read_bytes()[:-1] + b"x")
        assert checkpoint.make_room(run.folder) == []
        assert manifest.steps(run.folder) == [2, 4, 6]


def test_too_few_inodes_are_room_too(tmp_path: Path) -> None:
    with mounted(tmp_path / "disk", "size=64M", "nr_inodes=22") as disk:
        run = disk / "a"
        with Run(wide(12), Wide(), folder=run, quiet=True) as opened:
            drive(opened)
        assert saved(run)[-1] == 12
        assert faults(run, "full-disk")
        assert all_verify(run)


def test_an_attached_loop_trades_alike_and_is_never_ended(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    model = Wide().model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    data = [torch.randn(4, 4) for _ in range(12)]
    with mounted(tmp_path / "disk", TWO_OF_THREE) as disk:
        with surefoot.attach(
            model=model, optimizer=optimizer, data=data, folder=disk / "a", save="2 steps"
        ) as run:
            for batch in run.batches():
                loss = model(batch).square().mean()
                loss.backward()
                optimizer.step()
                optimizer.zero_grad()
                run.step_done(loss)
        assert saved(disk / "a") == [2, 4, 6, 8, 10, 12]
        assert len(manifest.steps(disk / "a")) == 2
        assert (
            "the checkpoint of step 2 was deleted earlier than its retention says; "
            "the loop continues" in capsys.readouterr().err
        )


@pytest.mark.slow
def test_ranks_that_save_together_trade_together(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    task = write_task(tmp_path)
    changes = (
        "train.threads=1",
        "train.batch=4",
        "checkpoint.every='2 steps'",
        f"task.width={WIDTH}",
        "layout.shard=2",
        "layout.zero_stage=2",
        "optim.name=adamw",
    )
    with mounted(tmp_path / "disk", TWO_OF_THREE) as disk:
        words = [word for change in changes for word in ("--set", change)]
        assert (
            call(
                monkeypatch,
                "train",
                task,
                *words,
                "--steps",
                "12",
                "--ranks",
                "2",
                "--run",
                str(disk / "a"),
                "--quiet",
            )
            == 0
        )
        assert saved(disk / "a")[-1] == 12
        assert faults(disk / "a", "full-disk")
        assert faults(disk / "a", "storage") == []
        assert all_verify(disk / "a")


# ---- a run that cannot save


@pytest.mark.parametrize(("limit", "steps"), [("0.01 s", 4), ("never", 40), ("6 h", 40)])
def test_a_run_whose_saves_are_all_refused_for_long_ends(
    limit: str, steps: int, tmp_path: Path
) -> None:
    with mounted(tmp_path / "disk", "size=8M") as disk:
        run, done = disk / "a", []
        with (
            pytest.raises(StorageError) as raised,
            Run(wide(40, max_unsaved=limit), Wide(), folder=run, quiet=True) as opened,
        ):
            for report in opened.steps():
                done.append(report.step)
                if report.step == 1:
                    fill(disk, leaving=1 << 19)
        end = end_of(run)
        assert (end.outcome, end.exit_code) == ("failed", 5)
        assert (done[-1] <= 8) == (steps == 4)
        is_over = "no checkpoint could be written for 10 ms, from step 2 to step" in str(
            raised.value
        )
        assert is_over == (steps == 4)
        # the last one is tried twice
        told = [fault.step for fault in faults(run, "storage") if fault.step < 40]
        assert told == sorted(set(told))
        hint = raised.value.hint or ""
        assert hint.startswith("free some space, and run the same command again: it starts again")
        if is_over:
            assert "checkpoint.max_unsaved" in hint


def test_a_save_between_two_that_are_refused_begins_the_time_anew(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    now = [0.0]
    monkeypatch.setattr("time.monotonic", lambda: now[0])
    patience, full = (
        Patience(10.0),
        StorageError.of(
            OSError(errno.ENOSPC, "No space left on device"), "step 2 could not be saved"
        ),
    )
    patience.on_failed(full, 2, 0)
    now[0] = 9.0
    patience.on_failed(full, 4, 0)
    patience.on_saved()
    now[0] = 12.0
    patience.on_failed(full, 6, 0)
    now[0] = 23.0
    with pytest.raises(StorageError, match="from step 6 to step 8") as raised:
        patience.on_failed(full, 8, 0)
    assert patience.is_over(raised.value)
    with pytest.raises(StorageError, match="from step 6 to step 8"):
        patience.on_failed(raised.value, 8, 0)


@pytest.mark.parametrize("value", ["5 steps", "0 s", "soon", 3])
def test_a_limit_that_is_no_time_is_refused(value: Any) -> None:
    with pytest.raises(SpecError, match="max_unsaved"):
        wide(2, max_unsaved=value)
