"""Run a model without side effects on its state, the task's state and the random generators."""

from __future__ import annotations

import copy
import random
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from surefoot.components import checkpoint
from surefoot.components.checkpoint.random import cuda_states
from surefoot.core.errors import TaskError
from surefoot.core.units import name_some
from surefoot.runtime.attributes.rewritten import WeightSnapshot, find_rewritten
from surefoot.runtime.attributes.snapshot import AttributeSnapshot
from surefoot.runtime.attributes.values import small_attributes


@contextmanager
def preserve_state(
    model: nn.Module,
    state: Callable[[], Mapping[str, Any]] | None = None,
    *,
    evaluates: bool = True,
) -> Iterator[None]:
    """Disable gradients and set evaluation mode inside the context; restore all state at its end.

    With `evaluates` false, the modules keep their training or evaluation mode. The state comprises
    the modes, buffers and attributes of modules, the weights that a forward pass changes (see
    `find_rewritten`) or that an own `train()` or `eval()` of a module changes, the entries of the
    task's `state()`, and the random generators. Raises TaskError if `state()` holds an object that
    cannot be restored in place.
    """
    modes = [(module, module.training) for module in model.modules()]
    registered = [(module, dict(module._buffers)) for module in model.modules()]
    buffers = [
        (name, buffer, buffer.detach().clone())
        for _, held_there in registered
        for name, buffer in held_there.items()
        if buffer is not None
    ]
    attributes = AttributeSnapshot(model)
    cpu_state, python_state = torch.get_rng_state(), random.getstate()
    numpy_state = np.random.get_state()  # noqa: NPY002 - the user's stream
    on_devices = cuda_states()
    held = [
        (name, value, _copy_of(name, value))
        for name, value in (state() if state is not None else {}).items()
    ]
    written = WeightSnapshot(list(find_rewritten(model).values()))
    switch = ModeSwitch(model)
    if evaluates:
        switch.enter_evaluation()
    try:
        with torch.no_grad():
            yield
    finally:
        if evaluates:
            switch.leave_evaluation()
        for module, mode in modes:
            module.training = mode
        with torch.no_grad():
            for name, buffer, kept in buffers:
                checkpoint.fill(name, buffer, kept)
            for module, held_there in registered:
                # a module may have replaced a buffer, or None, by a different tensor
                module._buffers.clear()
                module._buffers.update(held_there)
        written.put_back()
        attributes.put_back()
        for name, value, before in held:
            restore_entry(name, value, before)
        torch.set_rng_state(cpu_state)
        random.setstate(python_state)
        np.random.set_state(numpy_state)  # noqa: NPY002
        for index, cuda_state in enumerate(on_devices):
            torch.cuda.set_rng_state(cuda_state, index)


@contextmanager
def preserve_attributes(task: object) -> Iterator[None]:
    """Restore the small attributes of a task, such as counters, at the end of the context."""
    held = small_attributes(task)
    snapshot = AttributeSnapshot(nn.Module(), [(task, name) for name in held])
    try:
        yield
    finally:
        for name in small_attributes(task).keys() - held.keys():
            del vars(task)[name]
        snapshot.put_back()


class ModeSwitch:
    """Change of a model to evaluation mode and back by its own `eval()` and `train()`.

    A module may have its own `train()` or `eval()`: a LoRA layer adds its product to a frozen
    weight for evaluation, and subtracts it for training. The subtraction is exact only up to
    rounding, so the parameters of such modules are restored from copies.
    """

    def __init__(self, model: nn.Module) -> None:
        self._model, self._was_training = model, model.training
        own = [module for module in model.modules() if _has_own_modes(module)]
        self._registered = {
            inner: dict(inner._parameters) for module in own for inner in module.modules()
        }
        # of parameters that changed: parameter, memory, values, and whether it is trained
        self._changed: list[tuple[nn.Parameter, Tensor, Tensor, bool]] = []

    def enter_evaluation(self) -> None:
        """Call `eval()` of the model."""
        self._record_changes(self._model.eval)

    @torch.no_grad()
    def leave_evaluation(self) -> None:
        """Call `train()` of the model, with its old mode, and restore its parameters."""
        if self._registered:
            self._record_changes(partial(self._model.train, self._was_training))
        for module, held in self._registered.items():
            module._parameters.clear()
            module._parameters.update(held)
        # those that `eval()` changed come last
        for parameter, memory, kept, is_trained in reversed(self._changed):
            if _is_dense(parameter) and parameter.data_ptr() != memory.data_ptr():
                parameter.data = memory
            parameter.copy_(kept)
            parameter.requires_grad_(is_trained)

    def _record_changes(self, change_mode: Callable[[], Any]) -> None:
        parameters = {
            id(each): each
            for module in self._registered
            for each in module._parameters.values()
            if each is not None
        }
        before = [
            (each, each.data, each.detach().clone(), each.requires_grad)
            for each in parameters.values()
        ]
        change_mode()
        self._changed += [
            (each, memory, kept, is_trained)
            for each, memory, kept, is_trained in before
            if not _is_dense(each)
            or each.data_ptr() != memory.data_ptr()
            or each.requires_grad is not is_trained
            or not torch.equal(_bytes_of(each), _bytes_of(kept))
        ]


