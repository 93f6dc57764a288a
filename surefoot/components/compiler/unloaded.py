"""Deferral of the import of torch's compiler in a process that compiles nothing.

The import takes about half as long as the import of torch. torch imports its compiler when the
first optimizer is created, only to exempt `add_param_group` from tracing, and in
`torch.use_deterministic_algorithms`, only to set one of its options. Two private names prevent both
imports. `__dynamo_disable` is the attribute in which `torch._compile` stores the callable that it
runs in place of such a function. The other is `torch._C._set_deterministic_algorithms`.
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
    """Turn on deterministic kernels if `on`; return a function that restores the previous state.

    An operator without a deterministic kernel causes only a warning. The effect is that of
    `torch.use_deterministic_algorithms`, but torch's compiler is not imported. The environment
    variable TORCHINDUCTOR_DETERMINISTIC carries the setting to a compiler that is imported later.
    """
    enabled, warn_only = (
        torch.are_deterministic_algorithms_enabled(),
        torch.is_deterministic_algorithms_warn_only_enabled(),
    )
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


def defer_compiler_import() -> Callable[[], None]:
    """Prevent torch from importing its compiler when an optimizer is created.

    Returns a function that undoes this. If the compiler is already imported, nothing changes.
    """
    function: Any = getattr(Optimizer.add_param_group, "__wrapped__", None)
    if function is None or "torch._dynamo" in sys.modules or hasattr(function, TOLD):
        return lambda: None
    setattr(function, TOLD, function)
    return lambda: delattr(function, TOLD)
