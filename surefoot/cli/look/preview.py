"""Preview of the learning-rate schedule of a spec, without torch and without reading the data.

All values are multipliers of `optim.lr`.
"""

from __future__ import annotations

import math
import re
import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, cast, get_args

from surefoot.cli.plot import overlay, side_by_side, terminal_style
from surefoot.cli.table import print_pairs, print_table
from surefoot.contract.spec import RunSpec, find_place
from surefoot.contract.spec_file import Origin
from surefoot.core.errors import SpecError, hint_nearest
from surefoot.core.schedule import plan as schedule_plan
from surefoot.core.schedule.settings import USES, Name, ScheduleSettings
from surefoot.core.units import Duration, format_number

NUM_POINTS, NUM_ROWS = 241, 11
PLOT_ROWS, PANEL_ROWS = 14, 10
UNKNOWN_LENGTH = 1000  # plotted steps of a run whose length is in tokens or seconds
FINE = 27_720  # steps of an epoch when only ratios matter: divisible by 1 to 12


@dataclass(frozen=True)
class Scale:
    """Conversion of durations in a spec, such as `3 epochs`, to steps, without reading the data.

    `assumed` has a sentence for each assumption, such as the number of steps per epoch. `in_epochs`
    is True if a duration of the run's length or schedule is in epochs.
    """

    total_steps: int
    steps_per_epoch: int
    batch: int
    tokens_per_step: float | None
    assumed: tuple[str, ...]
    in_epochs: bool

    def to_steps(self, text: str) -> int:
        return Duration.parse(text).to_steps(
            self.steps_per_epoch, self.batch, self.tokens_per_step, self.total_steps
        )


@dataclass(frozen=True)
class Preview:
    """Learning-rate schedules, evaluated at `steps` (counted from 0).

    `curves` maps the name of each schedule to its multipliers of the base learning rate `lr`.
    `told` maps each name to a description of the settings.
    """

    lr: float
    scale: Scale
    steps: tuple[int, ...]
    curves: dict[str, list[float]]
    told: dict[str, str]

    def as_row(self) -> dict[str, Any]:
        return {
            "lr": self.lr,
            "total_steps": self.scale.total_steps,
            "assumed": list(self.scale.assumed),
            "steps": list(self.steps),
            "curves": [
                {"name": name, "what": self.told[name], "multipliers": values}
                for name, values in self.curves.items()
            ],
        }


def names(text: str | None) -> list[str]:
    """Return the schedule names in the value of `--compare`, such as `step,cosine`.

    Raises:
        SpecError: if a name is unknown.
    """
    found = [part.strip() for part in (text or "").split(",") if part.strip()]
    known = get_args(Name)
    for name in found:
        if name not in known:
            raise SpecError(
                f"--compare {name!r} is not the name of a schedule",
                hint=f"{hint_nearest(name, known)}there are {', '.join(known)}",
            )
    return found


def make(spec: RunSpec, beside: Sequence[str], steps_per_epoch: int) -> Preview:
    """Evaluate the schedule of `spec`, and the schedules named in `beside` for comparison.

    Args:
        spec: spec of a run.
        beside: names of further schedules; they get settings that fit the run.
        steps_per_epoch: assumed number of steps per epoch.

    Raises:
        SpecError: if a schedule contradicts its run.
    """
    scale = _scale(spec, steps_per_epoch)
    check_every, scale = _check_every(spec, scale)
    own = spec.schedule
    chosen: dict[str, ScheduleSettings] = {"sequence" if own.sequence else own.name: own}
    for name in beside:
        chosen.setdefault(name, _make_similar_schedule(own, cast("Name", name), scale, check_every))
    last = scale.total_steps - 1
    steps = tuple(sorted({round(index * last / (NUM_POINTS - 1)) for index in range(NUM_POINTS)}))
    total = None if Duration.parse(spec.train.length).unit == "s" else scale.total_steps
    curves = {
        name: schedule_plan.preview(
            schedule_plan.build(settings, total, scale.to_steps), steps, check_every
        )
        for name, settings in chosen.items()
    }
    return Preview(
        spec.optim.lr,
        scale,
        steps,
        curves,
        {name: _describe_settings(settings) for name, settings in chosen.items()},
    )


