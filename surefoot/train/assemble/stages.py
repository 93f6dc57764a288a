"""Stages of the assembly of a run; `ORDER` in `build.py` gives their order and its reasons."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from surefoot.components.data.feed import Feed, Share
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
from surefoot.components.precision.policy import Policy
from surefoot.components.precision.policy import build as build_policy
from surefoot.components.profiler.phases.clock import PhaseClock
from surefoot.contract.spec import RunSpec
from surefoot.contract.task import ResolvedTask, Source
from surefoot.core.errors import SpecError, UnknownSplitError
from surefoot.core.schedule.plan import Curve, ScheduleSettings, check_for_ramp
from surefoot.core.schedule.plan import build as build_schedule
from surefoot.core.units import Duration
from surefoot.runtime.attributes.tracker import AttributeTracker
from surefoot.runtime.comm.group import Group
from surefoot.runtime.comm.mesh import Mesh
from surefoot.train.assemble.assembly import Assembly, Engine
from surefoot.train.assemble.lengths import RunSchedule, find_tokens_per_sample, to_steps
from surefoot.train.assemble.model import (
    build_on_device,
    find_wanted_blocks,
    set_storage,
    take_task,
)
from surefoot.train.assemble.reading import (
    describe_collate,
    describe_idle,
    describe_short_batch,
    describe_workers,
    find_evaluating_key,
    make_feed,
    make_settings,
    read_shards,
    read_split,
)
from surefoot.train.assemble.updates import make_curve, make_updates, schedule_of_task
from surefoot.train.environment import describe_cudnn, find_device, set_seeds
from surefoot.train.evaluate import Evaluation, try_out
from surefoot.train.quiet import preserve_attributes, set_modes
from surefoot.train.record.batch_results import describe_unshared, watch
from surefoot.train.record.noticed.moved_outside import keep_outside, warn_of_unregistered
from surefoot.train.record.noticed.unfrozen import TrainedSet
from surefoot.train.step import LiveUpdate, StepParts, make_parts
from surefoot.train.step.collectives import SINGLE_RANK, Collectives

if TYPE_CHECKING:
    from surefoot.components.compiler.regions import CompiledRegions
    from surefoot.components.memory.recompute import RecomputeHandle
    from surefoot.components.optim.average import WeightAverage
    from surefoot.components.parallel.shard import Sharded
    from surefoot.components.stability.noise import GradientNoise

# keys of [layout] that only several ranks use, and that a spec of them keeps on one rank
OF_SEVERAL_RANKS = (
    "sync_buffers",
    "transport",
    "bucket_size",
    "first_bucket_size",
    "compress",
    "check_every",
    "timeout",
)


@dataclass
class Build:
    """Parts of a run while they are built; each stage adds those that it is named after."""

    spec: RunSpec
    given: Any  # the task object, or None for the task that the spec names
    mesh: Mesh
    better: Better | None
    notes: list[str] = field(init=False, default_factory=list)
    told: list[str] = field(init=False, default_factory=list)
    warnings: list[str] = field(init=False, default_factory=list)
    recomputed: RecomputeHandle | None = field(init=False, default=None)
    tried: Evaluation | None = field(init=False, default=None)
    evaluates: bool = field(init=False, default=True)
    unshared: set[str] = field(init=False, default_factory=set)  # metrics that ranks cannot send
    sharded: Sharded | None = field(init=False, default=None)
    compiled: CompiledRegions | None = field(init=False, default=None)
    noise: GradientNoise | None = field(init=False, default=None)
    device: torch.device = field(init=False)
    task: ResolvedTask = field(init=False)
    source: Source = field(init=False)
    model: nn.Module = field(init=False)
    modes: list[str] = field(init=False)
    feed: Feed = field(init=False)
    read: Callable[[str], Source] = field(init=False)
    course: RunSchedule = field(init=False)
    schedule: Curve = field(init=False)
    curve: Callable[[int], float] = field(init=False)  # the schedule, or that of the task
    updates: list[LiveUpdate] = field(init=False)
    kept: list[str] = field(init=False)
    average: WeightAverage | None = field(init=False)
    policy: Policy = field(init=False)
    attributes: AttributeTracker = field(init=False)
    steps: StepParts = field(init=False)

    def assembly(self) -> Assembly:
        """Return the parts, after the last stage."""
        engine = Engine(
            self.device,
            self.policy,
            self.average,
            self.steps,
            self.attributes,
            self.recomputed,
            self.compiled,
            self.noise,
        )
        return Assembly(
            self.spec,
            self.task,
            self.model,
            self.read,
            self.updates,
            self.course,
            self.schedule,
            engine,
            self.notes,
            self.told,
            self.tried,
            self.evaluates,
            self.warnings,
            trained=TrainedSet(self.model),
        )


def choose_device(build: Build) -> None:
    build.device = find_device(build.spec.train.device)
    set_seeds(build.spec.train.seed)


def resolve_task(build: Build) -> None:
    build.task, build.spec = take_task(build.spec, build.given)


def read_data(build: Build) -> None:
    build.source = read_shards(build.task, build.spec, build.mesh.whole.size)


def make_model(build: Build) -> None:
    set_seeds(build.spec.train.seed)
    build.model = build_on_device(build.spec, build.task, build.device)
    build.modes = set_modes(build.model)


def make_feed_of_rank(build: Build) -> None:
    spec, group = build.spec, build.mesh.whole
    share = Share(group.rank, group.size, spec.layout.virtual_ranks)
    build.feed = make_feed(spec, build.source, share)
    build.notes += _describe_choices(spec, build.task, build.feed)


def set_storage_dtypes(build: Build) -> None:
    """Freeze parameters, and store them in the dtype that the spec selects."""
    frozen = freeze(build.model, build.spec.optim.freeze)
    build.notes += [f"{len(frozen)} parameters are frozen"] if frozen else []
    build.notes += set_storage(build.model, build.spec)


def wrap_blocks(build: Build) -> None:
    """Let blocks compute their activations again in the backward pass, as the spec selects."""
    spec = build.spec
    if spec.memory.activation_checkpointing != "none":
        from surefoot.components.memory.recompute import recompute

        blocks = find_wanted_blocks(spec, build.task, build.model)
        build.recomputed = recompute(
            build.model, spec.memory.activation_checkpointing, blocks=blocks
        )
        build.notes += build.recomputed.notes
    if spec.fault.forget:
        left_out = ", ".join(spec.fault.forget)
        build.notes.append(f"the resume leaves out {left_out}, on purpose: fault.forget")


def evaluate_few_samples(build: Build) -> None:
    """Evaluate a few samples, unless it is known whether a higher or a lower score is better."""
    build.read = functools.cache(functools.partial(read_split, build.task))
    spec, split = build.spec, build.spec.evaluate.first_split
    if spec.evaluate.every == "never":
        build.evaluates = False
    if build.better or not build.evaluates:
        return
    watched = watch(build.task, build.unshared)
    try:
        source = build.read(split)
    except UnknownSplitError as error:
        if (key := find_evaluating_key(spec)) is not None:
            raise UnknownSplitError(
                f"{error.message}, and {key} is given", hint=f"leave {key} out; or {error.hint}"
            ) from error
        build.evaluates = False
        build.warnings.append(
            f"{error.message}, so this run evaluates nothing; return one from data({split!r}), or "
            'set evaluate.split; evaluate.every = "never" hides this message'
        )
        return
    sources = {split: source, **{each: build.read(each) for each in spec.evaluate.splits[1:]}}
    with preserve_attributes(build.task.task):
        for name, each in sources.items():
            tried = try_out(
                build.model,
                watched,
                Sound(each) if spec.data.on_bad == "skip" else each,
                split=name,
                score=spec.evaluate.score,
                device=build.device,
                batch=spec.evaluate.batch or spec.train.batch,
                # weights stored in bf16 cannot compute in fp32
                precision=spec.precision.weights,
            )
            build.tried = build.tried or tried


def make_course(build: Build) -> None:
    """Convert the length of the run to steps, as far as the data tell it."""
    length, feed = Duration.parse(build.spec.train.length), build.feed
    tokens = find_tokens_per_sample(build.source)
    build.course = RunSchedule(length, to_steps(length, feed, tokens), feed, tokens)


def make_schedule(build: Build) -> None:
    spec, feed, course = build.spec, build.feed, build.course
    better = build.better or (build.tried.better if build.tried else "lower")
    own = schedule_of_task(spec, build.task)
    stated = spec.schedule if own is None else ScheduleSettings(name="constant")
    if feed.ramp:
        check_for_ramp(stated)
    build.schedule = build_schedule(
        stated, course.total_steps, course.to_steps_or_refuse, better=better
    )
    build.curve = make_curve(spec, build.task, build.schedule, feed, course.total_steps)


def shard_model(build: Build) -> None:
    if build.mesh.is_sharded:
        from surefoot.train.assemble.sharding import shard

        blocks = find_wanted_blocks(build.spec, build.task, build.model)
        build.sharded = shard(build.spec, build.model, blocks, build.mesh)


def make_optimizers(build: Build) -> None:
    """Make the updates; trained tensors outside of the model become state of the task."""
    spec, model, feed, total_steps = build.spec, build.model, build.feed, build.course.total_steps
    build.updates, notes = make_updates(
        spec, build.task, model, build.schedule, build.curve, total_steps
    )
    build.notes += notes
    is_split = build.sharded is not None
    build.task, build.kept = keep_outside(build.task, model, build.updates, is_split=is_split)
    if not isinstance(feed.source, Iterated):
        build.warnings += warn_of_large_batch(
            build.curve, feed.largest, total_steps, spec.optim.name
        )
    build.warnings += warn_of_no_rate(build.curve, total_steps, spec.optim.lr)
    build.warnings += warn_of_unregistered(model, build.updates)


def choose_precision(build: Build) -> None:
    """Choose the compute precision. Raises SpecError for keys that cannot be combined."""
    spec = build.spec
    build.average = make_average(spec.optim, build.model)
    on_device = all(update.guarded.on_device for update in build.updates)
    build.policy = build_policy(spec.precision, build.device, scales_on_device=on_device)
    if build.policy.scaler is not None and spec.memory.update_in_backward:
        raise SpecError(
            "memory.update_in_backward does not support fp16, whose gradients are scaled",
            hint="use bf16 or fp32",
        )


def make_step(build: Build) -> None:
    """Make the step, with its loader and its collectives."""
    spec, group = build.spec, build.mesh.whole
    settings = make_settings(spec, build.source)
    build.attributes = AttributeTracker(build.model, build.task.state)
    is_alone = group.is_alone and spec.layout.virtual_ranks is None

    def make_collectives(clock: PhaseClock) -> Collectives:
        if is_alone:
            return SINGLE_RANK
        from surefoot.train.assemble.sharding import make_ranks

        return make_ranks(
            spec, group, build.model, build.updates, build.sharded, build.course, clock
        )

    build.steps = make_parts(
        model=build.model,
        task=build.task,
        feed=build.feed,
        updates=build.updates,
        seed=spec.train.seed,
        device=build.device,
        policy=build.policy,
        make_collectives=make_collectives,
    )
    build.steps.reader.loader.use(settings, last=build.course.total_steps)
    if spec.data.on_bad == "skip":
        build.steps.reader.loader.skip_bad(spec.data.max_bad)


def add_observers(build: Build) -> None:
    """Let the average and the gradient noise follow the steps."""
    observers, average = build.steps.observers, build.average
    if average is not None:
        observers.published.append(lambda done: average.update(done.was_applied))
    if build.spec.observe.noise:
        build.noise = _make_noise(build.feed, len(build.updates))
        from surefoot.train.record.noticed.noise import NoiseObserver

        NoiseObserver(build.noise).observe(observers)


def compile_parts(build: Build) -> None:
    """Compile what the [compile] table selects."""
    if build.spec.compile.what == "none":
        return
    from surefoot.train.record.compiling import compile_as_specified

    compiled, whole = compile_as_specified(
        build.spec, build.task, build.model, build.policy, build.updates, build.recomputed
    )
    build.notes.append(compiled.words)
    build.compiled = compiled
    build.steps = replace(build.steps, whole=whole, eager=compiled.eager)


def collect_messages(build: Build) -> None:
    """Collect the notes that are printed at the start."""
    spec, feed, device = build.spec, build.feed, build.device
    judged = build.read(spec.evaluate.first_split) if build.tried else None
    build.told += [
        *build.modes,
        *build.kept,
        *describe_scaling(spec.optim, feed.largest),
        *describe_unshared(build.unshared, build.mesh.whole),
        *_describe_idle_layout(spec, build.mesh.whole),
        *describe_cudnn(spec, device.type),
        *describe_short_batch(spec, feed),
        *describe_workers(feed.source),
        *describe_collate(build.task, feed.source),
        *describe_idle(spec, feed.source, judged),
    ]
    if spec.compile.what != "none":
        from surefoot.train.record.compiling import describe_mode

        build.told += describe_mode(spec, device.type)


def _describe_idle_layout(spec: RunSpec, group: Group) -> list[str]:
    """Return a message for each given key of [layout] that has no effect on one rank."""
    if not group.is_alone or spec.layout.virtual_ranks is not None:
        return []
    table, fields = spec.layout, type(spec.layout).model_fields
    return [
        f"layout.{key} = {getattr(table, key)!r} has no effect: the run has one rank"
        for key in OF_SEVERAL_RANKS
        if getattr(table, key) != fields[key].default
    ]


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


def _make_noise(feed: Feed, num_updates: int) -> GradientNoise:
    """Return the estimator of the gradient noise.

    Raises SpecError if a step has only one microbatch, or several updates.
    """
    from surefoot.components.stability.noise import GradientNoise

    if feed.microbatch >= feed.batch or num_updates > 1:
        raise SpecError(
            "observe.noise compares the gradient of a microbatch with that of its batch, but there "
            + (
                "are several updates"
                if num_updates > 1
                else f"a step is one microbatch of all {feed.batch:,} samples"
            ),
            hint=(
                "use surefoot whatif noise SPEC, which needs no microbatches; or "
                f"set train.microbatch = {max(1, feed.batch // 4)}, or train.accumulate"
            ),
        )
    return GradientNoise()
