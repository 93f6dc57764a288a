"""Tests of `surefoot whatif compile` and `whatif kernels`.

Which ways there are, what is read off their runs, and small real ones.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch._inductor.config

from surefoot.cli.prove.whatif import FEWEST_ROUNDS
from surefoot.contract.spec import RunSpec
from surefoot.core.statistics import FIRST_LOOK
from surefoot.prove.ladder.workbench import WARMUP_STEPS, Workbench
from surefoot.prove.whatif.compiled import EAGER, find_specs, measure_ways
from surefoot.train.step.program import EAGER_STEPS
from surefoot.trial import Outcome, Trial
from tests.cli.conftest import Command, surefoot
from tests.train.small import write_task

__all__ = ["surefoot"]
SPEC = RunSpec(task={"use": "digits"})  # type: ignore[arg-type]
MEASURING = SPEC.replace(train={"deterministic": False})


@pytest.mark.parametrize(
    ("spec", "device", "modes"),
    [
        (SPEC, "cpu", ["default"]),
        (MEASURING, "cpu", ["default", "max-autotune"]),
        (SPEC, "cuda", ["default", "reduce-overhead", "max-autotune"]),
    ],
)
def test_every_mode_is_a_way_or_is_said_to_be_none_here(
    spec: RunSpec, device: str, modes: list[str]
) -> None:
    specs, left_out = find_specs(spec, device)
    assert list(specs) == [
        f"{what} {mode}" for what in ("blocks", "model", "step") for mode in modes
    ]
    assert set(left_out) == {"default", "reduce-overhead", "max-autotune"} - set(modes)
    assert all("it is default here" in why for why in left_out.values())
    for name, made in specs.items():
        assert f"{made.compile.what} {made.compile.mode}" == name
        # or eager mode would be measured under another name
        assert made.compile.on_failure == "stop"


def test_a_spec_that_compiles_a_part_is_asked_for_its_modes() -> None:
    stated = SPEC.replace(compile={"what": "blocks", "blocks": ["1.*"], "dynamic": True})
    specs, _ = find_specs(stated, "cpu")
    assert list(specs) == ["blocks default"]
    assert specs["blocks default"].compile.blocks == ("1.*",)
    assert specs["blocks default"].compile.dynamic is True


def test_nothing_is_compiled_while_it_is_measured() -> None:
    assert WARMUP_STEPS > EAGER_STEPS + 1


def outcomes(name: str, step_s: float, compile_s: float | None) -> list[Outcome]:
    """Seven rounds; the first finds the caches empty, each drifts as its round does."""
    made = []
    for number in range(7):
        step = step_s * (1 + 0.01 * number)
        compiling = (
            {} if compile_s is None else {"compile_s": compile_s if number == 0 else compile_s / 10}
        )
        measures: Mapping[str, float] = {
            "wall_s_per_step": step,
            "wall_s_per_sample": step / 8,
            "peak_bytes": 2.0**28,
            **compiling,
        }
        made.append(Outcome(arm=name, round=number, ended="done", measures=measures))
    return made


@pytest.fixture
def planted(monkeypatch: pytest.MonkeyPatch) -> None:
    """The blocks take half of eager mode's time, the model twice, and the step compiles nothing."""

    def begin(bench: Workbench) -> float:
        bench.device = "cpu"
        return 0.1

    def measure_all(
        bench: Workbench, title: str, specs: Mapping[str, RunSpec], rounds: int, **how: Any
    ) -> Trial:
        assert list(specs) == [EAGER, "blocks default", "model default", "step default"]
        assert specs[EAGER].compile.what == "none"
        made = [
            *outcomes(EAGER, 0.1, None),
            *outcomes("blocks default", 0.05, 30.0),
            *outcomes("model default", 0.2, 20.0),
        ]
        return Trial(
            title=title,
            arms=tuple(specs),
            rounds=rounds,
            seed=0,
            outcomes=(*made, *outcomes("step default", 0.1, None)),
        )

    monkeypatch.setattr(Workbench, "begin", begin)
    monkeypatch.setattr(Workbench, "extend_warmup_for_compilation", lambda bench: None)
    monkeypatch.setattr(Workbench, "measure_all", measure_all)


