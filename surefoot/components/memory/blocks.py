"""Selection of the blocks of a model: modules that repeat, or modules that the caller names."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from fnmatch import fnmatchcase

from torch import nn

from surefoot.core.errors import InputError

RECOMPUTED = (
    'memory.activation_checkpointing = "full" with '  # for the hint: block names alone do nothing
)
CONTAINERS = (nn.Sequential, nn.ModuleList, nn.ModuleDict)


def find_blocks(
    model: nn.Module, wanted: Sequence[str | nn.Module] = (), *, key: str = "memory.blocks"
) -> dict[str, nn.Module]:
    """Return the blocks of `model` by name, such as the layers of a transformer.

    The blocks are the modules in `wanted`. Without these, they are the modules that repeat: several
    children of the same type in a Sequential, ModuleList or ModuleDict, which have children
    themselves. Of nested blocks, only the outermost are returned.

    Args:
        model: The model to search.
        wanted: Name patterns (as in fnmatch), or modules.
        key: The spec key that names the blocks, for errors.

    Raises:
        InputError: If `wanted` is empty and no module repeats, or if a pattern or module in
            `wanted` matches nothing.
    """
    if not wanted:
        found = _find_repeated_modules("", model)
        if not found:
            raise InputError(
                f"no block repeats in this {type(model).__name__}: "
                "which are its blocks is not known",
                hint=(
                    f"name its blocks, for example {RECOMPUTED * (key == 'memory.blocks')}{key} = "
                    f'["{_example_block(model)}"]'
                ),
            )
        return found
    names = {
        name: module
        for name, module in model.named_modules()
        if name and not isinstance(module, nn.ModuleList | nn.ModuleDict)
    }
    every: dict[int, list[str]] = {}  # all names of a module that is used more than once
    for name, module in model.named_modules(remove_duplicate=False):
        every.setdefault(id(module), []).append(name)
    chosen: dict[str, nn.Module] = {}
    for each in wanted:
        matching = {
            name: module
            for name, module in names.items()
            if (
                any(fnmatchcase(one, each) for one in every[id(module)])
                if isinstance(each, str)
                else module is each
            )
        }
        if not matching:
            said = (
                repr(each)
                if isinstance(each, str)
                else f"a {type(each).__name__} that is not part of the model"
            )
            raise InputError(
                f"{key}: {said} matches no module",
                hint=f"there are {', '.join(list(names)[:8]) or 'none'}, ...",
            )
        chosen |= matching
    return {
        name: module
        for name, module in names.items()
        if name in chosen and not _is_inside(name, chosen)
    }


def _find_repeated_modules(prefix: str, module: nn.Module) -> dict[str, nn.Module]:
    children = {
        name: child
        for name, child in module.named_children()
        if any(True for _ in child.children())
    }
    kinds = Counter(map(type, children.values()))
    found: dict[str, nn.Module] = {}
    for name, child in children.items():
        inner = _find_repeated_modules(f"{prefix}{name}.", child)
        # a container of blocks is not a block, unless its children are too small
        is_row = isinstance(child, CONTAINERS)
        if (
            isinstance(module, CONTAINERS)
            and kinds[type(child)] > 1
            and not (is_row and (inner or not isinstance(child, nn.Sequential)))
        ):
            found[f"{prefix}{name}"] = child
        else:
            found |= inner
    return found


def _is_inside(name: str, chosen: dict[str, nn.Module]) -> bool:
    parts = name.split(".")
    return any(".".join(parts[:end]) in chosen for end in range(1, len(parts)))


def _example_block(model: nn.Module) -> str:
    """Return an example of a name pattern for a hint, if possible one that matches a module."""
    for name, child in model.named_children():
        if any(True for _ in child.children()):
            return f"{name}.*" if isinstance(child, CONTAINERS) else name
    return "encoder.*"
