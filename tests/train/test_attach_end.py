"""How the end of an attached loop is told, whatever ends it."""

from __future__ import annotations

import gc
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch.utils.data import DataLoader, TensorDataset

from surefoot.core.errors import RunFolderError
from tests.train.test_attach import ROOT, Loop, ended, read

# ---- how it ends


def test_a_with_block_names_the_error_that_left_it_and_where(tmp_path: Path) -> None:
    loop = Loop()
    with pytest.raises(ValueError, match="spilled"), loop.attach(tmp_path / "run") as run:
        for batch in run.batches():
            run.step_done(loop.train_on(batch))
            raise ValueError("spilled")
    end = ended(tmp_path / "run")
    assert (end.outcome, end.step, end.exit_code) == ("failed", 1, 3)
    assert end.cause.startswith("after step 1: ValueError: spilled (")
    assert "test_attach_end.py" in end.cause


def test_a_with_block_tells_a_break_from_a_whole_pass(tmp_path: Path) -> None:
    loop = Loop()
    with loop.attach(tmp_path / "left") as run:
        for batch in run.batches():
            run.step_done(loop.train_on(batch))
            break
    with loop.attach(tmp_path / "whole") as run:
        for batch in run.batches():
            run.step_done(loop.train_on(batch))
    assert (ended(tmp_path / "left").outcome, ended(tmp_path / "left").cause) == (
        "stopped",
        "the loop exited after step 1",
    )
    assert (ended(tmp_path / "whole").outcome, ended(tmp_path / "whole").cause) == (
        "finished",
        "1 pass over the data",
    )


def test_a_ctrl_c_is_told_as_one(tmp_path: Path) -> None:
    with pytest.raises(KeyboardInterrupt), Loop().attach(tmp_path / "run"):
        raise KeyboardInterrupt
    assert (ended(tmp_path / "run").outcome, ended(tmp_path / "run").exit_code) == (
        "interrupted",
        130,
    )


def test_a_loop_that_is_dropped_ends_when_nobody_holds_it(tmp_path: Path) -> None:
    def forgetful() -> None:
        loop = Loop()
        run = loop.attach(tmp_path / "run")
        for batch in run.batches():
            run.step_done(loop.train_on(batch))
            if run.step == 2:
                raise RuntimeError("gone")

    with pytest.raises(RuntimeError, match="gone"):
        forgetful()
    gc.collect()
    end = ended(tmp_path / "run")
    assert (end.outcome, end.cause, end.step) == ("stopped", "the loop exited after step 2", 2)


def test_an_end_is_written_once_and_nothing_after_it(tmp_path: Path) -> None:
    run = Loop().attach(tmp_path / "run")
    run.step_done(1.0)
    run.close()
    run.close()
    run.step_done(1.0)
    assert [event.kind for event in read(tmp_path / "run")] == [
        "started",
        "step",
        "committed",
        "ended",
    ]


# the first endings are those of forked processes, the last one is of the process itself
SCRIPT = """
import json, os, sys, torch, surefoot
attach, model = surefoot.attach, torch.nn.Linear(2, 1)
data, optimizer = [torch.zeros(4, 2)] * 3, torch.optim.SGD(model.parameters(), lr=0.1)
given = {"model": model, "optimizer": optimizer, "data": data}
number, codes = 0, []
while number < 2:
    child = os.fork()
    if child == 0:
        break
    codes.append(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
    number += 1
print(json.dumps(codes), flush=True) if len(codes) == 2 else None
os.mkdir(str(number))
os.chdir(str(number))
runs = [attach(**given, folder=name) for name in ("whole", "left")]
for run in runs:
    for batch in run.batches():
        run.step_done(model(batch).mean())
        if run.step == 2 and run is runs[1]:
            if number == 0:
                raise SystemExit(143)
            if number == 1:
                raise ValueError('spilled')
            break
"""
ENDINGS = {
    143: {"whole": ("stopped", "the loop exited after step 3", 0)},
    1: {"left": ("failed", "after step 2: ValueError: spilled (", 3)},
    0: {
        "whole": ("stopped", "the loop exited after step 3", 0),
        "left": ("stopped", "the loop exited after step 2", 0),
    },
}


def test_the_end_of_the_process_ends_a_loop_that_nobody_closed(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text(SCRIPT)
    done = subprocess.run(
        [sys.executable, "mine.py"],
        cwd=tmp_path,
        capture_output=True,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        check=False,
        timeout=300,
    )
    assert [*json.loads(done.stdout), done.returncode] == [*ENDINGS], done.stderr
    for number, (status, ends) in enumerate(ENDINGS.items()):
        for name, (outcome, cause, code) in ends.items():
            end = ended(tmp_path / str(number) / name)
            assert (end.outcome, end.exit_code) == (outcome, code), (status, done.stderr)
            assert end.cause.startswith(cause)


# ---- folders, disks and bad input


def test_the_same_script_again_is_the_next_generation_of_the_run_after_any_end(
    tmp_path: Path,
) -> None:
    loop = Loop()
    first = loop.attach(tmp_path / "run")
    with pytest.raises(RunFolderError, match="is being written by process"):
        loop.attach(tmp_path / "run")
    with pytest.raises(ValueError, match="spilled"), first:
        raise ValueError("spilled")
    again = loop.attach(tmp_path / "run")
    assert (again.folder, read(again.folder)[-1].generation) == (tmp_path / "run", 2)
    again.close()
    after = loop.attach(tmp_path / "run")
    after.close()
    assert (after.folder, read(after.folder)[-1].generation) == (tmp_path / "run", 3)


def test_a_folder_is_let_go_although_workers_of_the_loader_live_on(tmp_path: Path) -> None:
    loop = Loop()
    loop.data = DataLoader(
        TensorDataset(torch.zeros(8, 4), torch.zeros(8).long()),
        batch_size=4,
        num_workers=1,
        persistent_workers=True,
    )
    for generation in (1, 2):
        with pytest.raises(ValueError, match="spilled"), loop.attach(tmp_path / "run") as run:
            for batch in run.batches():
                run.step_done(loop.train_on(batch))
            raise ValueError("spilled")
        assert read(tmp_path / "run")[-1].generation == generation


# ---- what has no effect is said


def test_calls_after_the_end_are_said_once(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    loop = Loop()
    run = loop.attach(tmp_path / "run")
    for batch in run.batches():
        run.step_done(loop.train_on(batch))
    run.close()
    run.close()
    assert "after the end" not in capsys.readouterr().err
    for batch in run.batches():
        run.step_done(loop.train_on(batch))
    run.save()
    said = capsys.readouterr().err
    assert said.count("after the end of the loop") == 1
    assert "batches() after the end of the loop: no step is recorded or saved" in said


@pytest.mark.parametrize(
    ("save", "reads", "is_said"),
    [("2 steps", False, True), ("2 steps", True, False), (None, False, False)],
)
def test_a_loop_that_does_not_read_its_batches_from_the_run_is_said_not_to_be_saved(
    save: str | None,
    reads: bool,
    is_said: bool,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    loop = Loop()
    with loop.attach(tmp_path / "run", save=save) as run:
        for batch in run.batches() if reads else loop.data:
            run.step_done(loop.train_on(batch))
    assert ("this step read no batch from batches()" in capsys.readouterr().err) == is_said
