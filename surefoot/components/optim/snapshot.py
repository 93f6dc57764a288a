"""Detection of changes to the groups, parameters and state of an optimizer.

A training loop may add groups, replace parameters or load a state at any time. The update reads the
contents of an optimizer again only after such a change.
"""

from __future__ import annotations

import inspect
import operator
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any, Self

from torch import Tensor
from torch.optim import SGD, Adam, AdamW, Optimizer

from surefoot.components.optim import fused
from surefoot.components.optim.kinds.by_group import ByGroup, GroupWithState

# of one optimizer; None without a fused update
FusedGroups = Sequence[fused.FusedParamGroup] | None


def fused_groups_of(optimizer: Optimizer) -> list[fused.FusedParamGroup] | None:
    """Return the parameter groups of an optimizer with a fused update, else None.

    A fused update can unscale the gradients and skip itself.
    """
    if fused.supports(optimizer):
        return [fused.FusedGroup(optimizer, group) for group in optimizer.param_groups]
    if (
        isinstance(optimizer, ByGroup)
        and all(group["fused"] for group in optimizer.param_groups)
        and inspect.unwrap(type(optimizer).step) is ByGroup.step
        and not fused.has_step_hooks(optimizer)
    ):
        return [GroupWithState(optimizer, group) for group in optimizer.param_groups]
    return None


def parameters_of(optimizer: Optimizer) -> list[Tensor]:
    """Return the parameters of an optimizer, in the order of its parameter groups."""
    return [parameter for group in optimizer.param_groups for parameter in group["params"]]


@dataclass(frozen=True, eq=False)
class OptimizerSnapshot:
    """Record of an optimizer's groups, parameters and state at one time.

    `objects` are the groups, parameters, state entries and step hooks at that time. `live` iterates
    over the current ones, as long as the optimizer has the same lists of groups and parameters and
    the same state dict. `lists` are the `params` lists of the groups, and `parameters` are copies
    of them. `fused` are the fused groups, None without a fused update. `step` is the `step` that
    was replaced on the optimizer object, such as by a scheduler; None if it is that of its class.
    """

    groups: list[dict[str, Any]]
    lists: list[list[Tensor]]
    parameters: list[list[Tensor]]
    state: Mapping[Tensor, Any]
    live: list[Iterable[Any]]
    objects: list[Any]
    fused: FusedGroups
    step: Any

    @classmethod
    def of(cls, optimizer: Optimizer, of_fused: FusedGroups) -> Self:
        groups, state = optimizer.param_groups, optimizer.state
        lists = [group["params"] for group in groups]
        live: list[Iterable[Any]] = [groups, *lists]
        if of_fused is not None:
            live.append(state.values())
        if fused.supports(optimizer):  # state tensors stay the same objects, so each is compared
            live += [entry.values() for entry in state.values()]
        if isinstance(optimizer, Adam | AdamW | SGD | ByGroup):
            live += [hooks.values() for hooks in fused.step_hooks_of(optimizer)]
        live.append((_END,))
        parameters, objects = [[*each] for each in lists], [*chain.from_iterable(live)]
        step = vars(optimizer).get("step")
        return cls(groups, lists, parameters, state, live, objects, of_fused, step)


_PARAMETERS, _END = operator.itemgetter("params"), object()


def has_same_objects(optimizer: Optimizer, taken: OptimizerSnapshot) -> bool:
    """Return whether an optimizer contains the same objects as when `taken` was recorded.

    This is called at every step, so it has no Python loop.
    """
    if optimizer.state is not taken.state or optimizer.param_groups is not taken.groups:
        return False
    return (
        vars(optimizer).get("step") is taken.step
        and all(map(operator.is_, chain.from_iterable(taken.live), taken.objects))
        and all(map(operator.is_, map(_PARAMETERS, taken.groups), taken.lists))
        and all(map(operator.eq, map(len, taken.lists), map(len, taken.parameters)))
    )


def is_current(optimizer: Optimizer, taken: OptimizerSnapshot) -> bool:
    """Return whether only the fused update itself has changed an optimizer since `taken`."""
    groups = [[*group["params"]] for group in optimizer.param_groups]
    return (
        taken.fused is not None
        and not fused.has_step_hooks(optimizer)
        and optimizer.state is taken.state
        and [*map(len, groups)] == [*map(len, taken.parameters)]
        and all(map(operator.is_, chain(*groups), chain(*taken.parameters)))
        and all(
            each.group is group and each.is_current()
            for each, group in zip(taken.fused, optimizer.param_groups, strict=True)
        )
    )
