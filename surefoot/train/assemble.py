"""Build all parts of a training step from a spec and a task, in a fixed order with its reasons."""

from __future__ import annotations

import functools
import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any

import numpy as np
import torch
from torch import nn

from surefoot.components import optim, precision
from surefoot.components.compiler import CompiledRegions, lay_channels_last
from surefoot.components.data import Feed, Iterated, Keys, Share, to_device
from surefoot.components.data.lengths import find_tokens_per_sample, to_steps
from surefoot.components.data.loader import LoaderNotice, Read, Sound, look, read_sound
from surefoot.components.memory import Offloaded, Recomputed, Spilled, recompute
from surefoot.components.metrics import Better
from surefoot.components.observe import Summary, peak_resident_bytes, take_device_memory
from surefoot.components.parallel import check_unwrapped, join_batchnorm
from surefoot.components.stability import GradientNoise, Noise, convert_batchnorm
from surefoot.contract import events, signature
from surefoot.contract.spec import OptimTable, RunSpec
from surefoot.contract.state import Timing
from surefoot.contract.task import (
    Batch,
    Loss,
    Resolved,
    Source,
    Update,
    find_arguments,
    find_use,
    is_named,
    load,
    resolve,
)
from surefoot.core.errors import SpecError, TaskError
from surefoot.core.schedule.plan import Curve, ScheduleSettings, check_for_ramp
from surefoot.core.schedule.plan import build as build_schedule
from surefoot.core.units import Duration
from surefoot.runtime.comm import SOLO, Mesh
from surefoot.train.environment import (
    circumstances,
    describe_cudnn,
    find_device,
    give_back_large_blocks,
    set_seeds,
)
from surefoot.train.evaluate import Evaluation, Reading, try_out
from surefoot.train.quiet import set_modes
from surefoot.train.record.compiling import compile_as_stated, describe_mode, eager
from surefoot.train.record.noticed.moved_outside import keep_outside, warn_of_unregistered
from surefoot.train.record.partial import describe_unshared, watch
from surefoot.train.resume.program import Program
from surefoot.train.step import LiveUpdate, Stepper
from surefoot.train.step.course import RunSchedule
from surefoot.train.step.reading import (
    describe_short_batch,
    make_feed,
    make_settings,
    read_once,
    read_split,
)
from surefoot.train.step.sharding import make_ranks, shard
from surefoot.train.step.unfrozen import TrainedSet


@dataclass(frozen=True)
class Engine:
    """Compute parts of a run: device, precision, weight average, stepper and compiled model."""

    device: torch.device
    policy: precision.Policy
    average: optim.WeightAverage | None
    stepper: Stepper
    recomputed: Recomputed
    compiled: CompiledRegions | None = None


