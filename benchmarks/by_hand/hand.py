"""The loop that people write, with one feature of torch more.

Fused AdamW, foreach clipping, the loss read every 50 steps.

What each feature is here is what its documentation says to write.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable

import torch
from torch import Tensor, nn
from torch.nn.utils import clip_grad_norm_
from torch.optim import AdamW, Optimizer
from torch.utils.checkpoint import checkpoint

from benchmarks.by_hand.components import PARTS
from benchmarks.step_cost.models import CLIP, LEARNING_RATE, READ_EVERY, Batch, Workload, mean_loss
from benchmarks.step_cost.watch import Watch

DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}


def train(component: str, workload: Workload, watch: Watch) -> None:
    model, batches = prepare(component, workload.model()), workload.batches()
    step = make_step(component, model)
    losses = []
    for number in range(watch.total):
        loss = step(batches[number % len(batches)])
        if number % READ_EVERY == 0:
            losses.append(loss.item())
        watch.tick(model, loss)


def prepare(component: str, model: nn.Module) -> nn.Module:
    """The model with what a component changes of it."""
    if component == "channels last":
        model.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    if component == "recompute":
        for block in model.get_submodule("blocks").children():
            block.forward = functools.partial(checkpoint, block.forward, use_reentrant=False)
    if component == "compile blocks":
        for block in model.get_submodule("blocks").children():
            block.compile()
    if component == "compile model":
        model.compile()
    return model


def make_step(component: str, model: nn.Module) -> Callable[[Batch], Tensor]:
    if component == "update in backward":
        return _in_backward(model)
    optimizer = _optimizer(component, model.parameters())
    parts = PARTS if component == "accumulate" else 1
    dtype = DTYPES.get(component)
    scaler = torch.amp.GradScaler("cpu") if component == "fp16" else None

    def step(batch: Batch) -> Tensor:
        optimizer.zero_grad()
        total = torch.zeros(())
        for inputs, targets in zip(*(each.chunk(parts) for each in batch), strict=True):
            with torch.autocast("cpu", dtype, enabled=dtype is not None):
                loss = mean_loss(model(inputs), targets) / parts
            (loss if scaler is None else scaler.scale(loss)).backward()  # type: ignore[no-untyped-call]
            total += loss.detach()
        if scaler is not None:
            scaler.unscale_(optimizer)
        clip_grad_norm_(model.parameters(), CLIP, foreach=True)
        if scaler is None:
            optimizer.step()
        else:
            scaler.step(optimizer)
            scaler.update()
        return total

    return step


def _optimizer(component: str, parameters: Iterable[Tensor]) -> Optimizer:
    if component == "8-bit state":
        from torchao.optim import AdamW8bit

        return AdamW8bit(parameters, lr=LEARNING_RATE)
    return AdamW(parameters, lr=LEARNING_RATE, fused=True)


def _in_backward(model: nn.Module) -> Callable[[Batch], Tensor]:
    """After torch's tutorial on fusing the optimizer step into the backward pass."""
    optimizers = {
        parameter: AdamW([parameter], lr=LEARNING_RATE, fused=True)
        for parameter in model.parameters()
    }

    def move(parameter: Tensor) -> None:
        optimizers[parameter].step()
        optimizers[parameter].zero_grad()

    for parameter in optimizers:
        parameter.register_post_accumulate_grad_hook(move)  # type: ignore[no-untyped-call]

    def step(batch: Batch) -> Tensor:
        loss = mean_loss(model(batch[0]), batch[1])
        loss.backward()  # type: ignore[no-untyped-call]
        return loss

    return step
