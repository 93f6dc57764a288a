"""What a run sets for its own process is not that of others.

A task forks such processes while the run is open.
"""

from __future__ import annotations

import multiprocessing
import os
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader, TensorDataset

from surefoot.core.process import signals
from surefoot.train.run import Run
from tests.train.small import Small, end_of, spec

PATIENCE_S = 60.0
FORK = multiprocessing.get_context("fork")


def ends_process() -> bool:
    child = FORK.Process(target=time.sleep, args=(10 * PATIENCE_S,), daemon=True)
    child.start()
    child.terminate()
    child.join(PATIENCE_S)
    ended = child.exitcode == -signal.SIGTERM
    child.kill()
    return ended


def ends_pool() -> bool:
    with FORK.Pool(2) as pool:
        workers = list(pool._pool)  # type: ignore[attr-defined]
        pool.map(abs, range(4))
    for worker in workers:
        worker.join(PATIENCE_S)
    return not any(worker.is_alive() for worker in workers)


def ends_grandchild() -> bool:
    """A child of a child: each is one of its own."""
    receive, send = FORK.Pipe(duplex=False)

    def fork_again() -> None:
        send.send(ends_process())

    child = FORK.Process(target=fork_again)
    child.start()
    child.join(2 * PATIENCE_S)
    return receive.poll() and receive.recv() is True


def ends_bare_fork() -> bool:
    child = os.fork()
    if child == 0:
        time.sleep(10 * PATIENCE_S)
        os._exit(0)
    os.kill(child, signal.SIGTERM)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == -signal.SIGTERM


def ends_own_handler() -> bool:
    """A child that sets a handler of its own keeps it."""

    def handle() -> None:
        signal.signal(signal.SIGTERM, lambda *_: os._exit(7))
        ready.set()
        while True:  # a signal just before a long sleep would be handled only after it
            time.sleep(0.05)

    ready = FORK.Event()
    child = FORK.Process(target=handle, daemon=True)
    child.start()
    assert ready.wait(PATIENCE_S)
    child.terminate()
    child.join(PATIENCE_S)
    return child.exitcode == 7


WAYS = (ends_process, ends_pool, ends_grandchild, ends_bare_fork, ends_own_handler)


@pytest.mark.parametrize("ends", WAYS, ids=lambda each: str(each.__name__))
def test_a_child_that_is_forked_inside_a_run_ends_when_it_is_told(
    ends: Callable[[], bool], tmp_path: Path
) -> None:
    ended = []
    with Run(spec(8), Small(), folder=tmp_path / "a", quiet=True) as run:
        for report in run.steps():
            if report.step == 3:
                ended.append(ends())
            if report.step == 5:
                signal.raise_signal(signal.SIGTERM)  # the run itself still hears it
    assert ended == [True]
    assert (end_of(tmp_path / "a").step, run.exit_code) == (5, 143)
    assert signals._before == {}


def test_a_loader_s_workers_of_torch_outlive_a_signal_to_the_whole_job(tmp_path: Path) -> None:
    before = signal.getsignal(signal.SIGTERM)

    def read(batch: Any) -> Any:
        return torch.stack([each[0] for each in batch])

    with Run(spec(8), Small(), folder=tmp_path / "a", quiet=True) as run:
        for report in run.steps():
            if report.step == 3:
                loader = DataLoader(
                    TensorDataset(torch.arange(64.0)),
                    4,
                    num_workers=2,
                    collate_fn=read,
                    multiprocessing_context="fork",
                )
                batches = iter(loader)
                next(batches)
                for worker in batches._workers:  # type: ignore[attr-defined]
                    os.kill(worker.pid, signal.SIGUSR2)
                    os.kill(worker.pid, signal.SIGINT)
                assert sum(len(batch) for batch in batches) == 60
    assert (run.outcome, signal.getsignal(signal.SIGTERM)) == ("finished", before)
