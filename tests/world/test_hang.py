"""Who keeps the others waiting.

Hangs of several kinds, planted in real ranks, and named by the supervisor with their place.
"""

from __future__ import annotations

import ctypes
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from surefoot.contract.task import Loss
from surefoot.control.diagnose.hang import find_apart, find_hang, is_stalled
from surefoot.control.launch.looking import parse_stacks
from surefoot.core.flight import BUSY, Flight, Kind, RankSnapshot, Record, make_file, read
from surefoot.train import run as loop
from surefoot.train.run import Run
from tests.world.launched import Supervised, forked, speak
from tests.world.test_launch import environment, processes_of
from tests.world.test_run import Sentences, spec, train

GENEROUS_S, STALL_S, PLANTED = 60.0, 1.0, 17  # the call of the loss, after the first steps
CLONE_NEWNET = 0x40000000
LOOP = loop.__file__  # the loop that takes the steps


class Hangs(Sentences):
    """Texts; rank 1 does something of `kind` in its fifth step, or while it reads for the next."""

    def __init__(self, kind: str, folder: Path) -> None:
        self.kind, self.folder, self.calls = kind, folder, 0

    def plant(self, *reading: str) -> None:
        if (
            os.environ["RANK"] != "1"
            or self.calls < PLANTED - bool(reading)
            or (self.folder / "planted").exists()
        ):
            return
        if bool(reading) == (self.kind in ("data", "disk")):
            (self.folder / "planted").write_text(str(time.monotonic()))
            PLANTS[self.kind](self.folder)

    def data(self, split: str) -> Any:
        source = super().data(split)
        return Reads(source, self) if split == "train" else source

    def loss(self, output: Tensor, batch: dict[str, Tensor]) -> Loss:
        if torch.is_grad_enabled():
            self.calls += 1
            if self.kind == "shape" and self.calls == PLANTED:
                self.plant_shape()
            else:
                self.plant()
        return super().loss(output, batch)

    def plant_shape(self) -> None:
        is_other = os.environ["RANK"] == "1"
        if is_other:
            (self.folder / "planted").write_text(str(time.monotonic()))
        torch.distributed.all_reduce(torch.zeros(3 if is_other else 300))


class Reads:
    guarantee = "proven"

    def __init__(self, source: Any, task: Hangs) -> None:
        self.source, self.task, self.digest = source, task, source.digest

    def __len__(self) -> int:
        return len(self.source)

    def describe(self) -> str:
        return "texts"

    def read(self, ids: np.ndarray) -> Any:
        self.task.plant("reading")
        return self.source.read(ids)


def wait_for_a_file(folder: Path) -> None:
    """A file of which nothing comes: the call is that of a disk that does not answer."""
    os.mkfifo(folder / "part.tar")
    (folder / "part.tar").read_bytes()


def compute(folder: Path) -> None:
    while True:
        pass


PLANTS: dict[str, Callable[[Path], Any]] = {
    "data": lambda folder: time.sleep(1000),
    "computes": compute,
    "disk": wait_for_a_file,
    "branch": lambda folder: torch.distributed.all_reduce(torch.zeros(3)),
    "barrier": lambda folder: torch.distributed.barrier(),
    "dead": lambda folder: os.kill(os.getpid(), signal.SIGKILL),
    "stopped": lambda folder: os.kill(os.getpid(), signal.SIGSTOP),
    "network": lambda folder: subprocess.run(["ip", "link", "set", "lo", "down"], check=True),
}
NAMED = {  # what the verdict says of each kind
    "data": ("rank 1 of 2 has not come: rank 1 is in step ", "test_hang.py:", "in <lambda>"),
    "computes": ("rank 1 of 2 has not come: rank 1 is in step ", ", microbatch ", "in compute"),
    "disk": (
        "rank 1 of 2 has not come",
        "it waits for a disk or a file (openat of ",
        "part.tar), at ",
        "in wait_for_a_file",
    ),
    "uneven": (
        "rank 1 of 2 has not come: rank 1 is in step 5",
        "error: rank 1 of 2 ended with exit code 0, as if the run",
    ),
    "uneven evaluation": (
        (
            "the ranks call different collectives: "
            "rank 1 is in a maximum of 8 bytes, this rank is in another, after "
        ),
        "in a maximum of 40 bytes",
        "the ranks called different collectives as number ",
        "rank 0 called a maximum of 40 bytes and is in step 5",
        "rank 1 called a maximum of 8 bytes and is in step 5",
        "evaluation after step 5: the ranks call different collectives",
    ),
    "branch": (
        "rank 1 of 2 has not come",
        "in a collective that the task calls itself, at ",
        "test_hang.py:",
        (
            "hint: all ranks were stopped: every rank must call the same collectives, "
            "in the same order"
        ),
    ),
    "barrier": (
        "rank 1 of 2 has not come",
        "in a collective that the task calls itself, at ",
        "test_hang.py:",
    ),
    "shape": (
        "ended by SIGABRT",
        "in a collective that the task calls itself, at ",
        "in plant_shape",
    ),
    "dead": ("rank 1 of 2 was ended by SIGKILL",),
    "stopped": ("rank 1 of 2 has not come", "it is stopped (SIGSTOP)"),
    "stopped at its start": (
        "rank 0 waits in the connection of all ranks (collective 1) for ",
        "rank 1 of 2 has not come: rank 1 is before its first step, it is stopped (SIGSTOP)",
    ),
    "network": (
        "all 2 ranks are in the sum of gradients of ",
        "the network between them is cut, or too slow",
    ),
}


