"""From the spec's [optim] table to torch optimisers over parameter groups."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.optim import Optimizer

from surefoot.components.optim.groups import Named, build_groups
from surefoot.components.optim.muon import FlatMuon
from surefoot.contract.spec import OptimTable

FUSED_DEVICES = ("cpu", "cuda")
ADAM_KINDS = ("embedding", "head", "norm", "vector")  # what Muon leaves to AdamW


@dataclass(frozen=True)
class Built:
    """The optimisers of one update and what they hold, in words for the log."""

    optimizers: tuple[Optimizer, ...]
    summary: tuple[str, ...]


def build(table: OptimTable, trained: Sequence[Named], groups: list[dict[str, Any]] | None = None) -> Built:
    """Build the optimiser that `table` names over `trained`, in the user's own `groups` where given.

    Fused where torch has it, else foreach; with `fused = false` as torch does it by itself.
    """
    if groups is None:
        groups = build_groups(trained, decay=table.decay, no_decay=table.no_decay, rates=table.rates)
    for group in groups:
        group.setdefault("weight_decay", table.decay)
    if table.name == "muon":
        return _muon(table, trained, groups)
    made = _one(table, groups)
    return Built((made,), _describe(table.name, made))


def _muon(table: OptimTable, trained: Sequence[Named], groups: Sequence[dict[str, Any]]) -> Built:
    names = {id(each.parameter): each.name for each in trained}
    groups = [{**group, "names": [names[id(p)] for p in group["params"]]} for group in groups]
    kinds = {id(each.parameter): each.kind for each in trained}
    matrices, rest = _split(groups, kinds)
    made: list[Optimizer] = []
    if matrices:
        made.append(FlatMuon(matrices, lr=table.lr, momentum=table.momentum, nesterov=table.nesterov))
    if rest:
        made.append(_one(table, rest))
    return Built(tuple(made), tuple(line for each in made for line in _describe(type(each).__name__, each)))


def _split(groups: Sequence[dict[str, Any]], kinds: dict[int, str]) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """Each group in two: hidden matrices, and what Adam takes."""
    matrices: list[dict[str, Any]] = []
    rest: list[dict[str, Any]] = []
    for group in groups:
        pairs = list(zip(group["params"], group["names"], strict=True))
        for into, chosen in (
            (matrices, [pair for pair in pairs if kinds[id(pair[0])] not in ADAM_KINDS]),
            (rest, [pair for pair in pairs if kinds[id(pair[0])] in ADAM_KINDS]),
        ):
            if chosen:
                into.append({**group, "params": [p for p, _ in chosen], "names": [name for _, name in chosen]})
    return matrices, rest


def _one(table: OptimTable, groups: list[dict[str, Any]]) -> Optimizer:
    first = groups[0]["params"][0]
    fused = first.device.type in FUSED_DEVICES and all(torch.is_floating_point(p) for group in groups for p in group["params"])
    how: dict[str, Any] = {} if not table.fused else {"fused": True} if fused else {"foreach": True}
    if table.name == "sgd":
        return torch.optim.SGD(groups, lr=table.lr, momentum=table.momentum, nesterov=table.nesterov, **how)
    kind = torch.optim.Adam if table.name == "adam" else torch.optim.AdamW
    return kind(groups, lr=table.lr, betas=table.betas, eps=table.eps, **how)


def _describe(name: str, optimizer: Optimizer) -> tuple[str, ...]:
    rows = []
    for group in optimizer.param_groups:
        numbers = sum(parameter.numel() for parameter in group["params"])
        rows.append(f"{name}: {numbers:,} numbers, rate x {group.get('rate', 1.0):g}, decay {group['weight_decay']:g}")
    return tuple(rows)
