"""One arm: windows of a memory map of tokens as a batch of int64.

python -m benchmarks.tokens.arms surefoot|by_torch|by_numpy FILE REPORT
"""

# B batch, T tokens

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from surefoot.components.data.sources.packed import TokenFile
from surefoot.trial import Clock, write_report

BATCH, LENGTH, BATCHES = 32, 256, 4000
TOKENS = 64 << 20  # 128 MiB of uint16
Read = Callable[[np.ndarray], tuple[Tensor, Tensor]]


def write_tokens(path: Path) -> Path:
    np.random.default_rng(0).integers(0, 50_257, size=TOKENS).astype("uint16").tofile(path)
    return path


def surefoot(path: Path) -> Read:
    source = TokenFile(path, LENGTH)

    def read(ids: np.ndarray) -> tuple[Tensor, Tensor]:
        batch = source.read(ids)
        return batch["inputs"], batch["targets"]

    return read


def by_torch(path: Path) -> Read:
    """As nanoGPT: inputs and targets cut window by window, each widened alone, then stacked."""
    tokens = np.memmap(path, dtype=np.uint16, mode="r")

    def read(ids: np.ndarray) -> tuple[Tensor, Tensor]:
        inputs, targets = (
            torch.stack(
                [
                    torch.from_numpy(
                        tokens[i * LENGTH + by : (i + 1) * LENGTH + by].astype(np.int64)
                    )
                    for i in ids
                ]
            )
            for by in (0, 1)
        )
        return inputs, targets

    return read


def by_numpy(path: Path) -> Read:
    """Windows one token longer stacked as they are, widened together, and looked at twice."""
    tokens = np.memmap(path, dtype=np.uint16, mode="r")

    def read(ids: np.ndarray) -> tuple[Tensor, Tensor]:
        windows = torch.from_numpy(
            np.stack([tokens[i * LENGTH : (i + 1) * LENGTH + 1] for i in ids]).astype(np.int64)
        )
        return windows[:, :-1], windows[:, 1:]

    return read


WAYS = {"surefoot": surefoot, "by_torch": by_torch, "by_numpy": by_numpy}


def main() -> None:
    name, file, report = sys.argv[1:]
    torch.set_num_threads(1)
    np.fromfile(file, dtype=np.uint16)  # no disk is measured
    read = WAYS[name](Path(file))
    draws = np.random.default_rng(1).integers(0, TOKENS // LENGTH - 1, size=(BATCHES, BATCH))
    inputs, targets = read(draws[0])
    first = torch.from_numpy(
        np.memmap(file, dtype=np.uint16, mode="r")[draws[0, 0] * LENGTH :][: LENGTH + 1].astype(
            np.int64
        )
    )
    assert torch.equal(inputs[0], first[:-1])
    assert torch.equal(targets[0], first[1:])
    for ids in draws:
        read(ids)
    with Clock() as clock:
        for ids in draws:
            read(ids)
    write_report(
        report,
        {
            "cpu_s_per_sample": clock.cpu_s / draws.size,
            "samples_per_cpu_s": draws.size / clock.cpu_s,
        },
    )


if __name__ == "__main__":
    main()
