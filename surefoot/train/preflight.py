"""What can be known to be wrong before a run: the contract is tried on a few samples, and nothing is written."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import torch

from surefoot.components.data import Keys, to_device
from surefoot.contract.task import Batch, Loss, Term, as_loss
from surefoot.core.errors import SurefootError, TaskError
from surefoot.train.assemble import Assembly
from surefoot.train.blame import describe
from surefoot.train.quiet import untouched
from surefoot.train.step import LiveUpdate, check_splittable

NUM_SAMPLES = 8
TOLERANCE = 1e-3  # relative; a sum and a mean of two halves differ by a factor of two


def check(assembly: Assembly) -> list[str]:
    """Try every update's loss on a few samples, whole and in halves, in evaluation mode; gives notes on what could not be checked.

    Raises TaskError for a loss that is no Loss, is a mean, counts nothing or otherwise than `counts`, or may not be split as the
    spec splits it.
    """
    notes: list[str] = []
    state = assembly.task.state
    window = assembly.feed.window(0)
    ids = window.ids[: min(NUM_SAMPLES, len(window.ids))]
    source = assembly.feed.source

    def read(part: np.ndarray) -> Batch:
        batch = to_device(source.read(part), assembly.engine.device)
        augment = assembly.task.augment
        return batch if augment is None else augment(batch, Keys(assembly.spec.train.seed, window.epoch, part))

    def attempt(update: LiveUpdate, batch: Batch) -> Loss:
        with untouched(assembly.model, state), torch.enable_grad():  # a loss may differentiate by itself: a gradient penalty does
            return _try(update.name, update.loss, assembly.model, batch)

    splits = assembly.spec.train.microbatch is not None and assembly.spec.train.microbatch < assembly.spec.train.batch
    with untouched(assembly.model, state):
        batch = _first(read, ids)
        for update in assembly.updates:
            whole = attempt(update, batch)
            _check_kind(update.name, whole)
            _check_counts(assembly.task.counts, update.name, whole, batch)
            if splits:
                check_splittable(update.name, whole, assembly.task.counts is not None)
            if len(ids) < 2 or not whole.additive or source.guarantee != "proven":
                notes.append(f"whether the loss of update {update.name} is a sum could not be checked")
                continue
            middle = len(ids) // 2
            halves = [attempt(update, read(part)) for part in (ids[:middle], ids[middle:])]
            notes += _check_sums(update.name, whole, halves)
    return notes


def _first(read: Callable[[np.ndarray], Batch], ids: np.ndarray) -> Batch:
    try:
        return read(ids)
    except SurefootError:
        raise
    except Exception as error:
        raise TaskError(f"reading the first batch failed: {describe(error)}", hint="run with --traceback to see where") from error


def _check_counts(counts: Callable[[Batch], Any] | None, name: str, loss: Loss, batch: Batch) -> None:
    """With microbatches the gradient is divided by what `counts` says, without them by what the loss says: they must agree."""
    if counts is None:
        return
    told = counts(batch)
    for term in loss.terms:
        said = told.get(term.name) if isinstance(told, Mapping) else told
        if said is None:
            raise TaskError(f"counts(batch) names no {term.name!r}, a term of update {name}", hint=f"it names {', '.join(told)}")
        if float(said) != float(term.count):
            raise TaskError(
                f"counts(batch) says {float(said):g} for the term {term.name} of update {name}, its loss counts {float(term.count):g}",
                hint="count the same items in both; several terms need counts by name: {term: count}",
            )


def _try(name: str, loss: Any, model: Any, batch: Batch) -> Loss:
    torch.manual_seed(0)  # the same draws for the whole and for its halves; the streams are put back afterwards
    try:
        made = loss(model, batch)
    except SurefootError:
        raise
    except Exception as error:
        raise TaskError(
            f"the first forward pass of update {name} failed: {describe(error)}", hint="run with --traceback to see where"
        ) from error
    return as_loss(made, f"update {name}")


def _check_kind(name: str, loss: Loss) -> None:
    if not loss.terms:
        raise TaskError(f"the loss of update {name} has no term", hint="return Loss.sum(total, count)")
    for term in loss.terms:
        if not isinstance(term.total, torch.Tensor):
            raise TaskError(
                f"the total of term {term.name} is no scalar tensor", hint='sum it: cross_entropy(..., reduction="sum")'
            )
        if not term.total.requires_grad:
            raise TaskError(
                f"the total of term {term.name} carries no gradient",
                hint="compute it from the model's output, without detach() or item()",
            )
        if not isinstance(term.weight, int | float):
            raise TaskError(
                f"the weight of term {term.name} is a {type(term.weight).__name__}, not a number",
                hint="multiply what is learned into the total",
            )
        if float(term.count) < 0:
            raise TaskError(
                f"the count of term {term.name} is {float(term.count):g}", hint="count the items that the total sums over"
            )
    if not any(float(term.count) for term in loss.terms):
        raise TaskError(
            f"the loss of update {name} counts 0 items", hint="count the items that the total sums over, at least one"
        )
    if len({term.name for term in loss.terms}) != len(loss.terms):
        raise TaskError(f"the loss of update {name} has two terms of one name", hint="name each Term differently")


def _check_sums(name: str, whole: Loss, halves: list[Loss]) -> list[str]:
    notes = []
    for index, term in enumerate(whole.terms):
        parts = [half.terms[index] for half in halves if index < len(half.terms)]
        verdict = _is_sum(term, parts)
        if verdict is False:
            raise TaskError(
                f"the term {term.name} of update {name} is a mean, not a sum: it does not grow with the batch",
                hint='give the sum and its count: Loss.sum(cross_entropy(..., reduction="sum"), count)',
            )
        if verdict is None:
            notes.append(f"whether the term {term.name} of update {name} is a sum could not be checked")
    return notes


def _is_sum(whole: Term, parts: list[Term]) -> bool | None:
    total, halves = float(whole.total.detach()), [float(part.total.detach()) for part in parts]
    if not np.isfinite([total, *halves]).all() or total == 0.0:
        return None
    if abs(total - sum(halves)) <= TOLERANCE * max(abs(total), *map(abs, halves)):
        return True
    mean = sum(halves) / len(halves)
    return False if abs(total - mean) <= TOLERANCE * abs(total) else None
