"""Direct call of autograd's engine, without the checks that `torch.autograd.backward` repeats.

The name `torch.autograd.Variable._execution_engine` is private. If torch lacks it, the public
function runs, with identical results. A test compares both.
"""

from __future__ import annotations

from collections.abc import Sequence
from operator import attrgetter
from typing import Any

import torch
from torch import Tensor

_engine: Any = getattr(torch.autograd.Variable, "_execution_engine", None)
_REQUIRES_GRAD = attrgetter("requires_grad")
_run: Any = getattr(_engine, "run_backward", None)


def backward(
    totals: Sequence[Tensor], gradients: Sequence[Tensor], inputs: Sequence[Tensor] | None = None
) -> bool:
    """Accumulate the gradients of `totals` in the leaves, or only in `inputs`.

    `gradients` are the initial gradients of `totals`, with the same shapes, as in
    `torch.autograd.backward`. A total that is a constant adds nothing, as in the sum of all totals.
    Returns False if all totals are constants, so that there is no backward pass.
    """
    roots, seeds = tuple(totals), tuple(gradients)
    if not all(map(_REQUIRES_GRAD, roots)):
        pairs = zip(roots, seeds, strict=True)
        kept = [(total, gradient) for total, gradient in pairs if total.requires_grad]
        if not kept:
            return False
        roots, seeds = zip(*kept, strict=True)
    if _run is None or inputs is not None:
        torch.autograd.backward(roots, seeds, inputs=inputs)
        return True
    _run(
        roots,
        seeds,
        False,
        False,
        (),
        allow_unreachable=True,
        accumulate_grad=True,
    )
    return True
