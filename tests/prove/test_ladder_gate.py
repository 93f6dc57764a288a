"""Tests of the parity gate.

What is equal passes, what is rounded passes as rounded, and a wrong gradient is found whatever the
loss says.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from surefoot.contract.spec import RunSpec
from surefoot.prove.ladder import LadderSettings, child, gate, parse_rung, rungs
from surefoot.prove.ladder.climb import Climb
from surefoot.prove.ladder.gate import Arrays, GateVerdict, SeedScores
from surefoot.prove.ladder.workbench import Workbench

PLANTED = Path(__file__).with_name("planted.py")
STEPS, SEEDS = 8, 4
Tensors = Callable[..., Arrays]


def spec(name: str = "Honest", **tables: dict[str, Any]) -> RunSpec:
    """The plain start of a small task with some keys changed.

    Few samples a step, so that rounding is not averaged away.
    """
    made = RunSpec.model_validate(
        {
            "task": {"use": f"{PLANTED}:{name}"},
            "train": {"batch": 32},
            "evaluate": {"every": "1000 steps"},
            "observe": {"tensorboard": False},
        }
    )
    return rungs.change(
        rungs.make_plain_spec(made),
        {f"{table}.{key}": value for table, keys in tables.items() for key, value in keys.items()},
    )


@pytest.fixture(scope="module")
def tensors(tmp_path_factory: pytest.TempPathFactory) -> Tensors:
    """What a process of the ladder takes of a spec; each spec is run once."""
    known: dict[str, Arrays] = {}

    def take(spec: RunSpec, unit: float | None = None) -> Arrays:
        key = f"{spec.model_dump(mode='json')} {spec.task.parameters} {unit}"
        if key not in known:
            found: dict[str, np.ndarray] = {}
            for number in range(SEEDS):
                folder = tmp_path_factory.mktemp("run")
                seeded = spec.replace(train={"seed": number})
                found |= child.tensors(
                    seeded, folder, steps=STEPS if number == 0 else 1, number=number, unit=unit
                )
            known[key] = found
        return known[key]

    return take


def judge(tensors: Tensors, start: RunSpec, rung: RunSpec, kind: rungs.Kind) -> GateVerdict:
    unit = gate.UNITS[rung.precision.compute if kind == "rounding" else "fp32"]
    return gate.judge(kind, tensors(start), tensors(start, unit), tensors(rung))


EQUAL: dict[str, dict[str, Any]] = {
    "itself again": {"task": {"spare": 1}},
    "the fused update": {"optim": {"fused": True}},
    "freed memory kept": {"train": {"keep_freed_memory": True}},
    "two threads": {"train": {"threads": 2}},
    "microbatches": {"train": {"microbatch": 8}},
    "sgd, fused": {"optim": {"name": "sgd", "lr": 0.1, "fused": True}},
}


@pytest.mark.quick("the fused update")
@pytest.mark.parametrize("what", EQUAL)
def test_what_changes_no_number_passes_as_nothing_and_as_rounding(
    what: str, tensors: Tensors
) -> None:
    change = EQUAL[what]
    is_sgd = "name" in change.get("optim", {})
    start = spec(optim={"name": "sgd", "lr": 0.1, "fused": False}) if is_sgd else spec()
    rung = rungs.change(
        start,
        {f"{table}.{key}": value for table, keys in change.items() for key, value in keys.items()},
    )
    for kind in ("nothing", "rounding"):
        verdict = judge(tensors, start, rung, kind)  # type: ignore[arg-type]
        assert verdict.verdict == "passes", verdict.words
        assert verdict.worst is not None
        assert verdict.worst <= 1


def test_bf16_fails_as_nothing_and_passes_as_rounding_of_its_own_format(tensors: Tensors) -> None:
    start, rung = spec(), spec(precision={"compute": "bf16"})
    assert judge(tensors, start, rung, "nothing").verdict == "fails"
    assert judge(tensors, start, rung, "rounding").verdict == "passes"
    as_fp32 = gate.judge(
        "rounding", tensors(start), tensors(start, gate.UNITS["fp32"]), tensors(rung)
    )
    assert as_fp32.verdict == "fails"  # the bound is that of the format and no general slack


@pytest.mark.quick("fp16-False", "masters-True")
@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize(
    "precision",
    [{"compute": "fp16"}, {"compute": "bf16", "weights": "bf16"}],
    ids=["fp16", "masters"],
)
def test_scaled_gradients_and_masters_pass_as_rounding_of_their_format(
    precision: dict[str, Any], fused: bool, tensors: Tensors
) -> None:
    start, rung = spec(), spec(precision=precision, optim={"fused": fused})
    verdict = judge(tensors, start, rung, "rounding")
    assert verdict.verdict == "passes", verdict.words
    assert judge(tensors, start, rung, "nothing").verdict == "fails"


@pytest.mark.parametrize("task", ["WrongGradient", "ShortGradient"])
def test_a_wrong_gradient_that_leaves_the_loss_right_fails_where_a_look_at_the_loss_passes(
    task: str, tensors: Tensors
) -> None:
    start, rung = spec(), spec(task)
    # all that a gate of the loss alone can see
    assert tensors(start)["loss/1"] == tensors(rung)["loss/1"]
    after = [float(tensors(each)[f"loss/{STEPS}"]) for each in (start, rung)]
    assert after[0] == pytest.approx(after[1], rel=0.02)  # nor do a few steps tell
    verdict = judge(tensors, start, rung, "nothing")
    assert verdict.verdict == "fails"
    assert "the gradient of 2.weight" in verdict.words


@pytest.mark.quick("127")
@pytest.mark.parametrize("number", [0, 5, 127])
def test_one_zeroed_slice_of_128_fails_even_under_the_noise_of_bf16(
    number: int, tensors: Tensors
) -> None:
    start, rung = (
        spec(),
        spec("WrongGradient", task={"slice_": number}, precision={"compute": "bf16"}),
    )
    verdict = judge(tensors, start, rung, "rounding")
    assert verdict.verdict == "fails"
    assert f"slice {number} of the gradient of 2.weight" in verdict.words


def test_updates_that_are_left_out_show_in_the_drift_of_the_weights(tensors: Tensors) -> None:
    # the optimizer is the task's own
    start, rung = (spec(name, optim={"fused": None}) for name in ("Diligent", "SkipsUpdates"))
    assert np.array_equal(tensors(start)["weight/1/0.weight"], tensors(rung)["weight/1/0.weight"])
    verdict = judge(tensors, start, rung, "nothing")
    assert verdict.verdict == "fails"
    assert f"after step {STEPS}" in verdict.words
    assert judge(tensors, start, rung, "rounding").verdict == "fails"


def test_half_of_the_batch_left_out_fails(tensors: Tensors) -> None:
    for admits in (True, False):
        assert (
            judge(tensors, spec(), spec("HalfBatch", task={"admits": admits}), "rounding").verdict
            == "fails"
        )


def test_microbatches_under_batch_norm_fail_since_its_statistics_are_others(
    tensors: Tensors,
) -> None:
    verdict = judge(tensors, spec("Norms"), spec("Norms", train={"microbatch": 8}), "nothing")
    assert verdict.verdict == "fails"


def test_another_model_fails_in_words_and_another_algorithm_is_not_judged_by_its_gradients(
    tensors: Tensors,
) -> None:
    start, other = tensors(spec()), tensors(spec("Norms"))
    assert gate.judge("nothing", start, start, other).words.endswith("missing in one of the two")
    reshaped = {**start, "batch/0/0.weight": np.zeros((2, 2))}
    assert "has the shape (2, 2)" in gate.judge("rounding", start, start, reshaped).words
    assert gate.judge("algorithm", {}, {}, {}).verdict == "does not apply"


def test_a_gradient_that_is_not_finite_fails(tensors: Tensors) -> None:
    start = tensors(spec())
    poisoned = {**start, "batch/2/0.weight": np.full_like(start["batch/2/0.weight"], np.nan)}
    for kind in ("nothing", "rounding"):
        assert (
            gate.judge(kind, start, tensors(spec(), gate.UNITS["fp32"]), poisoned).verdict
            == "fails"
        )  # type: ignore[arg-type]


def test_what_became_non_finite_on_its_way_fails_though_its_first_gradients_are_right(
    tensors: Tensors,
) -> None:
    start = tensors(spec())
    lost = {**start, "weight/8/0.weight": np.full_like(start["weight/8/0.weight"], np.nan)}
    for kind in ("nothing", "rounding"):
        assert gate.judge(kind, start, tensors(spec(), gate.UNITS["bf16"]), lost).verdict == "fails"  # type: ignore[arg-type]


def test_a_loss_whose_floor_is_nothing_by_chance_may_be_off_as_far_as_the_weights_way_is() -> None:
    generator = np.random.default_rng(0)
    first, way, noise = (generator.normal(size=(64, 8)) for _ in range(3))

    def arrays(loss: float, blur: float) -> Arrays:
        last = first + way + blur * noise
        return {
            "loss/1": np.array(2.0),
            "loss/8": np.array(loss),
            "weight/1/w": first,
            "weight/8/w": last,
            "batch/0/w": way,
        }

    start, blurred = arrays(1.5, 0.0), arrays(1.5, 1e-3)
    assert gate.judge("nothing", start, blurred, arrays(1.5 + 1e-3, 1e-3)).verdict == "passes"
    off = gate.judge("nothing", start, blurred, arrays(1.5 + 3e-3, 1e-3))
    assert off.verdict == "fails"
    assert "the loss after step 8 is off by 0.002" in off.words


@pytest.mark.parametrize("floor", ["not finite", "missing"])
def test_a_floor_that_was_not_measured_allows_nothing(floor: str, tensors: Tensors) -> None:
    start = tensors(spec())
    blurred = (
        {name: np.full_like(each, np.nan) for name, each in start.items()}
        if floor == "not finite"
        else {}
    )
    wrong = {name: 1.5 * each for name, each in start.items()}
    for kind in ("nothing", "rounding"):
        found = gate.judge(kind, start, blurred, wrong)  # type: ignore[arg-type]
        assert found.verdict == "fails"
        assert found.words.endswith("could not be measured")
        assert gate.judge(kind, start, blurred, start).verdict == "passes"  # type: ignore[arg-type]


@pytest.mark.slow
def test_a_model_that_gives_probabilities_is_blurred_within_their_range(tensors: Tensors) -> None:
    start = spec("Bounded")
    assert judge(tensors, start, spec("Bounded", task={"spare": 1}), "nothing").verdict == "passes"
    assert (
        judge(tensors, start, spec("Bounded", precision={"compute": "bf16"}), "nothing").verdict
        == "fails"
    )
    assert np.isfinite(tensors(start, gate.UNITS["bf16"])["gradient/1/0.weight"]).all()


def scores(*values: float, better: str = "higher") -> SeedScores:
    return SeedScores(dict(enumerate(values)), "accuracy", better, "%")


def test_a_score_is_worse_where_every_run_says_so_or_it_leaves_the_spread_of_the_start_s() -> None:
    start = scores(0.980, 0.984, 0.982)
    verdicts = {
        "the same": scores(0.980, 0.984, 0.982),
        "better": scores(0.990, 0.994, 0.992),
        "a little worse": scores(0.979, 0.985, 0.980),
        "worse in every run alike": scores(0.978, 0.982, 0.980),
        "far worse": scores(0.95, 0.99, 0.97),
    }
    found = {name: gate.compare_scores(start, each) for name, each in verdicts.items()}
    assert {name: each.is_worse for name, each in found.items() if each is not None} == {
        "the same": False,
        "better": False,
        "a little worse": False,
        "worse in every run alike": True,
        "far worse": True,
    }


def test_a_score_of_which_less_is_better_is_judged_the_other_way_round() -> None:
    start, lower = scores(3.0, 3.1, 3.2, better="lower"), scores(2.0, 2.1, 2.2, better="lower")
    one, other = gate.compare_scores(start, lower), gate.compare_scores(lower, start)
    assert one is not None
    assert other is not None
    assert (one.is_worse, other.is_worse) == (False, True)
    assert gate.compare_scores(start, None) is None
    assert gate.compare_scores(start, scores()) is None


def test_equal_code_with_other_seeds_is_seldom_called_worse() -> None:
    draw = np.random.default_rng(1)
    worse = 0
    for _ in range(1000):
        found = gate.compare_scores(
            scores(*draw.normal(0.9, 0.01, 3)), scores(*draw.normal(0.9, 0.01, 3))
        )
        assert found is not None
        worse += found.is_worse
    assert worse / 1000 <= 0.15  # scores of unlike seeds: the ladder's are paired, and scatter less
    assert math.isfinite(worse)


def test_a_rung_is_worse_where_the_further_seeds_say_so_too(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    start = rungs.make_plain_spec(spec())
    rung = parse_rung("half (algorithm): train.batch=32")
    draw, asked = np.random.default_rng(1), list[range]()

    monkeypatch.setattr(Workbench, "num_samples", 64, raising=False)

    def scores(bench: Workbench, name: str, changed: RunSpec, seeds: range) -> SeedScores:
        asked.append(seeds)
        lower = worse if name == rung.name else 0.0
        return SeedScores(
            {seed: draw.normal(0.9 - lower, 0.01) for seed in seeds}, "accuracy", "higher", "%"
        )

    monkeypatch.setattr(Workbench, "scores", scores)
    found = {}
    for worse in (0.0, 0.03):
        climbs = [
            Climb(start, Workbench(start, LadderSettings(), tmp_path / "out"), lambda text: None)
            for _ in range(500)
        ]
        found[worse] = (
            sum(
                score is not None and score.is_worse
                for score in (each._score(rung, start) for each in climbs)
            )
            / 500
        )
    assert found[0.0] <= 0.02
    assert found[0.03] >= 0.8
    assert set(asked) == {range(3), range(3, 9)}
