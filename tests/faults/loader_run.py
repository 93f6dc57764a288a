"""A run that is killed, as its workers are.

Forked from a process that has loaded torch, so that a restart costs little.
"""

from __future__ import annotations

import hashlib
import json
import os
import random
import re
import signal
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest
import torch
from torch import Tensor

from surefoot.contract.spec import RunSpec
from surefoot.contract.task import Source
from surefoot.train.run import Run
from tests.components.test_bad_records import Photos as OfOneTar

STEPS, BATCH, MICROBATCH = 40, 8, 2
SEEN = "seen.jsonl"
SETTINGS: tuple[dict[str, Any], ...] = (
    {"workers": 0},
    *(
        {"workers": workers, "kind": kind}
        for workers in (1, 2, 7)
        for kind in ("thread", "process")
    ),
)


class Unhurried:
    """The source, a little slower, so that a kill finds workers that read."""

    guarantee, thread_safe = "proven", True

    def __init__(self, source: Any) -> None:
        self.digest, self._source = source.digest, source

    def __len__(self) -> int:
        return len(self._source)

    def read(self, ids: np.ndarray) -> Any:
        time.sleep(0.002)
        return self._source.read(ids)

    def describe(self) -> str:
        return "unhurried"


class Photos(OfOneTar):
    """Learns the labels of images in a tar, each shifted by a draw.

    `folder` holds the tar and its index.
    """

    def __init__(self, folder: str) -> None:
        super().__init__(f"{folder}/photos.tar", f"{folder}/cache")

    def data(self, split: str) -> Source:
        made: Source = Unhurried(super().data(split))  # type: ignore[assignment]
        return made


def spec(loader: dict[str, Any]) -> RunSpec:
    return RunSpec.model_validate(
        {
            "train": {"length": f"{STEPS} steps", "batch": BATCH, "microbatch": MICROBATCH},
            "loader": loader,
            "evaluate": {"every": "99 epochs"},
            "checkpoint": {"every": "1 step", "keep": 2},
            "observe": {"tensorboard": False},
        }
    )


def digest(batch: dict[str, Tensor]) -> str:
    return hashlib.sha256(
        batch["image"].numpy().tobytes() + batch["label"].numpy().tobytes()
    ).hexdigest()


def attempt(folder: Path, run_folder: Path, loader: dict[str, Any]) -> dict[str, str]:
    """Run from where it stands to its end; each step's pixels go into a file.

    Gives the digests of the state.
    """
    seen = (folder / run_folder.name).with_suffix(".jsonl").open("a")
    with Run(spec(loader), Photos(str(folder)), folder=run_folder, quiet=True) as run:
        steps, found = run.assembly.engine.steps, list[str]()
        steps.observers.batch_read.append(lambda batch: found.append(digest(batch)))
        for report in run.steps():
            seen.write(json.dumps([report.step, found, steps.reader.consumed.tolist()]) + "\n")
            seen.flush()
            found.clear()
        states = dict(run.state_digests())
    seen.close()
    return states


@dataclass
class Forked:
    """An attempt in a process of its own, and the result that it leaves."""

    pid: int
    result: Path

    def workers(self) -> list[int]:
        try:
            return [each.pid for each in psutil.Process(self.pid).children(recursive=True)]
        except psutil.Error:
            return []

    def wait(self) -> int:
        return os.waitstatus_to_exitcode(os.waitpid(self.pid, 0)[1])

    def is_over(self) -> bool:
        return os.waitid(os.P_PID, self.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is not None


def fork(job: Callable[[], Any], result: Path) -> Forked:
    pid = os.fork()
    if pid == 0:
        code = 1
        try:
            torch.set_num_threads(1)
            signal.signal(signal.SIGINT, signal.SIG_DFL)
            result.write_text(json.dumps(job()))
            code = 0
        except BaseException as error:  # noqa: BLE001 - it must not go on as the tests
            result.write_text(repr(error))
        finally:
            os._exit(code)
    return Forked(pid, result)


def read_seen(folder: Path, run_folder: Path) -> dict[int, list[Any]]:
    """What each step read; a step that was done again must have read the same."""
    rows: dict[int, list[Any]] = {}
    for line in (folder / run_folder.name).with_suffix(".jsonl").read_text().splitlines():
        try:
            step, *read = json.loads(line)
        except ValueError:  # cut by a kill
            continue
        assert rows.setdefault(step, read) == read, (
            f"step {step} read something else when it was done again"
        )
    return rows


def kill_until_done(
    folder: Path, run_folder: Path, drawn: random.Random, kills: int
) -> tuple[dict[str, str], int, int]:
    """Kill the run so often, and about as many workers, then let it end.

    Gives its state, and how many kills of each kind fell.
    """
    runs = workers = 0
    for number in range(kills + 1):
        loader = drawn.choice(SETTINGS)
        result = folder / "result.json"
        job: Callable[[], Any] = lambda loader=loader: attempt(folder, run_folder, loader)  # noqa: E731
        forked = fork(job, result)
        lost = 0  # 3 in a row of the same samples are those samples' fault
        until_s = time.monotonic() + (drawn.uniform(0.02, 0.25) if number < kills else 1e9)
        while time.monotonic() < until_s and not forked.is_over():
            time.sleep(drawn.uniform(0.005, 0.03))
            children = forked.workers()
            if children and lost < 2:
                lost += _kill(drawn.choice(children))
        workers += lost
        if number < kills and not forked.is_over():
            left = forked.workers()
            runs += _kill(forked.pid)
            forked.wait()
            assert_gone(left)
            continue
        assert forked.wait() == 0, result.read_text()
        break
    return json.loads(result.read_text()), runs, workers


def _kill(pid: int) -> int:
    try:
        os.kill(pid, signal.SIGKILL)
    except ProcessLookupError:
        return 0
    return 1


def assert_gone(pids: list[int]) -> None:
    """Processes that a run left end with it."""
    until_s = time.monotonic() + 60
    while left := [pid for pid in pids if _runs(pid)]:
        assert time.monotonic() < until_s, f"processes {left} outlive their run"
        time.sleep(0.005)


def _runs(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.Error:
        return False


@contextmanager
def nothing_leaks() -> Iterator[None]:
    """No process, descriptor, shared memory or temporary file of the attempts within stays.

    Other tests may leave theirs.
    """

    def look() -> tuple[set[str], int, int]:
        shared = {
            name
            for name in os.listdir("/dev/shm")
            if name.startswith(("torch_", "psm_", "sem.")) and not _is_of_living(name)
        }
        me = psutil.Process()
        return shared, me.num_fds(), len(me.children(recursive=True))

    before = look()
    with tempfile.TemporaryDirectory() as folder, pytest.MonkeyPatch.context() as patch:
        patch.setattr(tempfile, "tempdir", folder)
        patch.setenv("TMPDIR", folder)
        yield
        assert not os.listdir(folder)
    after = look()
    assert after[0] <= before[0]
    assert after[1] <= before[1]
    assert after[2] <= before[2]


def _is_of_living(name: str) -> bool:
    return any(psutil.pid_exists(int(number)) for number in re.findall(r"\d+", name))
