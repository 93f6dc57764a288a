"""A run that begins, or goes on, holds its state in memory once.

No second copy while weights and moments are read or written.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.conftest import ROOT

STATE_BYTES = 3 * 4 * 4 * 2048 * 2048  # four layers' weights with two moments: 201 MB
SCRIPT = """
import os, sys
import torch
from torch import nn
from surefoot.data import Arrays
from surefoot.contract.spec import RunSpec
from surefoot.contract.task import Loss
from surefoot.train.run import Run
from surefoot.trial import peak_bytes, resident_bytes

class Wide:
    def model(self): return nn.Sequential(*(nn.Linear(2048, 2048, bias=False) for _ in range(4)))
    def data(self, split): return Arrays(torch.zeros(8, 2048))
    def forward(self, model, batch): return model(batch[0])
    def loss(self, output, batch): return Loss.sum(output.sum(), len(batch[0]))

before = resident_bytes()
train = {"length": "2 steps", "batch": 4, "threads": 1}
spec = RunSpec(train=train, observe={"tensorboard": False})
with Run(spec, Wide(), folder="run", quiet=True) as run:
    print(run.step, peak_bytes() - before, flush=True)
    for report in run.steps():
        run.save()
        os._exit(0)
"""


@pytest.mark.slow
def test_weights_and_moments_are_in_memory_once_when_a_run_begins_and_when_it_goes_on(
    tmp_path: Path,
) -> None:
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    for step in (0, 1):
        done = subprocess.run(
            [sys.executable, "-c", SCRIPT],
            cwd=tmp_path,
            env=environment,
            capture_output=True,
            text=True,
            check=False,
        )
        assert done.returncode == 0, done.stderr
        begun, peak_bytes = map(int, done.stdout.split())
        assert begun == step
        assert 0.9 * STATE_BYTES < peak_bytes < 1.2 * STATE_BYTES
