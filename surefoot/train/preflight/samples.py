"""Trials of the losses before the run, and the choice of the samples for them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from surefoot.components.data import in_place
from surefoot.components.data.feed import Feed
from surefoot.components.data.in_place import find_arrays
from surefoot.components.data.loader.bad import read_sound
from surefoot.components.data.loader.jobs import Reader, look
from surefoot.components.data.order import Keys
from surefoot.components.data.sources.batch_digest import digest_of
from surefoot.components.data.sources.iterated import Iterated, copy_of
from surefoot.contract.task import Batch, Loss, Source, as_loss
from surefoot.core.errors import SpecError, SurefootError, TaskError
from surefoot.runtime.attributes.rewritten import watch_weights
from surefoot.runtime.comm.gathered import Gathering
from surefoot.train import environment
from surefoot.train.assemble import Assembly
from surefoot.train.failure.blame import describe
from surefoot.train.preflight import halves as halving
from surefoot.train.quiet import (
    preserve_attributes,
    preserve_state,
    read_streams,
    trial_in_training_mode,
)
from surefoot.train.step import LiveUpdate

NUM_SAMPLES = 8
NUM_SOUGHT = 64  # steps, spread over the epoch, that are searched for items that count

PARTS_HINT = (
    "stages 2 and 3 gather weights when the whole model is called: call model(...), "
    "not its submodules, or set layout.zero_stage = 1"
)


class SampleLosses(NamedTuple):
    """Samples as one batch, and the trial of each update on this batch."""

    ids: np.ndarray
    batch: Batch
    trials: list[halving.LossTrial]

    @property
    def losses(self) -> list[Loss]:
        return [each.loss for each in self.trials]


class LossTrials:
    """Losses of an assembled run, computed on trial batches without side effects.

    `writes` is whether a loss wrote into its batch, `gathers` whether the loss of an update called
    all_gather; `training_only` names the updates whose loss the model gives in training mode only.
    """

    def __init__(self, assembly: Assembly) -> None:
        self.assembly, self.writes = assembly, False
        self.gathers: dict[str, bool] = {}
        self.training_only = set[str]()

    def attempt(
        self,
        update: LiveUpdate,
        batch: Batch,
        seed: int = 0,
        what: str = "a part of a batch",
        *,
        trains: bool = False,
    ) -> halving.LossTrial:
        """Compute the loss of an update; with `trains`, in training mode without its draws."""
        assembly = self.assembly
        evaluates = not trains and update.name not in self.training_only
        tried = copy_of(batch)  # a loss that writes into its batch must not change the data
        versions = in_place.Versions(tried)
        # a loss may compute gradients, for example for a gradient penalty
        with (
            preserve_attributes(assembly.task.task),
            watch_weights(assembly.model),
            trial_in_training_mode(assembly)
            if trains
            else preserve_state(assembly.model, assembly.task.state, evaluates=evaluates),
            torch.enable_grad(),
        ):
            environment.set_seeds(seed)
            before = read_streams()
            with Gathering() as gathered:
                loss = try_loss(update, assembly, tried, what, evaluates=evaluates)
            draws = read_streams() != before
        if loss is None or (evaluates and is_constant(loss)):
            self.training_only.add(update.name)
            try:
                trained = self.attempt(update, batch, seed, what)
            except TaskError:  # a larger batch may succeed in evaluation mode
                self.training_only.remove(update.name)
                raise
            if loss is None or not is_constant(trained.loss):
                return trained
            self.training_only.remove(update.name)
        self.writes |= versions.have_changed()
        self.gathers[update.name] = gathered.was_used
        return halving.LossTrial(loss, draws, gathered.was_used)


def try_loss(
    update: LiveUpdate, assembly: Assembly, batch: Batch, what: str, *, evaluates: bool
) -> Loss | None:
    """Return the loss of an update; None if the model computes it in training mode only.

    No evaluation computes the loss of an `Update` of the task, so that one may fail there.
    """
    name = update.name
    try:
        made = update.loss(assembly.model, batch)
    except SurefootError:
        raise
    except (Exception, SystemExit) as error:
        if evaluates and assembly.task.updates is not None:
            return None
        from surefoot.components.memory.caches import HINT as CACHE_HINT
        from surefoot.components.memory.caches import is_of_repeated_pass

        hint = CACHE_HINT if is_of_repeated_pass(error) else "run with --traceback to see where"
        hint = PARTS_HINT if "DTensor" in str(error) else hint
        raise TaskError(
            f"a trial of update {name} on {what} before the run failed: {describe(error)}",
            hint=hint,
        ) from error
    return None if made is None and evaluates else as_loss(made, f"update {name}")


def find(
    assembly: Assembly, attempt: Callable[[np.ndarray], SampleLosses]
) -> tuple[SampleLosses, list[str]]:
    """Return the samples on which the loss is checked, and warnings.

    Normally these are the first `NUM_SAMPLES` samples. If the model fails on so few, a whole
    microbatch is used. If the loss of an update counts none of their items, or is a constant for
    them, later samples are used. Raises TaskError if a loss counts no item in all of the data.
    """
    feed = assembly.feed
    tried = _try_sizes(feed, attempt)
    empty = _find_empty(assembly, tried)
    if not empty and not any(map(is_constant, tried.losses)):
        return tried, []
    if feed.source.guarantee != "proven":  # which can only be read in sequence
        return tried, [_describe(empty, "the first batch")] if empty else []
    num_steps, num_tried = feed.steps_per_epoch or NUM_SOUGHT, 0
    for step in sorted(
        {int(step) for step in np.linspace(0, num_steps - 1, min(num_steps, NUM_SOUGHT))}
    ):
        for part in feed.microbatches(feed.window(step))[: None if num_steps <= NUM_SOUGHT else 1]:
            later = attempt(part)
            num_tried += len(part)
            if not _find_empty(assembly, later) and not any(map(is_constant, later.losses)):
                return later, []
    if not empty:  # the check of this loss names its constant
        return tried, []
    if num_tried < feed.order.n - feed.dropped:
        return tried, [_describe(empty, f"{num_tried:,} samples spread over the data")]
    raise TaskError(
        f"the loss of update {empty} returned the count 0 for every batch tried",
        hint="return the number of items that the loss is summed over",
    )


def is_joined(whole: Batch, halves: Sequence[Batch]) -> bool:
    """Return whether `whole` holds the samples of `halves`, without padding or random values.

    Indices, such as those of the nodes of graphs, may be shifted in the second half.
    """
    arrays = [list(find_arrays(batch)) for batch in (whole, *halves)]
    return len({len(each) for each in arrays}) == 1 and all(
        is_joined_tensor(*map(torch.as_tensor, parts)) for parts in zip(*arrays, strict=True)
    )


def is_joined_tensor(whole: Tensor, first: Tensor, second: Tensor) -> bool:
    """Return whether `whole` is two tensors joined along a dimension; see `is_joined`."""
    if not whole.ndim == first.ndim == second.ndim:
        return False
    shapes = zip(whole.shape, first.shape, second.shape, strict=True)
    dims = [dim for dim, sizes in enumerate(shapes) if len(set(sizes)) > 1]
    if not dims:
        return torch.equal(whole, first) and torch.equal(whole, second)
    dim = dims[0]
    total, sizes = whole.shape[dim], (first.shape[dim], second.shape[dim])
    # the offsets of n graphs are n + 1 numbers
    if len(dims) > 1 or total not in (sum(sizes), sum(sizes) - 1):
        return False
    tail = whole.narrow(dim, total - sizes[1], sizes[1])
    if not (tail.is_floating_point() or tail.is_complex() or tail.dtype is torch.bool):
        shift = (tail - second).flatten()
        tail = tail - shift[:1]
    return torch.equal(whole.narrow(dim, 0, sizes[0]), first) and torch.equal(tail, second)


def _try_sizes(feed: Feed, attempt: Callable[[np.ndarray], SampleLosses]) -> SampleLosses:
    window = feed.window(0)
    own = feed.microbatches(window)[0]
    # a sequential source returns one batch at a time
    few = window.ids[:NUM_SAMPLES] if feed.source.guarantee == "proven" else own
    try:
        return attempt(few)
    except TaskError:
        if len(own) == len(few):
            raise
    return attempt(own)  # a model may be built for batches of one size


def _find_empty(assembly: Assembly, tried: SampleLosses) -> str:
    """Return the name of the first update whose loss counts no item; "" if all count some."""
    pairs = zip(assembly.updates, tried.losses, strict=True)
    return next(
        (
            update.name
            for update, loss in pairs
            if loss.terms and not any(float(term.count) for term in loss.terms)
        ),
        "",
    )


def is_constant(loss: Loss) -> bool:
    """Return whether a loss counts items, but none of its terms depends on the model."""
    has_gradient = any(getattr(term.total, "requires_grad", True) for term in loss.terms)
    return not has_gradient and any(float(term.count) for term in loss.terms)


def _describe(name: str, where: str) -> str:
    return (
        f"the loss of update {name} counts 0 items in {where}: steps that count 0 items are skipped"
    )


def reads_by_index(source: Source) -> bool:
    """Return whether any samples of the source can be read for a check, and read again."""
    is_divided = isinstance(source, Iterated) and source.draws_by_sample
    return is_divided or source.guarantee == "proven"


def check_order(assembly: Assembly) -> None:
    """Raise SpecError if the DataLoaders of the ranks return different samples."""
    source, ranks = assembly.feed.source, assembly.engine.steps.collectives.ranks
    if ranks is None or not isinstance(source, Iterated) or not source.draws_by_sample:
        return
    apart = ranks.group.check_equal({"order": source.digest_of_first})
    if apart:
        raise SpecError(
            f"the first batch of the DataLoader of rank {apart[0][1]} has other samples than that "
            "of rank 0",
            hint="give each rank the same DataLoader: without a sampler that divides the samples "
            "among ranks, and with generators of the same seed; the run divides each batch",
        )


def check_collated(assembly: Assembly) -> list[str]:
    """Return a warning if parts of a batch are collated to other values than the batch."""
    source, feed = assembly.feed.source, assembly.feed
    if isinstance(source, Iterated):
        is_cut = source.draws_by_sample and source.step_size > 1
    else:
        collates = getattr(source, "collates", False)
        is_cut = collates and len(feed.microbatches(feed.window(0))) > 1
    if not is_cut:
        return []
    from surefoot.train.preflight import collated

    seed = assembly.spec.train.seed
    return collated.check(
        source if isinstance(source, Iterated) else collated.CutByNumber(feed, seed)
    )


# ---- draws while samples are read


def check_draws(assembly: Assembly) -> list[str]:
    """Return warnings about random draws while samples are read.

    The draws may come from a generator of the dataset or from the global generators.
    """
    return [*_check_own(assembly), *_check_shared(assembly)]


def _check_own(assembly: Assembly) -> list[str]:
    """Read the same samples twice from the same random state; return a warning if they differ.

    A difference means that the dataset uses a separate generator, reads the clock or changes its
    samples.
    """
    source, seed = assembly.feed.source, assembly.spec.train.seed
    if getattr(source, "thread_safe", False) or not reads_by_index(source):
        return []
    window = assembly.feed.window(0)
    reader = Reader(source, None, seed, skips=assembly.spec.data.on_bad == "skip")
    digests = []
    for _ in range(2):
        with preserve_state(assembly.model, assembly.task.state):
            read = (
                look(source, window.epoch, window.ids[:1], seed)
                if isinstance(source, Iterated)
                else reader(window.epoch, window.ids[:NUM_SAMPLES]).batch
            )
            digests.append(digest_of(read))
    if digests[0] == digests[1]:
        return []
    what = f"two reads of the same samples return different values ({source.describe()})"
    why = (
        "the source uses a separate random generator, reads the clock, or changes "
        "its samples in place, so a resumed run, other workers and other ranks "
        "read different values"
    )
    return [
        (
            f"{what}: {why}; random numbers from the global generators of torch, "
            "NumPy or Python are reproduced"
        )
    ]


def _check_shared(assembly: Assembly) -> list[str]:
    """Return a warning if loader workers read samples that draw from the global random generators.

    Workers do not share these generators. A source that is not thread safe and is read by worker
    processes is exempt, because its generators are seeded before each microbatch.
    """
    loader, source, augment = assembly.spec.loader, assembly.feed.source, assembly.task.augment
    if not loader.workers or not (getattr(source, "thread_safe", False) or loader.kind == "thread"):
        return []
    window = assembly.feed.window(0)
    ids = window.ids[:NUM_SAMPLES]
    with preserve_state(assembly.model, assembly.task.state):
        before = read_streams()
        read = read_sound(source, ids)
        # on other devices the main process augments, not a worker
        if augment is not None and assembly.engine.device.type == "cpu":
            augment(
                read.whole, Keys(assembly.spec.train.seed, window.epoch, read.readable_ids(ids))
            )
        if read_streams() == before:
            return []
    what = (
        "reading uses the global random generators of torch, NumPy or Python: with "
        f"loader.workers = {loader.workers!r} the random "
    )
    return [
        (
            f"{what}numbers differ from those without workers, and with threads in "
            "each run; the keys of augment give the same numbers everywhere"
        )
    ]
