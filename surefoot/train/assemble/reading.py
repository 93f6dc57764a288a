"""Data of a run as the spec configures it: source of a split, sample order, loader settings."""

from __future__ import annotations

import contextlib
import inspect
import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch

from surefoot.components.data.blocks import Order
from surefoot.components.data.feed import ALL_OF_STREAM, WHOLE, Feed, Share, StreamShard
from surefoot.components.data.loader.batches import LoaderNotice, LoaderSettings, make_copier
from surefoot.components.data.loader.jobs import Reader
from surefoot.components.data.loader.loader import Loader
from surefoot.components.data.loader.pilot import find_most
from surefoot.components.data.sources.iterated import Iterated
from surefoot.components.data.sources.wrapped import as_source
from surefoot.contract import signature
from surefoot.contract.spec import RunSpec
from surefoot.contract.task import Batch, ResolvedTask, Source
from surefoot.core.errors import (
    DataError,
    SpecError,
    SurefootError,
    TaskError,
    UnknownSplitError,
)
from surefoot.core.hardware import count_cores
from surefoot.core.ranks.pieces import check_divides, check_equal_passes, check_pieces
from surefoot.core.units import Duration, parse_bytes
from surefoot.train.assemble.lengths import check_ramp
from surefoot.train.failure.blame import describe

LASTING_NOTE = (
    "the DataLoader has persistent_workers: after a restart, random numbers that are drawn in "
    "workers differ from the second epoch on; for the same numbers, set "
    'data.draws = "sample", or persistent_workers=False'
)
PARTS = (
    "define data(self, split, shard), which returns part shard.index of shard.count of the stream"
)
MIN_BATCHES = 4  # with fewer batches no worker is started


def read_shards(task: ResolvedTask, spec: RunSpec, num_ranks: int) -> Source:
    """Return the training data, in shards if the task's `data` has the parameter `shard`.

    Raises as `read_split` does, and SpecError for `data.shards` without this parameter.
    """
    if not _takes_shard(task):
        source = read_split(task, "train")
        if spec.data.shards is not None and not getattr(source, "is_sharded", False):
            raise SpecError(
                f"data.shards is {spec.data.shards}, but data(split) of task {task.name} has no "
                "parameter shard",
                hint=f"{PARTS}; or leave data.shards out",
            )
        return source
    count = spec.data.shards or spec.layout.virtual_ranks or num_ranks
    shards = [read_split(task, "train", StreamShard(index, count)) for index in range(count)]
    streams = [each for each in shards if isinstance(each, Iterated) and each.loader is None]
    if not streams and count == 1:
        return shards[0]
    from surefoot.components.data.loader.sharded import ShardedStream

    if len(streams) < count:
        raise SpecError(
            f"data(split, shard) of task {task.name} returns samples by number: "
            f"{shards[0].describe()}",
            hint="define data(self, split), which returns all samples: ranks share their batches",
        )
    return ShardedStream(streams)


def _takes_shard(task: ResolvedTask) -> bool:
    try:
        return "shard" in inspect.signature(task.task.data).parameters
    except (TypeError, ValueError):  # not a function of Python
        return False


def read_split(task: ResolvedTask, split: str, shard: StreamShard = ALL_OF_STREAM) -> Source:
    """Return the task's data of `split`; if its `data` has the parameter `shard`, this shard.

    Raises UnknownSplitError for a split that the task does not have, DataError for one that cannot
    be read, and TaskError for an error in the task's code.
    """
    try:
        read: Any = task.task.data
        given = read(split, shard) if _takes_shard(task) else read(split)
        if given is None and split != "train":
            raise _unknown_split(task, split)
        return as_source(given, task.collate)
    except SurefootError:
        raise
    except (KeyError, NotImplementedError) as error:
        is_unknown = error.args in ((split,), *([] if isinstance(error, KeyError) else [()]))
        raise (_unknown_split(task, split) if is_unknown else _failed_data(split, error)) from error
    except OSError as error:
        with_folder = task.importable is not None and signature.has_parameter(
            task.importable, "folder"
        )
        raise DataError(
            f"the data of split {split!r} cannot be read: {describe(error)}",
            hint="give the data folder with --data"
            if with_folder
            else "run with --traceback to see the whole error",
        ) from error
    except (Exception, SystemExit) as error:
        raise _failed_data(split, error) from error


