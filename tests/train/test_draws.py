"""Tasks whose augmentation draws from the streams of the process: workers have others, which is told before the first step."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from surefoot.contract.events import Started
from surefoot.train.run import Run
from tests.train.small import Small, records, spec

DRAWS = {"torch": lambda: float(torch.rand(())), "numpy": lambda: float(np.random.rand()), "python": random.random}  # noqa: NPY002


class Careless(Small):
    def __init__(self, stream: str) -> None:
        super().__init__()
        self.stream = stream

    def augment(self, batch: Any, keys: Any) -> Any:
        return batch[0] + DRAWS[self.stream](), batch[1]


def told(folder: Path, task: Small, loader: dict[str, Any]) -> list[str]:
    with Run(spec(2, loader=loader), task, folder=folder, quiet=True):
        (begun,) = (event for event in records(folder) if isinstance(event, Started))
    return [each for each in begun.notes if "draws" in each]


@pytest.mark.parametrize("stream", DRAWS)
def test_draws_that_workers_would_change_are_told(stream: str, tmp_path: Path) -> None:
    found = told(tmp_path / "process", Careless(stream), {"workers": 2, "kind": "process"})
    assert len(found) == 1
    assert "with loader.workers = 2 it draws other numbers than without" in found[0]
    assert "the keys of augment draw the same everywhere" in found[0]
    assert told(tmp_path / "auto", Careless(stream), {"workers": "auto"})


def test_draws_that_are_the_same_everywhere_are_not_told(tmp_path: Path) -> None:
    assert told(tmp_path / "alone", Careless("numpy"), {}) == []
    assert told(tmp_path / "keys", Small(), {"workers": 2}) == []
