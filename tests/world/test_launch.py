"""The supervisor of the ranks of one host, at the command line.

One run, whatever happens to a rank or to it.
"""

from __future__ import annotations

import json
import os
import shlex
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from surefoot.components.data import consumed
from surefoot.contract import manifest
from tests.cli.forked_commands import run_forked
from tests.world.launched import Supervised

ROOT = Path(__file__).resolve().parents[2]
SLOW = '''
import os, signal, time
from pathlib import Path
import torch
from surefoot.tasks.digits import Digits as Plain

class Slow(Plain):
    """Digits, a little slower, so that a signal finds it at work.

    `fails` soon after an attempt's first checkpoint, or early, before there is one.
    """

    def __init__(self, fails: str = "") -> None:
        super().__init__()
        self.fails, self.calls, self.found = fails, 0, self.checkpoints()

    def checkpoints(self) -> int:
        return len(list(Path(__file__).parent.glob("run/*/step-*/manifest.json")))

    def loss(self, output, batch):
        if torch.is_grad_enabled():
            time.sleep(0.02)
            kind, rank, early = (*self.fails.split(), "", "", "")[:3]
            self.calls += bool(early) or self.checkpoints() > self.found
            if kind and os.environ.get("RANK", "0") == rank and self.calls == 4:
                if kind == "raises":
                    raise ValueError("planted")
                if kind == "leaves":
                    os._exit(0)
                os.kill(os.getpid(), signal.SIGKILL)
        return super().loss(output, batch)
'''


def command(tmp_path: Path, *more: str, ranks: int = 2) -> list[str]:
    tmp_path.mkdir(exist_ok=True)
    (tmp_path / "slow.py").write_text(SLOW)
    return [
        sys.executable,
        "-P",
        "-m",
        "surefoot",
        "train",
        str(tmp_path / "slow.py:Slow"),
        "--ranks",
        str(ranks),
        "--run",
        str(tmp_path / "run"),
        "--set",
        'checkpoint.every="4 steps"',
        "--set",
        'evaluate.every="99 epochs"',
        "--set",
        "observe.tensorboard=false",
        *more,
    ]


def environment() -> dict[str, str]:
    return {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}


def processes_of(tmp_path: Path) -> list[psutil.Process]:
    found = []
    for process in psutil.process_iter():
        try:
            if (
                str(tmp_path) in " ".join(process.cmdline())
                and process.status() != psutil.STATUS_ZOMBIE
            ):
                found.append(process)
        except psutil.Error:
            continue
    return found


def wait_for_step(tmp_path: Path, supervisor: subprocess.Popen[bytes]) -> None:
    """Until a commit is there: the run is in the middle of its steps."""
    until_s = time.monotonic() + 60
    while not manifest.steps(tmp_path / "run"):
        assert supervisor.poll() is None, "it ended before its first commit"
        assert time.monotonic() < until_s
        time.sleep(0.05)


@pytest.mark.slow
def test_ranks_train_and_rank_0_alone_prints(tmp_path: Path) -> None:
    done = subprocess.run(
        command(tmp_path, "--steps", "12", "--json"),
        env=environment(),
        capture_output=True,
        text=True,
        check=False,
        timeout=600,
    )
    assert done.returncode == 0, done.stderr
    row = json.loads(done.stdout)
    assert (row["step"], row["task"]) == (12, "slow")
    assert "[rank 1]" not in done.stderr
    assert consumed.check(tmp_path / "run").holds


