"""Checkpoints for a user-defined training loop: `save` named objects, `load` them back in place.

restored = checkpoint.load(folder, {"model": model, "optimizer": optimizer})
first = restored.step if restored else 0
...
checkpoint.save(folder, step, {"model": model, "optimizer": optimizer, "best": 0.97})
"""

from __future__ import annotations

import contextlib
import json
import operator
import re
from collections.abc import Collection, Mapping
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
    PART,
    Commit,
    check_fit,
    identity,
    newest_loadable,
    read_weights,
)
from surefoot.components.checkpoint.modules import (
    check_buffers,
    check_shaped,
    describe_layouts,
    find_layouts,
    held_by,
    put_back_buffers,
    put_back_extra,
    reshard,
    sharded,
    unsharded,
    with_local_rows,
)
from surefoot.components.checkpoint.random import random_states, restore_random
from surefoot.components.checkpoint.save import Content, Stamp, clear_drafts, commit
from surefoot.components.checkpoint.tensors import DTYPES, check_storable, create, fill
from surefoot.components.checkpoint.tree import join, split, taken_from
from surefoot.contract import commits
from surefoot.contract.manifest import NAME, Manifest, Piece
from surefoot.contract.state import laid_as, master_of, part_of
from surefoot.core.errors import RunFolderError, TaskError
from surefoot.runtime.attributes import (
    check_attributes,
    generator_state,
    is_generator,
    put_back_attributes,
    restore_generator,
)

NO_STAMP = Stamp()
RESERVED = ("state", "manifest", "optimizer-state")
OF_A_RANK = re.compile(r"rank-[0-9]{5}")
STATE = "state.safetensors"
NOTHING: Mapping[str, Mapping[str, Any]] = {"extra": {}, "buffers": {}}
NO_ATTRIBUTES: Mapping[str, Mapping[str, Any]] = {}


@dataclass(frozen=True)
class Restored:
    """Result of `load`: the step, and the saved values without a state_dict, such as numbers.

    `troubles` has a message about each damaged checkpoint that was skipped.
    """

    step: int
    values: Mapping[str, Any]
    troubles: tuple[str, ...] = ()


