"""Task and model of a run, with the norm layers and the weight formats that the spec selects."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

from surefoot.components.optim.groups import check_has_values, check_shaped
from surefoot.components.stability.norms import convert_batchnorm
from surefoot.contract import signature
from surefoot.contract.spec import RunSpec
from surefoot.contract.task import ResolvedTask, find_arguments, find_use, is_named, load, resolve
from surefoot.core.errors import SpecError, TaskError

# torch's wrappers for several devices, by name: importing all takes half as long as torch
WRAPPERS = {
    "DataParallel": "drives all devices from one interpreter "
    "and copies the model to them in every forward pass",
    "DistributedDataParallel": "sums gradients in each backward pass, as surefoot does once a step",
    "FullyShardedDataParallel": "splits weights where surefoot cannot see them",
    "FSDPModule": "splits weights where surefoot cannot see them",
}


def build_model(spec: RunSpec, task: ResolvedTask) -> nn.Module:
    """Return the task's model, with BatchNorm replaced as `train.batchnorm` says.

    Raises SpecError if BatchNorm is to be replaced and the model has none.
    """
    model = task.task.model()
    how = spec.train.batchnorm
    if how == "keep" or not isinstance(model, nn.Module):
        return model
    from surefoot.components.parallel.sync_norm import join_batchnorm

    if not (join_batchnorm(model) if how == "sync" else convert_batchnorm(model, how)):
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
    check_shaped(model)
    check_has_values(model)
    return model.to(device) if device.type != "cpu" else model


def find_wanted_blocks(
    spec: RunSpec, task: ResolvedTask, model: nn.Module
) -> Sequence[str | nn.Module]:
    """Return the blocks that `memory.blocks` names, else those of the task's `blocks(model)`.

    The result is empty if neither names blocks; callers then use the repeated modules of the model.
    """
    return spec.memory.blocks or (list(task.blocks(model)) if task.blocks is not None else [])


def set_storage(model: nn.Module, spec: RunSpec, *, with_masters: bool = True) -> list[str]:
    """Convert the model to the memory format and number formats of the spec; return notes.

    With `with_masters` false, no fp32 master weights are made. Raises SpecError if a pattern of
    `precision.keep` matches no module.
    """

    notes, kept = [], dict[str, nn.Module]()
    if spec.train.memory_format == "channels_last":
        from surefoot.components.compiler.layout import lay_channels_last

        notes = lay_channels_last(model)
    if spec.precision.keep:
        from surefoot.components.precision.keep import keep_in_fp32

        kept = keep_in_fp32(model, spec.precision.keep)
    # a sharded rank keeps its rows in fp32 and gathers them in bf16
    if spec.precision.weights == "bf16" and not (with_masters and spec.layout.shard > 1):
        from surefoot.components.optim.masters import narrow_spectral_vectors, store_narrow

        narrow_spectral_vectors(model, wide=kept.values())
        store_narrow(
            model, wide=kept.values(), with_masters=with_masters and spec.precision.master == "fp32"
        )
    # a sharded rank keeps its rows on the host itself
    if with_masters and spec.memory.offload == "optimizer" and spec.layout.shard == 1:
        from surefoot.components.optim.masters import keep_on_host

        keep_on_host(model)
    notes += [f"computing in fp32: {', '.join(kept)} (precision.keep)"] if kept else []
    if spec.precision.compute == "float8":
        from surefoot.components.precision.float8 import to_float8

        notes += to_float8(model, kept.values(), emulate=spec.precision.emulate).notes
    return notes


def take_task(spec: RunSpec, task: Any = None) -> tuple[ResolvedTask, RunSpec]:
    """Return the resolved task, and a spec from which the task can be built again.

    If `task` is None, the task that the spec names is loaded. If a task object cannot be imported
    again, the returned spec names no task. Raises SpecError if `data.folder` is set although the
    task is an object.
    """
    if task is None:
        return load_task(spec), spec
    if isinstance(task, ResolvedTask):
        return task, spec
    if spec.data.folder is not None:
        raise SpecError(
            "data.folder is given, but the task is already built",
            hint="give the folder when you build the task, and leave data.folder out",
        )
    tables, use, arguments = spec.as_tables(), find_use(task), find_arguments(task)
    if use is not None and arguments is not None:
        folder = arguments.pop("folder", None)
        data = {} if folder is None else {"data": {**tables.get("data", {}), "folder": folder}}
        return resolve(task, importable=use), spec.replace_all(
            {**tables, **data, "task": {"use": use, **arguments}}
        )
    if spec.task.use is not None and is_named(task, spec.task.use):
        return resolve(task, importable=spec.task.use), spec
    return resolve(task), spec.replace_all({**tables, "task": {}})


def load_task(spec: RunSpec) -> ResolvedTask:
    """Build the task that the spec names, with `data.folder` as its argument `folder`.

    Raises SpecError if the spec names no task, or if `data.folder` is set and the task has no
    parameter `folder`.
    """
    if spec.task.use is None:
        raise SpecError(
            "the spec names no task",
            hint='name a task, such as [task] use = "digits", or give the object: Run(spec, task)',
        )
    parameters = spec.task.parameters
    if spec.data.folder is not None:
        if signature.has_parameter(spec.task.use, "folder") is False:
            raise SpecError(
                f"a data folder was given, but {spec.task.use} has no parameter 'folder'",
                hint="leave --data out",
            )
        parameters["folder"] = spec.data.folder
    return load(spec.task.use, parameters)


def check_unwrapped(model: nn.Module) -> None:
    """Raise TaskError for a model that is, or contains, a torch wrapper for several devices.

    DistributedDataParallel is such a wrapper: it would sum the gradients, as surefoot does.
    """
    for place, module in model.named_modules():
        for kind in type(module).__mro__:
            if kind.__name__ in WRAPPERS and kind.__module__.startswith("torch."):
                where = f"{place} of the model" if place else "the model"
                raise TaskError(
                    f"{where} is wrapped in torch's {kind.__name__}, "
                    f"which {WRAPPERS[kind.__name__]}",
                    hint=(
                        "give the model itself: surefoot train SPEC --ranks N copies it to "
                        "N ranks, layout.shard splits it"
                    ),
                )
