"""What fp16 would make zero of a spec's gradients: one forward and backward pass of its first batch in fp32, counted by module."""

from __future__ import annotations

from collections.abc import Sequence

from surefoot.components.precision import Flushed, Watch
from surefoot.contract.spec import RunSpec, key_names
from surefoot.prove.bench.rehearsal import Rehearsal
from surefoot.prove.ladder import rungs


def find_flushed(spec: RunSpec, scales: Sequence[float]) -> tuple[Flushed, ...]:
    """By module and parameter: the share of the gradient values of a mean loss that fp16 makes zero at each of `scales`."""
    wide = rungs.change(spec, {f"precision.{key}": None for key in key_names("precision")})
    with Rehearsal(wide, steps=1) as rehearsal, Watch(rehearsal.assembly.model, scales=scales) as watch:
        rehearsal.take("backward")
    return watch.flushed()
