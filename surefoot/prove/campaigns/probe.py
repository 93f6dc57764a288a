"""The run under test: small, with everything that makes resuming hard.

That is dropout, BatchNorm, AdamW, augmentation and shuffling.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from surefoot.components.data import Arrays
from surefoot.components.metrics import Mean, accuracy
from surefoot.contract.spec import RunSpec
from surefoot.contract.task import Loss

SAMPLES, BATCH, FEATURES, CLASSES = 50, 8, 6, 3
STEPS, EVERY, EVALUATE_EVERY, KEEP = 24, 3, 8, 3
# variants of a run: plain; frozen weights, whose files checkpoints link; a moving average
VARIANTS: Mapping[str, Mapping[str, Any]] = {
    "plain": {},
    "frozen": {"freeze": ["0.*"]},
    "ema": {"ema": 0.9},
}


class Probe:
    """A classifier of noise. `poison` holds (sample, value) pairs, as (3, NaN).

    The first feature of the training sample becomes the value.
    """

    def __init__(self, width: int = 16, poison: tuple[tuple[int, float], ...] = ()) -> None:
        self.width, self.poison = width, poison

    def model(self) -> nn.Module:
        return nn.Sequential(
            nn.Linear(FEATURES, self.width),
            nn.BatchNorm1d(self.width),
            nn.ReLU(),
            nn.Dropout(0.3),
            nn.Linear(self.width, self.width),
            nn.ReLU(),
            nn.Linear(self.width, CLASSES),
        )

    def data(self, split: str) -> Arrays:
        draws = torch.Generator().manual_seed(int(split == "train"))
        x, y = torch.randn(SAMPLES, FEATURES, generator=draws), torch.arange(SAMPLES) % CLASSES
        if split == "train":
            for sample, value in self.poison:
                x[sample, 0] = value
        return Arrays(x, y)

    def augment(self, batch: Any, keys: Any) -> Any:
        return batch[0] + 0.1 * keys.uniform(FEATURES), batch[1]

    def forward(self, model: nn.Module, batch: Any) -> Tensor:
        output: Tensor = model(batch[0])
        return output

    def loss(self, output: Tensor, batch: Any) -> Loss:
        return Loss.sum(F.cross_entropy(output, batch[1], reduction="sum"), len(batch[1]))

    def metrics(self, output: Tensor, batch: Any) -> dict[str, Mean]:
        return {"accuracy": accuracy(output, batch[1])}


@dataclass(frozen=True, kw_only=True)
class ProbedRun:
    """An attempt at the run in the folder `run`: how it saves, pauses, and kills itself."""

    run: str
    steps: int = STEPS
    every: int = EVERY
    keep: int = KEEP
    background: bool = True
    variant: str = "plain"
    width: int = 16
    pauses: tuple[int, ...] = ()
    die_at: int | None = None
    seed: int = 0
    marks_states: bool = False
    memory_bytes: int = 0  # a limit, 0 for none

    def spec(self) -> RunSpec:
        tables = {
            "train": {"length": f"{self.steps} steps", "batch": BATCH, "seed": self.seed},
            "optim": {"name": "adamw", **VARIANTS[self.variant]},
            "evaluate": {"every": f"{EVALUATE_EVERY} steps"},
            "checkpoint": {
                "every": f"{self.every} steps",
                "keep": self.keep,
                "background": self.background,
            },
            "observe": {"every": "1 step", "tensorboard": False},
        }
        return RunSpec.model_validate(tables)

    def task(self) -> Probe:
        return Probe(self.width)

    @property
    def folder(self) -> Path:
        return Path(self.run)
