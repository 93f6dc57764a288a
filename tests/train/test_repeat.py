"""A run repeats from its own spec, in another process and from another folder."""

from __future__ import annotations

import copy
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from surefoot.contract import spec_file
from surefoot.contract.spec import RunSpec
from surefoot.core.place import child_environment
from surefoot.train.run import Run
from tests.train.small import Small, assert_same, spec, write_task

AGAIN = """
import sys
from surefoot.contract import spec_file
from surefoot.train.run import drive
from surefoot.train.run import Run
from safetensors.torch import save_file
with Run(spec_file.read(sys.argv[1]).spec, folder="again", quiet=True) as run:
    for report in run.steps():
        if report.step in (10, 15, 20):
            save_file(run.model.state_dict(), f"{report.step}.safetensors")
"""


def test_a_run_repeats_from_its_own_spec_in_a_fresh_process_bit_for_bit(tmp_path: Path) -> None:
    kept: dict[int, dict[str, Tensor]] = {}
    task = Small(norm=True, dropout=0.5)
    how = spec(
        20,
        optim={"lr": 0.02, "ema": 0.9},
        schedule={"name": "cosine", "warmup": "3 steps"},
        train={"microbatch": 2, "seed": 7},
    )
    with Run(how, task, folder=tmp_path / "a", quiet=True) as run:
        for report in run.steps():
            if report.step % 7 == 0:
                run.evaluate()
            kept[report.step] = copy.deepcopy(run.model.state_dict())
    root = str(Path(__file__).resolve().parents[2])
    environment = {**child_environment(threads=torch.get_num_threads()), "PYTHONPATH": root}
    subprocess.run(
        [sys.executable, "-c", AGAIN, str(tmp_path / "a" / "spec.toml")],
        cwd=tmp_path,
        env=environment,
        check=True,
    )
    for step in (10, 15, 20):
        assert_same(kept[step], load_file(tmp_path / f"{step}.safetensors"))


def test_the_spec_of_a_run_means_the_same_wherever_it_lies(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A relative path in a spec built in Python is relative to where it was built.

    Its run folder lies elsewhere.
    """

    write_task(tmp_path)
    monkeypatch.chdir(tmp_path)
    how = RunSpec(
        task={"use": "mine.py:Mine"},
        train={"length": "2 steps", "batch": 4},
        observe={"tensorboard": False},
    )
    with Run(how, folder=tmp_path / "deep" / "a", quiet=True) as run:
        for _ in run.steps():
            pass
    monkeypatch.chdir("/")
    again = spec_file.read(str(tmp_path / "deep" / "a" / "spec.toml")).spec
    assert again.task.use == f"{tmp_path / 'mine.py'}:Mine"
    assert again.id == how.id