@pytest.mark.usefixtures("planted")
def test_a_gain_has_its_break_even_a_loss_never_pays_and_nothing_compiled_is_no_gain() -> None:
    found = measure_ways(SPEC)
    eager, blocks, model, step = found.ways
    assert (blocks.compile_s, blocks.again_s, blocks.failure) == (30.0, 3.0, None)
    assert blocks.ratio is not None
    assert (blocks.ratio.verdict, blocks.ratio.count, blocks.ratio.estimate) == (
        "lower",
        7,
        pytest.approx(0.5),
    )
    assert eager.step_s == pytest.approx(0.103)
    assert blocks.pays_after == (583, 583, 583)  # 30 s at 0.0515 s a step
    assert model.ratio is not None
    assert (model.ratio.verdict, model.pays_after) == ("higher", None)
    assert (step.ratio, step.pays_after, str(step.failure)[:20]) == (
        None,
        None,
        "nothing was compiled",
    )
    assert found.best == blocks


@pytest.mark.usefixtures("planted")
def test_the_table_says_what_pays_what_never_does_and_what_is_left_out(surefoot: Command) -> None:
    out = surefoot("whatif", "compile", "digits", "--quiet").out
    assert "583 steps (583 to 583)" in out
    assert "never" in out
    assert "reduce-overhead: it is default here, since CUDA graphs need a GPU" in out
    assert "step default: nothing was compiled" in out
    assert 'best: compile.what = "blocks", compile.mode = "default"' in out


@pytest.mark.parametrize(
    "words",
    [
        ("compile", "digits", "--draws", "8"),
        ("compile", "digits", "--rounds", "0"),
        ("kernels", "digits"),
        ("kernels", "digits", "."),
        ("kernels", "digits", "new", "--set", 'compile.what="step"'),
        ("digits", "--compile"),
    ],
)
def test_questions_that_are_none_are_refused(
    words: tuple[str, ...], tmp_path: Path, surefoot: Command
) -> None:
    (tmp_path / "mine.py").write_text("")
    answer = surefoot("whatif", *words)
    assert (answer.code, answer.out) == (2, "")
    assert "hint:" in answer.err or "'surefoot whatif" in answer.err
    assert not (tmp_path / "new").exists()


@pytest.mark.slow
def test_ways_are_measured_in_fresh_processes_with_caches_that_are_empty_once(
    tmp_path: Path, surefoot: Command
) -> None:
    # a number that changes is compiled again each time
    use = write_task(tmp_path, change=("STEP += 1", "pass"))
    (tmp_path / "mine.toml").write_text(f'[task]\nuse = "{use}"\n[train]\nbatch = 8\n')
    row = surefoot("whatif", "compile", "mine.toml", "--rounds", "2", "--json").row
    ways = {each["what"]: each for each in row["rows"]}
    assert list(ways) == ["eager", "blocks", "model", "step"]
    assert "no blocks" in ways["blocks"]["failure"] or "repeat" in ways["blocks"]["failure"]
    for what in ("model", "step"):
        assert ways[what]["failure"] is None
        assert ways[what]["compile_s"] > ways[what]["again_s"] > 0
        assert ways[what]["verdict"] == "too few"
        assert ways[what]["ratio"]["count"] == 2


@pytest.mark.slow
def test_the_kernels_of_a_task_are_written_with_what_was_fused(
    tmp_path: Path, surefoot: Command
) -> None:
    use = write_task(tmp_path)
    # else torch keeps threads that nobody ends
    with torch._inductor.config.patch(compile_threads=1):
        answer = surefoot("whatif", "kernels", use, "kernels", "--set", "train.batch=8", "--json")
    assert answer.code == 0, answer.err
    written = json.loads((tmp_path / "kernels" / "kernels.json").read_text())
    assert written == answer.row["graphs"]
    forward, backward = written
    assert [each["operators"] for each in forward["kernels"]] == [["addmm"], ["relu"], ["addmm"]]
    assert forward["num_operators"] == forward["num_kernels"] == 3
    assert "relu" in (tmp_path / "kernels" / f"{forward['graph']}.py").read_text()
    assert backward["num_bytes"] <= backward["eager_bytes"]


def test_as_many_rounds_as_show_a_gain_are_measured_by_default() -> None:
    assert FEWEST_ROUNDS == FIRST_LOOK