def save(
    folder: str | Path,
    step: int,
    state: Mapping[str, Any],
    stamp: Stamp = NO_STAMP,
    attributes: Mapping[str, Mapping[str, Any]] = NO_ATTRIBUTES,
) -> Manifest:
    """Save `state`, and every random state, as the checkpoint of a step in `folder`.

    `state` maps names to modules, objects with a state_dict, random generators of torch, NumPy and
    Python, tensors, arrays and numbers. The module named "model" is written to model.safetensors, as other programs read it. `attributes`
    are the plain attributes of modules, by the name of the module, as `encode_storable` returns
    them; by default none are saved. The function returns once the checkpoint is on disk; an earlier
    checkpoint of the same step is replaced. Only one process may save into a folder at a time,
    since leftovers of a killed save are deleted. Raises TaskError for a value that a checkpoint
    cannot hold, NumbersError for a trained parameter that is not finite, StorageError when the disk
    refuses; earlier checkpoints stay unchanged.
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
            f"the step is {step!r}, which is no whole number", hint="count steps from 0"
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
        for module in _modules(state).values()
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


def load(folder: str | Path, state: Mapping[str, Any], step: int | None = None) -> Restored | None:
    """Read the newest undamaged checkpoint, or that of `step`, into the objects of `state`.

    Modules, objects with a state_dict, random generators, tensors and arrays are restored in place.

    Returns None if `folder` has no checkpoint. Every byte is verified against its digest; a damaged
    checkpoint is set aside and the previous one is loaded. Raises RunFolderError, before any object
    changes, if the checkpoint is of other objects, shapes or dtypes, or if that of `step` is
    missing or damaged.
    """
    found: list[Mapping[str, Any]] = []
    run = Path(folder)
    if step is not None:
        one = Commit(run, step)
        commits.check(one.folder)
        return Restored(step, restore(one, state))
    at, troubles = newest_loadable(run, lambda one: found.append(restore(one, state)))
    return None if at is None else Restored(at, found[-1], tuple(troubles))


def load_into(model: nn.Module, folder: str | Path, step: int, *, widen: bool = False) -> Manifest:
    """Read weights and buffers of model.safetensors into `model`, with equal names and shapes.

    The dtypes must be equal too; with `widen`, bf16 may be read into fp32. Raises RunFolderError,
    before the model changes, if the weights do not fit or a file is damaged.
    """
    one = Commit(Path(folder), step)
    stored = one.pieces(MODEL)
    check_fit(one.folder, stored, _tensors(model, stored=stored), widen=widen)
    commits.check(one.folder)
    _read_into(model, one, MODEL, widen=widen)
    return one.manifest


# ---- content of a checkpoint


def _gather(
    state: Mapping[str, Any], attributes: Mapping[str, Mapping[str, Any]] = NO_ATTRIBUTES
) -> tuple[dict[str, dict[str, Tensor]], Any]:
    """Return the live tensors of a checkpoint of `state` by file, and the tree of the rest.

    Raises TaskError.
    """
    modules = _modules(state)
    reshard(modules.values())
    bad = [name for name in modules if not _is_plain(name)]
    if bad:
        raise TaskError(
            f"a module is called {bad[0]!r}", hint='call it by a plain name, as "model"'
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
    values = unsharded(values, layouts)
    held = {name: held_by(module) for name, module in modules.items()}
    skeleton, tensors = split(
        {
            "values": values,
            "random": random_states(),
            "kinds": kinds,
            "moved": _moved(state),
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
        **{f"{name}.safetensors": _stored(each.tensors) for name, each in held.items()},
        STATE: tensors,
    }, skeleton


def _moved(state: Mapping[str, Any]) -> dict[str, list[dict[str, Any]]]:
    """Return name, shape and dtype of the parameters of each optimizer, in its order.

    The state of an optimizer identifies the parameters by index alone.
    """
    for name, optimizer in state.items():
        for each in _params_of(optimizer) if isinstance(optimizer, Optimizer) else ():
            check_shaped(f"a parameter of {name!r}", each)
    names = {
        id(each): f"{of}.{name}"
        for of, module in _modules(state).items()
        for name, each in module.named_parameters()
    }
    return {
        name: [
            {
                "name": names.get(id(each)),
                "shape": list(each.shape),
                "dtype": DTYPES.get(each.dtype),
            }
            for each in _params_of(optimizer)
        ]
        for name, optimizer in state.items()
        if isinstance(optimizer, Optimizer)
    }


def _params_of(optimizer: Optimizer) -> list[Tensor]:
    return [parameter for group in optimizer.param_groups for parameter in group["params"]]


def _modules(state: Mapping[str, Any]) -> dict[str, nn.Module]:
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
    """Return whether `load` restores `value` in place, so that every reference to it sees the saved state."""
    return has_state(value) or is_generator(value) or isinstance(value, Tensor | np.ndarray)


def _read_object(value: Any) -> Any:
    return generator_state(value) if is_generator(value) else value.state_dict()


def _stored(held: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return the tensors of a module to be stored; a tensor with several names occurs once.

    Raises TaskError for a tensor that a checkpoint cannot hold.
    """
    seen: set[tuple[int, tuple[int, ...], tuple[int, ...]]] = set()
    found = {}
    for name, tensor in _of_masters(held).items():
        check_storable(name, tensor)
        key = identity(tensor)
        if key in seen and (tensor.numel() or part_of(tensor)):
            continue
        seen.add(key)
        found[name] = tensor
    return found


