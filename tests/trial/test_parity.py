"""Tests of parity.

What differs is found, what only two equal runs explain is not called equal, and real spec arms are
compared.
"""

from __future__ import annotations

import time
from dataclasses import replace
from functools import reduce
from pathlib import Path

import numpy as np
import pytest

from surefoot.contract import events
from surefoot.contract.spec import RunSpec
from surefoot.core.errors import BadRecordError, InputError
from surefoot.trial import (
    child,
    compare_arms,
    compare_arrays,
    read_arrays,
    read_report,
    spec_arm,
    write_report,
)
from tests.cli import past_runs
from tests.trial.arms import code_arm, telling_arm

TASK = """
import torch, torch.nn.functional as F
from torch import nn
from surefoot.contract.task import Loss

class Tiny:
    def __init__(self, zeroed: bool = False) -> None:
        self.zeroed = zeroed
    def model(self):
        made = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 3))
        if self.zeroed:  # a gradient that loses one slice on its way, while the loss stays right
            made[0].weight.register_hook(
                lambda grad: torch.cat([torch.zeros_like(grad[:1]), grad[1:]])
            )
        return made
    def data(self, split):
        draw = torch.Generator().manual_seed(0)
        return torch.randn(64, 4, generator=draw), torch.randint(0, 3, (64,), generator=draw)
    def forward(self, model, batch):
        return model(batch[0])
    def loss(self, output, batch):
        return Loss.sum(F.cross_entropy(output, batch[1], reduction="sum"), len(batch[1]))
"""


def arrays(seed: int = 0) -> dict[str, np.ndarray]:
    draw = np.random.default_rng(seed)
    return {
        "loss/1": np.array([2.3]),
        "gradient/1/a": draw.standard_normal((8, 4)).astype(np.float32),
        "gradient/1/b": draw.standard_normal(8).astype(np.float32),
        "weight/1/a": draw.standard_normal((8, 4)).astype(np.float32),
    }


def changed(name: str, value: np.ndarray) -> dict[str, np.ndarray]:
    return {**arrays(), name: value}


def test_one_zeroed_slice_of_one_gradient_is_caught_although_the_loss_is_right() -> None:
    wrong = arrays()["gradient/1/a"].copy()
    wrong[2, 1:3] = 0
    gaps = compare_arrays(arrays(), arrays(), changed("gradient/1/a", wrong))
    assert (
        [gap.name for gap in gaps if gap.verdict != "equal"] == ["gradient/1/a"] == [gaps[0].name]
    )
    assert gaps[0].verdict == "differs"


def test_rounding_is_equal_and_more_than_the_tolerance_is_not() -> None:
    close = arrays()["weight/1/a"] * np.float32(1 + 1e-6)
    far = arrays()["weight/1/a"] * np.float32(1 + 1e-4)
    assert {
        gap.verdict for gap in compare_arrays(arrays(), arrays(), changed("weight/1/a", close))
    } == {"equal"}
    assert compare_arrays(arrays(), arrays(), changed("weight/1/a", far))[0].verdict == "differs"
    loose = compare_arrays(
        arrays(), arrays(), changed("weight/1/a", far), tolerances={"weight/1": 1e-3}
    )
    assert loose[0].verdict == "equal"


def test_what_two_equal_runs_differ_by_as_well_is_noise_and_never_called_equal() -> None:
    again, other, off = arrays(), arrays(), arrays()
    again["gradient/1/b"] = again["gradient/1/b"] * np.float32(1.01)
    other["gradient/1/b"] = other["gradient/1/b"] * np.float32(0.99)
    off["gradient/1/b"] = off["gradient/1/b"] * np.float32(0.9)
    assert compare_arrays(arrays(), again, other)[0].verdict == "within noise"
    assert compare_arrays(arrays(), again, off)[0].verdict == "differs"


def test_rounding_of_what_cancels_to_nothing_is_measured_by_its_group() -> None:
    base, other = arrays(), arrays()
    base["gradient/1/bias"], other["gradient/1/bias"] = (
        np.full(8, 1e-9, np.float32),
        np.full(8, -1e-9, np.float32),
    )
    assert {gap.verdict for gap in compare_arrays(base, base, other)} == {"equal"}
    other["gradient/1/bias"] = np.full(8, 1e-3, np.float32)
    assert compare_arrays(base, base, other)[0].name == "gradient/1/bias"


def test_missing_tensors_other_shapes_and_nan_in_one_alone_differ() -> None:
    short = {name: value for name, value in arrays().items() if name != "gradient/1/b"}
    nan = arrays()["weight/1/a"].copy()
    nan[0, 0] = np.nan
    for other, problem in (
        (short, "is missing in one of them"),
        (changed("gradient/1/b", np.zeros(7, np.float32)), "has shapes (8,) and (7,)"),
        (changed("weight/1/a", nan), "is not finite in one of them alone"),
    ):
        worst = compare_arrays(arrays(), arrays(), other)[0]
        assert (worst.verdict, worst.problem) == ("differs", problem)
    assert {
        g.verdict
        for g in compare_arrays(changed("weight/1/a", nan), arrays(), changed("weight/1/a", nan))
    } == {"equal"}


