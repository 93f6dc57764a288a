"""Tests of keys without effect.

Refused where they are given, left out where something later has made them so, kept in what was
recorded.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any, get_args

import pytest
import torch
from torch import Tensor

from surefoot import RunSpec
from surefoot.cli.left_out import DECIDED
from surefoot.components.optim.average import WeightAverage
from surefoot.components.optim.build import build as build_optimizer
from surefoot.components.optim.groups import GroupedParameter
from surefoot.components.optim.update import GuardedUpdate
from surefoot.contract import spec_file
from surefoot.contract.spec import OptimTable, find_idle_keys, formulas
from surefoot.contract.spec.effects import NEEDS, keys_of
from surefoot.core.errors import SpecError
from surefoot.core.schedule.plan import build as build_schedule
from surefoot.core.units import Duration
from surefoot.train.run import Run
from tests.cli.test_what_may_change import EDITS
from tests.train.small import Small, spec

VALUES = {key: value for key, (value, _) in EDITS.items()} | {
    "schedule.warmup_shape": "cosine",
    "schedule.warmup_start": 0.5,
    "schedule.momentum_low": 0.7,
    "schedule.momentum_high": 0.8,
    "optim.trust_coefficient": 0.5,
}
CHOICES: dict[str, tuple[Any, ...]] = {
    "optim.name": get_args(OptimTable.model_fields["name"].annotation),
    "optim.ema": (None, 0.9),
    "optim.reference_batch": (None, 64),
    "data.on_bad": ("stop", "skip"),
    "data.shuffle": (True, False),
    "loader.workers": (0, 2, "auto"),
    "loader.kind": ("auto", "thread", "process"),
    "schedule.name": ("cosine", "one_cycle", "warmup"),
    "schedule.cycle_momentum": (None, True, False),
    "schedule.warmup": ("0 steps", "5 steps"),
    "schedule.warmup_shape": ("linear", "cosine", "exponential"),
    "precision.weights": ("fp32", "bf16"),
    "precision.compute": ("fp32", "tf32", "bf16", "fp16", "float8", "auto"),
    "memory.activation_checkpointing": ("none", "full"),
    "evaluate.every": ("1 epoch", "never"),
    "layout.shard": (1, 2),
    "layout.zero_stage": (1, 2, 3),
    "layout.compress": ("none", "bf16", "powersgd"),
    "compile.what": ("none", "blocks", "model", "step"),
    "nccl.infiniband": (None, True, False),
    "stability.nonfinite": ("skip", "stop"),
}
DEFAULTS = RunSpec().model_dump(mode="python") | {"schedule": vars(RunSpec().schedule)}


def surroundings(key: str) -> Iterator[tuple[dict[str, dict[str, Any]], bool]]:
    """Every combination of what `key` depends on, as tables, and whether the key has an effect."""
    needs = [need for need in NEEDS if key in need.keys]
    others = sorted(
        {when.key for need in needs for when in need.any_of}
        | ({"schedule.name"} if key.startswith("schedule") else set())
    )
    for values in itertools.product(*(CHOICES[other] for other in others)):
        chosen = dict(zip(others, values, strict=True))
        tables: dict[str, dict[str, Any]] = {}
        for other, value in chosen.items():
            table, name = other.split(".")
            if value is not None:
                tables.setdefault(table, {})[name] = value
        if chosen.get("precision.weights") == "bf16":
            tables["precision"]["compute"] = "bf16"
        holds = all(any(when.holds(chosen.__getitem__) for when in need.any_of) for need in needs)
        try:
            RunSpec(**tables)
        except SpecError:
            continue  # no spec by itself
        yield tables, holds


def with_key(tables: dict[str, dict[str, Any]], key: str, value: Any) -> dict[str, dict[str, Any]]:
    table, name = key.split(".")
    return {**tables, table: {**tables.get(table, {}), name: value}}


def find_refusal(tables: dict[str, dict[str, Any]]) -> SpecError | None:
    try:
        RunSpec(**tables)
    except SpecError as error:
        return error
    return None


@pytest.mark.parametrize("key", sorted(keys_of()))
def test_a_key_is_refused_by_name_just_where_it_has_no_effect(key: str) -> None:
    table, name = key.split(".")
    seen = set()
    for tables, has_effect in surroundings(key):
        RunSpec(**with_key(tables, key, DEFAULTS[table][name]))  # its default is never refused
        refused = find_refusal(with_key(tables, key, VALUES[key]))
        if refused is not None and "has no effect" not in refused.message:
            continue  # of another curve, say
        assert (refused is None) is has_effect, (tables, refused)
        if refused is not None:
            assert refused.message.startswith(f"{key} = ")
            assert refused.hint is not None
            assert refused.hint.startswith(f"leave {key} out, or set ")
        seen.add(has_effect)
    assert seen == {True, False}


def test_the_table_speaks_of_keys_that_there_are() -> None:
    known = {f"{table}.{name}" for table, keys in DEFAULTS.items() for name in keys}
    assert keys_of() | {when.key for need in NEEDS for when in need.any_of} <= known
    assert {key for keys in DECIDED.values() for key in keys} <= known


@pytest.mark.parametrize(
    ("tables", "message", "hint"),
    [
        (
            {"optim": {"momentum": 0.5}},
            'optim.momentum = 0.5 has no effect with optim.name = "adamw", its default',
            'leave optim.momentum out, or set optim.name to "sgd", "muon" or "lars"',
        ),
        (
            {"optim": {"name": "sgd", "betas": [0.5, 0.9]}},
            'optim.betas = [0.5, 0.9] has no effect with optim.name = "sgd"',
            'leave optim.betas out, or set optim.name to "adam", "adamw", "muon" or "lamb"',
        ),
        (
            {"optim": {"ema_ramp": False}},
            "optim.ema_ramp = false has no effect without optim.ema",
            "leave optim.ema_ramp out, or set optim.ema",
        ),
        (
            {"memory": {"blocks": ["a"]}},
            (
                'memory.blocks = ["a"] has no effect with memory.activation_checkpointing = '
                '"none", its default and with layout.shard = 1, its default'
            ),
            (
                "leave memory.blocks out, or set memory.activation_checkpointing to another value "
                'than "none", or set layout.shard to another value than 1'
            ),
        ),
    ],
)
def test_the_refusal_says_which_value_is_in_the_way_and_what_to_set(
    tables: dict[str, Any], message: str, hint: str
) -> None:
    with pytest.raises(SpecError) as refused:
        RunSpec(**tables)
    assert (refused.value.message, refused.value.hint) == (message, hint)


# ---- what comes later overrules


def write(path: Path, text: str) -> str:
    path.write_text(text)
    return str(path)


FILE = (
    '[task]\nuse = "digits"\n[optim]\nname = "sgd"\nmomentum = 0.5\nnesterov = true\n'
    '[compile]\nwhat = "model"\ndynamic = true\n'
)


@pytest.mark.parametrize("how", ["a flag", "a variant", "replace"])
def test_what_a_later_value_leaves_without_effect_is_left_out(how: str, tmp_path: Path) -> None:
    given = write(tmp_path / "mine.toml", FILE)
    if how == "a flag":
        made = spec_file.read(
            given, [("optim.name", "adamw", "--set"), ("compile.what", "none", "--set")]
        )
        assert "optim.momentum" not in made.places
        changed = made.spec
    elif how == "a variant":
        changed = spec_file.read(
            write(
                tmp_path / "other.toml",
                'base = "mine.toml"\n[optim]\nname = "adamw"\n[compile]\nwhat = "none"\n',
            )
        ).spec
    else:
        changed = spec_file.read(given).spec.replace(
            optim={"name": "adamw"}, compile={"what": "none"}
        )
    assert (changed.optim.momentum, changed.optim.nesterov, changed.compile.dynamic) == (
        0.9,
        False,
        None,
    )
    assert find_idle_keys(changed.as_tables()) == set()


def test_what_is_given_beside_the_value_that_makes_it_idle_is_refused_with_its_place(
    tmp_path: Path,
) -> None:
    given = write(tmp_path / "mine.toml", FILE)
    with pytest.raises(
        SpecError, match=r"optim\.trust_coefficient = 0\.5 has no effect"
    ) as refused:
        spec_file.read(given, [("optim.trust_coefficient", 0.5, "--set optim.trust_coefficient")])
    assert refused.value.where == "--set optim.trust_coefficient"
    variant = write(
        tmp_path / "other.toml", 'base = "mine.toml"\n[optim]\nname = "adamw"\nmomentum = 0.7\n'
    )
    with pytest.raises(SpecError, match=r"optim\.momentum = 0\.7 has no effect") as refused:
        spec_file.read(variant)
    assert refused.value.where == "other.toml:4"
    with pytest.raises(SpecError, match=r"optim\.momentum = 0\.7 has no effect"):
        spec_file.read(given).spec.replace(optim={"name": "adamw", "momentum": 0.7})


@pytest.mark.parametrize(
    "idle",
    [{"warmup_shape": "exponential"}, {"warmup_start": 0.1, "warmup": "5 %"}],
    ids=["shape", "start"],
)
def test_a_curve_of_a_sequence_has_no_key_without_effect_and_a_run_of_before_is_still_read(
    idle: dict[str, Any],
) -> None:
    tables = {
        "schedule": {
            "sequence": [{"name": "constant", "length": "50 %"}, {"name": "linear", **idle}]
        }
    }
    with pytest.raises(
        SpecError, match=r"table 2 of schedule\.sequence: schedule\.warmup_s\w+ = .* has no effect"
    ):
        RunSpec.model_validate(tables)
    recorded = RunSpec.of_record(tables)
    assert recorded.replace(train={"batch": 8}).schedule.sequence[1].warmup_shape == idle.get(
        "warmup_shape", "linear"
    )
    used = {"warmup": "5 %", "warmup_shape": "exponential", "warmup_start": 0.1}
    assert (
        RunSpec.model_validate({"schedule": {"sequence": [{"name": "linear", **used}]}})
        .schedule.sequence[0]
        .warmup_start
        == 0.1
    )


def test_a_command_that_sets_a_key_itself_takes_what_has_an_effect_beside_its_values(
    tmp_path: Path,
) -> None:
    given = write(tmp_path / "mine.toml", '[task]\nuse = "digits"\n[loader]\nkind = "process"\n')
    with pytest.raises(SpecError, match=r"loader\.kind"):
        spec_file.read(given)
    found = spec_file.read(given, decided=DECIDED["tune-loader"]).spec
    assert found.replace(loader={"workers": 2}).loader.kind == "process"
    assert spec_file.read_written(write(tmp_path / "trial.toml", spec_file.write(found))) == found


def test_a_run_of_an_earlier_version_whose_spec_has_such_keys_is_resumed_as_it_is(
    tmp_path: Path,
) -> None:
    old = RunSpec.of_record(
        {
            **spec(8, checkpoint={"every": "2 steps", "background": False}).as_tables(),
            "optim": {"momentum": 0.5},
        }
    )
    assert old.optim.momentum == 0.5
    with Run(old, Small(), folder=tmp_path / "run", quiet=True) as run:
        for report in run.steps():
            if report.step == 4:
                break
    kept = spec_file.read_of_run(tmp_path / "run", checks_task=False).spec
    assert kept.optim.momentum == 0.5
    with Run(kept, Small(), folder=tmp_path / "run", quiet=True) as run:
        assert [report.step for report in run.steps()] == [5, 6, 7, 8]
    with pytest.raises(SpecError, match=r"optim\.trust_coefficient"):
        spec_file.read_of_run(
            tmp_path / "run", [("optim.trust_coefficient", 0.5, "--set")], checks_task=False
        )


# ---- what the task builds itself


class OwnGroups(Small):
    def parameter_groups(self, model: Any) -> list[dict[str, Any]]:
        return [{"params": list(model.parameters())}]


class OwnOptimizer(Small):
    def optimizer(self, groups: Any) -> torch.optim.Optimizer:
        return torch.optim.SGD(groups, lr=0.1)


@pytest.mark.parametrize(
    ("task", "table", "says"),
    [
        (
            OwnGroups(),
            {"no_decay": ["0.*"]},
            r"optim\.no_decay has no effect: the task defines parameter_groups",
        ),
        (
            OwnGroups(),
            {"lr_multipliers": {"0.*": 0.5}},
            r"optim\.lr_multipliers has no effect: the task defines parameter_groups",
        ),
        (
            OwnOptimizer(),
            {"fused": False},
            r"optim\.fused is given, but the task builds the optimizer",
        ),
    ],
)
def test_what_the_task_builds_itself_is_not_set_in_the_spec(
    task: Any, table: dict[str, Any], says: str, tmp_path: Path
) -> None:
    with (
        pytest.raises(SpecError, match=says),
        Run(spec(2, optim=table), task, folder=tmp_path / "run", quiet=True),
    ):
        pass
    assert not (tmp_path / "run").exists()


# ---- formulas


NAMES = {"sqrt": torch.sqrt, "norm": torch.linalg.vector_norm, "min": min, "max": max}
TABLES: dict[str, dict[str, Any]] = {
    "sgd": {"name": "sgd", "momentum": 0.8},
    "sgd, nesterov": {"name": "sgd", "momentum": 0.8, "nesterov": True},
    "adam": {"name": "adam", "betas": (0.8, 0.95), "eps": 1e-3},
    "adamw": {"name": "adamw", "betas": (0.8, 0.95), "eps": 1e-3},
    "lars": {"name": "lars", "trust_coefficient": 0.1},
    "lamb": {"name": "lamb", "betas": (0.8, 0.95), "eps": 1e-3},
}


def run_formula(text: str, scope: dict[str, Any]) -> None:
    exec(text, {"__builtins__": {}}, scope)


@pytest.mark.parametrize("fused", [True, False])
@pytest.mark.parametrize("name", TABLES)
def test_a_plain_loop_of_the_formulas_that_spec_show_prints_trains_the_same(
    name: str, fused: bool
) -> None:
    made = RunSpec(
        optim={
            **TABLES[name],
            "lr": 0.1,
            "weight_decay": 0.1,
            "clip": 0.7,
            "ema": 0.9,
            "fused": fused,
        }
    )
    (update,) = [each.text for each in formulas.find(made) if each.key == "optim.name"]
    (clip,) = [each.text for each in formulas.find(made) if each.key == "optim.clip"]
    (average,) = [each.text for each in formulas.find(made) if each.key == "optim.ema"]
    draw = torch.Generator().manual_seed(0)
    start = torch.randn(4, 3, generator=draw, dtype=torch.float64)
    weight = torch.nn.Parameter(start.clone())
    built = build_optimizer(made.optim, [GroupedParameter("weight", weight, "matrix")])
    guarded = GuardedUpdate(built.optimizers, clip=made.optim.clip)
    mean = WeightAverage([weight], 0.9)
    zero: Tensor = torch.zeros_like(start)
    scope: dict[str, Any] = {
        **NAMES,
        **vars(made.optim),
        "w": start,
        "v": zero,
        "m": zero,
        "s": zero,
        "average": start,
    }
    for step in range(5):
        gradient = torch.randn(4, 3, generator=draw, dtype=torch.float64)
        weight.grad = gradient.clone()
        guarded.step_if_finite()
        mean.update()
        scope |= {
            "g": gradient,
            "gradients": gradient,
            "t": torch.tensor(step + 1.0, dtype=torch.float64),
            "n": step,
        }
        for text in (clip, update, average):
            run_formula(text, scope)
        torch.testing.assert_close(weight.detach(), scope["w"], rtol=1e-6, atol=1e-7)
        torch.testing.assert_close(mean.averages[0], scope["average"], rtol=1e-6, atol=1e-7)


CURVES: dict[str, dict[str, Any]] = {
    "constant": {"factor": 0.5},
    "linear": {"start_factor": 0.5, "floor": 0.1},
    "cosine": {"floor": 0.1},
    "step": {"every": "7 steps"},
    "exponential": {"every": "3 steps"},
    "polynomial": {"power": 2.0, "floor": 0.1},
    "inverse_square_root": {"timescale": "5 steps"},
}


@pytest.mark.parametrize("name", CURVES)
def test_the_formulas_of_the_curves_give_the_learning_rates_of_a_run(name: str) -> None:
    made = RunSpec(schedule={"name": name, "warmup": "5 steps", **CURVES[name]})
    curve, warm = [each.text for each in formulas.find(made) if each.key.startswith("schedule.")]
    expected = build_schedule(made.schedule, 40, lambda length: int(Duration.parse(length).value))
    used = {key: _number(value) for key, value in made.schedule.used_keys().items()}
    for step in range(40):
        own = {"lr": 1.0, "t": step + 1, "step": max(0, step - 5), "length": 35}
        scope = {**used, **own, "pi": math.pi, "cos": math.cos, "sqrt": math.sqrt, "min": min}
        run_formula(curve, scope)
        run_formula(warm, scope)
        assert scope["lr"] == pytest.approx(expected(step)), step


def _number(value: Any) -> Any:
    return (
        Duration.parse(value).value if isinstance(value, str) and value.endswith("steps") else value
    )
