"""Evaluation of every sample of a split once, in order; the training state is left unchanged.

The batches are divided among the ranks. Results are merged in the order of the batches, so they are
bitwise identical for any number of ranks. Every rank evaluates the whole split if a metric holds
more than tensors, numbers and text, if the model keeps state from one batch to the next, or if the
data can only be read sequentially.

Random draws depend only on the seed, the split, the batch size and the index of a batch. The same
weights therefore have the same score at any step of the training, on any number of ranks and with
any number of workers. Metrics and an additive loss do not depend on the batch size, because sums
and counts are merged; a loss that is not additive compares the samples of one batch.
"""

from __future__ import annotations

import math
import numbers
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, closing, nullcontext
from dataclasses import dataclass
from itertools import islice
from traceback import walk_tb
from typing import Any, TypeVar, cast, get_args

import numpy as np
import torch
from torch import Tensor, nn

from surefoot.components import checkpoint
from surefoot.components.data.feed import WHOLE, Share, to_device
from surefoot.components.data.loader.jobs import choose_samples, look, spread_samples
from surefoot.components.data.order import derive
from surefoot.components.data.sources.iterated import Iterated
from surefoot.components.metrics import Better, Mean
from surefoot.components.precision.policy import Compute, compute_context
from surefoot.contract.events import Evaluated
from surefoot.contract.task import Batch, Loss, Metric, Output, ResolvedTask, Source, as_loss
from surefoot.core.errors import EndOfStream, SpecError, SurefootError, TaskError
from surefoot.runtime.attributes.rewritten import watch_weights
from surefoot.runtime.comm.group import ALONE, Group
from surefoot.train.environment import set_seeds
from surefoot.train.failure.blame import describe
from surefoot.train.quiet import CarriedState, preserve_state
from surefoot.train.record import batch_results
from surefoot.train.record.batch_results import BatchResult, Merged
from surefoot.train.step import check_count

NUM_TRIED = 8
DRAWS = 0x6576616C  # distinguishes the draws of evaluations from other draws
GRADIENT_HINT = (
    "surefoot evaluates under torch.no_grad(): put the lines of forward, loss or "
    "metrics that compute gradients under `with torch.enable_grad():`"
)
LOSS_GUIDE = 'docs/guides/writing-a-task.md, "A loss in training only"'
NO_LOSS_HINT = (
    "run with --traceback to see where; if the model computes a loss in training mode only, return "
    f"None from loss in evaluation, and give metrics ({LOSS_GUIDE})"
)
# the last argument is the seed; yields each batch with its number of samples, if known
Reading = Callable[[Source, int, torch.device, Share, int], Iterator[tuple[Batch, int | None]]]
_Found = TypeVar("_Found")
Tell = Callable[[int, int | None], None]  # samples done, total or None


@dataclass(frozen=True)
class Evaluation:
    """Result of one evaluation of a split.

    `score` names the metric that selects the best checkpoint, `value` is the value of that metric,
    `precision` the precision of the forward passes.
    """

    split: str
    num_samples: int
    loss: float | None
    metrics: dict[str, float | None]
    units: dict[str, str]
    score: str
    better: Better
    elapsed_s: float
    precision: Compute = "fp32"

    @property
    def value(self) -> float | None:
        return self.loss if self.score == "loss" else self.metrics[self.score]

    def as_event(self, generation: int, step: int, *, best: bool) -> Evaluated:
        """Return the Evaluated record of this result for the weights after `step`."""
        return Evaluated(
            generation=generation,
            time_s=time.time(),
            step=step,
            split=self.split,
            num_samples=self.num_samples,
            loss=self.loss,
            metrics=self.metrics,
            score=self.score,
            better=self.better,
            best=best,
            elapsed_s=self.elapsed_s,
            units=self.units,
            precision=self.precision,
        )


