"""Build all parts of a run from a spec and a task, in a fixed order."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from surefoot.components.data.feed import Feed, Share
from surefoot.components.data.lengths import RunSchedule, find_tokens_per_sample, to_steps
from surefoot.components.data.loader.bad import Sound
from surefoot.components.data.sources.iterated import Iterated
from surefoot.components.metrics import Better
from surefoot.components.optim.build import make_average
from surefoot.components.optim.groups import freeze
from surefoot.components.optim.learning_rates import (
    describe_scaling,
    warn_of_large_batch,
    warn_of_no_rate,
)
from surefoot.components.precision.policy import build as build_policy
from surefoot.components.profiler.phases.clock import PhaseClock
from surefoot.contract.spec import RunSpec
from surefoot.contract.task import ResolvedTask, Source
from surefoot.core.errors import SpecError
from surefoot.core.schedule.plan import ScheduleSettings, check_for_ramp
from surefoot.core.schedule.plan import build as build_schedule
from surefoot.core.units import Duration
from surefoot.runtime.attributes.tracker import AttributeTracker
from surefoot.runtime.comm.group import Group
from surefoot.runtime.comm.mesh import SOLO, Mesh
from surefoot.train.assemble.assembly import Assembly, Engine
from surefoot.train.assemble.model import (
    build_on_device,
    find_wanted_blocks,
    set_storage,
    take_task,
)
from surefoot.train.assemble.reading import (
    describe_short_batch,
    make_feed,
    make_settings,
    read_split,
)
from surefoot.train.assemble.updates import make_curve, make_updates, schedule_of_task
from surefoot.train.environment import (
    describe_cudnn,
    find_device,
    give_back_large_blocks,
    set_seeds,
)
from surefoot.train.evaluate import Evaluation, try_out
from surefoot.train.quiet import set_modes
from surefoot.train.record.batch_results import describe_unshared, watch
from surefoot.train.record.noticed.moved_outside import keep_outside, warn_of_unregistered
from surefoot.train.record.noticed.unfrozen import TrainedSet
from surefoot.train.step import LiveUpdate, make_parts
from surefoot.train.step.collectives import SINGLE_RANK, Collectives

if TYPE_CHECKING:
    from surefoot.components.memory.recompute import RecomputeHandle
    from surefoot.components.parallel.shard import Sharded
    from surefoot.components.stability.noise import GradientNoise


def assemble(
    spec: RunSpec, task: Any = None, *, better: Better | None = None, mesh: Mesh = SOLO
) -> Assembly:
    """Build all parts that a run of `spec` trains with.

    The random seeds are set first, so that initial weights are reproducible. The data is read
    before the optimizer is built, because schedules need the number of samples.

    Args:
        spec: the settings of the run.
        task: the task object; None for the task that the spec names.
        better: whether a higher or a lower score is better; None to find out by evaluating a few
            samples.
        mesh: the ranks of the run.

    Raises:
        InputError: if the spec or the task cannot be run.
    """
    if not mesh.is_sharded or spec.layout.zero_stage < 3:
        return _assemble(spec, task, better, mesh)
    from surefoot.components.memory.spilled import FileBackedParameters

    give_back_large_blocks()
    with FileBackedParameters():  # parameters that are built whole before sharding
        return _assemble(spec, task, better, mesh)


def _assemble(spec: RunSpec, task: Any, better: Better | None, mesh: Mesh) -> Assembly:
    device, group = find_device(spec.train.device), mesh.whole
    set_seeds(spec.train.seed)
    resolved, spec = take_task(spec, task)
    source = read_split(resolved, "train")
    # again, so that the weights do not depend on what reading the data drew
    set_seeds(spec.train.seed)
    model = build_on_device(spec, resolved, device)
    modes = set_modes(model)
    feed = make_feed(spec, source, Share(group.rank, group.size, spec.layout.virtual_ranks))
    notes = _describe_choices(spec, resolved, feed)
    frozen = freeze(model, spec.optim.freeze)
    notes += [f"{len(frozen)} parameters are frozen"] if frozen else []
    notes += set_storage(model, spec)
    recomputed = None
    if spec.memory.activation_checkpointing != "none":
        from surefoot.components.memory.recompute import recompute

        blocks = find_wanted_blocks(spec, resolved, model)
        recomputed = recompute(model, spec.memory.activation_checkpointing, blocks=blocks)
        notes += recomputed.notes
    if spec.fault.forget:
        left_out = ", ".join(spec.fault.forget)
        notes.append(f"the resume leaves out {left_out}, on purpose: fault.forget")
    length = Duration.parse(spec.train.length)
    tokens = find_tokens_per_sample(source)
    total_steps = to_steps(length, feed, tokens)
    read = functools.cache(functools.partial(read_split, resolved))
    unshared = set[str]()
    tried = None if better else _try_out(spec, resolved, model, read, device, unshared)
    better = better or (tried.better if tried else "lower")
    own = schedule_of_task(spec, resolved)
    stated = spec.schedule if own is None else ScheduleSettings(name="constant")
    if feed.ramp:
        check_for_ramp(stated)
    course = RunSchedule(length, total_steps, feed, tokens)
    schedule = build_schedule(stated, total_steps, course.to_steps_or_refuse, better=better)
    curve = make_curve(spec, resolved, schedule, feed, total_steps)
    sharded = None
    if mesh.is_sharded:
        from surefoot.train.assemble.sharding import shard

        sharded = shard(spec, model, find_wanted_blocks(spec, resolved, model), mesh)
    updates, more = make_updates(spec, resolved, model, schedule, curve, total_steps)
    notes += more
    resolved, kept = keep_outside(resolved, model, updates, is_split=sharded is not None)
    told = [
        *modes,
        *kept,
        *describe_scaling(spec.optim, feed.largest),
        *describe_unshared(unshared, group),
        *describe_cudnn(spec, device.type),
        *describe_short_batch(feed),
    ]
    if spec.compile.what != "none":
        from surefoot.train.record.compiling import describe_mode

        told += describe_mode(spec, device.type)
    warnings = _find_warnings(spec, model, updates, curve, feed, total_steps)
    engine, more = _make_engine(
        spec, resolved, model, updates, course, recomputed, sharded, group, device
    )
    trained = TrainedSet(model)
    return Assembly(
        spec,
        resolved,
        model,
        read,
        updates,
        course,
        schedule,
        engine,
        notes + more,
        told,
        tried,
        warnings,
        trained=trained,
    )


def _describe_choices(spec: RunSpec, task: ResolvedTask, feed: Feed) -> list[str]:
    """Return notes on the task, BatchNorm, samples that are left out, and the training source."""
    notes, source = list[str](), feed.source
    if task.importable is None:
        notes.append(
            "the task is an object of this script: commands that start a new process "
            "need a task that can be imported, with [task] use"
        )
    if spec.train.batchnorm in ("group", "layer"):
        notes.append(f"GroupNorm replaces BatchNorm (train.batchnorm = {spec.train.batchnorm!r})")
    if feed.dropped:
        notes.append(
            f'the last {feed.dropped} samples of each epoch are left out (data.last_batch = "drop")'
        )
    if source.guarantee != "proven":
        notes.append(f"the training source is {source.guarantee}: {source.describe()}")
    return notes


def _try_out(
    spec: RunSpec,
    task: ResolvedTask,
    model: nn.Module,
    read: Callable[[str], Source],
    device: torch.device,
    unshared: set[str],
) -> Evaluation:
    """Evaluate a few samples.

    The metrics whose partial results the ranks cannot send each other are added to `unshared`.
    """
    split = spec.evaluate.split
    watched = watch(task, unshared)
    source = read(split)
    return try_out(
        model,
        watched,
        Sound(source) if spec.data.on_bad == "skip" else source,
        split=split,
        score=spec.evaluate.score,
        device=device,
        batch=spec.evaluate.batch or spec.train.batch,
        # weights stored in bf16 cannot compute in fp32
        precision=spec.precision.weights,
    )


def _find_warnings(
    spec: RunSpec,
    model: nn.Module,
    updates: Sequence[LiveUpdate],
    curve: Callable[[int], float],
    feed: Feed,
    total_steps: int | None,
) -> list[str]:
    """Return warnings on the batch size, the learning rates and unregistered modules."""
    warnings = []
    if not isinstance(feed.source, Iterated):
        warnings += warn_of_large_batch(curve, feed.largest, total_steps, spec.optim.name)
    return [
        *warnings,
        *warn_of_no_rate(curve, total_steps),
        *warn_of_unregistered(model, updates),
    ]


def _make_engine(
    spec: RunSpec,
    task: ResolvedTask,
    model: nn.Module,
    updates: list[LiveUpdate],
    course: RunSchedule,
    recomputed: RecomputeHandle | None,
    sharded: Sharded | None,
    group: Group,
    device: torch.device,
) -> tuple[Engine, list[str]]:
    """Return the engine of a run, and notes. Raises SpecError for keys that cannot be combined."""
    notes: list[str] = []
    average = make_average(spec.optim, model)
    policy = build_policy(
        spec.precision, device, scales_on_device=all(update.guarded.on_device for update in updates)
    )
    if policy.scaler is not None and spec.memory.update_in_backward:
        raise SpecError(
            "memory.update_in_backward does not support fp16, whose gradients are scaled",
            hint="use bf16 or fp32",
        )
    settings = make_settings(spec, course.feed.source)
    attributes = AttributeTracker(model, task.state)
    is_alone = group.is_alone and spec.layout.virtual_ranks is None
    if is_alone and spec.layout.compress != "none":
        notes.append(
            f"layout.compress = {spec.layout.compress!r} has no effect: one rank sends no gradients"
        )

    def make_collectives(clock: PhaseClock) -> Collectives:
        if is_alone:
            return SINGLE_RANK
        from surefoot.train.assemble.sharding import make_ranks

        return make_ranks(spec, group, model, updates, sharded, course, clock)

    steps = make_parts(
        model=model,
        task=task,
        feed=course.feed,
        updates=updates,
        seed=spec.train.seed,
        device=device,
        policy=policy,
        make_collectives=make_collectives,
    )
    steps.reader.loader.use(settings, last=course.total_steps)
    if spec.data.on_bad == "skip":
        steps.reader.loader.skip_bad(spec.data.max_bad)
    if average is not None:
        steps.observers.published.append(lambda done: average.update(done.was_applied))
    noise = None
    if spec.observe.noise:
        noise = _noise(course.feed, updates)
        from surefoot.train.record.noticed.noise import NoiseObserver

        NoiseObserver(noise).observe(steps.observers)
    compiled = None
    if spec.compile.what != "none":
        from surefoot.train.record.compiling import compile_as_specified

        compiled, whole = compile_as_specified(spec, task, model, policy, updates, recomputed)
        notes.append(compiled.words)
        steps = replace(steps, whole=whole, eager=compiled.eager)
    engine = Engine(device, policy, average, steps, attributes, recomputed, compiled, noise)
    return engine, notes


def _noise(feed: Feed, updates: Sequence[LiveUpdate]) -> GradientNoise:
    """Return the estimator of the gradient noise.

    Raises SpecError if a step has only one microbatch, or several updates.
    """
    from surefoot.components.stability.noise import GradientNoise

    if feed.microbatch >= feed.batch or len(updates) > 1:
        raise SpecError(
            "observe.noise compares the gradient of a microbatch with that of its batch, but there "
            + (
                "are several updates"
                if len(updates) > 1
                else f"a step is one microbatch of all {feed.batch:,} samples"
            ),
            hint=(
                "use surefoot whatif noise SPEC, which needs no microbatches; or "
                "set train.microbatch = "
                f"{max(1, feed.batch // 4)}"
            ),
        )
    return GradientNoise()
