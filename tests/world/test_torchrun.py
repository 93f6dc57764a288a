"""The ranks of torchrun: the numbers of our own supervisor's.

What follows when one is killed, and none of them without it.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from surefoot.components.data import consumed
from surefoot.contract import events, manifest
from tests.world.test_launch import SLOW, environment, processes_of, wait_for_step

STEPS = 160
GONE_S = 60.0  # ranks outlive their launcher by far less on a machine with nothing else to do


def command(folder: Path, *more: str) -> list[str]:
    (folder / "slow.py").write_text(SLOW)
    return [
        sys.executable,
        "-m",
        "torch.distributed.run",
        "--standalone",
        "--nproc-per-node",
        "2",
        *more,
        "-m",
        "--",
        "surefoot",
        "train",
        str(folder / "slow.py:Slow"),
        "--run",
        str(folder / "run"),
        "--steps",
        str(STEPS),
        "--quiet",
        "--set",
        'checkpoint.every="4 steps"',
        "--set",
        'evaluate.every="99 epochs"',
        "--set",
        "observe.tensorboard=false",
    ]


def ranks_of(folder: Path) -> dict[int, psutil.Process]:
    """Those of the newest attempt, by rank."""
    return {
        int(each.environ()["RANK"]): each
        for each in processes_of(folder)
        if "RANK" in each.environ()
    }


def check_the_end(folder: Path) -> None:
    assert manifest.steps(folder / "run")[-1] == STEPS
    assert events.is_finished(folder / "run")
    assert consumed.check(folder / "run").holds  # every sample once, whatever came between


@pytest.mark.slow
def test_ranks_end_with_a_torchrun_that_is_killed_and_the_same_command_goes_on(
    tmp_path: Path,
) -> None:
    words = command(tmp_path)
    with subprocess.Popen(words, env=environment(), stderr=subprocess.DEVNULL) as agent:
        wait_for_step(tmp_path, agent)
        begun = ranks_of(tmp_path)
        assert set(begun) == {0, 1}
        agent.send_signal(signal.SIGKILL)
    until_s = time.monotonic() + GONE_S
    while (left := processes_of(tmp_path)) and time.monotonic() < until_s:
        time.sleep(0.02)
    assert left == []
    assert manifest.steps(tmp_path / "run")[-1] < STEPS
    done = subprocess.run(
        words, env=environment(), capture_output=True, text=True, check=False, timeout=600
    )
    assert done.returncode == 0, done.stderr
    check_the_end(tmp_path)


@pytest.mark.slow  # imports torch in five processes
def test_torchrun_begins_all_anew_when_a_rank_is_killed_and_they_go_on(tmp_path: Path) -> None:
    with subprocess.Popen(
        command(tmp_path, "--max-restarts", "1"), env=environment(), stderr=subprocess.DEVNULL
    ) as agent:
        wait_for_step(tmp_path, agent)
        os.kill(ranks_of(tmp_path)[1].pid, signal.SIGKILL)
        assert agent.wait(120) == 0
    assert processes_of(tmp_path) == []
    check_the_end(tmp_path)
    assert (
        len([each for each in events.read(tmp_path / "run") if isinstance(each, events.Started)])
        == 2
    )