def takes_steps(kind: str, folder: Path) -> int:
    """A loop which rank 1 leaves early, or in which it alone evaluates."""
    with Run(
        spec(train={"length": "40 steps"}), Sentences(), folder=folder / "run", quiet=True
    ) as run:
        for report in run.steps():
            if report.step == 5 and run.group.rank == 1:
                (folder / "planted").write_text(str(time.monotonic()))
                if kind == "uneven":
                    return 0
                run.evaluate()
    return 0


def own_network() -> None:
    """A network of this process's own and of those that it begins, which may be cut."""
    if (
        ctypes.CDLL(None).unshare(CLONE_NEWNET)
        or subprocess.run(["ip", "link", "set", "lo", "up"], check=False).returncode
    ):
        os._exit(77)


@pytest.mark.quick("disk", "branch", "data", "stopped", "network")
@pytest.mark.parametrize("kind", NAMED)
def test_what_holds_up_the_others_is_named_by_the_supervisor(kind: str, tmp_path: Path) -> None:
    """Data, uneven work, another branch or shape, a dead or stopped rank, a disk, the network.

    Each is planted in rank 1 of two.
    """

    def job(rank: int) -> int:
        if kind.startswith("uneven"):
            return takes_steps(kind, tmp_path)
        if kind == "stopped at its start" and rank == 1:
            os.kill(os.getpid(), signal.SIGSTOP)
        layout = {"transport": "gloo"} if kind == "network" else {}  # memory of one host needs none
        train(
            tmp_path / "run",
            Hangs(kind, tmp_path),
            spec(train={"length": "40 steps"}, layout=layout),
        )
        return 0

    prepare = own_network if kind == "network" else lambda: None
    supervised = Supervised(job, 2, tmp_path / "ranks", stall_s=STALL_S, prepare=prepare)
    code = supervised.wait(GENEROUS_S)  # the deadline of what ranks do together is 30 minutes
    if code == 77:
        pytest.skip("no network of one's own here: it takes the rights of root")
    said = supervised.said
    assert code in (8, 134, 137), said
    assert all(each in said for each in NAMED[kind]), said
    assert "Traceback" not in said
    assert supervised.left() == []


@pytest.mark.slow
def test_the_command_names_a_rank_that_is_stopped(tmp_path: Path) -> None:
    (tmp_path / "stops.py").write_text(STOPS)
    done = subprocess.run(
        [
            sys.executable,
            "-P",
            "-m",
            "surefoot",
            "train",
            str(tmp_path / "stops.py:Stops"),
            "--ranks",
            "2",
            "--steps",
            "80",
            "--run",
            str(tmp_path / "run"),
            "--quiet",
            "--max-restarts",
            "0",
            "--set",
            "layout.hang_timeout=1.5",
            "--set",
            "observe.tensorboard=false",
        ],
        env=environment(),
        capture_output=True,
        text=True,
        check=False,
        timeout=600,
    )
    assert done.returncode == 8, done.stderr
    (line,) = [each for each in done.stderr.splitlines() if each.startswith("error: ")]
    assert "rank 1 of 2 has not come" in line
    assert "it is stopped (SIGSTOP)" in line
    assert (
        "rank 0 waits in the sum of gradients of " in line or "rank 0 waits in a sum of " in line
    ), line
    assert processes_of(tmp_path) == []


