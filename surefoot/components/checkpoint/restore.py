"""Restoration of a checkpoint into the objects of a training loop, or of weights into a model.

The contents of the checkpoint are compared with all objects first. If one object does not fit, none
is changed.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from surefoot.components.checkpoint.load import (
    MODEL,
    Commit,
    check_fit,
    newest_loadable,
    read_weights,
)
from surefoot.components.checkpoint.modules import (
    check_buffers,
    describe_layouts,
    find_layouts,
    match_buffers,
    module_state,
    put_back_buffers,
    put_back_extra,
    reshard,
    to_dtensors,
)
from surefoot.components.checkpoint.own import (
    STATE,
    has_state,
    modules_of,
    optimized_parameters,
    parameters_of,
    with_masters,
)
from surefoot.components.checkpoint.tensor_files import DTYPES, create, fill
from surefoot.components.checkpoint.tree import as_run_folder_errors, join
from surefoot.contract import commits
from surefoot.contract.manifest import Manifest, Piece
from surefoot.contract.state import master_of, part_of, with_strides_of
from surefoot.core.errors import RunFolderError
from surefoot.runtime.attributes.generators import is_generator, restore_generator, restore_random
from surefoot.runtime.attributes.stored import check_attributes, put_back_attributes
from surefoot.runtime.nested_tensors import map_tensors

NOTHING: Mapping[str, Mapping[str, Any]] = {"extra": {}, "buffers": {}}


@dataclass(frozen=True)
class RestoreResult:
    """Result of `load`.

    `step` is the step of the checkpoint. `values` are the saved values without a state_dict, such
    as numbers, by name. `troubles` has a message about each damaged checkpoint that was skipped.
    """

    step: int
    values: Mapping[str, Any]
    troubles: tuple[str, ...] = ()


def load(
    folder: str | Path, state: Mapping[str, Any], step: int | None = None
) -> RestoreResult | None:
    """Read the newest undamaged checkpoint, or that of `step`, into the objects of `state`.

    Every byte is verified against its digest. If no `step` is given, a damaged checkpoint is
    renamed, and the previous one is loaded.

    Args:
        folder: The folder that was passed to `save`.
        state: Objects by name, as passed to `save`. Modules, objects with a state_dict, random
            generators, tensors and arrays are restored in place.
        step: The step to load; None for the newest undamaged one.

    Returns:
        The step, the values without a state_dict, and a message about each damaged checkpoint; None
        if `folder` has no checkpoint.

    Raises:
        RunFolderError: If the checkpoint does not fit the objects or their shapes and dtypes, or if
            the checkpoint of `step` is missing or damaged. No object has changed then.
    """
    found: list[Mapping[str, Any]] = []
    run = Path(folder)
    if step is not None:
        one = Commit(run, step)
        commits.check(one.folder)
        return RestoreResult(step, restore(one, state))
    at, troubles = newest_loadable(run, lambda one: found.append(restore(one, state)))
    return None if at is None else RestoreResult(at, found[-1], tuple(troubles))


def load_into(
    model: nn.Module, folder: str | Path, step: int | str, *, widen: bool = False
) -> Manifest:
    """Read the weights and buffers in model.safetensors of a checkpoint into `model`.

    The names and shapes must be equal.

    Args:
        model: The model, changed in place.
        folder: The folder of the checkpoints.
        step: The step of the checkpoint: a number, "last", or "best" by score.
        widen: Allow bf16 to be read into fp32; otherwise the dtypes must be equal too.

    Returns:
        The manifest of the checkpoint.

    Raises:
        RunFolderError: If the weights do not fit, or if a file is damaged. The model has not
            changed then.
    """
    number = step if isinstance(step, int) else commits.find_step(Path(folder), step)
    one = Commit(Path(folder), number)
    stored = one.pieces(MODEL)
    undo = match_buffers(model, stored, {})
    try:
        check_fit(one.folder, stored, _tensors(model, stored=stored), widen=widen)
        commits.check(one.folder)
    except BaseException:
        undo()
        raise
    _read_into(model, one, MODEL, widen=widen)
    return one.manifest


def _tensors(
    module: nn.Module, own: Collection[str] = (), stored: Collection[str] = ()
) -> dict[str, Tensor]:
    """Return the tensors of a module into which a checkpoint is read, by name.

    Args:
        module: The module.
        own: Names of the tensors that are read from the file of this rank. They are detached, so
            that they do not count as rows of a larger tensor.
        stored: Names of the tensors in the checkpoint.
    """
    live = with_masters(module_state(module, stored).tensors)
    return {name: tensor.detach() if name in own else tensor for name, tensor in live.items()}


@torch.no_grad()
def _read_into(
    module: nn.Module,
    one: Commit,
    file: str,
    own: Mapping[str, Tensor] = MappingProxyType({}),
    *,
    widen: bool = False,
) -> None:
    """Read the tensors of a module from `file` of a checkpoint, in place.

    Tensors whose names are in `own` are copied from there instead.
    """
    live = _tensors(module, own, {*one.pieces(file), *own})
    if not own:
        read_weights(one, live, file, widen=widen)
    elif one.names(file):
        into = {
            name: tensor if part_of(tensor) else tensor.detach() for name, tensor in live.items()
        }
        one.read(file, lambda name, piece: create(name, piece) if name in own else into[name])
    for name, held in own.items():
        fill(name, live[name], held)
    for parameter in module.parameters():
        if (master := master_of(parameter)) is not parameter:
            parameter.copy_(master)


def restore(one: Commit, state: Mapping[str, Any], rank: str = "") -> dict[str, Any]:
    """Restore the objects of `state` from a checkpoint, after a check that all of them fit.

    Args:
        one: The checkpoint.
        state: Objects by name, as passed to `save`.
        rank: Name of the files in the checkpoint that belong to this rank, such as "rank-00001";
            empty for a single process.

    Returns:
        The saved values without a state_dict, such as numbers, by name.

    Raises:
        RunFolderError: If the checkpoint does not fit the objects, or is damaged.
    """
    own, undoings = _RankState(one, rank), list[Callable[[], None]]()
    saved = one.json(own.text)
    with as_run_folder_errors(one.folder):
        of_modules = saved.get("modules", {})
        for name, module in modules_of(state).items():
            forms = of_modules.get(name, {}).get("attributes", {}).get("forms", {})
            undoings.append(match_buffers(module, own.over(f"{name}.safetensors"), forms))
    try:
        return _restore(one, state, own)
    except BaseException:
        for undo in undoings:
            undo()
        raise


def _restore(one: Commit, state: Mapping[str, Any], own: _RankState) -> dict[str, Any]:
    modules = modules_of(state)
    reshard(modules.values())
    absent = [
        name
        for name in modules
        if not (one.names(f"{name}.safetensors") or own.of(f"{name}.safetensors"))
    ]
    if absent:
        raise RunFolderError(
            f"{one.folder} contains no {absent[0]}.safetensors",
            hint="load the objects that were saved, under the same names",
        )
    for name, module in modules.items():
        stored = own.over(file := f"{name}.safetensors")
        check_fit(one.folder, stored, _tensors(module, own.of(file), stored))
    layouts = find_layouts(modules.values())
    with as_run_folder_errors(one.folder):
        tree = join(one.json(own.text), {**one.read(STATE), **own.of(STATE)}, one.folder)
        _check_layouts(one.folder, tree.get("layouts", []), describe_layouts(layouts))
        values, random, kinds = (
            dict(to_dtensors(tree["values"], layouts)),
            tree["random"],
            dict(tree.get("kinds", {})),
        )
        beside = {name: dict(tree.get("modules", {}).get(name, NOTHING)) for name in modules}
        for name, module in modules.items():
            check_buffers(module, beside[name]["buffers"])
            check_attributes(module, beside[name].get("attributes", {}))
        _check_moved(one.folder, tree.get("moved", {}), optimized_parameters(state))
    objects = {name: value for name, value in state.items() if name not in modules}
    for name, value in objects.items():
        if name not in values:
            raise RunFolderError(
                f"{one.folder} contains no state of {name!r}",
                hint=f"it contains {', '.join(values) or 'none'}",
            )
        with as_run_folder_errors(one.folder):
            _check_object(one.folder, name, value, values[name], kinds.get(name))
    for name, value in objects.items():  # first the objects, which may refuse their state
        if has_state(value) or is_generator(value):
            with as_run_folder_errors(f"{name!r} of {one.folder}"):
                _load_object(value, values.pop(name))
        elif isinstance(value, Tensor):
            fill(name, value, values[name])
        elif isinstance(value, np.ndarray):
            value[...] = values[name]
    for name, module in modules.items():
        _read_into(module, one, f"{name}.safetensors", own.of(f"{name}.safetensors"))
        with as_run_folder_errors(f"{name!r} of {one.folder}"):
            put_back_buffers(module, beside[name]["buffers"])
            put_back_attributes(module, beside[name].get("attributes", {}))
            put_back_extra(module, beside[name]["extra"])
    with as_run_folder_errors(one.folder):
        restore_random(random)
    return values


def _check_layouts(place: Path, saved: list[str], now: list[str]) -> None:
    """Raise RunFolderError if the weights are sharded in a different way than when they were saved.

    The saved optimizer state would not fit them.
    """
    if saved != now:
        then, found = ("; ".join(each) or "whole on every rank" for each in (saved, now))
        raise RunFolderError(
            f"{place} contains the state of weights that were {then}: they are now {found}",
            hint="wrap the model as it was wrapped when it was saved, with the same mesh",
        )


class _RankState:
    """State in a checkpoint that belongs to one rank: tensors by `FILE/NAME`, and a JSON file.

    A loop with a single process has no such tensors, and its JSON file (`text`) is state.json.
    """

    def __init__(self, one: Commit, rank: str) -> None:
        file, text = f"{rank}.safetensors", f"{rank}.json"
        self._one = one
        has_own = bool(rank and one.names(file))
        self._pieces = one.pieces(file) if has_own else {}
        self._tensors = one.read(file) if has_own else {}
        self.text = (
            text if any(entry.name == text for entry in one.manifest.files) else "state.json"
        )

    def of(self, file: str) -> dict[str, Tensor]:
        """Return the tensors of this rank that replace tensors of `file` or are added to it."""
        return {
            name.removeprefix(f"{file}/"): each
            for name, each in self._tensors.items()
            if name.startswith(f"{file}/")
        }

    def over(self, file: str) -> dict[str, Piece]:
        """Return the `Piece` (shape and dtype) of each tensor of `file`, as this rank reads it.

        The tensors that this rank has saved itself replace those of the same name.
        """
        own = {
            name.removeprefix(f"{file}/"): each
            for name, each in self._pieces.items()
            if name.startswith(f"{file}/")
        }
        return {**self._one.pieces(file), **own}


def _check_object(place: Path, name: str, value: Any, saved: Any, kind: str | None) -> None:
    """Raise RunFolderError if `saved` cannot be the state of the object `value`.

    The check compares the types, the shapes and dtypes of tensors, and the group sizes of
    optimizers. torch itself accepts some of these mismatches without an error.
    """
    hint = "pass an object of the type that was saved, or leave it out"
    given = type(value).__name__
    if kind is not None and kind != given:
        raise RunFolderError(
            f"{place} contains the state of {name!r}, which was {kind}: the loop passes {given}",
            hint=hint,
        )
    if isinstance(value, Tensor | np.ndarray):
        held = _describe(saved)
        if held != _describe(value):
            raise RunFolderError(
                f"{place} contains {name!r} as {held}, and the loop passes {_describe(value)}",
                hint=hint,
            )
    if isinstance(value, Optimizer):
        held_sizes, sizes = (
            [len(group["params"]) for group in groups]
            for groups in (saved["param_groups"], value.param_groups)
        )
        if held_sizes != sizes:
            if held_sizes[: len(sizes)] == sizes:
                hint = (
                    f"this checkpoint needs {len(held_sizes) - len(sizes)} more of the groups that "
                    "were added during training: add them first, in the same order, with "
                    f"{name}.add_param_group(...); in a new loop give the optimizer all "
                    "groups at once, also of layers that are frozen at first: it does not "
                    "update a parameter without a gradient"
                )
            raise RunFolderError(
                (
                    f"{place} contains the state of {name!r} for groups of {held_sizes} "
                    f"parameters, and this optimizer has {sizes}"
                ),
                hint=hint,
            )


def _check_moved(place: Path, saved: Mapping[str, Any], now: Mapping[str, Any]) -> None:
    """Raise RunFolderError if an optimizer's parameters, or their order, are not the saved ones.

    Old checkpoints do not record the parameters, and are not checked.
    """
    for name, mine in now.items():
        for number, (then, each) in enumerate(zip(saved.get(name, ()), mine, strict=False)):
            is_same_name = None in (then["name"], each["name"]) or then["name"] == each["name"]
            if not is_same_name or (then["shape"], then["dtype"]) != (each["shape"], each["dtype"]):
                was, is_now = (
                    f"{of['name'] or 'one'} of {of['dtype']} {of['shape']}" for of in (then, each)
                )
                raise RunFolderError(
                    (
                        f"{place} contains the state of {name!r}, whose parameter {number} was "
                        f"{was}: it is now {is_now}"
                    ),
                    hint="give the optimizer the parameters that it had, in the same order",
                )


def _load_object(value: Any, saved: Any) -> None:
    if is_generator(value):
        restore_generator(value, saved)
        return
    if not (
        isinstance(value, Optimizer) and type(value).load_state_dict is Optimizer.load_state_dict
    ):
        value.load_state_dict(saved)
        return
    tensors = {
        number: {key: each for key, each in held.items() if isinstance(each, Tensor)}
        if isinstance(number, int)
        else held
        for number, held in saved["state"].items()
    }
    value.load_state_dict({**saved, "state": tensors})
    params = parameters_of(value)
    for number, held in saved["state"].items():
        if isinstance(number, int):
            loaded, moved = value.state[params[number]], params[number]
            loaded.update(
                {
                    key: _move_without_cast(each, loaded.get(key, moved), moved)
                    for key, each in held.items()
                }
            )


def _move_without_cast(saved: Any, near: Tensor, moved: Tensor) -> Any:
    """Return saved optimizer state of the parameter `moved`, on the device of `near`, not cast.

    `Optimizer.load_state_dict` would cast each tensor to the dtype of the parameter, and would not
    preserve text and arrays.
    """
    return map_tensors(saved, lambda tensor: with_strides_of(tensor.to(near.device), moved))


def _describe(value: Any) -> str:
    if isinstance(value, np.ndarray):
        return f"an array of {value.dtype} {list(value.shape)}"
    if not isinstance(value, Tensor):
        return f"a {type(value).__name__}"
    return (
        f"a tensor of {DTYPES.get(value.dtype, value.dtype)} "
        f"{list(value.shape)}{' on the meta device' if value.is_meta else ''}"
    )
