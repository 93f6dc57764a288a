"""Tests of `surefoot resume`.

The same run goes on in its folder, and nothing changes in silence.
"""

from __future__ import annotations

from pathlib import Path

from surefoot.contract import events, manifest
from surefoot.contract.commits import SAVED_WHEN
from surefoot.train.run import Run
from tests.cli.conftest import Command
from tests.cli.resumed_runs import SPEC, STEPS, STOP, snapshot, spec, started, train, trained
from tests.train.small import write_task
from tests.train.test_resume import bits

__all__ = ["spec", "trained"]  # fixtures


def test_a_run_whose_record_is_gone_is_told_what_still_works_and_that_does(
    spec: Path, surefoot: Command
) -> None:
    Path("left", events.FILE).unlink()
    refused = surefoot("resume", "left")
    assert (refused.code, refused.out) == (2, "")
    assert refused.err.startswith(
        f"error: left has checkpoints and no {events.FILE}: without that log"
    )
    hint = refused.err.splitlines()[-1]
    assert (
        hint == "hint: surefoot resume left --fork NEW resumes from the newest checkpoint in "
        "a new folder"
    )
    words = (
        hint.removeprefix("hint: surefoot ")
        .split(" resumes from")[0]
        .replace("NEW", "again")
        .split()
    )
    assert surefoot(*words, "--quiet").code == 0
    assert manifest.steps(Path("again"))[-1] == STEPS


# ---- in place


def test_an_unfinished_run_goes_on_in_its_folder_to_the_bits_of_an_unbroken_one(
    spec: Path, surefoot: Command
) -> None:
    answer = surefoot("resume", "left", "--quiet", "--json")
    assert (answer.code, answer.row["step"], answer.row["outcome"]) == (0, STEPS, "finished")
    assert bits(Path("left"), STEPS) == bits(Path("whole"), STEPS)
    assert [event.first_step for event in started("left")] == [1, 7]


def test_a_finished_run_is_told_to_be_finished_and_how_to_train_on(
    spec: Path, surefoot: Command
) -> None:
    before = snapshot("whole")
    answer = surefoot("resume", "whole")
    assert answer.code == 0
    assert ": finished" in answer.out
    assert f"whole is finished after step {STEPS}" in answer.err
    assert "surefoot resume whole --fork NEW --steps 28" in answer.err
    assert snapshot("whole") == before
    answer = surefoot("resume", "whole", "--set", "optim.lr=0.5")
    assert answer.code == 2
    assert "surefoot resume whole --fork NEW --steps 28 --set optim.lr=0.5\n" in answer.err
    answer = surefoot("resume", "left", "--set", "train.length=99 steps", "--set", "optim.lr=0.5")
    assert (
        "surefoot resume left --fork NEW --set 'train.length=99 steps' --set optim.lr=0.5\n"
        in answer.err
    )


def test_where_when_and_how_it_is_recorded_may_change_in_place_and_the_bits_stay(
    spec: Path, surefoot: Command
) -> None:
    words = (
        "--set",
        'checkpoint.every="2 steps"',
        "--set",
        'observe.every="5 steps"',
        "--set",
        "train.device=cpu",
    )
    assert surefoot("resume", "left", "--quiet", *words).code == 0
    assert bits(Path("left"), STEPS) == bits(Path("whole"), STEPS)


def test_what_makes_it_another_run_is_refused_in_place_with_the_way_to_do_it(
    spec: Path, surefoot: Command
) -> None:
    before = snapshot("left")
    answer = surefoot("resume", "left", "--set", "optim.lr=0.5")
    assert (answer.code, answer.out) == (2, "")
    assert "optim.lr is 0.5, was 0.001" in answer.err
    assert "surefoot resume left --fork NEW" in answer.err
    assert snapshot("left") == before


def test_a_change_that_no_fork_takes_either_is_refused_in_place_without_naming_a_fork(
    spec: Path, surefoot: Command
) -> None:
    answer = surefoot("resume", "left", "--set", 'optim.freeze=["0.*"]')
    assert answer.code == 2
    assert "--weights-only starts from step 0" in answer.err
    assert "--fork" not in answer.err


