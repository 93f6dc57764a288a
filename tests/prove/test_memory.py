"""What a step will hold is known without running it.

Against what is measured, against arithmetic, and without the memory.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from benchmarks.memory_prediction.cases import Named
from surefoot.components.observe.memory_use import peak_resident_bytes
from surefoot.contract import events
from surefoot.contract.spec import RunSpec
from surefoot.core.errors import InputError
from surefoot.prove.memory import compare, fit, predict
from surefoot.train.run import Run
from tests.train.small import call, write_task

MAX_ERROR = 0.005
HUGE = """
import torch
from surefoot import Loss
from surefoot.data import Arrays

class Huge:
    def model(self):
        return torch.nn.Sequential(*(torch.nn.Linear(16384, 16384, bias=False) for _ in range(4)))

    def data(self, split):
        return Arrays(torch.zeros(4, 16384), torch.zeros(4))

    def forward(self, model, batch):
        return model(batch[0])

    def loss(self, output, batch):
        return Loss.sum(output.square().sum(), len(batch[1]))
"""


@pytest.mark.quick(
    "vit, bf16, every 2, sgd",
    "vit, fp32, none, muon",
    "unet, fp32, operators, adamw",
    "lstm, fp32, none, sgd",
)
@pytest.mark.parametrize(
    "case",
    [
        Named("mlp", "fp32", "none", "muon"),
        Named("convnet", "bf16", "every 2", "sgd"),
        Named("gpt", "bf16", "full", "adamw"),
        Named("lstm", "fp32", "none", "sgd"),
        Named("unet", "fp32", "operators", "adamw"),
        Named("vit", "fp32", "none", "adamw"),
        Named("vit", "bf16", "none", "adamw"),
        Named("vit", "fp32", "none", "muon"),
        Named("vit", "bf16", "every 2", "sgd"),
    ],
    ids=lambda case: case.name,
)
def test_the_predicted_peak_is_that_which_is_measured(case: Named) -> None:
    predicted = predict(case.spec())
    found = compare(case.spec(), predicted.peak_bytes)
    assert found.error is not None
    assert abs(found.error) <= MAX_ERROR
    assert predicted.interval[0] <= found.measured_bytes <= predicted.interval[1]
    assert sum(predicted.terms.values()) == predicted.peak_bytes


def test_a_model_that_this_memory_could_not_train_is_predicted_without_it(tmp_path: Path) -> None:
    path = tmp_path / "huge.py"
    path.write_text(HUGE)
    before = peak_resident_bytes()
    found = predict(RunSpec(task={"use": f"{path}:Huge"}, train={"batch": 4, "length": "1 step"}))
    assert peak_resident_bytes() - before < 1 << 29
    parameters = 4 * 16384**2
    assert found.num_parameters == parameters
    assert (found.terms["parameters"], found.terms["optimizer"] // parameters) == (
        4 * parameters,
        8,
    )
    assert found.peak_bytes > 16 * parameters


@pytest.mark.slow
def test_recomputation_and_a_smaller_microbatch_lower_the_prediction_and_what_fits_is_found() -> (
    None
):
    spec = Named("gpt", "fp32", "none", "adamw").spec()
    plain = predict(spec).peak_bytes
    full = predict(spec.replace(memory={"activation_checkpointing": "full"})).peak_bytes
    assert full < 0.7 * plain
    found = fit(spec, round(1.1 * full), lambda text: None)
    assert (found.microbatch, found.recompute) == (spec.train.batch, "full")
    assert found.prediction.interval[1] <= 1.1 * full
    with pytest.raises(InputError, match=r"nothing fits into 1 KiB: .* needs up to"):
        fit(spec.replace(train={"batch": 1}), 1024, lambda text: None)


def test_a_task_that_needs_numbers_is_told_its_line_and_what_to_do(tmp_path: Path) -> None:
    use = write_task(tmp_path, change=("# LOSS", "assert output.mean().item() < 10"))
    with pytest.raises(InputError, match=r"cannot be predicted.*in loss") as raised:
        predict(RunSpec(task={"use": use}))
    assert "--measure" in str(raised.value.hint)
    with pytest.raises(InputError, match="a memory budget needs measured blocks"):
        predict(Named("gpt", "fp32", "1 GiB", "adamw").spec())
    assert torch.ones(1).item() == 1.0  # tensors have numbers again


def test_sizes_alone_are_answered_without_torch() -> None:
    program = (
        "import sys; from surefoot.cli.main import main\ntry: main()\n"
        "finally: assert 'torch' not in sys.modules"
    )
    words = [
        sys.executable,
        "-c",
        program,
        "memory",
        "--parameters",
        "70B",
        "--fit",
        "80 GB",
        "--json",
    ]
    done = subprocess.run(words, capture_output=True, text=True, check=True)
    row = json.loads(done.stdout)
    assert row["terms"]["parameters"] == 280 * 10**9
    assert row["terms"]["parameters"] / row["budget_bytes"] == 3.5
    assert row["peak_bytes"] == 16 * 70 * 10**9
    assert row["fits"] is False


@pytest.mark.parametrize(
    ("more", "expected"),
    [((), [2800.0, 1421.9, 732.8, 43.75]), (("--half",), [2800.0, 732.8, 388.3, 43.75])],
)
def test_the_stages_of_sharding_are_compared_by_their_formula(
    more: tuple[str, ...],
    expected: list[float],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """175 billion parameters on 64 ranks, in GB."""
    assert (
        call(monkeypatch, "memory", "--parameters", "175B", "--ranks", "64", "--json", *more) == 0
    )
    stages = json.loads(capsys.readouterr().out)["stages"]
    assert [each["num_bytes"] / 1e9 for each in stages] == pytest.approx(expected, abs=0.05)
    assert [each["volumes"] for each in stages] == [2, 2, 2, 3]


def test_the_verb_writes_what_it_knows_and_refuses_what_it_cannot_do(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    assert call(monkeypatch, "memory", "digits", "--measure", "--json", "--out", "shape.json") == 0
    row = json.loads(capsys.readouterr().out)
    assert row["version"] == 1
    assert abs(row["error"]) <= MAX_ERROR
    assert json.loads(Path("shape.json").read_text())["terms"] == row["terms"]
    for words in (
        ["memory"],
        ["memory", "digits", "--parameters", "1B"],
        ["memory", "--parameters", "0"],
        ["memory", "digits", "--out", "shape.json"],
        ["memory", "digits", "--fit", "16"],
        ["memory", "digits", "--set", "memory.offload=optimizer"],
        ["memory", "digits", "--fit", "1GiB", "--measure"],
        ["memory", "--parameters", "1B", "--measure"],
        ["memory", "digits", "--ranks", "2"],
        ["memory", "--parameters", "1B", "--half"],
        ["memory", "--parameters", "1B", "--ranks", "0"],
    ):
        assert call(monkeypatch, *words) == 2


PAIR = """
import torch
from torch import nn
from surefoot import Loss
from surefoot.data import Arrays