def find_evaluating_key(spec: RunSpec) -> str | None:
    """Return a given key of the spec that evaluates, or depends on a score; None without one."""
    if spec.schedule.name == "plateau":
        return "schedule.name"
    given = [key for key in ("split", "score", "patience") if key in spec.evaluate.model_fields_set]
    return f"evaluate.{given[0]}" if given else None


def _unknown_split(task: ResolvedTask, split: str) -> UnknownSplitError:
    return UnknownSplitError(
        f"task {task.name} has no split {split!r}",
        hint='return the training data from its data("train")'
        if split == "train"
        else "use a split that its data(split) returns: --split of evaluate and predict, "
        "run.evaluate(split), or evaluate.split of a new run",
    )


def _failed_data(split: str, error: BaseException) -> TaskError:
    without = "" if split == "train" else 'to evaluate nothing, set evaluate.every = "never"; '
    return TaskError(
        f"data({split!r}) failed: {describe(error)}",
        hint=f"check that the task has this split; {without}--traceback shows the whole error",
    )


def make_feed(spec: RunSpec, source: Source, share: Share = WHOLE) -> Feed:
    """Return the feed of the training data: which samples each step reads, in which order.

    A source that returns whole batches gives `train.accumulate` batches per step. The batches of a
    DataLoader with a map-style dataset can be divided, into microbatches and among ranks; `source`
    of the feed is then a `DealtLoader`.
    Raises SpecError for settings that do not fit the source.
    """
    train, batch = spec.train, spec.train.step_batch
    mixture: Any = source if hasattr(type(source), "order_of") else None
    microbatch = train.pass_size(share.num_pieces)
    if train.ramp:
        check_ramp(spec, source)
    if isinstance(source, Iterated):
        if not source.has_length:
            source.repeat(_count_run(spec, source))
        source, batch = _divide_batches(spec, source, share)
        microbatch = 1 if batch > 1 or train.microbatch == 1 else None
        num_samples = len(source)
    else:
        multiple = batch if spec.data.last_batch == "drop" else 1
        num_samples = len(source) if mixture is None else mixture.num_positions(multiple)
        check_divides(train.batch, train.microbatch, is_given="batch" in train.model_fields_set)
        if share.size > 1:
            _check_shares(spec, source, share)
            if train.batchnorm == "sync":
                _check_equal_passes(spec, num_samples, share)
    shuffles = spec.data.shuffle and source.guarantee == "proven"
    order = Order(num_samples, train.seed, shuffle=shuffles)
    if spec.data.window is not None:
        order = replace(order, chunk=_chunk_of(spec, source), window=spec.data.window)
    feed = Feed(
        source,
        order,
        batch=batch,
        microbatch=microbatch,
        drop_last=spec.data.last_batch == "drop",
        ramp=train.ramp,
        share=share,
    )
    if mixture is not None:
        feed.order = mixture.order_of(feed, train.seed, shuffle=shuffles)
    is_sharded = spec.data.shards is not None and isinstance(source, Iterated)
    feed.cut_keys = (*train.cut_keys, *(["data.shards"] if is_sharded else []))
    return feed


def _count_run(spec: RunSpec, source: Iterated) -> int | None:
    """Return the batches that a run reads of an iterable without a length; None for a time.

    Raises SpecError if the length of the run depends on that of the iterable.
    """
    train, length = spec.train, Duration.parse(spec.train.length)
    if length.unit not in ("steps", "s"):
        default = "" if "length" in train.model_fields_set else " (the default)"
        raise SpecError(
            f"train.length is {train.length!r}{default}, but the {type(source.given).__name__} has "
            "no length",
            hint='give the length of the run in steps or as a time: train.length = "1000 steps"; '
            "or say how many batches an epoch has: "
            "surefoot.data.Iterated(iterable, num_batches=100)",
        )
    size = (train.batch if "batch" in train.model_fields_set else 1) * train.accumulate
    return int(length.value) * size if length.unit == "steps" else None


