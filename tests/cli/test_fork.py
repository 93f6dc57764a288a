"""Tests of `surefoot resume --fork`.

Another run begins where a run stood, and nothing changes in silence.
"""

from __future__ import annotations

import json
import shlex
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from surefoot.components.data import consumed
from surefoot.contract import events, ledger, manifest
from surefoot.contract.events import Step
from surefoot.train.resume.start import Start
from tests.cli.conftest import Command
from tests.cli.resumed_runs import SPEC, STEPS, STOP, snapshot, spec, started, train, trained
from tests.train.small import faults_of, write_task
from tests.train.test_resume import bits

__all__ = ["spec", "trained"]  # fixtures


def test_a_fork_of_the_same_spec_ends_with_the_bits_of_the_run_it_came_from(
    spec: Path, surefoot: Command
) -> None:
    before = snapshot("whole")
    answer = surefoot("resume", "whole", "--fork", "new", "--from", "6", "--quiet")
    assert answer.code == 0, answer.err
    assert snapshot("whole") == before
    assert bits(Path("new"), 6) == bits(Path("whole"), 6)
    assert bits(Path("new"), STEPS) == bits(Path("whole"), STEPS)
    for step in manifest.steps(Path("new")):
        parent = manifest.read(manifest.step_folder(Path("new"), step)).parent
        assert parent == {
            "folder": str(Path("whole").resolve()),
            "step": 6,
            "spec_id": started("whole")[0].spec_id,
        }
    (first,) = started("new")
    assert first.first_step == 7
    assert "forked from whole after step 6" in first.notes
    told = surefoot("ledger", "new", "--json").row
    assert (told["ok"], told["last"], told["after"]) == (True, STEPS, 0)


def test_a_finished_run_trains_on_in_a_fork_and_its_ledger_holds_for_the_whole(
    spec: Path, surefoot: Command
) -> None:
    answer = surefoot("resume", "whole", "--fork", "longer", "--steps", "20", "--quiet", "--json")
    assert (answer.code, answer.row["step"]) == (0, 20)
    assert bits(Path("longer"), STEPS) == bits(Path("whole"), STEPS)
    assert consumed.check(Path("longer")).holds
    assert consumed.check(Path("longer")).last == 20
    assert "changed: train.length is '20 steps', was '14 steps'" in started("longer")[0].notes


def test_a_fork_with_another_batch_says_from_where_its_own_plan_holds(
    spec: Path, surefoot: Command
) -> None:
    assert (
        surefoot(
            "resume", "whole", "--fork", "new", "--from", "6", "--set", "train.batch=6", "--quiet"
        ).code
        == 0
    )
    answer = surefoot("ledger", "new")
    assert answer.code == 0
    assert "steps 7 to 14" in answer.out
    assert "the first 6 steps followed a different plan" in answer.out
    assert surefoot("resume", "new", "--fork", "newer", "--steps", "16", "--quiet").code == 0
    row = surefoot("ledger", "newer", "--json").row
    assert (row["ok"], row["after"], row["last"]) == (True, 6, 16)


def test_a_fork_that_is_killed_goes_on_as_a_fork(spec: Path, surefoot: Command) -> None:
    surefoot(
        "resume", "whole", "--fork", "unbroken", "--from", "6", "--set", "optim.lr=0.01", "--quiet"
    )
    train("killed", spec, leave_at=7, start=Start(Path("whole"), 6), optim={"lr": 0.01})
    assert manifest.steps(Path("killed")) == [6]
    assert surefoot("resume", "killed", "--quiet").code == 0
    assert bits(Path("killed"), STEPS) == bits(Path("unbroken"), STEPS)
    assert manifest.read(manifest.step_folder(Path("killed"), STEPS)).parent is not None
    assert consumed.check(Path("killed")).holds
    assert consumed.check(Path("killed")).last == STEPS


def test_what_a_fork_states_anew_holds_and_the_moments_stay(spec: Path, surefoot: Command) -> None:
    words = (
        "--set",
        "optim.weight_decay=0.25",
        "--set",
        "optim.betas=[0.5, 0.9]",
        "--set",
        "optim.lr=0.01",
    )
    assert surefoot("resume", "whole", "--fork", "new", "--from", "6", "--quiet", *words).code == 0
    state = json.loads((manifest.step_folder(Path("new"), 6) / "state.json").read_text())
    groups = state["optimizer"]["loss"]["optimizers"][0]["groups"]
    assert groups[0]["weight_decay"] == 0.25
    assert groups[0]["betas"] == {"$": "tuple", "items": [0.5, 0.9]}
    moments = [
        load_file(manifest.step_folder(Path(run), 6) / "optimizer.safetensors")
        for run in ("whole", "new")
    ]
    assert all(torch.equal(tensor, moments[1][name]) for name, tensor in moments[0].items())
    rates = [
        {e.step: e.learning_rates["loss"] for e in events.read(Path(run)) if isinstance(e, Step)}
        for run in ("whole", "new")
    ]
    assert rates[1][7] == pytest.approx(10 * rates[0][7])


