"""Updates of Adam, AdamW and SGD with torch's fused kernels.

One kernel also divides the gradients by their count, clips them, and skips a non-finite update. The
functions `torch._fused_adam_`, `torch._fused_adamw_` and `torch._fused_sgd_` are private. If torch
lacks one, or does not support an option, `GuardedUpdate` calls `optimizer.step()` instead, with
identical results. A test compares both.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import chain, repeat
from operator import attrgetter, is_
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.optim import SGD, Adam, AdamW, Optimizer
from torch.optim.optimizer import _global_optimizer_post_hooks, _global_optimizer_pre_hooks

from surefoot.core.errors import TaskError

FUSED_DEVICES = ("cpu", "cuda")
_GRAD = attrgetter("grad")
HAVE_FUSED = ("Adam", "AdamW", "SGD", "Lars", "Lamb", "Adam8bit")


def step_hooks_of(optimizer: Optimizer) -> tuple[Mapping[int, Any], ...]:
    """Return the hooks that a `step()` of the optimizer calls, its own and those of all."""
    return (
        optimizer._optimizer_step_pre_hooks,
        optimizer._optimizer_step_post_hooks,
        _global_optimizer_pre_hooks,
        _global_optimizer_post_hooks,
    )


def has_step_hooks(optimizer: Optimizer) -> bool:
    """Return whether code of the user runs in each `step()` of an optimizer, so that it must run.

    This is a hook on the steps of the optimizer or of all optimizers, or a `step` that was replaced
    on the object. A wrapper of torch's learning rate schedulers, which only counts, is ignored.
    """
    hooks = chain.from_iterable(each.values() for each in step_hooks_of(optimizer))
    if not all(map(_is_of_surefoot, hooks)):
        return True
    step: Any = vars(optimizer).get("step")
    if step is None:
        return False
    counts = hasattr(step, "_wrapped_by_lr_sched")
    return not (counts and getattr(step, "__wrapped__", None) is type(optimizer).step)


def _is_of_surefoot(hook: Any) -> bool:
    module = getattr(hook, "__module__", None) or ""
    return module.startswith("surefoot.") and not module.startswith("surefoot.tasks.")


def reason_not_fused(optimizer: Optimizer) -> str:
    """Return why an optimizer does not use the fused update of its type, as a message suffix.

    It is empty for an optimizer whose type has no fused update.
    """
    if type(optimizer).__name__ not in HAVE_FUSED:
        return ""
    if has_step_hooks(optimizer):
        return " with hooks on its steps, which are called in step()"
    if not all(group.get("fused") for group in optimizer.param_groups):
        return " without fused"
    return " with an option that its fused update does not support"


def supports(optimizer: Optimizer) -> bool:
    """Return whether torch's private fused kernels can update the parameters of `optimizer`.

    The optimizer must be Adam, AdamW or SGD with fused=True, without amsgrad, maximize,
    differentiable, dampening and hooks on its steps, and torch must have the kernel.
    """
    if type(optimizer) not in (Adam, AdamW, SGD):
        return False
    name = (
        "_fused_sgd_"
        if isinstance(optimizer, SGD)
        else "_fused_adamw_"
        if isinstance(optimizer, AdamW)
        else "_fused_adam_"
    )
    plain = all(
        not group.get("amsgrad")
        and not group.get("maximize")
        and not group.get("differentiable")
        and not group.get("dampening")
        for group in optimizer.param_groups
    )
    return (
        plain
        and hasattr(torch, name)
        and all(group.get("fused") for group in optimizer.param_groups)
        and not has_step_hooks(optimizer)
    )


def create_state(optimizer: Optimizer) -> None:
    """Create the missing state of an Adam, AdamW or SGD optimizer before its first step.

    The state is the one that the first `step()` creates. Without this, a fused SGD whose first step
    is skipped would keep an uninitialized momentum buffer. A buffer of zeros gives the same first
    update.
    """
    for group in optimizer.param_groups:
        if not group["params"]:
            continue
        # all parameters share one counter while they step together
        shared = torch.zeros((), dtype=torch.float32, device=group["params"][0].device)
        for parameter in group["params"]:
            state = optimizer.state[parameter]
            if isinstance(optimizer, SGD) and not group["momentum"]:
                state.pop("momentum_buffer", None)  # without momentum the kernel accepts no buffer
            elif isinstance(optimizer, SGD) and "momentum_buffer" not in state:
                state["momentum_buffer"] = torch.zeros_like(
                    parameter, memory_format=torch.preserve_format
                )
            if state or isinstance(optimizer, SGD):
                continue
            state["step"] = shared
            for name in ("exp_avg", "exp_avg_sq"):
                state[name] = torch.zeros_like(parameter, memory_format=torch.preserve_format)


def is_dense(tensor: Tensor) -> bool:
    """Return whether the elements of a tensor fill its memory without gaps and without overlap.

    A slice with gaps is not dense, nor is an expanded tensor.
    """
    return tensor.is_contiguous() or bool(
        torch.ops.aten.is_non_overlapping_and_dense.default(tensor)
    )


@contextmanager
def in_one_layout(rows: Sequence[Sequence[Tensor]]) -> Iterator[list[list[Tensor]]]:
    """Yield `rows` with the same memory layout for a parameter, its gradient and its state.

    Each row is a list with one tensor for each parameter. Tensors of a parameter that differ in
    layout are replaced by contiguous copies, which are written back at the end. The fused kernels
    need this, because they process the memory of these tensors in order and ignore the strides
    (pytorch#106951).
    """
    made, copies = [list(row) for row in rows], []
    for number, parameter in enumerate(rows[0]):
        mine = [row[number] for row in made if row]
        if is_dense(parameter) and all(each.stride() == parameter.stride() for each in mine):
            continue
        for row in (each for each in made if each):
            own = row[number].detach()
            row[number] = own.contiguous()
            copies += [(own, row[number])] if row[number] is not own else []
    yield made
    for own, copy in copies:
        own.copy_(copy)


class FusedParamGroup(Protocol):
    """Parameter group whose update can unscale the gradients and skip itself.

    The update divides the gradients by `grad_scale`, and changes nothing if `found_inf` is 1.
    """

    @property
    def group(self) -> dict[str, Any]: ...

    @property
    def tensors(self) -> tuple[list[Tensor], ...] | None: ...

    def step(
        self, lr: float | Tensor, grad_scale: Tensor | None, found_inf: Tensor | None
    ) -> None: ...

    def count_traced(self, applied: Tensor) -> None: ...

    def is_current(self) -> bool: ...


class FusedGroup:
    """Parameter group of a torch optimizer, with its state in lists for the fused kernel."""

    def __init__(self, optimizer: Optimizer, group: dict[str, Any]) -> None:
        self.group = group
        self._params: list[Tensor] = list(group["params"])
        states = [optimizer.state[parameter] for parameter in self._params]
        self._is_sgd = isinstance(optimizer, SGD)
        self._states = states
        self._steps: list[Tensor] = [] if self._is_sgd else [state["step"] for state in states]
        self._is_shared = bool(self._steps) and all(step is self._steps[0] for step in self._steps)
        self._first = [] if self._is_sgd else [state["exp_avg"] for state in states]
        self._second = [] if self._is_sgd else [state["exp_avg_sq"] for state in states]
        self._buffers = [state["momentum_buffer"] for state in states if "momentum_buffer" in state]
        self._kernel: Callable[..., None] = (
            torch._fused_adamw_ if isinstance(optimizer, AdamW) else torch._fused_adam_
        )
        rows = zip(
            self._params,
            *(row for row in (self._first, self._second, self._buffers) if row),
            strict=True,
        )
        self._strides = [parameter.stride() for parameter in self._params]
        self._lie_alike = all(
            is_dense(row[0]) and all(each.stride() == row[0].stride() for each in row)
            for row in rows
        )

    def is_current(self) -> bool:
        """Return whether the lists of this group hold the tensors of the optimizer state.

        False means that other code has replaced a tensor in the optimizer state.
        """
        rows = (
            ("step", self._steps),
            ("exp_avg", self._first),
            ("exp_avg_sq", self._second),
            ("momentum_buffer", self._buffers),
        )
        return all(
            all(map(is_, map(dict.get, self._states, repeat(name)), row))
            for name, row in rows
            if row
        )

    @property
    def _momentum(self) -> list[Tensor]:
        """Momentum buffers for the SGD kernel; empty if the momentum is 0.

        Missing buffers are created with zeros.
        """
        if not self._is_sgd or not self.group["momentum"]:
            return []
        if not self._buffers:
            self._buffers = [
                torch.zeros_like(each, memory_format=torch.preserve_format) for each in self._params
            ]
            for state, buffer in zip(self._states, self._buffers, strict=True):
                state["momentum_buffer"] = buffer
        return self._buffers

    @property
    def tensors(self) -> tuple[list[Tensor], ...]:
        """Tensors that an update of the group changes, in five lists.

        These are the parameters, step counters, first moments, second moments and momentum buffers.
        """
        return (
            self._params,
            self._steps[:1] if self._is_shared else self._steps,
            self._first,
            self._second,
            self._momentum,
        )

    def step(self, lr: float | Tensor, grad_scale: Tensor | None, found_inf: Tensor | None) -> None:
        """Divide the gradients by `grad_scale`, and update the parameters that have a gradient.

        Nothing changes if `found_inf` is 1.
        """
        grads = [grad for grad in map(_GRAD, self._params) if grad is not None]
        if len(grads) < len(self._params):
            kept = [n for n, parameter in enumerate(self._params) if parameter.grad is not None]
            self._step_some(kept, lr, grad_scale, found_inf)
            return
        if not grads:
            return
        self._call(
            self._params,
            grads,
            (self._steps, self._first, self._second, self._momentum),
            lr,
            grad_scale,
            found_inf,
        )

    def step_one(self, number: int, lr: float | Tensor, found_inf: Tensor | None) -> None:
        """Update only the parameter at index `number` of the group, unless `found_inf` is 1."""
        self._step_some([number], lr, None, found_inf)

    def _step_some(
        self,
        kept: Sequence[int],
        lr: float | Tensor,
        grad_scale: Tensor | None,
        found_inf: Tensor | None,
    ) -> None:
        if not kept:
            return
        self._part()
        states = tuple(
            [row[number] for number in kept] if row else []
            for row in (self._steps, self._first, self._second, self._momentum)
        )
        params = [self._params[number] for number in kept]
        grads: Any = [p.grad for p in params]
        self._call(params, grads, states, lr, grad_scale, found_inf)

    def _part(self) -> None:
        """Replace the step counter that all parameters share by a separate counter for each."""
        if self._is_shared:
            self._is_shared = False
            self._steps = [step.clone() for step in self._steps]
            for state, step in zip(self._states, self._steps, strict=True):
                state["step"] = step

    def count_traced(self, applied: Tensor) -> None:
        """Count an applied update of a compiled step, if the graph itself cannot count it.

        The graph cannot count if all parameters share one step counter but only some have a
        gradient. The parameters then get separate counters, and `applied` is added to those of
        parameters with a gradient.
        """
        if not self._is_shared:
            return
        kept = [
            number for number, parameter in enumerate(self._params) if parameter.grad is not None
        ]
        if 0 < len(kept) < len(self._params):
            self._part()
            for number in kept:
                self._steps[number].add_(applied)

    def _call(
        self,
        params: list[Tensor],
        grads: list[Tensor],
        states: tuple[list[Tensor], ...],
        lr: float | Tensor,
        grad_scale: Tensor | None,
        found_inf: Tensor | None,
    ) -> None:
        steps, first, second, momentum = states
        strides = self._strides if params is self._params else [*map(Tensor.stride, params)]
        if not self._lie_alike or [*map(Tensor.stride, grads)] != strides:
            with in_one_layout([params, grads, first, second, momentum]) as (
                params,
                grads,
                first,
                second,
                momentum,
            ):
                self._call_kernel(
                    params, grads, (steps, first, second, momentum), lr, grad_scale, found_inf
                )
            return
        self._call_kernel(params, grads, states, lr, grad_scale, found_inf)

    def _call_kernel(
        self,
        params: list[Tensor],
        grads: list[Tensor],
        states: tuple[list[Tensor], ...],
        lr: float | Tensor,
        grad_scale: Tensor | None,
        found_inf: Tensor | None,
    ) -> None:
        group, (steps, first, second, momentum) = self.group, states
        # the kernels accept grad_scale in fp32 only
        if grad_scale is not None and grad_scale.dtype == torch.float64:
            scale_gradients(grads, 1.0 / grad_scale)
            grad_scale = None
        if self._is_sgd:
            torch._fused_sgd_(
                params,
                grads,
                momentum,
                weight_decay=group["weight_decay"],
                momentum=group["momentum"],
                lr=lr,
                dampening=0.0,
                nesterov=group["nesterov"],
                maximize=False,
                is_first_step=False,
                grad_scale=grad_scale,
                found_inf=found_inf,
            )
            return
        if self._is_shared:
            steps[0].add_(1)
        else:
            torch._foreach_add_(steps, 1)
        beta1, beta2 = group["betas"]
        self._kernel(
            params,
            grads,
            first,
            second,
            [],
            steps,
            lr=lr,
            beta1=beta1,
            beta2=beta2,
            weight_decay=group["weight_decay"],
            eps=group["eps"],
            amsgrad=False,
            maximize=False,
            grad_scale=grad_scale,
            found_inf=found_inf,
        )
        if found_inf is not None:
            counters = steps[:1] if self._is_shared else steps
            torch._foreach_sub_(counters, [found_inf] * len(counters))


def numbers_of(grad: Tensor) -> Tensor:
    """Return the values of a gradient as a dense tensor.

    For a coalesced sparse gradient, these are its stored values. A dense gradient is returned
    itself.
    """
    return grad if grad.layout is torch.strided else grad._values()


def norm_of(grads: Sequence[Tensor]) -> Tensor:
    """Return the global 2-norm of the gradients as a scalar tensor.

    Raises TaskError for a sparse gradient.
    """
    try:
        norms = torch._foreach_norm(list(grads))
    except NotImplementedError:
        if all(grad.layout == torch.strided for grad in grads):
            raise
        raise TaskError(
            "a gradient is sparse, but the fused update needs dense gradients",
            hint="build the embedding with sparse=False",
        ) from None
    return norms[0] if len(norms) == 1 else torch.linalg.vector_norm(torch.stack(norms))


def norms_of(tensors: Sequence[Tensor]) -> Tensor:
    """Return the 2-norms of the tensors, as one vector with an element for each tensor."""
    return torch.stack(torch._foreach_norm(list(tensors)))


def times(tensors: Sequence[Tensor], factors: float | Sequence[Tensor]) -> list[Tensor]:
    """Return each of `tensors` multiplied by its factor, as new tensors.

    `factors` is one number for all tensors, or a scalar tensor for each of them.
    """
    return list(
        torch._foreach_mul(list(tensors), factors if isinstance(factors, float) else list(factors))
    )


def add_products(
    tensors: Sequence[Tensor], others: Sequence[Tensor], factors: Sequence[Tensor], sign: int = 1
) -> None:
    """Add to each tensor the product `sign * other * factor`, in place.

    `others` and `factors` have one entry for each tensor; a factor is a scalar tensor.
    """
    torch._foreach_addcmul_(list(tensors), list(others), list(factors), value=sign)


def scale_gradients(grads: Sequence[Tensor], factor: float | Tensor) -> None:
    """Multiply every gradient by `factor`, in place."""
    torch._foreach_mul_(list(grads), factor)


def clamp_gradients(grads: Sequence[Tensor], limit: float) -> None:
    """Clamp every element of the gradients to [-limit, limit], in place."""
    torch._foreach_clamp_min_(list(grads), -limit)
    torch._foreach_clamp_max_(list(grads), limit)


def copy_tensors(into: Sequence[Tensor], tensors: Sequence[Tensor]) -> None:
    """Copy each of `tensors` into the tensor at the same index of `into`."""
    torch._foreach_copy_(list(into), list(tensors))


def move_towards(
    tensors: Sequence[Tensor], targets: Sequence[Tensor], share: float | Tensor
) -> None:
    """Move each tensor by `share` of the distance to its target, in place.

    If `share` is a tensor on the device, the host does not wait for it.
    """
    if isinstance(share, Tensor):
        ways = torch._foreach_sub(list(targets), list(tensors))
        torch._foreach_mul_(ways, share)
        torch._foreach_add_(list(tensors), ways)
        return
    torch._foreach_lerp_(list(tensors), list(targets), share)
