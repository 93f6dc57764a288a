"""Running, stuck, dead or unknown: what can be known of a run from outside.

Of real processes that hold its lock.
"""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from surefoot.contract import runlock
from surefoot.control.diagnose import Health, find_health
from surefoot.core.place import child_environment
from tests.cli import past_runs as past
from tests.cli.conftest import Command, surefoot

__all__ = ["surefoot"]
ROOT = Path(__file__).resolve().parents[2]
HERE = {"rank": 0, "world_size": 1, "host": socket.gethostname()}
LAST_S = past.BEGAN_S + 120
HOLD = """
import sys, time
from pathlib import Path
from surefoot.contract.runlock import RunLock
lock = RunLock(Path(sys.argv[1]), after=int(sys.argv[2]))
print("held", flush=True)
time.sleep(600)
"""


def hold(folder: Path, after: int = 0) -> subprocess.Popen[str]:
    """Another process that holds the lock of the run in `folder`."""
    process = subprocess.Popen(
        [sys.executable, "-c", HOLD, str(folder), str(after)],
        env={**child_environment(threads=1), "PYTHONPATH": str(ROOT)},
        stdout=subprocess.PIPE,
        text=True,
    )
    assert process.stdout is not None
    assert process.stdout.readline() == "held\n"
    return process


@pytest.fixture
def run(tmp_path: Path) -> Path:
    return past.write(
        tmp_path / "run", [past.started(place=HERE), past.step(10, 1.0), past.step(20, 0.5)]
    )


@pytest.fixture
def holder(run: Path) -> Iterator[subprocess.Popen[str]]:
    process = hold(run)
    yield process
    process.kill()
    process.wait()
    assert process.stdout is not None
    process.stdout.close()


def judge(run: Path, *, age_s: float = 10.0, **how: Any) -> Health:
    from surefoot.contract import events

    return find_health(runlock.find_owner(run), list(events.read(run)), now_s=LAST_S + age_s, **how)


def test_a_run_whose_process_lives_is_running_with_its_process_host_and_age(
    run: Path, holder: subprocess.Popen[str]
) -> None:
    found = judge(run)
    assert (found.state, found.lock, found.process, found.host) == (
        "running",
        True,
        holder.pid,
        socket.gethostname(),
    )
    assert (found.last_s, found.age_s, found.is_in_order) == (LAST_S, 10.0, True)


def test_a_run_whose_process_was_killed_is_dead(run: Path, holder: subprocess.Popen[str]) -> None:
    holder.send_signal(signal.SIGKILL)
    holder.wait()
    found = judge(run)
    assert (found.state, found.lock, found.process, found.is_in_order) == (
        "dead",
        False,
        holder.pid,
        False,
    )


@pytest.mark.parametrize(
    ("age_s", "limit_s", "state"),
    [
        (299.0, None, "running"),
        (301.0, None, "stuck"),
        (11.0, 10.0, "stuck"),
        (9.0, 10.0, "running"),
        (301.0, 400.0, "running"),
    ],
)
def test_a_run_that_writes_nothing_for_far_longer_than_before_is_stuck(
    age_s: float, limit_s: float | None, state: str, run: Path, holder: subprocess.Popen[str]
) -> None:
    found = judge(run, age_s=age_s, stuck_after_s=limit_s)
    assert (found.state, found.lock, found.process) == (state, True, holder.pid)


def test_a_run_of_slow_records_is_given_five_of_them(
    run: Path, holder: subprocess.Popen[str]
) -> None:
    with (run / "events.jsonl").open("a") as log:
        log.write(past.step(220, 0.1).as_line())  # 200 s after the one before
    assert [judge(run, age_s=200.0 + age_s).state for age_s in (990.0, 1010.0)] == [
        "running",
        "stuck",
    ]


def test_what_another_host_runs_is_unknown_here_unless_its_end_is_recorded(run: Path) -> None:
    owner = {
        "generation": 1,
        "process": 7,
        "host": "node-b",
        "boot": "another",
        "since_s": past.BEGAN_S,
    }
    (run / runlock.FILE).write_text(json.dumps(owner))
    found = judge(run)
    assert (found.state, found.lock, found.process, found.host, found.is_in_order) == (
        "unknown",
        None,
        7,
        "node-b",
        False,
    )
    assert "process 7 on node-b" in found.words
    with (run / "events.jsonl").open("a") as log:
        log.write(past.ended(20).as_line())
    assert judge(run).state == "finished"


