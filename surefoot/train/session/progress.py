"""Progress of a run: its counters, scores and checks, which a checkpoint holds beside the model."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from surefoot.components import checkpoint
from surefoot.components.stability.guard import Guard
from surefoot.train.assemble import Assembly
from surefoot.train.record.scores import Scores
from surefoot.train.resume import together


class Progress:
    """Counters, scores and checks of a run, in all of its attempts.

    Attributes:
        step: Number of steps.
        num_samples: Number of samples that the steps were computed on.
        training_s: Seconds of training up to the last record of steps.
        before_s: Seconds of training in earlier attempts.
        is_resumed: Whether this attempt resumes from a checkpoint.
        other_data: Text on how the data differ from those trained on; "" if they do not.
    """

    def __init__(self, assembly: Assembly) -> None:
        self._assembly, self.scores = assembly, Scores(assembly)
        self.guard = Guard(
            assembly.spec.stability,
            min_scale=assembly.spec.precision.min_scale,
            total_steps=assembly.course.total_steps,
        )
        self.step = self.num_samples = 0
        self.training_s = self.before_s = 0.0
        self.is_resumed, self.other_data = False, ""

    def restore(self, step: int, saved: Mapping[str, Any], *, accept_data: bool) -> None:
        """Restore `saved`, the state after `step`, and the position in the data.

        Raises OtherDataError if the data differ from those trained on and `accept_data` is false.
        """
        with checkpoint.as_run_folder_errors(f"the state after step {step:,}"):
            self.step = step
            self.num_samples = int(saved["num_samples"])
            self.training_s = float(saved["clock"]["training_s"])
            self.scores.restore(saved["scores"], saved["clock"])
            self.guard.restore(saved["guard"])
            self._loader.restore(saved)
        self.other_data = together.find_data(self._assembly, step + 1, accept=accept_data)
        self.before_s, self.is_resumed = self.training_s, True

    def state(self) -> dict[str, Any]:
        """Return the counters and loader state that a checkpoint stores beside the model."""
        return {
            "num_samples": self.num_samples,
            "scores": self.scores.state(),
            "guard": self.guard.state(),
            **together.state_of(self._loader),
        }

    def score(self) -> dict[str, Any] | None:
        """Return the score of this step for its manifest; None if it was not evaluated."""
        return self.scores.score_of(self.step)

    def is_evaluation_due(self) -> bool:
        """Return whether an evaluation is due after this step, by the spec's interval or end."""
        return self.scores.is_due(self.step) or self.step == self._assembly.course.total_steps

    @property
    def _loader(self) -> Any:
        return self._assembly.engine.steps.reader.loader
