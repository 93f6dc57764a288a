"""One arm: how soon a run goes on from any position of ten million samples.

It goes on with the same samples and the same pixels.

python -m benchmarks.loaders.going_on TARS REPORT
"""

from __future__ import annotations

import os
import sys
import tempfile
import time
from pathlib import Path

import numpy as np
import torch

from benchmarks.loaders.arms import augment_batch
from surefoot.components.data.blocks import Order
from surefoot.components.data.feed import Feed
from surefoot.components.data.loader.jobs import Reader
from surefoot.components.data.loader.loader import Loader
from surefoot.components.data.tars.source import Tars
from surefoot.core.statistics import quantiles
from surefoot.trial import write_report

COPIES, BATCH, TRIED = 200, 64, 300  # 200 times 50,000 samples


def open_many(tars: Path, folder: Path) -> Tars:
    """Ten million samples: each tar under 200 names, none of them a copy."""
    for path in sorted(tars.glob("train-*.tar")):
        content = path.read_bytes()
        (folder / f"whole-{path.name}").write_bytes(content)
        for number in range(COPIES):
            os.link(folder / f"whole-{path.name}", folder / f"{number:03d}-{path.name}")
        (folder / f"whole-{path.name}").unlink()
    return Tars(sorted(folder.glob("*.tar")), cache=folder / "index", image="jpg", label="cls")


def make_loader(source: Tars) -> Loader:
    return Loader(
        Feed(source, Order(len(source), 0), batch=BATCH), Reader(source, augment_batch, 0)
    )


def main() -> None:
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory(prefix="surefoot-going-on-") as made:
        source = open_many(Path(sys.argv[1]), Path(made))
        # of three epochs
        steps = np.random.default_rng(0).integers(1, 3 * len(source) // BATCH, TRIED).tolist()
        going_s, same = [], 0
        for number in steps:
            fresh = make_loader(source)  # as a run has it that goes on
            begun_s = time.perf_counter()
            first = fresh.take(number)
            first_s = time.perf_counter() - begun_s
            begun_s = time.perf_counter()
            again = fresh.read(number)  # what any batch takes, its place being known
            going_s.append(first_s - (time.perf_counter() - begun_s))
            before = make_loader(source)
            before.take(number - 1 or 1)
            passed = before.take(number)  # as a run has it that was not left
            same += bool((passed.window.ids == first.window.ids).all()) and torch.equal(
                passed.batches[0]["image"], again.batches[0]["image"]
            )
    p50, p99 = quantiles(going_s, (0.5, 0.99))
    write_report(
        sys.argv[2],
        {"going_s": p50, "going_p99_s": p99, "same": same / TRIED, "samples": float(len(source))},
    )


if __name__ == "__main__":
    main()
