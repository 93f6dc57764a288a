"""Run under test: small, but with everything that makes resuming difficult.

It uses dropout, BatchNorm, AdamW, augmentation and shuffling.
"""

from __future__ import annotations

import math
import os
import signal
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from surefoot.components.data.sources.arrays import Arrays
from surefoot.components.metrics import Mean, accuracy
from surefoot.contract.spec import RunSpec
from surefoot.contract.task import Loss
from surefoot.core import place

SAMPLES, BATCH, FEATURES, CLASSES = 50, 8, 6, 3
STEPS, EVERY, EVALUATE_EVERY, KEEP = 24, 3, 8, 3
# variants of a run: plain; frozen weights, whose files checkpoints link; a moving average
VARIANTS: Mapping[str, Mapping[str, Any]] = {
    "plain": {},
    "frozen": {"freeze": ["0.*"]},
    "ema": {"ema": 0.9},
}
TASK = f"{__name__}:Probe"


class Probe:
    """Task that classifies noise, with one fault on rank `guilty`, in its forward pass number `at`.

    `kind` selects the fault. "loss", "gradient" or "buffer" makes the loss, the gradient of the
    output, or a buffer of BatchNorm non-finite; "dead" makes the rank kill itself. Independently,
    the first feature of the training sample `sample` has the value `value` from the start.
    """

    def __init__(
        self,
        width: int = 16,
        kind: str = "",
        guilty: int = 0,
        at: int = 0,
        sample: int = -1,
        value: str = "nan",
    ) -> None:
        self.width, self._sample, self._value = width, sample, float(value)
        self._kind, self._guilty, self._left = kind, guilty, at

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
        if split == "train" and self._sample >= 0:
            x[self._sample, 0] = self._value
        return Arrays(x, y)

    def augment(self, batch: Any, keys: Any) -> Any:
        return batch[0] + 0.1 * keys.uniform(FEATURES), batch[1]

    def forward(self, model: nn.Module, batch: Any) -> Tensor:
        fault = self._find_fault()
        if fault == "dead":
            os.kill(os.getpid(), signal.SIGKILL)
        if fault == "buffer":
            model.get_buffer("1.running_var")[3] = math.nan
        output: Tensor = model(batch[0])
        if fault == "gradient":
            register: Any = output.register_hook
            register(lambda gradient: gradient * math.inf)
        return output * math.nan if fault == "loss" else output

    def _find_fault(self) -> str:
        """Return the fault of this forward pass, or an empty text."""
        if not self._kind or not torch.is_grad_enabled() or place.here().rank != self._guilty:
            return ""
        self._left -= 1
        return self._kind if self._left == 0 else ""

    def loss(self, output: Tensor, batch: Any) -> Loss:
        return Loss.sum(F.cross_entropy(output, batch[1], reduction="sum"), len(batch[1]))

    def metrics(self, output: Tensor, batch: Any) -> dict[str, Mean]:
        return {"accuracy": accuracy(output, batch[1])}


@dataclass(frozen=True, kw_only=True)
class ProbedRun:
    """Attempt at the run in `folder`: how it trains and saves, pauses and kills itself.

    `task` is the table `task` of the spec, and `tables` are further settings of the spec by table.
    If `ranks` is not 0, the attempt is the command of a user on that many ranks, which are
    restarted up to `restarts` times without a new checkpoint. If it is 0, the attempt is a process
    that reports its progress. `pauses` and `die_at` are steps.
    """

    folder: Path
    steps: int = STEPS
    every: int = EVERY
    keep: int = KEEP
    background: bool = True
    variant: str = "plain"
    seed: int = 0
    task: Mapping[str, Any] = field(default_factory=dict)
    tables: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    ranks: int = 0
    restarts: int = 0
    pauses: tuple[int, ...] = ()
    die_at: int | None = None
    marks_states: bool = False
    memory_bytes: int = 0  # a limit, 0 for none

    def spec(self) -> RunSpec:
        tables = {
            "task": {"use": TASK, **self.task},
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
        more = {name: {**tables.get(name, {}), **table} for name, table in self.tables.items()}
        return RunSpec.model_validate({**tables, **more})
