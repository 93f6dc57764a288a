"""Hooks on gradients of a user's own: they see what they see in a plain loop, the mean gradient of this rank's microbatch.

The backward pass of a step with several microbatches or ranks gives sums times a factor of the step's own. A hook is called with that
made a mean, and what it returns, or leaves in `grad`, is taken back by the same factor. With the loss scale of fp16 a hook sees
gradients times the scale, as beside torch.amp.GradScaler.
"""

from __future__ import annotations

from collections.abc import Callable, MutableMapping, Sequence
from operator import attrgetter
from typing import Any

import torch
from torch import Tensor, nn

from surefoot.contract.task import Term

Factor = float | Tensor
_OF_GRADIENT, _OF_PARAMETER = attrgetter("_backward_hooks"), attrgetter("_post_accumulate_grad_hooks")


class GradientHooks:
    """The hooks of a model's parameters and modules, found anew before each backward pass: they may come and go in the loop."""

    def __init__(self, model: nn.Module) -> None:
        self._of_modules = hooks_of_modules(model)
        self.of_pass: Factor = 1.0  # what makes the gradient of a pass a mean
        self.of_sum: Factor = 1.0  # what makes a mean of all that was added up in this step so far
        self.is_on = True  # not in passes that add nothing, while other ranks have microbatches left
        self.is_split = False
        self._count: Factor = 0.0

    def begin(self, *, is_split: bool) -> None:
        """The passes of an update begin. A forward pass takes the hooks of modules with it, so those come before it.

        Gradients that are not split are means: hooks are left as they are.
        """
        self.is_split = is_split
        self._count, self.of_pass, self.of_sum = 0.0, 1.0, 1.0
        if is_split:
            for hooks in filter(None, self._of_modules):
                _wrap(hooks, lambda hook: _OnModule(hook, self))

    def begin_pass(
        self, leaves: Sequence[Tensor], terms: Sequence[Term], count_of: Callable[[Term], Factor], *, adds: bool
    ) -> None:
        """A backward pass comes, in which a term's total is divided by `count_of(term)`; with `adds` gradients add to those before."""
        term = next((each for each in terms if not each.fixed), terms[0])
        self._count = self._count + term.count if adds else term.count
        divisor = count_of(term)
        self.of_pass, self.of_sum = _ratio(divisor, term.count), _ratio(divisor, self._count)
        for hooks in filter(None, map(_OF_GRADIENT, leaves)):
            _wrap(hooks, lambda hook: _OnGradient(hook, self))
        for hooks in filter(None, map(_OF_PARAMETER, leaves)):
            _wrap(hooks, lambda hook: _OnParameter(hook, self))


def hooks_of_modules(model: nn.Module) -> list[MutableMapping[int, Any]]:
    """Where the modules of a model keep their hooks on gradients, to be looked at in each step."""
    return [hooks for module in model.modules() for hooks in (module._backward_hooks, module._backward_pre_hooks)]


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
    """A hook of a tensor: it may return another gradient."""

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
    """A hook of a module's backward pass: it may return other gradients."""

    def __init__(self, hook: Any, factors: GradientHooks) -> None:
        self._hook, self._factors = hook, factors

    def __call__(self, module: nn.Module, *gradients: Any) -> Any:
        factor = self._factors.of_pass
        if not self._factors.is_on:
            return None
        if _is_one(factor):
            return self._hook(module, *gradients)
        return _times(self._hook(module, *(_times(each, factor) for each in gradients)), factor, divides=True)


class _OnParameter:
    """A hook that is called once a gradient is there: it may change `grad`.

    FSDP2 calls those of a sharded parameter with its rows, summed over all ranks; they were called with the whole one before.
    """

    def __init__(self, hook: Any, factors: GradientHooks) -> None:
        self._hook, self._factors = hook, factors

    @torch.no_grad()
    def __call__(self, parameter: Tensor) -> None:
        factor = self._factors.of_sum
        if not self._factors.is_on or hasattr(parameter, "device_mesh"):
            return
        if _is_one(factor) or parameter.grad is None:
            self._hook(parameter)
            return
        parameter.grad.mul_(factor)
        self._hook(parameter)
        if parameter.grad is not None:
            parameter.grad.div_(factor)
