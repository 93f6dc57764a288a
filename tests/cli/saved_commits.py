"""A run with six commits, and changes to their bytes."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from surefoot.components import checkpoint
from surefoot.components.checkpoint import Stamp
from surefoot.contract import manifest
from tests.cli.conftest import Command

ROOT = Path(__file__).resolve().parents[2]
FIXTURE = ROOT / "tests" / "fixtures" / "format_1" / "checkpoints" / "step-000000000006"
RUN = Path("run")


def a_model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 2))


def save(
    run: Path, step: int, model: nn.Module | None = None, score: float | None = None, **more: Any
) -> None:
    row = (
        None
        if score is None
        else {"name": "accuracy", "value": score, "better": "higher", "split": "test"}
    )
    checkpoint.save(
        run,
        step,
        {"model": model or a_model(), **more},
        Stamp(score=row, spec_id="x", environment={"torch": "2"}),
    )


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Commits of steps 1 to 6, scored; step 3 is the best."""
    folder = tmp_path_factory.mktemp("saved")
    for step in range(1, 7):
        save(folder, step, score=0.9 if step == 3 else 0.5, count=step)
    return folder


@pytest.fixture
def run(saved: Path, surefoot: Command) -> Path:
    """They, in the working folder."""
    shutil.copytree(saved, RUN)
    return RUN


def path_of(step: int, name: str = "model.safetensors") -> Path:
    return manifest.step_folder(RUN, step) / name


def flip(path: Path, position: int) -> None:
    data = bytearray(path.read_bytes())
    data[position] ^= 1
    rewrite(path, bytes(data))


def rewrite(path: Path, data: bytes) -> None:
    """Without touching what is linked to the same file."""
    path.unlink()
    path.write_bytes(data)
