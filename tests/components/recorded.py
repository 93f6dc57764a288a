"""A small model whose steps the profiler records, and traces written by hand."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from surefoot.components.profiler.tracing.window import Profiler, Window

WIDTH, BATCH = 64, 32


def small() -> tuple[nn.Sequential, torch.optim.Optimizer]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(WIDTH, 2 * WIDTH), nn.ReLU(), nn.Linear(2 * WIDTH, 10))
    return model, torch.optim.AdamW(model.parameters())


def take_step(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    optimizer.zero_grad()
    loss = nn.functional.cross_entropy(
        model(torch.randn(BATCH, WIDTH)), torch.randint(10, (BATCH,))
    )
    loss.backward()
    optimizer.step()


def record(
    folder: Path, levels: tuple[str, ...] = ("shapes", "stacks", "memory"), active: int = 3
) -> Path:
    model, optimizer = small()
    with Profiler(
        model,
        folder,
        window=Window(wait=1, warmup=1, active=active),
        levels=levels,
        optimizers=[optimizer],
    ) as profiler:
        for _ in range(2 + active):
            take_step(model, optimizer)
            profiler.step_done(epoch=0)
    return folder / "trace.json.gz"


@pytest.fixture(scope="module")
def recorded(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return record(tmp_path_factory.mktemp("profile"))


# ---- traces of others


def write(path: Path, document: Any) -> Path:
    path.write_text(json.dumps(document), encoding="utf-8", errors="surrogatepass")
    return path
