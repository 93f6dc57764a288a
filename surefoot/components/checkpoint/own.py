"""Commits for a loop of one's own: `save` what is named, `load` it back into the same objects.

restored = checkpoint.load(folder, {"model": model, "optimizer": optimizer})
first = restored.step if restored else 0
...
checkpoint.save(folder, step, {"model": model, "optimizer": optimizer, "best": 0.97})
"""

from __future__ import annotations

import contextlib
import json
import operator
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from surefoot.components.checkpoint.load import MODEL, PART, Commit, check_fit, newest_loadable, read_weights
from surefoot.components.checkpoint.random import random_states, restore_random
from surefoot.components.checkpoint.save import Content, Stamp, clear_drafts, commit
from surefoot.components.checkpoint.tensors import DTYPES, check_storable, fill
from surefoot.components.checkpoint.tree import join, split, taken_from
from surefoot.contract import commits
from surefoot.contract.manifest import NAME, Manifest
from surefoot.contract.state import master_of
from surefoot.core.errors import RunFolderError, TaskError

NO_STAMP = Stamp()
RESERVED = ("state", "manifest", "optimizer-state")
STATE = "state.safetensors"


@dataclass(frozen=True)
class Restored:
    """What `load` found: the step, and what was saved that is no object of yours: numbers, text, lists of them."""

    step: int
    values: Mapping[str, Any]
    troubles: tuple[str, ...] = ()


def save(folder: str | Path, step: int, state: Mapping[str, Any], stamp: Stamp = NO_STAMP) -> Manifest:
    """Commit `state` as a step of `folder`: modules, objects with a state_dict, tensors, arrays, numbers; and every random state.

    A module called "model" stands in model.safetensors as others read it. Returns once it is on disk; an earlier commit of the same
    step is replaced. One process saves into a folder at a time: what a killed save left there is cleared away. Raises TaskError for
    what a checkpoint cannot hold, NumbersError for a trained parameter that is not finite, StorageError when the disk refuses; what
    was committed before stays as it is.
    """
    try:
        number = operator.index(step)
    except TypeError:
        raise TaskError(f"the step is {step!r}, which is no whole number", hint="count steps from 0") from None
    live, skeleton = _gather(state)
    files = {file: {name: tensor.detach().cpu().contiguous() for name, tensor in held.items()} for file, held in live.items()}
    trained = [name for module in _modules(state).values() for name, each in module.named_parameters() if each.requires_grad]
    content = Content(step=number, tensors=files, texts={"state.json": json.dumps(skeleton).encode()}, finite=frozenset(trained))
    with contextlib.suppress(OSError):  # what the disk refuses is told by the commit
        clear_drafts(Path(folder))
    return commit(Path(folder), content, stamp)


def check_state(state: Mapping[str, Any]) -> None:
    """Raise TaskError for what `save` could not commit of `state`; nothing is copied or written."""
    _gather(state)


def load(folder: str | Path, state: Mapping[str, Any], step: int | None = None) -> Restored | None:
    """Read the newest whole commit of `folder`, or that of `step`, into the objects of `state`; None where there is none.

    Every byte is held against its digest; a damaged commit is set aside and the one before it taken. Raises RunFolderError where
    the state is that of other objects, of another shape or dtype, before any of them changes, or `step` is not there or damaged.
    """
    found: list[Mapping[str, Any]] = []
    run = Path(folder)
    if step is not None:
        one = Commit(run, step)
        commits.check(one.folder)
        return Restored(step, _restore(one, state))
    at, troubles = newest_loadable(run, lambda one: found.append(_restore(one, state)))
    return None if at is None else Restored(at, found[-1], tuple(troubles))


def load_into(model: nn.Module, folder: str | Path, step: int, *, widen: bool = False) -> Manifest:
    """Read the weights and buffers of a commit into `model`, strictly: the same names, shapes and dtypes; bf16 into fp32 to `widen`.

    They are those of model.safetensors. Raises RunFolderError, before anything of the model moves, when they do not fit or a file
    is damaged.
    """
    one = Commit(Path(folder), step)
    check_fit(one.folder, one.pieces(MODEL), _tensors(model), widen=widen)
    commits.check(one.folder)
    _read_into(model, one, MODEL, widen=widen)
    return one.manifest


# ---- what is saved


def _gather(state: Mapping[str, Any]) -> tuple[dict[str, dict[str, Tensor]], Any]:
    """What a commit of `state` holds: tensors by file, as they live, and the tree of all else. Raises TaskError."""
    modules = _modules(state)
    bad = [name for name in modules if not _is_plain(name)]
    if bad:
        raise TaskError(f"a module is called {bad[0]!r}", hint='call it by a plain name, as "model"')
    objects = {name: value for name, value in state.items() if name not in modules}
    kinds = {name: type(value).__name__ for name, value in objects.items() if _has_state(value)}
    values = {name: value.state_dict() if name in kinds else value for name, value in objects.items()}
    skeleton, tensors = split({"values": values, "random": random_states(), "kinds": kinds})
    for name, tensor in tensors.items():
        check_storable(name, tensor)
    return {**{f"{name}.safetensors": _stored(module) for name, module in modules.items()}, STATE: tensors}, skeleton


