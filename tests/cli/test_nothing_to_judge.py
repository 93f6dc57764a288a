"""A verdict over nothing is none.

What could not be looked at is said, with an exit code that is not 0.
"""

from __future__ import annotations

import shutil
import tarfile
from pathlib import Path

import numpy as np
import pytest

from surefoot.cli.look import past, side_by_side
from surefoot.core.errors import TaskError
from surefoot.prove.verify import _compare
from surefoot.trial import check_finite
from tests.cli.conftest import Command
from tests.train.small import FEW, write_task

NAN, INF = float("nan"), float("inf")


@pytest.fixture
def run(surefoot: Command, tmp_path: Path) -> Path:
    done = surefoot("train", write_task(tmp_path), *FEW, "--run", "run", "--quiet")
    assert done.code == 0, done.err
    return tmp_path / "run"


@pytest.mark.parametrize("members", [[], ["folder"], ["folder", "folder/deeper"]])
def test_tars_without_a_sample_are_not_called_whole(
    members: list[str], tmp_path: Path, surefoot: Command
) -> None:
    with tarfile.open(tmp_path / "0.tar", "w") as tar:
        for name in members:
            member = tarfile.TarInfo(name)
            member.type = tarfile.DIRTYPE
            tar.addfile(member)
    answer = surefoot("data", "check", tmp_path / "0.tar", "--json")
    assert answer.code in (1, 2)
    assert answer.code == 2 or not answer.row["ok"]


@pytest.mark.parametrize("damage", ["gone", "line", "empty"])
def test_commits_are_not_all_there_where_the_log_does_not_say_which_should_be(
    damage: str, run: Path, surefoot: Command
) -> None:
    log = run / "events.jsonl"
    if damage == "gone":
        log.unlink()
    elif damage == "empty":
        log.write_text("")
    else:
        log.write_text(log.read_text().replace('"kind": "committed"', '"kind": "com', 1))
    answer = surefoot("checkpoint", "check", run, "--json")
    assert answer.err.startswith("warning: missing checkpoints cannot be detected: ")
    assert answer.row["log_unread"]


def test_a_run_without_a_commit_is_whole_as_far_as_it_goes(run: Path, surefoot: Command) -> None:
    assert surefoot("check", run).out.endswith("the run folder is whole\n")
    log = run / "events.jsonl"
    log.write_text(
        "".join(
            line for line in log.read_text().splitlines(keepends=True) if '"committed"' not in line
        )
    )
    shutil.rmtree(run / "checkpoints")
    answer = surefoot("check", run)
    assert answer.out.endswith(
        "spec, log and ledger are whole; there is no checkpoint, and the log names none\n"
    )


def test_what_no_run_has_recorded_is_not_called_equal(run: Path, surefoot: Command) -> None:
    log = run / "events.jsonl"
    first, rest = log.read_text().split("\n", 1)
    start = past.read(run).started
    assert start.code_digest
    log.write_text(f"{first.replace(start.code_digest, '')}\n{rest}")
    shutil.copytree(run, run.with_name("other"))
    found = [past.read(each) for each in (run, run.with_name("other"))]
    assert "code" in side_by_side.find_unrecorded(found)
    answer = surefoot("compare", run, run.with_name("other"))
    assert (
        "what is recorded of versions, machine, code and data is equal; "
        "not recorded, and not compared: code" in answer.out
    )


@pytest.mark.parametrize(
    "losses", [{}, {"loss/1": [NAN]}, {"loss/1": [NAN], "loss/2": [INF]}, {"gradient/1/a": [1.0]}]
)
def test_losses_that_are_not_finite_prove_nothing(losses: dict[str, list[float]]) -> None:
    with pytest.raises(TaskError, match="so there is nothing to compare"):
        check_finite({name: np.array(values) for name, values in losses.items()}, "one process")


@pytest.mark.parametrize("losses", [{"loss/1": [1.0]}, {"loss/1": [NAN], "loss/2": [0.5]}])
def test_one_finite_loss_can_be_compared(losses: dict[str, list[float]]) -> None:
    check_finite({name: np.array(values) for name, values in losses.items()}, "one process")


def test_a_trace_that_lacks_steps_is_not_the_same(tmp_path: Path) -> None:
    row = '{{"step": {}, "loss": 1.0, "digests": {{}}}}\n'
    (tmp_path / "whole.trace").write_text("".join(map(row.format, range(1, 5))))
    (tmp_path / "other.trace").write_text("".join(map(row.format, range(1, 3))))
    apart = _compare(tmp_path / "whole", tmp_path / "other", cause=str)
    assert apart is not None
    assert (apart.step, apart.component) == (3, "the number of steps")


@pytest.mark.slow
def test_a_task_whose_losses_are_all_nan_is_not_verified(tmp_path: Path, surefoot: Command) -> None:
    use = write_task(tmp_path, change=("# LOSS", "output = output * float('nan')"))
    answer = surefoot(
        "verify", use, "--steps", "4", "--kills", "1", "--quiet", "--set", "stability.max_skips=100"
    )
    assert answer.code == 2, answer.err
    assert "no step of 4 has a finite loss" in answer.err
    assert "verdict" not in answer.out


@pytest.mark.slow
def test_a_ladder_none_of_whose_rungs_is_measured_says_so(
    tmp_path: Path, surefoot: Command
) -> None:
    use = write_task(tmp_path)
    words = (
        "--rungs",
        "channels last",
        "--samples",
        "64",
        "--pairs",
        "1",
        "--out",
        tmp_path / "ladder",
        "--quiet",
    )
    answer = surefoot("ladder", use, *words, "--set", "train.length=60 steps")
    assert answer.code == 2, answer.err
    assert "error: no rung was measured: channels last: " in answer.err
    assert (tmp_path / "ladder" / "ladder.md").is_file()
