"""verify --compile: the compiled step against eager mode from the same states."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from surefoot.core.errors import TaskError
from surefoot.prove.ladder import child
from tests.train.small import call, spec, write_task

PLANTED = Path(__file__).with_name("planted_compiled.py")
HOW = ("--compile", "--set", "train.batch=32", "--json", "--quiet")


@pytest.mark.slow
@pytest.mark.parametrize("short", [0.03, pytest.param(0.0, marks=pytest.mark.slow)])
def test_a_gradient_that_only_the_compiled_code_has_wrong_is_found_though_the_loss_is_right(
    short: float, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    code = call(
        monkeypatch, "verify", f"{PLANTED}:WrongKernel", "--set", f"task.short={short}", *HOW
    )
    row = json.loads(capsys.readouterr().out)
    assert (code, row["holds"], row["compile"]) == (
        (1, False, "model") if short else (0, True, "model")
    )
    if short:
        wrong = {each["what"] for each in row["comparisons"] if each["off"] > each["allowed"]}
        assert {
            f"the gradient of {layer}.weight in batch {batch}"
            for layer in (0, 2)
            for batch in (1, 2, 3)
        } <= wrong
        # behind them no ReLU lies
        assert not wrong & {"the loss after step 1", "the gradient of 4.weight in batch 1"}


def test_a_task_that_calls_nothing_of_what_is_compiled_is_told_and_not_passed(
    tmp_path: Path,
) -> None:
    """Planted: each layer is called by itself, and the model never."""
    layers = (
        "out = batch[0]\n        for layer in model:\n            out = layer(out)\n"
        "        return out"
    )
    use = write_task(tmp_path, change=("# FORWARD", layers))
    made = spec(task={"use": use}, compile={"what": "model"})
    with pytest.raises(TaskError, match="nothing was compiled"):
        child.states(made, tmp_path / "run", seeds=[0], steps=1, units=())


def test_two_comparisons_at_once_and_no_spec_are_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert call(monkeypatch, "verify", "digits", "--compile", "--precision") == 2
    assert call(monkeypatch, "verify", "--compile", "--command", "true") == 2