def draw(made: Preview) -> None:
    """Print a preview as a table and a plot; print its assumptions to standard error."""
    for text in made.scale.assumed:
        print(text, file=sys.stderr)
    print(f"Multiplier of optim.lr = {format_number(made.lr)}")
    headers, rows = _table(made)
    print_table(headers, rows, right=headers, indent=2)
    print()
    at = [
        (step + 1) / made.scale.steps_per_epoch if made.scale.in_epochs else step + 1
        for step in made.steps
    ]
    unit = "epoch" if made.scale.in_epochs else "step"
    many = len(made.curves) > 1
    style = terminal_style(
        sys.stdout.encoding, log=many, x_title=unit, height=PANEL_ROWS if many else PLOT_ROWS
    )
    print((side_by_side if many else overlay)(at, made.curves, style), end="\n\n")
    print_pairs(list(made.told.items()))


def _table(made: Preview) -> tuple[list[str], list[list[str]]]:
    """Return the headers and up to `NUM_ROWS` rows of a table, evenly spaced over the run.

    If the preview has only one curve, the last column is the learning rate.
    """
    last, single = len(made.steps) - 1, len(made.curves) == 1
    rows = []
    for index in sorted({round(part * last / (NUM_ROWS - 1)) for part in range(NUM_ROWS)}):
        number, values = made.steps[index] + 1, [curve[index] for curve in made.curves.values()]
        epoch = [format_number(number / made.scale.steps_per_epoch)] if made.scale.in_epochs else []
        rate = [f"{made.lr * values[0]:.3g}"] if single else []
        rows.append([f"{number:,}", *epoch, *map(format_number, values), *rate])
    return [
        "step",
        *(["epoch"] if made.scale.in_epochs else []),
        *made.curves,
        *(["lr"] if single else []),
    ], rows


def _scale(spec: RunSpec, steps_per_epoch: int) -> Scale:
    length, assumed = Duration.parse(spec.train.length), []
    tokens_per_step: float | None = None
    if length.unit == "tokens":
        tokens_per_step = length.value / UNKNOWN_LENGTH
        assumed.append(
            f"{length} are drawn as {UNKNOWN_LENGTH:,} steps: their number depends on "
            "the data, which is not read"
        )
    if length.unit == "s":
        total = UNKNOWN_LENGTH
        assumed.append(
            f"{length} are drawn as {total:,} steps: their number is known only when the run trains"
        )
    else:
        total = length.to_steps(steps_per_epoch, spec.train.step_batch, tokens_per_step)
    in_epochs = "epochs" in _units(spec)
    if in_epochs:
        assumed.append(
            f"an epoch is drawn as {steps_per_epoch:,} steps; set their number with "
            "--steps-per-epoch"
        )
    return Scale(
        total, steps_per_epoch, spec.train.step_batch, tokens_per_step, tuple(assumed), in_epochs
    )


def _units(spec: RunSpec) -> set[str]:
    """Return the units of the durations in `train.length` and in the schedule."""
    return {Duration.parse(text).unit for text in (spec.train.length, *_durations(spec.schedule))}


def _durations(settings: ScheduleSettings) -> list[str]:
    if settings.sequence:
        return [text for piece in settings.sequence for text in _durations(piece)]
    stated = settings.used_keys()
    single = [
        stated.get(key)
        for key in ("warmup", "length", "every", "cycle", "stable", "decay_length", "timescale")
    ]
    texts = [text for text in (*single, *(stated.get("milestones") or ())) if text is not None]
    return [text for text in texts if Duration.parse(text).value]


