"""Tests of claims out of paired values.

No effect where the interval holds none, bars, the record as JSON and Markdown.
"""

from __future__ import annotations

import random
from dataclasses import replace
from pathlib import Path

import pytest

from surefoot.core.errors import BadRecordError, InputError
from surefoot.trial import (
    Bar,
    Outcome,
    Trial,
    as_line,
    effect_rows,
    effects_markdown,
    find_conditions,
    find_effect,
    find_effects,
    format_measure,
    from_json,
    judge,
    read_trial,
    write_trial,
)


def trial_of(values: dict[str, list[float | None]], measure: str = "cpu_s_per_step") -> Trial:
    """A trial whose arms reported these values, round by round; None is a crash."""
    outcomes = [
        Outcome(arm=arm, round=number, ended="crashed", error="exit code 1\nValueError: why | not")
        if value is None
        else Outcome(
            arm=arm, round=number, ended="done", measures={measure: value}, facts={"torch": "2"}
        )
        for arm, row in values.items()
        for number, value in enumerate(row)
    ]
    rounds = max(map(len, values.values()))
    return Trial(
        title="t",
        arms=tuple(values),
        rounds=rounds,
        seed=0,
        conditions={"cores": "2"},
        outcomes=tuple(outcomes),
    )


def noisy(middle: float, spread: float, seed: int, count: int = 16) -> list[float | None]:
    draw = random.Random(seed)
    return [middle * (1 + spread * (draw.random() - 0.5)) for _ in range(count)]


def test_a_small_shift_inside_the_noise_is_reported_as_no_effect_in_words() -> None:
    effect = find_effect(
        trial_of({"a": noisy(1e-3, 0.2, 1), "b": noisy(1.002e-3, 0.2, 2)}),
        "b",
        "a",
        "cpu_s_per_step",
    )
    assert effect.words.startswith("no effect of b on cpu per step: ")
    assert effect_rows([effect])[0]["verdict"] == "no effect"


def test_pairing_finds_a_shift_that_a_drift_of_the_machine_hides() -> None:
    base = [1e-3 * (1 + 0.3 * number) for number in range(16)]
    trial = trial_of({"a": list(base), "b": [1.05 * value for value in base]})
    effect = find_effect(trial, "b", "a", "cpu_s_per_step")
    assert effect.words == "b takes 5 % more cpu per step than a: 1.05 times (1.05 to 1.05), n = 16"
    gained = find_effect(trial, "a", "b", "cpu_s_per_step", "difference")
    assert gained.words.startswith("a takes 163 us less cpu per step than b: -163 us (")


def test_only_rounds_that_have_both_arms_are_compared() -> None:
    trial = trial_of(
        {
            "a": [1.0, 1.0, 1.0, None, 1.0, 1.0, 1.0, 1.0],
            "b": [2.0, None, 2.0, 9.0, 2.0, 2.0, 2.0, 2.0],
        }
    )
    effect = find_effect(trial, "b", "a", "cpu_s_per_step")
    assert effect.interval is not None
    assert (effect.interval.count, effect.interval.estimate, effect.interval.high) == (6, 2.0, 2.0)
    assert effect.failure is not None


def test_fewer_than_six_rounds_make_no_claim() -> None:
    effect = find_effect(trial_of({"a": [1.0] * 5, "b": [2.0] * 5}), "b", "a", "cpu_s_per_step")
    assert effect.words == "too few rounds to say anything of b and cpu per step: 2 times, n = 5"


def test_a_bar_holds_only_when_the_whole_interval_does() -> None:
    trial = trial_of({"a": [1.0] * 16, "b": noisy(0.5, 0.02, 3), "gone": [None] * 16})
    bars = [
        Bar(arm="b", baseline="a", measure="cpu_s_per_step", most=most)
        for most in (0.55, 0.5, 0.45)
    ]
    lost = Bar(arm="gone", baseline="a", measure="cpu_s_per_step", most=1.0)
    apart = Bar(arm="b", baseline="a", measure="cpu_s_per_step", most=-0.4, kind="difference")
    assert [standing for _, _, standing in judge(trial, [*bars, lost, apart])] == [
        "holds",
        "undecided",
        "fails",
        "not measured",
        "holds",
    ]


def test_an_arm_that_the_trial_does_not_have_is_an_error() -> None:
    with pytest.raises(InputError, match="has no arm 'c'"):
        find_effect(trial_of({"a": [1.0], "b": [1.0]}), "c", "a", "cpu_s_per_step")


def test_a_trial_comes_back_from_json_as_the_same_value(tmp_path: Path) -> None:
    trial = trial_of({"a": noisy(1e-3, 0.1, 1), "b": [None, *noisy(2e-3, 0.1, 2, 15)]})
    trial = replace(
        trial,
        outcomes=(
            *trial.outcomes,
            Outcome(arm="b", round=0, ended="timed out", error="late", is_warmup=True),
        ),
    )
    write_trial(trial, tmp_path / "trial.json")
    assert read_trial(tmp_path / "trial.json") == trial
    assert [path.name for path in tmp_path.iterdir()] == ["trial.json"]
    # one line an outcome, for people and for git
    assert (tmp_path / "trial.json").read_text().count("\n") < 60
    assert find_effects(
        read_trial(tmp_path / "trial.json"), "a", ["cpu_s_per_step"]
    ) == find_effects(trial, "a", ["cpu_s_per_step"])


@pytest.mark.parametrize(
    "text",
    ["", "[]", "{}", '{"version": 2, "outcomes": []}', '{"version": 1, "outcomes": [{"arm": 1}]}'],
)
def test_what_is_no_trial_is_refused_in_words(text: str) -> None:
    with pytest.raises(BadRecordError, match="trial"):
        from_json(text)


def test_markdown_shows_each_effect_and_the_error_of_an_arm_that_failed() -> None:
    trial = trial_of({"a": [2e-3] * 6, "b": [1e-3] * 6, "bad": [None] * 2})
    text = effects_markdown(find_effects(trial, "a", ["cpu_s_per_step"]))
    assert "| cpu_s_per_step | b | 1 ms | 0.5 (0.5 to 0.5) | 6 | lower |" in text
    assert "| cpu_s_per_step | bad | n/a | n/a | 0 | not measured |" in text
    assert "ValueError: why | not" in text.partition("```text")[2]


def test_a_measure_is_shown_in_the_unit_of_its_name() -> None:
    assert format_measure("mlp/cpu_s_per_step", 2.5e-4) == "250 us"
    assert format_measure("extra_s", -2.5e-4) == "-250 us"
    assert format_measure("peak_bytes", None) == "n/a"
    assert format_measure("samples_per_cpu_s", 1e5) == "100000"


def test_an_outcome_is_one_line_and_conditions_name_machine_and_versions() -> None:
    assert "\n" not in as_line(Outcome(arm="a", round=0, ended="crashed", error="two\nlines"))
    found = find_conditions(["numpy", "no-such-package"], threads=1)
    assert found["no-such-package"] == "n/a"
    assert {"processor", "cores", "memory", "system", "python", "threads", "numpy"} <= found.keys()
