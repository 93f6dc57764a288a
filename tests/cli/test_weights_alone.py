"""Tests of runs that begin with the weights of another run alone, or with those of a file."""

from __future__ import annotations

import json
import shlex
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from surefoot.components.checkpoint.foreign import import_weights
from surefoot.components.data import consumed
from surefoot.contract import manifest
from surefoot.train.resume.start import Start
from tests.cli.conftest import Command
from tests.cli.resumed_runs import STEPS, spec, started, train, trained
from tests.prove.forked import programs_are_forked
from tests.train.test_resume import bits

__all__ = ["programs_are_forked", "spec", "trained"]  # fixtures


def write_imported(weights: dict[str, torch.Tensor]) -> None:
    """The folder `other`, as `surefoot checkpoint import` writes it once it has read a file."""
    save_file(weights, "other.safetensors")
    import_weights(Path("other.safetensors"), Path("other"), weights, {})


def test_weights_alone_begin_anew_with_what_fits_and_say_what_did_not(
    spec: Path, surefoot: Command
) -> None:
    answer = surefoot(
        *shlex.split("resume whole --weights-only --fork new --from 6 --set task.width=5 --steps 2")
    )
    assert answer.code == 0
    (first,) = started("new")
    (told,) = [note for note in first.notes if note.startswith("started with the weights")]
    assert "loaded 1 of 4 tensors" in told
    assert "of a different shape: 0.bias [4], now [5], 0.weight [4, 4], now [5, 4]" in told
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


def test_weights_none_of_which_fit_are_refused_with_both_sides(
    spec: Path, surefoot: Command
) -> None:
    write_imported({"other.weight": torch.zeros(3)})
    answer = surefoot("train", spec, "--weights", "other", "--run", "new", "--quiet")
    assert answer.code == 2
    assert "missing: 0.weight, 0.bias" in answer.err
    assert "unexpected: other.weight" in answer.err
    assert not Path("new").exists()


@pytest.mark.usefixtures("programs_are_forked")
@pytest.mark.parametrize("prefix", ["module.", "_orig_mod.", "_orig_mod.module."])
def test_the_hint_names_the_prefix_that_a_wrapper_put_before_all_names(
    prefix: str, spec: Path, surefoot: Command
) -> None:
    weights = {f"{prefix}{name}": torch.randn(shape) for name, shape in PRETRAINED.items()}
    save_file(weights, "other.safetensors")
    surefoot("checkpoint", "import", "other.safetensors", "--to", "other")
    answer = surefoot("train", spec, "--weights", "other", "--run", "new", "--quiet")
    assert answer.code == 2
    assert f"checkpoint import --strip {prefix}, so" in answer.err
    surefoot("checkpoint", "import", "other.safetensors", "--to", "bare", "--strip", prefix)
    assert surefoot("train", spec, "--weights", "bare", "--run", "new", "--quiet").code == 0


def test_the_hint_names_the_prefix_where_only_some_names_have_it(
    spec: Path, surefoot: Command
) -> None:
    names = {"0.weight": "0.weight", "0.bias": "0.bias", "2.weight": "m.2.weight"}
    write_imported({told: torch.randn(PRETRAINED[name]) for name, told in names.items()})
    answer = surefoot("train", spec, "--weights", "other", "--run", "new", "--quiet")
    assert "checkpoint import --strip m., so" in answer.err
    assert "or add --partial-weights to load" in answer.err


PRETRAINED = {"0.weight": (4, 4), "0.bias": (4,), "2.weight": (3, 4), "2.bias": (3,)}
IN_PART: dict[str, tuple[dict[str, tuple[int, ...]], str]] = {
    "one is missing": ({"2.bias": ()}, "missing: 2.bias"),
    "a different shape": (
        {"2.weight": (7, 4)},
        "of a different shape: 2.weight [7, 4], now [3, 4]",
    ),
    "one too many": ({"3.weight": (2, 2)}, "unexpected: 3.weight"),
    "another name": ({"2.bias": (), "head.bias": (3,)}, "missing: 2.bias; unexpected: head.bias"),
}


@pytest.mark.parametrize("case", IN_PART)
def test_weights_that_fit_in_part_are_refused_unless_that_is_asked_for(
    case: str, spec: Path, surefoot: Command
) -> None:
    changed, words = IN_PART[case]
    write_imported(
        {name: torch.randn(shape) for name, shape in {**PRETRAINED, **changed}.items() if shape}
    )
    answer = surefoot("train", spec, "--weights", "other", "--run", "new", "--quiet")
    assert answer.code == 2
    assert "fit only a part of the model: loaded" in answer.err
    assert words in answer.err
    assert "add --partial-weights" in answer.err
    assert "--strip" not in answer.err
    assert not Path("new").exists()
    assert (
        surefoot(
            "train", spec, "--weights", "other", "--partial-weights", "--run", "new", "--quiet"
        ).code
        == 0
    )
    (told,) = [
        note for note in started("new")[0].notes if note.startswith("started with the weights")
    ]
    assert words in told


def test_weights_that_fit_wholly_need_no_further_word(spec: Path, surefoot: Command) -> None:
    write_imported({name: torch.randn(shape) for name, shape in PRETRAINED.items()})
    assert surefoot("train", spec, "--weights", "other", "--run", "new", "--quiet").code == 0
    (told,) = [
        note for note in started("new")[0].notes if note.startswith("started with the weights")
    ]
    assert told.endswith("loaded 4 of 4 tensors")


def test_partial_weights_without_weights_are_refused(spec: Path, surefoot: Command) -> None:
    answer = surefoot("train", spec, "--partial-weights", "--run", "new", "--quiet")
    assert answer.code == 2
    assert "--partial-weights needs --weights DIR" in answer.err


@pytest.mark.usefixtures("programs_are_forked")
def test_pretrained_weights_are_imported_and_fine_tuned_and_the_frozen_part_stays_bit_for_bit(
    spec: Path, surefoot: Command
) -> None:
    pretrained = {
        "backbone.0.weight": torch.randn(4, 4),
        "backbone.0.bias": torch.randn(4),
        "backbone.2.weight": torch.zeros(7, 4),
    }
    torch.save({"state_dict": pretrained, "epoch": 3}, "pretrained.pt")
    answer = surefoot(
        *shlex.split("checkpoint import pretrained.pt --to pretrained --strip backbone. --json")
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
        note for note in started("tuned")[0].notes if note.startswith("started with the weights")
    ]
    assert (
        "loaded 2 of 3 tensors; missing: 2.bias; of a different shape: 2.weight [7, 4], now [3, 4]"
        in told
    )
    for step in (0, STEPS):
        frozen = load_file(
            manifest.step_folder(Path("tuned"), step) / "model-00002-of-00002.safetensors"
        )
        assert {name: tensor.tolist() for name, tensor in frozen.items()} == {
            name: pretrained[f"backbone.{name}"].tolist() for name in ("0.weight", "0.bias")
        }