def _of_masters(held: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return `held` with masters in place of weights, and local shards in place of DTensors.

    A master holds all bits of its weight.
    """
    return with_local_rows({name: master_of(tensor) for name, tensor in held.items()})


def _tensors(
    module: nn.Module, own: Collection[str] = (), stored: Collection[str] = ()
) -> dict[str, Tensor]:
    """Return the tensors of a module that a checkpoint with the names `stored` is read into.

    Tensors in `own`, which come from the file of this rank, are detached: they then do not count as
    parts of a whole.
    """
    live = _of_masters(held_by(module, stored).tensors)
    return {name: tensor.detach() if name in own else tensor for name, tensor in live.items()}


# ---- restoring


@torch.no_grad()
def _read_into(
    module: nn.Module,
    one: Commit,
    file: str,
    own: Mapping[str, Tensor] = MappingProxyType({}),
    *,
    widen: bool = False,
) -> None:
    """Read the tensors of a module from `file`; copy those in `own` from `own` instead."""
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
    """Compare `state` with the checkpoint, then restore it; return values without state_dict.

    `rank` names the files for one of several ranks (`rank-00001`). Raises RunFolderError.
    """
    modules = _modules(state)
    reshard(modules.values())
    own = _RankState(one, rank)
    absent = [
        name
        for name in modules
        if not (one.names(f"{name}.safetensors") or own.of(f"{name}.safetensors"))
    ]
    if absent:
        raise RunFolderError(
            f"{one.folder} holds no {absent[0]}.safetensors",
            hint="load what was saved, by the same names",
        )
    for name, module in modules.items():
        stored = own.over(file := f"{name}.safetensors")
        check_fit(one.folder, stored, _tensors(module, own.of(file), stored))
    layouts = find_layouts(modules.values())
    with taken_from(one.folder):
        tree = join(one.json(own.text), {**one.read(STATE), **own.of(STATE)}, one.folder)
        _check_layouts(one.folder, tree.get("layouts", []), describe_layouts(layouts))
        values, random, kinds = (
            dict(sharded(tree["values"], layouts)),
            tree["random"],
            dict(tree.get("kinds", {})),
        )
        beside = {name: dict(tree.get("modules", {}).get(name, NOTHING)) for name in modules}
        for name, module in modules.items():
            check_buffers(module, beside[name]["buffers"])
            check_attributes(module, beside[name].get("attributes", {}))
        _check_moved(one.folder, tree.get("moved", {}), _moved(state))
    objects = {name: value for name, value in state.items() if name not in modules}
    for name, value in objects.items():
        if name not in values:
            raise RunFolderError(
                f"{one.folder} holds no state of {name!r}",
                hint=f"it holds {', '.join(values) or 'none'}",
            )
        with taken_from(one.folder):
            _check_object(one.folder, name, value, values[name], kinds.get(name))
    for name, value in objects.items():  # first the objects, which may refuse their state
        if has_state(value) or is_generator(value):
            with taken_from(f"{name!r} of {one.folder}"):
                _load_object(value, values.pop(name))
        elif isinstance(value, Tensor):
            fill(name, value, values[name])
        elif isinstance(value, np.ndarray):
            value[...] = values[name]
    for name, module in modules.items():
        _read_into(module, one, f"{name}.safetensors", own.of(f"{name}.safetensors"))
        with taken_from(f"{name!r} of {one.folder}"):
            put_back_buffers(module, beside[name]["buffers"])
            put_back_attributes(module, beside[name].get("attributes", {}))
            put_back_extra(module, beside[name]["extra"])
    with taken_from(one.folder):
        restore_random(random)
    return values


def _check_layouts(place: Path, saved: list[str], now: list[str]) -> None:
    """Raise RunFolderError if the weights are sharded in another way than when they were saved.

    The saved optimizer state would not fit.
    """
    if saved != now:
        then, found = ("; ".join(each) or "whole on every rank" for each in (saved, now))
        raise RunFolderError(
            f"{place} holds the state of weights that were {then}: they are {found} now",
            hint="wrap the model as it was when the loop was saved, with the same mesh",
        )


class _RankState:
    """State that a checkpoint holds for one rank alone: tensors by `FILE/NAME`, and a tree.

    There are no such tensors for a loop with a single process, and its tree is state.json.
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
        """Return this rank's tensors that replace those of `file` or are added to them."""
        return {
            name.removeprefix(f"{file}/"): each
            for name, each in self._tensors.items()
            if name.startswith(f"{file}/")
        }

    def over(self, file: str) -> dict[str, Piece]:
        """Return the tensors of `file` as this rank reads them, with the rank's replacements."""
        own = {
            name.removeprefix(f"{file}/"): each
            for name, each in self._pieces.items()
            if name.startswith(f"{file}/")
        }
        return {**self._one.pieces(file), **own}


def _check_object(place: Path, name: str, value: Any, saved: Any, kind: str | None) -> None:
    """Raise RunFolderError if `saved` is visibly not the state of `value`.

    torch itself accepts some mismatches without an error.
    """
    hint = "load into what was saved, or leave it out"
    given = type(value).__name__
    if kind is not None and kind != given:
        raise RunFolderError(
            f"{place} holds the state of {name!r}, which was {kind}: the loop gives {given}",
            hint=hint,
        )
    if isinstance(value, Tensor | np.ndarray):
        held = _describe(saved)
        if held != _describe(value):
            raise RunFolderError(
                f"{place} holds {name!r} as {held}, and it is read into {_describe(value)}",
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
                    f"add the groups that were added in training before this: {name}.add_param_group(...); in a new loop give the "
                    "optimizer all groups at once, also of layers that are frozen at first, which it does not move without a gradient"
                )
            raise RunFolderError(
                f"{place} holds the state of {name!r} for groups of {held_sizes} parameters, and it has {sizes}",
                hint=hint,
            )


def _check_moved(place: Path, saved: Mapping[str, Any], now: Mapping[str, Any]) -> None:
    """Raise RunFolderError if an optimizer has other parameters, or the same in another order.

    Old checkpoints do not record the parameters and are not checked.
    """
    for name, mine in now.items():
        for number, (then, each) in enumerate(zip(saved.get(name, ()), mine, strict=False)):
            is_same_name = None in (then["name"], each["name"]) or then["name"] == each["name"]
            if not is_same_name or (then["shape"], then["dtype"]) != (each["shape"], each["dtype"]):
                was, is_now = (
                    f"{of['name'] or 'one'} of {of['dtype']} {of['shape']}" for of in (then, each)
                )
                raise RunFolderError(
                    f"{place} holds the state of {name!r}, whose parameter {number} was {was}: it is {is_now} now",
                    hint="give the optimiser the parameters that it had, in the same order",
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
    params = _params_of(value)
    for number, held in saved["state"].items():
        if isinstance(number, int):
            loaded, moved = value.state[params[number]], params[number]
            loaded.update(
                {key: _uncast(each, loaded.get(key, moved), moved) for key, each in held.items()}
            )


def _uncast(saved: Any, near: Tensor, moved: Tensor) -> Any:
    """Return the saved state of the parameter `moved` without a cast, on the device of `near`.

    torch casts each tensor to the parameter's dtype, and takes text and arrays apart.
    """
    if isinstance(saved, Tensor):
        return laid_as(saved.to(near.device), moved)
    if isinstance(saved, dict):
        return {key: _uncast(each, near, moved) for key, each in saved.items()}
    if isinstance(saved, list | tuple):
        return type(saved)(_uncast(each, near, moved) for each in saved)
    return saved


def _describe(value: Any) -> str:
    if isinstance(value, np.ndarray):
        return f"an array of {value.dtype} {list(value.shape)}"
    if not isinstance(value, Tensor):
        return f"a {type(value).__name__}"
    return f"a tensor of {DTYPES.get(value.dtype, value.dtype)} {list(value.shape)}{' on the meta device' if value.is_meta else ''}"
