"""verify --precision: runs in fewer bits against runs in fp32, by their scores."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from surefoot.prove.ladder import gate
from tests.prove.forked import programs_are_forked
from tests.train.small import call, write_task

__all__ = ["programs_are_forked"]

HOW = ("--precision", "--steps", "12", "--set", "train.batch=4", "--json")


@pytest.mark.slow
@pytest.mark.parametrize("is_broken", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_bits_that_change_no_score_pass_and_bits_that_do_fail(
    is_broken: bool,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Planted: a task that learns nothing of what it computes in 16 bits.

    What three seeds call worse, further ones decide: here three.
    """
    monkeypatch.setattr(gate, "FURTHER", 1)
    broken = (
        "out = model(batch[0]); return out if out.dtype == torch.float32 "
        "else out * 0 + batch[0].sum(1, keepdim=True)"
    )
    use = write_task(tmp_path, change=("# FORWARD", broken) if is_broken else ("", ""))
    rates = (
        "--set",
        "optim.lr=0.05",
        "--set",
        'evaluate.score="loss"',
        "--set",
        'evaluate.split="train"',
    )
    code = call(monkeypatch, "verify", use, *HOW, *rates)
    row = json.loads(capsys.readouterr().out)
    assert (row["precision"], row["against"], row["difference"]["count"]) == (
        "bf16",
        "fp32",
        6 if is_broken else 3,
    )
    assert (code, row["holds"]) == ((1, False) if is_broken else (0, True))


def test_too_few_seeds_and_no_spec_are_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    use = write_task(tmp_path)
    assert call(monkeypatch, "verify", use, "--precision", "--seeds", "2") == 2
    assert call(monkeypatch, "verify", use, "--precision", "--steps", "0") == 2
    assert call(monkeypatch, "verify", use, "--precision", "--steps", "-1") == 2
    assert call(monkeypatch, "verify", "--precision", "--command", "true") == 2


@pytest.mark.usefixtures("programs_are_forked")
def test_what_the_spec_says_of_precision_holds_in_the_narrow_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    use = write_task(tmp_path)
    assert call(monkeypatch, "verify", use, *HOW, "--set", 'precision.keep=["none_such"]') == 2
    assert "seed 0 in bf16" in (said := capsys.readouterr().err)
    assert "'none_such' matches no module" in said


@pytest.mark.usefixtures("programs_are_forked")
def test_a_score_that_is_no_number_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    use = write_task(tmp_path)
    method = """
    def metrics(self, output, batch):
        from surefoot.metrics import Mean

        return {"odd": Mean(float("nan"), 1)}
"""
    with (tmp_path / "mine.py").open("a") as file:
        file.write(method)
    assert call(monkeypatch, "verify", use, *HOW) == 2
    assert "seed 0 in fp32: its score odd is not a finite number" in capsys.readouterr().err
