"""Tests of `surefoot roofline` on small real steps.

What is counted, what the file holds, what `show` makes of it.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import nn

from surefoot.components.profiler import peaks
from surefoot.components.profiler.counts import Counter
from surefoot.components.profiler.peaks import measure_peaks
from surefoot.contract.spec import RunSpec
from surefoot.core.cost.roofline import FILE
from surefoot.core.cost.shape import transformer_flops
from surefoot.prove.bench.rehearsal import Rehearsal
from tests.cli.conftest import Command, surefoot
from tests.train.small import TEXT

__all__ = ["surefoot"]

LAYERS, WIDTH, LENGTH, BATCH = 2, 48, 64, 4
SMALL = {"use": "pycorpus", "layers": LAYERS, "width": WIDTH, "heads": 4, "length": LENGTH}


@pytest.mark.parametrize("microbatch", [BATCH, 2])
def test_six_a_parameter_and_token_and_attention_is_what_is_counted_on_the_small_transformer(
    microbatch: int, tmp_path: Path
) -> None:
    for number in range(40):  # enough names for a few to be held out
        (tmp_path / f"module_{number}.py").write_text("x = 1\n" * 100)
    spec = RunSpec(
        task=SMALL,
        data={"folder": str(tmp_path)},
        evaluate={"split": "heldout"},
        train={"batch": BATCH, "microbatch": microbatch, "length": "4 steps"},
    )
    with Rehearsal(spec, steps=4) as rehearsal, Counter(rehearsal.assembly.model) as counter:
        rehearsal.take("step")
    parameters = sum(each.numel() for each in rehearsal.assembly.model.parameters())
    rule = transformer_flops(
        parameters, tokens=BATCH * LENGTH, layers=LAYERS, width=WIDTH, length=LENGTH
    )
    counted = sum(work.model_flops for work in counter.of())
    assert rule == pytest.approx(counted, rel=0.03)
    assert any(work.group == "attention" for work in counter.of())


@pytest.fixture(autouse=True)
def _short(monkeypatch: pytest.MonkeyPatch) -> None:
    """A peak is looked for once: what it is matters to no test here."""
    monkeypatch.setattr(peaks, "PASSES", 1)


@pytest.fixture
def run(tmp_path: Path, surefoot: Command, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A small run of a task of the user's own, finished; its peak is looked for in small shapes."""
    monkeypatch.setitem(peaks.SHAPES, "cpu", peaks.SHAPES["cpu"][:2])
    (tmp_path / "mine.py").write_text(TEXT)
    (tmp_path / "mine.toml").write_text(
        '[task]\nuse = "mine.py:Mine"\n[train]\nbatch = 8\nlength = "30 steps"\n'
    )
    assert surefoot("train", "mine.toml", "--run", "run", "--quiet").code == 0
    return tmp_path / "run"


def test_a_runs_roofline_lies_in_its_folder_and_show_tells_its_utilization(
    run: Path, surefoot: Command
) -> None:
    before = surefoot("show", "run", "--json").row
    assert before["mfu"] is None
    told = surefoot("roofline", "run", "--steps", "3", "--quiet")
    assert (told.code, told.err) == (0, "")
    row = json.loads((run / "profile" / "roofline.json").read_text())
    assert row["version"] == 1
    flops = 3 * 2 * 8 * (4 * 4 + 4 * 3) - 2 * 8 * 4 * 4  # the data need no gradient
    assert (row["model_flops"], row["num_samples"], row["recomputed_flops"]) == (flops, 8, 0)
    assert row["utilization"]["flops_per_sample"] == flops / 8
    peak = row["peaks"]["flops_per_s"]["fp32"]
    assert row["mfu"] == pytest.approx(flops / row["step_s"] / peak)
    assert row["mfu_formula"].startswith("model FLOPs of a sample x samples/s / peak FLOP/s: ")
    after = surefoot("show", "run", "--json").row
    assert after["mfu"] == pytest.approx(flops / 8 * after["samples_per_s"] / peak)
    assert "model FLOPs  MFU " in surefoot("show", "run").out


def test_the_points_hold_every_operator_and_module_of_a_step(run: Path, surefoot: Command) -> None:
    row = surefoot("roofline", "run", "--steps", "2", "--json").row
    operators = {
        (each["name"], each["dtype"]): each for each in row["points"] if each["kind"] == "operator"
    }
    modules = {each["name"]: each for each in row["points"] if each["kind"] == "module"}
    assert {".", "0", "1", "2"} <= set(modules)
    assert operators["addmm", "fp32"]["flops"] == 2 * 8 * (4 * 4 + 4 * 3)
    assert sum(each["flops"] for each in operators.values()) == row["flops"]
    assert {each["bound"] for each in row["points"]} <= {"compute", "memory", None}
    assert 0 <= row["fusible_share"] <= 1
    assert row["without_formula"] == []


