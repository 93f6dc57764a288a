"""Replacement of BatchNorm, which mixes the samples of a microbatch, by norms of single samples."""

from __future__ import annotations

from typing import Any, Literal

from torch import nn
from torch.nn.utils.parametrize import is_parametrized

from surefoot.core.errors import SpecError, TaskError

BATCH_NORMS = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d, nn.SyncBatchNorm)
# GroupNorm's usual number; a group of fewer channels loses too much of a 1-D sample
MAX_GROUPS, MIN_CHANNELS = (32, 8)
STATISTICS = ("running_mean", "running_var", "num_batches_tracked")
_FORWARDS = [each.forward for each in BATCH_NORMS]


def find_batch_norms(model: nn.Module) -> dict[str, nn.Module]:
    """Return every BatchNorm and SyncBatchNorm of `model`, by name.

    A module with two names is listed under the first of them.
    """
    return {
        name: module for name, module in model.named_modules() if isinstance(module, BATCH_NORMS)
    }


def convert_batchnorm(model: nn.Module, to: Literal["group", "layer"]) -> list[str]:
    """Convert every BatchNorm of a model into a GroupNorm that has the same weight and bias.

    Each stays the same object, with its hooks and attributes.

    Each sample is then normalized separately, in training and in evaluation, so the result does not
    depend on how a batch is split. Running statistics are discarded. Call the function before the
    optimizer is created.

    Args:
        model: The model, changed in place.
        to: "group" for the most groups that divide the channels, at most 32, with at least 8
            channels each; "layer" for one group, which is LayerNorm over channels and positions.

    Returns:
        The names of the converted modules.

    Raises:
        SpecError: For any other value of `to`.
        TaskError: For a model that is itself a BatchNorm, for a BatchNorm with a different
            forward, such as one that includes an activation, and for one whose weight or bias is
            parametrized.

    >>> model = nn.Sequential(nn.Conv2d(3, 64, 3), nn.BatchNorm2d(64))
    >>> convert_batchnorm(model, "group"), model[1].num_groups
    (['1'], 8)
    """
    if to not in ("group", "layer"):
        raise SpecError(f"BatchNorm cannot be made {to!r}", hint='use "group" or "layer"')
    if isinstance(model, BATCH_NORMS):
        raise TaskError(
            "the model itself is a BatchNorm, which cannot be replaced in place",
            hint="wrap it: nn.Sequential(norm)",
        )
    norms = find_batch_norms(model)
    own = [
        name
        for name, module in norms.items()
        if type(module).forward not in _FORWARDS or "forward" in vars(module)
    ]
    if own:
        raise TaskError(
            (
                f"{own[0]} is a {type(norms[own[0]]).__name__}, a BatchNorm with its own "
                "forward pass, which the replacement would discard"
            ),
            hint="replace it in the model itself",
        )
    computed = [name for name, module in norms.items() if is_parametrized(module)]
    if computed:
        raise TaskError(
            f"{computed[0]} is a BatchNorm with a parametrization, which depends on its class",
            hint="replace it in the model itself, or leave out train.batchnorm",
        )
    converted = {id(module) for module in norms.values()}
    found = [
        name
        for name, module in model.named_modules(remove_duplicate=False)
        if id(module) in converted
    ]
    for module in norms.values():
        _convert_in_place(module, to)
    return found


def _convert_in_place(norm: Any, to: Literal["group", "layer"]) -> None:
    """Make a BatchNorm a GroupNorm; it stays the same object, without running statistics."""
    groups = find_groups(norm.num_features) if to == "group" else 1
    for name in STATISTICS:
        delattr(norm, name)
    vars(norm).update(num_groups=groups, num_channels=norm.num_features)
    norm.__class__ = nn.GroupNorm


def find_groups(channels: int) -> int:
    """Return the number of groups for a GroupNorm of `channels` channels.

    It is the largest number of groups, at most 32, that divides the channels and leaves at least 8
    of them in each group. If there is none, it is 1.

    >>> find_groups(256), find_groups(64), find_groups(12), find_groups(7)
    (32, 8, 1, 1)
    """
    return next(
        number
        for number in range(MAX_GROUPS, 0, -1)
        if channels % number == 0 and (channels >= number * MIN_CHANNELS or number == 1)
    )
