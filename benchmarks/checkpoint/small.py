"""What is counted in bytes and microseconds: the ledger, the cursor, an incremental save."""

from __future__ import annotations

import shutil
import statistics
import time
from pathlib import Path

import numpy as np
import torch
from torch import Tensor, nn

from surefoot import Loss, Run, RunSpec
from surefoot.components.data.blocks import Order
from surefoot.components.data.feed import Feed
from surefoot.components.data.sources.arrays import Arrays
from surefoot.contract import ledger, manifest
from surefoot.contract.ledger import Ledger, Plan

STEPS, BATCH = 20_000, 256
PLACES = 200


class Body:
    """A network whose head, 1 % of its weights, is trained."""

    def model(self) -> nn.Module:
        return nn.ModuleDict({"body": nn.Linear(4096, 4096), "head": nn.Linear(4096, 40)})

    def data(self, split: str) -> Arrays:
        return Arrays(torch.randn(64, 4096, generator=torch.Generator().manual_seed(0)))

    def forward(self, model: nn.ModuleDict, batch: tuple[Tensor]) -> Tensor:
        output: Tensor = model["head"](model["body"](batch[0]).relu())
        return output

    def loss(self, output: Tensor, batch: tuple[Tensor]) -> Loss:
        return Loss.sum(output.square().sum(), len(output))


def measure_small(folder: Path) -> dict[str, float]:
    """Bytes and microseconds of a ledger's step, and milliseconds of a seek.

    And an incremental save against the tensors that changed.
    """
    return {**measure_ledger(folder), **measure_cursor(), **measure_incremental(folder)}


def measure_ledger(folder: Path) -> dict[str, float]:
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    order = Order(50_000, 0)
    feed = Feed(Arrays(np.zeros(50_000)), order, batch=BATCH)
    ids = [feed.window(step).ids for step in range(100)]
    book = Ledger(
        folder, Plan(samples=50_000, seed=0, shuffle=True, batch=BATCH, drop_last=False), 1
    )
    started_s = time.process_time()
    for step in range(STEPS):
        book.add(step + 1, ids[step % 100])
    book.sync()
    elapsed_s = time.process_time() - started_s
    size = (folder / ledger.FILE).stat().st_size - ledger.HEADER_BYTES
    return {"ledger_us_per_step": elapsed_s / STEPS * 1e6, "ledger_bytes_per_step": size / STEPS}


def measure_cursor() -> dict[str, float]:
    """The slowest of many seeks to a random step, each in a feed that stood elsewhere."""
    made = {}
    for samples in (50_000, 10_000_000):
        feed = Feed(Arrays(np.zeros(samples, dtype=np.uint8)), Order(samples, 0), batch=BATCH)
        places = np.random.default_rng(0).integers(0, 100 * feed.steps_per_epoch, PLACES)
        taken = []
        for step in places:
            started_s = time.perf_counter()
            feed.window(int(step))
            taken.append(time.perf_counter() - started_s)
        made[f"cursor_{samples}_ms"] = statistics.median(taken) * 1e3
    return made


def measure_incremental(folder: Path) -> dict[str, float]:
    """Bytes newly written by the second save of a run that trains the head alone.

    They are held against those of the tensors that changed.
    """
    shutil.rmtree(folder, ignore_errors=True)
    spec = RunSpec(
        train={"length": "4 steps", "batch": 32},
        optim={"freeze": ["body.*"]},
        evaluate={"every": "1000 steps"},
        checkpoint={"every": "2 steps", "background": False},
        observe={"tensorboard": False},
    )
    with Run(spec, Body(), folder=folder, quiet=True) as run:
        for _ in run.steps():
            pass
    first, second = (manifest.read(manifest.step_folder(folder, step)) for step in (2, 4))
    before = {
        (entry.name, name): piece.sha256
        for entry in first.files
        for name, piece in (entry.tensors or {}).items()
    }
    changed = sum(
        piece.num_bytes
        for entry in second.files
        for name, piece in (entry.tensors or {}).items()
        if before.get((entry.name, name)) != piece.sha256
    )
    written = sum(entry.num_bytes for entry in second.files if entry.since in (None, 4))
    written += (manifest.step_folder(folder, 4) / manifest.FILE).stat().st_size
    shutil.rmtree(folder)
    return {
        "incremental_share": written / changed,
        "incremental_bytes": float(written),
        "full_bytes": float(first.num_bytes),
    }
