"""Predict the peak memory of a training step from a trace with fake tensors.

The trace uses the model, the recomputation and the optimizers of the run, but computes no values.
Batches are really read, because their sizes are not known before.
"""

from __future__ import annotations

import copy
import functools
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, is_dataclass, replace
from typing import Any, cast

import torch
from torch import Tensor, nn

from surefoot.components.data.feed import Share
from surefoot.components.data.loader.jobs import sample_ids
from surefoot.components.data.order import Keys
from surefoot.components.memory.blocks import find_blocks
from surefoot.components.memory.trace import (
    GRADIENTS,
    Allocations,
    build_without_numbers,
    fake_tensors,
    total_bytes,
    track_blocks,
)
from surefoot.components.optim.average import WeightAverage
from surefoot.components.optim.backward import backward
from surefoot.components.optim.kinds.eight_bits import load_codes
from surefoot.contract.spec import RunSpec
from surefoot.contract.state import master_of
from surefoot.contract.task import ResolvedTask, Source, resolve
from surefoot.core.errors import InputError, SurefootError
from surefoot.core.ranks.layout import Layout
from surefoot.core.recompute import RecomputeChoice
from surefoot.runtime.nested_tensors import find_tensors
from surefoot.train.assemble import Assembly, assemble, find_wanted_blocks, take_task
from surefoot.train.assemble.lengths import with_largest_batch
from surefoot.train.assemble.reading import make_feed, read_shards
from surefoot.train.assemble.sharding import check_keys
from surefoot.train.failure.blame import describe
from surefoot.train.preflight.rank_memory import (
    GATHERED,
    RankGradients,
    RankShare,
    find_layout,
    find_share,
)
from surefoot.train.resume.together import check_shared
from surefoot.train.step import LiveUpdate

# relative error that is guaranteed; the largest measured is 0.2 %, of a small convnet:
# benchmarks/memory_prediction
MARGIN = 0.03
MARGIN_OF_RANKS = 0.1
VERSION = 1


@dataclass(frozen=True)
class Prediction:
    """Predicted peak memory of a step in bytes, and the amount of each kind of tensor in it.

    `num_parameters` counts trained parameters. `blocks` holds the peak of the activations of each
    part of the model, the largest first; these peaks occur at different times.
    """

    spec_id: str
    peak_bytes: int
    terms: Mapping[str, int]
    num_parameters: int
    blocks: Mapping[str, int]
    layout: Layout

    @property
    def interval(self) -> tuple[int, int]:
        """Lowest and highest number of bytes expected for the measured peak."""
        margin = MARGIN if self.layout.world_size == 1 else MARGIN_OF_RANKS
        return round(self.peak_bytes / (1 + margin)), round(self.peak_bytes / (1 - margin))

    def as_row(self) -> dict[str, Any]:
        return {
            "version": VERSION,
            "spec_id": self.spec_id,
            "peak_bytes": self.peak_bytes,
            "interval": list(self.interval),
            "terms": dict(self.terms),
            "num_parameters": self.num_parameters,
            "blocks": dict(self.blocks),
            "layout": str(self.layout),
        }


