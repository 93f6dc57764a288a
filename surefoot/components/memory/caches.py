"""Switching off the key-value caches that transformer models fill in a forward pass by default
(`config.use_cache`).

A block that is recomputed writes into such a cache a second time, and a traced graph cannot return
one.
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
    """Return whether a block raised `error` while its forward pass was recomputed, not in the first
    forward pass."""
    frames = [
        (Path(frame.filename).name, frame.name)
        for frame in traceback.extract_tb(error.__traceback__)
    ]
    return (
        any(name == "unpack_hook" and file == "checkpoint.py" for file, name in frames)
        or ("budget.py", "measure") in frames
    )


class CachesOff:
    """Hooks that set `config.use_cache` to False around each forward pass with gradients, in the
    modules that contain `blocks`.

    `modules` are the names of the modules whose `use_cache` is on. The argument `use_cache=True` of
    a call takes precedence.
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
        """A line for the log that names the switches that are off; empty if there are none."""
        named = ", ".join(
            f"{name}.config.use_cache" if name else "config.use_cache" for name in self.modules
        )
        return (
            [f"passes that take gradients fill no cache of keys and values, as if {named} = False"]
            if named
            else []
        )

    def remove(self) -> None:
        """Remove the hooks, so that the switches are left as they are from now on."""
        for handle in self._handles:
            handle.remove()


class _CacheSettings:
    """The stack of values of one module's `use_cache`, one for each forward pass of the module that
    is running."""

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
    """Return whether the config of a module has `use_cache` on."""
    return getattr(getattr(module, "config", None), "use_cache", None) is True


@contextmanager
def without_caches(model: nn.Module) -> Iterator[None]:
    """Set `config.use_cache` to False in all modules of `model` inside the block."""
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
