"""A direct call of autograd's engine, without the checks that `torch.autograd.backward` repeats
every step.

`torch.autograd.Variable._execution_engine` is private; where torch lacks it, the public function
runs, with identical results. A test compares both.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

_engine: Any = getattr(torch.autograd.Variable, "_execution_engine", None)
_run: Any = getattr(_engine, "run_backward", None)


def backward(
    totals: Sequence[Tensor], gradients: Sequence[Tensor], inputs: Sequence[Tensor] | None = None
) -> None:
    """Accumulate the gradients of `totals` into the leaves, or only into `inputs`.

    Each of `totals` is multiplied by its entry of `gradients`, which has the same shape.
    """
    if _run is None or inputs is not None:
        torch.autograd.backward(list(totals), list(gradients), inputs=inputs)
        return
    _run(
        tuple(totals),
        tuple(gradients),
        False,
        False,
        (),
        allow_unreachable=True,
        accumulate_grad=True,
    )
