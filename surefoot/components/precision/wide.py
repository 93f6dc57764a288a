"""Operators that compute in fp32 under autocast on a CPU, as they do on a GPU.

They are softmax, norms and sums, for which torch's own autocast uses fp32 only on a GPU. The
operators are registered with torch's dispatcher (`torch.library`) under the dispatch key of CPU
autocast, so that nothing changes while autocast is off.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

NARROW = (torch.bfloat16, torch.float16)
WIDE = (
    "softmax.int",
    "log_softmax.int",
    "layer_norm",
    "group_norm",
    "rms_norm",
    "linalg_vector_norm",
    "norm.Scalar",
    "norm.ScalarOpt_dim",
    "sum",
    "sum.dim_IntList",
    "cumsum",
    "pow.Tensor_Scalar",
    "linalg_matrix_exp",  # which is built of sums, and does not support two dtypes
)


@functools.cache
def register_fp32_autocast_on_cpu() -> torch.library.Library:
    """Make CPU autocast compute softmax, norms and sums in fp32, as GPU autocast does.

    This happens once per process. The returned library keeps the registration alive.
    """
    library = torch.library.Library("aten", "IMPL", "AutocastCPU")  # type: ignore[no-untyped-call]
    for name in WIDE:
        library.impl(name, _fp32_kernel(name))  # type: ignore[no-untyped-call]
    return library


def _fp32_kernel(name: str) -> Callable[..., Any]:
    packet, _, overload = name.partition(".")
    operator = getattr(getattr(torch.ops.aten, packet), overload or "default")

    def run(*given: Any, **named: Tensor) -> Any:
        with torch.autocast("cpu", enabled=False):
            return operator(
                *map(_to_wide, given), **{key: _to_wide(value) for key, value in named.items()}
            )

    return run


def _to_wide(value: Any) -> Any:
    return value.float() if isinstance(value, Tensor) and value.dtype in NARROW else value
