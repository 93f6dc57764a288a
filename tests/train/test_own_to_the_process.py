"""A run's lock and files are its own process's, and its folder is the place that was asked for.

That holds wherever the process goes later.
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
from torch import nn
from torch.utils.data import DataLoader, Dataset

import surefoot
from surefoot.components.observe.journal import Journal
from surefoot.contract import manifest
from surefoot.contract.events import Started
from surefoot.contract.runlock import RunLock, is_held
from surefoot.core.errors import StorageError
from surefoot.train.run import Run
from tests.train.small import Small, end_of, records, spec

DEADLINE_S = 60


def open_files(process: int, below: Path) -> list[str]:
    """The files below a folder that a process holds open."""
    links = Path(f"/proc/{process}/fd")
    found = []
    for each in links.iterdir():
        try:
            found.append(os.readlink(each))
        except OSError:
            continue
    return sorted(name for name in found if name.startswith(str(below)))


def sleep() -> None:
    time.sleep(DEADLINE_S)


class Rows(Dataset[torch.Tensor]):
    def __len__(self) -> int:
        return 40

    def __getitem__(self, number: int) -> torch.Tensor:
        return torch.ones(1)


def start_process(method: str) -> Callable[[], int]:
    def start() -> int:
        child = multiprocessing.get_context(method).Process(target=sleep, daemon=True)
        child.start()
        assert child.pid is not None
        return child.pid

    return start


def fork() -> int:
    pid = os.fork()
    if pid == 0:
        try:
            sleep()
        finally:
            os._exit(0)
    return pid


def start_worker() -> int:
    iterator = iter(DataLoader(Rows(), batch_size=2, num_workers=1, persistent_workers=True))
    next(iterator)
    start_worker.kept = iterator  # type: ignore[attr-defined]
    return int(iterator._workers[0].pid)  # type: ignore[attr-defined]


CHILDREN = {
    "a process of multiprocessing": start_process("fork"),
    "os.fork": fork,
    "a worker of a DataLoader": start_worker,
}


@pytest.mark.quick(
    "Run-os.fork",
    "Run-a worker of a DataLoader",
    "attach-a process of multiprocessing",
    "attach-os.fork",
)
@pytest.mark.parametrize("kind", CHILDREN)
@pytest.mark.parametrize("way", ["Run", "attach"])
def test_a_child_that_the_loop_forks_holds_nothing_of_the_run(
    kind: str, way: str, tmp_path: Path
) -> None:
    told, tell = os.pipe()
    loop = os.fork()
    if loop == 0:  # the process that is killed
        try:
            if way == "Run":
                with Run(spec(6), Small(), folder=tmp_path / "a", quiet=True) as run:
                    next(run.steps())
                    os.write(tell, str(CHILDREN[kind]()).encode())
                    sleep()
            model = nn.Linear(1, 1)
            optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
            attached = surefoot.attach(
                model=model, optimizer=optimizer, data=[torch.ones(1, 1)], folder=tmp_path / "a"
            )
            attached.save()
            os.write(tell, str(CHILDREN[kind]()).encode())
            sleep()
        finally:
            os._exit(1)
    child = int(os.read(told, 20))
    try:
        until_s = time.monotonic() + DEADLINE_S
        # it closes them as it begins
        while open_files(child, tmp_path) and time.monotonic() < until_s:
            time.sleep(0.01)
        assert open_files(child, tmp_path) == []
        assert is_held(tmp_path / "a")
        os.kill(loop, signal.SIGKILL)
        os.waitpid(loop, 0)
        os.kill(child, 0)  # it lives on
        assert not is_held(tmp_path / "a")
        RunLock(tmp_path / "a").release()
    finally:
        os.kill(child, signal.SIGKILL)


# ---- the working folder changes


class Moving(Small):
    """Changes the working folder at one of the places where code of a task runs."""

    def __init__(self, where: str = "") -> None:
        super().__init__()
        self.where = where

    def move(self, where: str) -> None:
        if where == self.where:
            os.chdir("elsewhere")
            self.where = ""

    def model(self) -> nn.Module:
        self.move("model")
        return super().model()

    def data(self, split: str) -> Any:
        self.move("data")
        return super().data(split)

    def loss(self, output: torch.Tensor, batch: Any) -> Any:
        self.move("loss")
        return super().loss(output, batch)


@pytest.mark.quick("model", "the loop", "before the run is entered")
@pytest.mark.parametrize(
    "where", ["model", "data", "loss", "the loop", "before the run is entered"]
)
def test_a_run_stays_in_the_folder_that_was_asked_for(
    where: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path)
    for _ in range(2):
        monkeypatch.chdir(tmp_path)
        run = Run(
            spec(6, checkpoint={"every": "2 steps"}), Moving(where), folder="runs/a", quiet=True
        )
        if where == "before the run is entered":
            os.chdir("elsewhere")
        with run:
            for report in run.steps():
                if report.step == 3 and where == "the loop":
                    os.chdir("elsewhere")
        assert run.folder.resolve() == tmp_path / "runs" / "a"
    assert manifest.steps(tmp_path / "runs" / "a")[-1] == 6
    assert end_of(tmp_path / "runs" / "a").outcome == "finished"
    assert [path.name for path in (tmp_path / "runs").iterdir()] == ["a"]
    assert list((tmp_path / "elsewhere").iterdir()) == []


def test_a_new_folder_is_made_where_the_run_was_asked_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path)
    with Run(spec(2), Moving("model"), quiet=True) as run:
        for _ in run.steps():
            pass
    assert end_of(tmp_path / "runs" / "moving-1").step == 2
    assert run.folder == tmp_path / "runs" / "moving-1"


def test_an_attached_loop_saves_and_records_in_the_folder_that_was_asked_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path)
    model = nn.Linear(1, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with surefoot.attach(
        model=model,
        optimizer=optimizer,
        data=list(torch.ones(6, 1)),
        folder="runs/a",
        save="2 steps",
    ) as run:
        assert run.folder == Path("runs/a")
        for x in run.batches():
            loss = model(x).square().mean()
            loss.backward()
            optimizer.step()
            run.step_done(loss)
            if run.step == 3:
                os.chdir("elsewhere")
    assert run.folder == tmp_path / "runs" / "a"
    assert capsys.readouterr().err == ""
    assert manifest.steps(run.folder)[-1] == 6
    assert end_of(run.folder).outcome == "finished"


def test_the_reason_why_an_attempt_may_not_write_is_the_right_one(tmp_path: Path) -> None:
    (tmp_path / "a").mkdir()
    lock = RunLock(tmp_path / "a")
    lock.release()
    RunLock(tmp_path / "a").release()
    assert lock.describe_loss() == f"a later attempt now writes {tmp_path / 'a'} (generation 2)"
    (tmp_path / "a").rename(tmp_path / "b")
    assert lock.describe_loss() == f"{tmp_path / 'a'} no longer exists: it was moved or deleted"


def test_a_child_that_writes_to_an_inherited_journal_is_refused_and_spoils_nothing(
    tmp_path: Path,
) -> None:
    journal = Journal(tmp_path)
    started = Started(
        generation=1,
        time_s=1.0,
        spec_id="x",
        spec={},
        task="t",
        code_digest="y",
        data={},
        versions={},
        machine={},
        place={},
        variables={},
        command=(),
        commit=None,
        seed=0,
        num_parameters=1,
        total_steps=1,
        steps_per_epoch=None,
    )
    journal.begin(started)
    pid = os.fork()
    if pid == 0:
        code = 1
        try:
            journal.begin(started)
        except StorageError:
            code = 0
        finally:
            os._exit(code)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
    journal.close()
    assert len(records(tmp_path)) == 1