@dataclass(frozen=True)
class Assembly:
    """All parts that a run trains with: spec, task, model, data, optimizers, schedule, notes."""

    spec: RunSpec
    task: Resolved
    model: nn.Module
    evaluation: Callable[[str], Source]
    updates: list[LiveUpdate]
    course: RunSchedule
    schedule: Curve
    engine: Engine
    notes: list[str]
    told: list[str]  # notes that are said at the start, too
    tried: Evaluation | None = None  # of a few samples
    warnings: list[str] = field(
        default_factory=list
    )  # are printed at the start even to who wants quiet
    trained: TrainedSet = field(kw_only=True)

    @property
    def feed(self) -> Feed:
        return self.course.feed

    def read(self, epoch: int, ids: np.ndarray) -> Batch:
        """Return the samples `ids` on the device, augmented. Raises what reading them raises."""
        source, augment, seed = self.feed.source, self.task.augment, self.spec.train.seed
        skips = self.spec.data.on_bad == "skip"
        found = read_sound(source, ids) if skips else Read(look(source, epoch, ids.copy(), seed))
        batch = to_device(found.whole, self.engine.device)
        return (
            batch
            if augment is None
            else augment(batch, Keys(self.spec.train.seed, epoch, found.kept(ids)))
        )

    def reading(self, tell: Callable[[LoaderNotice], None]) -> Reading:
        """Return the function with which an evaluation reads batches, with the loader's workers."""
        settings = replace(self.engine.stepper.loader.settings, most=0)
        return lambda source, batch, device, share, key: read_once(
            self.spec, source, batch, device, settings, tell, share, key
        )

    @property
    def is_even(self) -> bool:
        """True if all ranks must run the same number of forward passes."""
        ranks = self.engine.stepper.ranks
        return ranks is not None and ranks.is_even

    @property
    def noise(self) -> Noise | None:
        """Gradient noise of the last steps; None if `observe.noise` is off or they are too few."""
        watched = self.engine.stepper.noise
        return None if watched is None else watched.estimate()

    @property
    def said(self) -> tuple[str, ...]:
        """Messages for the start: the compute precision unless it is the default, and `told`."""
        policy = self.engine.policy
        return (
            *(
                []
                if policy.why == precision.PLAIN.why
                else [f"computing in {policy.compute} ({policy.why})"]
            ),
            *self.told,
        )

    def started(
        self,
        generation: int,
        spec: RunSpec,
        program: Program,
        notes: tuple[str, ...],
        *,
        first_step: int,
        parent: Mapping[str, Any],
    ) -> events.Started:
        """Return an attempt's Started record; the environment's decisions are in `spec`."""
        source = self.feed.source
        return events.Started(
            generation=generation,
            spec_id=self.spec.id,
            spec=spec.as_tables(),
            task=self.task.name,
            data={
                "describe": source.describe(),
                "digest": source.digest,
                "guarantee": source.guarantee,
            },
            unit=self.task.unit,
            num_parameters=sum(parameter.numel() for parameter in self.model.parameters()),
            seed=spec.train.seed,
            total_steps=self.course.total_steps,
            steps_per_epoch=self.feed.steps_per_epoch,
            notes=notes,
            first_step=first_step,
            parent=parent,
            precision={"compute": self.engine.policy.compute, "why": self.engine.policy.why},
            **circumstances(str(self.engine.device), program),
        )

    def stepped(self, generation: int, summary: Summary, timing: Timing) -> events.Step:
        """Return the Step record of the steps that `summary` and `timing` summarize."""
        ranks = self.engine.stepper.ranks
        rates = {
            f"{u.name}.{i}" if i else u.name: g["lr"]
            for u in self.updates
            for i, g in enumerate(u.guarded.groups)
        }
        return events.Step(
            generation=generation,
            time_s=time.time(),
            step=summary.step,
            epoch=summary.epoch,
            num_steps=summary.num_steps,
            loss=summary.loss,
            terms=summary.terms,
            gradient_norm=summary.gradient_norm,
            learning_rates={name: float(rate) for name, rate in rates.items()},
            num_applied=summary.num_applied,
            num_samples=summary.num_samples,
            num_items=summary.num_items,
            elapsed_s=summary.elapsed_s,
            waiting_s=summary.waiting_s,
            samples_per_s=summary.samples_per_s,
            items_per_s=summary.items_per_s,
            peak_bytes=peak_resident_bytes(),
            phases=timing.phases,
            step_s=timing.step_s,
            outliers=timing.outliers,
            device_memory=take_device_memory(self.engine.device),
            loss_scale=summary.loss_scale,
            noise={} if (noise := self.noise) is None else asdict(noise),
            ranks={} if ranks is None else ranks.paces.take(),
        )


def assemble(
    spec: RunSpec, task: Any = None, *, better: Better | None = None, mesh: Mesh = SOLO
) -> Assembly:
    """Build all parts that a run of `spec` trains with.

    Seeds come first, so that initial weights are reproducible; data comes before the optimizer,
    because schedules need its length. `better` says whether a higher or a lower score is better;
    without it a few samples are evaluated to find out. `mesh` holds the ranks of the run. Raises an
    InputError for a spec or a task that cannot be run.
    """
    if not mesh.is_sharded or spec.layout.stage < 3:
        return _assemble(spec, task, better, mesh)
    give_back_large_blocks()
    with Spilled():  # what is built whole, and of which a rank keeps rows
        return _assemble(spec, task, better, mesh)