def test_scores_begin_anew_where_they_measure_something_else(spec: Path, surefoot: Command) -> None:
    surefoot(
        *shlex.split(
            "resume whole --fork same --from 8 --set evaluate.patience=9 --steps 9 --quiet"
        )
    )
    surefoot(
        *shlex.split(
            "resume whole --fork other --from 8 --set evaluate.split=train --steps 9 --quiet"
        )
    )
    surefoot(
        *shlex.split("resume whole --fork part --from 8 --set evaluate.batches=1 --steps 9 --quiet")
    )
    surefoot(
        *shlex.split("resume part --fork size --from 9 --set evaluate.batch=3 --steps 10 --quiet")
    )
    saved = {
        run: json.loads((manifest.step_folder(Path(run), 8) / "state.json").read_text())["scores"]
        for run in ("same", "other", "part")
    }
    assert saved["same"]["best_step"] in (4, 8)
    assert saved["other"]["best_step"] is None
    assert saved["part"]["best_step"] is None
    assert "the best score is reset" in " ".join(started("size")[0].notes)
    assert (
        "the best score is reset: evaluations now measure another quantity"
        in started("other")[0].notes
    )


def test_an_older_commit_without_a_name_becomes_a_fork_in_the_next_free_folder_and_it_is_said(
    spec: Path, surefoot: Command
) -> None:
    before = snapshot("left")
    answer = surefoot("resume", "left", "--from", "4", "--quiet")
    assert answer.code == 0
    assert "warning: step 4 is not the newest checkpoint of left, which is step 6" in answer.err
    assert snapshot("left") == before
    assert manifest.steps(Path("left-1"))[0] == 4
    assert surefoot("resume", "left", "--from", "6", "--quiet").code == 0  # the newest: in place
    assert manifest.steps(Path("left"))[-1] == STEPS


def test_a_damaged_commit_is_passed_over_and_told_and_is_not_touched_in_a_folder_that_is_not_ours(
    spec: Path, surefoot: Command
) -> None:
    path = manifest.step_folder(Path("whole"), STEPS) / "optimizer.safetensors"
    path.write_bytes(path.read_bytes()[:-1] + b"\x55")
    before = snapshot("whole")
    answer = surefoot("resume", "whole", "--fork", "new", "--steps", "15", "--quiet")
    assert answer.code == 0
    assert "optimizer.safetensors is damaged" in answer.err
    assert manifest.steps(Path("new"))[0] == 12
    answer = surefoot("resume", "whole", "--fork", "newer", "--from", str(STEPS), "--quiet")
    assert answer.code == 2
    assert not Path("newer").exists()
    assert snapshot("whole") == before


def test_a_fork_never_takes_a_folder_that_holds_a_run(spec: Path, surefoot: Command) -> None:
    before = snapshot("left")
    for new in ("whole", "left"):
        answer = surefoot("resume", "whole", "--fork", new, "--from", "6", "--quiet")
        assert answer.code == 2
        assert f"{new} already holds a run and is not changed" in answer.err
        assert f"if that run is unfinished: surefoot resume {new};" in answer.err
    assert snapshot("left") == before


REFUSED = {
    "task.width=5": "of a different shape: 0.bias [4], now [5], 0.weight [4, 4], now [5, 4]",
    "optim.name=sgd": "'sgd', was 'adamw': a different optimizer has a different state",
    'optim.freeze=["0.*"]': "parameters that were frozen have no optimizer state",
    "optim.ema=0.9": "a checkpoint with an average of the weights needs optim.ema",
}


@pytest.mark.parametrize("change", REFUSED)
def test_a_change_that_the_state_does_not_go_with_is_refused_and_leaves_nothing(
    change: str, spec: Path, surefoot: Command
) -> None:
    answer = surefoot("resume", "whole", "--fork", "new", "--from", "6", "--set", change, "--quiet")
    assert (answer.code, answer.out) == (2, "")
    assert REFUSED[change] in answer.err
    assert not Path("new").exists()


def test_a_fork_notes_other_data_and_code_and_how_it_is_repeated(
    tmp_path: Path, surefoot: Command
) -> None:
    own, task = tmp_path / "own.toml", tmp_path / "own.py"
    own.write_text(SPEC.format(use=write_task(tmp_path, name="own.py")))
    train("own", own, leave_at=STOP)
    task.write_text(task.read_text().replace("torch.arange(24) % 3", "torch.arange(24) % 2"))
    assert surefoot("resume", "own", "--fork", "new", "--quiet").code == 0
    assert {
        "the training data differ from those of own",
        "the code differs from that of own: own.py",
    } <= set(started("new")[0].notes)
    told = " ".join(surefoot("show", "new").out.split())
    assert (
        f"surefoot resume {tmp_path / 'own'} --from 6 --fork NEW "
        "with the changes of the spec in the notes above" in told
    )


