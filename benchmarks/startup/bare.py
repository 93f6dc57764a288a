"""A bare script that does the first step of a workload and says when.

Standard library, torch and the model, nothing else.
"""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path

import torch
from torch.nn.utils import clip_grad_norm_
from torch.optim import AdamW

from benchmarks.step_cost.models import CLIP, LEARNING_RATE, WORKLOADS, mean_loss


def main() -> None:
    name, report, started_s = sys.argv[1:]
    torch.set_num_threads(1)
    workload = WORKLOADS[name]
    model, batches = workload.model(), workload.batches()
    optimizer = AdamW(model.parameters(), lr=LEARNING_RATE)
    inputs, targets = batches[0]
    loss = mean_loss(model(inputs), targets)
    loss.backward()
    clip_grad_norm_(model.parameters(), CLIP)
    optimizer.step()
    measures = {
        "cpu_s_to_step_1": time.process_time(),
        "wall_s_to_step_1": time.perf_counter() - float(started_s),
    }
    Path(report).write_text(
        json.dumps(
            {"version": 1, "measures": {f"{name}/{key}": value for key, value in measures.items()}}
        )
    )


if __name__ == "__main__":
    main()
