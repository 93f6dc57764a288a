"""What a profile of several ranks shows.

Which sums of gradients went on beside the backward pass, and which were waited for.
"""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from surefoot.components.data.sources.arrays import Arrays
from surefoot.components.parallel.replicate import Replicas
from surefoot.components.profiler.tracing.analysis import analyze
from surefoot.components.profiler.tracing.collectives import find_collectives
from surefoot.components.profiler.tracing.trace import OPERATOR, RANGE, Slice, Trace
from surefoot.components.profiler.tracing.window import Window
from surefoot.contract.spec import RunSpec
from surefoot.contract.task import Loss
from surefoot.core import place
from surefoot.train.record.windows import record
from surefoot.train.run import Run
from tests.world.ranks import run_ranks

LATE_S = 0.03  # the last part of the backward pass
BEHIND_S = 0.01  # what rank 1 comes later, so that the first sums of rank 0 take a while


class Slow(torch.autograd.Function):
    """Takes its time over the gradient."""

    @staticmethod
    def forward(context: Any, rows: Tensor) -> Tensor:
        return rows.clone()

    @staticmethod
    def backward(context: Any, gradient: Tensor) -> Tensor:
        time.sleep(LATE_S)
        return gradient


class Layers:
    """Three layers; of the first one the gradient comes late."""

    def model(self) -> nn.Module:
        torch.manual_seed(0)
        return nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 64), nn.Linear(64, 1))

    def data(self, split: str) -> Any:
        return Arrays(rows=torch.ones(32, 64))

    def forward(self, model: Any, batch: dict[str, Tensor]) -> Tensor:
        time.sleep(BEHIND_S * (place.here().rank == 1))
        made: Tensor = model[2](model[1](Slow.apply(model[0](batch["rows"]))))  # type: ignore[no-untyped-call]
        return made

    def loss(self, output: Tensor, batch: dict[str, Tensor]) -> Loss:
        return Loss.sum(output.square().sum(), len(output))


def profiled(folder: Path, *, at_the_end: bool) -> None:
    """Record three steps of a run.

    The bug that is planted with `at_the_end` sends nothing before the backward pass is over.
    """
    if at_the_end:
        Replicas._take = lambda self, parameter: None  # type: ignore[method-assign]
    spec = RunSpec(
        train={"length": "8 steps", "batch": 8, "threads": 1},
        optim={"name": "sgd", "lr": 0.001},
        observe={"tensorboard": False},
        layout={"bucket_size": "16KiB", "first_bucket_size": "128B"},
        evaluate={"every": "100 steps"},
    )
    record(
        Run(spec, Layers(), folder=folder, quiet=True),
        Window(wait=1, warmup=1, active=3),
        [],
        lambda text: None,
    )


@pytest.mark.parametrize("at_the_end", [False, True])
def test_what_is_sent_beside_the_backward_pass_is_overlapped_and_what_is_sent_after_it_is_not(
    at_the_end: bool, tmp_path: Path
) -> None:
    run_ranks(2, lambda rank: profiled(tmp_path / "run", at_the_end=at_the_end), tmp_path / "ranks")
    for home in (tmp_path / "run", tmp_path / "run" / "ranks" / "1"):
        found = analyze(home / "profile" / "trace.json.gz").collectives
        assert found is not None
        buckets = [each for each in found if each.num_calls == 3 and each.name in SIZES]
        assert [each.name for each in buckets] == SIZES
        early, late = buckets[0], buckets[-1]
        assert all(each.backward_ends_s is not None for each in buckets)
        # the last one has no more to run beside
        assert [each.num_early for each in buckets[:2]] == ([0, 0] if at_the_end else [3, 3])
        if not at_the_end:  # how much of them is overlapped depends on who else computes
            assert early.begins_s < late.begins_s
            assert early.overlapped_s > 0.0


SIZES = [
    f"a sum of {4 * (numbers + tensors)} bytes"
    for numbers, tensors in ((64 + 1, 2), (64 * 64 + 64, 2), (64 * 64 + 64, 2))
]


def at(start: int, end: int, name: str, category: str, thread: int = 1) -> Slice:
    return Slice(start * 1000, end * 1000, name, category, ("1", str(thread)), {})


STEP = at(0, 100, "step 1", RANGE)
PASS = at(10, 60, "autograd::engine::evaluate_function: AddmmBackward0", OPERATOR)


def test_of_gloo_what_the_host_waits_for_is_exposed() -> None:
    trace = Trace(
        [
            STEP,
            PASS,
            at(20, 22, "ranks: a sum of 8 bytes", RANGE),
            at(20, 21, "c10d::allreduce_", OPERATOR),
            at(24, 70, "gloo:all_reduce", RANGE, 2),
            at(60, 75, "ranks: the sum of gradients of 8 bytes", RANGE),
            at(80, 90, "ranks: a maximum of 4 bytes", RANGE),
            at(81, 82, "c10d::allreduce_", OPERATOR),
            at(83, 89, "gloo:all_reduce", RANGE, 3),
        ],
        [],
        0,
    )
    first, second = find_collectives(trace) or []
    assert (first.name, first.begins_s, first.ends_s) == ("a sum of 8 bytes", 24e-6, 70e-6)
    assert (first.overlapped_s, first.exposed_s) == pytest.approx((36e-6, 10e-6))
    assert (first.num_early, first.backward_ends_s) == (1, 60e-6)
    assert (second.name, second.num_early) == ("a maximum of 4 bytes", 0)
    assert (second.overlapped_s, second.exposed_s) == pytest.approx((0, 6e-6))


def test_of_a_device_what_no_kernel_runs_beside_is_exposed() -> None:
    trace = Trace(
        [
            STEP,
            PASS,
            at(20, 21, "c10d::allreduce_", OPERATOR),
            at(15, 50, "gemm", "kernel", 7),
            at(40, 80, "ncclDevKernel_AllReduce_Sum_f32", "kernel", 8),
            at(60, 65, "multi_tensor", "kernel", 7),
        ],
        [],
        0,
    )
    (found,) = find_collectives(trace) or []
    assert (found.overlapped_s, found.exposed_s) == pytest.approx((15e-6, 25e-6))
    assert found.name.startswith("nccl")


def test_a_trace_that_does_not_tell_what_was_waited_for_has_no_shares() -> None:
    rows = [
        STEP,
        PASS,
        at(20, 21, "c10d::allreduce_", OPERATOR),
        at(24, 70, "gloo:all_reduce", RANGE, 2),
    ]
    assert find_collectives(Trace(rows, [], 0)) is None
    assert find_collectives(Trace([STEP, PASS], [], 0)) is None
