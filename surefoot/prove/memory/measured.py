"""Peak memory of a step, measured and compared with the predicted peak.

torch's profiler measures the third of three steps.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from surefoot.components.memory.measure import Rise
from surefoot.components.observe.memory_use import peak_resident_bytes
from surefoot.contract.spec import RunSpec
from surefoot.prove.bench.rehearsal import Rehearsal
from surefoot.train.preflight.predicted import held_bytes

STEPS = 3


@dataclass(frozen=True)
class MemoryComparison:
    """Measured peak of a step, largest resident size of the process, and predicted peak."""

    measured_bytes: int
    resident_bytes: int
    predicted_bytes: int | None

    @property
    def error(self) -> float | None:
        """Relative error of the prediction, (predicted - measured) / measured.

        None without a prediction.
        """
        return (
            None
            if self.predicted_bytes is None
            else (self.predicted_bytes - self.measured_bytes) / self.measured_bytes
        )

    def as_row(self) -> dict[str, Any]:
        return {
            "measured_bytes": self.measured_bytes,
            "resident_bytes": self.resident_bytes,
            "error": self.error,
        }


def compare(spec: RunSpec, predicted_bytes: int | None) -> MemoryComparison:
    """Run three steps of `spec` on the CPU, and measure the peak memory of the third."""
    with Rehearsal(spec, steps=STEPS) as rehearsal:
        assembly, rise = rehearsal.assembly, Rise()
        for _ in range(STEPS - 1):
            rehearsal.take("step")
        for update in assembly.updates:
            update.guarded.clear_gradients()  # the profiler would not see their release
        before_bytes = held_bytes(assembly)
        rise.start()
        try:
            rehearsal.take("step")
        finally:
            rise_bytes = rise.stop()
    return MemoryComparison(before_bytes + rise_bytes, peak_resident_bytes(), predicted_bytes)