def test_a_fork_never_writes_into_the_store_of_the_run_it_came_from(
    spec: Path, tmp_path: Path, surefoot: Command
) -> None:
    pytest.importorskip("fsspec", reason="needs fsspec: the extra store")
    train("stored", spec, leave_at=STOP, checkpoint={"store": f"file://{tmp_path}/store"})
    before = snapshot("store")
    answer = surefoot("resume", "stored", "--fork", "new", "--quiet")
    assert answer.code == 2
    assert "is also the store of stored" in answer.err
    assert snapshot("store") == before
    assert (
        surefoot(
            "resume",
            "stored",
            "--fork",
            "new",
            "--quiet",
            "--set",
            f"checkpoint.store=file://{tmp_path}/other",
        ).code
        == 0
    )


def test_a_task_that_was_built_in_a_script_is_left_to_the_script(
    spec: Path, surefoot: Command
) -> None:
    path = Path("left", "spec.toml")
    path.write_text(
        "\n".join(line for line in path.read_text().splitlines() if not line.startswith("use"))
    )
    answer = surefoot("resume", "left")
    assert answer.code == 2
    assert "the task of left was built in a script" in answer.err


def test_a_fork_with_no_step_left_to_train_is_refused_and_told_how(
    spec: Path, surefoot: Command
) -> None:
    answer = surefoot("resume", "whole", "--fork", "new", "--quiet")
    assert answer.code == 2
    assert "starts after step 14: no step is left" in answer.err
    assert "--steps 28" in answer.err
    assert not Path("new").exists()


@pytest.mark.parametrize("weights_only", [False, True])
def test_a_fork_that_lost_its_beginning_is_never_begun_anew(
    weights_only: bool, spec: Path, surefoot: Command
) -> None:
    train(
        "killed",
        spec,
        leave_at=2 if weights_only else 7,
        start=Start(Path("whole"), 6, weights_only=weights_only),
    )
    for step in manifest.steps(Path("killed")):
        path = manifest.step_folder(Path("killed"), step) / "model.safetensors"
        path.write_bytes(path.read_bytes()[:-1] + b"\x55")
    for _ in range(2):
        answer = surefoot("resume", "killed", "--quiet")
        assert answer.code == 2, answer.err
        assert (
            f"killed started from the state of {Path('whole').resolve()} after step 6" in answer.err
        )
        words = " --weights-only" if weights_only else ""
        assert f"surefoot resume {Path('whole').resolve()} --from 6{words} --fork NEW" in answer.err
    assert len(started("killed")) == 1


def test_a_ledger_with_a_damaged_header_is_set_aside_and_the_run_goes_on(
    spec: Path, surefoot: Command
) -> None:
    path = Path("left") / ledger.FILE
    whole = path.read_bytes()
    path.write_bytes(whole[:100] + bytes([whole[100] ^ 0x80]) + whole[101:])
    damaged = path.read_bytes()
    assert surefoot("resume", "left", "--quiet").code == 0
    assert bits(Path("left"), STEPS) == bits(Path("whole"), STEPS)
    assert (Path("left") / ledger.BAD_FILE).read_bytes() == damaged
    (fault,) = faults_of(Path("left"))
    assert (fault.fault, fault.detail) == ("damaged-ledger", "ledger.bin lost the rows of 6 steps")


def test_the_hint_for_a_missing_ledger_names_a_command_that_works(
    spec: Path, surefoot: Command
) -> None:
    (Path("left") / ledger.FILE).unlink()
    for words in (("ledger", "left"), ("resume", "left", "--fork", "new")):
        answer = surefoot(*words)
        assert answer.code == 2
        assert f"{Path('left') / ledger.FILE} is missing, so it is not known" in answer.err
    hint = answer.err.partition("surefoot resume ")[2].strip().replace("NEW", "new").split()
    assert hint == ["left", "--fork", "new", "--weights-only"]
    assert surefoot("resume", *hint, "--quiet").code == 0


def test_rows_that_a_fork_takes_over_are_those_of_its_history_and_no_more(
    spec: Path, surefoot: Command
) -> None:
    train("left", spec)  # step 7 is done again
    surefoot("resume", "left", "--fork", "new", "--from", "8", "--quiet")
    rows = list(ledger.read(Path("new")))
    assert [row.step for row in rows] == list(range(1, STEPS + 1))
    assert [row.generation for row in rows] == [0] * 8 + [1] * (STEPS - 8)
