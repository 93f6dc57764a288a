"""BatchNorm, whose statistics join the samples of a microbatch, and the norms that may take its place."""

from __future__ import annotations

from typing import Literal

from torch import nn

from surefoot.core.errors import SpecError, TaskError

BATCH_NORMS = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d, nn.SyncBatchNorm)
MOST_GROUPS, LEAST_CHANNELS = 32, 8  # GroupNorm's own default; fewer channels a group leave little of a sample without positions
_FORWARDS = [each.forward for each in BATCH_NORMS]


def find_batch_norms(model: nn.Module) -> dict[str, nn.Module]:
    """Every BatchNorm of `model`, SyncBatchNorm included, by name; one that has two names stands under the first."""
    return {name: module for name, module in model.named_modules() if isinstance(module, BATCH_NORMS)}


def convert_batchnorm(model: nn.Module, to: Literal["group", "layer"]) -> list[str]:
    """Put GroupNorm in the place of every BatchNorm of `model`, with its scale and shift; gives the names of what was replaced.

    "group": as many groups as divide the channels, 32 at most and of 8 channels or more; "layer": one group, which is LayerNorm
    over channels and positions. Running statistics are left behind: each sample is normed by itself, in training as in evaluation,
    so that how a batch is split changes nothing. Call it before the optimiser is built. Raises SpecError for another `to`, TaskError
    for a model that is nothing but a BatchNorm, and for one that does more in its forward pass, as a norm with its activation does.

    >>> model = nn.Sequential(nn.Conv2d(3, 64, 3), nn.BatchNorm2d(64))
    >>> convert_batchnorm(model, "group"), model[1].num_groups
    (['1'], 8)
    """
    if to not in ("group", "layer"):
        raise SpecError(f"BatchNorm cannot be made {to!r}", hint='use "group" or "layer"')
    if isinstance(model, BATCH_NORMS):
        raise TaskError(
            "the model is a BatchNorm itself, which cannot be replaced from inside", hint="wrap it: nn.Sequential(norm)"
        )
    norms = find_batch_norms(model)
    own = [name for name, module in norms.items() if type(module).forward not in _FORWARDS]
    if own:
        raise TaskError(
            f"{own[0]} is a {type(norms[own[0]]).__name__}, a BatchNorm with a forward pass of its own, which would be lost",
            hint="put another norm in its place in the model itself",
        )
    made = {id(module): _norm_for(module, to) for module in norms.values()}
    found = {name: made[id(module)] for name, module in model.named_modules(remove_duplicate=False) if id(module) in made}
    for name, norm in found.items():
        parent, _, last = name.rpartition(".")
        setattr(model.get_submodule(parent), last, norm)
    return list(found)


def _norm_for(norm: nn.Module, to: Literal["group", "layer"]) -> nn.GroupNorm:
    assert isinstance(norm, BATCH_NORMS)
    channels = norm.num_features
    groups = find_groups(channels) if to == "group" else 1
    made = nn.GroupNorm(groups, channels, eps=norm.eps, affine=norm.affine)
    if norm.affine:
        made.weight, made.bias = norm.weight, norm.bias
    return made.train(norm.training)


def find_groups(channels: int) -> int:
    """The groups of a GroupNorm: the most that divide the channels, 32 at most, of at least 8 channels; else one.

    >>> find_groups(256), find_groups(64), find_groups(12), find_groups(7)
    (32, 8, 1, 1)
    """
    return next(
        number
        for number in range(MOST_GROUPS, 0, -1)
        if channels % number == 0 and (channels >= number * LEAST_CHANNELS or number == 1)
    )