def _divide_batches(spec: RunSpec, source: Iterated, share: Share) -> tuple[Iterated, int]:
    """Return the source of the microbatches of a step, and their number.

    Without a reason to divide them, they are whole batches of `source`. Raises SpecError for
    settings that do not fit.
    """
    train = spec.train
    is_given = "batch" in train.model_fields_set
    num_batches = (train.batch if is_given else 1) * train.accumulate
    size = None if is_given and train.microbatch == 1 else train.microbatch
    if is_given and train.batch != 1 and (train.microbatch != 1 or train.accumulate > 1):
        raise SpecError(
            f"train.batch is {train.batch}, but the source gives whole batches: "
            f"{source.describe()}",
            hint="leave train.batch out; train.accumulate is the number of batches of a step",
        )
    if spec.optim.reference_batch is not None:
        raise SpecError(
            "optim.reference_batch is given, but the source "
            f"gives whole batches: {source.describe()}",
            hint="leave it out, and set optim.lr for the batch size of the source",
        )
    if source.is_sharded:
        stream: Any = source
        stream.prepare(spec, size, num_batches, share)
        return source, source.step_size
    if source.draws_by_sample:  # it is divided already
        return source, source.step_size
    why = _why_divided(spec, size, share)
    is_needless = share.size == 1 and size in (None, 1) and spec.data.draws != "sample"
    if why is None or (source.loader is None and is_needless):
        return source, num_batches
    if spec.data.draws == "batch":
        raise SpecError(
            f'data.draws is "batch", but {why}',
            hint='leave data.draws out, or set it to "sample"',
        )
    from surefoot.components.data.loader import dealt, division

    if source.loader is None:
        raise SpecError(
            f"{why}, but the source gives whole batches, of unknown samples: {source.describe()}",
            hint=_how_to_divide(source.given),
        )
    deal = division.make_deal(source, size, num_batches, share, train.seed)
    if share.size > 1 and train.batchnorm == "sync":
        division.check_equal_passes(source, deal)
    return dealt.DealtLoader(source, deal), deal.step


def _how_to_divide(given: Any) -> str:
    """Return how batches are given whose samples are known."""
    if not isinstance(given, torch.utils.data.DataLoader):
        return (
            f"give a DataLoader with a map-style dataset (with __getitem__ and __len__); or {PARTS}"
        )
    if isinstance(given.dataset, torch.utils.data.IterableDataset):
        return f"give its DataLoader a map-style dataset (with __getitem__ and __len__); or {PARTS}"
    if given.batch_sampler is None:
        return "give the DataLoader a batch_size"
    if not getattr(given, "in_order", True):
        return "leave in_order out of the DataLoader"
    if type(given) is torch.utils.data.DataLoader:
        return "give a DataLoader that has not been iterated"
    return "give a torch.utils.data.DataLoader, or TorchDataset(loader.dataset, loader.collate_fn)"


def _why_divided(spec: RunSpec, size: int | None, share: Share) -> str | None:
    """Return the setting for which the batches of a DataLoader are divided; None without one."""
    if size is not None:
        return f"train.microbatch is {size}"
    if share.size > 1:
        return f"{share.size} ranks share the samples of each step"
    if share.num_pieces > 1:
        return f"layout.virtual_ranks is {share.num_pieces}"
    return 'data.draws is "sample"' if spec.data.draws == "sample" else None


