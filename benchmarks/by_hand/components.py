"""What is switched on in both arms of a pair.

By which keys of the spec, and on which models there is something to switch on.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from benchmarks.step_cost.models import WORKLOADS

PARTS = 2  # microbatches of a batch that is accumulated
MODELS = {name: replace(WORKLOADS[name], warmup=8, steps=32) for name in ("convnet", "gpt")}
ALL, CONVNET, GPT = tuple(MODELS), ("convnet",), ("gpt",)


@dataclass(frozen=True)
class Component:
    """The tables of its spec, given the batch of a workload, and the models that it goes with."""

    tables: Mapping[str, Mapping[str, Any]]
    models: tuple[str, ...] = ALL

    def tables_for(self, batch: int) -> dict[str, dict[str, Any]]:
        """With PARTS put in as the microbatch of `batch`."""
        return {
            table: {key: batch // PARTS if value is PARTS else value for key, value in keys.items()}
            for table, keys in self.tables.items()
        }


COMPONENTS = {
    "fp32": Component({}),
    "bf16": Component({"precision": {"compute": "bf16"}}),
    # a processor takes ten times as long over it
    "fp16": Component({"precision": {"compute": "fp16"}}, CONVNET),
    "accumulate": Component({"train": {"microbatch": PARTS}}),
    "channels last": Component({"train": {"memory_format": "channels_last"}}, CONVNET),
    "update in backward": Component(
        {
            "memory": {"update_in_backward": True},
            "optim": {"clip": 0.0},
            "stability": {"nonfinite": "stop"},
        }
    ),
    "8-bit state": Component({"optim": {"state": "8bit"}}, GPT),
    "recompute": Component({"memory": {"activation_checkpointing": "full"}}, GPT),
    "compile blocks": Component({"compile": {"what": "blocks", "on_failure": "stop"}}, GPT),
    "compile model": Component({"compile": {"what": "model", "on_failure": "stop"}}),
}
