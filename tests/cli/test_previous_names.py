"""Specs and runs with the previous names of keys are read, and keep their ids."""

from __future__ import annotations

import json
import runpy
import shutil
import sys
import warnings
from pathlib import Path
from typing import Any

import pytest

from surefoot.contract import events, spec_file
from surefoot.contract.spec import RunSpec
from surefoot.contract.spec.renamed import RENAMED
from surefoot.core.errors import RenamedKeyWarning, SpecError
from surefoot.prove.ladder.rungs import change
from tests.cli.conftest import Command
from tests.conftest import ROOT

OLD = ROOT / "tests" / "fixtures" / "previous_names"
ID = "a86d4420cb9d"  # as the previous release computed it
LOSS, TOTAL = 1.126, -0.04273923  # of the run and of the loop, never stopped
VALUES: dict[str, Any] = {
    "optim.decay": 0.3,
    "optim.trust": 0.2,
    "optim.rates": {"0.*": 0.5},
    "memory.recompute": "full",
    "layout.stage": 2,
    "layout.bucket": "2 MiB",
    "layout.first_bucket": "3 MiB",
    "layout.stall": 7.0,
}
BESIDE: dict[str, dict[str, Any]] = {"optim.trust": {"name": "lars"}, "layout.stage": {"shard": 2}}


@pytest.fixture
def old(tmp_path: Path) -> Path:
    for each in OLD.iterdir():
        (shutil.copytree if each.is_dir() else shutil.copy)(each, tmp_path / each.name)
    return tmp_path


def test_every_renamed_key_is_tried() -> None:
    assert VALUES.keys() == RENAMED.keys()


@pytest.mark.parametrize("key", RENAMED)
def test_a_previous_name_is_read_named_once_and_leaves_the_id(
    key: str, surefoot: Command, tmp_path: Path
) -> None:
    table, name = key.split(".")
    now = RENAMED[key].partition(".")[2]
    beside = BESIDE.get(key, {})
    task = {"use": "digits"}
    current = RunSpec(task=task, **{table: {**beside, now: VALUES[key]}})
    with pytest.warns(RenamedKeyWarning, match=f"{key} is now {RENAMED[key]}"):
        given = RunSpec(task=task, **{table: {**beside, name: VALUES[key]}})
    assert given == current
    assert given.id == current.id
    (tmp_path / "new.toml").write_text(spec_file.write(current))
    (tmp_path / "old.toml").write_text(spec_file.write(current).replace(now, name))
    answers = [surefoot("spec", "check", file) for file in ("new.toml", "old.toml")]
    assert answers[0].out == answers[1].out
    assert answers[0].err == ""
    assert answers[1].err.count("warning:") == 1
    assert answers[1].err.startswith("warning: old.toml:")
    assert f"{key} is now {RENAMED[key]}" in answers[1].err


def test_a_flag_with_a_previous_name_overrides_the_current_one(surefoot: Command) -> None:
    words = ("--set", "optim.weight_decay=0.5", "--set", "optim.decay=0.25", "--json")
    answer = surefoot("spec", "show", "digits", *words)
    values = {each["key"]: each["value"] for each in answer.row["values"]}
    assert values["optim.weight_decay"] == 0.25
    assert "optim.decay" not in values
    assert answer.err.startswith("warning: --set: optim.decay is now optim.weight_decay")


def test_a_key_by_both_names_is_refused_with_its_place(surefoot: Command, tmp_path: Path) -> None:
    (tmp_path / "mine.toml").write_text(
        '[task]\nuse = "digits"\n[optim]\nweight_decay = 0.1\ndecay = 0.2\n'
    )
    answer = surefoot("spec", "check", "mine.toml")
    assert answer.code == 2
    assert answer.err.startswith("error: mine.toml:5: optim.decay is the previous name")
    with pytest.raises(SpecError, match="both are given"):
        RunSpec(optim={"decay": 0.1, "weight_decay": 0.1})


