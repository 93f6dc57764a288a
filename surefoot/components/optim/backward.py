"""Direct call of autograd's engine, without the checks that `torch.autograd.backward` repeats.

The name `torch.autograd.Variable._execution_engine` is private. If torch lacks it, the public
function runs, with identical results. A test compares both.
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
    """Accumulate the gradients of `totals` in the leaves, or only in `inputs`.

    `gradients` are the initial gradients of `totals`, with the same shapes, as in
    `torch.autograd.backward`.
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
