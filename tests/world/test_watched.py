"""Ranks that torchrun, or plain variables, started.

Who keeps the others waiting is named as under `--ranks`, and all end with 8.
"""

from __future__ import annotations

import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from surefoot.contract import events, manifest
from surefoot.core import flight, place
from surefoot.core.errors import LostRank
from surefoot.runtime.comm import watched as watching
from surefoot.runtime.comm.group import Group
from surefoot.runtime.comm.watched import watched
from tests.train.small import faults_of
from tests.world.launched import forked, is_alive, speak
from tests.world.ranks import together as with_group
from tests.world.test_hang import NAMED, Hangs
from tests.world.test_launch import environment, processes_of
from tests.world.test_run import Sentences, spec, train

GENEROUS_S, STALL_S, LATE_S = 120.0, 2.0, 12.0
LONGER = ("computes", "barrier", "disk")


def run_plain_ranks(job: Callable[[int], Any], folder: Path) -> tuple[list[int], str]:
    """The exit codes of two ranks that do `job(rank)`, and what they wrote.

    They are begun by plain variables, and none is left.
    """
    folder.mkdir(parents=True, exist_ok=True)
    with socket.create_server(("127.0.0.1", 0), backlog=10) as meeting:
        pids = [_fork(rank, job, meeting, folder) for rank in range(2)]
    codes: dict[int, int] = {}
    until_s = time.monotonic() + GENEROUS_S
    while len(codes) < 2 and time.monotonic() < until_s:
        for rank, pid in enumerate(pids):
            if rank not in codes and (done := os.waitpid(pid, os.WNOHANG))[0]:
                codes[rank] = os.waitstatus_to_exitcode(done[1])
        time.sleep(0.01)
    for rank, pid in enumerate(pids):
        if rank not in codes:
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)
    said = (folder / "said").read_text(errors="replace")
    assert len(codes) == 2, f"ranks were still there after {GENEROUS_S} s: {codes}\n{said}"
    return [codes[0], codes[1]], said