def test_a_container_of_this_kernel_is_no_other_host(run: Path) -> None:
    (run / runlock.FILE).write_text(
        json.dumps({"generation": 1, "process": 7, "host": "pod", "boot": runlock.read_boot_id()})
    )
    assert judge(run).state == "dead"


def test_the_lock_of_another_users_process_that_cannot_be_opened_is_unknown(run: Path) -> None:
    (run / runlock.FILE).symlink_to(run / "events.jsonl")
    assert judge(run).state == "unknown"


@pytest.mark.parametrize(
    "text",
    [
        "",
        "[]",
        '{"process": "x", "host": 3, "since_s": -1, "boot": []}',
        "\0" * 64,
        '{"generation": tr',
    ],
)
def test_a_damaged_lock_file_is_no_error(text: str, run: Path) -> None:
    (run / runlock.FILE).write_text(text)
    assert (judge(run).state, judge(run).process) == ("dead", None)


def test_an_attempt_that_has_the_lock_and_no_record_yet_is_running(run: Path) -> None:
    with (run / "events.jsonl").open("a") as log:
        log.write(past.ended(20, "interrupted").as_line())
    assert judge(run).state == "interrupted"
    process = hold(run, after=1)
    try:
        assert (judge(run).state, judge(run).process) == ("running", process.pid)
    finally:
        process.kill()
        process.communicate()


def test_an_attempt_that_begins_after_the_lock_was_looked_at_is_running(run: Path) -> None:
    before = runlock.find_owner(run)
    assert (
        find_health(before, [past.started(), past.step(10, 1.0)], now_s=LAST_S).state == "unknown"
    )
    (run / runlock.FILE).write_text(
        json.dumps({"generation": 1, "process": 7, "host": socket.gethostname()})
    )
    before = runlock.find_owner(run)
    assert (
        find_health(
            before, [past.started(place=HERE), past.started(2, place=HERE)], now_s=LAST_S
        ).state
        == "running"
    )


def test_a_clock_that_was_set_back_makes_no_run_stuck_and_its_age_is_not_known(
    run: Path, holder: subprocess.Popen[str]
) -> None:
    found = judge(run, age_s=-90_000.0)
    assert (found.state, found.age_s) == ("running", None)
    assert "n/a (the clock was set back)" in found.words


@pytest.mark.parametrize(
    ("outcome", "code"),
    [("finished", 0), ("stopped", 0), ("interrupted", 1), ("failed", 1), (None, 1), ("running", 0)],
)
def test_one_command_says_the_state_and_its_exit_code_whether_somebody_is_needed(
    outcome: str | None, code: int, surefoot: Command, tmp_path: Path
) -> None:
    records = [
        past.started(place=HERE),
        past.step(10, 1.0),
        *([past.ended(10, outcome)] if outcome in past.OUTCOMES else []),
    ]
    run = past.write(tmp_path / "run", records)
    process = hold(run) if outcome == "running" else None
    try:
        how = ("show", run, "--health", "--stuck-after", "1000000 h")
        state = outcome or "dead"
        answer = surefoot(*how)
        assert (answer.code, answer.err) == (code, "")
        assert f": {state} at step 10 of 40; " in answer.out
        row = surefoot(*how, "--json").row
        assert (row["state"], row["steps"], row["lock"]) == (
            state,
            10,
            "held" if process else "free",
        )
        assert surefoot("show", run, "--json", "--stuck-after", "1000000 h").row["state"] == state
        assert surefoot("runs", tmp_path, "--json").row["runs"][0]["process"] == (
            process.pid if process else None
        )
    finally:
        if process is not None:
            process.kill()
            process.communicate()


def test_a_process_that_stands_still_is_stuck(
    surefoot: Command, run: Path, holder: subprocess.Popen[str]
) -> None:
    os.kill(holder.pid, signal.SIGSTOP)
    answer = surefoot("show", run, "--health", "--stuck-after", "1 s")
    assert answer.code == 1
    assert f"process {holder.pid} on {socket.gethostname()} holds run.lock" in answer.out
    # five minutes after its last record, whatever the time is now
    assert "stuck" in surefoot("runs", run).out


@pytest.mark.parametrize("text", ["5", "10 steps", "-1 s", "soon"])
def test_what_is_no_time_is_refused(text: str, surefoot: Command, run: Path) -> None:
    answer = surefoot("show", run, "--health", f"--stuck-after={text}")
    assert answer.code == 2
    assert "--stuck-after" in answer.err
    assert "--stuck-after 10min" in answer.err