def predict(
    spec: RunSpec, task: Any = None, *, source: Source | None = None, num_ranks: int | None = None
) -> Prediction:
    """Predict the peak memory of a step of `spec` with its largest batch, on a CPU.

    The step is neither compiled nor offloaded. With several ranks it is the step of rank 0.

    Args:
        spec: the settings of the run.
        task: the task object; None for the task that the spec names.
        source: the training data; None to read it from the task.
        num_ranks: the number of ranks; None for that of [layout].

    Raises:
        InputError: if the sizes of tensors depend on values, or only a run can measure the memory.
        SpecError: for a layout that training refuses.
    """
    if RecomputeChoice.parse(spec.memory.activation_checkpointing).kind == "budget":
        raise InputError(
            "a memory budget needs measured blocks, but a prediction runs nothing",
            hint=(
                'set memory.activation_checkpointing = "none" or "full", or measure three steps: '
                "--measure"
            ),
        )
    if spec.precision.compute == "float8":
        raise InputError(
            "the memory of float8 matmuls is known only from a run",
            hint="measure three steps: --measure; or predict bf16",
        )
    layout = find_layout(spec, num_ranks)
    if layout.world_size > 1:
        check_shared(spec)
    if layout.is_sharded:
        check_keys(spec, layout.shard)
    resolved, spec = take_task(spec, task)
    # attributes that the task sets in the trace are fake tensors
    resolved = resolve(copy.copy(resolved.task), resolved.importable)
    identity = spec.id
    tables = {name: table for name, table in spec.as_tables().items() if name != "compile"}
    spec = with_largest_batch(
        spec.replace_all({**tables, "memory": {**tables.get("memory", {}), "offload": "none"}})
    )
    source = read_shards(resolved, spec, layout.world_size) if source is None else source
    batches = _read(spec, resolved, source, layout.world_size)
    if spec.optim.state == "8bit":
        load_codes()  # these tables are real tensors
    with fake_tensors() as sizes, warnings.catch_warnings():
        # torch warns when it copies a module
        warnings.filterwarnings("ignore", "Accessing the data pointer of FakeTensor")
        try:
            known = replace(resolved, task=_Read(resolved.task, source, sizes))
            assembly = assemble(spec.replace(train={"device": "cpu"}), known, better="lower")
            share = find_share(
                layout, assembly.model, find_wanted_blocks(spec, known, assembly.model)
            )
            return replace(
                _trace(assembly, [_without_numbers(sizes, batch) for batch in batches], share),
                spec_id=identity,
            )
        except SurefootError:
            raise
        except Exception as error:
            raise InputError(
                f"the memory of this task cannot be predicted: {describe(error)}",
                hint=(
                    "surefoot memory SPEC --measure runs three steps; --traceback "
                    "shows the line that needs tensor values"
                ),
            ) from error


class _Read:
    """Task wrapper with training data that has been read and a model of fake tensors."""

    def __init__(self, task: Any, source: Source, sizes: Any) -> None:
        self._task, self._source, self._sizes = task, source, sizes

    def __getattr__(self, name: str) -> Any:
        return getattr(self._task, name)

    def model(self) -> Any:
        return build_without_numbers(self._sizes, self._task.model)

    def data(self, split: str) -> Source:
        return self._source if split == "train" else self._task.data(split)


def _read(spec: RunSpec, task: ResolvedTask, source: Source, num_ranks: int) -> list[Any]:
    """Return the augmented microbatches of rank 0 in the first step.

    No rank has more microbatches.
    """
    feed = make_feed(spec, source, Share(0, num_ranks, spec.layout.virtual_ranks))
    window = feed.window(0)
    read = [(feed.source.read(ids), ids) for ids in feed.mine(window)[1]]
    return [
        batch
        if task.augment is None
        else task.augment(batch, Keys(spec.train.seed, window.epoch, sample_ids(feed.source, ids)))
        for batch, ids in read
        if batch is not None
    ]


def _without_numbers(sizes: Any, value: Any) -> Any:
    """Return `value` with its tensors replaced by fake tensors of the same sizes."""
    if isinstance(value, Tensor):
        return sizes.from_tensor(value)
    if isinstance(value, Mapping):
        return {key: _without_numbers(sizes, part) for key, part in value.items()}
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return type(value)(*(_without_numbers(sizes, part) for part in value))
    if isinstance(value, tuple | list):
        return type(value)(_without_numbers(sizes, part) for part in value)
    if is_dataclass(value) and not isinstance(value, type):
        return replace(
            value, **{name: _without_numbers(sizes, part) for name, part in vars(value).items()}
        )
    return value


def resident_tensors(
    model: nn.Module,
    updates: Sequence[LiveUpdate],
    average: WeightAverage | None,
    batches: Sequence[Any],
) -> dict[str, list[Tensor]]:
    """Return the tensors that exist throughout a step, by kind, such as "parameters"."""
    states = [
        state
        for update in updates
        for each in update.guarded.optimizers
        for state in each.state.values()
    ]
    return {
        "parameters": list(model.parameters()),
        "masters": [
            master for each in model.parameters() if (master := master_of(each)) is not each
        ],
        "buffers": list(model.buffers()),
        "optimizer": list(find_tensors(states)),
        "averages": list(average.by_id().values()) if average is not None else [],
        "batches": list(find_tensors(list(batches))),
    }


