"""Updates of a step: losses, parameter groups, optimizers, and their learning rates."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn

from surefoot.components.data.feed import Feed
from surefoot.components.optim.build import OWN_KEYS, check_effects, table_of
from surefoot.components.optim.build import build as build_optimizer
from surefoot.components.optim.groups import build_groups, check_cover, find_trained
from surefoot.components.optim.learning_rates import apply_batch_scaling
from surefoot.components.optim.update import GuardedUpdate
from surefoot.contract.spec import OptimTable, RunSpec
from surefoot.contract.state import learning_rate_of, master_of
from surefoot.contract.task import Loss, ResolvedTask, Update
from surefoot.core.errors import SpecError, TaskError
from surefoot.core.schedule.plan import Curve
from surefoot.train.step import LiveUpdate


def make_curve(
    spec: RunSpec, task: ResolvedTask, schedule: Curve, feed: Feed, total_steps: int | None
) -> Callable[[int], float]:
    """Return a function from the step to the multiplier of the learning rate.

    It uses the task's own `schedule` instead of the argument, unless the spec has a [schedule]
    table. With `optim.reference_batch`, the multiplier is scaled by the batch size of the step.
    """
    own = schedule_of_task(spec, task)
    return apply_batch_scaling(
        schedule if own is None else _own_curve(own, spec, total_steps), spec.optim, feed.batch_at
    )


def make_updates(
    spec: RunSpec,
    task: ResolvedTask,
    model: nn.Module,
    schedule: Curve,
    curve: Callable[[int], float],
    total_steps: int | None,
) -> tuple[list[LiveUpdate], list[str]]:
    """Return the updates of a step with their optimizers, and notes.

    Raises SpecError for settings that do not fit the task, and TaskError for invalid updates.
    """
    notes: list[str] = []
    if schedule_of_task(spec, task) is not None:
        notes.append("the learning rate follows the task's own schedule(step, total_steps)")
    stated = _updates_of_task(task, model)
    check_effects(
        spec.optim,
        has_own_groups=task.parameter_groups is not None and len(stated) == 1,
        has_own_optimizers=all(each.optimizer is not None for each in stated),
    )
    many = len(stated) > 1
    if many and spec.memory.update_in_backward:
        raise SpecError(
            f"memory.update_in_backward supports one Update, but task {task.name} "
            f"has {len(stated)}",
            hint="set memory.update_in_backward = false",
        )
    if many:  # raises for patterns that match no parameter of any update
        trained, table = find_trained(model), spec.optim
        build_groups(
            trained, weight_decay=0.0, no_decay=table.no_decay, lr_multipliers=table.lr_multipliers
        )
    made = []
    for update in stated:
        optimizers, summary = _optimizers(spec, task, model, update, many)
        notes += [f"{update.name}: {line}" if many else line for line in summary]
        notes += _set_training_mode(optimizers)
        guarded = GuardedUpdate(
            optimizers,
            clip=spec.optim.clip,
            clip_value=spec.optim.clip_value,
            curve=_to_update_steps(curve, update.every),
            momentum_curve=_momentum_of(schedule, update.every),
            total_steps=total_steps if schedule.is_pure else None,
        )
        notes += [
            f"{type(each).__name__} computes its learning rate itself: the schedule has no effect"
            for each in optimizers
            if any(learning_rate_of(group) is None for group in each.param_groups)
        ]
        in_backward = None
        if spec.memory.update_in_backward:
            from surefoot.components.optim.in_backward import UpdateInBackward

            in_backward = UpdateInBackward(guarded)
        loss = update.loss
        if spec.memory.offload == "activations":
            from surefoot.components.memory.offload import Offloaded

            loss = Offloaded(loss)
        made.append(LiveUpdate(update.name, loss, guarded, update.every, in_backward))
    _check_cover(task, model, made)
    return made, notes


def _momentum_of(schedule: Curve, every: int) -> Callable[[int], float] | None:
    return (
        _to_update_steps(lambda step: schedule.momentum(step) or 0.0, every)
        if schedule.momentum(0) is not None
        else None
    )


def schedule_of_task(spec: RunSpec, task: ResolvedTask) -> Callable[[int, int], float] | None:
    """Return the task's `schedule`; None if it has none, or if the spec has a [schedule] table."""
    return None if "schedule" in spec.model_fields_set else task.schedule


def _own_curve(
    own: Callable[[int, int], float], spec: RunSpec, total_steps: int | None
) -> Callable[[int], float]:
    if total_steps is None:
        raise SpecError(
            f"train.length is {spec.train.length}, but the task's schedule(step, total_steps) "
            "needs the number of steps",
            hint="give the length in steps or epochs, or name a schedule under [schedule]",
        )
    for step in (0, total_steps):
        if not _is_finite(value := own(step, total_steps)):
            raise TaskError(
                f"schedule({step}, {total_steps}) of the task returned {value!r}",
                hint="return a multiplier of the learning rate, such as 0.5",
            )
    return lambda step: float(own(min(step, total_steps), total_steps))


def _is_finite(value: Any) -> bool:
    try:
        return math.isfinite(value)
    except (TypeError, ValueError):
        return False


def _to_update_steps(curve: Callable[[int], float], every: int) -> Callable[[int], float]:
    """Convert `curve` to a function of the steps of an `Update` that runs every `every` steps."""
    return curve if every == 1 else lambda applied: curve((applied + 1) * every - 1)


