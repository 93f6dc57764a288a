"""Optimizer step with gradient norm, non-finite check and clipping, in few kernels.

On a CPU, the host decides whether to apply the update. On a GPU, the norm, the decision, the step
counter and the learning rate stay tensors on the device, and the host does not wait for them.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import repeat
from typing import Any

import torch
from torch import Tensor
from torch.optim import SGD, Adam, AdamW, Optimizer

from surefoot.components.optim import fused, saving
from surefoot.components.optim.learning_rates import Curve, LearningRates
from surefoot.components.optim.snapshot import (
    OptimizerSnapshot,
    fused_groups_of,
    has_same_objects,
    is_current,
    parameters_of,
)
from surefoot.contract.state import leaf_of, run_last
from surefoot.core.errors import NumbersError, RunFolderError, SpecError, TaskError

ONE_GRAPH = 'a step as one graph (compile.what = "step")'
RATE_HINT = "a schedule must return finite multipliers of the learning rate, such as 0.5"
# attributes of many tensors, read without a Python loop at every step
_GRAD, _LAYOUT = operator.attrgetter("grad"), operator.attrgetter("layout")
CLIP_EPS = 1e-6  # as torch.nn.utils.clip_grad_norm_ adds to the norm


class GuardedUpdate:
    """Optimizer step that scales and clips gradients, and is skipped if they are non-finite.

    Groups, states and (without `curve`) learning rates are read from the optimizers at every step,
    so changes that other code makes to them have an effect.

    Args:
        optimizers: The optimizers, which step together.
        clip: Limit of the global gradient norm; 0 for no limit.
        clip_value: Limit of the absolute value of each gradient element; None for no limit.
        curve: Function of the number of applied steps that returns a multiplier of every group's
            learning rate.
        momentum_curve: Function of the number of applied steps that returns every group's momentum
            (one-cycle).
        total_steps: Number of steps of the run; needed for `on_device`.
        on_device: Decide on the device whether to apply a step, so that the host does not wait;
            None does so on any device but a CPU. It needs fused optimizers and `total_steps`, and
            no `momentum_curve`.

    Raises:
        SpecError: For an invalid `clip` or `clip_value`, and for a curve that is not finite.
    """

    def __init__(
        self,
        optimizers: Sequence[Optimizer],
        *,
        clip: float = 0.0,
        clip_value: float | None = None,
        curve: Curve | None = None,
        momentum_curve: Curve | None = None,
        total_steps: int | None = None,
        on_device: bool | None = None,
    ) -> None:
        _check_limits(clip, clip_value)
        self.optimizers = list(optimizers)
        self._num_applied, self.on_device = 0, False
        # replaced where ranks hold parts of the gradients
        self.join_norm: Callable[[Tensor], Tensor] = lambda norm: norm
        self._clip, self._clip_value = clip, clip_value
        self._curve, self._momentum_curve = curve or (lambda step: 1.0), momentum_curve
        self._learning_rates = LearningRates(has_curve=curve is not None)
        self._take_optimizers()
        device = self._scale.device
        asynchronous = device.type != "cpu" if on_device is None else on_device
        self.on_device = (
            asynchronous and all(self._fused) and total_steps is not None and momentum_curve is None
        )
        if self.on_device and total_steps is not None:
            table = [self._curve(step) for step in range(total_steps + 1)]
            wrong = [step for step, multiplier in enumerate(table) if not math.isfinite(multiplier)]
            if wrong:
                raise SpecError(_no_rate(table[wrong[0]], wrong[0]), hint=RATE_HINT)
            self._table = torch.tensor(table, dtype=torch.float64, device=device)
            self._applied = torch.zeros((), dtype=torch.int64, device=device)

    def _take_optimizers(self) -> None:
        """Read the groups, parameters and states of the optimizers."""
        self._groups: list[dict[str, Any]] = [
            group for each in self.optimizers for group in each.param_groups
        ]
        self._held = [parameters_of(each) for each in self.optimizers]
        self._parameters: list[Tensor] = [parameter for held in self._held for parameter in held]
        if self._clip_value is not None and any(
            parameter.is_complex() for parameter in self._parameters
        ):
            raise SpecError(
                "clip_value limits each element of a gradient, but a trained parameter is complex",
                hint="use optim.clip, which limits the norm, or leave clip_value out",
            )
        self._masters = [
            parameter for parameter in self._parameters if leaf_of(parameter) is not parameter
        ]
        for each in self.optimizers:
            # else torch's schedulers warn that step() is never called
            each._opt_called = True  # type: ignore[attr-defined]
            if fused.supports(each):
                fused.create_state(each)
            else:
                saving.separate_counters(each)
        self._fused = [fused_groups_of(each) for each in self.optimizers]
        self._taken = [
            OptimizerSnapshot.of(each, of_fused)
            for each, of_fused in zip(self.optimizers, self._fused, strict=True)
        ]
        self._learning_rates.take(self._groups)
        device = self._parameters[0].device if self._parameters else torch.device("cpu")
        is_wide = any(parameter.dtype == torch.float64 for parameter in self._parameters)
        self._scale = torch.ones(
            (), device=device, dtype=torch.float64 if is_wide else torch.float32
        )
        self._rates = [torch.zeros((), dtype=torch.float64, device=device) for _ in self._groups]
        if self.on_device and not all(self._fused):  # one of them was added later
            self._num_applied, self.on_device = int(self._applied), False

    def _follow_optimizers(self) -> None:
        """Read the optimizers again if other code has changed groups, parameters or states."""
        if len(self.optimizers) != len(self._taken):
            self._take_optimizers()
        if all(map(has_same_objects, self.optimizers, self._taken)):
            return
        for number, (optimizer, taken) in enumerate(zip(self.optimizers, self._taken, strict=True)):
            if has_same_objects(optimizer, taken):
                continue
            if not is_current(optimizer, taken):
                self._take_optimizers()
                return
            # only the update has changed its state
            self._taken[number] = OptimizerSnapshot.of(optimizer, taken.fused)

    @property
    def applied_steps(self) -> int:
        """Number of applied updates; reading it waits for an asynchronous device."""
        return int(self._applied) if self.on_device else self._num_applied

    @applied_steps.setter
    def applied_steps(self, number: int) -> None:
        if self.on_device:
            self._applied.fill_(number)
        else:
            self._num_applied = number

    @property
    def groups(self) -> list[dict[str, Any]]:
        """The current parameter groups of all optimizers."""
        self._follow_optimizers()
        return self._groups

    @property
    def parameters(self) -> list[Tensor]:
        """The current parameters of all optimizers."""
        self._follow_optimizers()
        return self._parameters

    def extend(self, optimizers: Sequence[Optimizer]) -> None:
        """Add optimizers, which step together with the others from the next update on.

        If one of them has no fused update, the host decides from then on whether to apply a step.
        """
        self.optimizers += optimizers
        self._take_optimizers()

    def states(self) -> Iterator[tuple[Tensor, dict[str, Any]]]:
        """Yield each tensor that the optimizers update, with its optimizer state."""
        self._follow_optimizers()
        for optimizer, held in zip(self.optimizers, self._held, strict=True):
            yield from ((parameter, optimizer.state.get(parameter, {})) for parameter in held)

    def state(self, names: Mapping[int, str]) -> dict[str, Any]:
        """Return the state for a checkpoint; its tensors are not copied.

        `names` maps the `id` of each parameter to its name.
        """
        self._follow_optimizers()
        made = [
            saving.state_of(each, held, names)
            for each, held in zip(self.optimizers, self._held, strict=True)
        ]
        return {"applied_steps": self.applied_steps, "optimizers": made}

    def restore(self, saved: Mapping[str, Any], names: Mapping[int, str]) -> None:
        """Restore the result of `state`. Raises RunFolderError if the optimizers are different."""
        self._follow_optimizers()
        if len(saved["optimizers"]) != len(self.optimizers):
            raise RunFolderError(
                "the saved state belongs to other optimizers",
                hint="resume with the spec that the run had",
            )
        for optimizer, held, each in zip(
            self.optimizers, self._held, saved["optimizers"], strict=True
        ):
            saving.restore(optimizer, each, held, names)
            if fused.supports(optimizer):
                saving.share_counters(optimizer)
        self.applied_steps = int(saved["applied_steps"])
        self._take_optimizers()  # a fork may have switched the momentum on or off

    def state_dict(self) -> dict[str, Any]:
        """Return the optimizer states, by the indices of the parameters, and the step count."""
        return self.state({})

    def load_state_dict(self, saved: Mapping[str, Any]) -> None:
        """Restore the optimizer states and the step count that `state_dict` returned."""
        self.restore(saved, {})

    def clear_gradients(self) -> None:
        # parameters added since the last update have no gradient yet
        for parameter in self._parameters:
            parameter.grad = None
        for parameter in self._masters:
            leaf: Any = leaf_of(parameter)
            leaf.grad = None
            if (hook := getattr(leaf, "hand_over", None)) is not None:
                run_last(leaf, hook)  # hooks that the loop added see the gradient first

    @property
    def rates(self) -> list[float]:
        """The learning rate of each parameter group at the next update."""
        multiplier = self._curve(self.applied_steps)
        self._follow_optimizers()
        return [base * multiplier for base in self._learning_rates.read()]

    def norm(self) -> Tensor:
        """Return the global norm of the gradients; 0 without gradients."""
        self._follow_optimizers()
        grads = self._gradients()
        return self.join_norm(fused.norm_of(grads) if grads else torch.zeros_like(self._scale))

    def _gradients(self) -> list[Tensor]:
        """Return the values of all gradients, after coalescing those that are sparse.

        Raises TaskError for a sparse gradient if the update is fused.
        """
        found = [grad for grad in map(_GRAD, self._parameters) if grad is not None]
        if all(map(operator.is_, map(_LAYOUT, found), repeat(torch.strided))):
            return found
        for parameter in self._parameters:
            if parameter.grad is not None and parameter.grad.layout is not torch.strided:
                self._check_takes_sparse(parameter)
                parameter.grad = parameter.grad.coalesce()
        return [fused.numbers_of(grad) for grad in map(_GRAD, self._parameters) if grad is not None]

    def _check_takes_sparse(self, parameter: Tensor) -> None:
        for optimizer, groups, held in zip(self.optimizers, self._fused, self._held, strict=True):
            if groups is not None and any(each is parameter for each in held):
                raise TaskError(
                    (
                        "a gradient is sparse, but the fused update of "
                        f"{type(optimizer).__name__} needs dense gradients"
                    ),
                    hint=(
                        "leave fused=True out of the optimizer, "
                        "or build the embedding with sparse=False"
                    ),
                )

    def step_if_finite(self, factor: float | Tensor = 1.0) -> tuple[float | Tensor, bool | Tensor]:
        """Multiply the gradients by `factor`, clip them, and update if their norm is finite.

        Returns the global norm of the gradients, multiplied by `factor` but not clipped, and
        whether the update was applied. Without gradients, it returns 0 and False. Raises SpecError
        for a factor of 0 or below, unless the device decides (`on_device`).
        """
        self._follow_optimizers()  # once for the whole update
        grads = self._gradients()
        if not grads:
            return 0.0, False
        raw = self.join_norm(fused.norm_of(grads))
        done = (
            self._on_device(raw, factor)
            if self.on_device
            else self._on_host(raw, float(factor), grads)
        )
        if self._masters:
            from surefoot.components.optim.masters import publish

            publish(self._masters)
        return done

    def _on_host(self, raw: Tensor, factor: float, grads: list[Tensor]) -> tuple[float, bool]:
        if factor <= 0.0:
            raise SpecError(
                f"the gradients are multiplied by {factor}",
                hint="use a number above 0, such as 1 / count",
            )
        norm = raw.item() * factor
        if not math.isfinite(norm):
            return norm, False
        if self._clip and norm > self._clip - CLIP_EPS:
            factor *= min(1.0, self._clip / (norm + CLIP_EPS))
        if self._clip_value is not None:
            fused.scale_gradients(grads, factor)
            fused.clamp_gradients(grads, self._clip_value)
            factor = 1.0
        self._apply(factor)
        return norm, True

    def apply(self, factor: float) -> None:
        """Update with the gradients times `factor`, without clipping and non-finite check."""
        self._follow_optimizers()
        self._apply(factor)

    def _apply(self, factor: float) -> None:
        num_applied = self.applied_steps
        self._move_schedule(num_applied)
        scale = None if factor == 1.0 else self._scale.fill_(1.0 / factor)
        for optimizer, groups, held in zip(self.optimizers, self._fused, self._held, strict=True):
            if groups is None:
                self._scale_then_step(optimizer, held, factor)
            else:
                for each in groups:
                    each.step(each.group["lr"], scale, None)
        self.applied_steps = num_applied + 1

    def places(self) -> dict[int, tuple[fused.FusedGroup, int]] | None:
        """Return the fused group of each parameter, and its index in that group, by its `id`.

        Returns None if an optimizer has no fused kernel.
        """
        self._follow_optimizers()
        places: dict[int, tuple[fused.FusedGroup, int]] = {}
        for held in self._fused:
            for each in held or (None,):
                if not isinstance(each, fused.FusedGroup):
                    return None
                places |= {
                    id(parameter): (each, place)
                    for place, parameter in enumerate(each.group["params"])
                }
        return places

    # ---- the update as a part of a graph

    def check_traceable(self) -> None:
        """Raise SpecError if the update cannot be part of a compiled graph."""
        from surefoot.components.optim.kinds.layerwise import Lamb, Lars

        other, have_rules = 'or compile.what = "model"', (Adam, AdamW, SGD, Lars, Lamb)
        for optimizer, groups in zip(self.optimizers, self._fused, strict=True):
            has_rule = type(optimizer) in have_rules
            if not has_rule or groups is None or any(each.tensors is None for each in groups):
                raise SpecError(
                    (
                        f"{ONE_GRAPH} supports the fused updates of sgd, adam, adamw, lars and "
                        "lamb, but an optimizer is "
                        f"{type(optimizer).__name__}{fused.reason_not_fused(optimizer)}"
                    ),
                    hint=(
                        f"remove the hooks, {other}"
                        if has_rule and fused.has_step_hooks(optimizer)
                        else "use one of them with optim.fused = true (fused=True in a loop of "
                        f"your own), {other}"
                    ),
                )
        if self._momentum_curve is not None:
            raise SpecError(
                f"{ONE_GRAPH} does not support a schedule that changes the momentum",
                hint=f"use another schedule, {other}",
            )
        if any(each.ndim == 0 and each.dtype == torch.float64 for each in self.parameters):
            # torch treats such a state as a Python number, and loses the graph's writes
            raise SpecError(
                f"{ONE_GRAPH} does not support a 0-dimensional parameter in float64",
                hint=f"give it the shape (1,), {other}",
            )

    @property
    def limits(self) -> tuple[float, float | None]:
        """Limits of the global gradient norm (0 for none) and of each element (None for none)."""
        return self._clip, self._clip_value

    def held(self) -> list[tuple[list[Tensor], ...]]:
        """Return all tensors that an update changes, by parameter group.

        Raises SpecError if the update cannot be part of a compiled graph any more, since hooks were
        added to the steps of an optimizer.
        """
        self._follow_optimizers()
        if None in self._fused:
            self.check_traceable()
        return [
            tensors
            for groups in self._fused
            for each in groups or ()
            if (tensors := each.tensors) is not None
        ]

    def begin_traced(self) -> list[Tensor]:
        """Return the learning rate of each group for the next update of a compiled step."""
        if not self.on_device:
            self.move_schedule()
            for rate, group in zip(self._rates, self._groups, strict=True):
                rate.fill_(group["lr"])
            return self._rates
        multiplier = self._table[self._applied.clamp(max=len(self._table) - 1)]
        self._follow_optimizers()
        rates = [multiplier * base for base in self._learning_rates.read()]
        self._learning_rates.write(rates)
        return rates

    def end_traced(self, norm: Tensor, applied: Tensor) -> tuple[float | Tensor, bool | Tensor]:
        """Count the update of a compiled step if it was `applied`; return `norm` and `applied`."""
        for each in (each for groups in self._fused for each in groups or ()):
            each.count_traced(applied)
        if self.on_device:
            self._applied += applied
            return norm, applied
        was_applied = bool(applied)
        self.applied_steps += was_applied
        return norm.item(), was_applied

    def move_schedule(self) -> None:
        """Set the learning rate, and a scheduled momentum, of every group for this update."""
        self._follow_optimizers()
        self._move_schedule(self.applied_steps)

    def _move_schedule(self, num_applied: int) -> None:
        multiplier = self._curve(num_applied)
        if not math.isfinite(multiplier):
            raise NumbersError(_no_rate(multiplier, num_applied), hint=RATE_HINT)
        self._learning_rates.write([base * multiplier for base in self._learning_rates.read()])
        if self._momentum_curve is not None:
            momentum = self._momentum_curve(num_applied)
            for group in self._groups:
                _set_momentum(group, momentum)

    def _scale_then_step(self, optimizer: Optimizer, held: list[Tensor], factor: float) -> None:
        """Scale the gradients of an optimizer without a fused update, then call its `step()`."""
        grads = [
            fused.numbers_of(parameter.grad) for parameter in held if parameter.grad is not None
        ]
        if grads and factor != 1.0:
            fused.scale_gradients(grads, factor)
        optimizer.step()
        # an optimizer that changes lr itself gets the schedule's lr at every step
        self._learning_rates.keep()

    def _on_device(self, raw: Tensor, factor: float | Tensor) -> tuple[Tensor, Tensor]:
        norm = raw * factor
        finite = torch.isfinite(norm)
        shrink = (
            (self._clip / (norm + CLIP_EPS)).clamp(max=1.0) if self._clip else torch.ones_like(norm)
        )
        grad_scale = torch.where(finite, 1.0 / (shrink * factor), 1.0).to(self._scale.dtype)
        found_inf = (~finite).float()
        if self._clip_value is not None:
            grads = [parameter.grad for parameter in self.parameters if parameter.grad is not None]
            fused.scale_gradients(grads, 1.0 / grad_scale)
            fused.clamp_gradients(grads, self._clip_value)
            grad_scale = torch.ones_like(grad_scale)
        multiplier = self._table[self._applied.clamp(max=len(self._table) - 1)]
        rates = [multiplier * base for base in self._learning_rates.read()]
        # for reports; the host reads them only when it reads the report
        self._learning_rates.write(rates)
        for each, rate in zip(
            (each for groups in self._fused for each in groups or ()), rates, strict=True
        ):
            each.step(rate.float(), grad_scale, found_inf)
        self._applied += finite
        return norm, finite


def _no_rate(multiplier: float, applied_steps: int) -> str:
    return f"the schedule returned {multiplier} after {applied_steps} updates"


def _set_momentum(group: dict[str, Any], momentum: float) -> None:
    if "betas" in group:
        group["betas"] = (momentum, group["betas"][1])
    elif "momentum" in group:
        group["momentum"] = momentum


def _check_limits(clip: float, clip_value: float | None) -> None:
    if not (_is_number(clip) and clip >= 0):
        raise SpecError(f"clip is {clip!r}", hint="use a number: 0 (off) or more")
    if clip_value is not None and not (_is_number(clip_value) and clip_value > 0):
        raise SpecError(f"clip_value is {clip_value!r}", hint="use a number above 0, or None (off)")


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)
