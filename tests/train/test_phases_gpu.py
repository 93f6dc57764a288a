"""On a GPU: work counts where it was launched, and the phases add up to the wall time.

And memory is that of the run's device.
"""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import surefoot
from surefoot.contract.events import Step
from surefoot.train.run import Run
from tests.train.small import Small, records, spec

pytestmark = pytest.mark.gpu
CYCLES = 100_000_000  # about 50 ms


def spin() -> None:
    """Keep the device busy without keeping the host."""
    torch.cuda._sleep(CYCLES)


def spin_s() -> float:
    with surefoot.timed("cuda") as took:
        spin()
    assert took.elapsed_s is not None
    return took.elapsed_s


class Spinning(Small):
    """A kernel of about 50 ms where `where` says."""

    def __init__(self, where: str) -> None:
        super().__init__()
        self.where = where

    def forward(self, model: nn.Module, batch: Any) -> Tensor:
        output = super().forward(model, batch)
        if model.training and self.where == "forward":
            spin()
        if model.training and self.where == "backward":
            output.register_hook(lambda gradient: spin())
        return output


def test_one_line_gives_the_time_of_the_device_and_not_that_of_the_launch() -> None:
    spin()
    torch.cuda.synchronize()
    began_s = time.perf_counter()
    with surefoot.timed("cuda") as took:
        for _ in range(5):
            spin()
    wall_s = time.perf_counter() - began_s
    assert took.elapsed_s == pytest.approx(wall_s, rel=0.05)


@pytest.mark.parametrize("where", ["forward", "backward"])
def test_a_kernel_of_50_ms_is_found_in_its_phase_and_the_phases_add_up(
    where: str, tmp_path: Path
) -> None:
    expected_s = spin_s()
    with Run(
        spec(20, train={"device": "cuda"}, observe={"every": "5 steps"}),
        Spinning(where),
        folder=tmp_path,
        quiet=True,
    ) as run:
        for _ in run.steps():
            pass
    # the first step also loads kernels
    later = [event for event in records(tmp_path) if isinstance(event, Step)][1:]
    steps = sum(event.num_steps for event in later)
    phases = {
        name: sum(event.phases.get(name, 0.0) for event in later) / steps
        for name in ("forward", "backward", "optimizer")
    }
    assert phases[where] == pytest.approx(expected_s, rel=0.1)
    assert sum(seconds for name, seconds in phases.items() if name != where) < 0.2 * expected_s
    assert sum(run.summary["phases"].values()) == pytest.approx(run.summary["elapsed_s"], rel=0.01)


def test_memory_is_that_of_the_device_and_its_peak_begins_anew_with_each_window(
    tmp_path: Path,
) -> None:
    class Hungry(Small):
        def forward(self, model: nn.Module, batch: Any) -> Tensor:
            if model.training and run.step == 6:
                torch.empty(256 << 20, dtype=torch.uint8, device="cuda")
            return super().forward(model, batch)

    with Run(
        spec(20, train={"device": "cuda"}, observe={"every": "5 steps"}),
        Hungry(),
        folder=tmp_path,
        quiet=True,
    ) as run:
        for _ in run.steps():
            pass
    memory = {
        event.step: event.device_memory for event in records(tmp_path) if isinstance(event, Step)
    }
    assert memory[10]["peak_bytes"] > 256 << 20 > memory[15]["peak_bytes"] > 0
    assert {each["total_bytes"] for each in memory.values()} == {
        torch.cuda.get_device_properties(0).total_memory
    }
    assert all(
        each["fragmented_bytes"] == each["reserved_bytes"] - each["allocated_bytes"] >= 0
        for each in memory.values()
    )
