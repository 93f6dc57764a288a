"""What follows when a rank fails: each planted case gets its decision."""

from __future__ import annotations

import signal
from dataclasses import replace

import pytest

from surefoot.control.launch.decide import (
    Choice,
    ExitKind,
    RankFailure,
    RestartHistory,
    Rules,
    can_grow,
    choose,
    decide,
    find_numbers,
    read_code,
)
from surefoot.core.errors import InputError

FIXED = Rules(places=3, numbers=(3,))
ELASTIC = Rules(places=3, numbers=(2, 3))
EVEN = Rules(places=4, numbers=(2, 4))
# how an attempt ended, whose fault it was, and the commits that there are then
Case = tuple[ExitKind, int | None, int]


def run(
    rules: Rules, *cases: Case, course: RestartHistory | None = None
) -> tuple[list[str], RestartHistory, str]:
    """The decisions on one fault after another, what became of the places, and the last reason."""
    now, found, why = course or RestartHistory(), list[Choice](), ""
    for how, place, num_commits in cases:
        assert not found or found[-1] != Choice.STOP, "it stopped before"
        decision, now = decide(rules, now, RankFailure(how, place), num_commits)
        found.append(decision.choice)
        why = decision.why
    return [each.value for each in found], now, why


K, C, H, P = ExitKind.KILLED, ExitKind.CRASHED, ExitKind.HUNG, ExitKind.PARTED


@pytest.mark.parametrize(
    "how", [ExitKind.RAISED, ExitKind.ABORTED, ExitKind.TOLD, ExitKind.APART, ExitKind.LEFT]
)
@pytest.mark.parametrize("rules", [FIXED, ELASTIC])
def test_what_another_attempt_cannot_mend_stops_at_once(how: ExitKind, rules: Rules) -> None:
    assert run(rules, (how, 1, 5))[0] == ["stop"]


@pytest.mark.parametrize("how", [K, C, H, P])
def test_a_lost_rank_is_retried_unless_restarts_are_none(how: ExitKind) -> None:
    assert run(FIXED, (how, 1, 0))[0] == ["retry"]
    found, _, why = run(replace(FIXED, max_restarts=0), (how, 1, 9))
    assert (found, why) == (["stop"], "")


@pytest.mark.parametrize(
    ("rules", "cases", "decisions"),
    [
        # each brought a commit
        (FIXED, [(K, 1, 1), (K, 1, 2), (K, 1, 3), (K, 1, 4), (K, 1, 5)], ["retry"] * 5),
        (FIXED, [(K, 1, 0), (K, 2, 0), (H, 0, 0), (K, 1, 0)], ["retry", "retry", "retry", "stop"]),
        (
            FIXED,
            [(K, 1, 0), (K, 1, 0), (K, 1, 1), (K, 1, 1), (K, 1, 1), (K, 1, 1)],
            ["retry"] * 5 + ["stop"],
        ),
        (ELASTIC, [(K, 1, 1), (K, 1, 2)], ["retry", "leave out"]),
        (ELASTIC, [(K, 1, 1), (H, 1, 1)], ["retry", "leave out"]),  # and another way is as bad
        # another one between
        (ELASTIC, [(K, 1, 1), (K, 2, 1), (K, 1, 2)], ["retry", "retry", "retry"]),
        # nobody's fault between
        (ELASTIC, [(K, 1, 1), (P, None, 1), (K, 1, 2)], ["retry", "retry", "leave out"]),
        (ELASTIC, [(P, None, 1), (P, None, 2), (H, None, 3)], ["retry"] * 3),
        # two must remain
        (
            ELASTIC,
            [(K, 1, 1), (K, 1, 2), (K, 2, 3), (K, 2, 4)],
            ["retry", "leave out", "retry", "retry"],
        ),
        # on trial: at once
        (
            ELASTIC,
            [(K, 1, 1), (K, 1, 2), (K, 2, 9), (K, 1, 9)],
            ["retry", "leave out", "retry", "leave out"],
        ),
        (
            ELASTIC,
            [(K, 1, 0), (K, 1, 0), (K, 2, 0), (K, 2, 0)],
            ["retry", "leave out", "retry", "stop"],
        ),
        # a spare place
        (
            EVEN,
            [(K, 3, 1), (K, 3, 2), (K, 0, 3), (K, 0, 4)],
            ["retry", "leave out", "retry", "leave out"],
        ),
        (FIXED, [(C, 1, 0), (C, 1, 0)], ["retry", "retry"]),
        (FIXED, [(C, 1, 0), (C, 2, 0)], ["retry", "stop"]),  # not the fault of a place
        # the steps of the first crash were done
        (FIXED, [(C, 1, 0), (C, 2, 1)], ["retry", "retry"]),
        (FIXED, [(C, 1, 0), (K, 2, 0)], ["retry", "retry"]),
        # whoever has that sample crashes
        (ELASTIC, [(C, 1, 1), (C, 1, 1), (C, 2, 1)], ["retry", "leave out", "stop"]),
    ],
)
def test_each_planted_case_gets_its_decision(
    rules: Rules, cases: list[Case], decisions: list[str]
) -> None:
    assert run(rules, *cases)[0] == decisions


