"""Checkpoints for a user-defined training loop: `save` named objects, `load` them back in place.

restored = checkpoint.load(folder, {"model": model, "optimizer": optimizer})
first = restored.step if restored else 0
...
checkpoint.save(folder, step, {"model": model, "optimizer": optimizer, "best": 0.97})

The function `load` is in the module `restore`.
"""

from __future__ import annotations

import contextlib
import json
import operator
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from torch import Tensor, nn
from torch.optim import Optimizer

from surefoot.components.checkpoint.load import MODEL, PART, identity
from surefoot.components.checkpoint.modules import (
    check_shaped,
    describe_layouts,
    find_layouts,
    module_state,
    reshard,
    to_local_shards,
    with_local_rows,
)
from surefoot.components.checkpoint.save import Content, Stamp, clear_drafts, commit
from surefoot.components.checkpoint.tensor_files import DTYPES, check_storable
from surefoot.components.checkpoint.tree import split
from surefoot.contract.manifest import NAME, Manifest
from surefoot.contract.state import master_of, part_of
from surefoot.core.errors import TaskError
from surefoot.runtime.attributes.generators import generator_state, is_generator, random_states

NO_STAMP = Stamp()
RESERVED = ("state", "manifest", "optimizer-state")
OF_A_RANK = re.compile(r"rank-[0-9]{5}")
STATE = "state.safetensors"
NO_ATTRIBUTES: Mapping[str, Mapping[str, Any]] = {}


def save(
    folder: str | Path,
    step: int,
    state: Mapping[str, Any],
    stamp: Stamp = NO_STAMP,
    attributes: Mapping[str, Mapping[str, Any]] = NO_ATTRIBUTES,
) -> Manifest:
    """Save `state`, and the global random states, as the checkpoint of a step in `folder`.

    The function returns when the checkpoint is on disk. It replaces an earlier checkpoint of the
    same step. Only one process may save into a folder at a time, because a save deletes the
    incomplete checkpoints that it finds there.

    Args:
        folder: The folder of the checkpoints.
        step: Number of the step.
        state: Objects by name: modules, objects with a state_dict, random generators of torch,
            NumPy and Python, tensors, arrays and numbers. The module named "model" is written to
            model.safetensors, which other programs can read.
        stamp: Facts of the run for the manifest, such as the score.
        attributes: Plain attributes of modules, by the name of the module, as `encode_storable`
            returns them; by default, none are saved.

    Returns:
        The manifest of the checkpoint.

    Raises:
        TaskError: For a value that a checkpoint cannot store.
        NumbersError: For a trained parameter that is not finite.
        StorageError: If a file cannot be written; earlier checkpoints stay unchanged.
    """
    content, _ = content_of(step, state, attributes)
    with contextlib.suppress(OSError):  # `commit` reports what the disk refuses
        clear_drafts(Path(folder))
    return commit(Path(folder), content, stamp)


def content_of(
    step: int, state: Mapping[str, Any], attributes: Mapping[str, Mapping[str, Any]] = NO_ATTRIBUTES
) -> tuple[Content, dict[str, Tensor]]:
    """Return the content of a checkpoint of `state`, and the tensors that only this rank saves.

    The tensors that only this rank saves have names of the form `FILE/TENSOR`. They are shards
    along other dimensions than 0, shards of modules other than "model", and shards whose tensor
    name occurs in two files. All other shards are in the content; its `parts` records their rows.
    Raises TaskError for a step that is not an integer, or a value that a checkpoint cannot store.
    """
    try:
        number = operator.index(step)
    except TypeError:
        raise TaskError(
            f"the step is {step!r}, which is not a whole number", hint="count steps from 0"
        ) from None
    live, skeleton = _gather(state, attributes)
    names = [name for held in live.values() for name in held]
    files: dict[str, dict[str, Tensor]] = {file: {} for file in live}
    own, parts = dict[str, Tensor](), dict[str, tuple[int, tuple[int, ...]]]()
    for file, held in live.items():
        for name, tensor in held.items():
            part, kept = part_of(tensor), tensor.detach().cpu().contiguous()
            if getattr(tensor, "is_own", False) or (
                part is not None and (file != MODEL or names.count(name) > 1)
            ):
                own[f"{file}/{name}"] = kept
            elif part is None:
                files[file][name] = kept
            elif kept.numel() and not getattr(tensor, "is_copy", False):
                files[file][name], parts[name] = kept, (part.start, part.whole)
    trained = [
        name
        for module in modules_of(state).values()
        for name, each in module.named_parameters()
        if each.requires_grad
    ]
    texts = {"state.json": json.dumps(skeleton).encode()}
    return Content(
        step=number, tensors=files, texts=texts, finite=frozenset(trained), parts=parts
    ), own


def check_state(state: Mapping[str, Any]) -> None:
    """Raise TaskError if `state` contains a value that `save` cannot store.

    Nothing is copied or written.
    """
    _gather(state)