def describe_idle(spec: RunSpec, source: Source, evaluated: Source | None) -> list[str]:
    """Return a message for each given key that has no effect on a source that is read in sequence.

    `evaluated` is the source of the split that is evaluated; None if it has not been read.
    """
    found = []
    if source.guarantee != "proven" and "shuffle" in spec.data.model_fields_set:
        found.append(
            f"data.shuffle = {json.dumps(spec.data.shuffle)} has no effect: the source decides "
            f"the order of its samples: {source.describe()}"
        )
    divides = isinstance(source, Iterated) and source.is_divided
    if spec.data.draws is not None and not isinstance(source, Iterated):
        found.append(
            f'data.draws = "{spec.data.draws}" has no effect: it is for the dataset of a '
            f"DataLoader: {source.describe()}"
        )
    if spec.layout.virtual_ranks is not None and isinstance(source, Iterated) and not divides:
        found.append(
            f"layout.virtual_ranks = {spec.layout.virtual_ranks} has no effect: the source gives "
            f"whole batches: {source.describe()}"
        )
    is_single = spec.train.step_batch == 1 or (
        "batch" not in spec.train.model_fields_set and spec.train.accumulate == 1
    )
    if spec.data.last_batch == "drop" and isinstance(source, Iterated) and is_single:
        found.append(
            'data.last_batch = "drop" has no effect: the source decides its last batch: '
            f"{source.describe()}; a DataLoader leaves it out with drop_last=True"
        )
    if evaluated is not None and evaluated.guarantee != "proven" and spec.evaluate.batch:
        found.append(
            f"evaluate.batch = {spec.evaluate.batch} has no effect: the source decides the size "
            f"of its batches: {evaluated.describe()}"
        )
    return found


def describe_collate(task: ResolvedTask, source: Source) -> list[str]:
    """Return a note if the source of the training data does not call the task's `collate`."""
    loader = source.loader if isinstance(source, Iterated) else None
    is_used = getattr(loader, "collate_fn", None) == task.collate
    if task.collate is None or getattr(source, "collates", is_used):
        return []
    return [
        (
            f"collate(samples) of task {task.name} is not called, because the source makes its own "
            f"batches: {source.describe()}"
        )
    ]


def describe_workers(source: Source) -> list[str]:
    """Return a note if a resumed run cannot repeat the random numbers drawn in workers."""
    if not isinstance(source, Iterated) or source.draws_by_sample:
        return []
    return [LASTING_NOTE] if source.has_lasting_workers else []


def describe_short_batch(spec: RunSpec, feed: Feed) -> list[str]:
    """Return a message if the batch is larger than the training set."""
    largest, n = max([feed.batch, *(batch for _, batch in feed.ramp)]), feed.order.n
    if largest <= n:
        return []
    unit = "samples"
    if isinstance(feed.source, Iterated):
        unit, n = "batches", feed.source.num_batches
        largest = len(feed.source.batches_of(list(range(largest))))
    whole = f"a step trains on all {n:,}, which is one epoch"
    if spec.train.accumulate > 1:
        return [
            (
                f"train.accumulate is {spec.train.accumulate:,}, which makes steps of {largest:,} "
                f"{unit}, but the training set has {n:,} {unit}: {whole}"
            )
        ]
    is_default = "" if "batch" in spec.train.model_fields_set else " (the default)"
    return [
        (
            f"train.batch is {largest:,}{is_default}, but the training set has {n:,} {unit}: "
            f"{whole}; set train.batch to {n:,} or less"
        )
    ]


def _check_shares(spec: RunSpec, source: Source, share: Share) -> None:
    """Raise SpecError if the samples of a step cannot be divided among the ranks."""
    if source.guarantee != "proven":
        raise SpecError(
            f"{share.size} ranks share the samples of each step, but the source is "
            f"read in sequence: {source.describe()}",
            hint="give samples that are read by index, or train on one rank",
        )
    check_pieces(
        (spec.train.step_batch, *(batch for _, batch in spec.train.ramp)),
        spec.train.pass_size(share.num_pieces),
        share.size,
    )


def _chunk_of(spec: RunSpec, source: Source) -> int:
    """Return the number of samples of the largest shard, the unit in which `data.window` shuffles.

    Raises SpecError for a source without shards, or if `data.shuffle` is false.
    """
    sizes = getattr(source, "shard_sizes", None)
    if not sizes or not spec.data.shuffle:
        why = "data.shuffle is false" if sizes else f"the source has no shards: {source.describe()}"
        raise SpecError(
            f"data.window is {spec.data.window}, but {why}",
            hint="leave data.window out: then all samples are shuffled together",
        )
    return int(max(sizes))


