"""A spec's [schedule] table as an immutable value: the keys of each curve, defaults and checks."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import Any, ClassVar, Literal, get_args

from surefoot.core.errors import SpecError, hint_nearest
from surefoot.core.schedule.curves import DecayShape, WarmupShape
from surefoot.core.units import Duration

Name = Literal[
    "constant",
    "linear",
    "cosine",
    "cosine_restarts",
    "step",
    "multi_step",
    "exponential",
    "polynomial",
    "one_cycle",
    "plateau",
    "warmup_stable_decay",
    "inverse_square_root",
    "warmup",
]
Mode = Literal["min", "max"]

_WARM = {"warmup": "0 steps", "warmup_shape": "linear", "warmup_start": 0.01}
_SPAN = {"length": None, **_WARM}
# for each curve its keys and their defaults; None is explained at the key below
USES: Mapping[str, Mapping[str, Any]] = {
    "constant": {"factor": 1.0, **_SPAN},
    "linear": {"start_factor": 1.0, "floor": 0.0, **_SPAN},
    "cosine": {"floor": 0.0, **_SPAN},
    "cosine_restarts": {"cycle": None, "cycle_factor": 1, "floor": 0.0, **_SPAN},
    "step": {"every": None, "factor": 0.1, **_SPAN},
    "multi_step": {"milestones": None, "factor": 0.1, **_SPAN},
    "exponential": {"every": "1 epoch", "factor": 0.95, **_SPAN},
    "polynomial": {"power": 1.0, "floor": 0.0, **_SPAN},
    "one_cycle": {
        "peak": 0.3,
        "start_factor": 0.04,
        "final_factor": 4e-6,
        "shape": "cosine",
        "length": None,
        "cycle_momentum": True,
        "momentum_low": 0.85,
        "momentum_high": 0.95,
    },
    "plateau": {
        "mode": None,
        "factor": 0.5,
        "patience": 10,
        "threshold": 1e-4,
        "floor": 0.0,
        **_WARM,
    },
    "warmup_stable_decay": {
        "stable": None,
        "decay_length": None,
        "shape": "linear",
        "floor": 0.0,
        **_SPAN,
    },
    "inverse_square_root": {"timescale": None, **_SPAN},
    "warmup": {"length": None, "warmup_shape": "linear", "warmup_start": 0.01},
}
_SINGLE = ("warmup", "length", "every", "cycle", "stable", "decay_length", "timescale")
DURATIONS = (*_SINGLE, "milestones")
_RANGES: Mapping[str, tuple[float, float]] = {
    "floor": (0.0, 1.0),
    "factor": (0.0, 1.0),
    "start_factor": (0.0, 1.0),
    "final_factor": (0.0, 1.0),
    "power": (0.01, 100.0),
    "cycle_factor": (1, 1000),
    "peak": (0.001, 0.999),
    "momentum_low": (0.0, 0.9999),
    "momentum_high": (0.0, 0.9999),
    "patience": (1, 10**9),
    "threshold": (0.0, 1.0),
    "warmup_start": (1e-9, 1.0),
}
_OPTIONS = {"name": Name, "warmup_shape": WarmupShape, "shape": DecayShape, "mode": Mode}


def _means(description: str) -> dict[str, str]:
    return {"description": description}  # shown by `spec schema`


@dataclass(frozen=True, kw_only=True)
class ScheduleSettings:
    """The [schedule] table of a spec.

    A key that is None has the default value of the curve. The curve starts at the end of the
    warm-up, and its durations are counted from there. Raises SpecError for a key that the curve
    does not use.
    """

    # read by contract/spec
    __pydantic_config__: ClassVar[dict[str, Any]] = {
        "extra": "forbid",
        "strict": True,
        "allow_inf_nan": False,
    }

    name: Name = field(default="cosine", metadata=_means("Name of the curve."))
    warmup: str = field(
        default="0 steps", metadata=_means("Length of the warm-up; the curve starts after it.")
    )
    warmup_shape: WarmupShape = field(default="linear", metadata=_means("Shape of the warm-up."))
    warmup_start: float | None = field(
        default=None,
        metadata=_means("exponential warm-up: its first learning rate, as a share of optim.lr."),
    )
    floor: float = field(
        default=0.0, metadata=_means("Lowest learning rate, as a share of optim.lr.")
    )
    length: str | None = field(
        default=None,
        metadata=_means(
            "Length of warm-up and curve together; the learning rate then stays "
            "constant; none: the length of the run."
        ),
    )
    every: str | None = field(
        default=None,
        metadata=_means(
            "step: interval between two multiplications by `factor`; exponential: "
            "time in which the learning rate falls by `factor`."
        ),
    )
    factor: float | None = field(default=None, metadata=_means("Factor of the learning rate."))
    milestones: tuple[str, ...] | None = field(
        default=None,
        metadata=_means("multi_step: points at which the learning rate is multiplied by `factor`."),
    )
    power: float | None = field(
        default=None, metadata=_means("polynomial: exponent; 1 is a straight line.")
    )
    cycle: str | None = field(
        default=None, metadata=_means("cosine_restarts: length of the first cycle.")
    )
    cycle_factor: int | None = field(
        default=None,
        metadata=_means("cosine_restarts: ratio of the lengths of two successive cycles."),
    )
    peak: float | None = field(
        default=None, metadata=_means("one_cycle: position of the peak, as a share of the length.")
    )
    start_factor: float | None = field(
        default=None,
        metadata=_means(
            "linear, one_cycle: learning rate of the first step, as a share of optim.lr."
        ),
    )
    final_factor: float | None = field(
        default=None,
        metadata=_means("one_cycle: learning rate of the last step, as a share of optim.lr."),
    )
    shape: DecayShape | None = field(
        default=None, metadata=_means("one_cycle, warmup_stable_decay: shape of the decay.")
    )
    cycle_momentum: bool | None = field(
        default=None,
        metadata=_means(
            "one_cycle: momentum falls while the learning rate rises, and rises while it falls."
        ),
    )
    momentum_low: float | None = field(
        default=None, metadata=_means("one_cycle: momentum at the peak of the learning rate.")
    )
    momentum_high: float | None = field(
        default=None, metadata=_means("one_cycle: momentum at the first and the last step.")
    )
    stable: str | None = field(
        default=None,
        metadata=_means(
            "warmup_stable_decay: length of the constant phase; none: the steps "
            "left after warm-up and decay."
        ),
    )
    decay_length: str | None = field(
        default=None,
        metadata=_means(
            "warmup_stable_decay: length of the decay; none: what remains after "
            "`stable`, else a fifth of the steps after the warm-up."
        ),
    )
    timescale: str | None = field(
        default=None,
        metadata=_means(
            "inverse_square_root: timescale; the learning rate is halved after three "
            "timescales; none: the length of the warm-up."
        ),
    )
    mode: Mode | None = field(
        default=None,
        metadata=_means(
            "plateau: whether a lower or a higher score is better; none: as the metric declares."
        ),
    )
    patience: int | None = field(
        default=None,
        metadata=_means(
            "plateau: evaluations in a row without a better score before the "
            "learning rate is lowered."
        ),
    )
    threshold: float | None = field(
        default=None,
        metadata=_means("plateau: smallest relative improvement that counts as better."),
    )
    sequence: tuple[ScheduleSettings, ...] = field(
        default=(),
        metadata=_means(
            "Curves that follow each other, each with its `length`; the last one may omit it."
        ),
    )

    def __post_init__(self) -> None:
        for key in _SINGLE:
            if getattr(self, key) is not None:
                object.__setattr__(self, key, _canonical_value(key, getattr(self, key)))
        if self.milestones is not None:
            object.__setattr__(
                self,
                "milestones",
                tuple(_canonical_value("milestones", text) for text in self.milestones),
            )
        _check_values(self)
        stated = {
            each.name: getattr(self, each.name)
            for each in fields(self)
            if getattr(self, each.name) != each.default
        }
        if self.sequence:
            _check_sequence(self.sequence, stated)
        else:
            _check_used(self.name, stated)
        for key, value in stated.items():
            if USES[self.name].get(key, self) == value:
                # a given default has the same meaning, so it is the same spec
                object.__setattr__(self, key, None)

    def value(self, key: str) -> Any:
        """Return the value of `key`: the given value, or else the default of this curve."""
        stated = getattr(self, key)
        return USES[self.name][key] if stated is None else stated

    def used_keys(self) -> dict[str, Any]:
        """Return the keys that this curve uses and their values, for display."""
        if self.sequence:
            return {"sequence": tuple(piece.used_keys() for piece in self.sequence)}
        return {"name": self.name, **{key: self.value(key) for key in USES[self.name]}}


def _canonical_value(key: str, text: str) -> str:
    try:
        return str(Duration.parse(text))
    except SpecError as error:
        raise SpecError(f"schedule.{key}: {error.message}", hint=error.hint) from None


def _check_values(settings: ScheduleSettings) -> None:
    for key, options in _OPTIONS.items():
        value = getattr(settings, key)
        if value is not None and value not in get_args(options):
            hint = hint_nearest(str(value), get_args(options))
            raise SpecError(
                f"schedule.{key} is {value!r}",
                hint=f"{hint}use one of {', '.join(get_args(options))}",
            )
    for key, (low, high) in _RANGES.items():
        value, whole = getattr(settings, key), isinstance(low, int)
        if value is not None and (
            type(value) not in ((int,) if whole else (int, float)) or not low <= value <= high
        ):
            raise SpecError(
                f"schedule.{key} is {value!r}",
                hint=f"it is a {'whole ' if whole else ''}number from {low:g} to {high:g}",
            )
    if settings.cycle_momentum not in (None, True, False):
        raise SpecError(
            f"schedule.cycle_momentum is {settings.cycle_momentum!r}", hint="it is true or false"
        )
    if settings.name == "one_cycle" and settings.shape == "sqrt":
        raise SpecError(
            "schedule.shape is 'sqrt', which one_cycle does not support",
            hint="use cosine or linear",
        )
    for key in {"cosine_restarts": ["cycle"], "step": ["every"], "multi_step": ["milestones"]}.get(
        settings.name, []
    ):
        if not getattr(settings, key):
            raise SpecError(
                f"schedule.{key} is not given, and {settings.name} needs it",
                hint='for example "30 epochs"',
            )


def _check_used(name: str, stated: Mapping[str, Any]) -> None:
    for key, value in stated.items():
        if key not in ("name", *USES[name]):
            users = ", ".join(each for each, keys in USES.items() if key in keys)
            raise SpecError(
                f"schedule.{key} = {value!r} is not used by {name}",
                hint=f"{key} belongs to {users}; {name} uses {', '.join(USES[name])}",
            )


def _check_sequence(pieces: Sequence[ScheduleSettings], stated: Mapping[str, Any]) -> None:
    beside = [key for key in stated if key != "sequence"]
    if beside:
        raise SpecError(
            f"[schedule] has both {beside[0]} and a sequence",
            hint="move it into one of the tables of schedule.sequence",
        )
    for piece in pieces:
        if piece.sequence or piece.name in ("plateau", "one_cycle"):
            what = "another sequence" if piece.sequence else piece.name
            raise SpecError(
                f"schedule.sequence contains {what}, which cannot be combined with other curves",
                hint="leave the other curves out",
            )
    if any(piece.length is None for piece in pieces[:-1]):
        raise SpecError(
            "a table of schedule.sequence other than the last has no length",
            hint="give each table a length; only the last may omit it",
        )
