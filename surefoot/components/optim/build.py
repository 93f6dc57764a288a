"""Construction of torch optimizers and parameter groups from the [optim] table of a spec."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.optim import Optimizer

from surefoot.components.optim.fused import FUSED_DEVICES
from surefoot.components.optim.groups import GroupedParameter, build_groups
from surefoot.contract.spec import OptimTable
from surefoot.contract.state import master_of
from surefoot.core.errors import SpecError, TaskError
from surefoot.core.units import name_some

if TYPE_CHECKING:
    from surefoot.components.optim.average import WeightAverage

# parameters that AdamW updates with optim.name = "muon"
ADAM_KINDS = ("embedding", "head", "norm", "vector")
# parameters without a layer-wise rate in LARS and LAMB
PLAIN_KINDS = ("embedding", "norm", "vector")
NUM_NAMED = 4  # names listed for each reason
Groups = Sequence[dict[str, Any]]
# [optim] keys of surefoot's optimizers only
OWN_KEYS = ("betas", "eps", "momentum", "nesterov", "state", "trust_coefficient", "fused")
PLAIN_TABLE = OptimTable()
GROUP_KEYS = ("no_decay", "lr_multipliers")
UPDATE_KEYS = ("name", "lr", "weight_decay", *OWN_KEYS, *GROUP_KEYS)


@dataclass(frozen=True)
class Built:
    """Optimizers that step together, and lines for the log that describe their parameter groups."""

    optimizers: tuple[Optimizer, ...]
    summary: tuple[str, ...]


def build(
    table: OptimTable,
    trained: Sequence[GroupedParameter],
    groups: list[dict[str, Any]] | None = None,
) -> Built:
    """Build the optimizers that the [optim] table of a spec selects.

    They use the fused kernels of torch if these support all parameters, else the foreach kernels.
    With `fused = false`, torch chooses.

    Args:
        table: The [optim] table.
        trained: The trained parameters.
        groups: Parameter groups that the task defines; None to build them from `table`.

    Raises:
        TaskError: For a parameter with sparse gradients.
    """
    sparse = next((each.name for each in trained if each.is_sparse), None)
    if sparse is not None:
        raise TaskError(
            (
                f"the gradient of {sparse} is sparse, but the optimizers of [optim] need "
                "dense gradients"
            ),
            hint="build the embedding with sparse=False, or give the task an optimizer(groups) "
            "that takes sparse gradients: torch.optim.SGD, Adagrad or SparseAdam",
        )
    if groups is None:
        groups = build_groups(
            trained,
            weight_decay=table.weight_decay,
            no_decay=table.no_decay,
            lr_multipliers=table.lr_multipliers,
        )
    for group in groups:
        group.setdefault("weight_decay", table.weight_decay)
    if table.name == "muon":
        return _muon(table, trained, groups)
    if table.state == "8bit":
        return _build_8bit(table, trained, groups)
    if table.name in ("lars", "lamb"):
        groups = _layers(trained, groups)
    made = _build_optimizer(table, groups)
    return Built((made,), _describe(table.name, made))


def check_effects(table: OptimTable, *, has_own_groups: bool, has_own_optimizers: bool) -> None:
    """Raise SpecError for an [optim] key that has no effect.

    A key has no effect if the task itself builds the parameter groups or the optimizers.
    """
    parts = (
        (
            has_own_optimizers,
            UPDATE_KEYS,
            "each update of the task has a separate optimizer",
            "in that optimizer",
        ),
        (
            has_own_groups,
            GROUP_KEYS,
            "the task defines parameter_groups(model)",
            "in those groups",
        ),
    )
    for applies, keys, why, where in parts:
        idle = [key for key in keys if applies and getattr(table, key) != getattr(PLAIN_TABLE, key)]
        if idle:
            raise SpecError(
                f"optim.{idle[0]} has no effect: {why}", hint=f"leave it out, and set it {where}"
            )


def table_of(table: OptimTable, trained: Sequence[GroupedParameter]) -> OptimTable:
    """Return the [optim] table without the patterns that match none of the parameters `trained`.

    If a step has several updates, `trained` are the parameters of one of them, and a pattern may
    match only parameters of a different one.
    """

    def speaks(pattern: str) -> bool:
        return any(each.matches(pattern) for each in trained)

    rates = {pattern: rate for pattern, rate in table.lr_multipliers.items() if speaks(pattern)}
    return table.model_copy(
        update={"no_decay": tuple(filter(speaks, table.no_decay)), "lr_multipliers": rates}
    )


def make_average(table: OptimTable, model: nn.Module) -> WeightAverage | None:
    """Return an EMA of the trained weights, or None if `optim.ema` is not set.

    With `optim.ema_buffers`, the buffers in the state dict are averaged too.
    """
    if table.ema is None:
        return None
    from surefoot.components.optim.average import WeightAverage

    saved = (
        {id(each) for each in model.state_dict(keep_vars=True).values()}
        if table.ema_buffers
        else set()
    )
    return WeightAverage(
        [master_of(each) for each in model.parameters() if each.requires_grad],
        table.ema,
        ramp=table.ema_ramp,
        buffers=[each for each in model.buffers() if id(each) in saved],
    )


def _layers(trained: Sequence[GroupedParameter], groups: Groups) -> list[dict[str, Any]]:
    """Return the parameter groups of LARS or LAMB, with the key `adapt`.

    `adapt` is False, so that there is no layer-wise learning rate, for norms, biases and
    embeddings. A group of the task may set a different value.
    """
    adapted, rest = _split(trained, groups, lambda each: each.kind in PLAIN_KINDS)
    return [{"adapt": True, **group} for group in adapted] + [
        {"adapt": False, **group} for group in rest
    ]


def _muon(table: OptimTable, trained: Sequence[GroupedParameter], groups: Groups) -> Built:
    from surefoot.components.optim.kinds.muon import FlatMuon

    matrices, rest = _split(
        trained, groups, lambda each: each.kind in ADAM_KINDS or each.parameter.is_complex()
    )
    made: list[Optimizer] = []
    if matrices:
        made.append(
            FlatMuon(matrices, lr=table.lr, momentum=table.momentum, nesterov=table.nesterov)
        )
    if rest:
        made.append(_build_optimizer(table, rest))
    return Built(
        tuple(made), tuple(line for each in made for line in _describe(type(each).__name__, each))
    )


def _build_8bit(table: OptimTable, trained: Sequence[GroupedParameter], groups: Groups) -> Built:
    """Build an optimizer with 8-bit moments, and one with fp32 moments for the other parameters.

    The other parameters are those whose moments cannot be stored in 8 bits. The summary names them,
    with the reasons.
    """
    from surefoot.components.optim.kinds.eight_bits import Adam8bit, reason_unsupported

    narrow, wide = _split(
        trained, groups, lambda each: reason_unsupported(each.parameter) is not None
    )
    made: list[Optimizer] = []
    if narrow:
        made.append(
            Adam8bit(
                narrow, table.lr, betas=table.betas, eps=table.eps, decoupled=table.name == "adamw"
            )
        )
    if wide:
        made.append(_build_optimizer(table, wide))
    lines = [
        line
        for each in made
        for line in _describe(f"{table.name}{' in 8 bits' * isinstance(each, Adam8bit)}", each)
    ]
    reasons: dict[str | None, list[str]] = {}
    for group in wide:
        for name, parameter in zip(group["names"], group["params"], strict=True):
            reasons.setdefault(reason_unsupported(parameter), []).append(name)
    for reason, names in reasons.items():
        lines.append(f"moments stay in fp32: {name_some(names, NUM_NAMED)} ({reason})")
    return Built(tuple(made), tuple(lines))


def _split(
    trained: Sequence[GroupedParameter],
    groups: Groups,
    is_other: Callable[[GroupedParameter], bool],
) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """Split each parameter group into the parameters for which `is_other` is False, and the rest.

    Returns the groups of the former, then the groups of the latter. Frozen parameters are left out.
    """
    named = {id(each.parameter): each for each in trained}
    parts: tuple[list[dict[str, Any]], list[dict[str, Any]]] = ([], [])
    for group in groups:
        # parameters that are not in `named` are frozen
        members = [named[id(parameter)] for parameter in group["params"] if id(parameter) in named]
        for wanted, into in zip((False, True), parts, strict=True):
            chosen = [each for each in members if is_other(each) is wanted]
            if chosen:
                into.append(
                    {
                        **group,
                        "params": [each.parameter for each in chosen],
                        "names": [each.name for each in chosen],
                    }
                )
    return parts


def _build_optimizer(table: OptimTable, groups: list[dict[str, Any]]) -> Optimizer:
    if table.name == "lars":
        from surefoot.components.optim.kinds.layerwise import Lars

        return Lars(
            groups,
            table.lr,
            momentum=table.momentum,
            trust_coefficient=table.trust_coefficient,
            fused=None if table.fused else False,
        )
    if table.name == "lamb":
        from surefoot.components.optim.kinds.layerwise import Lamb

        return Lamb(
            groups, table.lr, betas=table.betas, eps=table.eps, fused=None if table.fused else False
        )
    first = groups[0]["params"][0]
    fused = first.device.type in FUSED_DEVICES and all(
        torch.is_floating_point(p) for group in groups for p in group["params"]
    )
    how: dict[str, Any] = {} if not table.fused else {"fused": True} if fused else {"foreach": True}
    if table.name == "sgd":
        return torch.optim.SGD(
            groups, lr=table.lr, momentum=table.momentum, nesterov=table.nesterov, **how
        )
    kind = torch.optim.Adam if table.name == "adam" else torch.optim.AdamW
    return kind(groups, lr=table.lr, betas=table.betas, eps=table.eps, **how)


def _describe(name: str, optimizer: Optimizer) -> tuple[str, ...]:
    rows = []
    for group in optimizer.param_groups:
        numbers = sum(parameter.numel() for parameter in group["params"])
        own = ", a separate learning rate for each layer" if group.get("adapt") else ""
        rows.append(
            f"{name}: {numbers:,} elements, lr x {group.get('rate', 1.0):g}, weight decay "
            f"{group['weight_decay']:g}{own}"
        )
    return tuple(rows)
