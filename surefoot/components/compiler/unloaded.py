"""Keeps torch's compiler out of a process that compiles nothing: importing it costs half as much again as torch itself.

torch imports it with the first optimiser, only to tell it to leave `add_param_group` alone, and with
`torch.use_deterministic_algorithms`, only to set an option of it. The seams: `__dynamo_disable`, in which `torch._compile` keeps what
it calls in place of such a function, and `torch._C._set_deterministic_algorithms`.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import torch
from torch.optim import Optimizer

from surefoot.core import place

TOLD, CONFIG = "__dynamo_disable", "torch._inductor.config"
VARIABLE = "TORCHINDUCTOR_DETERMINISTIC"  # read by the compiler's configuration when it is imported


def set_deterministic(on: bool) -> Callable[[], None]:
    """Let kernels be deterministic, with a warning where there is none, if `on`; gives what puts back what was.

    As `torch.use_deterministic_algorithms`, but a compiler that is not imported yet finds it in its variable when it is.
    """
    enabled, warn_only = torch.are_deterministic_algorithms_enabled(), torch.is_deterministic_algorithms_warn_only_enabled()
    put_back_variable: Callable[[], None] | None = None
    if on:
        _set(True, warn_only=True)
        put_back_variable = place.set_variable(VARIABLE, "1")

    def put_back() -> None:
        _set(enabled, warn_only=warn_only)
        if put_back_variable is not None:
            put_back_variable()

    return put_back


def _set(on: bool, *, warn_only: bool) -> None:
    setter: Any = getattr(torch._C, "_set_deterministic_algorithms", None)
    if setter is None or CONFIG in sys.modules:
        setter = torch.use_deterministic_algorithms
    setter(on, warn_only=warn_only)


def leave_unloaded() -> Callable[[], None]:
    """Let optimisers be made without the compiler, as long as nothing else imports it; gives what ends that."""
    function: Any = getattr(Optimizer.add_param_group, "__wrapped__", None)
    if function is None or "torch._dynamo" in sys.modules or hasattr(function, TOLD):
        return lambda: None
    setattr(function, TOLD, function)
    return lambda: delattr(function, TOLD)
