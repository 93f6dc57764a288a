"""How long a run is, and what the durations of its spec are in it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from surefoot.components.data import Feed
from surefoot.components.data.lengths import find_rhythm, resolve, to_steps
from surefoot.core.errors import SpecError
from surefoot.core.units import Duration


@dataclass(frozen=True)
class Course:
    """How long the run is; `total_steps` is None where its length is a time."""

    length: Duration
    total_steps: int | None
    feed: Feed
    tokens_per_sample: float | None

    def duration(self, text: str) -> Duration:
        """A duration of the spec; a share of this run is steps of it, or a time where its length is one."""
        return resolve(Duration.parse(text), self.length, self.total_steps)

    def to_steps(self, text: str) -> int | None:
        """A duration of the spec in steps of this run; None for one in time."""
        return to_steps(self.duration(text), self.feed, self.tokens_per_sample)

    def to_steps_or_refuse(self, text: str) -> int:
        """The same for a schedule, which has no use for a time. Raises SpecError for one."""
        steps = self.to_steps(text)
        if steps is None:
            raise SpecError(f"a schedule cannot use the time {text!r}", hint="say it in steps, epochs, samples or tokens")
        return steps

    def rhythm(self, text: str) -> Callable[[int], bool]:
        """Whether what comes every so often, which is no time, is due after a step."""
        return find_rhythm(self.duration(text), self.feed, self.tokens_per_sample)