def _modules(state: Mapping[str, Any]) -> dict[str, nn.Module]:
    return {name: value for name, value in state.items() if isinstance(value, nn.Module)}


def _is_plain(name: str) -> bool:
    """Whether the file of a module of this name is one, and none of surefoot's own: a part of another is taken for that."""
    file = f"{name}.safetensors"
    return name not in RESERVED and NAME.fullmatch(file) is not None and PART.fullmatch(file) is None


def _has_state(value: Any) -> bool:
    return all(callable(getattr(value, part, None)) for part in ("state_dict", "load_state_dict"))


def _stored(module: nn.Module) -> dict[str, Tensor]:
    """The tensors of the state dict, one that stands under several names once."""
    seen: set[tuple[int, tuple[int, ...], tuple[int, ...]]] = set()
    found = {}
    for name, tensor in _tensors(module).items():
        check_storable(name, tensor)
        key = (tensor.data_ptr(), tuple(tensor.shape), tensor.stride())
        if key in seen and tensor.numel():
            continue
        seen.add(key)
        found[name] = tensor
    return found


def _tensors(module: nn.Module) -> dict[str, Tensor]:
    """The tensors of the state dict; of a weight that has a master that one, which holds all its bits."""
    state = module.state_dict(keep_vars=True)
    return {name: master_of(tensor) for name, tensor in state.items() if isinstance(tensor, Tensor)}


# ---- and put back


@torch.no_grad()
def _read_into(module: nn.Module, one: Commit, file: str, *, widen: bool = False) -> None:
    read_weights(one, _tensors(module), file, widen=widen)
    for parameter in module.parameters():
        if (master := master_of(parameter)) is not parameter:
            parameter.copy_(master)


def _restore(one: Commit, state: Mapping[str, Any]) -> dict[str, Any]:
    """Compare all of `state` with the commit, then put it back; gives the values."""
    modules = _modules(state)
    absent = [name for name in modules if not one.names(f"{name}.safetensors")]
    if absent:
        raise RunFolderError(f"{one.folder} holds no {absent[0]}.safetensors", hint="load what was saved, by the same names")
    for name, module in modules.items():
        check_fit(one.folder, one.pieces(f"{name}.safetensors"), _tensors(module))
    with taken_from(one.folder):
        tree = join(one.json("state.json"), one.read(STATE), one.folder)
        values, random, kinds = dict(tree["values"]), tree["random"], dict(tree.get("kinds", {}))
    objects = {name: value for name, value in state.items() if name not in modules}
    for name, value in objects.items():
        if name not in values:
            raise RunFolderError(f"{one.folder} holds no state of {name!r}", hint=f"it holds {', '.join(values) or 'none'}")
        with taken_from(one.folder):
            _check_object(one.folder, name, value, values[name], kinds.get(name))
    for name, value in objects.items():  # first what only the object itself can refuse
        if _has_state(value):
            with taken_from(f"{name!r} of {one.folder}"):
                value.load_state_dict(values.pop(name))
        elif isinstance(value, Tensor):
            fill(name, value, values[name])
    for name, module in modules.items():
        _read_into(module, one, f"{name}.safetensors")
    with taken_from(one.folder):
        restore_random(random)
    return values


def _check_object(place: Path, name: str, value: Any, saved: Any, kind: str | None) -> None:
    """Raise RunFolderError where `saved` is not the state of `value`, as far as it tells: torch itself takes some in silence."""
    hint = "load into what was saved, or leave it out"
    given = type(value).__name__
    if kind is not None and kind != given:
        raise RunFolderError(f"{place} holds the state of {name!r}, which was {kind}: the loop gives {given}", hint=hint)
    if isinstance(value, Tensor):
        held = _describe(saved)
        if held != _describe(value):
            raise RunFolderError(f"{place} holds {name!r} as {held}, and it is read into {_describe(value)}", hint=hint)
    if isinstance(value, Optimizer):
        held_sizes, sizes = ([len(group["params"]) for group in groups] for groups in (saved["param_groups"], value.param_groups))
        if held_sizes != sizes:
            raise RunFolderError(
                f"{place} holds the state of {name!r} for groups of {held_sizes} parameters, and it has {sizes}", hint=hint
            )


def _describe(value: Any) -> str:
    if not isinstance(value, Tensor):
        return f"a {type(value).__name__}"
    return (
        f"a tensor of {DTYPES.get(value.dtype, value.dtype)} {list(value.shape)}{' on the meta device' if value.is_meta else ''}"
    )