def _has_own_modes(module: nn.Module) -> bool:
    """Return whether a module has a `train()` or `eval()` other than that of `nn.Module`."""
    return any(
        getattr(getattr(module, name), "__func__", None) is not getattr(nn.Module, name)
        for name in ("train", "eval")
    )


def _is_dense(parameter: Tensor) -> bool:
    return type(parameter.data) is Tensor and parameter.layout is torch.strided


def _bytes_of(tensor: Tensor) -> Tensor:
    """Return the values as bytes, because -0 equals 0."""
    return tensor.detach().contiguous().reshape(-1).view(torch.uint8)


def set_modes(model: nn.Module) -> list[str]:
    """Set training mode by `model.train()`, as a loop does before its first step; return notes.

    A module may override `train()`, for example to keep its BatchNorm in evaluation mode. If
    `model()` returned the model in training mode, the submodules that it set to evaluation mode
    stay so. `from_pretrained` returns a model in evaluation mode.
    """
    held = {module for module in model.modules() if not module.training and model.training}
    notes = (
        []
        if model.training
        else ["model() returned the model in evaluation mode: it is trained in training mode"]
    )
    model.train()
    modes = {module: module.training and module not in held for module in model.modules()}
    for module in held:
        if _has_own_modes(module):
            module.eval()
    for module, mode in modes.items():
        module.training = mode
    names = {
        module: f"{name} ({type(module).__name__})" if name else type(module).__name__
        for name, module in model.named_modules()
        if not module.training
    }
    for origin, kept in (
        ("model()", [name for module, name in names.items() if module in held]),
        ("train()", [name for module, name in names.items() if module not in held]),
    ):
        if kept:
            notes.append(f"{name_some(kept, 3)} stay in evaluation mode, as set by {origin}")
    return notes


def read_streams() -> tuple[Any, ...]:
    """Return the states of the global generators (torch, NumPy, Python), for a comparison."""
    name, numbers, *place = np.random.get_state()  # noqa: NPY002 - the user's stream
    states = torch.get_rng_state(), *cuda_states()
    of_torch = [each.numpy().tobytes() for each in states]
    return of_torch, name, np.asarray(numbers).tobytes(), place, random.getstate()


def _copy_of(name: str, value: Any) -> Any:
    found = read_entry(name, value)
    return found.detach().clone() if isinstance(found, Tensor) else copy.deepcopy(found)


def read_entry(name: str, value: Any) -> Any:
    """Return the value that a checkpoint stores for an entry of the task's `state()`.

    Tensors and arrays are not copied. Raises TaskError for an entry that cannot be restored in
    place.
    """
    if isinstance(value, Tensor | np.ndarray):
        return checkpoint.as_plain(name, value)
    if checkpoint.is_generator(value):
        return checkpoint.generator_state(value)
    if checkpoint.has_state(value):
        return value.state_dict()
    raise TaskError(
        f"state() gives {name!r} as {checkpoint.name_kind(value)}, "
        "which cannot be restored in place",
        hint=(
            "give a tensor or array that is changed in place, a random generator of torch, NumPy "
            "or Python, or an object with state_dict and load_state_dict"
        ),
    )


@torch.no_grad()
def restore_entry(name: str, value: Any, saved: Any) -> None:
    """Restore an entry of the task's `state()` in place from the return value of `read_entry`."""
    if isinstance(value, Tensor):
        checkpoint.fill(name, value, saved)
    elif isinstance(value, np.ndarray):
        value[...] = saved
    elif checkpoint.is_generator(value):
        checkpoint.restore_generator(value, saved)
    else:
        value.load_state_dict(saved)
