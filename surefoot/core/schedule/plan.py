"""Build the curve of a run from a spec's [schedule] table.

Durations are converted to steps, the warm-up is put before the curve, and contradictory settings
raise SpecError.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from itertools import pairwise
from typing import Any, Literal, final

from surefoot.core.errors import SpecError
from surefoot.core.schedule import curves
from surefoot.core.schedule import settings as schedule_settings
from surefoot.core.schedule.curves import Multiplier, Plateau
from surefoot.core.schedule.settings import ScheduleSettings
from surefoot.core.units import Duration

__all__ = ["Curve", "ScheduleSettings", "build", "check_for_ramp", "preview"]

ToSteps = Callable[[str], int]


@final
class Curve:
    """Schedule of a run: `curve(step)` is the multiplier of the base learning rate.

    It depends only on the step, unless `plateau` is set: then `observe` changes it, and a
    checkpoint stores its state.
    """

    def __init__(
        self,
        multiplier: Multiplier,
        *,
        momentum: Multiplier | None = None,
        plateau: Plateau | None = None,
    ) -> None:
        self._multiplier = multiplier
        self._momentum = momentum
        self.plateau = plateau

    def __call__(self, step: int) -> float:
        return self._multiplier(step) * (1.0 if self.plateau is None else self.plateau.multiplier)

    def momentum(self, step: int) -> float | None:
        """Return the momentum (or Adam's first beta) at `step`; None if the schedule sets none."""
        return None if self._momentum is None else self._momentum(step)

    @property
    def is_pure(self) -> bool:
        """True if the multiplier depends only on the step, so it can be computed in advance."""
        return self.plateau is None

    def state(self) -> dict[str, Any] | None:
        """Return the state that a checkpoint stores: None unless this is a plateau curve."""
        plateau = self.plateau
        return (
            None
            if plateau is None
            else {
                "best": plateau.best,
                "num_bad": plateau.num_bad,
                "multiplier": plateau.multiplier,
            }
        )

    def restore(self, state: Mapping[str, Any] | None) -> None:
        """Restore a state that `state` returned; None changes nothing."""
        if self.plateau is not None and state is not None:
            self.plateau = replace(self.plateau, **state)

    def observe(self, score: float) -> None:
        """Record the score of one more evaluation; only a plateau curve uses it.

        The score must be the same on every rank.
        """
        if self.plateau is not None:
            self.plateau = self.plateau.observe(score)


def preview(curve: Curve, steps: Sequence[int], check_every: int) -> list[float]:
    """Return the multipliers at `steps`, which must be in ascending order.

    A plateau curve is computed as if the score of its evaluations, one every `check_every` steps,
    never improved.
    """
    plateau, shown, checked = curve.plateau, Curve(curve._multiplier, plateau=curve.plateau), 0
    values = []
    for step in steps:
        while plateau is not None and (checked + 1) * check_every <= step:
            shown.observe(1.0 if plateau.mode == "min" else -1.0)
            checked += 1
        values.append(shown(step))
    return values


def build(
    settings: ScheduleSettings,
    total_steps: int | None,
    to_steps: ToSteps,
    *,
    better: Literal["lower", "higher"] = "lower",
) -> Curve:
    """Return the curve of a run.

    Args:
        settings: the [schedule] table.
        total_steps: length of the run; None if its length is a time.
        to_steps: converts a duration to steps.
        better: whether lower or higher scores are better, for a plateau whose mode is not set.

    Raises:
        SpecError: if durations contradict each other or the length of the run.
    """
    if settings.sequence:
        return Curve(_sequence(settings.sequence, total_steps, to_steps))
    curve = _Builder(settings, total_steps, to_steps)
    if settings.name == "one_cycle" and settings.value("cycle_momentum"):
        return Curve(curve.with_warmup(), momentum=curve.momentum())
    if settings.name != "plateau":
        return Curve(curve.with_warmup())
    mode = settings.mode or ("max" if better == "higher" else "min")
    plateau = Plateau(
        mode=mode,
        factor=settings.value("factor"),
        patience=settings.value("patience"),
        least=settings.floor,
        threshold=settings.value("threshold"),
    )
    return Curve(curve.with_warmup(), plateau=plateau)


def check_for_ramp(settings: ScheduleSettings) -> None:
    """Raise SpecError for a duration that is ambiguous while the batch size grows (train.ramp).

    The number of steps in an epoch, or in a number of samples, then depends on when the duration
    starts. So each duration must be in steps or in percent of the run. Only `warmup` may have any
    unit, because it starts at step 0.
    """
    pieces = settings.sequence or (settings,)
    for piece in pieces:
        for key, value in piece.used_keys().items():
            texts = (
                []
                if key == "warmup" and not settings.sequence
                else value
                if isinstance(value, tuple)
                else (value,)
            )
            wrong = [
                text
                for text in texts
                if key in schedule_settings.DURATIONS
                and text is not None
                and Duration.parse(text).unit not in ("steps", "%")
            ]
            if wrong:
                raise SpecError(
                    (
                        f"schedule.{key} is {wrong[0]!r}, and with train.ramp its number of "
                        "steps depends on the position in the run"
                    ),
                    hint=(
                        "give it in steps; only schedule.warmup, which starts at step 0, "
                        "may be in epochs or samples"
                    ),
                )


def _sequence(
    pieces: Sequence[ScheduleSettings], total_steps: int | None, to_steps: ToSteps
) -> Multiplier:
    if total_steps is None:
        raise SpecError(
            "the lengths of a sequence must add up to the run, but train.length is a time",
            hint="give train.length in steps or epochs",
        )
    lengths = [to_steps(piece.length) for piece in pieces if piece.length is not None]
    shares = [Duration.parse(piece.length) for piece in pieces if piece.length is not None]
    if len(lengths) < len(pieces):
        lengths.append(total_steps - sum(lengths))
    elif all(share.unit == "%" for share in shares) and math.isclose(
        sum(share.value for share in shares), 100
    ):
        # each is rounded up, and together they are the run
        lengths[-1] = total_steps - sum(lengths[:-1])
    if min(lengths) < 1:
        raise SpecError(
            f"schedule.sequence: a table has {min(lengths)} of the run's {total_steps} steps",
            hint="give each table at least 1 step",
        )
    made = [
        (_Builder(replace(piece, length=None), length, to_steps).with_warmup(), length)
        for piece, length in zip(pieces, lengths, strict=True)
    ]
    try:
        return curves.sequence(made, total_steps)
    except SpecError as error:
        raise SpecError(f"schedule.sequence: {error.message}", hint=error.hint) from None


class _Builder:
    """Builder of one curve from its settings; `total_steps` is None if it is unknown."""

    def __init__(
        self, settings: ScheduleSettings, total_steps: int | None, to_steps: ToSteps
    ) -> None:
        self._settings, self._to_steps = settings, to_steps
        self._total = total_steps if settings.length is None else self._steps("length")
        self._warmup = to_steps(settings.warmup)
        if self._total is not None and self._warmup > self._total:
            raise SpecError(
                (
                    f"schedule.warmup is {settings.warmup}, which ends at step {self._warmup}, "
                    f"but the run has {self._total} steps"
                ),
                hint="make the warm-up shorter, or the run longer",
            )

    def with_warmup(self) -> Multiplier:
        """Return the curve preceded by its warm-up, which rises to the first value of the curve."""
        warm, settings = self._warmup, self._settings
        body = self._body()
        if settings.length is not None and settings.name in (
            "cosine_restarts",
            "step",
            "multi_step",
            "exponential",
            "inverse_square_root",
        ):
            body = _hold_last_value(body, self._steps_after_warmup())
        if warm == 0:
            return body
        rise = partial(
            curves.warmup,
            length=warm,
            shape=settings.warmup_shape,
            start=settings.value("warmup_start"),
        )
        top = body(0)
        return lambda step: top * rise(step) if step < warm else body(step - warm)

    def momentum(self) -> Multiplier:
        value = self._settings.value
        low, high = value("momentum_low"), value("momentum_high")
        return partial(
            curves.one_cycle_momentum,
            length=self._steps_after_warmup(),
            peak=value("peak"),
            low=low,
            high=high,
            shape=value("shape"),
        )

    def _body(self) -> Multiplier:
        settings, value, floor = self._settings, self._settings.value, self._settings.floor
        match settings.name:
            case "constant" | "plateau":
                return partial(
                    curves.constant, factor=value("factor") if settings.name == "constant" else 1.0
                )
            case "linear":
                return partial(
                    curves.linear,
                    length=self._steps_after_warmup(),
                    start=value("start_factor"),
                    floor=floor,
                )
            case "cosine":
                return partial(curves.cosine, length=self._steps_after_warmup(), floor=floor)
            case "cosine_restarts":
                return partial(
                    curves.cosine_restarts,
                    first=self._steps("cycle"),
                    factor=value("cycle_factor"),
                    floor=floor,
                )
            case "step":
                return partial(
                    curves.step_decay, every=self._steps("every"), factor=value("factor")
                )
            case "multi_step":
                return partial(
                    curves.multi_step, milestones=self._milestones(), factor=value("factor")
                )
            case "exponential":
                return partial(
                    curves.exponential, factor=value("factor"), every=self._steps("every")
                )
            case "polynomial":
                return partial(
                    curves.polynomial,
                    length=self._steps_after_warmup(),
                    power=value("power"),
                    floor=floor,
                )
            case "one_cycle":
                start, final_factor = value("start_factor"), value("final_factor")
                return partial(
                    curves.one_cycle,
                    length=self._steps_after_warmup(),
                    peak=value("peak"),
                    start=start,
                    final=final_factor,
                    shape=value("shape"),
                )
            case "warmup_stable_decay":
                stable, decay = self._stable_and_decay()
                return partial(
                    curves.warmup_stable_decay,
                    warmup_length=0,
                    stable=stable,
                    decay=decay,
                    floor=floor,
                    shape=value("shape"),
                )
            case "inverse_square_root":
                return partial(curves.inverse_square_root, timescale=self._timescale())
            case "warmup":
                shape, start = settings.warmup_shape, value("warmup_start")
                return partial(
                    curves.warmup, length=self._steps_after_warmup(), shape=shape, start=start
                )

    def _steps_after_warmup(self) -> int:
        """Return the number of steps after the warm-up. Raises SpecError if it is unknown."""
        if self._total is None:
            raise SpecError(
                f"{self._settings.name} needs the number of steps, but train.length is a time",
                hint=(
                    "give schedule.length in steps or epochs, or use a curve without an end, "
                    'such as "constant"'
                ),
            )
        return self._total - self._warmup

    def _steps(self, key: str) -> int:
        text = self._settings.value(key)
        steps = self._to_steps(text)
        if steps < 1:
            raise SpecError(f"schedule.{key} is {text}", hint="give 1 step or more")
        return steps

    def _milestones(self) -> tuple[int, ...]:
        stated = self._settings.milestones or ()
        steps = tuple(self._to_steps(text) for text in stated)
        if any(after <= before for before, after in pairwise(steps)):
            raise SpecError(
                f"schedule.milestones are {', '.join(stated)}: steps {steps}",
                hint="give milestones in increasing order",
            )
        return steps

    def _timescale(self) -> int:
        if self._settings.timescale is not None:
            return self._steps("timescale")
        if self._warmup == 0:
            raise SpecError(
                "inverse_square_root has neither a warm-up nor a timescale",
                hint='give schedule.warmup = "1000 steps"',
            )
        return self._warmup

    def _stable_and_decay(self) -> tuple[int, int]:
        settings = self._settings
        stable = None if settings.stable is None else self._to_steps(settings.stable)
        decay = None if settings.decay_length is None else self._steps("decay_length")
        if stable is not None and decay is not None and self._total is None:
            return stable, decay
        room = self._steps_after_warmup()
        if decay is None:
            decay = max(1, round(room / 5)) if stable is None else room - stable
        if stable is None:
            stable = room - decay
        if stable < 0 or decay < 0 or stable + decay > room:
            raise SpecError(
                (
                    f"stable and decay_length have {max(stable, 0)} + {max(decay, 0)} steps, "
                    f"and {room} steps remain after the warm-up"
                ),
                hint="make them shorter, or leave one out",
            )
        return stable, decay


def _hold_last_value(curve: Multiplier, length: int) -> Multiplier:
    """Return a curve that stays at the last value of `curve` after `length` steps."""
    return lambda step: curve(min(step, max(length - 1, 0)))
