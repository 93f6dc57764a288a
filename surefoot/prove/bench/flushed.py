"""Gradient values of a spec that would underflow to zero in fp16, counted by module.

The gradients come from one forward and backward pass over the first batch in fp32.
"""

from __future__ import annotations

from collections.abc import Sequence

from surefoot.components.precision.instability import UnderflowShare, Watch
from surefoot.contract.spec import RunSpec, key_names
from surefoot.prove.bench.rehearsal import Rehearsal
from surefoot.prove.ladder import rungs


def find_flushed(spec: RunSpec, scales: Sequence[float]) -> tuple[UnderflowShare, ...]:
    """Return, by module and parameter, the share of gradient values that underflow to zero in fp16.

    The gradients are those of a mean loss, multiplied by each of the loss scales in `scales`.
    """
    wide = rungs.change(spec, {f"precision.{key}": None for key in key_names("precision")})
    with (
        Rehearsal(wide, steps=1) as rehearsal,
        Watch(rehearsal.assembly.model, scales=scales) as watch,
    ):
        rehearsal.take("backward")
    return watch.flushed()
