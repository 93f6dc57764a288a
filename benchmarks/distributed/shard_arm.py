"""What each rank of an arm does.

A model's steps at a stage of sharding, or the bytes that it holds.

The steps are by surefoot or by torch's own parts.

python -m benchmarks.distributed.shard_arm --how surefoot|hand|bytes|trade --stage 1 --model gpt
                                           --report FILE --folder DIR [--data DIR]
"""

from __future__ import annotations

import argparse
import gc
import os
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from datetime import timedelta
from itertools import islice
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.nn.parallel import DistributedDataParallel
from torch.nn.utils import clip_grad_norm_
from torch.optim import AdamW

from benchmarks.by_hand.components import MODELS
from benchmarks.distributed.arm import RANKS, Meter
from benchmarks.step_cost.arms.surefoot_run import Costed
from benchmarks.step_cost.models import CLIP, LEARNING_RATE, READ_EVERY, SEED, Workload, mean_loss
from surefoot import Loss
from surefoot.components.data.sources.arrays import Arrays
from surefoot.components.optim.update import GuardedUpdate
from surefoot.contract.spec import RunSpec
from surefoot.core import place
from surefoot.core.flight import Kind
from surefoot.runtime.comm.host_memory import Links
from surefoot.tasks.transformer import Transformer
from surefoot.train.run import Run
from surefoot.train.step import update as of_step
from surefoot.trial import write_report

VOCABULARY, LENGTH = 256, 4  # few tokens: what is counted are states, and not activations
# steps of wikitext2, windows of a batch, words of a window
TRADED, TRADED_BATCH, TRADED_LENGTH = 10, 8, 64


