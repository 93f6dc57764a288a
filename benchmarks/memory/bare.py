"""The bare loop: fused AdamW and clipping in place, and the weights saved at the end.

That is the least that torch itself needs.
"""

from __future__ import annotations

import sys
from pathlib import Path

import torch
import torch.nn.functional as F
from safetensors.torch import save_file
from torch.nn.utils import clip_grad_norm_
from torch.optim import AdamW

from benchmarks.memory.models import BATCH, STEPS, draw_samples, make_model
from surefoot.trial import peak_bytes, resident_bytes, write_report


def main() -> None:
    report, work = sys.argv[1:]
    torch.set_num_threads(1)
    imported_bytes = resident_bytes()
    model, (inputs, targets) = make_model(), draw_samples()
    optimizer = AdamW(model.parameters(), lr=1e-3, fused=True)
    for step in range(STEPS):
        rows = slice(step * BATCH, (step + 1) * BATCH)
        optimizer.zero_grad()
        loss = F.cross_entropy(model(inputs[rows]), targets[rows])
        loss.backward()
        clip_grad_norm_(model.parameters(), 1.0, foreach=True)
        optimizer.step()
    steps_bytes = peak_bytes() - imported_bytes
    save_file(model.state_dict(), Path(work) / "weights.safetensors")
    measures = {
        "steps_bytes": steps_bytes,
        "whole_bytes": peak_bytes() - imported_bytes,
        "imported_bytes": imported_bytes,
    }
    write_report(report, measures)


if __name__ == "__main__":
    main()