def test_an_arm_that_fails_is_not_called_equal() -> None:
    good = telling_arm("good", "{'loss': 1.0}")
    parity = compare_arms(
        code_arm("bad", "import sys; raise ValueError(sys.argv[1][:0] + 'why')"), good
    )
    assert (parity.verdict, parity.failure) == (
        "not measured",
        "good: the arm reported no tensors\nhint: give write_report its arrays",
    )
    bad = compare_arms(
        good, code_arm("bad", "import sys; raise ValueError(sys.argv[1][:0] + 'why')")
    )
    assert bad.verdict == "not measured"
    assert bad.words.endswith("ValueError: why")
    with pytest.raises(InputError, match="reports no tensors"):
        compare_arms(code_arm("silent", "pass"), good)


def test_tensors_that_are_no_safetensors_are_refused_in_words(tmp_path: Path) -> None:
    write_report(tmp_path / "r.json", {}, arrays={"a": np.ones(3, np.float32)[::-1]})
    assert read_arrays(tmp_path / "r.json")["a"].tolist() == [1, 1, 1]
    (tmp_path / "r.safetensors").write_bytes(b"\xff" * 64)
    with pytest.raises(BadRecordError, match="cannot be read"):
        read_arrays(tmp_path / "r.json")


@pytest.mark.slow
def test_a_lost_slice_of_a_gradient_in_a_real_run_is_named_and_its_loss_is_right(
    tmp_path: Path,
) -> None:
    (tmp_path / "tiny.py").write_text(TASK)
    spec = RunSpec(
        task={"use": "tiny.py:Tiny"},
        train={"batch": 16, "threads": 1},
        observe={"tensorboard": False},
    )
    plain = spec_arm("plain", spec, steps=2, warmup=0, capture=(1, 2), folder=tmp_path)
    lossy = spec_arm(
        "lossy",
        spec.replace(task={"zeroed": True}),
        steps=2,
        warmup=0,
        capture=(1, 2),
        folder=tmp_path,
    )
    parity = compare_arms(lossy, plain)
    assert parity.failure is None
    assert parity.verdict == "differs"
    verdicts = {gap.name: gap.verdict for gap in parity.gaps}
    assert verdicts["loss/1"] == "equal"
    assert verdicts["gradient/1/0.weight"] == "differs"
    # what comes after the lost slice saw nothing of it in step 1
    assert verdicts["weight/1/2.bias"] == "equal"
    assert all(gap.floor == 0 for gap in parity.gaps)  # two equal runs have the same bits


def test_a_spec_arms_process_reports_what_the_steps_after_the_warm_up_cost(tmp_path: Path) -> None:
    (tmp_path / "tiny.py").write_text(TASK)
    spec = RunSpec(
        task={"use": "tiny.py:Tiny"},
        train={"batch": 16, "threads": 1},
        observe={"tensorboard": False},
    )
    arm = spec_arm("a", spec, steps=20, warmup=5, folder=tmp_path)
    (tmp_path / "spec.toml").write_text(arm.files["spec.toml"])
    filled = {
        "{work}": str(tmp_path),
        "{shared}": str(tmp_path),
        "{report}": str(tmp_path / "report.json"),
        "{started_s}": repr(time.perf_counter()),
        "{turns}": "alone",
    }
    words = [
        reduce(lambda text, name: text.replace(name, filled[name]), filled, word)
        for word in arm.command
    ]
    child.main(words[words.index("surefoot.trial.child") + 1 :])
    report = read_report(tmp_path / "report.json")
    costs = {
        f"{clock}_s_per_{unit}" for clock in ("cpu", "wall") for unit in ("step", "sample")
    } | {"startup_s"}
    did = {"num_steps", "num_samples", "items_per_sample", "applied_share", "loss"}
    assert report.measures.keys() == costs | did | {
        "peak_bytes",
        "imported_bytes",
        "samples_per_epoch",
        "total_steps",
    }
    assert (report.measures["num_steps"], report.measures["num_samples"]) == (20, 20 * 16)
    assert 0 < report.measures["startup_s"] < 60
    assert report.facts["outcome"] == "finished"
    steps = [
        event.num_steps for event in events.read(tmp_path / "run") if isinstance(event, events.Step)
    ]
    assert sum(steps) == 25


def test_the_peak_of_a_gpu_is_the_most_of_all_records_since_each_begins_it_anew(
    tmp_path: Path,
) -> None:
    records = [
        replace(past_runs.step(number, 1.0), device_memory=memory)
        for number, memory in ((10, {"peak_bytes": 9}), (20, {"peak_bytes": 5}))
    ]
    run = past_runs.write(tmp_path / "run", [past_runs.started(), past_runs.step(1, 1.0), *records])
    assert [child.device_peak_bytes(run, now) for now in (3, 12)] == [9.0, 12.0]
