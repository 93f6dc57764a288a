"""The task of a run: built from its spec, or given with a spec that can build it again."""

from __future__ import annotations

from typing import Any

from surefoot.contract import signature
from surefoot.contract.spec import RunSpec
from surefoot.contract.task import ResolvedTask, find_arguments, find_use, is_named, load, resolve
from surefoot.core.errors import SpecError


def take_task(spec: RunSpec, task: Any = None) -> tuple[ResolvedTask, RunSpec]:
    """Return the resolved `task`, or the spec's task, and the spec that can build it again."""
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
    """Build the spec's task with its `[data] folder`. Raises SpecError if none is named."""
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
