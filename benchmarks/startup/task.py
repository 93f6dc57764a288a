"""The same step as a task for `surefoot train`.

It says when the second step's forward pass begins, all of step 1 being done.
"""

from __future__ import annotations

import json
import time
from pathlib import Path

from torch import Tensor, nn

from benchmarks.step_cost.arms.surefoot_run import Costed
from benchmarks.step_cost.models import NUM_BATCHES, Batch


class Marked(Costed):
    """A workload that writes a report at its second training pass.

    Looking at the model before the run is in evaluation mode.
    """

    def __init__(self, workload: str, report: str, started_s: float) -> None:
        super().__init__(workload, NUM_BATCHES)
        self.report, self.started_s, self.name = report, started_s, workload
        self.passes = 0

    def forward(self, model: nn.Module, batch: Batch) -> Tensor:
        if model.training:
            self.passes += 1
            if self.passes == 2:
                self._write()
        return super().forward(model, batch)

    def _write(self) -> None:
        measures = {
            "cpu_s_to_step_1": time.process_time(),
            "wall_s_to_step_1": time.perf_counter() - self.started_s,
        }
        row = {
            "version": 1,
            "measures": {f"{self.name}/{key}": value for key, value in measures.items()},
        }
        Path(self.report).write_text(json.dumps(row))