class Pair:
    def model(self):
        self.scale = torch.ones(())
        one = nn.Sequential(nn.Linear(64, 256), nn.Tanh())
        return nn.ModuleDict({"one": one, "two": nn.Linear(256, 64)})

    def data(self, split):
        return Arrays(torch.ones(64, 64), torch.zeros(64))

    def forward(self, model, batch):
        return model["two"](model["one"](batch[0])) * self.scale

    def loss(self, output, batch):
        return Loss.sum(output.square().sum(), len(output))
"""


@pytest.fixture
def pair(tmp_path: Path) -> dict[str, str]:
    path = tmp_path / "pair.py"
    path.write_text(PAIR)
    return {"use": f"{path}:Pair"}


def test_bf16_weights_are_predicted_with_their_masters_and_the_gradients_of_those(
    pair: dict[str, str],
) -> None:
    train = {"batch": 16, "length": "4 steps"}
    found = predict(
        RunSpec(task=pair, train=train, precision={"compute": "bf16", "weights": "bf16"})
    )
    count = found.num_parameters
    assert [
        found.terms[name] / count for name in ("parameters", "masters", "optimizer")
    ] == pytest.approx([2, 4, 8], abs=0.01)
    assert found.terms["gradients"] > count  # at the peak not all of them are there
    spec = RunSpec(
        task=pair, train=train, precision={"compute": "bf16", "weights": "bf16", "master": "none"}
    )
    assert predict(spec).peak_bytes < found.peak_bytes - 4 * count


def test_a_model_whose_parts_are_called_by_themselves_is_measured_as_well(
    pair: dict[str, str],
) -> None:
    spec = RunSpec(task=pair, train={"batch": 16, "length": "4 steps"})
    predicted = predict(spec).peak_bytes
    assert abs(compare(spec, predicted).error or 1.0) <= MAX_ERROR


def test_of_a_batch_that_grows_the_largest_is_predicted(pair: dict[str, str]) -> None:
    train = {"batch": 32, "length": "4 steps"}
    ramp = RunSpec(
        task=pair, train={**train, "ramp": [[0, 4], [1000, 32]]}, schedule={"name": "constant"}
    )
    assert predict(ramp).peak_bytes == predict(RunSpec(task=pair, train=train)).peak_bytes
    assert predict(ramp).spec_id == ramp.id
    falling = ramp.replace(train={"batch": 4, "ramp": [[0, 32], [1000, 4]]})
    assert predict(falling).peak_bytes == predict(ramp).peak_bytes
    noisy = ramp.replace(train={"microbatch": 2}, observe={"noise": True})
    assert fit(noisy, 1 << 30, lambda text: None).microbatch == 32


def test_a_prediction_in_a_run_leaves_the_task_as_it_was(
    pair: dict[str, str], tmp_path: Path
) -> None:
    spec = RunSpec(
        task=pair,
        train={"batch": 16, "length": "4 steps"},
        memory={"predict": True},
        observe={"tensorboard": False},
    )
    with Run(spec, folder=tmp_path / "run", quiet=True) as run:
        assert len(list(run.steps())) == 4
        assert run.task.task.scale.item() == 1.0
    (row,) = (event for event in events.read(tmp_path / "run") if isinstance(event, events.Memory))
    assert row.error is not None
    assert abs(row.error) <= MAX_ERROR
