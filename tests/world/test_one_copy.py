"""A rank that holds rows begins, and goes on, with no more in host memory than those.

The model is built whole, but not in memory.
"""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from tests.conftest import ROOT

LAYERS, WIDTH = 32, 1024
# of one of two ranks: weights and two moments, 201 MB
ROWS_BYTES = 3 * 4 * LAYERS * WIDTH * WIDTH // 2
SCRIPT = """
import os, sys
import torch
from torch import nn
from surefoot.data import Arrays
from surefoot.contract.spec import RunSpec
from surefoot.contract.task import Loss
from surefoot.train.run import Run
from surefoot.trial import peak_bytes, resident_bytes

class Deep:
    def __init__(self, width): self.width = width
    def model(self):
        width = self.width
        made = nn.Sequential(*(nn.Linear(width, width, bias=False) for _ in range(LAYERS)))
        for layer in made: nn.init.normal_(layer.weight, std=0.02)
        return made
    def blocks(self, model): return list(model)
    def data(self, split): return Arrays(torch.zeros(8, self.width))
    def forward(self, model, batch): return model(batch[0])
    def loss(self, output, batch): return Loss.sum(output.sum(), len(batch[0]))

train = {"length": "2 steps", "batch": 4, "microbatch": 2, "threads": 1}
spec = RunSpec(train=train, layout={"shard": 2}, observe={"tensorboard": False})
with Run(spec, Deep(4), folder=sys.argv[1], quiet=True) as run:  # all code is loaded once
    list(run.steps())
before = resident_bytes()
with Run(spec, Deep(WIDTH), folder=sys.argv[2], quiet=True) as run:
    print(run.step, peak_bytes() - before, flush=True)
    for report in run.steps():
        run.save()
        os._exit(0)
"""


@pytest.mark.slow
def test_a_rank_begins_and_goes_on_with_its_own_rows_in_memory_and_no_more(tmp_path: Path) -> None:
    script = SCRIPT.replace("LAYERS", str(LAYERS)).replace("WIDTH", str(WIDTH))
    for step in (0, 1):
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        ranks = [_begin(script, rank, port, f"warm-{step}", tmp_path) for rank in range(2)]
        for rank in ranks:
            said, problem = rank.communicate(timeout=600)
            assert rank.returncode == 0, problem
            begun, peak_bytes = map(int, said.split())
            assert begun == step
            assert 0.9 * ROWS_BYTES < peak_bytes < 1.2 * ROWS_BYTES


def _begin(script: str, rank: int, port: int, warm: str, folder: Path) -> subprocess.Popen[str]:
    variables = {
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "WORLD_SIZE": "2",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "PYTHONPATH": str(ROOT),
        "OMP_NUM_THREADS": "1",
    }
    return subprocess.Popen(
        [sys.executable, "-c", script, warm, "run"],
        cwd=folder,
        env={**os.environ, **variables},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
