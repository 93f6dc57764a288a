"""Who keeps the others waiting: hangs of several kinds, planted in real ranks, and named by the supervisor with their place."""

from __future__ import annotations

import subprocess
import sys
import time
from pathlib import Path

import pytest

from surefoot.control.diagnose.hang import find_hang, is_stalled
from surefoot.control.launch.looking import parse_stacks
from surefoot.core.flight import BUSY, Flight, Kind, Record, Seen, make_file, read
from tests.world.test_launch import environment, processes_of

HANGS = '''
import os, signal, time
import torch
from surefoot.tasks.digits import Digits as Plain

IS_GUILTY = os.environ.get("RANK", "0") == "1"


class Hangs(Plain):
    """Digits; on rank 1 something of `kind` happens in a later step."""

    def __init__(self, kind: str = "") -> None:
        super().__init__()
        self.kind, self.calls = kind, 0

    def data(self, split):
        source = super().data(split)
        return Stuck(source, self) if self.kind == "data" and split == "train" else source

    def loss(self, output, batch):
        if torch.is_grad_enabled():
            self.calls += 1
            if IS_GUILTY and self.calls == 9:
                if self.kind == "stopped":
                    os.kill(os.getpid(), signal.SIGSTOP)
                elif self.kind == "computes":
                    while True:
                        self.calls += 0
                elif self.kind == "branch":
                    torch.distributed.all_reduce(torch.zeros(3))
        return super().loss(output, batch)


class Stuck:
    guarantee = "proven"

    def __init__(self, source, task):
        self.source, self.task, self.digest = source, task, source.digest

    def __len__(self):
        return len(self.source)

    def describe(self):
        return "stuck"

    def read(self, ids):
        if IS_GUILTY and self.task.calls >= 8:
            time.sleep(1000)
        return self.source.read(ids)
'''


@pytest.mark.parametrize(
    ("kind", "said"),
    [
        ("stopped", ("rank 1 of 2 has not come", "it is stopped (SIGSTOP)")),
        ("computes", ("rank 1 of 2 has not come", "hangs.py:", "in loss")),
        pytest.param("data", ("rank 1 of 2 has not come", "hangs.py:", "in read"), marks=pytest.mark.slow),
    ],
)
def test_a_rank_that_keeps_the_others_waiting_is_named_with_its_place(kind: str, said: tuple[str, ...], tmp_path: Path) -> None:
    (tmp_path / "hangs.py").write_text(HANGS)
    begun_s = time.monotonic()
    done = subprocess.run(
        [
            sys.executable, "-P", "-m", "surefoot", "train", str(tmp_path / "hangs.py:Hangs"), "--ranks", "2", "--steps", "80",
            "--run", str(tmp_path / "run"), "--quiet", "--max-restarts", "0", "--set", f'task.kind="{kind}"', "--set", "layout.stall=1.5",
            "--set", "observe.tensorboard=false",
        ],
        env=environment(), capture_output=True, text=True, check=False, timeout=60,
    )  # fmt: skip
    assert done.returncode == 8, done.stderr
    assert time.monotonic() - begun_s < 20
    (line,) = [each for each in done.stderr.splitlines() if each.startswith("error: ")]
    assert all(each in line for each in said), line
    assert "rank 0 waits in the sum of gradients of " in line or "rank 0 waits in a sum of " in line, line
    assert processes_of(tmp_path) == []


def seen(
    rank: int, count: int, waits_s: float | None, kind: Kind = Kind.WAIT, num_bytes: int = 8, step: int = 5, state: str = "S"
) -> Seen:
    return Seen(rank, Record(step, 0, count, kind, num_bytes, waits_s), state)


def test_the_blame_falls_on_who_is_behind_then_on_who_does_something_else_then_on_nobody() -> None:
    assert find_hang([seen(0, 7, 9.0), seen(1, 6, None)]).ranks == (1,)
    assert find_hang([seen(0, 7, 9.0), seen(1, 6, 9.0), seen(2, 7, 8.0)]).ranks == (1,)
    other = find_hang([seen(0, 7, 9.0), seen(1, 7, 9.0, Kind.GATHER), seen(2, 7, 9.0)])
    assert other.ranks == (1,)
    assert "does something else" in other.words
    assert find_hang([seen(0, 7, 9.0), seen(1, 7, 9.0, num_bytes=12), seen(2, 7, 9.0)]).ranks == (1,)
    assert find_hang([seen(0, 7, 9.0), seen(1, 7, 9.0, state="T")]).ranks == (1,)
    cut = find_hang([seen(0, 7, 9.0), seen(1, 7, 9.0)])
    assert cut.ranks == ()
    assert "the network between them is cut" in cut.words


def test_a_wait_is_no_stall_while_a_rank_saves_and_lasts_longer_in_the_first_step() -> None:
    waiting = [seen(0, 7, 9.0), seen(1, 6, None)]
    assert is_stalled(waiting, 5.0)
    assert not is_stalled(waiting, 10.0)
    assert not is_stalled([seen(0, 7, 9.0, step=1), seen(1, 6, None, step=1)], 5.0)
    saves = Seen(1, Record(5, BUSY, 6, Kind.NONE, 0, None), "D")
    assert not is_stalled([seen(0, 7, 9.0), saves], 5.0)
    alone = Seen(1, Record(5, BUSY, 7, Kind.GATHER, 4, 9.0), "S")
    assert is_stalled([seen(0, 7, 9.0), alone], 5.0)  # what the others take no part in does not end by itself


def test_what_a_rank_does_is_read_from_outside() -> None:
    descriptor = make_file("test")
    flight = Flight(descriptor)
    flight.step(12)
    flight.microbatch(3)
    inside: list[Record] = []
    flight.during(Kind.GATHER, 40, lambda: inside.append(read(descriptor)))
    assert (inside[0].step, inside[0].microbatch, inside[0].count, inside[0].kind, inside[0].num_bytes) == (
        12,
        3,
        1,
        Kind.GATHER,
        40,
    )
    assert inside[0].waits_s is not None
    assert read(descriptor).waits_s is None
    with flight.busy():
        assert read(descriptor).is_busy
    assert not read(descriptor).is_busy


def test_the_stack_is_that_of_the_thread_which_takes_the_steps() -> None:
    text = (
        'Thread 0x01 (most recent call first):\n  File "/x/reader.py", line 3 in read\n\n'
        'Current thread 0x02 (most recent call first):\n  File "/y/task.py", line 31 in loss\n'
        '  File "/z/surefoot/train/run.py", line 9 in g\n'
    )
    assert parse_stacks(text) == ("/y/task.py:31 in loss", "/z/surefoot/train/run.py:9 in g")
    assert parse_stacks("") == ()
