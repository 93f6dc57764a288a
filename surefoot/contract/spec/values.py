"""Types of the values of a spec, with their checks, and the base class of its tables."""

from __future__ import annotations

from collections.abc import Callable
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field

from surefoot.core.errors import SpecError
from surefoot.core.units import Duration, parse_bytes

Positive = Annotated[int, Field(gt=0)]
Count = Annotated[int, Field(ge=0, le=2**40)]
Fraction = Annotated[float, Field(ge=0, lt=1)]


def checked_by(parse: Callable[[str], object]) -> BeforeValidator:
    """Return a validator that accepts what `parse` accepts, and reports the SpecError of `parse`.

    Values that are not text, such as a number without its unit, are passed to `parse` too.
    """

    def check(given: Any) -> Any:
        try:
            parse(given)
        except SpecError as error:
            # so that pydantic adds the key
            raise ValueError(f"{error.message}; {error.hint}") from None
        return given

    return BeforeValidator(check)


def _canonical_duration(text: str) -> str:
    length = Duration.parse(text)
    if length.value == 0:
        raise ValueError(f"{text} is zero; use at least 1 step")
    return str(length)


def _some_time(text: str) -> None:
    if Duration.parse(text).unit != "s":
        raise SpecError(
            f"{text} is not a time", hint='give a time with its unit: "90 s", "10 min", "6 h"'
        )


def power_of_two(value: int) -> int:
    if value < 1 or value & (value - 1):
        raise ValueError("use a power of two: 1, 2, 4, 8 ...")
    return value


def _some_bytes(text: str) -> None:
    if parse_bytes(text) < 1:
        raise SpecError(
            f"{text} is nothing", hint='give a size with its unit: "512 B", "1.5 GiB", "80 GB"'
        )


def _some_durations(given: Any) -> None:
    for text in given if isinstance(given, tuple | list) else ():
        Duration.parse(text)


Size = Annotated[str, checked_by(_some_bytes)]
DurationText = Annotated[str, checked_by(Duration.parse), AfterValidator(_canonical_duration)]
EACH = checked_by(_some_durations)  # for a duration or a list of durations
TimeText = Annotated[str, checked_by(_some_time), AfterValidator(_canonical_duration)]
Never = Annotated[
    Literal["never"], BeforeValidator(lambda given: "never" if given is None else given)
]


def show(table: BaseModel, key: str) -> str:
    """Return `key = value` for a message; a value that was not given is called the default."""
    value = getattr(table, key)
    shown = f"{value:g}" if isinstance(value, float) else repr(value)
    return f"{key} = {shown}" + " (the default)" * (key not in table.model_fields_set)


class SpecTable(BaseModel):
    """Base class of a spec's tables: immutable, without unknown keys, type conversion or NaN."""

    model_config = ConfigDict(
        frozen=True, extra="forbid", strict=True, allow_inf_nan=False, validate_default=True
    )