def _check_every(spec: RunSpec, scale: Scale) -> tuple[int, Scale]:
    """Return the number of steps between two evaluations, and the scale.

    A plateau schedule depends on evaluations. If there are none, or their interval is given in
    seconds, 20 evaluations are assumed, and the returned scale lists this assumption.
    """
    text = spec.evaluate.intervals[spec.evaluate.first_split]
    if text != "never" and Duration.parse(text).unit != "s":
        return max(1, scale.to_steps(text)), scale
    every = max(1, scale.total_steps // 20)
    return every, replace(
        scale,
        assumed=(
            *scale.assumed,
            f"evaluations are drawn {every:,} steps apart: "
            + ("the spec has none" if text == "never" else "their interval is a time"),
        ),
    )


def _make_similar_schedule(
    own: ScheduleSettings, name: Name, scale: Scale, check_every: int
) -> ScheduleSettings:
    """Return settings for the schedule `name` that fit the length of the run.

    The warm-up is that of `own`, if the schedule supports one and `own` is not a sequence.
    """
    keeps_warmup = not own.sequence and name != "warmup" and "warmup" in USES[name]
    room = max(1, scale.total_steps - scale.to_steps(own.warmup))

    def share(part: float) -> str:
        return f"{max(1, math.ceil(room * part))} steps"

    milestones = (share(1 / 2), share(3 / 4)) if room > 3 else (share(1),)
    return ScheduleSettings(
        name=name,
        warmup=own.warmup if keeps_warmup else "0 steps",
        every=share(1 / 3) if name == "step" else share(1 / 50) if name == "exponential" else None,
        milestones=milestones if name == "multi_step" else None,
        cycle=share(1 / 4) if name == "cosine_restarts" else None,
        timescale=share(1 / 10) if name == "inverse_square_root" else None,
        patience=max(1, room // check_every // 8) if name == "plateau" else None,
    )


def _describe_settings(settings: ScheduleSettings) -> str:
    """Describe the settings that have an effect, for example `every 100 steps, factor 0.1`."""
    if settings.sequence:
        return "; then ".join(
            f"{piece.name} ({_describe_settings(piece)})" for piece in settings.sequence
        )
    stated = {
        key: value
        for key, value in settings.used_keys().items()
        if key != "name" and value not in (None, "0 steps")
    }
    idle = (
        ("warmup_shape", "warmup_start")
        if settings.warmup == "0 steps" and settings.name != "warmup"
        else ("warmup_start",)
    )
    if settings.warmup_shape != "exponential" or len(idle) > 1:
        stated = {key: value for key, value in stated.items() if key not in idle}
    parts = [
        f"{key} {' '.join(value) if isinstance(value, tuple) else value}"
        for key, value in stated.items()
    ]
    if settings.name == "plateau":
        parts.append("drawn as if no evaluation improved on the one before")
    return ", ".join(parts) or "no settings"


def check(origin: Origin) -> None:
    """Check that the schedule fits the length of the run.

    Without the data, this is possible only if all durations are in steps or samples, or all are in
    epochs. Otherwise nothing is checked.

    Raises:
        SpecError: if the schedule does not fit; the error names the line of the spec or the flag.
    """
    spec, units = origin.spec, _units(origin.spec)
    if units - {"steps", "samples"} and units != {"epochs"}:
        return  # this depends on the data; the run checks it before it starts
    scale = _scale(spec, FINE)
    try:
        schedule_plan.build(spec.schedule, scale.total_steps, scale.to_steps)
    except SpecError as error:
        named = re.search(r"schedule\.(\w+)", error.message)
        where = find_place(("schedule", named.group(1)) if named else ("schedule",), origin.places)
        steps_are_real = units <= {"steps", "samples"}
        message = (
            error.message
            if steps_are_real
            else f"the schedule does not fit into train.length = {spec.train.length!r}"
        )
        raise SpecError(message, hint=error.hint, where=where) from None
