"""A process that a task or a loop forks inherits the run.

It writes, ends and deletes nothing of it, and what it prints is its own.
"""

from __future__ import annotations

import atexit
import gc
import io
import os
import signal
import subprocess
import sys
import tarfile
import tempfile
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import nn

import surefoot
from surefoot.components.data.tars.stream import TarStream
from surefoot.components.observe.console import Console
from surefoot.contract import events
from surefoot.contract.runlock import is_held
from surefoot.core.errors import InputError
from surefoot.core.process import forked, signals
from surefoot.train.attach import AttachedLoop
from surefoot.train.run import Run
from tests.train.small import Small, end_of, records, spec


def in_child(act: Callable[[], object]) -> int:
    """Do it in a forked process; gives its exit code: 0 where nothing was raised."""
    child = os.fork()
    if child == 0:
        code = 1
        try:
            act()
            code = 0
        finally:
            os._exit(code)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


def contents(folder: Path) -> dict[str, bytes]:
    return {str(path): path.read_bytes() for path in sorted(folder.rglob("*")) if path.is_file()}


def is_refused(call: Callable[[], object]) -> None:
    with pytest.raises(InputError, match=r"this run belongs to process .* forked from it"):
        call()


def leave(run: Any, error: BaseException | None = None) -> None:
    run.__exit__(None if error is None else type(error), error, None)


OF_A_RUN: dict[str, Callable[[Run, Iterator[Any]], object]] = {
    "leaves the block": lambda run, steps: leave(run),
    "leaves it by an error": lambda run, steps: leave(run, ValueError("mine")),
    "leaves it by sys.exit": lambda run, steps: leave(run, SystemExit(3)),
    "saves": lambda run, steps: is_refused(run.save),
    "evaluates": lambda run, steps: is_refused(run.evaluate),
    "goes on with the loop": lambda run, steps: is_refused(lambda: next(steps)),
    "begins a loop": lambda run, steps: is_refused(lambda: next(run.steps())),
    "collects what it inherits": lambda run, steps: gc.collect(),
}


