"""Interleaving: order, warm-up, arms that fail."""

from __future__ import annotations

import pytest

from surefoot.core.errors import InputError
from surefoot.trial import Arm, Trial, find_effect, plan_rounds, run_rounds
from tests.trial.arms import code_arm, telling_arm


def spinning_arm(name: str, turns: int) -> Arm:
    return code_arm(name, f"for _ in range({turns}): pass")


def trial_of(*arms: Arm, rounds: int, warmup_rounds: int = 0) -> Trial:
    outcomes = tuple(run_rounds(arms, rounds=rounds, warmup_rounds=warmup_rounds))
    return Trial(
        title="test", arms=tuple(arm.name for arm in arms), rounds=rounds, seed=0, outcomes=outcomes
    )


def test_each_round_has_every_arm_and_of_any_two_each_is_first_equally_often() -> None:
    names = ["a", "b", "c", "d"]
    planned = plan_rounds(names, 20, seed=3)
    assert all(sorted(order) == names for order in planned)
    for one in names:
        for other in names:
            if one != other:
                assert sum(order.index(one) < order.index(other) for order in planned) == 10
    assert planned == plan_rounds(names, 20, seed=3) != plan_rounds(names, 20, seed=4)


def test_a_planted_slower_arm_is_found_with_its_sign_and_an_interval_that_excludes_no_effect() -> (
    None
):
    trial = trial_of(spinning_arm("plain", 2_000_000), spinning_arm("slow", 6_000_000), rounds=6)
    effect = find_effect(trial, "slow", "plain", "process_cpu_s")
    assert effect.interval is not None
    assert effect.interval.verdict == "higher"
    assert effect.interval.low is not None
    assert effect.interval.low > 1.3
    assert effect.words.startswith("slow takes ")
    assert " more process cpu than plain" in effect.words
    back = find_effect(trial, "plain", "slow", "process_cpu_s", kind="difference")
    assert back.interval is not None
    assert back.interval.verdict == "lower"


def test_equal_arms_are_reported_as_no_effect() -> None:
    measures = "{'cost_s': 0.001 * (1 + sum(range(100)))}"
    trial = trial_of(telling_arm("a", measures), telling_arm("b", measures), rounds=6)
    effect = find_effect(trial, "b", "a", "cost_s")
    assert effect.words == "no effect of b on cost: 1 times (1 to 1), n = 6"


def test_a_crashing_arm_has_its_row_is_given_up_after_two_and_the_others_go_on() -> None:
    arms = (
        telling_arm("a", "{'cost_s': 1.0}"),
        code_arm("bad", "raise ValueError('why')"),
        telling_arm("c", "{'cost_s': 2.0}"),
    )
    trial = trial_of(*arms, rounds=6)
    assert [sum(o.arm == name for o in trial.outcomes) for name in ("a", "bad", "c")] == [6, 2, 6]
    bad = find_effect(trial, "bad", "a", "cost_s")
    assert bad.interval is None
    assert bad.words.startswith("bad was not measured: crashed: exit code 1")
    assert bad.words.endswith("ValueError: why")
    good = find_effect(trial, "c", "a", "cost_s")
    assert good.interval is not None
    assert good.interval.estimate == 2.0


def test_warm_up_rounds_are_run_and_never_compared() -> None:
    outcomes = list(run_rounds([telling_arm("a", "{'cost_s': 1.0}")], rounds=2, warmup_rounds=1))
    assert [(o.is_warmup, o.round) for o in outcomes] == [(True, 0), (False, 0), (False, 1)]
    trial = Trial(title="t", arms=("a",), rounds=2, seed=0, outcomes=tuple(outcomes))
    assert trial.by_round("a", "cost_s") == {0: 1.0, 1: 1.0}


def test_a_trial_without_arms_or_with_two_of_one_name_is_refused() -> None:
    with pytest.raises(InputError, match="is not a trial"):
        next(run_rounds([], rounds=1))
    with pytest.raises(InputError, match="name each arm differently"):
        next(run_rounds([code_arm("a", "pass"), code_arm("a", "pass")], rounds=1))
