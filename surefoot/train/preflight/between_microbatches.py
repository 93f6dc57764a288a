"""Check whether the loss of a microbatch depends on the one before, through state of the model."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from contextlib import AbstractContextManager, suppress
from functools import partial
from typing import Any

import torch

from surefoot.components import checkpoint
from surefoot.components.data.sources.iterated import copy_of
from surefoot.contract.task import Batch, Loss
from surefoot.runtime.attributes.rewritten import find_rewritten
from surefoot.train import environment
from surefoot.train.assemble import Assembly
from surefoot.train.preflight.halves import cut_batch
from surefoot.train.quiet import CarriedState, can_try, preserve_state, trial_in_training_mode
from surefoot.train.step import LiveUpdate

SAME = 1e-5  # relative, of a term
WORDS = (
    "the loss of update {update} depends on the previous microbatch, by {names}, "
    "which a forward pass changes: with several microbatches in a step the weights differ from "
    "those trained on whole batches; leave train.microbatch and train.accumulate out, or keep one "
    "row of state for each sample and select it by an index in the batch"
)


def check(
    assembly: Assembly, batch: Batch, size: int, training_only: Collection[str] = ()
) -> list[str]:
    """Return warnings if the loss of a half batch changes when the other half is computed before.

    The losses are computed in evaluation mode, those of the updates `training_only` in training
    mode.

    A model may keep a hidden state with a row for each sample of a microbatch. The next microbatch,
    which has other samples, would then continue from it.
    """
    ranks, feed = assembly.engine.steps.collectives.ranks, assembly.feed
    num_ranks = 1 if ranks is None else ranks.group.size
    halves = cut_batch(batch, size) if len(feed.microbatches(feed.window(0))) > num_ranks else None
    if halves is None:
        return []
    quietly = partial(preserve_state, assembly.model, assembly.task.state)
    found = []
    for update in assembly.updates:
        trains_only = update.name in training_only
        contexts: list[Callable[[], AbstractContextManager[None]]] = [
            partial(quietly, evaluates=not trains_only)
        ]
        if can_try(assembly):
            contexts.append(partial(trial_in_training_mode, assembly))
        names = dict[str, None]()
        for context in contexts:
            # a half batch may not fit the state; an error that steps have too is reported there
            with suppress(Exception):
                names |= dict.fromkeys(_find_carried(assembly, context, update, *halves))
        if names:
            found.append(WORDS.format(update=update.name, names=", ".join(names)))
    return found


def _find_carried(
    assembly: Assembly,
    context: Callable[[], AbstractContextManager[None]],
    update: LiveUpdate,
    first: Batch,
    second: Batch,
) -> list[str]:
    """Return the names of the state that `first` changes, if the loss of `second` depends on it.

    `context` sets the mode of the model, and restores all state at its end.
    """
    state = assembly.task.state
    with context(), torch.enable_grad():
        carried = CarriedState(
            assembly.model, lambda: {} if state is None else _without_generators(state())
        )
        weights = find_rewritten(assembly.model)
        before = {name: weight.detach().clone() for name, weight in weights.items()}
        _compute(assembly, update, first)
        changed = [name for name in weights if not torch.equal(weights[name], before[name])]
        if not (names := [*carried.find_changed(), *changed]):
            return []
        after = _compute(assembly, update, second)
    with context(), torch.enable_grad():
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
