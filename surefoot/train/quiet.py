"""Run a model without side effects on its state, the task's state and the random generators."""

from __future__ import annotations

import copy
import os
import random
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.optim import Optimizer
from torch.overrides import TorchFunctionMode

from surefoot.components import checkpoint
from surefoot.core.errors import TaskError
from surefoot.core.units import name_some
from surefoot.runtime.attributes.generators import cuda_states
from surefoot.runtime.attributes.rewritten import (
    HandleWatch,
    WeightSnapshot,
    WriteWatch,
    find_rewritten,
    watch_weights,
)
from surefoot.runtime.attributes.snapshot import AttributeSnapshot
from surefoot.runtime.attributes.values import (
    Aliases,
    named_attributes,
    sign,
    small_attributes,
)

if TYPE_CHECKING:
    from surefoot.train.assemble import Assembly

DROPOUTS = (
    F.dropout,
    F.dropout1d,
    F.dropout2d,
    F.dropout3d,
    F.alpha_dropout,
    F.feature_alpha_dropout,
    torch.dropout,
    torch.dropout_,
    torch.alpha_dropout,
    torch.feature_dropout,
)
PLACE_OF_DROPOUT = 4  # among the arguments of scaled_dot_product_attention
PLAIN = (bool, int, float, complex, str, bytes, tuple, type(None))
CONTAINERS = (list, dict, set, deque)
MAX_SIZE = 1 << 20  # elements of a tensor or container outside of the model that is copied


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
    """Restore the small attributes of a task, such as counters, and the working folder.

    They are restored at the end of the context.
    """
    held, folder = small_attributes(task), _working_folder()
    snapshot = AttributeSnapshot(nn.Module(), [(task, name) for name in held])
    try:
        yield
    finally:
        os.chdir(folder)
        for name in small_attributes(task).keys() - held.keys():
            del vars(task)[name]
        snapshot.put_back()


def _working_folder() -> str:
    try:
        return os.getcwd()
    except FileNotFoundError:  # it was deleted, and chdir to it by its path would fail
        return "."


class ModeSwitch:
    """Change of a model to evaluation mode and back by its own `eval()` and `train()`.

    A module may have its own `train()` or `eval()`: a LoRA layer adds its product to a frozen
    weight for evaluation, and subtracts it for training. The subtraction is exact only up to
    rounding, so the parameters that such methods write are restored from copies. A parameter that
    they leave as it is is not copied.
    """

    def __init__(self, model: nn.Module) -> None:
        self._model, self._was_training = model, model.training
        own = [module for module in model.modules() if _has_own_modes(module)]
        self._registered = {
            inner: dict(inner._parameters) for module in own for inner in module.modules()
        }
        held = {
            each: each.requires_grad
            for parameters in self._registered.values()
            for each in parameters.values()
            if each is not None
        }
        self._is_trained, self._watch = held, WriteWatch(held)

    def enter_evaluation(self) -> None:
        """Call `eval()` of the model."""
        with self._watch, HandleWatch():
            self._model.eval()

    def leave_evaluation(self) -> None:
        """Call `train()` of the model, with its old mode, and restore its parameters."""
        if not self._registered:
            return
        with self._watch, HandleWatch():
            self._model.train(self._was_training)
        for module, held in self._registered.items():
            module._parameters.clear()
            module._parameters.update(held)
        self._watch.put_back()
        for parameter, is_trained in self._is_trained.items():
            parameter.requires_grad_(is_trained)


def _has_own_modes(module: nn.Module) -> bool:
    """Return whether a module has a `train()` or `eval()` other than that of `nn.Module`."""
    return any(
        getattr(getattr(module, name), "__func__", None) is not getattr(nn.Module, name)
        for name in ("train", "eval")
    )


def depends_on_mode(model: nn.Module) -> bool:
    """Return whether a module of a model may compute something else in training mode.

    Modules of torch do if their code reads `self.training`; any other module may, and a hook too.
    """
    kinds = {type(each) for each in model.modules()}
    return any(map(_may_read_mode, kinds)) or any(map(_has_hooks, model.modules()))


def _may_read_mode(kind: type[Any]) -> bool:
    return not kind.__module__.startswith("torch.nn.") or any(
        "training" in getattr(getattr(each, "__code__", None), "co_names", ())
        for owner in kind.__mro__
        if owner not in nn.Module.__mro__
        for each in vars(owner).values()
    )


def _has_hooks(module: nn.Module) -> bool:
    return bool(module._forward_hooks or module._forward_pre_hooks)


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


NONE = Aliases({}, {}, {})


