"""Check whether the loss of a microbatch depends on the one before, through state of the model."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from surefoot.components import checkpoint
from surefoot.components.data.sources.iterated import copy_of
from surefoot.contract.task import Batch, Loss
from surefoot.train import environment
from surefoot.train.assemble import Assembly
from surefoot.train.preflight.halves import cut_batch
from surefoot.train.quiet import CarriedState, preserve_state
from surefoot.train.step import LiveUpdate

SAME = 1e-5  # relative, of a term
WORDS = (
    "the loss of update {update} depends on the previous microbatch, by {names}, "
    "which a forward pass changes: with train.microbatch the weights differ from "
    "those trained on whole batches; leave train.microbatch out, or keep one "
    "row of state for each sample and select it by an index in the batch"
)


def check(assembly: Assembly, batch: Batch, size: int) -> list[str]:
    """Return warnings if the loss of a half batch changes when the other half is computed before.

    A model may keep a hidden state with a row for each sample of a microbatch. The next microbatch,
    which has other samples, would then continue from it.
    """
    ranks, feed = assembly.engine.steps.collectives.ranks, assembly.feed
    num_ranks = 1 if ranks is None else ranks.group.size
    halves = cut_batch(batch, size) if len(feed.microbatches(feed.window(0))) > num_ranks else None
    if halves is None:
        return []
    found = []
    for update in assembly.updates:
        try:
            names = _find_carried(assembly, update, *halves)
        # a half batch may not fit the state; an error that steps have too is reported there
        except Exception:  # noqa: BLE001
            continue
        if names:
            found.append(WORDS.format(update=update.name, names=", ".join(names)))
    return found


def _find_carried(assembly: Assembly, update: LiveUpdate, first: Batch, second: Batch) -> list[str]:
    """Return the names of the state that `first` changes, if the loss of `second` depends on it."""
    state = assembly.task.state
    with preserve_state(assembly.model, state), torch.enable_grad():
        carried = CarriedState(
            assembly.model, lambda: {} if state is None else _without_generators(state())
        )
        _compute(assembly, update, first)
        if not (names := carried.find_changed()):
            return []
        after = _compute(assembly, update, second)
    with preserve_state(assembly.model, state), torch.enable_grad():
        alone = _compute(assembly, update, second)
    pairs = zip(after.terms, alone.terms, strict=True)
    is_same = all(
        torch.allclose(one.total, other.total, rtol=SAME, atol=0.0, equal_nan=True)
        for one, other in pairs
    )
    return [] if is_same else names


def _compute(assembly: Assembly, update: LiveUpdate, batch: Batch) -> Loss:
    environment.set_seeds(0)
    return update.loss(assembly.model, copy_of(batch))


def _without_generators(state: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in state.items() if not checkpoint.is_generator(value)}
