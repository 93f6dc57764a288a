"""`surefoot.attach` around what Hugging Face Accelerate prepares, on two ranks."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch.utils.data import DataLoader, TensorDataset

import surefoot
from surefoot.contract import events, loop_ledger
from tests.world.ranks import run_ranks
from tests.world.test_attach_ranks import Net, apart, digest, joined

accelerate = pytest.importorskip(
    "accelerate", reason="Accelerate is not installed: pip install accelerate"
)
PASSES = 3


def train(rank: int, folder: Path, name: str, leave_at: int | None = None) -> dict[str, Any]:
    with joined(rank, 2, folder, name):
        accelerator = accelerate.Accelerator(cpu=True, gradient_accumulation_steps=2)
        torch.manual_seed(0)
        bare = Net()
        inner = torch.optim.AdamW(bare.parameters(), lr=0.01)
        curve = torch.optim.lr_scheduler.StepLR(inner, 2, gamma=0.5)
        x = torch.randn(48, 3, generator=torch.Generator().manual_seed(1))
        data = DataLoader(TensorDataset(x, torch.arange(48) % 6), batch_size=3, shuffle=True)
        model, optimizer, loader, schedule = accelerator.prepare(bare, inner, data, curve)
        torch.manual_seed(100 + rank)
        run = surefoot.attach(
            model=model,
            optimizer=optimizer,
            data=loader,
            folder=folder / "run",
            every=1,
            save="3 steps",
            state={"curve": schedule},
        )
        losses = []
        for _ in range(run.first_pass, PASSES):
            for inputs, targets in run.batches():
                with accelerator.accumulate(model):
                    loss = F.cross_entropy(model(inputs), targets)
                    accelerator.backward(loss)
                    optimizer.step()
                    schedule.step()
                    optimizer.zero_grad()
                if accelerator.sync_gradients:
                    run.step_done(loss)
                    losses.append((run.step, loss.item()))
                    if run.step == leave_at:
                        os.kill(os.getpid(), signal.SIGKILL)
        run.close()
        return {
            "losses": losses,
            "draw": torch.rand(2).tolist(),
            "rate": schedule.get_last_lr(),
            "model": digest(bare),
            "moments": digest(optimizer),
            "count": bare.count.item(),
        }


def launch(folder: Path, name: str, leave_at: int | None = None) -> list[Any]:
    found = run_ranks(2, lambda rank: train(rank, folder, name, leave_at), folder / name)
    for rank, each in enumerate(found):
        assert "error" not in each, f"rank {rank}: {each['trace']}"
    return found


def test_what_accelerate_prepared_ends_with_the_bits_of_a_loop_that_was_not_killed(
    tmp_path: Path,
) -> None:
    whole = launch(tmp_path / "whole", "a")
    assert whole[0]["losses"] != whole[1]["losses"]  # each rank has batches of its own
    with pytest.raises(FileNotFoundError):  # no rank says anything
        launch(tmp_path / "left", "a", leave_at=8)
    again = launch(tmp_path / "left", "b")
    assert apart(whole, again) == []
    run = tmp_path / "left" / "run"
    assert [each.first_step for each in events.read(run) if isinstance(each, events.Started)] == [
        1,
        7,
    ]
    found = loop_ledger.check(run)
    assert found.holds
    assert found.promise.digests