@pytest.mark.quick(
    "leaves the block",
    "leaves it by sys.exit",
    "saves",
    "goes on with the loop",
    "collects what it inherits",
)
@pytest.mark.parametrize("what", OF_A_RUN)
def test_a_child_of_a_run_leaves_it_to_its_parent(
    what: str, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    with Run(
        spec(8, checkpoint={"every": "2 steps", "keep": 2, "background": False}),
        Small(),
        folder=tmp_path,
    ) as run:
        steps = run.steps()
        for report in steps:
            if report.step == 5:  # a commit would be another one, and delete that of step 4
                before, _ = contents(tmp_path), capfd.readouterr()
                assert in_child(lambda: OF_A_RUN[what](run, steps)) == 0
                assert contents(tmp_path) == before
                assert capfd.readouterr() == ("", "")
                assert is_held(tmp_path)
    assert (run.outcome, end_of(tmp_path).step, run.exit_code) == ("finished", 8, 0)
    assert sum(isinstance(each, events.Ended) for each in records(tmp_path)) == 1


def train_on(run: AttachedLoop) -> None:
    for _ in range(25):
        run.step_done(1.0)


OF_A_LOOP: dict[
    str, tuple[Callable[[AttachedLoop], object], bool]
] = {  # and whether the child is told that nothing is recorded
    "leaves the block": (leave, False),
    "leaves it by an error": (lambda run: leave(run, ValueError("mine")), False),
    "ends": (lambda run: atexit._run_exitfuncs(), False),
    "loses it": (lambda run: run._left(), False),
    "saves": (lambda run: run.save(), True),
    "closes it": (lambda run: run.close(), True),
    "goes on with the loop": (train_on, True),
    "reads on": (lambda run: list(run.batches()), True),
}


@pytest.mark.quick("ends", "reads on", "goes on with the loop")
@pytest.mark.parametrize("what", OF_A_LOOP)
def test_a_child_of_an_attached_loop_leaves_it_to_its_parent(
    what: str, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    model = nn.Linear(1, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    act, is_told = OF_A_LOOP[what]
    with surefoot.attach(
        model=model,
        optimizer=optimizer,
        data=list(torch.ones(6, 1)),
        folder=tmp_path,
        save="2 steps",
    ) as run:
        for _ in run.batches():
            run.step_done(1.0)
            if run.step == 3:
                before, _ = contents(tmp_path), capfd.readouterr()
                assert in_child(lambda: act(run)) == 0
                assert contents(tmp_path) == before
                said = capfd.readouterr().err.splitlines()
                assert len(said) == is_told, said
                assert (
                    not is_told
                    or "which was forked from it: this process neither records nor saves it"
                    in said[0]
                )
                assert is_held(tmp_path)
    assert (end_of(tmp_path).outcome, end_of(tmp_path).step) == ("finished", 6)
    assert sum(isinstance(each, events.Ended) for each in records(tmp_path)) == 1


SCRIPT = """
import os, signal, sys
import surefoot
from tests.train.small import Small, spec

def fork(end):
    child = os.fork()
    if child == 0:
        end()
        raise AssertionError
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])

def fail():
    raise ValueError("of the child")

if __name__ == "__main__":
    print("first")  # stands in the buffer of stdout while it is no terminal
    sys.stdout.flush()
    with surefoot.Run(spec(8), Small(), folder=sys.argv[1]) as run:
        for report in run.steps():
            if report.step == 3:
                codes = [fork(lambda: sys.exit(5)), fork(lambda: os._exit(6)), fork(fail)]
                codes.append(fork(lambda: os.kill(os.getpid(), signal.SIGTERM)))
    print(codes)
"""


def test_children_end_in_whatever_way_and_the_run_is_ended_and_told_once(tmp_path: Path) -> None:
    (tmp_path / "script.py").write_text(SCRIPT)
    words = [sys.executable, str(tmp_path / "script.py"), str(tmp_path / "run")]
    environment = {
        **os.environ,
        "PYTHONPATH": str(Path(__file__).parents[2]),
        "OMP_NUM_THREADS": "1",
    }
    done = subprocess.run(
        words, capture_output=True, text=True, check=False, env=environment, timeout=300
    )
    assert (done.returncode, done.stdout) == (0, "first\n[5, 6, 1, -15]\n"), done.stderr
    assert done.stderr.count("Traceback") == done.stderr.count("ValueError: of the child") == 1
    assert done.stderr.count("run folder") == 1
    assert (end_of(tmp_path / "run").outcome, end_of(tmp_path / "run").step) == ("finished", 8)


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_a_child_prints_past_the_bar_of_its_parent(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """The thread that draws the bar may hold its lock at the fork.

    There is nobody in the child to release it.
    """
    path = tmp_path / "out"
    with path.open("w+") as out:
        monkeypatch.setattr(sys, "stdout", out)
        console = Console(total_steps=10, unit="samples", stream=Terminal())
        assert sys.stdout is not out
        assert console._bar is not None
        held, release = threading.Event(), threading.Event()

        def hold() -> None:
            with console._bar._lock:  # type: ignore[union-attr]
                held.set()
                release.wait(60)

        holder = threading.Thread(target=hold)
        holder.start()
        assert held.wait(60)

        def act() -> None:
            signal.alarm(60)
            print("of the child", flush=True)
            console.say("nothing")
            console.close()

        code = in_child(act)
        release.set()
        holder.join()
        console.close()
        assert (code, path.read_text()) == (0, "of the child\n")


def test_a_child_reads_the_shards_of_a_stream_by_itself(tmp_path: Path) -> None:
    with tarfile.open(tmp_path / "a.tar", "w") as tar:
        for number in range(600):  # more than one buffer of the file
            info = tarfile.TarInfo(f"{number:04}.cls")
            info.size = len(content := str(number).encode())
            tar.addfile(info, io.BytesIO(content))
    source = TarStream([tmp_path / "a.tar"], [600], label="cls")

    def read(first: int, stop: int) -> list[int]:
        labels = source.read(np.arange(first, stop))["label"]
        return [int(each) for each in labels]

    assert read(0, 3) == [0, 1, 2]

    def act() -> None:
        signal.alarm(60)
        assert read(3, 600) == list(range(3, 600))

    with source._lock:  # as another thread may at the fork
        assert in_child(act) == 0
    assert read(3, 600) == list(range(3, 600))


class Ending:
    """Writes to a file when it is finalized."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def __del__(self) -> None:
        with self._path.open("a") as file:
            file.write(f"{os.getpid()}\n")


def test_what_is_finalized_in_its_own_process_is_not_in_a_child(tmp_path: Path) -> None:
    held = [Ending(tmp_path / "ended")]
    forked.never_end_in_children(held[0])
    assert in_child(held.clear) == 0
    assert not (tmp_path / "ended").exists()
    held.clear()
    assert (tmp_path / "ended").read_text() == f"{os.getpid()}\n"


def cycle_of(held: Any) -> None:
    """Leave `held` in garbage that only a collection finds."""
    cycle: list[Any] = [held]
    cycle.append(cycle)


def destroyed_group(folder: Path) -> Any:
    """A process group of gloo: what frees it waits for its threads."""
    store = dist.HashStore()  # type: ignore[attr-defined]
    dist.init_process_group("gloo", store=store, rank=0, world_size=1)
    try:
        dist.all_reduce(torch.ones(3))
        return dist.group.WORLD
    finally:
        dist.destroy_process_group()


def open_generator(folder: Path) -> Any:
    """A generator that is not at its end: what frees it runs its `finally`."""

    def read() -> Iterator[int]:
        try:
            yield 1
            yield 2
        finally:
            (folder / "ended").write_text(str(os.getpid()))

    rows = read()
    next(rows)
    return rows


def temporary_folder(folder: Path) -> Any:
    """A temporary folder: what frees it deletes its files."""
    held = tempfile.TemporaryDirectory(dir=folder)
    held.cycle = held  # type: ignore[attr-defined]
    return held


INHERITED = (
    destroyed_group,
    open_generator,
    temporary_folder,
    lambda folder: Ending(folder / "ended"),
)


@pytest.mark.parametrize("make", INHERITED, ids=["group", "generator", "folder", "finalizer"])
def test_a_child_frees_no_garbage_of_its_parent(
    make: Callable[[Path], Any], tmp_path: Path
) -> None:
    def act() -> None:
        signal.alarm(60)
        gc.collect()

    gc.disable()
    try:
        cycle_of(make(tmp_path))
        before = sorted(tmp_path.iterdir())
        assert in_child(act) == 0
        assert sorted(tmp_path.iterdir()) == before
    finally:
        gc.enable()


def test_a_child_frees_its_own_garbage(tmp_path: Path) -> None:
    def act() -> None:
        cycle_of(Ending(tmp_path / "ended"))
        gc.collect()
        os._exit(0 if (tmp_path / "ended").exists() else 1)

    assert in_child(act) == 0


def test_a_child_hears_a_signal_of_the_job_without_a_word_and_the_second_as_it_did_before(
    capfd: pytest.CaptureFixture[str],
) -> None:
    heard = []
    put_back = signals.listen(signal.SIGHUP, lambda: heard.append(1))
    try:

        def act() -> None:
            os.kill(os.getpid(), signal.SIGHUP)
            assert heard == []
            os.kill(os.getpid(), signal.SIGHUP)

        assert in_child(act) == -signal.SIGHUP
        os.kill(os.getpid(), signal.SIGHUP)
        assert heard == [1]
    finally:
        put_back()
    assert capfd.readouterr() == ("", "")
