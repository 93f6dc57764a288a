"""The [schedule] table: what each curve takes, what is refused, and what a run's steps get."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import replace
from typing import Any, get_args

import pytest

from surefoot.core.errors import SpecError
from surefoot.core.schedule import curves as schedules
from surefoot.core.schedule.plan import Curve, ScheduleSettings, build, preview
from surefoot.core.schedule.settings import USES, Name
from surefoot.core.units import Duration

PER_EPOCH = 10
TOTAL = 100

# for each curve a table that builds it
TABLES: dict[str, dict[str, Any]] = {
    "constant": {},
    "linear": {},
    "cosine": {},
    "cosine_restarts": {"cycle": "1 epoch"},
    "step": {"every": "3 epochs"},
    "multi_step": {"milestones": ("3 epochs", "80 steps")},
    "exponential": {},
    "polynomial": {},
    "one_cycle": {},
    "plateau": {},
    "warmup_stable_decay": {},
    "inverse_square_root": {"timescale": "16 steps"},
    "warmup": {"length": "50 steps"},
}


def to_steps(text: str) -> int:
    return Duration.parse(text).to_steps(PER_EPOCH, 32, 1024.0, TOTAL)


def make(total: int | None = TOTAL, **table: Any) -> Curve:
    return build(ScheduleSettings(**table), total, to_steps)


def values(curve: Curve, *steps: int) -> list[float]:
    return [curve(step) for step in steps]


def test_every_curve_has_a_name_a_row_of_keys_and_can_be_built() -> None:
    assert set(TABLES) == set(USES) == set(get_args(Name))
    for name, table in TABLES.items():
        curve = make(name=name, **table)
        assert all(0 <= curve(step) <= 1 for step in range(TOTAL + 1)), name


def test_the_default_is_a_cosine_over_the_whole_run_without_warm_up() -> None:
    curve = make()
    assert values(curve, 0, 50, 100, 1000) == pytest.approx([1, 0.5, 0, 0])
    assert curve.momentum(3) is None
    assert curve.is_pure


def test_warm_up_comes_first_and_the_curve_begins_where_it_ends() -> None:
    curve = make(warmup="1 epoch", floor=0.1)
    assert values(curve, 0, 4, 9, 10, 55, 100) == pytest.approx([0.1, 0.5, 1, 1, 0.55, 0.1])
    every_three = make(name="step", every="3 epochs", warmup="1 epoch")
    assert values(every_three, 39, 40, 69, 70) == pytest.approx([1, 0.1, 0.1, 0.01])
    half = make(name="constant", factor=0.5, warmup="4 steps")
    assert values(half, 0, 3, 4) == pytest.approx([0.125, 0.5, 0.5])


@pytest.mark.parametrize(
    "name",
    [name for name, keys in USES.items() if "warmup" in keys and name != "warmup_stable_decay"],
)
@pytest.mark.parametrize("total", [1, 2, 10])
def test_a_warm_up_as_long_as_the_run_rises_to_where_the_curve_begins(
    name: str, total: int
) -> None:
    table = {"cycle": "1 epoch"} if name == "cosine_restarts" else TABLES[name]
    curve = make(total=total, name=name, warmup=f"{total} steps", **table)
    start = make(total=total, name=name, **table)(0)
    assert values(curve, *range(total)) == pytest.approx(
        [start * (step + 1) / total for step in range(total)]
    )


def test_a_schedule_that_is_its_warm_up_ends_where_its_curve_ends() -> None:
    assert values(make(length="5 steps", warmup="5 steps"), 4, 5, 6, 50) == pytest.approx(
        [1, 1, 0, 0]
    )


def test_shares_of_the_run_are_taken_of_its_steps() -> None:
    assert values(make(warmup="10 %"), 4, 9, 10, 55) == values(
        make(warmup="10 steps"), 4, 9, 10, 55
    )
    halves = make(
        sequence=(
            ScheduleSettings(name="constant", length="33.3 %"),
            ScheduleSettings(name="linear", length="66.7 %"),
        )
    )
    assert values(halves, 33, 34, 99) == pytest.approx([1, 1, 1 - 65 / 66])
    every = make(name="step", every="25 %")
    assert values(every, 24, 25, 50, 75) == pytest.approx([1, 0.1, 0.01, 0.001])


@pytest.mark.parametrize("shape", ["linear", "cosine", "exponential"])
def test_a_warm_up_of_zero_is_none(shape: Any) -> None:
    plain, zero = make(), make(warmup="0 epochs", warmup_shape=shape)
    assert [plain(step) for step in range(TOTAL)] == [zero(step) for step in range(TOTAL)]


def test_ten_epochs_of_warm_up_and_ninety_of_cosine_peak_at_10_halve_at_55_and_end_at_100() -> None:
    curve = make(total=1000, warmup="10 epochs", floor=0.001)
    assert values(curve, 99, 100, 550, 1000) == pytest.approx([1, 1, 0.5005, 0.001])


def test_a_length_ends_the_curve_before_the_run_and_the_rate_stays() -> None:
    assert values(make(length="50 steps", warmup="10 steps"), 9, 10, 30, 50, 99) == pytest.approx(
        [1, 1, 0.5, 0, 0]
    )
    assert values(
        make(name="step", every="20 steps", factor=0.5, length="60 steps"), 39, 40, 59, 60, 99
    ) == [0.5, 0.25, 0.25, 0.25, 0.25]
    restarts = make(name="cosine_restarts", cycle="10 steps", length="20 steps")
    assert restarts(20) == restarts(99) == restarts(19) < 0.03


def test_exponential_says_its_time_scale() -> None:
    assert values(
        make(name="exponential", every="1 epoch", factor=0.25), 5, 10, 20
    ) == pytest.approx([0.5, 0.25, 0.0625])
    assert 0.1 * make(total=1000, name="exponential")(1000) == pytest.approx(0.1 * 0.95**100)


def test_warmup_stable_decay_fills_what_is_left_out() -> None:
    assert values(
        make(name="warmup_stable_decay", warmup="10 steps"), 9, 81, 82, 91, 100
    ) == pytest.approx([1, 1, 1, 0.5, 0])
    assert values(
        make(name="warmup_stable_decay", decay_length="5 epochs"), 49, 50, 75, 100
    ) == pytest.approx([1, 1, 0.5, 0])
    assert values(
        make(name="warmup_stable_decay", stable="20 steps"), 19, 20, 60, 100
    ) == pytest.approx([1, 1, 0.5, 0])
    both = make(name="warmup_stable_decay", stable="20 steps", decay_length="20 steps", floor=0.5)
    assert values(both, 20, 30, 40, 99) == pytest.approx([1, 0.75, 0.5, 0.5])


def test_inverse_square_root_takes_the_warm_up_as_its_scale_and_follows_the_run_s_step() -> None:
    curve = make(total=1000, name="inverse_square_root", warmup="25 steps")
    assert values(curve, 24, 25, 100, 400) == pytest.approx([1, 1, 0.5, 0.25])


def test_one_cycle_moves_momentum_unless_told_not_to() -> None:
    curve = make(name="one_cycle", momentum_low=0.8)
    assert [curve.momentum(step) for step in (0, 29, 99)] == pytest.approx([0.95, 0.8, 0.95])
    assert make(name="one_cycle", cycle_momentum=False).momentum(0) is None


def test_a_plateau_moves_by_the_checks_it_is_told_and_can_be_kept() -> None:
    curve = make(name="plateau", patience=2, warmup="4 steps")
    assert not curve.is_pure
    for score in (1.0, 1.0, 1.0):
        curve.observe(score)
    assert values(curve, 0, 3, 50) == pytest.approx([0.125, 0.5, 0.5])
    again = make(name="plateau", patience=2, warmup="4 steps")
    again.plateau = curve.plateau
    assert again(50) == 0.5


def test_a_plateau_without_a_mode_asks_what_the_score_says_of_itself() -> None:
    for better, factor in (("lower", 0.5), ("higher", 1.0)):
        curve = build(ScheduleSettings(name="plateau", patience=1), TOTAL, to_steps, better=better)  # type: ignore[arg-type]
        for score in (0.1, 0.2):
            curve.observe(score)
        assert curve(0) == factor
    stated = build(ScheduleSettings(name="plateau", mode="min"), TOTAL, to_steps, better="higher")
    assert stated.plateau is not None
    assert stated.plateau.mode == "min"


def test_other_curves_do_not_listen_to_scores() -> None:
    curve = make()
    curve.observe(3.0)
    assert values(curve, 0, 50) == pytest.approx([1, 0.5])


WARM_CONSTANT_COSINE = (
    ScheduleSettings(name="warmup", length="10 steps"),
    ScheduleSettings(name="constant", length="4 epochs"),
    ScheduleSettings(name="cosine", length="5 epochs", floor=0.1),
)


def test_a_sequence_of_warm_up_constant_and_cosine_joins_where_it_says() -> None:
    curve = make(sequence=WARM_CONSTANT_COSINE)
    assert values(curve, 0, 9, 10, 49, 50, 75, 100) == pytest.approx([0.1, 1, 1, 1, 1, 0.55, 0.1])
    open_ended = (*WARM_CONSTANT_COSINE[:2], ScheduleSettings(name="cosine", floor=0.1))
    again = make(sequence=open_ended)
    assert [again(step) for step in range(TOTAL + 1)] == [curve(step) for step in range(TOTAL + 1)]


def test_a_warm_up_inside_a_sequence_counts_as_part_of_its_piece() -> None:
    curve = make(
        sequence=(
            ScheduleSettings(warmup="10 steps", length="50 steps"),
            ScheduleSettings(name="constant", factor=0.2),
        )
    )
    assert values(curve, 4, 9, 10, 30, 49, 50, 99) == pytest.approx(
        [0.5, 1, 1, 0.5, schedules.cosine(39, 40), 0.2, 0.2]
    )


REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "a key of another curve": (
        {"power": 2.0},
        r"schedule.power = 2.0 is not used by cosine(?s:.*)belongs to polynomial",
    ),
    "a floor where there is none": (
        {"name": "step", "every": "1 epoch", "floor": 0.1},
        "floor = 0.1 is not used by step",
    ),
    "a warm-up before one-cycle": (
        {"name": "one_cycle", "warmup": "1 epoch"},
        "warmup = '1 epoch' is not used by one_cycle",
    ),
    "an unknown curve": ({"name": "cosin"}, "did you mean 'cosine'"),
    "an unknown shape": ({"warmup_shape": "liner"}, "did you mean 'linear'"),
    "a bare number for a duration": ({"warmup": 500}, "schedule.warmup: 500 is not a duration"),
    "a needed key left out": ({"name": "step"}, "schedule.every is not given, and step needs it"),
    "no milestones": ({"name": "multi_step", "milestones": ()}, "milestones is not given"),
    "a floor above 1": ({"floor": 1.5}, "schedule.floor is 1.5(?s:.*)from 0 to 1"),
    "a floor that is no number": ({"floor": float("nan")}, "schedule.floor is nan"),
    "a factor of the wrong type": ({"name": "constant", "factor": "1"}, "schedule.factor is '1'"),
    "half a patience": ({"name": "plateau", "patience": 1.5}, "patience is 1.5(?s:.*)whole number"),
    "a switch that is a word": (
        {"name": "one_cycle", "cycle_momentum": "no"},
        "it is true or false",
    ),
    "a shape that one-cycle lacks": (
        {"name": "one_cycle", "shape": "sqrt"},
        "use cosine or linear",
    ),
    "a sequence beside other keys": (
        {"sequence": WARM_CONSTANT_COSINE, "floor": 0.1},
        "both floor and a sequence",
    ),
    "a sequence within a sequence": (
        {"sequence": (ScheduleSettings(sequence=WARM_CONSTANT_COSINE), *WARM_CONSTANT_COSINE)},
        "contains another sequence",
    ),
    "a plateau in a sequence": (
        {"sequence": (ScheduleSettings(name="plateau"),)},
        "contains plateau, which cannot be combined",
    ),
    "a piece without a length": (
        {"sequence": (ScheduleSettings(), ScheduleSettings())},
        "has no length",
    ),
    "a sequence that is too short": (
        {"sequence": WARM_CONSTANT_COSINE[:2]},
        r"sequence: the sequence has 10 \+ 40 = 50 steps",
    ),
    "a sequence that is too long": (
        {"sequence": (*WARM_CONSTANT_COSINE, ScheduleSettings(name="constant", length="1 step"))},
        "the run has 100",
    ),
    "a sequence whose open end has no step left": (
        {"sequence": (ScheduleSettings(length="10 epochs"), ScheduleSettings())},
        "a table has 0 of the run's 100 steps",
    ),
    "a warm-up longer than the run": (
        {"warmup": "11 epochs"},
        "11 epochs, which ends at step 110, but the run has 100 steps",
    ),
    "a cycle of nothing": (
        {"name": "cosine_restarts", "cycle": "0 steps"},
        "schedule.cycle is 0 steps",
    ),
    "milestones out of order": (
        {"name": "multi_step", "milestones": ("30 steps", "3 epochs")},
        "in increasing order",
    ),
    "more decay than run": (
        {"name": "warmup_stable_decay", "stable": "60 steps", "decay_length": "50 steps"},
        "60 .* 50 steps",
    ),
    "more stable than run": (
        {"name": "warmup_stable_decay", "stable": "101 steps"},
        "100 steps remain after the warm-up",
    ),
    "an inverse square root without a scale": (
        {"name": "inverse_square_root"},
        "neither a warm-up nor a timescale",
    ),
}


@pytest.mark.parametrize("what", REFUSED)
def test_a_table_that_cannot_be_meant_is_refused(what: str) -> None:
    table, text = REFUSED[what]
    with pytest.raises(SpecError, match=text) as caught:
        make(**table)
    assert caught.value.hint


def test_a_run_of_a_time_takes_curves_without_an_end_or_with_a_stated_one() -> None:
    for name in ("linear", "cosine", "polynomial", "one_cycle", "warmup_stable_decay", "warmup"):
        with pytest.raises(SpecError, match="needs the number of steps") as caught:
            make(total=None, name=name)
        assert "schedule.length" in str(caught.value.hint)
    with pytest.raises(SpecError, match=r"add up to the run, but train\.length is a time"):
        make(total=None, sequence=WARM_CONSTANT_COSINE)
    for name in (
        "constant",
        "step",
        "multi_step",
        "exponential",
        "cosine_restarts",
        "plateau",
        "inverse_square_root",
    ):
        assert make(total=None, name=name, **TABLES[name])(0) == 1
    assert values(make(total=None, length="5 epochs"), 0, 25, 50, 999) == pytest.approx(
        [1, 0.5, 0, 0]
    )
    assert values(
        make(total=None, name="warmup_stable_decay", stable="10 steps", decay_length="10 steps"),
        15,
        20,
    ) == [0.5, 0]


def test_a_default_that_is_spelt_out_and_a_duration_written_otherwise_mean_the_same() -> None:
    assert ScheduleSettings(name="polynomial", power=1.0) == ScheduleSettings(name="polynomial")
    assert ScheduleSettings(warmup="0.01 k steps") == ScheduleSettings(warmup="10 steps")
    assert ScheduleSettings(name="exponential", every="1 epochs") == ScheduleSettings(
        name="exponential"
    )
    assert ScheduleSettings(name="exponential", factor=0.9) != ScheduleSettings(name="exponential")


def test_a_person_is_shown_the_keys_that_count_and_no_others() -> None:
    shown = ScheduleSettings(name="polynomial", warmup="1 epoch").used_keys()
    assert shown == {
        "name": "polynomial",
        "power": 1.0,
        "floor": 0.0,
        "length": None,
        "warmup": "1 epoch",
        "warmup_shape": "linear",
        "warmup_start": 0.01,
    }
    assert [
        piece["name"]
        for piece in ScheduleSettings(sequence=WARM_CONSTANT_COSINE).used_keys()["sequence"]
    ] == ["warmup", "constant", "cosine"]


def test_a_preview_shows_a_plateau_whose_checks_never_get_better_and_leaves_the_curve_alone() -> (
    None
):
    curve = make(name="plateau", patience=2)
    assert preview(curve, [0, 29, 30, 49, 50], check_every=PER_EPOCH) == [1.0, 1.0, 0.5, 0.5, 0.25]
    assert curve(99) == 1.0
    for mode in ("min", "max"):
        assert preview(make(name="plateau", patience=1, mode=mode), [20], PER_EPOCH) == [0.5]
    assert preview(make(), [0, 50], PER_EPOCH) == pytest.approx([1, 0.5])


def test_settings_are_frozen_values() -> None:
    settings = ScheduleSettings(floor=0.1)
    with pytest.raises(AttributeError):
        settings.floor = 0.2  # type: ignore[misc]
    assert replace(settings, floor=0.2) == ScheduleSettings(floor=0.2)


def test_schedules_units_and_plots_import_neither_torch_nor_numpy_nor_pydantic() -> None:
    code = (
        "import sys, surefoot.core.schedule.plan, surefoot.core.units\n"
        "sys.exit(bool({'torch', 'numpy', 'pydantic', 'rich'} & set(sys.modules)))"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
