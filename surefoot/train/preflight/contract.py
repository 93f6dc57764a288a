"""Check of the task on a few samples: the return values of `loss`, and the split of batches."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext, suppress
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import nn

from surefoot.components.data import in_place
from surefoot.components.data.sources.iterated import Iterated, copy_of
from surefoot.components.stability.norms import find_batch_norms
from surefoot.contract.task import Batch, Loss, Term
from surefoot.core.errors import SpecError, SurefootError, TaskError
from surefoot.core.units import name_some
from surefoot.runtime.attributes.rewritten import find_renormed, find_rewritten
from surefoot.train.assemble import Assembly
from surefoot.train.assemble.lengths import with_largest_batch
from surefoot.train.assemble.reading import make_feed
from surefoot.train.failure.blame import describe
from surefoot.train.preflight import halves as halving
from surefoot.train.preflight import samples
from surefoot.train.quiet import can_try, depends_on_mode, preserve_state
from surefoot.train.step import LiveUpdate, check_count, check_splittable

OVER_BATCHES = (
    nn.BatchNorm1d,
    nn.BatchNorm2d,
    nn.BatchNorm3d,
    nn.SyncBatchNorm,
    nn.InstanceNorm1d,
    nn.InstanceNorm2d,
    nn.InstanceNorm3d,
)


def check(assembly: Assembly) -> list[str]:
    """Compute every update's loss on a few samples and on their halves, in evaluation mode.

    A loss that the model computes in training mode only is computed in training mode.

    Returns notes on checks that were not possible. Raises TaskError for a loss that is not a Loss,
    is a mean, counts no item in all of the data, disagrees with `counts(batch)`, or must not be
    split although the spec splits it.
    """
    notes: list[str] = []
    trials = samples.LossTrials(assembly)
    state = assembly.task.state
    window, source = assembly.feed.window(0), assembly.feed.source

    def read(part: np.ndarray) -> Batch:
        return assembly.read(window.epoch, part)

    def attempt_all(part: np.ndarray) -> samples.SampleLosses:
        batch = _read_first(read, part)
        what = f"{len(part)} samples" if source.guarantee == "proven" else "the first batch"
        return samples.SampleLosses(
            part,
            batch,
            [trials.attempt(update, batch, what=what) for update in assembly.updates],
        )

    splits = (
        assembly.feed.has_microbatches
        or assembly.spec.memory.on_oom == "halve"
        or len(assembly.feed.microbatches(window)) > 1  # on several ranks
    )
    with preserve_state(assembly.model, state, evaluates=False), trial_context(assembly):
        sampled, warnings = samples.find(assembly, attempt_all)
        (ids, batch, firsts), wholes = sampled, sampled.losses
        assembly.warnings.extend(warnings)
        for update, whole, first in zip(assembly.updates, wholes, firsts, strict=True):
            _check_kind(update.name, whole)
            _check_counts(assembly.task.counts, update.name, whole, batch)
            if splits:
                joins = trials.gathers[update.name] and _check_joined(assembly, update.name)
                counted = assembly.task.counts is not None
                check_splittable(update.name, whole, counted, assembly.feed, joins_ranks=joins)
            if not whole.additive:
                notes.append(
                    f"whether the loss of update {update.name} is a sum "
                    "is not checked: the loss declares additive=False"
                )
                continue
            found = _check_sums(
                assembly,
                update.name,
                halving.start_with(first, batch, partial(trials.attempt, update)),
                read,
                batch,
                ids,
                splits=splits,
                evaluates=update.name not in trials.training_only,
            )
            assembly.warnings.extend(found)
        for update, whole in zip(assembly.updates, wholes, strict=True):
            if whole.additive and update.name not in trials.training_only and can_try(assembly):
                found = _check_in_training_mode(
                    trials, update, read, whole, (ids, batch), splits=splits
                )
                assembly.warnings.extend(found)
        if splits:
            assembly.warnings.extend(_check_between_microbatches(trials, batch, len(ids)))
    assembly.told.extend(_describe_rewritten(assembly))
    if trials.writes and in_place.share_memory(batch, source):
        assembly.warnings.append(f"{in_place.describe('the forward pass')}; {in_place.HINT}")
    with trial_context(assembly):
        notes += _check_gradients(assembly, wholes, batch, len(ids))
        _check_lone_sample(assembly, read)
    recomputed = assembly.engine.recomputed
    if recomputed is not None and recomputed.budget is not None:
        recomputed.budget.forget()
        _measure_blocks(assembly, read)
        notes.append(recomputed.words)
    return notes


def _check_between_microbatches(
    trials: samples.LossTrials, batch: Batch, size: int
) -> Sequence[str]:
    from surefoot.train.preflight import between_microbatches

    return between_microbatches.check(trials.assembly, batch, size, trials.training_only)


def _check_in_training_mode(
    trials: samples.LossTrials,
    update: LiveUpdate,
    read: Callable[[np.ndarray], Batch],
    evaluated: Loss,
    first: tuple[np.ndarray, Batch],
    *,
    splits: bool,
) -> list[str]:
    """Check that a loss is a sum in training mode too, if it differs from `evaluated`.

    Args:
        trials: the trials of the losses.
        update: the update.
        read: reads a batch.
        evaluated: the loss of the batch in evaluation mode.
        first: the samples and their batch.
        splits: whether the run divides its batches.

    Raises:
        TaskError: for a mean, and with `splits` for any other loss that is not a sum.
    """
    if not (splits or depends_on_mode(trials.assembly.model)):
        return []  # only code of the task could tell, and would see a batch too many
    name, attempt = f"{update.name} in training mode", partial(trials.attempt, update, trains=True)
    ids, batch = first
    try:
        trained = attempt(batch, 0)
    except TaskError:  # a step reports it
        return []
    if halving.is_equal(trained.loss, evaluated):
        return []
    # random draws of training, such as mixing samples, may change the loss of a small batch
    is_split = splits and not trained.draws
    again = halving.start_with(trained, batch, attempt)
    found = _check_sums(trials.assembly, name, again, read, batch, ids, splits=is_split)
    return [each for each in found if halving.UNCHECKED not in each]


def _describe_rewritten(assembly: Assembly) -> list[str]:
    """Return a message on the weights that a forward pass writes, except for `max_norm`."""
    known = {id(each.weight) for each in find_renormed(assembly.model).values()}
    names = [name for name, each in find_rewritten(assembly.model).items() if id(each) not in known]
    if not names:
        return []
    ranks = (
        "; on ranks, each element gets the value of the lowest rank that changed it"
        if assembly.engine.steps.collectives.splits
        else ""
    )
    return [f"a forward pass changes {name_some(names, 3)}: evaluations restore its values{ranks}"]


def _measure_blocks(assembly: Assembly, read: Callable[[np.ndarray], Batch]) -> None:
    """Run a microbatch of the largest batch, so that an impossible memory budget fails early."""
    model, feed = assembly.model, assembly.feed
    if not isinstance(feed.source, Iterated):
        feed = make_feed(with_largest_batch(assembly.spec), feed.source)
    ids = feed.microbatches(feed.window(0))[0]
    with preserve_state(model, assembly.task.state, evaluates=False), torch.enable_grad():
        for update in assembly.updates:
            with assembly.engine.policy.context():
                update.loss(model, copy_of(read(ids)))


def trial_context(assembly: Assembly) -> AbstractContextManager[Any]:
    """Return the precision context of trial forward passes: fp32, unless weights are in bf16.

    A sum is distinguished from a mean best in fp32, but weights stored in bf16 cannot compute in
    fp32.
    """
    return (
        assembly.engine.policy.context()
        if assembly.spec.precision.weights == "bf16"
        else nullcontext()
    )


def _check_lone_sample(assembly: Assembly, read: Callable[[np.ndarray], Batch]) -> None:
    """Raise TaskError if a batch of the run has one sample and a norm of the model needs more.

    Without this check, training would fail at the end of the first epoch.
    """
    feed, model, total = assembly.feed, assembly.model, assembly.course.total_steps
    ends = (
        feed.step_of(epoch, feed.order.n - feed.dropped - 1) for epoch in range(feed.num_unlike + 1)
    )
    lone = min(
        (feed.microbatches(feed.window(min(end, (total or end + 1) - 1)))[-1] for end in ends),
        key=len,
    )
    norms: dict[nn.Module, str] = {
        module: name for name, module in model.named_modules() if isinstance(module, OVER_BATCHES)
    }
    is_divided = isinstance(feed.source, Iterated) and feed.source.draws_by_sample
    if len(lone) > 1 or not norms or not samples.reads_by_index(feed.source):
        return
    source: Any = feed.source
    if is_divided and not source.has_lone_sample():
        return
    reached: list[nn.Module] = []
    hooks = [
        module.register_forward_pre_hook(lambda module, _: reached.append(module))
        for module in norms
    ]
    try:
        with preserve_state(model, assembly.task.state, evaluates=False), torch.enable_grad():
            for update in assembly.updates:
                update.loss(model, copy_of(source.read_lone_sample() if is_divided else read(lone)))
    except ValueError as error:
        if not str(error).startswith("Expected more than 1"):
            raise
        module = reached[-1]
        which = "the last batch of an epoch" if feed.microbatch > 1 else "every microbatch"
        if is_divided:
            raise TaskError(
                f"{norms[module]} ({type(module).__name__}) cannot be trained on one sample, and "
                "a microbatch of the DataLoader has one sample",
                hint="set drop_last=True in the DataLoader, or another batch_size or "
                "train.microbatch",
            ) from error
        raise TaskError(
            f"{norms[module]} ({type(module).__name__}) cannot be trained on a batch "
            f"of one sample, and {which} has one sample",
            hint='leave that batch out with data.last_batch = "drop", or use another train.batch'
            if feed.microbatch > 1
            else (
                "set train.microbatch or train.batch above 1, or use a norm that "
                "does not depend on the batch"
            ),
        ) from error
    finally:
        for hook in hooks:
            hook.remove()


def _read_first(read: Callable[[np.ndarray], Batch], ids: np.ndarray) -> Batch:
    try:
        return read(ids)
    except SurefootError:
        raise
    except (Exception, SystemExit) as error:
        raise TaskError(
            f"reading the first batch failed: {describe(error)}",
            hint="run with --traceback to see where",
        ) from error


def _check_counts(
    counts: Callable[[Batch], Any] | None, name: str, loss: Loss, batch: Batch
) -> None:
    """Check that `counts(batch)` agrees with the counts of the loss; raise TaskError if not.

    The gradient is divided by `counts(batch)` with microbatches, and by the counts of the loss
    without them.
    """
    if counts is None:
        return
    told = counts(batch)
    for term in loss.terms:
        if term.fixed:
            continue
        said = told.get(term.name) if isinstance(told, Mapping) else told
        if said is None:
            raise TaskError(
                f"counts(batch) names no {term.name!r}, a term of update {name}",
                hint=f"counts(batch) names {', '.join(told)}",
            )
        if float(said) != float(term.count):
            raise TaskError(
                f"counts(batch) returned {float(said):g} for the term {term.name} of "
                f"update {name}, "
                f"but its loss counts {float(term.count):g}",
                hint=(
                    "count the same items in counts(batch) and in the loss; for "
                    "several terms return {term: count}"
                ),
            )


def _check_kind(name: str, loss: Loss) -> None:
    if not loss.terms:
        raise TaskError(
            f"the loss of update {name} has no term", hint="return Loss.sum(total, count)"
        )
    for term in loss.terms:
        if not isinstance(term.total, torch.Tensor):
            raise TaskError(
                f"the total of term {term.name} must be a scalar tensor",
                hint='sum it: cross_entropy(..., reduction="sum")',
            )
        if not isinstance(term.weight, int | float):
            raise TaskError(
                f"the weight of term {term.name} is a {type(term.weight).__name__}, not a number",
                hint="multiply a learned weight into the total",
            )
        check_count(term.name, term.count)
    if len({term.name for term in loss.terms}) != len(loss.terms):
        raise TaskError(
            f"the loss of update {name} has two terms with the same name",
            hint="name each Term differently",
        )


def _check_gradients(
    assembly: Assembly, wholes: Sequence[Loss], batch: Batch, num_samples: int
) -> list[str]:
    """Return a note for each term that counts items but does not depend on the model.

    In some batches that is right, such as the boxes of images that show no object. A term that has
    no gradient in evaluation mode is tried in training mode: a LoRA layer that has added its
    product to a frozen weight for evaluation computes none. Raises TaskError if no term of an
    update has a gradient.
    """
    notes = []
    for update, whole in zip(assembly.updates, wholes, strict=True):
        loss = whole
        if any(map(_lacks_gradient, whole.terms)):
            with (
                preserve_state(assembly.model, assembly.task.state, evaluates=False),
                torch.enable_grad(),
            ):
                loss = (
                    samples.try_loss(update, assembly, copy_of(batch), "a batch", evaluates=False)
                    or whole
                )
        if samples.is_constant(loss):
            raise TaskError(
                f"the loss of update {update.name} has no gradient: the total of its term "
                f"{loss.terms[0].name} is a constant",
                hint="compute it from the model's output, without detach() or item(); if the "
                "model computes a loss in training mode only, return None from loss in evaluation",
            )
        notes += [
            f"the term {term.name} of update {update.name} has no gradient on the {num_samples} "
            "samples of the check: there it does not train the model"
            for term in filter(_lacks_gradient, loss.terms)
        ]
    return notes


def _lacks_gradient(term: Term) -> bool:
    # without items, the total may be a constant
    return not term.total.requires_grad and float(term.count) != 0


def _check_sums(
    assembly: Assembly,
    name: str,
    attempt: halving.Try,
    read: Callable[[np.ndarray], Batch],
    batch: Batch,
    ids: np.ndarray,
    *,
    splits: bool,
    evaluates: bool = True,
) -> list[str]:
    """Compare the loss of a batch with the losses of its halves; return warnings.

    Raises TaskError for a mean, and with `splits` for any other loss that is not a sum.
    """
    source = assembly.feed.source
    is_whole_batches = isinstance(source, Iterated) and not source.draws_by_sample
    # one index of the source may stand for several samples
    is_grouped = isinstance(source, Iterated) or len(ids) == 1
    halves = halving.cut_batch(batch, None if is_grouped else len(ids))
    is_same = is_certain = halves is not None
    if halves is None and (doubled := halving.double_batch(batch)) is not None:
        batch, halves, is_same = doubled, [batch, batch], True
    if halves is None and samples.reads_by_index(source) and not is_whole_batches:
        later = assembly.feed.window(1).ids
        others = assembly.feed.window(0).ids[1:2] if isinstance(source, Iterated) else later
        parts = [ids[: len(ids) // 2], ids[len(ids) // 2 :]] if len(ids) > 1 else [ids, others]
        try:
            found = [read(part) for part in parts]
            if all(each is not None for each in found):  # a small batch may have one microbatch
                batch, halves = read(np.concatenate(parts)), found
        except Exception:  # noqa: BLE001 - such a batch is never asked for again
            halves = None
        with suppress(Exception):  # tensors that cannot be compared
            is_certain = halves is not None and samples.is_joined(batch, halves)
    if halves is None:
        return [
            (
                f"whether the loss of update {name} is a sum {halving.UNCHECKED}: the first "
                "batch cannot be cut in halves"
            )
        ]
    return halving.check_sums(
        name,
        attempt,
        batch,
        halves,
        is_same=is_same,
        is_split=splits and is_certain and not is_whole_batches,
        norms_batches=_norms_batches(assembly.model, evaluates=evaluates),
    )


def _check_joined(assembly: Assembly, name: str) -> bool:
    """Return whether each rank has one microbatch in each step, as a loss with all_gather needs.

    Raises SpecError if a batch cannot be divided among all ranks.
    """
    feed, ranks = assembly.feed, assembly.engine.steps.collectives.ranks
    if ranks is None or ranks.is_exact or assembly.spec.train.pass_size(1) is not None:
        return False
    num_ranks = ranks.group.size
    if isinstance(feed.source, Iterated):
        source: Any = feed.source
        if source.is_sharded:
            if source.step_size != num_ranks or source.is_uneven:
                raise SpecError(
                    f"the loss of update {name} calls surefoot.all_gather, and the shards of the "
                    f"stream do not give each of {num_ranks} ranks one batch in each step",
                    hint="set data.shards to the number of ranks, and give all shards the same "
                    "number of batches",
                )
            return True
        sizes = source.batch_sizes()
        short = [size for size in sizes if source.count_cut(size) != num_ranks]
        if short or not sizes:
            which = f"a batch of {short[0]}" if short else "a batch of unknown size"
            raise SpecError(
                f"the loss of update {name} calls surefoot.all_gather, and {which} "
                f"of the DataLoader cannot be divided among {num_ranks} ranks",
                hint="set drop_last=True in the DataLoader, and a batch_size that is a multiple of "
                "the ranks",
            )
        return True
    batches = {feed.batch, *(batch for _, batch in assembly.spec.train.ramp)}
    rest = (
        {(feed.order.n - feed.dropped) % batch for batch in batches} - {0}
        if assembly.spec.data.last_batch == "keep"
        else set()
    )
    short = [
        batch
        for batch in sorted(batches | rest)
        if -(-batch // -(-batch // num_ranks)) != num_ranks
    ]
    if short:
        raise SpecError(
            f"the loss of update {name} calls surefoot.all_gather, and a batch of "
            f"{short[0]} cannot be divided among {num_ranks} ranks",
            hint='set data.last_batch = "drop", and train.batch to a multiple of the ranks',
        )
    return True


def _norms_batches(model: nn.Module, *, evaluates: bool) -> bool:
    """Return whether a norm of the model mixes the samples of a batch where the loss is tried."""
    return any(
        each.running_mean is None or (each.training and not evaluates)
        for each in find_batch_norms(model).values()
    )
