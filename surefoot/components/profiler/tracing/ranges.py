"""Named ranges around epochs, steps, phases and modules, for torch.profiler and NVTX.

Ranges are opened only while a window of steps is recorded. Outside of the window, a loop has no
overhead from them. They are closed even after an error.
"""

from __future__ import annotations

from contextlib import ExitStack
from typing import Any, cast, final

from torch import nn
from torch.nn.modules import module as hooks
from torch.profiler import record_function

from surefoot.components.profiler.tracing.fold import MODULE_PREFIX

LEVELS = ("epoch", "step", "phase")


@final
class Ranges:
    """Nested ranges on the levels epoch, step and phase, with at most one open range on each level.

    Opening a range first closes the open ranges on its level and on the levels inside it.
    """

    def __init__(self) -> None:
        self._open: dict[str, record_function] = {}
        self._names: dict[str, str] = {}

    def begin(self, level: str, name: str) -> None:
        """Open the range `name` on `level`.

        If `level` is "epoch" and a range of this name is already open on it, nothing happens.
        """
        if self._names.get(level) == name and level == LEVELS[0]:
            return
        self.end(level)
        self._open[level], self._names[level] = _enter_range(name), name

    def end(self, level: str = LEVELS[0]) -> None:
        """Close the open ranges on `level` and on the levels inside it, the innermost first."""
        for each in reversed(LEVELS[LEVELS.index(level) :]):
            opened = self._open.pop(each, None)
            self._names.pop(each, None)
            if opened is not None:
                opened.__exit__(None, None, None)


@final
class ModuleRanges:
    """Named range around every forward pass of each module of `model`, from `open` to `close`."""

    def __init__(self, model: nn.Module) -> None:
        self._names = {
            id(part): f"{MODULE_PREFIX}{name or type(model).__name__}"
            for name, part in model.named_modules()
        }
        self._entered: list[tuple[int, record_function]] = []
        self._hooked = ExitStack()

    def open(self) -> None:
        for handle in (
            hooks.register_module_forward_pre_hook(self._enter),
            # always_call: even for a module that raised
            hooks.register_module_forward_hook(self._exit_module, always_call=True),
        ):
            self._hooked.callback(handle.remove)

    def close(self) -> None:
        """Remove the hooks, and close ranges that an error left open."""
        self._hooked.close()
        while self._entered:
            self._entered.pop()[1].__exit__(None, None, None)

    def _enter(self, part: nn.Module, given: Any) -> None:
        name = self._names.get(id(part))
        if name is not None:
            self._entered.append((id(part), _enter_range(name)))

    def _exit_module(self, part: nn.Module, given: Any, made: Any) -> None:
        if self._entered and self._entered[-1][0] == id(part):
            self._entered.pop()[1].__exit__(None, None, None)


def _enter_range(name: str) -> record_function:
    opened: Any = record_function(name)  # torch has no type annotations for it
    opened.__enter__()
    return cast(record_function, opened)
