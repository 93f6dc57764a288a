"""Saving and restoring of an optimizer's state, by the names of its parameters.

If an optimizer overrides `state_dict`, the result of that method is saved as it is.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.optim import Adam, AdamW, Optimizer

from surefoot.contract.state import with_strides_of
from surefoot.core.errors import RunFolderError, TaskError

MAX_CHARACTERS = 300  # characters
NOT_SAVED = ("params", "names", "lr")  # parameters, and lr: the schedule sets it at every step


def has_own_form(optimizer: Optimizer) -> bool:
    return type(optimizer).state_dict is not Optimizer.state_dict


def state_of(
    optimizer: Optimizer, held: Sequence[Tensor], names: Mapping[int, str]
) -> dict[str, Any]:
    """Return the state of an optimizer for a checkpoint, with tensors that are not copied.

    Args:
        optimizer: The optimizer.
        held: Its parameters, in the order of its groups.
        names: Names of the parameters, by `id`.

    Raises:
        TaskError: For the state of a tensor that the optimizer does not update.
    """
    kind = type(optimizer).__name__
    if has_own_form(optimizer):
        return {"type": kind, "own": optimizer.state_dict()}
    called = names_of(held, names)
    params = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    state = {
        name: dict(optimizer.state[p])
        for name, p in zip(called, params, strict=True)
        if p in optimizer.state
    }
    sparse = {name: keys for name, row in state.items() if (keys := _sparse_keys(row))}
    for name, keys in sparse.items():
        state[name] |= {key: state[name][key].to_dense() for key in keys}
    made: dict[str, Any] = {
        "type": kind,
        "state": state,
        "groups": [_settings(group) for group in optimizer.param_groups],
    }
    if sparse:
        made["sparse"] = sparse
    if shared := _state_without_parameter(optimizer, params):
        made["shared"] = shared
    if any(id(parameter) not in names for parameter in held):
        made["shapes"] = [list(parameter.shape) for parameter in held]
    return made


def _sparse_keys(row: Mapping[str, Any]) -> list[str]:
    """Return the keys of a parameter's state whose values are sparse tensors.

    An example is the momentum buffer of SGD for sparse gradients.
    """
    return [
        key
        for key, value in row.items()
        if isinstance(value, Tensor) and value.layout is torch.sparse_coo
    ]


def _state_without_parameter(optimizer: Optimizer, params: Sequence[Tensor]) -> dict[Any, Any]:
    """Return the optimizer state whose keys are not parameters.

    Raises TaskError for the state of a tensor that the optimizer does not update.
    """
    known = {id(parameter) for parameter in params}
    if any(isinstance(key, Tensor) and id(key) not in known for key in optimizer.state):
        raise TaskError(
            (
                f"{type(optimizer).__name__} has state of a tensor that is not one of its "
                "parameters, which a checkpoint cannot name"
            ),
            hint='store it under a name: self.state["name"]',
        )
    return {key: value for key, value in optimizer.state.items() if not isinstance(key, Tensor)}


def names_of(held: Sequence[Tensor], names: Mapping[int, str]) -> list[str]:
    """Return the name of each parameter in `held`.

    `names` maps the `id` of a parameter to its name. A parameter that it does not contain is named
    by its index, such as "parameter-3".
    """
    return [
        names.get(id(parameter), f"parameter-{number}") for number, parameter in enumerate(held)
    ]


def _settings(group: Mapping[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in group.items() if key not in NOT_SAVED}


def restore(
    optimizer: Optimizer, saved: Mapping[str, Any], held: Sequence[Tensor], names: Mapping[int, str]
) -> None:
    """Restore the state of an optimizer, as `state_of` returned it.

    The learning rates are not restored. If the saved groups are None, the other settings of the
    groups are unchanged too.

    Args:
        optimizer: The optimizer.
        saved: The saved state.
        held: The parameters of the optimizer, in the order of its groups.
        names: Names of the parameters, by `id`.

    Raises:
        RunFolderError: For the state of a different type of optimizer, or of different parameters.
    """

    from surefoot.components.optim.kinds.layerwise import PREVIOUS_NAMES

    kind = type(optimizer).__name__
    if saved["type"] != kind or has_own_form(optimizer) != ("own" in saved):
        raise RunFolderError(
            f"the saved state belongs to {saved['type']}, the optimizer is {kind}",
            hint="resume with the task and the spec that the run had",
        )
    if has_own_form(optimizer):
        optimizer.load_state_dict(saved["own"])
        return
    called = names_of(held, names)
    unknown = sorted(set(saved["state"]) - set(called))
    groups = optimizer.param_groups if saved["groups"] is None else saved["groups"]
    if unknown or len(groups) != len(optimizer.param_groups):
        raise RunFolderError(
            (
                f"the saved state of {kind} belongs to other parameters: "
                f"{', '.join(unknown[:8]) or 'a different number of groups'}"
            ),
            hint="resume with the task and the spec that the run had",
        )
    shapes = [list(parameter.shape) for parameter in held]
    if saved.get("shapes", shapes) != shapes:
        raise RunFolderError(
            (
                f"the saved state of {kind} belongs to parameters of shapes "
                f"{saved['shapes']}, but the optimizer has {shapes}"
            )[:MAX_CHARACTERS],
            hint="give the optimizer the parameters that it had, in the same order",
        )
    for group, settings in zip(optimizer.param_groups, groups, strict=True):
        group.update(
            {
                name if name in group else PREVIOUS_NAMES.get(name, name): value
                for name, value in settings.items()
            }
        )
    params = [(each, group) for group in optimizer.param_groups for each in group["params"]]
    for name, (parameter, group) in zip(called, params, strict=True):
        if name in saved["state"]:
            _fill(optimizer.state[parameter], saved["state"][name], parameter, group)
            for key in saved.get("sparse", {}).get(name, ()):
                optimizer.state[parameter][key] = optimizer.state[parameter][key].to_sparse(1)
        else:
            optimizer.state.pop(parameter, None)
    optimizer.state.update(saved.get("shared", {}))


def _fill(
    state: dict[str, Any], saved: Mapping[str, Any], parameter: Tensor, group: Mapping[str, Any]
) -> None:
    for key in [key for key in state if key not in saved]:
        del state[key]
    for key, value in saved.items():
        held = state.get(key)
        if isinstance(value, Tensor) and value is not held:
            # as Optimizer.load_state_dict: the counter of steps alone may stay on the CPU
            is_counter = key == "step" and not (group.get("capturable") or group.get("fused"))
            there = value.device if is_counter else parameter.device
            where = held.device if isinstance(held, Tensor) else there
            value = with_strides_of(value.to(where), parameter)
        state[key] = value


@torch.no_grad()
def separate_counters(optimizer: Optimizer) -> None:
    """Give each parameter of an Adam or AdamW optimizer its own step counter, for its `step()`."""
    if not isinstance(optimizer, Adam | AdamW):
        return
    seen: set[int] = set()
    for state in optimizer.state.values():
        step = state.get("step")
        if isinstance(step, Tensor):
            state["step"] = step.clone() if id(step) in seen else step
            seen.add(id(step))


def share_counters(optimizer: Optimizer) -> None:
    """Use one step counter for all parameters of a group that have done the same number of steps.

    The fused update then changes only one counter. This is not for an optimizer whose `step()`
    runs: torch would add 1 to the shared counter for each parameter.
    """
    for group in optimizer.param_groups:
        states = [
            optimizer.state[parameter]
            for parameter in group["params"]
            if parameter in optimizer.state
        ]
        steps = [state["step"] for state in states if isinstance(state.get("step"), Tensor)]
        if len(steps) == len(group["params"]) and all(
            torch.equal(step, steps[0]) for step in steps
        ):
            for state in states:
                state["step"] = steps[0]
