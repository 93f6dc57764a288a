"""A run that resumes without a commit that its log names says so, whoever asked for quiet.

So it does with every other warning.
"""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
import torch
from torch import nn

import surefoot
from surefoot.contract import manifest
from surefoot.contract.events import Fault, Started
from tests.train.small import FEW, call, records, write_task

RUNS = ("--set", "checkpoint.every=2 steps", "--quiet")
LOST = {
    "the newest": ([8], "after step 6"),
    "the newest two": ([6, 8], "after step 4"),
    "all": ([4, 6, 8], "from the start"),
}


def unfinish(run: Path) -> None:
    """As a kill leaves it: without the record of an end."""
    lines = (run / "events.jsonl").read_bytes().splitlines(keepends=True)
    (run / "events.jsonl").write_bytes(b"".join(lines[:-1]))


def lose(run: Path, steps: list[int]) -> None:
    for step in steps:
        shutil.rmtree(manifest.step_folder(run, step))


def faults(run: Path) -> list[Fault]:
    return [
        event for event in records(run) if isinstance(event, Fault) and event.fault == "lost-commit"
    ]


@pytest.mark.quick("the newest two", "all")
@pytest.mark.parametrize("what", LOST)
def test_a_run_says_which_commit_of_its_log_is_gone_and_the_next_attempt_is_whole(
    what: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    task, run = write_task(tmp_path), tmp_path / "run"
    assert call(monkeypatch, "train", task, *FEW, *RUNS, "--run", str(run)) == 0
    unfinish(run)
    steps, where = LOST[what]
    lose(run, steps)
    capfd.readouterr()
    assert call(monkeypatch, "resume", str(run), "--quiet") == 0
    (fault,) = faults(run)
    assert f"step{'s' if len(steps) > 1 else ''} {', '.join(map(str, steps))}," in fault.detail
    assert where in fault.action
    assert fault.detail in capfd.readouterr().err
    unfinish(run)
    assert call(monkeypatch, "resume", str(run), "--quiet") == 0  # what was lost was written again
    assert len(faults(run)) == 1
    assert call(monkeypatch, "check", str(run)) == 0


def test_what_retention_deleted_or_is_older_than_the_commit_resumed_from_is_no_fault(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    task, run = write_task(tmp_path), tmp_path / "run"
    assert call(monkeypatch, "train", task, *FEW, *RUNS, "--run", str(run)) == 0
    assert call(monkeypatch, "checkpoint", "prune", str(run), "--keep", "2") == 0
    unfinish(run)
    lose(run, [6])
    capfd.readouterr()
    assert call(monkeypatch, "resume", str(run), "--quiet") == 0
    assert (faults(run), capfd.readouterr().err) == ([], "")


def attach_a_loop(folder: Path, *, passes: int) -> None:
    torch.manual_seed(0)
    model = nn.Linear(3, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    batches = [torch.full((4, 3), float(number)) for number in range(5)]
    with surefoot.attach(
        model=model, optimizer=optimizer, data=batches, folder=folder, save="2 steps"
    ) as run:
        for _ in range(run.first_pass, passes):
            for x in run.batches():
                loss = model(x).square().mean()
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
                run.step_done(loss)


@pytest.mark.quick("steps0-after step 8")
@pytest.mark.parametrize(
    ("steps", "where"), [([10], "after step 8"), ([6, 8, 10], "from the start")]
)
def test_an_attached_loop_says_which_commit_of_its_log_is_gone(
    steps: list[int], where: str, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "loop"
    attach_a_loop(folder, passes=2)
    lose(folder, steps)
    capfd.readouterr()
    attach_a_loop(folder, passes=3)
    (fault,) = faults(folder)
    assert where in fault.action
    assert fault.detail in capfd.readouterr().err


OWN_GENERATOR = (
    "return Arrays(",
    (
        "G = torch.Generator()\n"
        "        from torch.utils.data import Dataset\n"
        "        class D(Dataset):\n"
        "            def __len__(self): return 24\n"
        "            def __getitem__(self, i): return torch.randn(4, generator=G), i % 3\n"
        "        return D() if split == 'train' else Arrays("
    ),
)
NORM = (
    "nn.Linear(4, self.width), nn.ReLU()",
    "nn.Linear(4, self.width), nn.BatchNorm1d(self.width), nn.ReLU()",
)
SPLIT = ("--set", "train.microbatch=2")
WARNED = {
    "data that draw from a generator of their own": (
        OWN_GENERATOR,
        (),
        "two reads of the same samples return different values",
    ),
    "norms over microbatches": (NORM, SPLIT, "BatchNorm"),
    "a small disk": (
        ("", ""),
        ("--set", "checkpoint.keep=100000000000"),
        "are free: saves may fail",
    ),
}


@pytest.mark.parametrize("what", WARNED)
def test_quiet_hides_no_warning(
    what: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    change, more, words = WARNED[what]
    task, run = write_task(tmp_path, change=change), tmp_path / "run"
    assert call(monkeypatch, "train", task, *FEW, *more, "--quiet", "--run", str(run)) == 0
    assert words in capfd.readouterr().err
    (started,) = [event for event in records(run) if isinstance(event, Started)]
    assert any(words in note for note in started.notes)