class CarriedState:
    """Comparison of buffers, module attributes and the task's `state()` between evaluated batches.

    A change that only the first of several batches makes does not count, because a model may build
    a table on first use.
    """

    def __init__(self, model: nn.Module, state: Callable[[], Mapping[str, Any]] | None) -> None:
        self._model, self._state = model, state
        self._num_batches, self._before = 0, self._sign()
        self._after_first: dict[str, Any] = {}

    def after_batch(self) -> None:
        """Count a batch; after the first one, read the state."""
        self._num_batches += 1
        if self._num_batches == 2:
            self._before = self._after_first
        if self._num_batches == 1:
            self._after_first = self._sign()

    def has_changed(self) -> bool:
        """Return whether state has changed since the first batch, or in the only batch."""
        return bool(self.find_changed())

    def find_changed(self) -> list[str]:
        """Return the names of state changed since the first batch, or in the only batch."""
        now, before = self._sign(), self._before
        return [name for name in {**before, **now} if now.get(name) != before.get(name)]

    def _sign(self) -> dict[str, Any]:
        state = {} if self._state is None else self._state()
        aliases = Aliases.of(self._model, state)
        found = {
            f"attributes/{name}": sign(value, aliases)
            for name, value in named_attributes(self._model).items()
        }
        found |= {
            f"buffers/{name}": sign(value, NONE) for name, value in self._model.named_buffers()
        }
        return found | {
            f"state/{name}": sign(read_entry(name, value), NONE) for name, value in state.items()
        }


# ---- passes in training mode before the run


def can_try(assembly: Assembly) -> bool:
    """Return whether a trial in training mode can be undone: no forward pass may step an optimizer.

    The model and the task are searched for optimizers in attributes.
    """
    spaces = [vars(module) for module in assembly.model.modules()]
    spaces.append(getattr(assembly.task.task, "__dict__", {}))
    return not any(isinstance(value, Optimizer) for space in spaces for value in space.values())


@contextmanager
def trial_in_training_mode(assembly: Assembly) -> Iterator[None]:
    """Set the modes of training inside the context, and restore all state at its end.

    Dropout is off, and BatchNorm is in evaluation mode: both are known to depend on the batch. The
    attributes of the task and the variables of its file are restored too, as far as they are
    numbers, text, containers, tensors, random generators or modules.
    """
    model, task = assembly.model, assembly.task.task
    with ExitStack() as opened:
        values = _Values([getattr(task, "__dict__", {}), _variables_of(task)], model)
        opened.callback(values.put_back)
        for module in values.modules:
            opened.enter_context(watch_weights(module))
            opened.enter_context(preserve_state(module, evaluates=False))
        opened.enter_context(preserve_state(model, assembly.task.state, evaluates=False))
        for module in model.modules():
            if hasattr(module, "running_mean"):  # a BatchNorm of torch, of ranks, or of the user
                module.training = False
            if isinstance(module, nn.RNNBase):
                module.dropout = 0.0
        opened.enter_context(_WithoutDropout())
        yield


def _variables_of(task: Any) -> dict[str, Any]:
    """Return the variables of the file that defines the forward pass; none of those of surefoot."""
    forward = getattr(type(task), "forward", None)
    found: dict[str, Any] = getattr(forward, "__globals__", {})
    return {} if str(found.get("__name__")).startswith("surefoot.") else found


class _Values:
    """Values of attributes and variables outside of the model, from which they are restored."""

    def __init__(self, spaces: Sequence[dict[str, Any]], model: nn.Module) -> None:
        known = {id(each) for each in model.modules()}
        self.modules: list[nn.Module] = []
        self._plain: list[tuple[dict[str, Any], str, Any]] = []
        self._restore: list[Callable[[], Any]] = []
        for space in spaces:
            for name, value in list(space.items()):
                if name.startswith("__"):
                    continue
                if isinstance(value, nn.Module):
                    if id(value) not in known:
                        self.modules.append(value)
                elif isinstance(value, (*PLAIN, *CONTAINERS, Tensor)):
                    self._plain.append((space, name, value))
                self._copy(value)

    def _copy(self, value: Any) -> None:
        if isinstance(value, Tensor):
            if value.numel() <= MAX_SIZE and value.is_leaf:
                kept = value.detach().clone()
                self._restore.append(lambda: value.detach().copy_(kept))
        elif type(value) in CONTAINERS and len(value) <= MAX_SIZE:
            held = copy.copy(value)
            self._restore.append(lambda: _fill(value, held))
        elif checkpoint.is_generator(value):
            state = checkpoint.generator_state(value)
            self._restore.append(lambda: checkpoint.restore_generator(value, state))

    def put_back(self) -> None:
        for space, name, value in self._plain:
            if space.get(name) is not value:
                space[name] = value
        for restore in self._restore:
            restore()


def _fill(value: Any, held: Any) -> None:
    """Give a container the entries of `held`, if it has others."""
    if isinstance(value, dict):
        is_same = list(map(id, value.values())) == list(map(id, held.values()))
    else:
        is_same = list(map(id, value)) == list(map(id, held))
    if not is_same:
        value.clear()
        (value.update if isinstance(value, dict | set) else value.extend)(held)


class _WithoutDropout(TorchFunctionMode):
    """Forward passes whose dropout returns its input, in modules and in functions."""

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        given = dict(kwargs or {})
        if func in DROPOUTS:
            return args[0] if args else given["input"]
        if func is F.scaled_dot_product_attention:
            if len(args) > PLACE_OF_DROPOUT:
                args = (*args[:PLACE_OF_DROPOUT], 0.0, *args[PLACE_OF_DROPOUT + 1 :])
            else:
                given["dropout_p"] = 0.0
        if func is F.multi_head_attention_forward:
            given["training"] = False
        return func(*args, **given)