@pytest.mark.parametrize(
    ("fails", "code", "said"),
    [
        (
            "raises 1",
            3,
            (
                "[rank 1] error: rank 1 of 2, step ",
                "ValueError: planted",
                "error: rank 1 of 2 ended with exit code 3",
            ),
        ),
        pytest.param(
            "dies 1",
            137,
            (
                "error: rank 1 of 2 was ended by SIGKILL",
                "hint: the same command resumes after the newest checkpoint",
            ),
            marks=pytest.mark.slow,  # as those of test_kills and test_hang, without the command
        ),
        pytest.param(
            "dies 0", 137, ("error: rank 0 of 2 was ended by SIGKILL",), marks=pytest.mark.slow
        ),
    ],
)
def test_a_rank_that_fails_ends_the_run_and_is_named(
    fails: str, code: int, said: tuple[str, ...], tmp_path: Path
) -> None:
    words = command(
        tmp_path, "--steps", "60", "--max-restarts", "0", "--set", f'task.fails="{fails}"'
    )
    broken = subprocess.run(
        words, env=environment(), capture_output=True, text=True, check=False, timeout=600
    )
    assert broken.returncode == code, broken.stderr
    for each in said:
        assert each in broken.stderr
    assert "Traceback" not in broken.stderr
    assert "ranks restart," not in broken.stderr
    assert processes_of(tmp_path) == []
    assert manifest.steps(tmp_path / "run")[-1] >= 4


@pytest.mark.slow  # test_kills.py kills at any time; this one is the command
def test_a_run_of_which_ranks_are_killed_goes_on_by_itself_to_the_end_of_the_unbroken_one(
    tmp_path: Path,
) -> None:
    """Rank 1 is killed in each attempt that takes so many steps.

    What each attempt brought is kept.
    """
    whole = command(tmp_path / "whole", "--steps", "13", "--quiet")
    killed = command(
        tmp_path / "killed", "--steps", "13", "--quiet", "--set", 'task.fails="dies 1"'
    )
    done = [
        subprocess.run(
            each, env=environment(), capture_output=True, text=True, check=False, timeout=600
        )
        for each in (whole, killed)
    ]
    assert [each.returncode for each in done] == [0, 0], done[1].stderr
    assert done[1].stderr.count("all 2 ranks restart, after step ") >= 1
    runs = [tmp_path / name / "run" for name in ("whole", "killed")]
    assert consumed.check(runs[1]).holds
    one, other = (manifest.read(manifest.step_folder(run, 13)) for run in runs)
    digests = [
        {each.name: each.sha256 for each in found.files if each.name.endswith(".safetensors")}
        for found in (one, other)
    ]
    assert digests[0] == digests[1]


def test_attempts_without_a_commit_come_to_an_end(tmp_path: Path) -> None:
    def job(rank: int) -> int:
        os.kill(os.getpid(), signal.SIGKILL)
        return 0

    supervised = Supervised(job, 2, tmp_path / "ranks", run=tmp_path / "run", max_restarts=1)
    assert supervised.wait() == 137
    assert supervised.said.count("all 2 ranks restart, from the start") == 1
    assert (
        "error: 2 consecutive attempts ended like this without a new checkpoint" in supervised.said
    )


@pytest.mark.slow
def test_a_supervisor_that_is_killed_leaves_no_rank_and_the_run_goes_on_with_another_number_of_them(
    tmp_path: Path,
) -> None:
    words = command(tmp_path, "--steps", "60", "--quiet")
    supervisor = subprocess.Popen(
        words, env=environment(), stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
    )
    wait_for_step(tmp_path, supervisor)
    supervisor.kill()
    supervisor.wait()
    until_s = time.monotonic() + 60
    while processes_of(tmp_path):
        assert time.monotonic() < until_s, "a rank outlives its supervisor"
        time.sleep(0.05)
    resumed = command(tmp_path, "--steps", "60", "--quiet", ranks=3)
    done = subprocess.run(
        resumed, env=environment(), capture_output=True, text=True, check=False, timeout=600
    )
    assert done.returncode == 0, done.stderr
    checked = consumed.check(tmp_path / "run")
    assert checked.holds, checked.faults
    assert checked.last == 60


