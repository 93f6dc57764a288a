"""Modules that compute in fp32 while the rest of a model computes in 16 bits.

Their inputs are cast to fp32, and autocast is off inside them.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from fnmatch import fnmatchcase
from typing import Any

import torch
from torch import Tensor, nn

from surefoot.core.errors import SpecError, find_nearest
from surefoot.runtime.nested_tensors import find_tensors, map_tensors

NARROW = (torch.bfloat16, torch.float16)


def keep_in_fp32(model: nn.Module, patterns: Sequence[str]) -> dict[str, nn.Module]:
    """Make the modules that match a pattern compute in fp32, and return them by name.

    A pattern, as in fnmatch, matches the name of a module or of one of its parameters, for example
    `head`, `head.*` or `blocks.*.mlp`. Raises SpecError, with similar names, for a pattern that
    matches no module.
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
            near = find_nearest(pattern.rstrip(".*"), names) or names[:8]
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
            module.forward = functools.partial(_wrap_in_fp32, module.forward)
    return found


def _matches(name: str, module: nn.Module, pattern: str) -> bool:
    own = [name, *(f"{name}.{each}" for each, _ in module.named_parameters(recurse=False))]
    return any(fnmatchcase(each, pattern) for each in own)


def _wrap_in_fp32(forward: Callable[..., Any], *given: Any, **named: Tensor) -> Any:
    wide, wide_named = map_tensors((given, named), _to_fp32)
    held = forward.__self__.parameters()  # type: ignore[attr-defined]
    first = next(find_tensors((wide, wide_named, list(held))), None)
    with torch.autocast("cpu" if first is None else first.device.type, enabled=False):
        return forward(*wide, **wide_named)


def _to_fp32(tensor: Tensor) -> Tensor:
    return tensor.float() if tensor.dtype in NARROW else tensor
