"""Arms that take turns: all are started, but only one at a time runs, for 0.1 s.

The speed of a machine drifts within seconds (other tenants, clock rates, caches), so that two
consecutive runs differ by several percent. Turns that are shorter than the drift affect all arms
alike. A process ends its turn between two steps. It is then stopped with all its threads, and the
time of the stop is left out of its wall time.
"""

from __future__ import annotations

import contextlib
import os
import select
import signal
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from pathlib import Path

import psutil

from surefoot.core.errors import InputError
from surefoot.trial.arm import Arm
from surefoot.trial.process import (
    ArmProcess,
    Outcome,
    end_rank,
    judge_outcome,
    read_result,
    start_rank,
)

TURN_S = 0.1
POLL_S = 0.0002


class Turns:
    """Turns of a measured process; if `descriptor` is None, the process runs alone without turns.

    The first turn ends after the first step, so that the rest of the warm-up is done in turns too.
    Otherwise a process would wait for the others to start and begin its measured steps with cold
    caches, which costs 0.02 s.
    """

    def __init__(self, descriptor: int | None) -> None:
        self._channel = None if descriptor is None else Connection(descriptor)
        self._until_s = 0.0

    def after_step(self, settle: Callable[[], object]) -> float:
        """End this turn if its time is over, wait for the next turn, and return the seconds waited.

        `settle` waits for the kernels that this process has launched on a device.
        """
        if self._channel is None or time.perf_counter() < self._until_s:
            return 0.0
        settle()
        begun_s = time.perf_counter()
        self._channel.send_bytes(str(os.getpid()).encode())
        self._channel.recv_bytes()
        now_s = time.perf_counter()
        self._until_s = now_s + TURN_S
        return now_s - begun_s


@dataclass
class _ArmTurns:
    """State of one arm in the harness; `pid` is the process to stop, known after its first turn."""

    arm: Arm
    rank: ArmProcess
    channel: Connection
    pid: int | None = None
    used_s: float = 0.0
    is_over: bool = False
    results: list[dict[str, float] | None] = field(default_factory=lambda: [None])

    def play(self) -> None:
        """Run one turn: until the process ends it or exits, or the arm has used up its time."""
        begun_s = time.perf_counter()
        if self.pid is not None:
            with contextlib.suppress(ProcessLookupError, BrokenPipeError):
                # the process was killed while it was stopped
                os.kill(self.pid, signal.SIGCONT)
                self.channel.send_bytes(b"go")
        result, channel = self.rank.result, self.channel.fileno()
        ready, _, _ = select.select(
            [result, channel], [], [], max(0.0, self.arm.timeout_s - self.used_s)
        )
        self.used_s += time.perf_counter() - begun_s
        if ready == [channel]:
            self.pid = int(self.channel.recv_bytes())
            _stop(self.pid)
            return
        self.is_over = True
        if ready:
            self.results = [read_result(self.rank)]
        else:  # no other variant may start while it still runs
            os.killpg(self.rank.process.pid, signal.SIGKILL)


def _stop(pid: int) -> None:
    """Stop a process, and wait until all its threads are stopped or it has ended."""
    with contextlib.suppress(ProcessLookupError, psutil.NoSuchProcess):
        os.kill(pid, signal.SIGSTOP)
        while psutil.Process(pid).status() not in (
            psutil.STATUS_STOPPED,
            psutil.STATUS_ZOMBIE,
            psutil.STATUS_DEAD,
        ):
            time.sleep(POLL_S)


def run_in_turns(
    arms: Sequence[Arm], work: Path, *, number: int = 0, is_warmup: bool = False
) -> list[Outcome]:
    """Run each of `arms` once in the folder `work`, in turns after the first step of each.

    Up to its first step, each arm runs alone. An arm that never ends its turn runs until its end
    without turns.

    Raises:
        InputError: If an arm has more than one rank, since ranks wait for each other in a step.
    """
    crowd = [arm.name for arm in arms if arm.ranks > 1]
    if crowd:
        raise InputError(
            f"the arm {crowd[0]!r} has several ranks and cannot take turns",
            hint="run it in rounds, without turns",
        )
    players: list[_ArmTurns] = []
    try:
        for index, arm in enumerate(arms):
            ours, theirs = Pipe()
            with theirs:
                started_s = time.perf_counter()
                rank = start_rank(arm, work / str(index), {}, started_s, turns=theirs.fileno())
            players.append(_ArmTurns(arm, rank, ours))
            players[-1].play()
        while playing := [each for each in players if not each.is_over]:
            for each in playing:
                each.play()
    finally:
        for each in players:
            end_rank(each.rank)
            each.channel.close()
    return [
        judge_outcome(each.arm, [each.rank], each.results, each.used_s, number, is_warmup)
        for each in players
    ]
