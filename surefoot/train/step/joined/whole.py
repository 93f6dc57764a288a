"""A step compiled as one graph, from the forward pass to the optimizer update.

The graph contains the division by the counts, the norm, the non-finite check and clipping. It needs
a few kernels for an optimizer step of a hundred small operators. Results equal those of the
uncompiled step up to rounding. If compilation fails, the uncompiled step is used.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Mapping
from typing import Any, Literal, get_args

import torch
from torch import Tensor, nn

from surefoot.components.compiler.regions import Mode, compile_function
from surefoot.components.optim.update import GuardedUpdate
from surefoot.components.precision.policy import PLAIN, Policy
from surefoot.contract.spec import CompileTable, RunSpec
from surefoot.contract.state import leaf_of
from surefoot.contract.task import Batch, Loss, Term
from surefoot.core.errors import SpecError, TaskError
from surefoot.train.step.hooks import hooks_of_modules
from surefoot.train.step.joined.arithmetic import UpdateRule, move
from surefoot.train.step.program import LiveUpdate, can_apply

KEY = 'compile.what = "step"'
NAME = "the whole step"
# settings of a parameter group, besides its betas, that UpdateRule reads
SETTINGS = ("weight_decay", "eps", "momentum", "nesterov", "trust_coefficient", "adapt")
Done = tuple[tuple[Term, ...], float | Tensor, bool | Tensor]


class WholeStep:
    """Compiled step of one update with one microbatch, called with the batch.

    The step is compiled again if a setting of a parameter group other than the learning rate has
    changed, or the `requires_grad` of a parameter.
    """

    def __init__(
        self,
        model: nn.Module,
        update: LiveUpdate,
        policy: Policy,
        table: CompileTable,
        *,
        deterministic: bool,
    ) -> None:
        self._model, self._update, self._policy = model, update, policy
        self._settings, self._hooks = _settings_of(update.guarded), _Hooks(model)
        self.plan, self._compiled = compile_function(
            NAME,
            _as_function(model, update, policy),
            mode=table.mode,
            dynamic=table.dynamic,
            on_failure=table.on_failure,
            deterministic=deterministic,
            on_cpu=all(each.device.type == "cpu" for each in update.guarded.parameters),
        )

    @property
    def is_on(self) -> bool:
        return not (self.plan.is_eager or self.plan.failed)

    def __call__(self, batch: Batch) -> Done | None:
        """Run the step; return loss terms, gradient norm, and whether the update was applied.

        Returns None if the step could not be compiled.
        """
        guarded = self._update.guarded
        if self._hooks:
            _refuse(_problems_of(self._model, self._policy))
        settings = _settings_of(guarded)
        if settings != self._settings:
            self._settings = settings
            self._compiled.take(_as_function(self._model, self._update, self._policy))
        done = self._compiled(batch, guarded.held(), guarded.begin_traced())
        if done is None:
            return None
        if isinstance(done, str):
            raise TaskError(
                f"the loss must be a Loss; got a {done}",
                hint="return Loss.sum(total, count) with a summed total",
            )
        rows, norm, applied, grads = done
        terms = tuple(Term(*each) for each in rows)
        if grads is None:  # the loss is a constant
            can_apply(self._update, terms)
            grads = [None] * len(guarded.parameters)
        for parameter, grad in zip(guarded.parameters, grads, strict=True):
            parameter.grad = grad
        return terms, *guarded.end_traced(norm, applied)


def compile_step(
    model: nn.Module,
    loss: Callable[[Any, Batch], Loss],
    update: GuardedUpdate,
    *,
    policy: Policy = PLAIN,
    mode: Literal["default", "reduce-overhead", "max-autotune"] = "default",
    dynamic: bool | None = None,
    deterministic: bool = True,
) -> WholeStep:
    """Return a training step that is compiled as one graph, for a user-defined loop.

    Call the step with a batch: it returns the terms of the loss, the gradient norm, and whether the
    update was applied. Gradients need not be cleared. The first call compiles, which takes seconds.
    Later calls compile again if the requires_grad of a parameter has changed, or a setting of a
    parameter group other than the learning rate.

    Args:
        model: The model.
        loss: Function of (model, batch) that returns a `Loss`.
        update: The update, of fused SGD, Adam, AdamW, LARS or LAMB.
        policy: Number format of the forward and backward pass.
        mode: The mode of torch.compile.
        dynamic: Whether sizes may differ from call to call; with None, torch compiles for variable
            sizes after the second size.
        deterministic: Restrict the compiler to choices that a different process makes too.

    Raises:
        SpecError: For parts that a graph cannot contain, and for an unknown mode.
        TaskError: When the step is called, if it cannot be compiled.
    """
    if not isinstance(update, GuardedUpdate):
        raise SpecError(
            f"update must be a GuardedUpdate; got a {type(update).__name__}",
            hint="give GuardedUpdate([optimizer])",
        )
    if mode not in get_args(Mode):
        raise SpecError(f"mode is {mode!r}", hint=f"use one of {', '.join(get_args(Mode))}")
    if not isinstance(dynamic, bool | None):
        raise SpecError(f"dynamic is {dynamic!r}", hint="use True, False, or None (torch decides)")
    problems = {
        "an update without parameters": not update.parameters,
        "bf16 weights with masters": any(leaf_of(each) is not each for each in update.parameters),
        **_problems_of(model, policy),
    }
    _refuse(problems)
    update.check_traceable()
    table = CompileTable(what="step", mode=mode, dynamic=dynamic, on_failure="stop")
    return WholeStep(
        model, LiveUpdate(NAME, loss, update), policy, table, deterministic=deterministic
    )


class _Hooks:
    """Check for gradient hooks, which a graph would ignore; true if there is a hook."""

    def __init__(self, model: nn.Module) -> None:
        self._kept = hooks_of_modules(model)
        self._parameters = list(model.parameters())

    def __bool__(self) -> bool:
        return any(self._kept) or any(
            each._backward_hooks or each._post_accumulate_grad_hooks for each in self._parameters
        )


def _refuse(problems: Mapping[str, bool]) -> None:
    problem = next((words for words, is_so in problems.items() if is_so), None)
    if problem is not None:
        raise SpecError(
            f"a step as one graph does not support {problem}",
            hint="write the step without one graph, or leave this feature out",
        )


def _settings_of(guarded: GuardedUpdate) -> list[tuple[Any, ...]]:
    """Return the values at which a compiled step must be compiled again when they change.

    They are the settings of the parameter groups and which parameters are trained. They are
    compared in each step, so this must be fast.
    """
    groups = (group for each in guarded.optimizers for group in each.param_groups)
    return [
        (
            *group.get("betas", ()),
            *(group.get(name) for name in SETTINGS),
            *(parameter.requires_grad for parameter in group["params"]),
        )
        for group in groups
    ]


def _as_function(model: nn.Module, update: LiveUpdate, policy: Policy) -> Any:
    rules = [
        UpdateRule.of(type(each).__name__.lower(), group)
        for each in update.guarded.optimizers
        for group in each.param_groups
    ]
    clip, clip_value = update.guarded.limits
    # torch 2.11 does not guard requires_grad of a parameter, but it does guard this list
    is_trained = [parameter.requires_grad for parameter in update.guarded.parameters]

    def whole(batch: Batch, held: Any, rates: Any) -> Any:
        with policy.context():
            made = update.loss(model, batch)
        if not isinstance(made, Loss):
            # raised by the caller: an error inside a graph looks like one of the compiler
            return type(made).__name__
        terms = made.terms
        losses = [term.total for term in terms]
        parameters = [parameter for tensors in held for parameter in tensors[0]]
        trained = list(itertools.compress(parameters, is_trained))
        # a constant total, such as that of an image without boxes, has no gradient
        roots = [term for term in terms if term.total.requires_grad]
        found = iter(
            torch.autograd.grad(
                [term.total for term in roots],
                trained,
                [_factor(term) for term in roots],
                allow_unused=True,
            )
            if roots
            else [None] * len(trained)
        )
        grads = [next(found) if trains else None for trains in is_trained]
        with torch.no_grad():
            norm, applied, limited = move(
                rules, held, grads, rates, [*losses, _validity(terms)], clip, clip_value
            )
        return (
            [(term.name, term.total.detach(), term.count, term.weight) for term in terms],
            norm,
            applied,
            limited if roots else None,
        )

    return whole


def _factor(term: Term) -> Tensor:
    """Return the gradient of a term's total, weight / count; 0 for a term without items."""
    count = term.count
    if isinstance(count, Tensor):
        count = count.to(torch.promote_types(term.total.dtype, torch.float32))
        return torch.where(count > 0, term.weight / count, 0.0).to(term.total)
    return torch.full_like(term.total, term.weight / count if count else 0.0, requires_grad=False)