def evaluate(
    model: nn.Module,
    task: ResolvedTask,
    source: Source,
    *,
    split: str,
    batch: int,
    device: torch.device,
    score: str | None = None,
    precision: Compute = "fp32",
    tell: Tell | None = None,
    read: Reading | None = None,
    group: Group = ALONE,
    is_even: bool = False,
    seed: int = 0,
    limit: int | None = None,
) -> Evaluation:
    """Evaluate `model` on the samples of `source`, in batches of `batch` samples.

    Args:
        model: The model.
        task: The task.
        source: The samples.
        split: Name of the split.
        batch: Number of samples per batch.
        device: Device of the model.
        score: Name of the metric that is the score; None for the first metric, or else the loss.
        precision: Number format of the forward pass.
        tell: Function of the number of samples done and the total number, which is None if unknown.
        read: Reader of batches; None to read each batch in this process when it is needed.
        group: The ranks that share the samples.
        is_even: Run equally many forward passes on all ranks, because each pass gathers weights.
        seed: Seed of random draws.
        limit: Largest number of batches (key `evaluate.batches`); None for all samples.

    Raises:
        SpecError: If `score` is not a metric of the task.
        TaskError: If a method of the task returns a value of the wrong type.
    """
    started_s = time.perf_counter()
    source = spread_samples(source, limit and limit * batch)
    total, size, num_samples = count_samples(source), _batch_size(source, batch), 0
    shares = not group.is_alone and source.guarantee == "proven"
    share = Share(group.rank, group.size) if shares else WHOLE
    merged, mine = Merged(), list[BatchResult]()
    compute, key = compute_context(precision, device), evaluation_key(seed, split)
    with preserve_state(model, task.state), _generators_kept(source):
        carried = CarriedState(model, task.state) if shares else None
        for inputs, known in _read(source, size, device, share, key, read, limit):
            part = _evaluate_batch(model, task, inputs, known, compute)
            mine.append(part) if shares else merged.add(part)
            num_samples += part.num_samples
            if carried is not None:
                carried.after_batch()
            if tell is not None:
                tell(num_samples if total is None else min(num_samples * share.size, total), total)
        has_changed = carried is not None and carried.has_changed()
        num_idle = -(-len(source) // (size * share.size)) - len(mine) if shares and is_even else 0
        for _ in range(num_idle):
            with compute():
                _outcome(model, task, next(batches(source, size, device)))
    if shares:
        gathered = batch_results.gather(mine, group, can_share=not has_changed)
        if gathered is None:
            return evaluate(
                model,
                task,
                source,
                split=split,
                batch=batch,
                device=device,
                score=score,
                precision=precision,
                tell=tell,
                read=read,
                seed=seed,
            )
        for part in gathered:
            merged.add(part)
    return _summarize(merged, task, split, score, precision, time.perf_counter() - started_s)


def _read(
    source: Source,
    size: int,
    device: torch.device,
    share: Share,
    key: int,
    read: Reading | None,
    limit: int | None,
) -> Iterator[tuple[Batch, int | None]]:
    """Yield the batches of an evaluation, up to `limit`, with seeded random generators."""
    knows_end = not isinstance(source, Iterated) or source.has_length
    found = ((knows_end and read) or _count_batches)(source, size, device, share, key)
    yield from seed_each(islice(found, limit), key, share)
    if limit is not None and isinstance(source, Iterated):
        source.close()  # its workers would read on


def _summarize(
    merged: Merged,
    task: ResolvedTask,
    split: str,
    score: str | None,
    precision: Compute,
    elapsed_s: float,
) -> Evaluation:
    """Return the evaluation from merged results. Raises SpecError or TaskError for a bad metric."""
    for name, metric in merged.metrics.items():
        if not hasattr(metric, "value"):
            raise TaskError(
                f"merge() of metric {name!r} of task {task.name} returned "
                f"{'None' if metric is None else checkpoint.name_kind(metric)}, not a metric",
                hint="return the merged metric, a new object or self",
            )
    values = {name: _number(name, metric.value(), task) for name, metric in merged.metrics.items()}
    chosen, better = _choose(score, merged)
    for name, (mean, _) in merged.terms.items():
        check_count(name, mean.count)
    means = [(mean.value(), weight) for mean, weight in merged.terms.values()]
    known = [weight * value for value, weight in means if value is not None]
    total = sum(known) if known else None
    units = {name: str(getattr(metric, "unit", "")) for name, metric in merged.metrics.items()}
    return Evaluation(
        split, merged.num_samples, total, values, units, chosen, better, elapsed_s, precision
    )


def _evaluate_batch(
    model: nn.Module,
    task: ResolvedTask,
    inputs: Batch,
    num_samples: int | None,
    compute: Callable[[], AbstractContextManager[Any]],
) -> BatchResult:
    """Return the loss terms, the metrics and the number of samples of a batch.

    If `num_samples` is None, the count of the first loss term is used.
    """
    with compute():
        output, loss = _outcome(model, task, inputs)
    terms = tuple(
        (each.name, each.total.detach().double(), each.count, each.weight)
        for each in (() if loss is None else loss.terms)
    )
    for name, _, count, _ in terms:
        if not isinstance(count, Tensor):  # a tensor is checked once, in the sum
            check_count(name, count)
    count = num_samples if num_samples is not None else _count_of(terms)
    return BatchResult(count, terms, _metrics(task, output, inputs))


def count_samples(source: Source) -> int | None:
    """Return the number of samples of `source`; None for an iterable, which yields batches."""
    return None if isinstance(source, Iterated) else len(source)


def _count_of(terms: tuple[tuple[str, Tensor, Any, float], ...]) -> int:
    """Return the count of the first loss term, rounded; 0 without terms."""
    count = float(terms[0][2]) if terms else 0.0
    return round(count) if math.isfinite(count) else 0


def _generators_kept(source: Source) -> AbstractContextManager[None]:
    """Return a context that restores the loader's random generators, which training may use."""
    keep = getattr(source, "keep_generators", None)
    kept: AbstractContextManager[None] = nullcontext() if keep is None else keep()
    return kept


def batches(source: Source, batch: int, device: torch.device) -> Iterator[Batch]:
    """Yield every sample of `source` once, in order, in batches; the last batch may be smaller."""
    size = _batch_size(source, batch)
    for start in range(0, len(source), size):
        ids = np.arange(start, min(start + size, len(source)), dtype=np.int64)
        yield to_device(look(source, 0, ids, 0), device)


def count_batches(
    source: Source, batch: int, device: torch.device, key: int
) -> Iterator[tuple[Batch, int | None]]:
    """Yield every sample of `source` once, in order, in batches with their sample counts.

    A count is None if it is not known. The global random generators are seeded before each batch,
    as in an evaluation with `key`.
    """
    return seed_each(_count_batches(source, _batch_size(source, batch), device, WHOLE, key), key)


def evaluation_key(seed: int, split: str) -> int:
    """Return the key from which the random generators of an evaluation of `split` are seeded."""
    return derive(seed, *split.encode(), DRAWS)


def seed_each(found: Iterator[_Found], key: int, share: Share = WHOLE) -> Iterator[_Found]:
    """Yield the items of `found`; seed the global random generators before each one is yielded.

    The seed depends on `key` and on the index of the item among the items of all ranks.
    """
    for number, each in enumerate(found):
        set_seeds(derive(key, number * share.size + share.rank) >> 1)
        yield each


def _count_batches(
    source: Source, batch: int, device: torch.device, share: Share, key: int
) -> Iterator[tuple[Batch, int | None]]:
    for number, start in enumerate(range(0, len(source), batch)):
        if number % share.size == share.rank:
            ids = np.arange(start, min(start + batch, len(source)), dtype=np.int64)
            try:
                inputs = to_device(look(source, 0, ids, key), device)
            except EndOfStream:
                return
            yield (
                inputs,
                source.count_samples(0, start, inputs)
                if isinstance(source, Iterated)
                else len(ids),
            )


def _batch_size(source: Source, batch: int) -> int:
    return batch if source.guarantee == "proven" else 1  # a sequential source returns whole batches


def try_out(
    model: nn.Module,
    task: ResolvedTask,
    source: Source,
    *,
    split: str,
    score: str | None,
    device: torch.device,
    batch: int = NUM_TRIED,
    precision: Compute = "fp32",
) -> Evaluation:
    """Evaluate a few samples, to find the metrics and whether a higher or a lower score is better.

    There are two batches if a split of samples has that many, so that metrics are merged. If the
    model fails on so small a batch, batches of `batch` samples are used. Raises SpecError if
    `score` names no metric, TaskError if a metric fails.
    """

    def tried(size: int) -> Evaluation:
        # a smaller second batch only where an evaluation of the run has one too
        has_two = size == batch or len(source) >= 2 * size
        if isinstance(source, Iterated):  # a stream may have no way to put back a second batch
            has_two = False
        # a forward pass may write into its inputs; the data must not change
        few = choose_samples(
            source, np.arange(min(2 * size if has_two else size, len(source))), copies=True
        )
        with watch_weights(model):
            return evaluate(
                model,
                task,
                few,
                split=split,
                batch=size,
                device=device,
                score=score,
                precision=precision,
            )

    try:
        # ends the workers of the iterable until they are needed
        with closing(source) if isinstance(source, Iterated) else nullcontext():
            if isinstance(source, Iterated):
                return tried(1)
            try:
                return tried(min(NUM_TRIED, batch))
            except Exception as error:
                if isinstance(error, SurefootError) or min(batch, len(source)) <= NUM_TRIED:
                    raise
            return tried(batch)  # a model may be built for batches of one size
    except SurefootError:
        raise
    except (Exception, SystemExit) as error:
        raise TaskError(
            f"a trial evaluation of a few samples of {split!r} "
            f"before the run failed: {describe(error)}",
            hint=_hint_failed_trial(error, task),
        ) from error


def _hint_failed_trial(error: BaseException, task: ResolvedTask) -> str:
    if isinstance(error, RuntimeError) and "does not require grad" in str(error):
        return GRADIENT_HINT
    own = getattr(getattr(task.task, "loss", None), "__code__", None)
    if any(frame.f_code is own for frame, _ in walk_tb(error.__traceback__)):
        return NO_LOSS_HINT
    return "run with --traceback to see where"


def _outcome(model: nn.Module, task: ResolvedTask, inputs: Batch) -> tuple[Output, Loss | None]:
    """Return the output of one forward pass and its loss.

    The loss is None if the task has no `loss`, or if `loss` returns None: then only metrics
    evaluate the task. Both are None if it has no `forward`. Raises TaskError if `loss` returns None
    and the task has no metrics.
    """
    one = task.task
    if not callable(getattr(one, "forward", None)):
        return None, None
    output = one.forward(model, inputs)
    made = one.loss(output, inputs) if callable(getattr(one, "loss", None)) else None
    if made is not None:
        return output, as_loss(made, f"task {task.name}")
    if task.metrics is None and callable(getattr(one, "loss", None)):
        raise TaskError(
            f"the loss of task {task.name} is None, and the task has no metrics",
            hint="return a Loss; if the model computes a loss in training mode only, add "
            f"metrics(output, batch), which are then the score ({LOSS_GUIDE})",
        )
    return output, None


def _metrics(task: ResolvedTask, output: Output, inputs: Batch) -> dict[str, Metric]:
    if task.metrics is None:
        return {}
    given = task.metrics(output, inputs)
    if not isinstance(given, Mapping):
        raise TaskError(
            f"metrics() of task {task.name} returned "
            f"{'None' if given is None else checkpoint.name_kind(given)}, not metrics by name",
            hint='return a dict: {"accuracy": accuracy(output, targets)}',
        )
    found = dict(given)
    unnamed = [name for name in found if not isinstance(name, str)]
    if unnamed:
        raise TaskError(
            f"metrics() of task {task.name} names a metric {unnamed[0]!r}, "
            f"a {type(unnamed[0]).__name__}",
            hint=f'use a text as its name: "{unnamed[0]}"',
        )
    bad = [name for name, metric in found.items() if not hasattr(metric, "merge")]
    if bad:
        raise TaskError(
            f"metric {bad[0]!r} of task {task.name} is a "
            f"{type(found[bad[0]]).__name__}, which does not merge",
            hint="return accuracy(...), perplexity(...), mean_of(total, count) or the like",
        )
    for name, metric in found.items():
        for part in (metric.total, metric.count) if isinstance(metric, Mean) else ():
            if isinstance(part, Tensor) and part.numel() != 1:
                raise TaskError(
                    f"the total or the count of metric {name!r} of task {task.name} has shape "
                    f"{tuple(part.shape)}",
                    hint="sum over the items, and count them: mean_of(errors.sum(), len(errors))",
                )
    return found


def _number(name: str, value: object, task: ResolvedTask) -> float | None:
    """Return the value of a metric as a float, or None. Raises TaskError for other values."""
    if value is None:
        return None
    if isinstance(value, Tensor | np.ndarray):
        given = f"a {type(value).__name__} of shape {tuple(value.shape)}"
        plain = value.item() if math.prod(value.shape) == 1 else None
    else:
        given, plain = f"{value!r:.60}, a {type(value).__name__}", value
    if isinstance(plain, numbers.Real):  # NumPy's own numbers too
        return float(plain)
    raise TaskError(
        f"metric {name!r} of task {task.name} returned {given}; a score must be one number",
        hint=(
            "return one metric for each number, for example its mean or its "
            "diagonal; surefoot predict writes whole outputs"
        ),
    )


def _choose(score: str | None, merged: Merged) -> tuple[str, Better]:
    metrics = merged.metrics
    reported = [*metrics, "loss"] if merged.terms or not metrics else [*metrics]
    if score is not None and score not in reported:
        raise SpecError(
            f"evaluate.score is {score!r}, which the task does not report",
            hint=f"use one of {', '.join(reported)}",
        )
    chosen = score or next(iter(metrics), "loss")
    better = "lower" if chosen == "loss" else getattr(metrics[chosen], "better", None)
    if better not in get_args(Better):
        raise TaskError(
            f"metric {chosen!r} selects the best checkpoint, but its `better` is {better!r}",
            hint='set `better` to "higher" or "lower"',
        )
    return chosen, cast(Better, better)