class Large:
    """A decoder of 50 million parameters on random tokens."""

    unit = "token"

    def model(self) -> nn.Module:
        torch.manual_seed(SEED)
        return Transformer(VOCABULARY, layers=10, width=640, heads=10, length=LENGTH)

    def data(self, split: str) -> Arrays:
        tokens = torch.randint(
            0, VOCABULARY, (64, LENGTH + 1), generator=torch.Generator().manual_seed(SEED)
        )
        return Arrays(tokens=tokens)

    def forward(self, model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
        made: Tensor = model(batch["tokens"][:, :-1])
        return made

    def loss(self, output: Tensor, batch: dict[str, Tensor]) -> Loss:
        targets = batch["tokens"][:, 1:]
        return Loss.sum(
            nn.functional.cross_entropy(output.flatten(0, 1), targets.flatten(), reduction="sum"),
            targets.numel(),
        )


def spec_of(stage: int, tables: dict[str, dict[str, Any]]) -> RunSpec:
    return RunSpec(
        optim={"name": "adamw", "lr": LEARNING_RATE, "clip": CLIP},
        schedule={"name": "constant"},
        observe={"tensorboard": False},
        checkpoint={"every": "never"},
        layout={"shard": place.here().world_size if stage else 1, "zero_stage": stage or 3},
        **tables,
    )


def by_surefoot(workload: Workload, meter: Meter, stage: int, folder: str) -> None:
    task = {
        "use": f"{Costed.__module__}:{Costed.__name__}",
        "workload": workload.name,
        "batches": 2 * workload.num_batches,
    }
    train = {
        "length": f"{meter.total} steps",
        "batch": RANKS * workload.batch,
        "seed": SEED,
        "threads": 1,
    }
    with Run(spec_of(stage, {"task": task, "train": train}), folder=folder, quiet=True) as run:
        for report in islice(run.steps(), meter.total):
            if report.step % READ_EVERY == 0:
                _ = report.loss
            meter.tick()


def by_hand(workload: Workload, meter: Meter, stage: int) -> None:
    """Stage 1: DistributedDataParallel with ZeroRedundancyOptimizer.

    2 and 3: fully_shard of each block and of the rest.
    """
    rank, model = dist.get_rank(), workload.model()
    optimizer: Any
    if stage == 1:
        computing: nn.Module = DistributedDataParallel(model)
        optimizer = ZeroRedundancyOptimizer(model.parameters(), AdamW, lr=LEARNING_RATE, fused=True)
    else:
        computing = model
        mesh = dist.init_device_mesh("cpu", (RANKS,))
        for block in getattr(model, "blocks", ()):
            fully_shard(block, mesh=mesh, reshard_after_forward=stage == 3)
        fully_shard(model, mesh=mesh, reshard_after_forward=False)
        optimizer = AdamW(model.parameters(), lr=LEARNING_RATE, fused=True)
    inputs, targets = workload.samples()
    order = torch.randperm(len(inputs), generator=torch.Generator().manual_seed(SEED))
    for number in range(meter.total):
        first = (number * RANKS * workload.batch + rank * workload.batch) % len(inputs)
        ids = order[first : first + workload.batch]
        optimizer.zero_grad()
        loss = mean_loss(computing(inputs[ids]), targets[ids])
        loss.backward()  # type: ignore[no-untyped-call]
        clip_grad_norm_(model.parameters(), CLIP, foreach=True)
        optimizer.step()
        if number % READ_EVERY == 0:
            whole = loss.detach().clone()
            dist.all_reduce(whole)
            whole.item()
        meter.tick()


@contextmanager
def counting() -> Iterator[list[int]]:
    """The bytes of this rank's living tensors.

    Before each backward pass, and before each update.
    """
    seen = list[int]()
    update, backward = GuardedUpdate.step_if_finite, of_step.backward

    def count() -> None:
        gc.collect()
        storages = {
            each.untyped_storage().data_ptr(): each.untyped_storage().nbytes()
            for each in gc.get_objects()
            if type(each) in (Tensor, nn.Parameter)
        }
        links = [each for each in gc.get_objects() if isinstance(each, Links)]
        for each in (
            tensor for link in links for files in link._theirs.values() for tensor in files.values()
        ):
            # mapped here, and held by another rank
            storages.pop(each.untyped_storage().data_ptr(), None)
        seen.append(sum(storages.values()))

    def before_update(self: GuardedUpdate, *args: Any) -> Any:
        count()
        return update(self, *args)

    def before_backward(*args: Any) -> None:
        count()
        backward(*args)

    GuardedUpdate.step_if_finite = before_update  # type: ignore[method-assign]
    of_step.backward = before_backward
    try:
        yield seen
    finally:
        GuardedUpdate.step_if_finite, of_step.backward = update, backward  # type: ignore[method-assign]


def count_bytes(stage: int, folder: str) -> dict[str, float]:
    """The most bytes that this rank holds in the third step."""
    train = {"length": "3 steps", "batch": place.here().world_size, "seed": SEED, "threads": 1}
    with (
        counting() as seen,
        Run(spec_of(stage, {"train": train}), Large(), folder=folder, quiet=True) as run,
    ):
        numbers = sum(each.numel() for each in run.model.parameters())
        for _ in islice(run.steps(), 3):
            pass
    return {"held_bytes": float(max(seen[-2:])), "num_parameters": float(numbers)}


def trade(stage: int, data: str, folder: str) -> dict[str, float]:
    """Of `wikitext2` with short windows the bytes held in the third step.

    And bytes sent and seconds of the later ones, and the last one's loss.
    """
    train = {
        "length": f"{TRADED} steps",
        "batch": TRADED_BATCH,
        "microbatch": 2,
        "seed": SEED,
        "threads": 1,
    }
    tables: dict[str, Any] = {
        "task": {"use": "wikitext2", "length": TRADED_LENGTH},
        "data": {"folder": data},
        "train": train,
    }
    with ExitStack() as stack:
        run = stack.enter_context(Run(spec_of(stage, tables), folder=folder, quiet=True))
        numbers, steps = sum(each.numel() for each in run.model.parameters()), run.steps()
        with counting() as seen:
            for _ in islice(steps, 3):
                pass
        ranks = run.assembly.engine.steps.collectives.ranks
        assert ranks is not None
        before, begun_s = _sent(ranks), time.perf_counter()
        reports = list(islice(steps, TRADED - 3))
        wall_s = (time.perf_counter() - begun_s) / len(reports)
        sent, loss = (_sent(ranks) - before) / len(reports), reports[-1].loss
    assert loss is not None
    return {
        "held_bytes": float(max(seen[-5:])),
        "num_parameters": float(numbers),
        "sent_bytes": sent,
        "wall_s_per_step": wall_s,
        "words_per_s": TRADED_BATCH * TRADED_LENGTH / wall_s,
        "loss": loss,
    }


def _sent(ranks: Any) -> float:
    """Bytes so far, a sum counted twice: as a sum in parts, and a gathering of the parts."""
    if ranks.sharded is None:
        return 2.0 * float(ranks.replicas[0].num_bytes)
    traffic = ranks.sharded.group.traffic
    return float(traffic[Kind.SCATTER] + traffic[Kind.GATHER])


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--how", required=True, choices=("surefoot", "hand", "bytes", "trade"))
    parser.add_argument("--data", help="the folder of wikitext-2, for trade")
    parser.add_argument("--stage", required=True, type=int)
    parser.add_argument("--model", choices=MODELS, default="gpt")
    parser.add_argument("--report", required=True)
    parser.add_argument("--folder", required=True)
    asked = parser.parse_args()
    here = place.here()
    torch.set_num_threads(1)
    cores = sorted(os.sched_getaffinity(0))
    os.sched_setaffinity(0, {cores[here.local_rank % len(cores)]})
    workload = MODELS[asked.model]
    meter = Meter(workload)
    if asked.how == "surefoot":
        by_surefoot(workload, meter, asked.stage, asked.folder)
    elif asked.how == "bytes":
        meter.measures = count_bytes(asked.stage, asked.folder)
    elif asked.how == "trade":
        meter.measures = trade(asked.stage, asked.data, asked.folder)
    else:
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
        dist.init_process_group("gloo", timeout=timedelta(seconds=60))
        by_hand(workload, meter, asked.stage)
        dist.destroy_process_group()
    if here.rank == 0:
        write_report(asked.report, meter.measures)


if __name__ == "__main__":
    main()
