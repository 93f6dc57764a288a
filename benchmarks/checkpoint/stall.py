"""How much longer the steps take that a save touches.

A run whose state has 400 MB, saved every few steps.
"""

from __future__ import annotations

import itertools
import os
import shutil
import statistics
import threading
import time
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from surefoot import Loss, Run, RunSpec
from surefoot.components.data.sources.arrays import Arrays
from surefoot.contract import events

WIDTH, LAYERS, BATCH = 2048, 8, 192  # 33.5 M weights: 134 MB, and AdamW's moments: 402 MB in all
Timed = tuple[int, float, bool]  # step, seconds, whether a save touches it
# a round's, ours and the peers'; the first one, which makes our staged copy, is left out
SAVES, FEW_SAVES = 11, 4
# a machine that has computed on both cores for three minutes may be slowed to half its speed, until
# it has rested
REST_S = 20.0
# steps between saves; the longer where a writer that yields to two threads lives through 17 to 40
# of them
EVERY, OFTEN = 64, 12


class Wide:
    """A plain wide network on random numbers: a step of a third of a second on one core."""

    def model(self) -> nn.Module:
        return nn.Sequential(
            *(part for _ in range(LAYERS) for part in (nn.Linear(WIDTH, WIDTH), nn.ReLU()))
        )

    def data(self, split: str) -> Arrays:
        return Arrays(self.numbers())

    def numbers(self) -> Tensor:
        return torch.randn(BATCH * 4, WIDTH, generator=torch.Generator().manual_seed(0))

    def forward(self, model: nn.Module, batch: tuple[Tensor]) -> Tensor:
        output: Tensor = model(batch[0])
        return output

    def loss(self, output: Tensor, batch: tuple[Tensor]) -> Loss:
        return Loss.sum(output.square().mean(1).sum(), len(output))


def measure_stall(mode: str, threads: int, folder: Path) -> dict[str, float]:
    """The median, over the saves, of the extra seconds of all steps that a save touches.

    A save touches steps from its first copy to the end of its thread.

    Extra to the median of the untouched steps between the same two saves: a processor that others
    use, too, changes its speed. `ordinary_s` is the median of all untouched steps, `waited_s` of
    how long the loop stood still for a save of ours, as the run's own records have it. The first
    save, which makes the staged copy, is left out.
    """
    time.sleep(REST_S)
    shutil.rmtree(folder, ignore_errors=True)
    every = EVERY if threads > 1 and mode in ("background", "dcp_async") else OFTEN
    time_steps = _time_surefoot if mode in ("blocking", "background") else _time_loop
    saves = SAVES if mode in ("blocking", "background") else FEW_SAVES
    durations = time_steps(mode, threads, folder, every, saves)
    waits = (
        [event.waited_s for event in events.read(folder) if isinstance(event, events.Committed)][1:]
        if saves == SAVES
        else []
    )
    shutil.rmtree(folder)
    by_save = [
        [each for each in durations if save < each[0] <= save + every]
        for save in range(2 * every, every * saves + 1, every)
    ]
    calm = [[seconds for _, seconds, touched in steps if not touched] for steps in by_save]
    extras = [
        sum(seconds - statistics.median(untouched) for _, seconds, touched in steps if touched)
        for steps, untouched in zip(by_save, calm, strict=True)
        if untouched
    ]
    waited = {"waited_s": statistics.median(waits)} if waits else {}
    return waited | {
        "extra_s": statistics.median(extras),
        "ordinary_s": statistics.median(itertools.chain(*calm)),
        "saves": float(len(extras)),
        "touched": sum(touched for steps in by_save for *_, touched in steps) / len(by_save),
    }


def _time_surefoot(mode: str, threads: int, folder: Path, every: int, saves: int) -> list[Timed]:
    spec = RunSpec(
        train={"length": f"{every * (saves + 1)} steps", "batch": BATCH, "threads": threads},
        evaluate={"every": "100000 steps"},
        checkpoint={"every": f"{every} steps", "keep": 2, "background": mode == "background"},
        observe={"every": f"{every * 100} steps", "tensorboard": False},
    )
    durations = []
    with Run(spec, Wide(), folder=folder, quiet=True) as run:
        began_s, was_saving = time.perf_counter(), False
        for report in run.steps():
            # the save of a step begins after it was handed over: what it takes at once falls into
            # the step that follows
            now_s, is_saving = (
                time.perf_counter(),
                any(thread.name == "surefoot-save" for thread in threading.enumerate()),
            )
            durations.append(
                (report.step, now_s - began_s, was_saving or is_saving or report.step % every == 1)
            )
            began_s, was_saving = now_s, is_saving
    return durations


def _time_loop(mode: str, threads: int, folder: Path, every: int, saves: int) -> list[Timed]:
    """A plain loop over the same model and numbers, saved by `torch.save` or by DCP beside it."""
    torch.set_num_threads(threads)
    task = Wide()
    model = task.model()
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    batches = task.numbers().split(BATCH)
    save = {"torch_save": _save_torch, "dcp_async": _save_dcp_async}[mode]
    durations, saving = [], None
    began_s = time.perf_counter()
    for step in range(1, every * (saves + 1) + 1):
        was_saving = saving is not None and not saving.done()
        if step % every == 1 and step > 1:
            if saving is not None:
                saving.result()
            saving = save(
                {"model": model.state_dict(), "optimizer": optimizer.state_dict()},
                folder / f"{step % (3 * every)}",
            )
        optimizer.zero_grad()
        batch = batches[step % len(batches)]
        (model(batch).square().mean(1).sum() / len(batch)).backward()
        optimizer.step()
        now_s = time.perf_counter()
        is_saving = saving is not None and not saving.done()
        durations.append((step, now_s - began_s, was_saving or is_saving or step % every == 1))
        began_s = now_s
    if saving is not None:
        saving.result()
    return durations


def _save_torch(state: dict[str, Any], folder: Path) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / "state.pt").open("wb") as file:
        torch.save(state, file)
        file.flush()
        os.fsync(file.fileno())


def _save_dcp_async(state: dict[str, Any], folder: Path) -> Any:
    import torch.distributed.checkpoint as dcp

    shutil.rmtree(folder, ignore_errors=True)
    return dcp.async_save(state, checkpoint_id=folder, no_dist=True)