def _fork(rank: int, job: Callable[[int], Any], meeting: socket.socket, folder: Path) -> int:
    def begin() -> int:
        said = os.open(folder / "said", os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
        speak(said, said)
        os.environ |= {
            "RANK": str(rank),
            "WORLD_SIZE": "2",
            "LOCAL_RANK": str(rank),
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(meeting.getsockname()[1]),
        }
        if rank:
            meeting.close()
        else:
            os.environ[place.LISTENS] = str(meeting.fileno())
        torch.set_num_threads(1)
        job(rank)
        return 0

    return forked(begin)


def find_watchers(parents: set[int]) -> list[int]:
    """Processes that watch ranks, and that one of these ranks started."""
    found = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            words = path.read_bytes().rstrip(b"\0").split(b"\0")
        except OSError:
            continue
        if (
            b"surefoot.cli.watch" in words
            and json.loads(words[-1])["parent"] in parents
            and is_alive(int(path.parent.name))
        ):
            found.append(int(path.parent.name))
    return found


@pytest.mark.quick("branch", "stopped")
@pytest.mark.parametrize(
    "kind",
    [
        pytest.param(kind, marks=pytest.mark.slow if kind in LONGER else ())
        for kind in (*LONGER, "data", "branch", "stopped")
    ],
)
def test_what_holds_up_the_others_is_named_where_no_supervisor_looks_on(
    kind: str, tmp_path: Path
) -> None:
    """Data, uneven work, another branch, a barrier, a disk, a stopped rank.

    The words are those of the supervisor.
    """

    def job(rank: int) -> None:
        train(
            tmp_path / "run",
            Hangs(kind, tmp_path),
            spec(train={"length": "40 steps"}, layout={"hang_timeout": STALL_S}),
        )

    codes, said = run_plain_ranks(job, tmp_path / "ranks")
    assert codes == [8, -signal.SIGKILL if kind == "stopped" else 8], said
    assert all(each in said for each in NAMED[kind]), said
    assert said.count("hint: all ranks were stopped") == 1, said  # one of them says it
    assert "Traceback" not in said
    is_unlike = kind in ("branch", "barrier")  # a collective that only rank 1 calls
    check_record(tmp_path / "run", "different-collectives" if is_unlike else "hang", said)


def check_record(run: Path, kind: str, said: str) -> None:
    """Check that the log has one record of a hang, with the words of the error."""
    until_s = time.monotonic() + GENEROUS_S
    # on a busy machine, a rank may be a straggler before
    while (
        not (found := [each for each in faults_of(run) if each.fault != "straggler"])
        and time.monotonic() < until_s
    ):
        time.sleep(0.05)  # the process that watches writes it after the ranks have ended
    (fault,) = found
    assert fault.fault == kind
    assert (fault.rank, fault.generation) == (0 if kind == "different-collectives" else 1, 1)
    assert fault.step >= 1
    assert "rank 1" in fault.detail
    assert f"error: {fault.detail}\n" in said


class Slow:
    """State whose saving takes a while once: longer than ranks may keep each other waiting."""

    takes_s = 0.0

    def state_dict(self) -> dict[str, int]:
        takes_s, self.takes_s = self.takes_s, 0.0
        time.sleep(takes_s)
        return {}

    def load_state_dict(self, state: dict[str, int]) -> None: ...


class Saves(Sentences):
    """Rank 1 is slow to save its state.

    In the save that follows on its ninth pass, in the fifth step.
    """

    state_on_ranks = {"slow": "per_rank"}  # noqa: RUF012

    def __init__(self, takes_s: float) -> None:
        self.slow, self.takes_s, self.calls = Slow(), takes_s, 0

    def state(self) -> dict[str, Any]:
        return {"slow": self.slow}

    def loss(self, output: torch.Tensor, batch: dict[str, torch.Tensor]) -> Any:
        self.calls += torch.is_grad_enabled()
        if place.here().rank == 1 and torch.is_grad_enabled() and self.calls == 9:
            self.slow.takes_s = self.takes_s
        return super().loss(output, batch)


@pytest.mark.slow
def test_a_rank_that_saves_may_take_its_time_up_to_the_deadline_of_what_ranks_do_together(
    tmp_path: Path,
) -> None:
    def job(takes_s: float, timeout_s: float, name: str) -> Callable[[int], None]:
        def train_slowly(rank: int) -> None:
            given = spec(
                train={"length": "20 steps"},
                evaluate={"every": "99 epochs"},
                layout={"hang_timeout": 1.0, "timeout": timeout_s},
            )
            train(tmp_path / name, Saves(takes_s), given)

        return train_slowly

    codes, said = run_plain_ranks(job(3.0, 60.0, "slow"), tmp_path / "a")
    assert codes == [0, 0], said
    assert manifest.steps(tmp_path / "slow")[-1] == 20
    codes, said = run_plain_ranks(job(30.0, 4.0, "hangs"), tmp_path / "b")
    assert codes[0] == 8, said
    assert "rank 1" in said


def test_a_run_that_ends_leaves_no_watch_behind(tmp_path: Path) -> None:
    def job(rank: int) -> None:
        train(
            tmp_path / "run",
            Waits(tmp_path),
            spec(train={"length": "6 steps"}, layout={"hang_timeout": LATE_S}),
        )
        assert find_watchers({os.getpid()}) == []

    codes, said = run_plain_ranks(job, tmp_path / "ranks")
    assert codes == [0, 0], said
    assert "error: " not in said
    assert (tmp_path / "watched").exists()  # there was one meanwhile


class Waits(Sentences):
    """Rank 1 comes late once: when rank 0, which waits for it, has begun to watch."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.calls = folder, 0
        (folder / f"pid-{place.here().rank}").write_text(str(os.getpid()))

    def loss(self, output: torch.Tensor, batch: dict[str, torch.Tensor]) -> Any:
        self.calls += torch.is_grad_enabled()
        if place.here().rank == 1 and torch.is_grad_enabled() and self.calls == 5:
            until_s = time.monotonic() + GENEROUS_S
            while (
                not find_watchers({int((self.folder / "pid-0").read_text())})
                and time.monotonic() < until_s
            ):
                time.sleep(0.05)
            (self.folder / "watched").touch()
        return super().loss(output, batch)


def test_ranks_of_several_hosts_say_why_they_are_not_watched(tmp_path: Path) -> None:
    def job(group: Group) -> str:
        with watched(
            group, place.Place(rank=group.rank, world_size=2, host=f"node-{group.rank}"), 1.0
        ) as why:
            return why

    assert with_group(2, job, tmp_path) == 2 * [
        "the ranks are on 2 hosts, and the supervisor watches only ranks of one host"
    ]


HANGS = '''
import os, time
from pathlib import Path
import torch
from surefoot.tasks.digits import Digits as Plain


class Hangs(Plain):
    """Digits; rank 1 hangs once, in a later step."""

    def __init__(self, kind: str, mark: str) -> None:
        super().__init__()
        self.kind, self.mark, self.calls = kind, mark, 0

    def data(self, split):
        source = super().data(split)
        return Reads(source, self) if split == "train" else source

    def is_time(self, kind, number):
        is_early = self.kind != kind or number < 40
        if os.environ.get("RANK") != "1" or is_early or Path(self.mark).exists():
            return False
        Path(self.mark).touch()
        return True

    def loss(self, output, batch):
        self.calls += torch.is_grad_enabled()
        if self.is_time("branch", self.calls):
            torch.distributed.all_reduce(torch.zeros(3))
        return super().loss(output, batch)


class Reads:
    guarantee = "proven"

    def __init__(self, source, task):
        self.source, self.task, self.digest, self.calls = source, task, source.digest, 0

    def __len__(self):
        return len(self.source)

    def describe(self):
        return self.source.describe()

    def read(self, ids):
        self.calls += 1
        if self.task.is_time("data", self.calls):
            time.sleep(1000)
        return self.source.read(ids)
'''


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "restarts", "line", "name"),
    [
        ("data", 1, "time.sleep(1000)", "read"),
        pytest.param(
            "branch",
            0,
            "torch.distributed.all_reduce(torch.zeros(3))",
            "loss",
            marks=pytest.mark.slow,
        ),
    ],
)
def test_torchrun_hears_of_a_hang_by_an_exit_code_and_its_restart_goes_on(
    kind: str, restarts: int, line: str, name: str, tmp_path: Path
) -> None:
    (tmp_path / "hangs.py").write_text(HANGS)
    done = subprocess.run(
        [
            sys.executable,
            "-m",
            "torch.distributed.run",
            "--standalone",
            "--nproc-per-node",
            "2",
            "--max-restarts",
            str(restarts),
            "-m",
            "--",
            "surefoot",
            "train",
            str(tmp_path / "hangs.py:Hangs"),
            "--run",
            str(tmp_path / "run"),
            "--steps",
            "80",
            "--set",
            f'task.kind="{kind}"',
            "--set",
            f'task.mark="{tmp_path / "mark"}"',
            "--set",
            "layout.hang_timeout=3",
            "--set",
            'checkpoint.every="4 steps"',
            "--set",
            "observe.tensorboard=false",
            "--set",
            'evaluate.every="99 epochs"',
            "--quiet",
        ],
        env=environment(),
        capture_output=True,
        text=True,
        check=False,
        timeout=300,
    )
    said = done.stderr
    (error,) = [
        each for each in said.splitlines() if "rank 1 of 2 has not come: rank 1 is in step " in each
    ]
    assert error.startswith("error: ")
    number = [each.strip() for each in HANGS.splitlines()].index(line) + 1
    assert error.endswith(f"hangs.py:{number} in {name}")
    assert "has no effect" not in said
    assert processes_of(tmp_path) == []
    if not restarts:
        assert done.returncode == 1  # torchrun's own, whatever its ranks end with
        assert re.search(r"exitcode +: 8 ", said), said
        check_record(tmp_path / "run", "different-collectives", said)
        return
    assert done.returncode == 0, said
    assert (
        "torchrun --max-restarts N restarts the ranks; "
        "with --run they resume from the newest checkpoint" in said
    )
    started = [each for each in events.read(tmp_path / "run") if isinstance(each, events.Started)]
    assert len(started) == 2
    assert started[1].first_step > 1
    assert events.is_finished(tmp_path / "run")
    check_record(tmp_path / "run", "hang", said)


@pytest.mark.parametrize("dismissed", [0, 1])
def test_a_rank_that_fails_as_a_hang_is_reported_leaves_its_record_to_the_report(
    dismissed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The error that the end of another rank causes does not end the process that watches."""
    monkeypatch.setattr(watching, "LOOK_S", 1000.0)  # the thread does not look any more
    records = [flight.make_file(f"rank {rank}") for rank in range(2)]

    def fail() -> int:
        watch = watching._Watch(0, [(each, -1) for each in records], (), 1.0)
        flight.dismiss(records[dismissed])
        watch.close()
        return 0  # what the rank's own error would become, with no process that watches left

    try:
        assert os.waitstatus_to_exitcode(os.waitpid(forked(fail), 0)[1]) == LostRank.exit_code
    finally:
        for each in records:
            os.close(each)
