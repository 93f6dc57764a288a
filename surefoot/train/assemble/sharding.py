"""Sharding of the state of a run, and checks for features that cannot be sharded."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from typing import Protocol

import torch
from torch import nn

from surefoot.components.data.feed import Feed
from surefoot.components.memory.blocks import find_blocks
from surefoot.components.optim.groups import find_sparse
from surefoot.components.optim.kinds.layerwise import Lamb, Lars
from surefoot.components.optim.masters import find_norms, narrow_spectral_vectors
from surefoot.components.parallel.alike import bit_sum
from surefoot.components.parallel.shard import Sharded
from surefoot.components.parallel.shard.fully import FullySharded
from surefoot.components.parallel.shard.state import ShardedState
from surefoot.components.parallel.wires import Compression
from surefoot.components.profiler.phases.clock import PhaseClock
from surefoot.contract.spec import RunSpec
from surefoot.core.errors import InputError, SpecError
from surefoot.core.units import parse_bytes
from surefoot.runtime.attributes.rewritten import find_rewritten
from surefoot.runtime.comm.group import Group
from surefoot.runtime.comm.mesh import Mesh
from surefoot.train.step.program import LiveUpdate
from surefoot.train.step.ranks import Ranks

# update rules that are elementwise: rows of a tensor are updated as in the whole tensor
ELEMENTWISE = ("SGD", "Adam", "AdamW", "NAdam", "RAdam", "RMSprop", "Adagrad", "Adadelta", "Adamax")


class Intervals(Protocol):
    """Feed of a run, and the conversion of its intervals to steps."""

    @property
    def feed(self) -> Feed: ...

    def rhythm(self, text: str) -> Callable[[int], bool]: ...


def shard(
    spec: RunSpec, model: nn.Module, blocks: Sequence[str | nn.Module], mesh: Mesh
) -> Sharded:
    """Shard the state that `layout.zero_stage` selects over the shard ranks of the mesh.

    `blocks` are the blocks that the task or spec names; empty for the repeated modules of the
    model. Raises SpecError for a model or key that cannot be sharded.
    """
    check_keys(spec, mesh.shard.size)
    first_weights = _digest_of(model)
    made = _split(spec, model, blocks, mesh)
    made.first_weights = first_weights
    return made


def check_keys(spec: RunSpec, num_ranks: int) -> None:
    """Raise SpecError for keys that do not work with state sharded over `num_ranks` ranks."""
    stage = spec.layout.zero_stage
    table = {
        "precision.weights": (
            stage == 1 and spec.precision.weights != "fp32",
            (
                "stage 1 updates rows of the weights themselves, which must be fp32; "
                "stages 2 and 3 support bf16"
            ),
        ),
        "precision.master": (
            spec.precision.master == "none",
            "ranks update rows of fp32 master weights",
        ),
        "precision.keep": (
            spec.precision.weights != "fp32" and bool(spec.precision.keep),
            "the weights of a block are gathered in bf16, except those of norms",
        ),
        "optim.state": (
            spec.optim.state == "8bit",
            "the quantization blocks of 256 elements would start at other elements on each rank",
        ),
        "optim.name": (
            spec.optim.name == "muon",
            "its update needs whole tensors, but a rank updates rows of tensors",
        ),
        "compile.what": (
            stage > 1 and spec.compile.what not in (None, "none"),
            "weights are gathered between the operators of a compiled graph",
        ),
        "layout.compress": (
            spec.layout.compress != "none",
            "reduce-scatter sends uncompressed gradients",
        ),
        "train.batchnorm": (
            stage > 1 and spec.train.batchnorm == "sync",
            "ranks run padding microbatches, and the batch statistics would include them",
        ),
    }
    for key, (is_set, why) in table.items():
        if is_set:
            room, name = key.split(".")
            hint = f"leave {key} out, or train with layout.replicate alone"
            raise SpecError(
                f"{key} is {getattr(getattr(spec, room), name)!r}, "
                f"and layout.shard is {num_ranks}: {why}",
                hint=hint,
            )


def _split(
    spec: RunSpec, model: nn.Module, blocks: Sequence[str | nn.Module], mesh: Mesh
) -> Sharded:
    stage, on_host = spec.layout.zero_stage, spec.memory.offload == "optimizer"
    if stage == 1:
        sizes = parse_bytes(spec.layout.bucket_size), parse_bytes(spec.layout.first_bucket_size)
        return ShardedState(
            model, mesh, bucket_bytes=sizes[0], first_bytes=sizes[1], on_host=on_host
        )
    if written := next(iter(find_rewritten(model)), None):
        raise SpecError(
            f"a forward pass changes {written} itself, for example by max_norm, but "
            f"layout.zero_stage = {stage} gathers the weights only for that forward pass",
            hint=(
                "set layout.zero_stage = 1, or compute a new tensor in forward: "
                "torch.nn.functional.normalize(weight)"
            ),
        )
    units = find_units(stage, model, blocks)
    narrow = torch.bfloat16 if spec.precision.weights == "bf16" else None
    frozen = next((name for name, each in model.named_parameters() if not each.requires_grad), None)
    if narrow is not None and frozen is not None:
        raise SpecError(
            f"precision.weights is 'bf16', layout.shard is {mesh.shard.size}, and {frozen} is "
            "frozen: one process would store it only in bf16, ranks that hold rows in fp32",
            hint='unfreeze it, or set precision.weights = "fp32"',
        )
    if narrow is not None:
        narrow_spectral_vectors(model)
    return FullySharded(
        model, mesh, units, stage=stage, narrow=narrow, wide=find_norms(model), on_host=on_host
    )


def find_units(
    stage: int, model: nn.Module, blocks: Sequence[str | nn.Module]
) -> dict[str, nn.Module]:
    """Return the blocks whose weights stages 2 and 3 gather one at a time.

    Raises SpecError if stage 3 finds none.
    """
    try:
        return find_blocks(model, blocks)
    except InputError as error:
        if blocks or stage == 3:
            raise SpecError(
                f"layout.zero_stage = {stage} gathers the weights of one block at a time: "
                f"{error.message}",
                hint=(
                    "name its blocks in the task, blocks(model), or set layout.zero_stage to 1 or 2"
                ),
            ) from None
        return {}  # all weights are gathered once per step


def make_ranks(
    spec: RunSpec,
    group: Group,
    model: nn.Module,
    updates: Sequence[LiveUpdate],
    sharded: Sharded | None,
    course: Intervals,
    clock: PhaseClock,
) -> Ranks:
    """Return the collective parts of a step as the [layout] table configures them.

    Raises SpecError for a combination that sharding or virtual ranks do not support.
    """
    if (sharded is not None or spec.layout.virtual_ranks is not None) and find_sparse(model):
        key = "virtual_ranks" if sharded is None else "shard"
        raise SpecError(
            f"layout.{key} is given, but the gradient of an embedding with sparse=True is sparse: "
            + (
                "its rows are added in no fixed order"
                if sharded is None
                else "the ranks can divide only dense gradients"
            ),
            hint=f"build the embedding with sparse=False, or leave layout.{key} out",
        )
    if sharded is not None:
        _check_sharded(sharded, updates, course.feed, group.size)
    table = spec.layout
    compress = Compression(table.compress, table.compress_rank)
    made = Ranks(
        group,
        model,
        updates,
        clock,
        sharded=sharded,
        joins_buffers=table.sync_buffers,
        compress=compress,
        num_virtual=table.virtual_ranks,
    )
    made.use_buckets(parse_bytes(table.bucket_size), parse_bytes(table.first_bucket_size))
    if table.check_every != "never":
        made.checks_after = course.rhythm(table.check_every)
    return made


def _check_sharded(
    sharded: Sharded, updates: Sequence[LiveUpdate], feed: Feed, num_ranks: int
) -> None:
    for update in updates:
        for optimizer in update.guarded.optimizers:
            name = type(optimizer).__name__
            is_elementwise = name in ELEMENTWISE and type(optimizer).__module__.startswith(
                "torch.optim"
            )
            # lars and lamb get the norms of whole layers
            if not is_elementwise and not isinstance(optimizer, Lamb | Lars):
                raise SpecError(
                    "layout.shard splits parameters by rows, but it is not known "
                    f"whether {name} supports rows",
                    hint=(
                        f"use one of torch's {', '.join(ELEMENTWISE)}, lars "
                        "or lamb, or train with layout.replicate alone"
                    ),
                )
    if not sharded.is_even:
        return
    if len(updates) > 1:
        raise SpecError(
            f"layout.zero_stage 2 or 3 supports one Update, but the task has {len(updates)}",
            hint="set layout.zero_stage = 1",
        )
    num_cut = len(feed.microbatches(feed.window(0)))
    if num_cut < num_ranks:
        raise SpecError(
            f"the first step has {num_cut} microbatch{'es' * (num_cut != 1)}, but {num_ranks} "
            "ranks need one microbatch each",
            hint="set a smaller train.microbatch, or layout.zero_stage = 1",
        )


@torch.no_grad()
def _digest_of(model: nn.Module) -> str:
    """Return a digest of all parameters, with which ranks compare their initial weights."""
    sums = torch.stack([bit_sum(each).cpu() for each in model.parameters()])
    return hashlib.sha256(sums.numpy().tobytes()).hexdigest()[:16]