def read_once(
    spec: RunSpec,
    source: Source,
    batch: int,
    device: torch.device,
    settings: LoaderSettings,
    tell: Callable[[LoaderNotice], None],
    share: Share = WHOLE,
    seed: int = 0,
) -> Iterator[tuple[Batch, int | None]]:
    """Yield every sample once, in order, as batches with their sample counts.

    The count is None if an iterable does not say it. Each rank reads every `share.size`-th batch.
    `settings` control how far the loader reads ahead. Random draws of a dataset depend on `seed`
    and the sample numbers. With `data.on_bad = "skip"`, unreadable samples are left out. `tell` is
    called with notices about unreadable samples, failed workers and other data problems.
    """
    num_batches = -(-len(source) // batch)
    mine = len(range(share.rank, num_batches, share.size))
    has_last = mine > 0 and (num_batches - 1) % share.size == share.rank
    num_samples = mine * batch - (num_batches * batch - len(source) if has_last else 0)
    if num_samples == 0:
        return
    feed = Feed(
        source, _EveryNth(num_samples, 0, shuffle=False, batch=batch, share=share), batch=batch
    )
    steps = feed.steps_per_epoch or 0
    plain = steps < MIN_BATCHES or isinstance(source, Iterated)
    loader = Loader(
        feed, Reader(source, None, seed), LoaderSettings() if plain else settings, last=steps
    )
    if spec.data.on_bad == "skip":
        loader.skip_bad(spec.data.max_bad)
    loader.tell = lambda told: tell(told) if told.kind in ("worker", "bad-record", "data") else None
    copy = make_copier(device)
    with contextlib.closing(loader):
        for number in range(1, steps + 1):
            taken = loader.take(number)
            for inputs in copy(taken, loader.peek):
                if isinstance(source, Iterated):
                    yield (
                        inputs,
                        source.count_samples(taken.window.epoch, int(taken.ids[0][0]), inputs),
                    )
                else:
                    yield inputs, taken.num_samples


def _check_equal_passes(spec: RunSpec, num_samples: int, share: Share) -> None:
    """Raise SpecError if ranks would run different numbers of passes in a step.

    A BatchNorm with statistics over all ranks would then wait forever.
    """
    train = spec.train
    rest = num_samples % train.step_batch if spec.data.last_batch == "keep" else 0
    check_equal_passes(
        {train.step_batch, *([rest] if rest else [])},
        train.pass_size(share.num_pieces),
        share.size,
        has_ramp=bool(train.ramp),
    )


@dataclass(frozen=True)
class _EveryNth(Order):
    """Sequential order of every `share.size`-th batch, from batch `share.rank`."""

    batch: int = 1
    share: Share = WHOLE

    def permutation(self, epoch: int) -> Any:
        rank, size = self.share.rank, self.share.size
        return lambda positions: (
            (positions // self.batch * size + rank) * self.batch + positions % self.batch
        )


def make_settings(spec: RunSpec, source: Source) -> LoaderSettings:
    """Return the loader settings of the [loader] table.

    Raises SpecError for workers with a source that is read in sequence.
    """
    table = spec.loader
    if table.workers and isinstance(source, Iterated):
        raise SpecError(
            f"loader.workers is {table.workers!r}, but the source gives whole batches "
            f"in sequence: {source.describe()}",
            hint="leave loader.workers out; a DataLoader has its own workers: num_workers",
        )
    finds = table.workers == "auto"
    return LoaderSettings(
        workers=0 if table.workers == "auto" else table.workers,
        most=find_most(count_cores()) if finds else 0,
        kind=table.kind,
        prefetch=table.prefetch or LoaderSettings.prefetch,
        start=table.start,
        timeout_s=table.timeout,
        memory_bytes=parse_bytes(table.memory),
    )