def _check_cover(task: ResolvedTask, model: nn.Module, updates: Sequence[LiveUpdate]) -> None:
    """Check that every trained parameter is in an optimizer.

    Without `updates` of the task, it must be in exactly one parameter group; with them it may be in
    several.
    """
    groups = [{"params": update.guarded.parameters} for update in updates]
    if task.updates is not None:
        groups = [
            {
                "params": list(
                    {id(each): each for group in groups for each in group["params"]}.values()
                )
            }
        ]
    check_cover(model, groups)


def _updates_of_task(task: ResolvedTask, model: nn.Module) -> list[Update]:
    if task.updates is None:
        one = task.task

        def loss(model: nn.Module, batch: Any) -> Loss:
            return one.loss(one.forward(model, batch), batch)

        return [Update("loss", loss, model.parameters())]
    stated = list(task.updates(model))
    if not stated or len({update.name for update in stated}) != len(stated):
        raise TaskError(
            f"updates(model) of task {task.name} returned no Update, or two with the same name",
            hint="name each Update differently",
        )
    return stated


def _optimizers(
    spec: RunSpec, task: ResolvedTask, model: nn.Module, update: Update, many: bool
) -> tuple[Sequence[torch.optim.Optimizer], Sequence[str]]:
    parameters = list(update.parameters)
    mine = {id(master_of(parameter)) for parameter in parameters}
    if update.optimizer is not None:
        if any(master_of(parameter) is not parameter for parameter in parameters):
            raise SpecError(
                f"update {update.name} has a user-defined optimizer, which does not "
                "support master weights (precision.weights, memory.offload)",
                hint="let surefoot build the optimizer, or leave these keys out",
            )
        held = {
            id(parameter)
            for group in update.optimizer.param_groups
            for parameter in group["params"]
        }
        if held != mine:
            raise TaskError(
                f"update {update.name} names {len(mine)} parameters, but its "
                f"optimizer holds {len(held)}; they must be the same",
                hint="give the Update and its optimizer the same parameters",
            )
        return (_refuse_lbfgs(update.optimizer),), (
            f"{type(update.optimizer).__name__} of the task",
        )
    trained = [each for each in find_trained(model) if id(each.parameter) in mine]
    if not trained:
        raise TaskError(
            f"update {update.name} trains no parameter",
            hint="check whether all of its parameters are frozen",
        )
    table = table_of(spec.optim, trained) if many else spec.optim
    own = task.optimizer if "name" not in table.model_fields_set or table.name == "task" else None
    if table.name == "task" and own is None:
        raise SpecError(
            f"optim.name is 'task', but task {task.name} has no optimizer(groups)",
            hint="set optim.name to sgd, adam, adamw, muon, lars or lamb",
        )
    groups = None
    if task.parameter_groups is not None and not many:
        groups = [
            {**group, "params": list(map(master_of, group["params"]))}
            for group in task.parameter_groups(model)
        ]
        check_cover(model, groups)
    if own is None:
        built = build_optimizer(table, trained, groups)
        return built.optimizers, built.summary
    if groups is None:
        groups = build_groups(
            trained,
            weight_decay=table.weight_decay,
            no_decay=table.no_decay,
            lr_multipliers=table.lr_multipliers,
        )
    made = own(_with_stated_rate(groups, table))
    if not isinstance(made, torch.optim.Optimizer):
        raise TaskError(
            f"optimizer(groups) of task {task.name} returned a {type(made).__name__}",
            hint="return a torch.optim.Optimizer",
        )
    return (_refuse_lbfgs(made),), (f"{type(made).__name__} of the task's optimizer(groups)",)


def _set_training_mode(optimizers: Sequence[torch.optim.Optimizer]) -> list[str]:
    """Set the training mode of optimizers that have modes, as schedule-free ones; return notes."""
    notes = []
    for optimizer in optimizers:
        train: Any = getattr(optimizer, "train", None)
        if callable(train) and callable(getattr(optimizer, "eval", None)):
            train()
            notes.append(
                f"{type(optimizer).__name__} has train() and eval(): only train() is called, "
                "so evaluations and checkpoints use the weights of the training mode; to evaluate "
                "other weights, call eval() before run.evaluate() and train() after it"
            )
    return notes


def _refuse_lbfgs(optimizer: torch.optim.Optimizer) -> torch.optim.Optimizer:
    """Return `optimizer`. Raises TaskError for LBFGS, which calls the loss several times."""
    if isinstance(optimizer, torch.optim.LBFGS):
        raise TaskError(
            "LBFGS calls the loss several times in a step, which a run cannot do",
            hint="use another optimizer, or write the training loop and use surefoot.attach",
        )
    return optimizer


def _with_stated_rate(groups: list[dict[str, Any]], table: OptimTable) -> list[dict[str, Any]]:
    """Return `groups` with the learning rate of the spec, if the spec sets one.

    Raises SpecError if the spec sets a key that only optimizers built by surefoot read.
    """
    idle = sorted(table.model_fields_set & {*OWN_KEYS})
    if idle:
        raise SpecError(
            f"optim.{idle[0]} is given, but the task builds the optimizer",
            hint="set it in the task's optimizer(groups), or let surefoot build the optimizer: "
            'optim.name = "adamw"',
        )
    return (
        [{**group, "lr": table.lr} for group in groups]
        if "lr" in table.model_fields_set
        else groups
    )