STOPS = '''
import os, signal
import torch
from surefoot.tasks.digits import Digits as Plain


class Stops(Plain):
    """Digits; rank 1 is stopped in a later step."""

    calls = 0

    def loss(self, output, batch):
        self.calls += torch.is_grad_enabled()
        if os.environ.get("RANK") == "1" and self.calls == 9:
            os.kill(os.getpid(), signal.SIGSTOP)
        return super().loss(output, batch)
'''


@pytest.mark.slow
def test_without_a_supervisor_a_cut_network_is_named_by_the_deadline_of_what_the_ranks_do_together(
    tmp_path: Path,
) -> None:
    """Two ranks by plain variables in networks of their own, whose link is cut in a step."""

    def cut() -> int:
        own_network()
        with Neighbour() as neighbour:
            ranks = [_plain_rank(rank, neighbour, tmp_path) for rank in range(2)]
            for pid in ranks:
                os.waitpid(pid, 0)
        return 0

    pid = forked(cut)
    if os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 77:
        pytest.skip("no network of one's own here: it takes the rights of root")
    ended_s = time.monotonic()
    assert ended_s - float((tmp_path / "planted").read_text()) < GENEROUS_S
    said = [(tmp_path / f"said-{rank}").read_text() for rank in range(2)]
    assert all(
        "the other ranks are unreachable, after " in each
        and "in the sum of gradients of 2,040 bytes; " in each
        for each in said
    )
    assert (
        "rank 1 of 2 does not respond: it has ended, hangs, or the network connection is down"
        in said[0]
    )
    assert (
        "10.0.0.1, the host of rank 0, does not respond: "
        "rank 0 has ended, or the network connection is down" in said[1]
    )


class Neighbour:
    """A second network that an idle process holds, and a link: 10.0.0.1 here, 10.0.0.2 there."""

    def __enter__(self) -> int:
        reads, writes = os.pipe()
        self.pid = os.fork()
        if self.pid == 0:
            own_network()
            os.write(writes, b".")
            signal.pause()
        os.read(reads, 1)
        script = f"""
            ip link add here type veth peer name there netns {self.pid}
            ip addr add 10.0.0.1/24 dev here
            ip link set here up
            nsenter -t {self.pid} -n sh -c 'ip addr add 10.0.0.2/24 dev there; ip link set there up'
        """
        subprocess.run(["sh", "-ec", script], check=True)
        return self.pid

    def __exit__(self, *error: object) -> None:
        os.kill(self.pid, signal.SIGKILL)
        os.waitpid(self.pid, 0)


def _plain_rank(rank: int, neighbour: int, folder: Path) -> int:
    PLANTS["link"] = lambda folder: subprocess.run(
        ["ip", "link", "set", "there", "down"], check=True
    )

    def job() -> int:
        said = os.open(folder / f"said-{rank}", os.O_WRONLY | os.O_CREAT, 0o644)
        speak(said, said)
        if rank == 1:
            ctypes.CDLL(None).setns(os.open(f"/proc/{neighbour}/ns/net", os.O_RDONLY), CLONE_NEWNET)
        os.environ |= {
            "RANK": str(rank),
            "WORLD_SIZE": "2",
            "LOCAL_RANK": str(rank),
            "MASTER_ADDR": "10.0.0.1",
            "MASTER_PORT": "29511",
            "GLOO_SOCKET_IFNAME": "there" if rank else "here",
        }
        train(
            folder / "run",
            Hangs("link", folder),
            spec(layout={"timeout": 1.0}, train={"length": "40 steps"}),
        )
        return 0

    return forked(job)


def seen(
    rank: int,
    count: int,
    waits_s: float | None,
    kind: Kind = Kind.WAIT,
    num_bytes: int = 8,
    step: int = 5,
    state: str = "S",
) -> RankSnapshot:
    recent = dict.fromkeys(range(1, count), (Kind.WAIT, 8)) | {count: (kind, num_bytes)}
    return RankSnapshot(rank, Record(step, 0, count, kind, num_bytes, waits_s, recent), state)


