"""Tests of batches on their way to the device.

On a CPU they pass through; on a GPU the next one is copied while the step computes.
"""

from __future__ import annotations

import numpy as np
import pytest
import torch

from surefoot.components.data.blocks import Order
from surefoot.components.data.feed import Feed, SampleWindow
from surefoot.components.data.loader.ahead import Ahead
from surefoot.components.data.loader.batches import LoaderSettings, StepBatches
from surefoot.components.data.loader.jobs import Reader
from surefoot.components.data.loader.loader import Loader
from surefoot.components.data.sources.arrays import Arrays

CUDA = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")


def taken(number: int, batch: object) -> StepBatches:
    return StepBatches(number, SampleWindow(0, 0, np.arange(1)), [batch], [np.arange(1)])


def test_on_a_cpu_batches_pass_through() -> None:
    batch = {"image": torch.ones(2, 3), "words": ["a", "b"]}
    (found,) = Ahead(torch.device("cpu")).take(taken(1, batch))
    assert found["image"] is batch["image"]
    assert found["words"] == ["a", "b"]


@CUDA
@pytest.mark.gpu
@pytest.mark.parametrize("kind", ["thread", "process"])
def test_each_step_has_its_own_batch_on_the_device_to_the_last(kind: str) -> None:
    values = torch.arange(1000).view(1000, 1).expand(1000, 4096).contiguous()
    source = Arrays(values)
    feed = Feed(source, Order(1000, 0), batch=64)
    loader = Loader(feed, Reader(source, None, 0), LoaderSettings(workers=2, kind=kind), last=32)  # type: ignore[arg-type]
    ahead = Ahead(torch.device("cuda"))
    for number in range(1, 33):
        (batch,) = ahead.take(loader.take(number), loader.peek)
        assert batch[0].device.type == "cuda"
        torch.cuda._sleep(1_000_000)  # type: ignore[no-untyped-call]
        kept = batch[0][:, 0].clone()
        del batch  # its memory may be given away only once the step is through with it
        assert kept.tolist() == feed.window(number - 1).ids.tolist()
    loader.close()


@CUDA
@pytest.mark.gpu
def test_a_copy_overlaps_with_what_the_device_computes() -> None:
    large = torch.ones(64 << 20).pin_memory()  # else the host's copy takes most of the time
    ahead, rounds = Ahead(torch.device("cuda")), 8
    work = torch.randn(4096, 4096, device="cuda")

    def run(*, peeks: bool) -> float:
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        torch.cuda.synchronize()
        start.record()
        for number in range(rounds):
            ahead.take(
                taken(number, (large,)),
                (lambda following: taken(following, (large,))) if peeks else None,
            )
            for _ in range(10):
                torch.mm(work, work)
        end.record()
        torch.cuda.synchronize()
        return float(start.elapsed_time(end))

    run(peeks=True)
    assert run(peeks=True) < run(peeks=False)
