"""Quantities with units: one meaning has one text, and what has no meaning is refused in words."""

from __future__ import annotations

import math
from typing import Any, cast

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from surefoot.core.errors import SpecError
from surefoot.core.units import (
    Duration,
    Unit,
    format_bytes,
    format_count,
    format_number,
    format_percent,
    format_rate,
    format_seconds,
    parse_bytes,
)

READ = {
    "5000 steps": (5000, "steps"),
    "5_000 steps": (5000, "steps"),
    "1 step": (1, "steps"),
    "0 steps": (0, "steps"),
    "10 epochs": (10, "epochs"),
    "0.5 epoch": (0.5, "epochs"),
    "20 M tokens": (20_000_000, "tokens"),
    "20M tokens": (20_000_000, "tokens"),
    "2 B tokens": (2_000_000_000, "tokens"),
    "3k steps": (3000, "steps"),
    "10 min": (600, "s"),
    "90 s": (90, "s"),
    "2 h": (7200, "s"),
    "60000 samples": (60_000, "samples"),
    " 1e3 steps ": (1000, "steps"),
    "0.5 min": (30, "s"),
    "5 %": (5, "%"),
    "2.5%": (2.5, "%"),
    "100 %": (100, "%"),
}

REFUSED = [
    "5000",
    "",
    "steps",
    "-5 steps",
    "nan steps",
    "inf epochs",
    "1e999 steps",
    "1e99 steps",
    "0.5 steps",
    "10 parsecs",
    "5000steps now",
    "5,000 steps",
    "10 m tokens",
    "2 k s",
    "5 000 steps",
    "_5 steps",
    "5__0 steps",
    "1 M",
    "9" * 400 + " steps",
    "\u0663 steps",
    "1e-20 epochs",
    "101 %",
    "5 k%",
    "-1 %",
    "%",
]


@pytest.mark.parametrize("text", READ)
def test_a_duration_is_read_with_its_unit(text: str) -> None:
    duration = Duration.parse(text)
    assert (duration.value, duration.unit) == READ[text]


@pytest.mark.parametrize("text", REFUSED)
def test_what_is_no_duration_is_refused_with_what_was_given_and_what_is_allowed(text: str) -> None:
    with pytest.raises(SpecError) as caught:
        Duration.parse(text)
    assert caught.value.hint
    assert len(str(caught.value)) < 400


def test_a_bare_number_from_toml_is_refused_and_shown() -> None:
    with pytest.raises(SpecError, match=r'5000 is not a duration(?s:.*)"5000 steps"'):
        Duration.parse(cast(Any, 5000))


@pytest.mark.parametrize(
    ("texts", "canonical"),
    [
        (("1 epochs", "1 epoch", "1.0 epoch"), "1 epoch"),
        (("0.01 k steps", "10 steps", "1_0 step"), "10 steps"),
        (("10 min", "600 s", "600 seconds"), "600 s"),
        (("20 M tokens", "20_000_000 tokens", "0.02 B tokens"), "20 M tokens"),
        (("1 B token", "1e9 tokens"), "1 B tokens"),
        (("1000 samples", "1 k samples"), "1000 samples"),
        (("1234567 tokens",), "1234567 tokens"),
        (("0.10 epochs", "0.1 epoch"), "0.1 epochs"),
    ],
)
def test_equal_meanings_give_equal_text(texts: tuple[str, ...], canonical: str) -> None:
    assert {str(Duration.parse(text)) for text in texts} == {canonical}
    assert len({Duration.parse(text) for text in texts}) == 1


@settings(max_examples=200, deadline=None)
@given(
    st.sampled_from(["steps", "epochs", "samples", "tokens", "s", "%"]),
    st.integers(0, 10**15) | st.just(0) | st.floats(1e-9, 1e12),
    st.booleans(),
)
def test_every_duration_reads_back_from_its_own_text(
    unit: Unit, value: float, round_up: bool
) -> None:
    value = value % 100 if unit == "%" and value % 100 >= 1e-9 else 0 if unit == "%" else value
    duration = Duration(
        math.ceil(value) if round_up or unit not in ("epochs", "s", "%") else value, unit
    )
    assert Duration.parse(str(duration)) == duration


@pytest.mark.parametrize(
    ("value", "unit"),
    [
        (-1, "steps"),
        (math.nan, "epochs"),
        (math.inf, "s"),
        (True, "steps"),
        (1.5, "tokens"),
        (1, "miles"),
        (1e19, "s"),
    ],
)
def test_a_duration_built_in_python_is_checked_too(value: float, unit: Unit) -> None:
    with pytest.raises(SpecError):
        Duration(value, unit)


