"""Length of a run, and the durations of its spec converted to steps."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from surefoot.components.data.feed import Feed
from surefoot.components.data.lengths import find_rhythm, resolve, to_steps
from surefoot.core.errors import SpecError
from surefoot.core.units import Duration


@dataclass(frozen=True)
class RunSchedule:
    """Length of a run, and the conversion of durations to its steps.

    `total_steps` is None if the length is a time.
    """

    length: Duration
    total_steps: int | None
    feed: Feed
    tokens_per_sample: float | None

    def duration(self, text: str) -> Duration:
        """Parse a duration of the spec; a share of the run is converted to steps.

        If the length of the run is a time, a share is converted to a time.
        """
        return resolve(Duration.parse(text), self.length, self.total_steps)

    def to_steps(self, text: str) -> int | None:
        """Return a duration of the spec in steps of this run; None for a time."""
        return to_steps(self.duration(text), self.feed, self.tokens_per_sample)

    def to_steps_or_refuse(self, text: str) -> int:
        """Return a duration of a schedule in steps. Raises SpecError for a time."""
        steps = self.to_steps(text)
        if steps is None:
            raise SpecError(
                f"a schedule cannot use the duration {text!r}",
                hint="give it in steps, epochs, samples or tokens",
            )
        return steps

    def rhythm(self, text: str) -> Callable[[int], bool]:
        """Return a function of the step number: True if the interval `text` ends with this step.

        `text` must not be a time.
        """
        return find_rhythm(self.duration(text), self.feed, self.tokens_per_sample)
