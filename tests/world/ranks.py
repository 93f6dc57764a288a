"""Real ranks for tests: forked from a process that has loaded torch.

They are joined by gloo on the loopback, and ended under a deadline.
"""

from __future__ import annotations

import faulthandler
import importlib
import json
import os
import socket
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from surefoot.core import place
from surefoot.core.ranks.layout import Transport
from surefoot.runtime.comm.group import Group
from surefoot.runtime.comm.join import join

DEADLINE_S = 240.0
TRACED_AT = 0.9  # of the deadline: where each rank stands then is written down
CPU = torch.device("cpu")

# each rank would load these for itself, in a tenth of a second
for _name in (
    "encodings.idna",
    "numpy.ma",
    "surefoot.runtime.comm.nccl",
    "surefoot.runtime.comm.watched",
    "surefoot.train.assemble.sharding",
):
    importlib.import_module(_name)


class RankFailed(AssertionError):
    """What the ranks said that failed."""


def run_ranks(
    num_ranks: int, job: Callable[[int], Any], folder: Path, *, within_s: float = DEADLINE_S
) -> list[Any]:
    """What `job(rank)` gives in each of so many processes; {"error": words} for one that raised.

    None is left after it.
    """
    folder.mkdir(parents=True, exist_ok=True)
    with socket.create_server(("127.0.0.1", 0), backlog=num_ranks + 8) as meeting:
        pids = [
            _fork(rank, num_ranks, meeting, job, folder / f"rank-{rank}.json", TRACED_AT * within_s)
            for rank in range(num_ranks)
        ]
    until_s = time.monotonic() + within_s
    left = set(pids)
    while left and time.monotonic() < until_s:
        left = {pid for pid in left if os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG) is None}
        time.sleep(0.005)
    for pid in left:
        os.kill(pid, 9)
        os.waitpid(pid, 0)
    if left:
        ranks = sorted(pids.index(pid) for pid in left)
        stood = [f"rank {rank}:\n{(folder / f'rank-{rank}.trace').read_text()}" for rank in ranks]
        raise RankFailed(f"ranks {ranks} were still there after {within_s} s\n" + "\n".join(stood))
    return [json.loads((folder / f"rank-{rank}.json").read_text()) for rank in range(num_ranks)]


def together(
    num_ranks: int,
    job: Callable[[Group], Any],
    folder: Path,
    *,
    timeout_s: float = 20.0,
    transport: Transport = "auto",
) -> list[Any]:
    """The same of `job(group)`, once the ranks have joined.

    Raises RankFailed with what the first rank that failed raised.
    """

    def joined(rank: int) -> Any:
        with join(
            place.here(), CPU, wait_s=120.0, timeout_s=timeout_s, transport=transport
        ) as group:
            return job(group)

    found = run_ranks(num_ranks, joined, folder)
    for rank, each in enumerate(found):
        if isinstance(each, dict) and "error" in each:
            raise RankFailed(f"rank {rank}: {each['error']}\n{each['trace']}")
    return found


def _fork(
    rank: int,
    num_ranks: int,
    meeting: socket.socket,
    job: Callable[[int], Any],
    result: Path,
    traced_s: float,
) -> int:
    pid = os.fork()
    if pid:
        return pid
    try:
        trace = result.with_suffix(".trace").open("w")
        faulthandler.dump_traceback_later(traced_s, file=trace)
        torch.set_num_threads(1)
        os.environ |= {
            "RANK": str(rank),
            "WORLD_SIZE": str(num_ranks),
            "LOCAL_RANK": str(rank),
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(meeting.getsockname()[1]),
        }
        if rank == 0:
            os.environ[place.LISTENS] = str(meeting.fileno())
        else:
            meeting.close()
        try:
            found = job(rank)
        except BaseException as error:  # noqa: BLE001 - it must not go on as the tests
            kind = type(error).__name__
            found = {
                "error": str(error),
                "kind": kind,
                "code": getattr(error, "exit_code", None),
                "trace": traceback.format_exc(),
            }
        draft = result.with_suffix(".draft")
        draft.write_text(json.dumps(found))
        draft.replace(result)
    finally:
        os._exit(0)