def _assemble(spec: RunSpec, task: Any, better: Better | None, mesh: Mesh) -> Assembly:
    device, group = find_device(spec.train.device), mesh.whole
    set_seeds(spec.train.seed)
    resolved, spec = take_task(spec, task)
    notes: list[str] = []
    if resolved.importable is None:
        notes.append(
            "the task was built here: what needs a fresh process needs one that can be imported, with [task] use"
        )
    source = read_split(resolved, "train")
    set_seeds(
        spec.train.seed
    )  # again, so that the weights do not depend on what reading the data drew
    model = _model(spec, resolved, device)
    modes = set_modes(model)
    feed = make_feed(spec, source, Share(group.rank, group.size, spec.layout.virtual_ranks))
    if spec.train.batchnorm in ("group", "layer"):
        notes.append(
            f"GroupNorm stands in the place of BatchNorm (train.batchnorm = {spec.train.batchnorm!r})"
        )
    if feed.dropped:
        notes.append(
            f'the last {feed.dropped} samples of each epoch are left out (data.last_batch = "drop")'
        )
    if source.guarantee != "proven":
        notes.append(f"the training source is {source.guarantee}: {source.describe()}")
    frozen = optim.freeze(model, spec.optim.freeze)
    notes += [f"{len(frozen)} parameters are frozen"] if frozen else []
    notes += set_storage(model, spec)
    recomputed = recompute(
        model, spec.memory.recompute, blocks=find_wanted_blocks(spec, resolved, model)
    )
    notes += recomputed.notes
    if spec.fault.forget:
        notes.append(
            f"going on leaves out {', '.join(spec.fault.forget)}, on purpose: fault.forget"
        )
    length = Duration.parse(spec.train.length)
    tokens = find_tokens_per_sample(source)
    total_steps = to_steps(length, feed, tokens)
    split, read = spec.evaluate.split, functools.cache(functools.partial(read_split, resolved))
    skips, unshared = spec.data.on_bad == "skip", set[str]()
    tried = (
        None
        if better
        else try_out(
            model,
            watch(resolved, unshared),
            Sound(read(split)) if skips else read(split),
            split=split,
            score=spec.evaluate.score,
            device=device,
            batch=spec.evaluate.batch or spec.train.batch,
            precision=spec.precision.weights,  # what is stored in bf16 cannot be computed with in fp32
        )
    )
    better = better or (tried.better if tried else "lower")
    stated = (
        spec.schedule
        if _own_schedule(spec, resolved) is None
        else ScheduleSettings(name="constant")
    )
    if feed.ramp:
        check_for_ramp(stated)
    course = RunSchedule(length, total_steps, feed, tokens)
    schedule = build_schedule(stated, total_steps, course.to_steps_or_refuse, better=better)
    curve = _curve(spec, resolved, schedule, feed, total_steps)
    sharded = shard(spec, model, find_wanted_blocks(spec, resolved, model), mesh)
    updates, more = _updates(spec, resolved, model, schedule, curve, total_steps)
    notes += more
    resolved, kept = keep_outside(resolved, model, updates, is_split=sharded is not None)
    told = [
        *modes,
        *kept,
        *optim.describe_scaling(spec.optim, feed.largest),
        *describe_unshared(unshared, group),
    ]
    told += (
        describe_mode(spec, device.type)
        + describe_cudnn(spec, device.type)
        + describe_short_batch(feed)
    )
    is_counted = not isinstance(source, Iterated)
    warnings = (
        optim.warn_of_large_batch(curve, feed.largest, total_steps, spec.optim.name)
        if is_counted
        else []
    )
    warnings += optim.warn_of_no_rate(curve, total_steps) + warn_of_unregistered(model, updates)
    average = optim.make_average(spec.optim, model)
    policy = precision.build(
        spec.precision, device, scales_on_device=all(update.guarded.on_device for update in updates)
    )
    if policy.scaler is not None and spec.memory.update_in_backward:
        raise SpecError(
            "memory.update_in_backward does not go with fp16, whose gradients are scaled",
            hint="use bf16 or fp32",
        )
    settings = make_settings(spec, source)
    stepper = Stepper(
        model=model,
        task=resolved,
        feed=feed,
        updates=updates,
        seed=spec.train.seed,
        device=device,
        policy=policy,
        average=average,
    )
    if not group.is_alone or spec.layout.virtual_ranks is not None:
        stepper.ranks = make_ranks(spec, group, model, updates, sharded, course)
    elif spec.layout.compress != "none":
        notes.append(
            f"layout.compress = {spec.layout.compress!r} changes nothing: one rank sends no gradients"
        )
    stepper.loader.use(settings, last=total_steps)
    if skips:
        stepper.loader.skip_bad(spec.data.max_bad)
    if spec.observe.noise:
        stepper.noise = _noise(feed, updates)
    compiled = compile_as_stated(spec, resolved, model, stepper, updates, recomputed)
    notes += [] if compiled is None else [compiled.words]
    stepper.eager = functools.partial(eager, compiled)
    engine = Engine(device, policy, average, stepper, recomputed, compiled)
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
        notes,
        told,
        tried,
        warnings,
        trained=trained,
    )


