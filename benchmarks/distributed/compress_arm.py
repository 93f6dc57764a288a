"""What each of two ranks does: steps of a language model, and what rank 0 saw of them.

Its gradients are sent as `--kind` says.

python -m benchmarks.distributed.compress_arm --kind none|bf16|fp16|powersgd --data DIR --steps N
                                              --report FILE --folder DIR
"""

from __future__ import annotations

import argparse
import os
import time
from itertools import islice
from typing import Any

import torch

from surefoot.contract.spec import RunSpec
from surefoot.core import place
from surefoot.core.statistics import mean
from surefoot.train.run import Run
from surefoot.trial import write_report

WORDS, BATCH, RANK, LEARNING_RATE = 64, 8, 8, 1e-3
LAST = 5  # the loss is the mean over the last fifth of the steps


def make_spec(kind: str, data: str, *, steps: int, seed: int = 0) -> RunSpec:
    """`wikitext2`'s model with short windows.

    So a step on a CPU takes less than its gradients on the way.
    """
    return RunSpec(
        task={"use": "wikitext2", "length": WORDS},
        data={"folder": data},
        observe={"tensorboard": False},
        optim={"name": "adamw", "lr": LEARNING_RATE, "clip": 1.0},
        checkpoint={"every": "never"},
        schedule={"name": "constant", "warmup": f"{max(1, steps // 10)} steps"},
        train={"length": f"{steps + 1} steps", "batch": BATCH, "seed": seed, "threads": 1},
        layout={"compress": kind, "compress_rank": RANK},
    )


def measure(run: Run, steps: int, warmup: int) -> dict[str, float]:
    """Wall seconds and bytes of a step after `warmup` steps, and the mean loss at the end."""
    ranks = run.assembly.engine.steps.collectives.ranks
    assert ranks is not None
    losses: list[Any] = []
    begun_s = sent = 0.0
    for report in islice(run.steps(), steps):
        losses.append(report.loss)
        if report.step == warmup:
            begun_s, sent = time.perf_counter(), ranks.replicas[0].num_bytes
    wall_s, sent = time.perf_counter() - begun_s, ranks.replicas[0].num_bytes - sent
    done = steps - warmup
    parameters = sum(each.numel() for each in run.model.parameters())
    return {
        "wall_s_per_step": wall_s / done,
        "bytes_per_step": sent / done,
        "score": mean(losses[-max(1, steps // LAST) :]),
        "parameters": float(parameters),
    }


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--kind", required=True)
    parser.add_argument("--data", required=True)
    parser.add_argument("--steps", type=int, required=True)
    parser.add_argument("--warmup", type=int, default=2)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--report", required=True)
    parser.add_argument("--folder", required=True)
    asked = parser.parse_args()
    here = place.here()
    torch.set_num_threads(1)
    cores = sorted(os.sched_getaffinity(0))
    os.sched_setaffinity(0, {cores[here.rank % len(cores)]})
    spec = make_spec(asked.kind, asked.data, steps=asked.steps, seed=asked.seed)
    with Run(spec, folder=asked.folder, quiet=True) as run:
        measures = measure(run, asked.steps, asked.warmup)
        is_first = run.group.is_first
        run.stop("measured")
    if is_first:
        write_report(asked.report, measures)


if __name__ == "__main__":
    main()
