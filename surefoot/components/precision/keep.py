"""Modules that compute in fp32 while the others compute in 16 bits: inputs are cast to fp32, and
autocast is off inside them."""

from __future__ import annotations

import difflib
import functools
from collections.abc import Callable, Sequence
from fnmatch import fnmatchcase
from typing import Any

import torch
from torch import Tensor, nn

from surefoot.core.errors import SpecError

NARROW = (torch.bfloat16, torch.float16)


def keep_in_fp32(model: nn.Module, patterns: Sequence[str]) -> dict[str, nn.Module]:
    """Make the modules that match a pattern compute in fp32, and return them by name.

    A pattern matches a module's name, or that of one of its parameters: `head`, `head.*`,
    `blocks.*.mlp`. Raises SpecError, with similar names, for a pattern that matches none.
    """
    found: dict[str, nn.Module] = {}
    for pattern in patterns:
        matched = {
            name: module
            for name, module in model.named_modules(remove_duplicate=False)
            if name and _matches(name, module, pattern)
        }
        if not matched:
            names = [name for name, _ in model.named_modules() if name]
            near = difflib.get_close_matches(pattern.rstrip(".*"), names, n=3) or names[:8]
            raise SpecError(
                f"precision.keep: the pattern {pattern!r} matches no module",
                hint=f"did you mean {', '.join(near)}?"
                if near
                else "the model has no modules inside",
            )
        found |= matched
    for module in found.values():
        if not isinstance(module.forward, functools.partial):
            # a partial is copied with its module
            module.forward = functools.partial(_in_fp32, module.forward)
    return found


def _matches(name: str, module: nn.Module, pattern: str) -> bool:
    own = [name, *(f"{name}.{each}" for each, _ in module.named_parameters(recurse=False))]
    return any(fnmatchcase(each, pattern) for each in own)


def _in_fp32(forward: Callable[..., Any], *given: Any, **named: Tensor) -> Any:
    wide, wide_named = _wide(given), _wide(named)
    device = _device_of((wide, wide_named, list(forward.__self__.parameters())))  # type: ignore[attr-defined]
    with torch.autocast(device or "cpu", enabled=False):
        return forward(*wide, **wide_named)


def _wide(value: Any) -> Any:
    """Return `value` with every 16-bit tensor in it cast to fp32."""
    if isinstance(value, Tensor):
        return value.float() if value.dtype in NARROW else value
    if isinstance(value, dict):
        return {key: _wide(part) for key, part in value.items()}
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return type(value)(*map(_wide, value))
    return type(value)(map(_wide, value)) if isinstance(value, list | tuple) else value


def _device_of(value: Any) -> str | None:
    """Return the device type of the first tensor in `value`."""
    if isinstance(value, Tensor):
        return value.device.type
    parts = (
        value.values()
        if isinstance(value, dict)
        else value
        if isinstance(value, list | tuple)
        else ()
    )
    return next((found for part in parts if (found := _device_of(part)) is not None), None)