def _gather(
    state: Mapping[str, Any], attributes: Mapping[str, Mapping[str, Any]] = NO_ATTRIBUTES
) -> tuple[dict[str, dict[str, Tensor]], Any]:
    """Return the tensors of `state` by file, not copied, and the other values as a JSON tree.

    Raises TaskError for a value that a checkpoint cannot store.
    """
    modules = modules_of(state)
    reshard(modules.values())
    bad = [name for name in modules if not _is_plain(name)]
    if bad:
        raise TaskError(
            f"the name of a module is {bad[0]!r}", hint='use a plain name, such as "model"'
        )
    objects = {name: value for name, value in state.items() if name not in modules}
    kinds = {
        name: type(value).__name__
        for name, value in objects.items()
        if has_state(value) or is_generator(value)
    }
    values = {
        name: _read_object(value) if name in kinds else as_plain(name, value)
        for name, value in objects.items()
    }
    layouts = find_layouts(modules.values())
    values = to_local_shards(values, layouts)
    held = {name: module_state(module) for name, module in modules.items()}
    skeleton, tensors = split(
        {
            "values": values,
            "random": random_states(),
            "kinds": kinds,
            "moved": optimized_parameters(state),
            **({"layouts": describe_layouts(layouts)} if layouts else {}),
            "modules": {
                name: {"extra": each.extra, "buffers": each.buffers}
                | ({"attributes": attributes[name]} if attributes.get(name) else {})
                for name, each in held.items()
                if each.extra or each.buffers or attributes.get(name)
            },
        }
    )
    for name, tensor in tensors.items():
        check_storable(name, tensor)
    return {
        **{f"{name}.safetensors": _unique_tensors(each.tensors) for name, each in held.items()},
        STATE: tensors,
    }, skeleton


def optimized_parameters(state: Mapping[str, Any]) -> dict[str, list[dict[str, Any]]]:
    """Return the name, shape and dtype of each optimizer's parameters, in its own order.

    The state dict of an optimizer identifies the parameters only by their indices. Raises TaskError
    for a parameter without a shape.
    """
    for name, optimizer in state.items():
        for each in parameters_of(optimizer) if isinstance(optimizer, Optimizer) else ():
            check_shaped(f"a parameter of {name!r}", each)
    names = {
        id(each): f"{of}.{name}"
        for of, module in modules_of(state).items()
        for name, each in module.named_parameters()
    }
    return {
        name: [
            {
                "name": names.get(id(each)),
                "shape": list(each.shape),
                "dtype": DTYPES.get(each.dtype),
            }
            for each in parameters_of(optimizer)
        ]
        for name, optimizer in state.items()
        if isinstance(optimizer, Optimizer)
    }


def parameters_of(optimizer: Optimizer) -> list[Tensor]:
    """Return the parameters of an optimizer, in the order of its parameter groups."""
    return [parameter for group in optimizer.param_groups for parameter in group["params"]]


def modules_of(state: Mapping[str, Any]) -> dict[str, nn.Module]:
    """Return the modules among the objects of `state`."""
    return {name: value for name, value in state.items() if isinstance(value, nn.Module)}


def _is_plain(name: str) -> bool:
    """Return whether a module called `name` can be saved in the file `name.safetensors`.

    Names that surefoot itself uses are not allowed, nor are names like those of a part of a split
    file.
    """
    file = f"{name}.safetensors"
    return (
        name not in RESERVED
        and OF_A_RANK.fullmatch(name) is None
        and NAME.fullmatch(file) is not None
        and PART.fullmatch(file) is None
    )


def has_state(value: Any) -> bool:
    """Return whether `value` is an object, not a class, with `state_dict` and `load_state_dict`."""
    return not isinstance(value, type) and all(
        callable(getattr(value, part, None)) for part in ("state_dict", "load_state_dict")
    )


def is_restorable(value: Any) -> bool:
    """Return whether `load` restores `value` in place.

    If so, every reference to the object sees the restored state.
    """
    return has_state(value) or is_generator(value) or isinstance(value, Tensor | np.ndarray)


def as_plain(name: str, value: Any) -> Any:
    """Return a tensor or array that is restored in place as a plain one; any other value unchanged.

    Raises TaskError for an array with a mask, which would not be restored.
    """
    if isinstance(value, np.ma.MaskedArray):
        raise TaskError(
            f"{name} is a MaskedArray, whose mask is not restored in place",
            hint="give its data and its mask as arrays of their own",
        )
    if isinstance(value, np.ndarray):
        return np.asarray(value)
    return value.detach() if isinstance(value, Tensor) else value


def _read_object(value: Any) -> Any:
    return generator_state(value) if is_generator(value) else read_state_dict(value)


def read_state_dict(value: Any) -> Any:
    """Return `value.state_dict()`, even if an optimizer has state of a parameter in no group.

    Such state remains when a group gets different parameters, and `Optimizer.state_dict` raises
    KeyError for it. It is left out.
    """
    state, left = getattr(value, "state", {}), []
    if isinstance(value, Optimizer):
        held = {id(each) for each in parameters_of(value)}
        left = [each for each in state if isinstance(each, Tensor) and id(each) not in held]
    if not left:
        return value.state_dict()
    before = dict(state)
    try:
        for each in left:
            del state[each]
        return value.state_dict()
    finally:
        state.clear()
        state.update(before)


def _unique_tensors(held: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return the tensors of a module that a checkpoint stores; a tied tensor occurs once.

    Raises TaskError for a tensor that a checkpoint cannot store.
    """
    seen: set[tuple[int, tuple[int, ...], tuple[int, ...]]] = set()
    found = {}
    for name, tensor in with_masters(held).items():
        check_storable(name, tensor)
        key = identity(tensor)
        if key in seen and (tensor.numel() or part_of(tensor)):
            continue
        seen.add(key)
        found[name] = tensor
    return found


def with_masters(held: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return the tensors that a checkpoint stores in place of those in `held`, by the same names.

    These are the fp32 master of a weight that is kept in lower precision, and the shard of this
    rank of a DTensor. All other tensors are returned unchanged.
    """
    return with_local_rows({name: master_of(tensor) for name, tensor in held.items()})