def take_task(spec: RunSpec, task: Any = None) -> tuple[Resolved, RunSpec]:
    """Return the resolved `task`, or the spec's task, and the spec that can build it again."""
    if task is None:
        return load_task(spec), spec
    if isinstance(task, Resolved):
        return task, spec
    if spec.data.folder is not None:
        raise SpecError(
            "data.folder is given, but the task is built already",
            hint="build the task with its folder, and leave data.folder out",
        )
    tables, use, arguments = spec.as_tables(), find_use(task), find_arguments(task)
    if use is not None and arguments is not None:
        folder = arguments.pop("folder", None)
        data = {} if folder is None else {"data": {**tables.get("data", {}), "folder": folder}}
        return resolve(task, importable=use), spec.replace_all(
            {**tables, **data, "task": {"use": use, **arguments}}
        )
    if spec.task.use is not None and is_named(task, spec.task.use):
        return resolve(task, importable=spec.task.use), spec
    return resolve(task), spec.replace_all({**tables, "task": {}})


def load_task(spec: RunSpec) -> Resolved:
    """Build the spec's task with its `[data] folder`. Raises SpecError if none is named."""
    if spec.task.use is None:
        raise SpecError(
            "the spec names no task",
            hint='name one as [task] use = "digits", or give the object: Run(spec, task)',
        )
    parameters = spec.task.parameters
    if spec.data.folder is not None:
        if signature.takes_folder(spec.task.use) is False:
            raise SpecError(
                f"a data folder was given, but {spec.task.use} has no parameter 'folder'",
                hint="leave --data out",
            )
        parameters["folder"] = spec.data.folder
    return load(spec.task.use, parameters)


def _noise(feed: Feed, updates: Sequence[LiveUpdate]) -> GradientNoise:
    """Return the gradient noise estimator. Raises SpecError without two batch sizes to compare."""
    if feed.microbatch >= feed.batch or len(updates) > 1:
        raise SpecError(
            "observe.noise compares the gradient of a microbatch with that of its batch, and there "
            + (
                "are several updates"
                if len(updates) > 1
                else f"is one pass over all {feed.batch:,} samples"
            ),
            hint=f"surefoot whatif SPEC --noise needs none; or set train.microbatch = {max(1, feed.batch // 4)}",
        )
    return GradientNoise()


def build_model(spec: RunSpec, task: Resolved) -> nn.Module:
    """Return the task's model, with BatchNorm replaced as `train.batchnorm` says.

    Raises SpecError if BatchNorm is to be replaced and the model has none.
    """
    model = task.task.model()
    how = spec.train.batchnorm
    if (
        how != "keep"
        and isinstance(model, nn.Module)
        and not (join_batchnorm(model) if how == "sync" else convert_batchnorm(model, how))
    ):
        raise SpecError(
            f"train.batchnorm is {spec.train.batchnorm!r}, and the model has no BatchNorm",
            hint="leave train.batchnorm out",
        )
    return model


def _model(spec: RunSpec, task: Resolved, device: torch.device) -> nn.Module:
    model = build_model(spec, task)
    if not isinstance(model, nn.Module):
        raise TaskError(
            f"model() of task {task.name} gave a {type(model).__name__}",
            hint="return a torch.nn.Module",
        )
    check_unwrapped(model)
    optim.check_shaped(model)
    return model.to(device) if device.type != "cpu" else model


def find_wanted_blocks(
    spec: RunSpec, task: Resolved, model: nn.Module
) -> Sequence[str | nn.Module]:
    """Return the blocks to recompute: `memory.blocks`, else the task's; empty for repeated ones."""
    return spec.memory.blocks or (list(task.blocks(model)) if task.blocks is not None else [])


def set_storage(model: nn.Module, spec: RunSpec, *, with_masters: bool = True) -> list[str]:
    """Store weights as [precision] says; return notes. Raises SpecError for unknown patterns."""
    notes = lay_channels_last(model) if spec.train.memory_format == "channels_last" else []
    kept = precision.keep_in_fp32(model, spec.precision.keep)
    if spec.precision.weights == "bf16" and not (
        with_masters and spec.layout.shard > 1
    ):  # rows that are gathered in bf16 stay in fp32
        optim.store_narrow(
            model, wide=kept.values(), with_masters=with_masters and spec.precision.master == "fp32"
        )
    if (
        with_masters and spec.memory.offload == "optimizer" and spec.layout.shard == 1
    ):  # a rank that holds rows keeps those there
        optim.keep_on_host(model)
    notes += [f"computing in fp32: {', '.join(kept)} (precision.keep)"] if kept else []
    return notes + precision.convert(model, spec.precision, kept.values())


