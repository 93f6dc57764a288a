"""Counters of an attached loop, which its checkpoints hold."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any


@dataclass(kw_only=True)
class LoopProgress:
    """Counters of a loop, in all of its attempts.

    Args:
        length: Number of batches in an epoch, if it is known.
        step: Number of steps.
        num_samples: Number of samples that the steps read.
        num_batches: Number of batches that the loop has read.
        num_passes: Number of whole epochs.
        training_s: Seconds of training up to the last record of steps.
        num_untimed: Number of samples in attempts that did not record the time.
        loss: Mean loss of the last record of steps.
    """

    length: int | None
    step: int = 0
    num_samples: int = 0
    num_batches: int = 0
    num_passes: int = 0
    training_s: float = 0.0
    num_untimed: int = 0
    loss: float | None = None

    def restore(self, saved: Mapping[str, Any]) -> None:
        self.step, self.num_samples = int(saved["step"]), int(saved["num_samples"])
        self.num_batches, self.num_passes = int(saved["num_batches"]), int(saved["num_passes"])
        self.training_s = float(saved.get("training_s", 0.0))
        # an older version did not save the time
        self.num_untimed = 0 if "training_s" in saved else self.num_samples

    def state(self, num_in_hand: int) -> dict[str, Any]:
        """Return the counters for a checkpoint; `num_in_hand` batches were read ahead."""
        return {
            "step": self.step,
            "num_samples": self.num_samples,
            "num_batches": self.num_batches - num_in_hand,
            "num_passes": self.num_passes,
            "training_s": self.training_s,
        }

    @property
    def epoch(self) -> float:
        return self.num_batches / self.length if self.length else float(self.num_passes)
