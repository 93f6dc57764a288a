"""How much longer the steps take that a save touches: a run whose state has 400 MB, saved every few steps."""

from __future__ import annotations

import shutil
import statistics
import threading
import time
from pathlib import Path

import torch
from torch import Tensor, nn

from surefoot import Loss, Run, RunSpec
from surefoot.components.data import Arrays

WIDTH, LAYERS, BATCH = 2048, 8, 192  # 33.5 M weights: 134 MB, and AdamW's moments: 402 MB in all
EVERY, SAVES = 8, 31  # steps between saves; the first save, which makes the staged copy, is left out


class Wide:
    """A plain wide network on random numbers: a step of a third of a second on one core."""

    def model(self) -> nn.Module:
        return nn.Sequential(*(part for _ in range(LAYERS) for part in (nn.Linear(WIDTH, WIDTH), nn.ReLU())))

    def data(self, split: str) -> Arrays:
        return Arrays(torch.randn(BATCH * 4, WIDTH, generator=torch.Generator().manual_seed(0)))

    def forward(self, model: nn.Module, batch: tuple[Tensor]) -> Tensor:
        output: Tensor = model(batch[0])
        return output

    def loss(self, output: Tensor, batch: tuple[Tensor]) -> Loss:
        return Loss.sum(output.square().mean(1).sum(), len(output))


def measure_stall(mode: str, threads: int, folder: Path) -> dict[str, float]:
    """The median, over the saves, of the extra seconds of all steps that a save touches, from its first copy to the end of its thread.

    `ordinary_s` is the median of the steps that no save touches.
    """
    shutil.rmtree(folder, ignore_errors=True)
    spec = RunSpec(
        train={"length": f"{EVERY * (SAVES + 1)} steps", "batch": BATCH, "threads": threads}, evaluate={"every": "100000 steps"},
        checkpoint={"every": f"{EVERY} steps", "keep": 2, "background": mode == "background"},
        observe={"every": f"{EVERY * 100} steps", "tensorboard": False},
    )  # fmt: skip
    durations: list[tuple[int, float, bool]] = []  # step, seconds, whether a save touches it
    with Run(spec, Wide(), folder=folder, quiet=True) as run:
        began_s, was_saving = time.perf_counter(), False
        for report in run.steps():
            # the save of a step begins after it was handed over: what it takes at once falls into the step that follows
            now_s, is_saving = time.perf_counter(), any(thread.name == "surefoot-save" for thread in threading.enumerate())
            durations.append((report.step, now_s - began_s, was_saving or is_saving or report.step % EVERY == 1))
            began_s, was_saving = now_s, is_saving
    shutil.rmtree(folder)
    counted = [each for each in durations if each[0] > 2 * EVERY]
    ordinary = statistics.median(seconds for _, seconds, touched in counted if not touched)
    extras = [
        sum(seconds - ordinary for step, seconds, touched in counted if touched and save < step <= save + EVERY)
        for save in range(2 * EVERY, EVERY * SAVES + 1, EVERY)
    ]
    return {
        "extra_s": max(0.0, statistics.median(extras)), "ordinary_s": ordinary, "saves": float(len(extras)),
        "touched": sum(touched for *_, touched in counted) / len(extras),
    }  # fmt: skip