def test_a_damaged_file_leaves_utilization_unknown(run: Path, surefoot: Command) -> None:
    (run / "profile").mkdir(exist_ok=True)
    for bad in (b"\xff", b"{}", b'{"version": 1, "utilization": null}'):
        (run / FILE).write_bytes(bad)
        assert surefoot("show", "run", "--json").row["mfu"] is None
        assert "n/a (to count them: surefoot roofline run)" in surefoot("show", "run").out


def test_bad_input_is_told_in_words(run: Path, surefoot: Command) -> None:
    assert surefoot("roofline", "run", "--steps", "0").err.startswith("error: --steps is 0")
    assert surefoot("roofline", "nowhere").code == 2
    (run / "taken").write_text("")
    taken = surefoot("roofline", "run", "--steps", "1", "--out", "run/taken")
    assert (taken.code, taken.err.splitlines()[0]) == (
        2,
        "error: run/taken already exists and is not overwritten",
    )
    changed = surefoot("roofline", "run", "--steps", "1", "--seed", "0")
    assert (changed.code, changed.err.splitlines()[0]) == (
        2,
        "error: --seed changes a spec, but a run is measured with its own spec",
    )
    assert not (run / FILE).exists()
    answer = surefoot("roofline", "run", "--steps", "1", "--quiet", "--out", "run/taken/x.json")
    assert (answer.code, answer.err.splitlines()[0]) == (
        2,
        "error: there is no folder run/taken for x.json",
    )
    (run / "profile").write_text("")
    answer = surefoot("roofline", "run", "--steps", "1")
    assert (answer.code, answer.err) == (
        5,
        (
            "error: run/profile cannot be written: Not a directory\n"
            "hint: give another file with --out\n"
        ),
    )
    answer = surefoot("roofline", "run", "--steps", "1", "--quiet", "--out", "beside.json")
    assert (
        answer.code,
        answer.err.startswith("warning: run/profile/roofline.json cannot be written"),
    ) == (0, True)
    assert "MFU" in answer.out
    assert json.loads(Path("beside.json").read_text())["num_steps"] == 1


def test_the_peaks_of_a_cpu_are_those_of_the_dtypes_it_has_and_the_threads_are_put_back() -> None:
    before = torch.get_num_threads()
    found = measure_peaks(torch.device("cpu"), threads=1, dtypes=("fp32",))
    assert list(found.flops_per_s) == ["fp32"]
    assert found.flops_per_s["fp32"] > 1e8
    assert found.bytes_per_s is not None
    assert found.bytes_per_s > 1e7
    assert (found.threads, torch.get_num_threads()) == (1, before)


def test_a_library_that_is_slow_in_a_dtype_leaves_the_others_their_shapes(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    # seconds of a product, whatever its shape
    slow = {"_plain": 1.0, "_matmul_transposed": 1.0, "_onednn": 0.01}
    taken = []

    def timed(call: Callable[[], object], device: torch.device, budget_s: float) -> float:
        name = call.__qualname__.partition(".")[0]
        taken.append(name)
        return slow[name]

    monkeypatch.setattr(peaks, "_min_call_s", timed)
    products = peaks._Products(torch.device("cpu"), torch.float32)
    products.take()
    assert products.best == 2 * 4096 * 1024 * 1024 / slow["_onednn"]
    assert {name: taken.count(name) for name in slow} == {
        "_plain": 1,
        "_matmul_transposed": 1,
        "_onednn": len(peaks.SHAPES["cpu"]),
    }
    products.take()
    assert len(taken) == 2 + len(peaks.SHAPES["cpu"]) + peaks.KEPT


def test_a_product_that_is_known_to_be_large_comes_near_the_peak_it_is_held_against() -> None:
    model, inputs = nn.Linear(1024, 1024, bias=False), torch.randn(1024, 1024)
    with torch.no_grad():
        model(inputs)
        with Counter(model) as counter:
            model(inputs)
    (product,) = [work for work in counter.of() if work.operator == "mm"]
    peak = measure_peaks(torch.device("cpu"), dtypes=("fp32",)).flops_per_s["fp32"]
    assert 0.01 < product.flops / product.elapsed_s / peak < 2
