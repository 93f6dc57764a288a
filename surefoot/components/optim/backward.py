"""The seam to autograd's engine: one call without the checks that `torch.autograd.backward` repeats every step.

`torch.autograd.Variable._execution_engine` is private; where it is gone, the public function serves with the same numbers.
A test holds both against each other.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

_engine: Any = getattr(torch.autograd.Variable, "_execution_engine", None)
_run: Any = getattr(_engine, "run_backward", None)


def backward(totals: Sequence[Tensor], gradients: Sequence[Tensor], inputs: Sequence[Tensor] | None = None) -> None:
    """Accumulate the gradients of `totals`, each times its entry of `gradients` (same shape), into the leaves or only `inputs`."""
    if _run is None or inputs is not None:
        torch.autograd.backward(list(totals), list(gradients), inputs=inputs)
        return
    _run(tuple(totals), tuple(gradients), False, False, (), allow_unreachable=True, accumulate_grad=True)
