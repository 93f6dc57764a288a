"""Commits for a loop of one's own: `save` what is named, `load` it back into the same objects.

restored = checkpoint.load(folder, {"model": model, "optimizer": optimizer})
first = restored.step if restored else 0
...
checkpoint.save(folder, step, {"model": model, "optimizer": optimizer, "best": 0.97})
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from surefoot.components.checkpoint.load import Commit, check_fit, newest_loadable, read_weights
from surefoot.components.checkpoint.random import random_states, restore_random
from surefoot.components.checkpoint.save import Content, Stamp, commit
from surefoot.components.checkpoint.tensors import check_storable
from surefoot.components.checkpoint.tree import join, split, taken_from
from surefoot.contract import commits, manifest
from surefoot.contract.manifest import NAME, Manifest
from surefoot.contract.state import master_of
from surefoot.core.errors import RunFolderError, TaskError

NO_STAMP = Stamp()
RESERVED = ("state", "manifest", "optimizer-state")


@dataclass(frozen=True)
class Restored:
    """What `load` found: the step, and what was saved that is no object of yours: numbers, text, lists of them."""

    step: int
    values: Mapping[str, Any]
    troubles: tuple[str, ...] = ()


def save(folder: Path, step: int, state: Mapping[str, Any], stamp: Stamp = NO_STAMP) -> Manifest:
    """Commit `state` as a step of `folder`: modules, objects with a state_dict, tensors, arrays, numbers; and every random state.

    A module called "model" stands in model.safetensors as others read it. Returns once it is on disk; an earlier commit of the same
    step is replaced. Raises TaskError for what a checkpoint cannot hold, NumbersError for a trained parameter that is not finite,
    StorageError when the disk refuses; what was committed before stays as it is.
    """
    modules = {name: value for name, value in state.items() if isinstance(value, nn.Module)}
    bad = [name for name in modules if not NAME.match(name) or name in RESERVED]
    if bad:
        raise TaskError(f"a module is called {bad[0]!r}", hint='call it by a plain name, as "model"')
    rest = {name: _state_of(value) for name, value in state.items() if name not in modules}
    skeleton, tensors = split({"values": rest, "random": random_states()})
    files = {f"{name}.safetensors": _stored(module) for name, module in modules.items()}
    files["state.safetensors"] = {name: tensor.detach().cpu().contiguous() for name, tensor in tensors.items()}
    for name, tensor in tensors.items():
        check_storable(name, tensor)
    trained = [name for module in modules.values() for name, parameter in module.named_parameters() if parameter.requires_grad]
    content = Content(step=step, tensors=files, texts={"state.json": json.dumps(skeleton).encode()}, finite=frozenset(trained))
    return commit(folder, content, stamp)


def load(folder: Path, state: Mapping[str, Any], step: int | None = None) -> Restored | None:
    """Read the newest whole commit of `folder`, or that of `step`, into the objects of `state`; None where there is none.

    Every byte is held against its digest; a damaged commit is set aside and the one before it taken. Raises RunFolderError where
    the state is that of other objects, or `step` is not there or damaged.
    """
    found: list[Mapping[str, Any]] = []
    if step is not None:
        commits.check(manifest.step_folder(folder, step))
        return Restored(step, _restore(Commit(folder, step), state))
    at, troubles = newest_loadable(folder, lambda one: found.append(_restore(one, state)))
    return None if at is None else Restored(at, found[-1], tuple(troubles))


def load_into(model: nn.Module, folder: Path, step: int, *, widen: bool = False) -> Manifest:
    """Read the weights and buffers of a commit into `model`, strictly: the same names, shapes and dtypes; bf16 into fp32 to `widen`.

    Raises RunFolderError, before anything of the model moves, when they do not fit or a file is damaged.
    """
    one = Commit(folder, step)
    check_fit(one.folder, one.pieces("model"), _tensors(model), widen=widen)
    commits.check(one.folder)
    _read_into(model, one, "model", widen=widen)
    return one.manifest


def _state_of(value: Any) -> Any:
    return value.state_dict() if _has_state(value) else value


def _has_state(value: Any) -> bool:
    return all(callable(getattr(value, part, None)) for part in ("state_dict", "load_state_dict"))


def _stored(module: nn.Module) -> dict[str, Tensor]:
    """The tensors of the state dict on the host, contiguous, one that stands under several names once."""
    seen: set[tuple[int, tuple[int, ...], tuple[int, ...]]] = set()
    found = {}
    for name, tensor in _tensors(module).items():
        check_storable(name, tensor)
        key = (tensor.data_ptr(), tuple(tensor.shape), tensor.stride())
        if key in seen and tensor.numel():
            continue
        seen.add(key)
        found[name] = tensor.detach().cpu().contiguous()
    return found


def _tensors(module: nn.Module) -> dict[str, Tensor]:
    """The tensors of the state dict; of a weight that has a master that one, which holds all its bits."""
    state = module.state_dict(keep_vars=True)
    return {name: master_of(tensor) for name, tensor in state.items() if isinstance(tensor, Tensor)}


@torch.no_grad()
def _read_into(module: nn.Module, one: Commit, prefix: str, *, widen: bool = False) -> None:
    read_weights(one, _tensors(module), prefix, widen=widen)
    for parameter in module.parameters():
        if (master := master_of(parameter)) is not parameter:
            parameter.copy_(master)


def _restore(one: Commit, state: Mapping[str, Any]) -> dict[str, Any]:
    modules = {name: value for name, value in state.items() if isinstance(value, nn.Module)}
    absent = [name for name in modules if not one.names(f"{name}.safetensors")]
    if absent:
        raise RunFolderError(f"{one.folder} holds no {absent[0]}.safetensors", hint="load what was saved, by the same names")
    with taken_from(one.folder):
        tree = join(one.json("state.json"), one.read("state.safetensors"), one.folder)
        values, random = dict(tree["values"]), tree["random"]
    for name, module in modules.items():
        _read_into(module, one, f"{name}.safetensors")
    for name, value in state.items():
        if name in modules:
            continue
        if name not in values:
            raise RunFolderError(f"{one.folder} holds no state of {name!r}", hint=f"it holds {', '.join(values) or 'none'}")
        if _has_state(value):
            value.load_state_dict(values.pop(name))
        elif isinstance(value, Tensor):
            with torch.no_grad():
                value.copy_(values[name])
    with taken_from(one.folder):
        restore_random(random)
    return values