def test_other_data_are_refused_in_place(tmp_path: Path, surefoot: Command) -> None:
    own, task = tmp_path / "own.toml", tmp_path / "own.py"
    own.write_text(SPEC.format(use=write_task(tmp_path, name="own.py")))
    train("own", own, leave_at=STOP)
    whole = task.read_text()
    task.write_text(whole.replace("torch.arange(24) % 3", "torch.arange(24) % 2"))
    before = Path("own/spec.toml").read_bytes()
    answer = surefoot(
        "resume", "own", "--accept-code-change", "--set", "checkpoint.keep=5", "--quiet"
    )
    assert answer.code == 2
    assert "the training data differ from those" in answer.err
    assert Path("own/spec.toml").read_bytes() == before
    task.write_text(whole)
    assert surefoot("resume", "own", "--quiet").code == 0
    assert not any("the code differs from that" in note for note in started("own")[-1].notes)


def test_a_code_change_that_is_accepted_is_noted(tmp_path: Path, surefoot: Command) -> None:
    own, task = tmp_path / "own.toml", tmp_path / "own.py"
    own.write_text(SPEC.format(use=write_task(tmp_path, name="own.py")))
    train("own", own, leave_at=STOP)
    task.write_text(task.read_text() + "\n# another\n")
    assert surefoot("resume", "own", "--accept-code-change", "--quiet").code == 0
    assert "the code differs from that of the previous attempt: own.py" in started("own")[-1].notes


def test_a_folder_that_is_no_run_is_refused(surefoot: Command) -> None:
    Path("empty").mkdir()
    answer = surefoot("resume", "empty")
    assert (answer.code, answer.out) == (2, "")
    assert "empty is not a run" in answer.err


# ---- stopped early


def hint_for_stopped(spec: Path, surefoot: Command, at: int) -> str:
    """Stop a run in the folder `stopped` after step `at`; return the hint of `resume`."""
    with Run(spec, folder="stopped", quiet=True) as run:
        if not at:
            run.stop("enough")
        for report in run.steps():
            if report.step == at:
                run.stop("enough")
    assert (run.outcome, run.step) == ("stopped", at)
    told = surefoot("resume", "stopped")
    assert told.code == 0
    return told.err.splitlines()[-1]


def words_of(hint: str) -> list[str]:
    """The arguments of the first command of surefoot that a hint names."""
    return hint.split("surefoot ", 1)[1].split(";")[0].replace("NEW", "new").split()


def test_a_stopped_run_is_told_how_it_trains_the_rest_of_its_length_and_that_does(
    spec: Path, surefoot: Command
) -> None:
    words = words_of(hint_for_stopped(spec, surefoot, 2))
    assert words == ["resume", "stopped", "--fork", "new"]
    answer = surefoot(*words, "--quiet", "--json")
    assert (answer.code, answer.row["step"]) == (0, STEPS)


def test_a_run_that_was_stopped_before_its_first_step_gets_hints_that_lead_out(
    spec: Path, surefoot: Command
) -> None:
    hint = hint_for_stopped(spec, surefoot, 0)
    assert hint == "hint: to train from step 0: another --run, or train with --fresh"
    assert surefoot("train", str(spec), "--run", "stopped", "--fresh", "--quiet").code == 0
    refused = surefoot("resume", "stopped", "--fork", "again", "--steps", "4")
    assert refused.code == 2
    assert refused.err.splitlines()[0] == "error: stopped holds no checkpoint"
    answer = surefoot(*words_of(refused.err.splitlines()[-1]), "--quiet", "--json")
    assert (answer.code, answer.row["step"]) == (0, STEPS)
    for verb in ("check", "list"):
        without = surefoot("checkpoint", verb, "stopped")
        assert (without.code, without.err.splitlines()[-1]) == (2, f"hint: {SAVED_WHEN}")
