"""`surefoot resume`: the same run goes on, another begins where it stood, and nothing changes in silence."""

from __future__ import annotations

import contextlib
import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from surefoot.components.data import consumed
from surefoot.contract import events, ledger, manifest, spec_file
from surefoot.contract.events import Fault, Started, Step
from surefoot.core.errors import UserCodeError
from surefoot.train.resume.start import Start
from surefoot.train.run import Run
from tests.cli.conftest import Command
from tests.train.small import entries, write_task
from tests.train.test_resume import Left, bits

STEPS, STOP = 14, 7
SPEC = """
[task]
use = "{use}"
[train]
length = "14 steps"
batch = 4
[evaluate]
every = "4 steps"
[checkpoint]
every = "3 steps"
keep = 9
[observe]
tensorboard = false
every = "1 step"
"""


def train(
    folder: str,
    spec: Path,
    *,
    leave_at: int | None = None,
    start: Start | None = None,
    **tables: dict[str, Any],
) -> None:
    """The run of a spec, whole or left at a step as by a kill."""
    made = spec_file.read(str(spec)).spec.replace(**tables)
    with (
        contextlib.suppress(UserCodeError, Left),
        Run(made, folder=folder, quiet=True, start=start) as run,
    ):
        for report in run.steps():
            if run.evaluation_due:
                run.evaluate()
            if report.step == leave_at:
                raise Left
    assert (run.outcome == "finished") == (leave_at is None)


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A spec of a task in a file, its run `whole`, and `left`, left after step 7 as by a kill, when step 6 is its newest commit."""
    folder = tmp_path_factory.mktemp("trained")
    path = folder / "mine.toml"
    path.write_text(SPEC.format(use=write_task(folder)))
    train(str(folder / "whole"), path)
    train(str(folder / "left"), path, leave_at=STOP)
    return folder


@pytest.fixture
def spec(trained: Path, tmp_path: Path, surefoot: Command) -> Path:
    """All of that in the working folder; gives the spec."""
    shutil.copytree(trained, tmp_path, dirs_exist_ok=True)
    return tmp_path / "mine.toml"


def test_a_run_whose_record_is_gone_is_told_what_still_works_and_that_does(
    spec: Path, surefoot: Command
) -> None:
    Path("left", events.FILE).unlink()
    refused = surefoot("resume", "left")
    assert (refused.code, refused.out) == (2, "")
    assert refused.err.startswith(
        f"error: left has commits and no {events.FILE}: the run's record is gone"
    )
    hint = refused.err.splitlines()[-1]
    assert (
        hint
        == "hint: surefoot resume left --fork NEW goes on from the newest commit in a new folder"
    )
    words = (
        hint.removeprefix("hint: surefoot ").split(" goes on")[0].replace("NEW", "again").split()
    )
    assert surefoot(*words, "--quiet").code == 0
    assert manifest.steps(Path("again"))[-1] == STEPS


def started(folder: str) -> list[Started]:
    return [event for event in events.read(Path(folder)) if isinstance(event, Started)]


def snapshot(folder: str) -> dict[str, bytes]:
    """Every file of a folder but the lock, whose generation only rises."""
    return {
        name: (Path(folder) / name).read_bytes()
        for name in entries(Path(folder))
        if (Path(folder) / name).is_file()
    }


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
    assert (
        answer.code,
        "surefoot resume whole --fork NEW --steps 28 --set optim.lr=0.5\n" in answer.err,
    ) == (2, True)
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
    assert "--weights-only begins anew" in answer.err
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
    assert "the training data are not those" in answer.err
    assert Path("own/spec.toml").read_bytes() == before
    task.write_text(whole)
    assert surefoot("resume", "own", "--quiet").code == 0
    assert not any("the code is not that" in note for note in started("own")[-1].notes)


def test_a_code_change_that_is_accepted_is_noted(tmp_path: Path, surefoot: Command) -> None:
    own, task = tmp_path / "own.toml", tmp_path / "own.py"
    own.write_text(SPEC.format(use=write_task(tmp_path, name="own.py")))
    train("own", own, leave_at=STOP)
    task.write_text(task.read_text() + "\n# another\n")
    assert surefoot("resume", "own", "--accept-code-change", "--quiet").code == 0
    assert "the code is not that of the attempt before: own.py" in started("own")[-1].notes


def test_a_folder_that_is_no_run_is_refused(surefoot: Command) -> None:
    Path("empty").mkdir()
    answer = surefoot("resume", "empty")
    assert (answer.code, answer.out) == (2, "")
    assert "empty is no run" in answer.err


# ---- forks


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
    assert "the first 6 steps were consumed by another plan" in answer.out
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
        "optim.decay=0.25",
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
        "resume",
        "whole",
        "--fork",
        "same",
        "--from",
        "8",
        "--set",
        "evaluate.patience=9",
        "--steps",
        "9",
        "--quiet",
    )
    surefoot(
        "resume",
        "whole",
        "--fork",
        "other",
        "--from",
        "8",
        "--set",
        "evaluate.split=train",
        "--steps",
        "9",
        "--quiet",
    )
    saved = {
        run: json.loads((manifest.step_folder(Path(run), 8) / "state.json").read_text())["scores"]
        for run in ("same", "other")
    }
    assert saved["same"]["best_step"] in (4, 8)
    assert saved["other"]["best_step"] is None
    assert "scores begin anew: they now measure something else" in started("other")[0].notes


def test_an_older_commit_without_a_name_becomes_a_fork_in_the_next_free_folder_and_it_is_said(
    spec: Path, surefoot: Command
) -> None:
    before = snapshot("left")
    answer = surefoot("resume", "left", "--from", "4", "--quiet")
    assert answer.code == 0
    assert "warning: step 4 is not the newest commit of left, which is step 6" in answer.err
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
        assert f"{new} holds a run already" in answer.err
        assert f"surefoot resume {new} goes on with it where it is unfinished" in answer.err
    assert snapshot("left") == before


REFUSED = {
    "task.width=5": "of another shape: 0.bias [4], now [5], 0.weight [4, 4], now [5, 4]",
    "optim.name=sgd": "optim.name is 'sgd', was 'adamw': another optimiser has another state",
    'optim.freeze=["0.*"]': "what was frozen has no optimiser state",
    "optim.ema=0.9": "switching the average on or off",
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
    assert {"the training data are not those of own", "the code is not that of own: own.py"} <= set(
        started("new")[0].notes
    )
    told = " ".join(surefoot("show", "new").out.split())
    assert (
        f"surefoot resume {tmp_path / 'own'} --from 6 --fork NEW with the changes that its notes name"
        in told
    )


def test_a_fork_never_writes_into_the_store_of_the_run_it_came_from(
    spec: Path, tmp_path: Path, surefoot: Command
) -> None:
    pytest.importorskip("fsspec", reason="needs fsspec: the extra store")
    train("stored", spec, leave_at=STOP, checkpoint={"store": f"file://{tmp_path}/store"})
    before = snapshot("store")
    answer = surefoot("resume", "stored", "--fork", "new", "--quiet")
    assert answer.code == 2
    assert "is that of stored" in answer.err
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
    assert "begins after step 14: no step is left" in answer.err
    assert "--steps 28" in answer.err
    assert not Path("new").exists()


# ---- weights alone


def test_weights_alone_begin_anew_with_what_fits_and_say_what_did_not(
    spec: Path, surefoot: Command
) -> None:
    answer = surefoot(
        "resume",
        "whole",
        "--weights-only",
        "--fork",
        "new",
        "--from",
        "6",
        "--set",
        "task.width=5",
        "--steps",
        "2",
    )
    assert answer.code == 0
    (first,) = started("new")
    (told,) = [note for note in first.notes if note.startswith("begun with the weights")]
    assert "loaded 1 of 4 tensors" in told
    assert "of another shape: 0.bias [4], now [5], 0.weight [4, 4], now [5, 4]" in told
    assert told.replace("\n", " ")[:40] in answer.err.replace("\n", " ")
    assert first.first_step == 1
    assert manifest.steps(Path("new"))[0] == 0
    made = manifest.read(manifest.step_folder(Path("new"), 0))
    assert made.parent is not None
    assert (made.parent["step"], made.parent["weights_only"]) == (6, True)
    weights = [
        load_file(manifest.step_folder(Path(run), step) / "model.safetensors")
        for run, step in (("whole", 6), ("new", 0))
    ]
    assert torch.equal(weights[0]["2.bias"], weights[1]["2.bias"])
    state = json.loads((manifest.step_folder(Path("new"), 0) / "state.json").read_text())
    assert (state["num_samples"], state["scores"]["best"]) == (0, None)
    assert consumed.check(Path("new")).holds


def test_weights_alone_of_a_run_with_an_average_begin_the_average(
    spec: Path, surefoot: Command
) -> None:
    train("averaged", spec, optim={"ema": 0.9})
    assert surefoot("resume", "averaged", "--weights-only", "--fork", "new", "--quiet").code == 0
    begun = manifest.step_folder(Path("new"), 0)
    served = load_file(manifest.step_folder(Path("averaged"), STEPS) / "model.safetensors")
    for file in ("model.safetensors", "weights.safetensors"):
        assert all(
            torch.equal(tensor, served[name]) for name, tensor in load_file(begun / file).items()
        )


def test_a_new_run_that_was_killed_before_its_first_save_still_has_the_weights(
    spec: Path, surefoot: Command
) -> None:
    for folder, leave_at in (("unbroken", None), ("killed", 2)):
        train(folder, spec, leave_at=leave_at, start=Start(Path("whole"), 6, weights_only=True))
    assert surefoot("resume", "killed", "--quiet").code == 0
    assert bits(Path("killed"), STEPS) == bits(Path("unbroken"), STEPS)
    assert started("killed")[1].first_step == 1


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
            f"killed began with the state of {Path('whole').resolve()} after step 6" in answer.err
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
    (fault,) = (event for event in events.read(Path("left")) if isinstance(event, Fault))
    assert (fault.fault, fault.detail) == ("damaged-ledger", "ledger.bin lost the rows of 6 steps")


def test_weights_none_of_which_fit_are_refused_with_both_sides(
    spec: Path, surefoot: Command
) -> None:
    save_file({"other.weight": torch.zeros(3)}, "other.safetensors")
    surefoot("checkpoint", "import", "other.safetensors", "--to", "other")
    answer = surefoot("train", spec, "--weights", "other", "--run", "new", "--quiet")
    assert answer.code == 2
    assert "missing: 0.weight, 0.bias" in answer.err
    assert "unexpected: other.weight" in answer.err
    assert not Path("new").exists()


PRETRAINED = {"0.weight": (4, 4), "0.bias": (4,), "2.weight": (3, 4), "2.bias": (3,)}
IN_PART: dict[str, tuple[dict[str, tuple[int, ...]], str]] = {
    "one is missing": ({"2.bias": ()}, "missing: 2.bias"),
    "another shape": ({"2.weight": (7, 4)}, "of another shape: 2.weight [7, 4], now [3, 4]"),
    "one too many": ({"3.weight": (2, 2)}, "unexpected: 3.weight"),
    "another name": ({"2.bias": (), "head.bias": (3,)}, "missing: 2.bias; unexpected: head.bias"),
}


@pytest.mark.quick("another name", "one is missing")
@pytest.mark.parametrize("case", IN_PART)
def test_weights_that_fit_in_part_are_refused_unless_that_is_asked_for(
    case: str, spec: Path, surefoot: Command
) -> None:
    changed, words = IN_PART[case]
    save_file(
        {name: torch.randn(shape) for name, shape in {**PRETRAINED, **changed}.items() if shape},
        "other.safetensors",
    )
    assert surefoot("checkpoint", "import", "other.safetensors", "--to", "other").code == 0
    answer = surefoot("train", spec, "--weights", "other", "--run", "new", "--quiet")
    assert answer.code == 2
    assert "fit the model in part: loaded" in answer.err
    assert words in answer.err
    assert "add --partial-weights" in answer.err
    assert not Path("new").exists()
    assert (
        surefoot(
            "train", spec, "--weights", "other", "--partial-weights", "--run", "new", "--quiet"
        ).code
        == 0
    )
    (told,) = [
        note for note in started("new")[0].notes if note.startswith("begun with the weights")
    ]
    assert words in told


def test_weights_that_fit_wholly_need_no_further_word(spec: Path, surefoot: Command) -> None:
    save_file({name: torch.randn(shape) for name, shape in PRETRAINED.items()}, "other.safetensors")
    surefoot("checkpoint", "import", "other.safetensors", "--to", "other")
    assert surefoot("train", spec, "--weights", "other", "--run", "new", "--quiet").code == 0
    (told,) = [
        note for note in started("new")[0].notes if note.startswith("begun with the weights")
    ]
    assert told.endswith("loaded 4 of 4 tensors")


def test_partial_weights_without_weights_are_refused(spec: Path, surefoot: Command) -> None:
    answer = surefoot("train", spec, "--partial-weights", "--run", "new", "--quiet")
    assert answer.code == 2
    assert "--partial-weights goes with --weights DIR" in answer.err


def test_pretrained_weights_are_imported_frozen_and_fine_tuned_and_the_frozen_part_stays_bit_for_bit(
    spec: Path, surefoot: Command
) -> None:
    pretrained = {
        "backbone.0.weight": torch.randn(4, 4),
        "backbone.0.bias": torch.randn(4),
        "backbone.2.weight": torch.zeros(7, 4),
    }
    torch.save({"state_dict": pretrained, "epoch": 3}, "pretrained.pt")
    answer = surefoot(
        "checkpoint",
        "import",
        "pretrained.pt",
        "--to",
        "pretrained",
        "--strip",
        "backbone.",
        "--json",
    )
    assert (answer.code, answer.row["num_tensors"], answer.row["also"]) == (0, 3, ["epoch"])
    words = (
        "--weights",
        "pretrained",
        "--partial-weights",
        "--set",
        'optim.freeze=["0.*"]',
        "--run",
        "tuned",
        "--json",
        "--quiet",
    )
    assert surefoot("train", spec, *words).code == 0
    (told,) = [
        note for note in started("tuned")[0].notes if note.startswith("begun with the weights")
    ]
    assert (
        "loaded 2 of 3 tensors; missing: 2.bias; of another shape: 2.weight [7, 4], now [3, 4]"
        in told
    )
    for step in (0, STEPS):
        frozen = load_file(
            manifest.step_folder(Path("tuned"), step) / "model-00002-of-00002.safetensors"
        )
        assert {name: tensor.tolist() for name, tensor in frozen.items()} == {
            name: pretrained[f"backbone.{name}"].tolist() for name in ("0.weight", "0.bias")
        }


def test_rows_that_a_fork_takes_over_are_those_of_its_history_and_no_more(
    spec: Path, surefoot: Command
) -> None:
    train("left", spec)  # step 7 is done again
    surefoot("resume", "left", "--fork", "new", "--from", "8", "--quiet")
    rows = list(ledger.read(Path("new")))
    assert [row.step for row in rows] == list(range(1, STEPS + 1))
    assert [row.generation for row in rows] == [0] * 8 + [1] * (STEPS - 8)