def _validity(terms: tuple[Term, ...]) -> Tensor:
    """Return 0, or NaN if a count is invalid or all counts are 0.

    NaN keeps all weights unchanged until the error is raised.
    """
    like = terms[0].total.detach()
    counts = torch.stack(
        [
            term.count.to(like)
            if isinstance(term.count, Tensor)
            else torch.full_like(like, term.count)
            for term in terms
        ]
    )
    return torch.where(
        torch.isfinite(counts).all() & (counts >= 0).all() & (counts.sum() > 0), 0.0, math.nan
    )


def check(spec: RunSpec, updates: list[LiveUpdate], policy: Policy, model: nn.Module) -> None:
    """Raise SpecError if the step cannot be compiled as one graph."""
    memory, is_cut = spec.memory, spec.train.microbatch not in (None, spec.train.batch)
    problems = {
        f"several updates ({len(updates)})": len(updates) > 1,
        "train.microbatch, which makes a step several microbatches": is_cut,
        "train.accumulate, which makes a step several microbatches": spec.train.accumulate > 1,
        "train.ramp": bool(spec.train.ramp),
        "memory.update_in_backward": memory.update_in_backward,
        'memory.on_oom = "halve", which makes a step several microbatches': memory.on_oom
        == "halve",
        "memory.offload": memory.offload != "none",
        "memory.activation_checkpointing": memory.activation_checkpointing != "none",
        'precision.weights = "bf16"': spec.precision.weights == "bf16",
        **_problems_of(model, policy),
    }
    problem = next((words for words, is_so in problems.items() if is_so), None)
    if problem is not None:
        raise SpecError(
            f"{KEY} does not support {problem}",
            hint='use compile.what = "model", or leave this feature out',
        )
    updates[0].guarded.check_traceable()


def _problems_of(model: nn.Module, policy: Policy) -> dict[str, bool]:
    """Return features that a graph cannot contain, and whether the model or policy uses each."""
    hooked = next((name for name, module in model.named_modules() if _has_hooks(module)), None)
    return {
        "fp16, whose gradients are scaled": policy.scaler is not None,
        f"hooks on gradients, as {hooked or 'the model'} has": hooked is not None,
    }


def _has_hooks(module: nn.Module) -> bool:
    of_parameters = any(
        each._backward_hooks or each._post_accumulate_grad_hooks
        for each in module.parameters(recurse=False)
    )
    return bool(module._backward_hooks or module._backward_pre_hooks or of_parameters)