def _curve(
    spec: RunSpec, task: Resolved, schedule: Curve, feed: Feed, total_steps: int | None
) -> Callable[[int], float]:
    """Return the learning rate multiplier per step: the schedule, scaled by batch size if asked."""
    own = _own_schedule(spec, task)
    return optim.scaled(
        schedule if own is None else _own_curve(own, spec, total_steps), spec.optim, feed.batch_at
    )


def _updates(
    spec: RunSpec,
    task: Resolved,
    model: nn.Module,
    schedule: Curve,
    curve: Callable[[int], float],
    total_steps: int | None,
) -> tuple[list[LiveUpdate], list[str]]:
    notes: list[str] = []
    if _own_schedule(spec, task) is not None:
        notes.append("the learning rate follows the task's own schedule(step, total_steps)")
    stated = _stated_updates(task, model)
    optim.check_effects(
        spec.optim,
        has_own_groups=task.parameter_groups is not None and len(stated) == 1,
        has_own_optimizers=all(each.optimizer is not None for each in stated),
    )
    many = len(stated) > 1
    if many and spec.memory.update_in_backward:
        raise SpecError(
            f"memory.update_in_backward goes with one update, and task {task.name} has {len(stated)}",
            hint="set memory.update_in_backward = false",
        )
    if many:
        optim.build_groups(
            optim.find_trained(model),
            decay=0.0,
            no_decay=spec.optim.no_decay,
            rates=spec.optim.rates,
        )  # idle patterns
    made = []
    for update in stated:
        optimizers, summary = _optimizers(spec, task, model, update, many)
        notes += [f"{update.name}: {line}" if many else line for line in summary]
        guarded = optim.GuardedUpdate(
            optimizers,
            clip=spec.optim.clip,
            clip_value=spec.optim.clip_value,
            curve=_at_run_steps(curve, update.every),
            momentum_curve=_momentum_of(schedule, update.every),
            total_steps=total_steps if schedule.is_pure else None,
        )
        in_backward = optim.UpdateInBackward(guarded) if spec.memory.update_in_backward else None
        loss = Offloaded(update.loss) if spec.memory.offload == "activations" else update.loss
        made.append(LiveUpdate(update.name, loss, guarded, update.every, in_backward))
    _check_cover(task, model, made)
    return made, notes


def _momentum_of(schedule: Curve, every: int) -> Callable[[int], float] | None:
    return (
        _at_run_steps(lambda step: schedule.momentum(step) or 0.0, every)
        if schedule.momentum(0) is not None
        else None
    )


def _own_schedule(spec: RunSpec, task: Resolved) -> Callable[[int, int], float] | None:
    """Return the task's `schedule`, or None if the spec has a [schedule] table."""
    return None if "schedule" in spec.model_fields_set else task.schedule


def _own_curve(
    own: Callable[[int, int], float], spec: RunSpec, total_steps: int | None
) -> Callable[[int], float]:
    if total_steps is None:
        raise SpecError(
            f"train.length is {spec.train.length}, and the task's schedule(step, total_steps) needs the number of steps",
            hint="say the length in steps or epochs, or name a schedule under [schedule]",
        )
    for step in (0, total_steps):
        if not _is_finite(value := own(step, total_steps)):
            raise TaskError(
                f"schedule({step}, {total_steps}) of the task gives {value!r}",
                hint="give a multiplier of the learning rate, as 0.5",
            )
    return lambda step: float(own(min(step, total_steps), total_steps))


def _is_finite(value: Any) -> bool:
    try:
        return math.isfinite(value)
    except (TypeError, ValueError):
        return False


def _at_run_steps(curve: Callable[[int], float], every: int) -> Callable[[int], float]:
    """Return `curve`, made a function of the step count of an `Update` of every n-th run step."""
    return curve if every == 1 else lambda applied: curve((applied + 1) * every - 1)