@pytest.mark.slow
@pytest.mark.parametrize("name", ["SIGTERM", "SIGINT"])
def test_a_signal_to_every_process_ends_all_ranks_after_a_step_that_is_saved(
    name: str, tmp_path: Path
) -> None:
    """As a scheduler sends it, and to the one that forks the ranks too.

    They would be killed with it.
    """
    number = getattr(signal, name)
    supervisor = subprocess.Popen(
        command(tmp_path, "--steps", "2000"),
        env=environment(),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )
    wait_for_step(tmp_path, supervisor)
    others = [each for each in processes_of(tmp_path) if each.pid != supervisor.pid]
    assert len(others) == 3  # two ranks
    for each in sorted(others, key=lambda each: each.name().startswith("surefoot:")):
        each.send_signal(number)
    supervisor.send_signal(number)
    out, err = supervisor.communicate(timeout=600)
    assert supervisor.returncode == 128 + number, err.decode()
    assert "interrupted" in out.decode()
    assert processes_of(tmp_path) == []
    last = manifest.steps(tmp_path / "run")[-1]
    assert consumed.check(tmp_path / "run").last == last


@pytest.mark.parametrize(
    ("is_well", "shell"),
    [
        # a daemon starts it: the socket at which they meet would be number 0, which the ranks have
        # on nothing
        (
            'test "$RANK" = 1 || test -S /proc/self/fd/${SUREFOOT_FORKS-$SUREFOOT_LISTENS}',
            "exec {} <&-",
        ),
        # an installed `surefoot` does not look in the working folder for modules, nor do its ranks
        ('test "$1" = -P', "exec {}"),
    ],
)
def test_ranks_begin_as_their_command_did_wherever_it_was_started(
    is_well: str, shell: str, tmp_path: Path
) -> None:
    rank = tmp_path / "python"
    # what does not fork them is not asked again
    rank.write_text(f"#!/bin/sh\n{is_well} || touch ill\ntest -z $SUREFOOT_FORKS\n")
    rank.chmod(0o755)
    script = (
        f"import sys; sys.path[0], sys.executable = '/nowhere', {str(rank)!r}; "
        "from surefoot.control.launch import launch; "
        "from surefoot.control.launch.looking import Judge; "
        "sys.exit(launch([], 2, print, Judge(lambda rows: False, str)))"
    )
    words = shell.format(shlex.join([sys.executable, "-c", script]))
    done = subprocess.run(
        ["sh", "-c", words], env=environment(), cwd=tmp_path, check=False, timeout=600
    )
    assert done.returncode == 0
    assert not (tmp_path / "ill").exists()


@pytest.mark.slow  # imports torch in three processes
def test_a_failure_stays_one_where_nobody_reads_of_it(tmp_path: Path) -> None:
    words = command(tmp_path, "--steps", "60", "--quiet", "--set", 'task.fails="raises 1"')
    process = subprocess.Popen(
        words, env=environment(), stdout=subprocess.DEVNULL, stderr=subprocess.PIPE
    )
    assert process.stderr is not None
    process.stderr.close()
    assert process.wait(60) == 3


@pytest.mark.slow  # test_hang has it without the command
def test_a_rank_that_ends_as_if_the_run_were_over_is_named(tmp_path: Path) -> None:
    words = command(tmp_path, "--steps", "60", "--quiet", "--set", 'task.fails="leaves 1 early"')
    done = subprocess.run(
        words, env=environment(), capture_output=True, text=True, check=False, timeout=600
    )
    assert done.returncode == 8, done.stderr
    assert "error: rank 1 of 2 ended with exit code 0" in done.stderr