def test_the_blame_falls_on_who_does_something_else_then_on_who_is_behind_then_on_the_network() -> (
    None
):
    behind = find_hang([seen(0, 7, 9.0), seen(1, 6, None)])
    assert (behind.ranks, behind.is_unlike) == ((1,), False)
    own = seen(1, 6, None)._replace(
        stack=(f"{torch.distributed.__file__}:9 in all_reduce", "/me/task.py:3 in loss")
    )
    assert find_hang(
        [seen(0, 7, 9.0), own]
    ).is_unlike  # rank 0 has come past it, and never called it
    assert not find_hang([seen(0, 7, 9.0), own._replace(state="T")]).is_unlike
    assert not find_hang(
        [seen(0, 7, 9.0), own, seen(2, 6, None)]
    ).is_unlike  # it may wait for the third, which hangs
    other = find_hang([seen(0, 7, 9.0), seen(1, 7, 9.0, Kind.GATHER), seen(2, 7, 9.0)])
    assert other.ranks == (1,)
    assert "called different collectives as number 7" in other.words
    assert find_hang([seen(0, 7, 9.0), seen(1, 7, 9.0, num_bytes=12), seen(2, 7, 9.0)]).ranks == (
        1,
    )
    # it may be either
    assert find_hang([seen(0, 7, 9.0), seen(1, 7, 9.0, num_bytes=12)]).ranks == (0, 1)
    later = find_hang([seen(0, 8, 9.0), seen(1, 8, 9.0), seen(2, 7, 9.0, Kind.GATHER)])
    assert later.ranks == (2,)  # what the others had called before that
    assert find_hang([seen(0, 7, 9.0), seen(1, 7, 9.0, state="T")]).ranks == (1,)
    late = find_hang([seen(0, 8, 9.0), seen(1, 7, 9.0), seen(2, 8, 8.0)])
    assert late.ranks == (1,)
    assert "its network connection is down" in late.words
    cut = find_hang([seen(0, 7, 9.0), seen(1, 7, 9.0)])
    assert cut.ranks == ()
    assert "the network between them is cut" in cut.words


def test_nobody_is_told_apart_where_all_did_the_same() -> None:
    assert find_apart([seen(0, 7, 9.0), seen(1, 7, 9.0)]) is None
    assert find_apart([seen(0, 7, None), seen(1, 7, None)]) is None
    assert find_apart([seen(0, 7, 9.0), seen(1, 7, 9.0, num_bytes=12)]) is not None


def test_a_wait_is_no_stall_while_a_rank_saves_and_lasts_longer_in_the_first_step() -> None:
    waiting = [seen(0, 7, 9.0), seen(1, 6, None)]
    assert is_stalled(waiting, 5.0)
    assert not is_stalled(waiting, 10.0)
    assert not is_stalled([seen(0, 7, 9.0, step=1), seen(1, 6, None, step=1)], 5.0)
    saves = RankSnapshot(1, Record(5, BUSY, 6, Kind.NONE, 0, None), "D")
    assert not is_stalled([seen(0, 7, 9.0), saves], 5.0)
    stopped = [seen(0, 7, 9.0), saves._replace(state="T")]  # it does not save
    assert is_stalled(stopped, 5.0)
    assert find_hang(stopped).ranks == (1,)
    alone = RankSnapshot(1, Record(5, BUSY, 7, Kind.GATHER, 4, 9.0), "S")
    # what the others take no part in does not end by itself
    assert is_stalled([seen(0, 7, 9.0), alone], 5.0)
    joins = seen(0, 1, 60.0, Kind.JOIN, -1, step=0)
    assert is_stalled([joins, seen(1, 0, None, step=0)], 5.0)
    assert not is_stalled([joins, joins], 5.0)  # both wait for ranks of another host
    assert is_stalled([joins, joins._replace(rank=1, state="T")], 5.0)
    assert find_hang([joins, joins._replace(rank=1, state="T")]).ranks == (1,)


def test_what_a_rank_does_is_read_from_outside() -> None:
    descriptor = make_file("test")
    flight = Flight(descriptor)
    flight.step(12)
    flight.microbatch(3)
    inside: list[Record] = []
    flight.during(Kind.GATHER, 40, lambda: inside.append(read(descriptor)))
    assert (
        inside[0].step,
        inside[0].microbatch,
        inside[0].count,
        inside[0].kind,
        inside[0].num_bytes,
    ) == (12, 3, 1, Kind.GATHER, 40)
    assert inside[0].waits_s is not None
    assert read(descriptor).waits_s is None
    with flight.busy():
        assert read(descriptor).is_busy
    assert not read(descriptor).is_busy


def test_the_stack_is_that_of_the_thread_which_takes_the_steps() -> None:
    text = (
        'Thread 0x01 (most recent call first):\n  File "/x/reader.py", line 3 in read\n\n'
        'Current thread 0x02 (most recent call first):\n  File "/y/task.py", line 31 in loss\n'
        f'  File "{LOOP}", line 9 in g\n'
    )
    assert parse_stacks(text) == ("/y/task.py:31 in loss", f"{LOOP}:9 in g")
    assert parse_stacks("") == ()