def held_bytes(assembly: Assembly) -> int:
    """Return the bytes of all tensors that exist throughout a step, except the batches.

    Copies of running statistics are included.
    """
    there = resident_tensors(assembly.model, assembly.updates, assembly.engine.average, ())
    return total_bytes(each for tensors in there.values() for each in tensors) + copied_bytes(
        assembly.model
    )


def copied_bytes(model: nn.Module) -> int:
    """Return the bytes of the copies of running statistics, with which a skipped step is undone."""
    kept = [module for module in model.modules() if getattr(module, "track_running_stats", False)]
    return total_bytes(buffer for module in kept for buffer in module.buffers(recurse=False))


def _trace(assembly: Assembly, batches: list[Any], share: RankShare) -> Prediction:
    """Trace two steps and predict the peak of the second; the first creates the optimizer state."""
    watched, model, updates = Allocations(), assembly.model, assembly.updates
    average = assembly.engine.average
    gradients: RankGradients | None = None

    def take_step(mark: Any = None) -> None:
        for update in updates:
            update.guarded.clear_gradients()
            # after the hooks that move a gradient to the master, which are last from here on
            marked = trained if mark is not None else ()
            hooks = [cast(Any, each).register_post_accumulate_grad_hook(mark) for each in marked]
            for number, batch in enumerate(batches, start=1):
                if gradients is not None:
                    gradients.begin_pass(is_last=number == len(batches))
                _pass(watched, assembly, update, batch)
            if gradients is not None:
                gradients.end_passes()
            for hook in hooks:
                hook.remove()
            if update.in_backward is None:
                update.guarded.apply(1.0)
        if average is not None:
            average.update()

    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    take_step()
    for update in updates:
        update.guarded.clear_gradients()
    for kind, tensors in resident_tensors(model, updates, average, batches).items():
        for tensor in tensors:
            watched.hold(tensor, kind, share.of(kind))
    watched.reserve(share.gathered_bytes(model), GATHERED)
    if share.layout.world_size > 1:
        gradients = RankGradients(share, model, watched)
    with track_blocks(_parts(model), watched.enter), watched:
        take_step(functools.partial(_mark, watched, gradients))
    most, terms = watched.peak()
    copies = copied_bytes(model)
    if copies:
        terms["buffers"] = terms.get("buffers", 0) + copies
    num_trained = sum(each.numel() for each in trained)
    return Prediction(
        assembly.spec.id, most + copies, terms, num_trained, watched.by_part(), share.layout
    )


def _pass(watched: Allocations, assembly: Assembly, update: LiveUpdate, batch: Any) -> None:
    """Trace the forward and backward pass of one microbatch."""
    watched.begin_forward()
    with assembly.engine.policy.context():
        loss = update.loss(assembly.model, batch)
    totals = [term.total for term in loss.terms]
    factors = [torch.full_like(total, 1.0) for total in totals]
    watched.end_forward()
    run = functools.partial(backward, totals, factors)
    if update.in_backward is None:
        run()
    else:
        update.in_backward.run(run)


def _mark(watched: Allocations, of_rank: RankGradients | None, parameter: Tensor) -> None:
    gradient = master_of(parameter).grad  # a backward hook has moved it to the master
    if gradient is not None:
        watched.mark(gradient, GRADIENTS)
    if of_rank is not None:
        of_rank.take(parameter)


def _parts(model: nn.Module) -> dict[str, nn.Module]:
    """Return the modules for which activations are reported separately.

    These are the repeated blocks and the modules beside them; without repeated blocks, the children
    of the model.
    """
    try:
        blocks = find_blocks(model)
    except InputError:
        return dict(model.named_children())
    around = {
        ".".join(name.split(".")[:depth])
        for name in blocks
        for depth in range(len(name.split(".")))
    }
    beside = {
        f"{prefix}.{name}".removeprefix("."): child
        for prefix, module in model.named_modules()
        if prefix in around
        for name, child in module.named_children()
        if f"{prefix}.{name}".removeprefix(".") not in around
    }
    return {**blocks, **beside}
