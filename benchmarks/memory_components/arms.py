"""One arm: a model, and what is done about its memory.

Its CPU time for a step or an update and the peak of what was allocated in one.

python -m benchmarks.memory_components.arms NAME REPORT
"""

# B batch, T tokens, D width, V vocabulary

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.profiler import ProfilerActivity, profile

from benchmarks.step_cost.models import GPT
from surefoot import linear_cross_entropy, recompute
from surefoot.components.optim.build import build as build_optimizer
from surefoot.components.optim.groups import find_trained
from surefoot.components.optim.update import GuardedUpdate
from surefoot.contract.spec import OptimTable
from surefoot.trial import write_report

WORDS, TOKENS, WIDTH = 33_278, 8_192, 256  # of the head
WAYS = {"none": "none", "full": "full", "every2": "every 2", "operators": "operators"}
WARMUP, STEPS = 1, 3
Step = Callable[[], None]


@dataclass(frozen=True, kw_only=True)
class Size:
    """Of a GPT and its batch, and how often its step is taken before and while it is timed."""

    layers: int
    batch: int
    length: int
    width: int
    heads: int
    warmup: int = WARMUP
    steps: int = STEPS

    def model(self) -> GPT:
        return GPT(layers=self.layers, width=self.width, heads=self.heads, tokens=self.length)


DEEP = Size(layers=24, batch=8, length=128, width=256, heads=4)
# a step takes minutes on one core
REFERENCE = Size(layers=12, batch=32, length=512, width=768, heads=12, warmup=0, steps=1)


def make_head(*, chunked: bool) -> Step:
    """Head and loss alone, forward and backward."""
    torch.manual_seed(0)
    hidden = torch.randn(TOKENS, WIDTH, requires_grad=True)
    weight = (torch.randn(WORDS, WIDTH) * 0.02).requires_grad_()
    targets = torch.randint(0, WORDS, (TOKENS,))

    def step() -> None:
        hidden.grad = weight.grad = None
        if chunked:
            total, _ = linear_cross_entropy(hidden, weight, targets)
        else:
            total = F.cross_entropy(F.linear(hidden, weight), targets, reduction="sum")
        total.backward()

    return step


def make_deep(way: str, size: Size) -> Step:
    """A GPT, forward and backward."""
    torch.manual_seed(0)
    model: nn.Module = size.model()
    recompute(model, way)
    tokens = torch.randint(0, 256, (size.batch, size.length))

    def step() -> None:
        # gradients are there all the time: what is left of the peak are activations
        model.zero_grad(set_to_none=False)
        scores: Tensor = model(tokens)
        F.cross_entropy(scores.flatten(0, 1), tokens.flatten()).backward()

    return step


def make_update(state: str) -> GuardedUpdate:
    """The guarded update of AdamW over the weights of that GPT, whose gradients are there."""
    torch.manual_seed(0)
    model = DEEP.model()
    for parameter in model.parameters():
        parameter.grad = 1e-3 * torch.randn(parameter.shape)
    built = build_optimizer(
        OptimTable.model_validate({"lr": 1e-4, "state": state}), find_trained(model)
    )
    return GuardedUpdate(built.optimizers, clip=1.0)


ARMS: dict[str, Callable[[], Step]] = {
    "head plain": lambda: make_head(chunked=False),
    "head chunked": lambda: make_head(chunked=True),
    **{f"deep {name}": (lambda way=way: make_deep(way, DEEP)) for name, way in WAYS.items()},
    **{
        f"reference {name}": (lambda way=way: make_deep(way, REFERENCE))
        for name, way in WAYS.items()
    },
}


def find_peak(step: Callable[[], object]) -> int:
    """The most bytes that torch had given out at a time in a step, gradients included.

    Those that it had given out at the step's beginning do not count.
    """
    with profile(
        activities=[ProfilerActivity.CPU], profile_memory=True, acc_events=True
    ) as recorded:
        step()
    assert recorded.profiler is not None
    assert recorded.profiler.kineto_results is not None
    changes = [
        (each.start_ns(), each.nbytes())
        for each in recorded.profiler.kineto_results.events()
        if each.name() == "[memory]"
    ]
    now = most = 0
    for _, change in sorted(changes, key=lambda pair: pair[0]):
        now += change
        most = max(most, now)
    return most


def main() -> None:
    name, report = sys.argv[1:]
    torch.set_num_threads(1)
    kind, _, state = name.partition(" ")
    guarded = make_update(state) if kind == "state" else None
    step: Callable[[], object] = ARMS[name]() if guarded is None else guarded.step_if_finite
    size = REFERENCE if kind == "reference" else DEEP
    for _ in range(size.warmup):
        step()
    started_s = time.process_time()
    for _ in range(size.steps):
        step()
    measures = {
        "cpu_s_per_step": (time.process_time() - started_s) / size.steps,
        "peak_bytes": float(find_peak(step)),
    }
    if guarded is not None:
        measures["state_bytes"] = float(
            sum(each.nbytes for _, kept in guarded.states() for each in kept.values())
        )
    write_report(report, measures)


if __name__ == "__main__":
    main()
