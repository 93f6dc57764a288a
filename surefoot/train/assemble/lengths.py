"""Conversion of the durations in a run spec to steps."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from fractions import Fraction

from surefoot.components.data.feed import Feed
from surefoot.components.data.sources.iterated import Iterated
from surefoot.contract.spec import RunSpec
from surefoot.contract.task import Source
from surefoot.core.errors import SpecError
from surefoot.core.units import Duration


def find_tokens_per_sample(source: Source) -> float | None:
    """Return the tokens per sample that a source reports; None if it reports none."""
    tokens = getattr(source, "tokens_per_sample", None)
    return float(tokens) if tokens is not None else None


def resolve(duration: Duration, length: Duration, total_steps: int | None) -> Duration:
    """Convert a percentage of the run to steps, or to seconds if the run's `length` is a time.

    Durations in other units are returned unchanged. `total_steps` is the number of steps of the
    run, or None if its length is a time.
    """
    if duration.unit != "%":
        return duration
    if total_steps is None:
        return Duration(length.value * duration.value / 100, "s")
    return Duration(duration.to_steps(1, 1, None, total_steps), "steps")


def to_steps(duration: Duration, feed: Feed, tokens_per_sample: float | None) -> int | None:
    """Convert a duration, counted from the start of the run, to steps; return None for a time.

    Raises SpecError for a duration that cannot be converted.
    """
    if duration.unit == "s":
        return None
    if duration.unit == "samples" and isinstance(feed.source, Iterated):
        raise SpecError(
            f"{duration} cannot be converted to steps: the source returns whole batches",
            hint="give it in steps or epochs",
        )
    samples = to_samples(duration, feed, tokens_per_sample)
    return (
        feed.steps_for(samples)
        if samples is not None
        else duration.to_steps(feed.steps_per_epoch or 1, feed.batch, None)
    )


def to_samples(
    duration: Duration, feed: Feed, tokens_per_sample: float | None
) -> float | Fraction | None:
    """Convert a duration in samples or tokens to samples; return None for other units.

    A duration in tokens is converted only if `tokens_per_sample` is known. Epochs are converted
    only if the batch size has a ramp; otherwise, an epoch is a fixed number of steps.
    """
    if duration.unit == "epochs" and feed.ramp:
        return Fraction(str(duration.value)) * feed.order.n
    if duration.unit == "tokens" and tokens_per_sample is not None:
        return duration.value / tokens_per_sample
    return duration.value if duration.unit == "samples" else None


def find_rhythm(
    duration: Duration, feed: Feed, tokens_per_sample: float | None
) -> Callable[[int], bool]:
    """Return a function that returns whether a recurring event is due after a step.

    The event recurs every `duration`, which must not be a time. Steps count from 1.
    """
    period = to_samples(duration, feed, tokens_per_sample) if feed.ramp else None
    if period is None:
        every = max(1, to_steps(duration, feed, tokens_per_sample) or 1)
        return lambda step: step % every == 0
    seen = feed.samples_after  # with a ramp, steps have different sizes
    return lambda step: seen(step) // period > seen(step - 1) // period


def check_ramp(spec: RunSpec, source: Source) -> None:
    """Raise SpecError if the source or a setting requires a constant batch size."""
    if isinstance(source, Iterated):
        raise SpecError(
            f"train.ramp is given, but the source returns whole batches: {source.describe()}",
            hint="leave it out",
        )
    if spec.data.last_batch == "drop":
        raise SpecError(
            'data.last_batch is "drop", and with train.ramp another part of every epoch would be '
            "left out",
            hint='use data.last_batch = "keep": the short last batch counts with its actual size',
        )
    kept = spec.checkpoint.keep_every
    if kept is not None and Duration.parse(kept).unit not in ("steps", "s", "%"):
        raise SpecError(
            (
                f"checkpoint.keep_every is {kept!r}, and with train.ramp its number of steps "
                "depends on the position in the run"
            ),
            hint="give it in steps, or as a time",
        )


def with_largest_batch(spec: RunSpec) -> RunSpec:
    """Return the spec without its batch size ramp, with the largest batch size of the ramp.

    A spec without a ramp is returned unchanged.
    """
    if not spec.train.ramp:
        return spec
    return spec.replace(train={"ramp": (), "batch": max(batch for _, batch in spec.train.ramp)})


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
