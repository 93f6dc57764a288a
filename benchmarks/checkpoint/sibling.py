"""Is the other core free?

A training step on core 1 beside work on core 0 that stays in that core's own cache.

python benchmarks/checkpoint/sibling.py
"""

from __future__ import annotations

import os
import statistics
import subprocess
import sys
import time

import torch
from torch import nn

ROUNDS, WARM_S, TIMED_S = 6, 0.6, 0.7
PINNED = "import os; os.sched_setaffinity(0, {0}); "
BESIDE = {
    "nothing": None,
    "SHA-256 of the same 16 KiB": PINNED
    + "import hashlib; b = bytearray(16384)\nwhile True: hashlib.sha256(b).digest()",
    "an empty loop": PINNED + "\nwhile True: pass",
    "a copy of 64 MiB": PINNED
    + "import numpy as np; a = np.ones(1 << 23); b = a.copy()\nwhile True: b[:] = a",
}


def step(model: nn.Module, optimizer: torch.optim.Optimizer, batch: torch.Tensor) -> None:
    model(batch).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()


def time_beside(
    code: str | None, model: nn.Module, optimizer: torch.optim.Optimizer, batch: torch.Tensor
) -> float:
    """Seconds of a step while `code` runs on the other core."""
    other = None if code is None else subprocess.Popen([sys.executable, "-c", code])
    try:
        until_s = time.perf_counter() + WARM_S
        while time.perf_counter() < until_s:
            step(model, optimizer, batch)
        begun_s, count = time.perf_counter(), 0
        while time.perf_counter() - begun_s < TIMED_S:
            step(model, optimizer, batch)
            count += 1
        return (time.perf_counter() - begun_s) / count
    finally:
        if other is not None:
            other.kill()
            other.wait()


def main() -> None:
    os.sched_setaffinity(0, {1})
    torch.set_num_threads(1)
    model = nn.Sequential(*(nn.Linear(1024, 1024) for _ in range(8)))
    optimizer, batch = torch.optim.AdamW(model.parameters(), lr=1e-4), torch.randn(64, 1024)
    rounds = [
        {name: time_beside(code, model, optimizer, batch) for name, code in BESIDE.items()}
        for _ in range(ROUNDS)
    ]
    for name in BESIDE:
        ratios = [each[name] / each["nothing"] for each in rounds]
        words = (
            f"{name}: {statistics.median(ratios):.2f} times as long "
            f"({min(ratios):.2f} to {max(ratios):.2f}, n = {ROUNDS})"
        )
        print(words, file=sys.stderr)


if __name__ == "__main__":
    main()