def test_a_stop_says_why() -> None:
    assert "4 consecutive attempts" in run(FIXED, *[(K, 1, 0)] * 4)[2]
    assert "slots 1 and 2 crashed" in run(FIXED, (C, 2, 0), (C, 1, 0))[2]


@pytest.mark.parametrize(
    ("code", "how"),
    [
        (3, ExitKind.RAISED),
        (2, ExitKind.RAISED),
        (7, ExitKind.RAISED),
        (70, ExitKind.RAISED),
        (8, P),
        (130, ExitKind.TOLD),
        (143, ExitKind.TOLD),
        (140, ExitKind.TOLD),
        (-signal.SIGKILL, K),
        (-signal.SIGSEGV, C),
        (-signal.SIGBUS, C),
        (-signal.SIGILL, C),
        (-signal.SIGFPE, C),
        (-signal.SIGABRT, ExitKind.ABORTED),
        (-signal.SIGXFSZ, ExitKind.ABORTED),
        (-signal.SIGTERM, ExitKind.TOLD),
        (-signal.SIGXCPU, ExitKind.TOLD),
        (-64, ExitKind.ABORTED),
    ],
)
def test_how_a_process_ended_is_read_off_its_exit_code(code: int, how: ExitKind) -> None:
    assert read_code(code) is how


def test_a_place_that_is_left_out_is_tried_again_after_three_commits_then_six_then_twelve() -> None:
    assert choose(ELASTIC, RestartHistory()) == (0, 1, 2)
    _, now, why = run(ELASTIC, (K, 1, 1), (K, 1, 2))
    assert "until 3 more checkpoints" in why
    for wait in (3, 6, 12):
        left = now.num_commits
        assert choose(ELASTIC, now) == (0, 2)
        assert [can_grow(ELASTIC, now, (0, 2), left + each) for each in (0, wait - 1, wait)] == [
            False,
            False,
            True,
        ]
        assert choose(ELASTIC, replace(now, num_commits=left + wait)) == (0, 1, 2)
        found, now, _ = run(ELASTIC, (K, 1, left + wait + 1), course=now)
        assert found == ["leave out"]


def test_a_spare_place_is_taken_before_one_that_failed_and_brings_no_growth() -> None:
    _, now, _ = run(EVEN, (K, 1, 1), (K, 1, 2))
    assert choose(EVEN, now) == (0, 2)  # 3 are there, and 3 ranks are not allowed
    _, now, _ = run(EVEN, (K, 2, 3), (K, 2, 4), course=now)
    assert choose(EVEN, now) == (0, 3)
    assert choose(EVEN, replace(now, num_commits=5)) == (0, 3)  # slot 1 is there again, on trial
    assert not can_grow(EVEN, now, (0, 3), 6)
    assert can_grow(EVEN, now, (0, 3), 7)


def test_numbers_that_a_spec_refuses_are_left_aside_and_none_at_all_is_an_error() -> None:
    def even(number: int) -> str:
        return f"{number} is odd" if number % 2 else ""

    assert find_numbers(1, 4, even) == ((2, 4), "1, 3 ranks will not be tried: 3 is odd")
    assert find_numbers(2, 2, even) == ((2,), "")
    with pytest.raises(InputError, match="3 is odd"):
        find_numbers(3, 3, even)