def test_a_previous_name_in_a_flag_is_refused_where_the_current_one_has_no_effect(
    surefoot: Command,
) -> None:
    for name in ("stage", "zero_stage"):
        answer = surefoot("spec", "check", "digits", "--set", f"layout.{name}=1")
        assert answer.code == 2
        assert "layout.zero_stage = 1 has no effect" in answer.err


def test_a_spec_and_a_rung_are_changed_by_a_previous_name() -> None:
    spec = RunSpec(optim={"weight_decay": 0.1, "lr_multipliers": {"0.*": 0.5}})
    with pytest.warns(RenamedKeyWarning, match="optim.decay"):
        assert spec.replace(optim={"decay": 0.2}).optim.weight_decay == 0.2
    with pytest.warns(RenamedKeyWarning, match="optim.decay"):
        assert change(spec, {"optim.decay": 0.3}).optim.weight_decay == 0.3
    with pytest.warns(RenamedKeyWarning, match="optim.rates"):
        found = change(spec, {"optim.rates.1": 2.0}).optim.lr_multipliers
    assert found == {"0.*": 0.5, "1": 2.0}


def test_phases_of_the_previous_release_have_their_current_name_and_nothing_else_has(
    tmp_path: Path,
) -> None:
    shutil.copytree(OLD / "whole", tmp_path / "run")
    path = tmp_path / "run" / events.FILE
    text = path.read_text().replace('"outliers": []', '"outliers": [{"cause": "optimiser"}]')
    path.write_text(text.replace('"learning_rates": {"loss"', '"learning_rates": {"optimiser"'))
    steps = [each for each in events.read(tmp_path / "run") if isinstance(each, events.Step)]
    assert steps
    assert all("optimizer" in each.phases and "optimiser" not in each.phases for each in steps)
    causes = [row["cause"] for each in steps for row in each.outliers]
    assert "optimizer" in causes
    assert "optimiser" not in causes
    assert all("optimiser" in each.learning_rates for each in steps)  # what a task calls so stays


def test_a_run_of_the_previous_release_keeps_its_id(old: Path) -> None:
    with pytest.warns(RenamedKeyWarning, match=r"spec.toml:6: optim.decay"):
        assert spec_file.read(str(old / "spec.toml")).spec.id == ID
    with warnings.catch_warnings():
        warnings.simplefilter("error", RenamedKeyWarning)  # of its own file a run says nothing
        assert spec_file.read_of_run(old / "whole", checks_task=False).spec.id == ID


def test_a_stopped_run_of_the_previous_release_is_resumed_to_the_same_scores(
    surefoot: Command, old: Path
) -> None:
    answer = surefoot("resume", "stopped", "--task", "task.py:Spirals")
    assert answer.code == 0
    assert "is now" not in answer.err
    assert f"loss {LOSS}" in answer.out
    assert "exactly once" in surefoot("ledger", "stopped").out


def test_a_finished_run_of_the_previous_release_is_shown_evaluated_compared_and_forked(
    surefoot: Command, old: Path
) -> None:
    assert f"loss {LOSS}" in surefoot("show", "whole").out
    assert surefoot("check", "whole").code == 0
    words = ("--task", "task.py:Spirals")
    assert "loss 1.1" in surefoot("evaluate", "whole", *words).out
    forked = surefoot("resume", "whole", "--fork", "new", "--steps", "16", *words)
    assert forked.code == 0
    assert "changed: train.length is '16 steps', was '12 steps'\n" in forked.err
    assert "weight_decay = 0.02" in (old / "new" / "spec.toml").read_text()
    side_by_side = surefoot("compare", "whole", "new", "--json").row
    assert "weight_decay" not in json.dumps(side_by_side["spec"])  # the same by either name


def test_a_loop_of_the_previous_release_is_resumed_to_the_same_weights(
    old: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(old)
    monkeypatch.setattr(sys, "argv", ["loop.py", "attached", "99"])
    runpy.run_path("loop.py", run_name="__main__")
    said = capsys.readouterr()
    assert "resuming after step 11" in said.err
    assert float(said.out) == pytest.approx(TOTAL, abs=1e-6)