@pytest.mark.parametrize(
    ("text", "steps"),
    [
        ("7 steps", 7),
        ("0 steps", 0),
        ("2 epochs", 24),
        ("0.5 epochs", 6),
        ("0.01 epochs", 1),
        ("0 epochs", 0),
        ("128 samples", 1),
        ("129 samples", 2),
        ("1 sample", 1),
        ("65536 tokens", 2),
        ("65537 tokens", 3),
    ],
)
def test_a_duration_becomes_steps_rounded_up_and_at_least_one_unless_zero(
    text: str, steps: int
) -> None:
    assert (
        Duration.parse(text).to_steps(
            steps_per_epoch=12, samples_per_step=128, tokens_per_step=32768.0
        )
        == steps
    )


def test_a_decimal_share_of_an_epoch_is_taken_as_written() -> None:
    assert 0.07 * 100 > 7  # what floating point alone would round up to 8 steps
    assert Duration.parse("0.07 epochs").to_steps(100, 1, None) == 7


@pytest.mark.parametrize(
    ("text", "total", "steps"),
    [("5 %", 100, 5), ("5 %", 41, 3), ("0 %", 40, 0), ("0.1 %", 7, 1), ("100 %", 7, 7)],
)
def test_a_share_of_the_run_is_rounded_up_to_whole_steps(text: str, total: int, steps: int) -> None:
    assert Duration.parse(text).to_steps(10, 32, None, total) == steps
    with pytest.raises(SpecError, match="a share of the run"):
        Duration.parse(text).to_steps(10, 32, None)


def test_unknown_tokens_and_times_have_no_steps() -> None:
    with pytest.raises(SpecError, match="20 M tokens cannot be counted"):
        Duration.parse("20 M tokens").to_steps(10, 10, None)
    with pytest.raises(SpecError, match="600 s is a time"):
        Duration.parse("10 min").to_steps(10, 10, 10.0)


def test_sizes_in_bytes_are_read_and_printed() -> None:
    assert [parse_bytes(text) for text in ("512 B", "1.5 GiB", "80 GB", "2KiB")] == [
        512,
        3 * 2**29,
        80 * 10**9,
        2048,
    ]
    assert [
        format_bytes(value)
        for value in (0, 512, 1536, 2**20 - 1, 1023 * 2**20, 1.5 * 2**30, 141 * 2**30)
    ] == ["0 B", "512 B", "1.5 KiB", "1 MiB", "1023 MiB", "1.5 GiB", "141 GiB"]
    for text in ("1.5", "-1 GiB", "nan GiB", "1 gib", "GiB"):
        with pytest.raises(SpecError):
            parse_bytes(text)


def test_numbers_are_printed_in_the_unit_that_suits_them() -> None:
    assert [format_count(value) for value in (0, 999, 999.9, 1000, 1e6 - 1, 2.1e9, 5e15)] == [
        "0",
        "999",
        "1 k",
        "1 k",
        "1 M",
        "2.1 B",
        "5000 T",
    ]
    assert [
        format_seconds(value) for value in (0, 3e-7, 4e-5, 0.04, 1, 59.4, 60, 5400, 360_000, -0.04)
    ] == ["0 s", "0.3 us", "40 us", "40 ms", "1 s", "59.4 s", "1 min", "1.5 h", "100 h", "-40 ms"]
    assert [format_percent(value) for value in (0.994, 0.9972, 0.99995, 1.0, 0, 0.0512)] == [
        "99.4 %",
        "99.72 %",
        "99.99 %",
        "100 %",
        "0 %",
        "5.12 %",
    ]
    assert [
        format_number(value) for value in (2.302585, 164.2345, 12345.6, 1234567, 1e-5, 0, -3.0)
    ] == ["2.303", "164.2", "12346", "1.235e+06", "1e-05", "0", "-3"]
    assert format_rate(1234, "tokens") == "1.23 k tokens/s"


def test_the_unknown_prints_na_and_what_is_not_finite_is_not_hidden() -> None:
    for show in (format_bytes, format_count, format_seconds, format_number):
        assert [show(value) for value in (None, math.nan, math.inf, -math.inf)] == [
            "n/a",
            "nan",
            "inf",
            "-inf",
        ]
    assert [format_percent(value) for value in (None, math.nan)] == ["n/a", "nan %"]
    assert format_rate(None, "samples") == "n/a"