@pytest.mark.parametrize(
    ("words", "variables", "said"),
    [
        (("--ranks", "0"), {}, "error: --ranks must be N or MIN:MAX"),
        (
            ("--ranks", "2", "--set", "layout.replicate=3"),
            {},
            "error: layout.replicate is 3, but there are 2 ranks",
        ),
        (
            ("--ranks", "1000"),
            {},
            (
                "error: a batch of 64 has 64 microbatches for 1000 ranks\n"
                "hint: use fewer ranks, or batches of 1000"
            ),
        ),
        pytest.param(
            (),
            {"RANK": "0"},
            "error: RANK is 0, and WORLD_SIZE is not set",
            marks=pytest.mark.slow,
        ),
        (
            ("--ranks", "2"),
            {"RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "localhost", "MASTER_PORT": "29500"},
            "error: --ranks was given to a process that is already a rank",
        ),
        (
            (),
            {"RANK": "0", "WORLD_SIZE": "2"},
            "error: MASTER_ADDR is not set, but WORLD_SIZE is 2",
        ),
        pytest.param(
            (),
            {"RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "localhost", "MASTER_PORT": "x"},
            "error: the variable MASTER_PORT is 'x', not a whole number\n"
            "hint: a port is a number from 1 to 65535",
            marks=pytest.mark.slow,
        ),
        (
            (),
            {
                "RANK": "1",
                "WORLD_SIZE": "2",
                "MASTER_ADDR": "nowhere.invalid",
                "MASTER_PORT": "29500",
            },
            "error: MASTER_ADDR is nowhere.invalid, which cannot be resolved on this host",
        ),
    ],
)
def test_what_cannot_be_launched_is_told_before_any_work(
    words: tuple[str, ...], variables: dict[str, str], said: str, tmp_path: Path
) -> None:
    full = ["train", "digits", "--run", str(tmp_path / "run"), *words]
    if variables:  # what is a rank loads torch first
        done = run_forked(*full, folder=tmp_path, variables=variables)
    else:
        done = subprocess.run(
            [sys.executable, "-P", "-m", "surefoot", *full],
            env=environment(),
            capture_output=True,
            text=True,
            check=False,
            timeout=600,
        )
    assert done.returncode == 2, done.stderr
    assert said in done.stderr
    assert "Traceback" not in done.stderr
    assert not (tmp_path / "run").exists()


LEAVES = """
import atexit, glob, os, sys
names = lambda: (open(each).read().strip() for each in glob.glob("/proc/self/task/*/comm"))
atexit.register(lambda: print(sorted(names())))
import torch, torch.distributed as dist
from surefoot.core import place
from surefoot.runtime.comm.join import join
other = os.fork()  # both ranks are interpreters that end by themselves
rank = "0" if other else "1"
os.environ |= {"RANK": rank, "LOCAL_RANK": rank}
with join(place.here(), torch.device("cpu"), wait_s=120, timeout_s=20) as group:
    held = [dist.new_group([0, 1])]
    held.append(held)
    group.add(torch.ones(3))
    del held
if other:
    assert os.waitpid(other, 0)[1] == 0
"""


@pytest.mark.slow
@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="looks at its threads in /proc")
def test_no_thread_of_gloo_is_left_when_the_interpreter_ends(tmp_path: Path) -> None:
    """One that lets go of a tensor then aborts the process.

    Here a group is held by a cycle, as by the frames of an error.
    """
    with socket.socket() as held:
        held.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        held.bind(("127.0.0.1", 0))
        shared = {
            "WORLD_SIZE": "2",
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(held.getsockname()[1]),
            "PYTHONPATH": str(ROOT),
        }
        done = subprocess.run(
            [sys.executable, "-c", LEAVES],
            env={**os.environ, **shared},
            cwd=tmp_path,
            stdout=subprocess.PIPE,
            text=True,
            check=False,
            timeout=600,
        )
    assert done.returncode == 0
    assert len(done.stdout.splitlines()) == 2
    assert "pt_gloo_runloop" not in done.stdout


def test_more_ranks_than_files_may_be_open_for_are_refused_in_words(tmp_path: Path) -> None:
    train = [
        sys.executable,
        "-P",
        "-m",
        "surefoot",
        "train",
        "digits",
        "--ranks",
        "40",
        "--steps",
        "60",
        "--quiet",
    ]
    words = f"ulimit -n 48; exec {shlex.join([*train, '--run', str(tmp_path / 'run')])}"
    done = subprocess.run(
        ["sh", "-c", words],
        env=environment(),
        capture_output=True,
        text=True,
        check=False,
        timeout=600,
    )
    assert done.returncode == 2, done.stderr
    assert "--ranks is 40: the limit of open files is too low for that many ranks" in done.stderr
    assert "ulimit -n" in done.stderr
    assert "Traceback" not in done.stderr
    assert processes_of(tmp_path) == []
