"""Switching off the key-value caches of transformer models (`config.use_cache`).

By default, such models fill a cache in each forward pass. A block that is recomputed would write
into the cache a second time, and a traced graph cannot return a cache.
"""

from __future__ import annotations

import traceback
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.utils.hooks import RemovableHandle

HINT = (
    "a block that is computed again must not find what its first pass left behind, "
    "such as a cache of keys and values: call the model with use_cache=False, "
    "leave the block out of memory.blocks, "
    'or set memory.activation_checkpointing = "none"'
)


def is_of_repeated_pass(error: BaseException) -> bool:
    """Return whether `error` was raised while a block was recomputed, not in its first pass."""
    frames = [
        (Path(frame.filename).name, frame.name)
        for frame in traceback.extract_tb(error.__traceback__)
    ]
    return (
        any(name == "unpack_hook" and file == "checkpoint.py" for file, name in frames)
        or ("budget.py", "measure") in frames
    )


class CachesOff:
    """Hooks that set `config.use_cache` to False during each forward pass with gradients.

    They are added to the modules that contain one of the `blocks` and whose `use_cache` is True;
    `modules` are the names of these. The argument `use_cache=True` of a call takes precedence.
    """

    def __init__(self, model: nn.Module, blocks: Iterable[str]) -> None:
        around = {
            "",
            *(name[:end] for name in blocks for end in range(len(name)) if name[end] == "."),
        }
        found = {
            name: module
            for name, module in model.named_modules()
            if name in around and is_caching(module)
        }
        self.modules = tuple(found)
        self._handles: list[RemovableHandle] = []
        for module in found.values():
            switch = _CacheSettings()
            self._handles.append(module.register_forward_pre_hook(switch.turn_off, prepend=True))
            self._handles.append(module.register_forward_hook(switch.put_back, always_call=True))

    @property
    def notes(self) -> list[str]:
        """Lines for the log that name the settings that are switched off; empty without any."""
        named = ", ".join(
            f"{name}.config.use_cache" if name else "config.use_cache" for name in self.modules
        )
        return (
            [f"passes that take gradients fill no cache of keys and values, as if {named} = False"]
            if named
            else []
        )

    def remove(self) -> None:
        """Remove the hooks, so that later forward passes do not change `config.use_cache`."""
        for handle in self._handles:
            handle.remove()


class _CacheSettings:
    """Stack of the values of `use_cache` to restore in one module.

    It has one value for each running forward pass of the module.
    """

    def __init__(self) -> None:
        self._before: list[Any] = []

    def turn_off(self, module: nn.Module, _: Any) -> None:
        config: Any = module.config
        self._before.append(config.use_cache)
        if torch.is_grad_enabled():
            config.use_cache = False

    def put_back(self, module: nn.Module, *_: Any) -> None:
        config: Any = module.config
        config.use_cache = self._before.pop()


def is_caching(module: nn.Module) -> bool:
    """Return whether `config.use_cache` of a module is True."""
    return getattr(getattr(module, "config", None), "use_cache", None) is True


@contextmanager
def without_caches(model: nn.Module) -> Iterator[None]:
    """Set `config.use_cache` to False in all modules of `model` inside the `with` block."""
    configs: Mapping[int, Any] = {
        id(module.config): module.config for module in model.modules() if is_caching(module)
    }
    for config in configs.values():
        config.use_cache = False
    try:
        yield
    finally:
        for config in configs.values():
            config.use_cache = True
