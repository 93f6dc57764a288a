"""The contract, tried on a few samples: what a loss must be, and what comes in batches."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import numpy as np
import torch
from torch import nn

from surefoot.components.data import in_place
from surefoot.components.data.lengths import at_its_largest
from surefoot.components.data.sources.iterated import copy_of
from surefoot.contract.task import Batch, Loss, Term, as_loss
from surefoot.core.errors import SurefootError, TaskError
from surefoot.train.assemble import Assembly
from surefoot.train.failure.blame import describe
from surefoot.train.preflight import samples
from surefoot.train.quiet import untouched
from surefoot.train.step import LiveUpdate, check_count, check_splittable
from surefoot.train.step.reading import make_feed

OVER_BATCHES = (
    nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d, nn.SyncBatchNorm, nn.InstanceNorm1d, nn.InstanceNorm2d, nn.InstanceNorm3d,
)  # fmt: skip
TOLERANCE = 1e-3  # relative; a sum and a mean of two halves differ by a factor of two
PARTS_HINT = "stages 2 and 3 gather weights where the model is called: model(...) and no part of it, or set layout.stage = 1"


def check(assembly: Assembly) -> list[str]:
    """Try every update's loss on a few samples, whole and in halves, in evaluation mode; gives notes on what could not be checked.

    Raises TaskError for a loss that is no Loss, is a mean, counts nothing in all of the data, or otherwise than `counts`, or may not be
    split as the spec splits it.
    """
    notes: list[str] = []
    writes = [False]  # whether a loss writes into its batch
    state = assembly.task.state
    window = assembly.feed.window(0)
    source = assembly.feed.source

    def read(part: np.ndarray) -> Batch:
        return assembly.read(window.epoch, part)

    def attempt(update: LiveUpdate, batch: Batch, size: int) -> Loss:
        what = f"{size} samples" if source.guarantee == "proven" else "the first batch"
        tried = copy_of(batch)  # what writes into it would change the data before step 1
        versions = in_place.Versions(tried)
        with untouched(assembly.model, state), torch.enable_grad():  # a loss may differentiate by itself: a gradient penalty does
            loss = _try(update.name, update.loss, assembly.model, tried, what)
        writes[0] |= versions.have_changed()
        return loss

    def attempt_all(part: np.ndarray) -> samples.Tried:
        batch = _first(read, part)
        return samples.Tried(part, batch, [attempt(update, batch, len(part)) for update in assembly.updates])

    train = assembly.spec.train
    splits = (train.microbatch is not None and train.microbatch < train.batch) or assembly.spec.memory.on_oom == "halve"
    unchecked = assembly.warnings if splits else notes  # else no step depends on it
    with untouched(assembly.model, state), computing(assembly):
        (ids, batch, wholes), warnings = samples.find(assembly, attempt_all)
        assembly.warnings.extend(warnings)
        for update, whole in zip(assembly.updates, wholes, strict=True):
            _check_kind(update.name, whole)
            _check_counts(assembly.task.counts, update.name, whole, batch)
            if splits:
                check_splittable(update.name, whole, assembly.task.counts is not None)
            unknown = f"whether the loss of update {update.name} is a sum could not be checked"
            if not whole.additive or source.guarantee != "proven":
                unchecked.append(unknown)
                continue
            parts = [ids[: len(ids) // 2], ids[len(ids) // 2 :]]
            if len(ids) < 2:  # batches of one sample: two of them may differ in shape, and need not go into one
                parts = [ids, assembly.feed.window(1).ids]
                try:
                    whole = attempt(update, read(np.concatenate(parts)), 2)
                except Exception:  # noqa: BLE001 - such a batch is never asked for again
                    unchecked.append(unknown)
                    continue
            try:
                halves = [attempt(update, read(part), len(part)) for part in parts]
            except TaskError:  # a model that is built for one size of batch
                unchecked.append(f"{unknown}: the model takes a batch of {len(ids)} samples and none of {len(parts[0])}")
                continue
            unchecked += _check_sums(update.name, whole, halves)
    if writes[0] and in_place.share_memory(batch, source):
        assembly.warnings.append(f"{in_place.describe('the forward pass')}; {in_place.HINT}")
    with computing(assembly):
        _check_lone_sample(assembly, read)
    budget = assembly.engine.recomputed.budget
    if budget is not None:
        budget.forget()
        _measure_blocks(assembly, read)
        notes.append(assembly.engine.recomputed.words)
    return notes


def _measure_blocks(assembly: Assembly, read: Callable[[np.ndarray], Batch]) -> None:
    """Let a microbatch of the largest batch through, so that a budget that cannot be met is told before the run."""
    model, feed = assembly.model, make_feed(at_its_largest(assembly.spec), assembly.feed.source)
    ids = feed.microbatches(feed.window(0))[0]
    with untouched(model, assembly.task.state, evaluates=False), torch.enable_grad():
        for update in assembly.updates:
            with assembly.engine.policy.context():
                update.loss(model, copy_of(read(ids)))


def computing(assembly: Assembly) -> AbstractContextManager[Any]:
    """In fp32, which tells a sum from a mean best; what is stored in bf16 cannot be computed with in fp32."""
    return assembly.engine.policy.context() if assembly.spec.precision.weights == "bf16" else nullcontext()


def _check_lone_sample(assembly: Assembly, read: Callable[[np.ndarray], Batch]) -> None:
    """Raise TaskError where a batch of one sample comes and a norm over the batch cannot take it: else that ends the first epoch."""
    feed, model, total = assembly.feed, assembly.model, assembly.course.total_steps
    ends = (feed.step_of(epoch, feed.order.n - feed.dropped - 1) for epoch in range(feed.num_unlike + 1))
    lone = min((feed.microbatches(feed.window(min(end, (total or end + 1) - 1)))[-1] for end in ends), key=len)
    norms: dict[nn.Module, str] = {module: name for name, module in model.named_modules() if isinstance(module, OVER_BATCHES)}
    if len(lone) > 1 or not norms or feed.source.guarantee != "proven":
        return
    reached: list[nn.Module] = []
    hooks = [module.register_forward_pre_hook(lambda module, _: reached.append(module)) for module in norms]
    try:
        with untouched(model, assembly.task.state, evaluates=False), torch.enable_grad():
            for update in assembly.updates:
                update.loss(model, copy_of(read(lone)))
    except ValueError as error:
        if not str(error).startswith("Expected more than 1"):
            raise
        module = reached[-1]
        which = "the last of an epoch" if feed.microbatch > 1 else "every microbatch"
        raise TaskError(
            f"{norms[module]} ({type(module).__name__}) cannot be trained on a batch of one sample, as {which} is here",
            hint='leave it out with data.last_batch = "drop", or use another train.batch'
            if feed.microbatch > 1
            else "use more than one sample in a train.microbatch or train.batch, or a norm that does not depend on the batch",
        ) from error
    finally:
        for hook in hooks:
            hook.remove()


def _first(read: Callable[[np.ndarray], Batch], ids: np.ndarray) -> Batch:
    try:
        return read(ids)
    except SurefootError:
        raise
    except (Exception, SystemExit) as error:
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


def _try(name: str, loss: Any, model: Any, batch: Batch, what: str) -> Loss:
    torch.manual_seed(0)  # the same draws for the whole and for its halves; the streams are put back afterwards
    try:
        made = loss(model, batch)
    except SurefootError:
        raise
    except (Exception, SystemExit) as error:
        hint = PARTS_HINT if "DTensor" in str(error) else "run with --traceback to see where"
        raise TaskError(f"a trial of update {name} on {what} before the run failed: {describe(error)}", hint=hint) from error
    return as_loss(made, f"update {name}")


def _check_kind(name: str, loss: Loss) -> None:
    if not loss.terms:
        raise TaskError(f"the loss of update {name} has no term", hint="return Loss.sum(total, count)")
    for term in loss.terms:
        if not isinstance(term.total, torch.Tensor):
            raise TaskError(
                f"the total of term {term.name} is no scalar tensor", hint='sum it: cross_entropy(..., reduction="sum")'
            )
        if not term.total.requires_grad and float(term.count):  # of no items the total may be a constant
            raise TaskError(
                f"the total of term {term.name} carries no gradient",
                hint="compute it from the model's output, without detach() or item()",
            )
        if not isinstance(term.weight, int | float):
            raise TaskError(
                f"the weight of term {term.name} is a {type(term.weight).__name__}, not a number",
                hint="multiply what is learned into the total",
            )
        check_count(term.name, term.count)
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
