"""What each rank of an arm does: a model's steps, and what rank 0 saw of them.

The ranks share the steps by surefoot or by torch's DistributedDataParallel.

python -m benchmarks.distributed.arm --how surefoot|hand --model convnet --report FILE --folder DIR
                                     --scaling one|pair|weak|gloo|strong|four
"""

from __future__ import annotations

import argparse
import gc
import os
import time
from collections.abc import Callable
from datetime import timedelta
from itertools import islice
from typing import Any

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
from torch.nn.utils import clip_grad_norm_
from torch.optim import AdamW

from benchmarks.by_hand.components import MODELS
from benchmarks.step_cost.arms.surefoot_run import Costed
from benchmarks.step_cost.models import CLIP, LEARNING_RATE, READ_EVERY, SEED, Workload, mean_loss
from surefoot.contract.spec import RunSpec
from surefoot.core import place
from surefoot.runtime.comm.group import Group
from surefoot.train.run import Run
from surefoot.trial import write_report

RANKS = 2


class Meter:
    """Wall and CPU seconds of steps after the first `warmup`, and those waited for other ranks."""

    def __init__(self, workload: Workload) -> None:
        self._workload, self._number = workload, 0
        self._begun = self._waited_s = 0.0, 0.0, 0.0
        self.waited_s = 0.0
        self.measures: dict[str, float] = {}

    def tick(self) -> None:
        """A step is over."""
        self._number += 1
        now = time.perf_counter(), time.process_time(), self.waited_s
        if self._number == self._workload.warmup:
            self._begun = now
        if self._number == self._workload.warmup + self._workload.steps:
            wall_s, cpu_s, waited_s = (
                one - other for one, other in zip(now, self._begun, strict=True)
            )
            steps = self._workload.steps
            self.measures = {
                "wall_s_per_step": wall_s / steps,
                "cpu_s_per_step": cpu_s / steps,
                "waited_s_per_step": waited_s / steps,
            }

    @property
    def total(self) -> int:
        return self._workload.warmup + self._workload.steps


def by_surefoot(workload: Workload, meter: Meter, batch: int, folder: str, transport: str) -> None:
    spec = RunSpec(
        task={
            "use": f"{Costed.__module__}:{Costed.__name__}",
            "workload": workload.name,
            "batches": 2 * workload.num_batches,
        },
        optim={"lr": LEARNING_RATE, "clip": CLIP},
        schedule={"name": "constant"},
        observe={"tensorboard": False},
        train={"length": f"{meter.total} steps", "batch": batch, "seed": SEED, "threads": 1},
        checkpoint={"every": "never"},
        layout={"transport": transport},
    )
    do = Group.do

    def timed(self: Group, job: Callable[[], Any], *what: Any) -> Any:
        begun_s = time.perf_counter()
        try:
            return do(self, job, *what)
        finally:
            meter.waited_s += time.perf_counter() - begun_s

    Group.do = timed  # type: ignore[method-assign]
    with Run(spec, folder=folder, quiet=True) as run:
        for report in islice(run.steps(), meter.total):
            if report.step % READ_EVERY == 0:
                _ = report.loss
            meter.tick()


def by_hand(workload: Workload, meter: Meter, rank: int, ranks: int, batch: int) -> None:
    """The loop that torch's documentation shows: an equal share for each rank, a mean of means."""
    model = workload.model()
    shared = DistributedDataParallel(model) if ranks > 1 else model
    optimizer = AdamW(model.parameters(), lr=LEARNING_RATE, fused=True)
    inputs, targets = workload.samples()
    generator = torch.Generator().manual_seed(SEED)
    order = torch.randperm(len(inputs), generator=generator)
    share = batch // ranks
    for number in range(meter.total):
        first = (number * batch + rank * share) % len(inputs)
        ids = order[first : first + share]
        optimizer.zero_grad()
        loss = mean_loss(shared(inputs[ids]), targets[ids])
        loss.backward()  # type: ignore[no-untyped-call]
        clip_grad_norm_(model.parameters(), CLIP, foreach=True)
        optimizer.step()
        if number % READ_EVERY == 0:
            whole = loss.detach().clone()
            if ranks > 1:
                dist.all_reduce(whole)
            whole.item()
        meter.tick()


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--how", required=True, choices=("surefoot", "hand"))
    parser.add_argument(
        "--scaling", required=True, choices=("one", "pair", "weak", "gloo", "strong", "four")
    )
    parser.add_argument("--model", required=True, choices=MODELS)
    parser.add_argument("--report", required=True)
    parser.add_argument("--folder", required=True)
    asked = parser.parse_args()
    here = place.here()
    first = here.rank == 0
    torch.set_num_threads(1)
    cores = sorted(os.sched_getaffinity(0))
    os.sched_setaffinity(0, {cores[here.local_rank % len(cores)]})
    if asked.scaling == "pair":  # two that know nothing of each other
        asked.folder += f"-{here.rank}"
        for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"):
            os.environ.pop(name, None)
        here = place.here()
    workload = MODELS[asked.model]
    meter = Meter(workload)
    batch = workload.batch * (here.world_size if asked.scaling in ("weak", "gloo", "four") else 1)
    if asked.how == "surefoot":
        by_surefoot(
            workload, meter, batch, asked.folder, "gloo" if asked.scaling == "gloo" else "auto"
        )
    else:
        if here.world_size > 1:
            os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
            dist.init_process_group("gloo", timeout=timedelta(seconds=60))
        by_hand(workload, meter, here.rank, here.world_size, batch)
        if here.world_size > 1:
            dist.destroy_process_group()
    if first:
        write_report(asked.report, meter.measures)
    # what torch's process group leaves in circles else ends some processes by SIGABRT as they exit
    gc.collect()


if __name__ == "__main__":
    main()
