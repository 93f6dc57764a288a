"""Modules in a user's training loop that no checkpoint holds, such as a target network."""

from __future__ import annotations

import weakref
from collections.abc import Collection, Iterable, Mapping
from itertools import chain
from typing import Any, final

import torch
from torch import Tensor, nn

from surefoot.runtime.attributes.values import Aliases, memory_of, sign
from surefoot.runtime.nested_tensors import find_tensors
from surefoot.train.record.noticed.moved_outside import walk

NUM_READ = 4096  # elements per tensor that are compared: an update changes most of them
NO_ALIASES = Aliases.of_tensors({})


@final
class ModuleWatch:
    """Modules of a user's loop that are not saved, watched for changes.

    A frozen teacher is an example of a module that does not change and need not be saved.

    Args:
        depth: Depth of the search for modules below the variables.
        max_parts: Number of entries of one list or dict that are searched.
    """

    def __init__(self, depth: int, max_parts: int) -> None:
        self._limits = depth, max_parts
        # the weights are None until `begin`
        self._watched: dict[str, tuple[weakref.ref[nn.Module], Any]] = {}

    def add(self, roots: Mapping[str, Any], held: Collection[Any]) -> None:
        """Add the modules below the variables `roots` that share no tensor with `held` objects."""
        found = [
            (name, each)
            for name, each in walk(roots, *self._limits)
            if isinstance(each, nn.Module) and _tensors_of(each)
        ]
        if not found:
            return
        covered = _keys_of(_held_tensors(held))
        known = {id(watched()) for watched, _ in self._watched.values()}
        for name, module in found:
            keys = _keys_of(_tensors_of(module))
            if id(module) not in known and not keys & covered:
                self._watched[name] = weakref.ref(module), None
            covered |= keys

    def begin(self) -> None:
        """Read the weights of the modules that were added since the last call."""
        for name, (watched, before) in self._watched.items():
            if before is None and (module := watched()) is not None:
                self._watched[name] = watched, _sign(module)

    def find_changed(self) -> list[tuple[str, nn.Module]]:
        """Return the modules whose weights or buffers have changed since `begin`, each once."""
        changed = []
        for name, (watched, before) in list(self._watched.items()):
            module = watched()
            if module is None:
                del self._watched[name]
            elif before is not None and _sign(module) != before:
                del self._watched[name]
                changed.append((name, module))
        return changed


def _tensors_of(module: nn.Module) -> list[Tensor]:
    return list(chain(module.parameters(), module.buffers()))


def _held_tensors(held: Collection[Any]) -> Iterable[Tensor]:
    for each in held:
        if isinstance(each, nn.Module):
            yield from _tensors_of(each)
        if callable(getattr(each, "state_dict", None)):
            yield from find_tensors(each.state_dict())
        yield from find_tensors([group["params"] for group in getattr(each, "param_groups", ())])
        yield from find_tensors(each)


def _keys_of(tensors: Iterable[Tensor]) -> set[Any]:
    found = list(tensors)
    return {id(each) for each in found} | {memory_of(each) for each in found} - {None}


@torch.no_grad()
def _sign(module: nn.Module) -> Any:
    """Return an object that differs if sampled elements of the weights or buffers change."""
    return sign([_thin_out(each.detach()) for each in _tensors_of(module)], NO_ALIASES)


def _thin_out(tensor: Tensor) -> Tensor:
    if tensor.layout is not torch.strided or tensor.numel() <= NUM_READ:
        return tensor
    return tensor.reshape(-1)[:: tensor.numel() // NUM_READ]
