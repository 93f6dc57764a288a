"""Checkpoints for a user-defined training loop: `save` named objects, `load` them back in place.

restored = checkpoint.load(folder, {"model": model, "optimizer": optimizer})
first = restored.step if restored else 0
...
checkpoint.save(folder, step, {"model": model, "optimizer": optimizer, "best": 0.97})

`load` is in `restore`.
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
from surefoot.components.checkpoint.random import random_states
from surefoot.components.checkpoint.save import Content, Stamp, clear_drafts, commit
from surefoot.components.checkpoint.tensor_files import DTYPES, check_storable
from surefoot.components.checkpoint.tree import split
from surefoot.contract.manifest import NAME, Manifest
from surefoot.contract.state import master_of, part_of
from surefoot.core.errors import TaskError
from surefoot.runtime.attributes.generators import generator_state, is_generator

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
    """Save `state`, and every random state, as the checkpoint of a step in `folder`.

    The function returns when the checkpoint is on disk; an earlier checkpoint of the same step is
    replaced. Only one process may save into a folder at a time, because a save deletes drafts that
    it finds there, which a killed process may have left.

    Args:
        folder: The folder of the checkpoints.
        step: Number of the step.
        state: Modules, objects with a state_dict, random generators of torch, NumPy and Python,
            tensors, arrays and numbers, by name. The module named "model" is written to
            model.safetensors, as other programs read it.
        stamp: Facts of the run for the manifest, such as the score.
        attributes: Plain attributes of modules, by the name of the module, as `encode_storable`
            returns them; by default none are saved.

    Returns:
        The manifest of the checkpoint.

    Raises:
        TaskError: For a value that a checkpoint cannot hold.
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

    The latter are named `FILE/TENSOR`: shards that are not rows of a whole, and rows of a sharded
    weight outside "model" or whose name occurs in two files. The rows that this rank holds of other
    sharded weights are in `parts` of the content. Raises TaskError.
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
    """Raise TaskError for what `save` could not save of `state`; nothing is copied or written."""
    _gather(state)


def _gather(
    state: Mapping[str, Any], attributes: Mapping[str, Mapping[str, Any]] = NO_ATTRIBUTES
) -> tuple[dict[str, dict[str, Tensor]], Any]:
    """Return the live tensors of a checkpoint of `state` by file, and the tree of the rest.

    Raises TaskError.
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
        name: _read_object(value) if name in kinds else value for name, value in objects.items()
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
    """Return name, shape and dtype of the parameters of each optimizer, in its order.

    The state of an optimizer identifies the parameters by index alone.
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
    """Return the parameters of an optimizer, in the order of its groups."""
    return [parameter for group in optimizer.param_groups for parameter in group["params"]]


def modules_of(state: Mapping[str, Any]) -> dict[str, nn.Module]:
    """Return the modules among the objects of `state`."""
    return {name: value for name, value in state.items() if isinstance(value, nn.Module)}


def _is_plain(name: str) -> bool:
    """Return whether a module of this name gets a valid file name that surefoot does not use.

    A name like that of a part of a split file is not valid.
    """
    file = f"{name}.safetensors"
    return (
        name not in RESERVED
        and OF_A_RANK.fullmatch(name) is None
        and NAME.fullmatch(file) is not None
        and PART.fullmatch(file) is None
    )


def has_state(value: Any) -> bool:
    """Return whether `value` is an instance with `state_dict` and `load_state_dict`."""
    return not isinstance(value, type) and all(
        callable(getattr(value, part, None)) for part in ("state_dict", "load_state_dict")
    )


def is_restorable(value: Any) -> bool:
    """Return whether `load` restores `value` in place.

    Every reference to it then sees the saved state.
    """
    return has_state(value) or is_generator(value) or isinstance(value, Tensor | np.ndarray)


def _read_object(value: Any) -> Any:
    return generator_state(value) if is_generator(value) else read_state_dict(value)


def read_state_dict(value: Any) -> Any:
    """Return `value.state_dict()`, of an optimizer without parameters that no group holds.

    torch raises KeyError for their state, which is left when a group gets other parameters.
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
    """Return the tensors of a module to be stored; a tensor with several names occurs once.

    Raises TaskError for a tensor that a checkpoint cannot hold.
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
    """Return `held` with masters in place of weights, and local shards in place of DTensors.

    A master holds all bits of its weight.
    """
    return with_local_rows({name: master_of(tensor) for name, tensor in held.items()})
