"""The model of a run: built by its task, with norms and storage as the spec says."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import nn

from surefoot.components import optim, precision
from surefoot.components.compiler import lay_channels_last
from surefoot.components.parallel import check_unwrapped, join_batchnorm
from surefoot.components.stability import convert_batchnorm
from surefoot.contract.spec import RunSpec
from surefoot.contract.task import ResolvedTask
from surefoot.core.errors import SpecError, TaskError


def build_model(spec: RunSpec, task: ResolvedTask) -> nn.Module:
    """Return the task's model, with BatchNorm replaced as `train.batchnorm` says.

    Raises SpecError if BatchNorm is to be replaced and the model has none.
    """
    model = task.task.model()
    how = spec.train.batchnorm
    if (
        how != "keep"
        and isinstance(model, nn.Module)
        and not (join_batchnorm(model) if how == "sync" else convert_batchnorm(model, how))
    ):
        raise SpecError(
            f"train.batchnorm is {spec.train.batchnorm!r}, but the model has no BatchNorm",
            hint="leave train.batchnorm out",
        )
    return model


def build_on_device(spec: RunSpec, task: ResolvedTask, device: torch.device) -> nn.Module:
    """Return the task's model on `device`. Raises TaskError for a model that cannot be trained."""
    model = build_model(spec, task)
    if not isinstance(model, nn.Module):
        raise TaskError(
            f"model() of task {task.name} returned a {type(model).__name__}",
            hint="return a torch.nn.Module",
        )
    check_unwrapped(model)
    optim.check_shaped(model)
    return model.to(device) if device.type != "cpu" else model


def find_wanted_blocks(
    spec: RunSpec, task: ResolvedTask, model: nn.Module
) -> Sequence[str | nn.Module]:
    """Return the blocks to recompute: `memory.blocks`, else the task's; empty for repeated ones."""
    return spec.memory.blocks or (list(task.blocks(model)) if task.blocks is not None else [])


def set_storage(model: nn.Module, spec: RunSpec, *, with_masters: bool = True) -> list[str]:
    """Store weights as [precision] says; return notes. Raises SpecError for unknown patterns."""
    notes = lay_channels_last(model) if spec.train.memory_format == "channels_last" else []
    kept = precision.keep_in_fp32(model, spec.precision.keep)
    # rows that are gathered in bf16 stay in fp32
    if spec.precision.weights == "bf16" and not (with_masters and spec.layout.shard > 1):
        optim.store_narrow(
            model, wide=kept.values(), with_masters=with_masters and spec.precision.master == "fp32"
        )
    # a rank that holds rows keeps those there
    if with_masters and spec.memory.offload == "optimizer" and spec.layout.shard == 1:
        optim.keep_on_host(model)
    notes += [f"computing in fp32: {', '.join(kept)} (precision.keep)"] if kept else []
    return notes + precision.convert(model, spec.precision, kept.values())
