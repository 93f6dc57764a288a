"""Wrappers that call the user's gradient hooks with mean gradients, as in plain PyTorch.

In a step with several microbatches or ranks, the backward pass computes gradient sums times a
factor that the step chooses. A hook is called with the mean gradient of this rank's microbatch. The
gradient that the hook returns, or leaves in `grad`, is converted back with the same factor. With
fp16 loss scaling a hook receives scaled gradients, as with torch.amp.GradScaler.
"""

from __future__ import annotations

from collections.abc import Callable, MutableMapping, Sequence
from operator import attrgetter
from typing import Any

import torch
from torch import Tensor, nn

from surefoot.contract.task import Term

Factor = float | Tensor
_OF_GRADIENT = attrgetter("_backward_hooks")
_OF_PARAMETER = attrgetter("_post_accumulate_grad_hooks")


class GradientHooks:
    """Hooks of a model's parameters and modules, wrapped before each backward pass.

    Users may add and remove hooks between steps.
    """

    def __init__(self, model: nn.Module) -> None:
        self._of_modules = hooks_of_modules(model)
        self.of_pass: Factor = 1.0  # turns the gradient of a pass into a mean
        self.of_sum: Factor = 1.0  # turns the sum of gradients so far in this step into a mean
        # false in placeholder passes while other ranks still have microbatches
        self.is_on = True
        self.is_split = False
        self._count: Factor = 0.0

    def begin(self, *, is_split: bool) -> None:
        """Wrap the module hooks of the user, before the forward passes of an update capture them.

        If `is_split` is false, the gradients are means already, and the hooks are left unchanged.
        """
        self.is_split = is_split
        self._count, self.of_pass, self.of_sum = 0.0, 1.0, 1.0
        if is_split:
            for hooks in filter(None, self._of_modules):
                _wrap(hooks, lambda hook: _OnModule(hook, self))

    def begin_pass(
        self,
        leaves: Sequence[Tensor],
        terms: Sequence[Term],
        count_of: Callable[[Term], Factor],
        *,
        adds: bool,
    ) -> None:
        """Wrap the tensor hooks of `leaves` before a backward pass.

        `count_of(term)` is the number by which this pass divides the total of a term. With `adds`,
        the pass adds its gradients to those of earlier passes of the step.
        """
        term = next((each for each in terms if not each.fixed), terms[0])
        self._count = self._count + term.count if adds else term.count
        divisor = count_of(term)
        self.of_pass, self.of_sum = _ratio(divisor, term.count), _ratio(divisor, self._count)
        for hooks in filter(None, map(_OF_GRADIENT, leaves)):
            _wrap(hooks, lambda hook: _OnGradient(hook, self))
        for hooks in filter(None, map(_OF_PARAMETER, leaves)):
            _wrap(hooks, lambda hook: _OnParameter(hook, self))


def hooks_of_modules(model: nn.Module) -> list[MutableMapping[int, Any]]:
    """Return the dicts in which the modules of a model store their backward hooks."""
    return [
        hooks
        for module in model.modules()
        for hooks in (module._backward_hooks, module._backward_pre_hooks)
    ]


def _ratio(divisor: Factor, count: Factor) -> Factor:
    if isinstance(count, Tensor) or isinstance(divisor, Tensor):
        return torch.where(torch.as_tensor(count) > 0, divisor / count, 1.0)
    return divisor / count if count else 1.0


def _wrap(hooks: MutableMapping[int, Any], make: Callable[[Any], Any]) -> None:
    for key, hook in list(hooks.items()):
        module = getattr(hook, "__module__", None) or ""
        if not module.startswith("surefoot.") or module.startswith("surefoot.tasks."):
            hooks[key] = make(hook)


def _is_one(factor: Factor) -> bool:
    return not isinstance(factor, Tensor) and factor == 1.0


def _times(value: Any, factor: Factor, *, divides: bool = False) -> Any:
    if isinstance(value, tuple):
        return tuple(_times(each, factor, divides=divides) for each in value)
    if not isinstance(value, Tensor):
        return value
    return value / factor if divides else value * factor


class _OnGradient:
    """Wrapper of a tensor hook, which may return a different gradient."""

    def __init__(self, hook: Any, factors: GradientHooks) -> None:
        self._hook, self._factors = hook, factors

    def __call__(self, gradient: Tensor) -> Any:
        factor = self._factors.of_pass
        if not self._factors.is_on:
            return None
        if _is_one(factor):
            return self._hook(gradient)
        return _times(self._hook(_times(gradient, factor)), factor, divides=True)


class _OnModule:
    """Wrapper of a module's backward hook, which may return different gradients."""

    def __init__(self, hook: Any, factors: GradientHooks) -> None:
        self._hook, self._factors = hook, factors

    def __call__(self, module: nn.Module, *gradients: Any) -> Any:
        factor = self._factors.of_pass
        if not self._factors.is_on:
            return None
        if _is_one(factor):
            return self._hook(module, *gradients)
        return _times(
            self._hook(module, *(_times(each, factor) for each in gradients)), factor, divides=True
        )


class _OnParameter:
    """Wrapper of a post-accumulate hook, which may change `grad`.

    FSDP2 also calls the hook with a sharded parameter, whose `grad` holds rows summed over all
    ranks. That call is ignored, because the hook was called with the whole gradient before.
    """

    def __init__(self, hook: Any, factors: GradientHooks) -> None:
        self._hook, self._factors = hook, factors

    @torch.no_grad()
    def __call__(self, parameter: Tensor) -> None:
        # the gradient of a parameter with a master is that of this pass: the master has the sum
        has_sum = getattr(parameter, "hand_over", None) is None
        factor = self._factors.of_sum if has_sum else self._factors.of_pass
        if not self._factors.is_on or hasattr(parameter, "device_mesh"):
            return
        if _is_one(factor) or parameter.grad is None:
            self._hook(parameter)
            return
        parameter.grad.mul_(factor)
        self._hook(parameter)
        if parameter.grad is not None:
            parameter.grad.div_(factor)