def _check_cover(task: Resolved, model: nn.Module, updates: Sequence[LiveUpdate]) -> None:
    """Check that each trained parameter is in one group, or in at least one of `updates`."""
    groups = [{"params": update.guarded.parameters} for update in updates]
    if task.updates is not None:
        groups = [
            {
                "params": list(
                    {id(each): each for group in groups for each in group["params"]}.values()
                )
            }
        ]
    optim.check_cover(model, groups)


def _stated_updates(task: Resolved, model: nn.Module) -> list[Update]:
    if task.updates is None:
        one = task.task

        def loss(model: nn.Module, batch: Any) -> Loss:
            return one.loss(one.forward(model, batch), batch)

        return [Update("loss", loss, model.parameters())]
    stated = list(task.updates(model))
    if not stated or len({update.name for update in stated}) != len(stated):
        raise TaskError(
            f"updates(model) of task {task.name} gave none, or two of one name",
            hint="name each Update differently",
        )
    return stated


def _optimizers(
    spec: RunSpec, task: Resolved, model: nn.Module, update: Update, many: bool
) -> tuple[Sequence[torch.optim.Optimizer], Sequence[str]]:
    parameters = list(update.parameters)
    mine = {id(optim.master_of(parameter)) for parameter in parameters}
    if update.optimizer is not None:
        if any(optim.master_of(parameter) is not parameter for parameter in parameters):
            raise SpecError(
                f"update {update.name} has an optimiser of its own, which knows no masters (precision.weights, memory.offload)",
                hint="let surefoot build the optimiser, or leave that out",
            )
        held = {
            id(parameter)
            for group in update.optimizer.param_groups
            for parameter in group["params"]
        }
        if held != mine:
            raise TaskError(
                f"update {update.name} names {len(mine)} parameters, its optimiser holds {len(held)}, not the same ones",
                hint="give both the same parameters",
            )
        return (_stepping_alone(update.optimizer),), (
            f"{type(update.optimizer).__name__} of the task",
        )
    trained = [each for each in optim.find_trained(model) if id(each.parameter) in mine]
    if not trained:
        raise TaskError(f"update {update.name} trains no parameter", hint="are all of them frozen?")
    table = optim.table_of(spec.optim, trained) if many else spec.optim
    own = task.optimizer if "name" not in table.model_fields_set or table.name == "task" else None
    if table.name == "task" and own is None:
        raise SpecError(
            f"optim.name is 'task', but task {task.name} has no optimizer(groups)",
            hint="name sgd, adam, adamw, muon, lars or lamb",
        )
    groups = None
    if task.parameter_groups is not None and not many:
        groups = [
            {**group, "params": list(map(optim.master_of, group["params"]))}
            for group in task.parameter_groups(model)
        ]
        optim.check_cover(model, groups)
    if own is None:
        built = optim.build(table, trained, groups)
        return built.optimizers, built.summary
    if groups is None:
        groups = optim.build_groups(
            trained, decay=table.decay, no_decay=table.no_decay, rates=table.rates
        )
    made = own(_with_stated_rate(groups, table))
    if not isinstance(made, torch.optim.Optimizer):
        raise TaskError(
            f"optimizer(groups) of task {task.name} gave a {type(made).__name__}",
            hint="return a torch.optim.Optimizer",
        )
    return (_stepping_alone(made),), (f"{type(made).__name__} of the task's optimizer(groups)",)


def _stepping_alone(optimizer: torch.optim.Optimizer) -> torch.optim.Optimizer:
    """Return `optimizer`; refuse LBFGS, whose repeated loss calls break sample counts."""
    if isinstance(optimizer, torch.optim.LBFGS):
        raise TaskError(
            "LBFGS calls the loss several times in a step, which a run cannot do",
            hint="use another optimiser, or keep your own loop and surefoot.attach",
        )
    return optimizer


def _with_stated_rate(groups: list[dict[str, Any]], table: OptimTable) -> list[dict[str, Any]]:
    """Return `groups` with the spec's learning rate; refuse keys for surefoot's optimizers."""
    idle = sorted(table.model_fields_set & {*optim.OWN_KEYS})
    if idle:
        raise SpecError(
            f"optim.{idle[0]} is given, but the optimiser is the task's own",
            hint='set it in the task\'s optimizer(groups), or name another: optim.name = "adamw"',
        )
    return (
        [{**group, "lr": table.lr} for group in groups]
        if "lr" in table.model_fields_set
        else groups
    )
