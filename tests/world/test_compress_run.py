"""Runs of several ranks that send compressed gradients: losses, commits, resumed residuals."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import nn

from surefoot.contract import manifest
from surefoot.contract.spec import RunSpec
from surefoot.core.errors import SpecError
from surefoot.core.ranks.layout import Layout
from surefoot.prove.layouts.verify import as_trial
from surefoot.train.resume.per_rank import unsent
from surefoot.train.run import Run
from tests.world.ranks import run_ranks
from tests.world.test_masters_on_ranks import Narrow
from tests.world.test_run import Sentences, spec, train

# ---- whole runs


class Wide(Sentences):
    """With matrices that are worth compressing."""

    def model(self) -> nn.Module:
        model = super().model()
        model["hidden"] = nn.Sequential(nn.Linear(8, 40), nn.Tanh(), nn.Linear(40, 8)).double()  # type: ignore[operator]
        return model


def given(kind: str, **tables: Any) -> RunSpec:
    layout = {
        "compress": kind,
        "check_every": "1 step",
        **({"compress_rank": 2} if kind == "powersgd" else {}),
    }
    more = {
        "train": {"length": "9 steps"},
        "checkpoint": {"every": "3 steps", "keep": 9},
        "evaluate": {"every": "4 steps"},
    }
    return spec(layout=layout, **{**more, **tables})


def state_of(folder: Path, step: int) -> dict[str, bytes]:
    """Every tensor of a commit, as bytes."""
    found = {}
    for path in sorted(manifest.step_folder(folder, step).glob("*.safetensors")):
        found |= {
            f"{path.name}/{name}": each.contiguous().view(-1).view(torch.uint8).numpy().tobytes()
            for name, each in load_file(path).items()
        }
    return found


@pytest.fixture(scope="module")
def kinds(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, Any]]:
    """Runs of two ranks of every kind, by name below a folder, and what their ranks made."""
    folder, found = tmp_path_factory.mktemp("kinds"), {}
    for kind in ("none", "bf16", "fp16", "powersgd"):
        found[kind] = run_ranks(
            2,
            lambda rank, kind=kind: train(folder / kind, Wide(), given(kind)),
            folder / f"r-{kind}",
        )
        assert all("losses" in each for each in found[kind]), found
    return folder, found


@pytest.mark.slow
def test_runs_that_compress_are_near_the_one_that_does_not_and_their_replicas_are_alike(
    kinds: tuple[Path, dict[str, Any]],
) -> None:
    assert all(first == second for first, second in kinds[1].values())  # the same bits
    losses = {kind: first["losses"] for kind, (first, _) in kinds[1].items()}
    for kind in ("bf16", "fp16"):
        assert losses[kind] != losses["none"]
        assert losses[kind] == pytest.approx(losses["none"], rel=0.02)
    assert losses["powersgd"][0] == losses["none"][0]  # of weights that nothing has moved yet
    assert 0 < abs(losses["powersgd"][1] / losses["none"][1] - 1) < 0.1


def test_masters_take_part(tmp_path: Path) -> None:
    more = {
        "precision": {"weights": "bf16", "compute": "bf16"},
        "train": {"length": "4 steps"},
        "evaluate": {"every": "9 epochs"},
    }
    for kind in ("bf16", "powersgd"):
        found = run_ranks(
            2,
            lambda rank, kind=kind: train(tmp_path / kind, Narrow(), given(kind, **more)),
            tmp_path / f"r-{kind}",
        )
        assert all("losses" in each for each in found), found
        assert found[0]["state"] == found[1]["state"]


@pytest.mark.slow
@pytest.mark.parametrize("num_ranks", [2, 4])
def test_a_run_with_powersgd_that_was_left_ends_with_the_bits_of_one_that_was_not(
    num_ranks: int, kinds: tuple[Path, dict[str, Any]], tmp_path: Path
) -> None:
    folder, whole = kinds[0] / "powersgd", kinds[1]["powersgd"]
    if num_ranks != len(whole):
        folder = tmp_path / "whole"
        whole = run_ranks(
            num_ranks, lambda rank: train(folder, Wide(), given("powersgd")), tmp_path / "a"
        )
    for number, most in enumerate((5, None)):
        found = run_ranks(
            num_ranks,
            lambda rank, most=most: train(tmp_path / "run", Wide(), given("powersgd"), most=most),
            tmp_path / f"b{number}",
        )
    assert 0 < len(found[0]["losses"]) < len(whole[0]["losses"])
    assert found[0]["losses"] == whole[0]["losses"][-len(found[0]["losses"]) :]
    assert [each["state"] for each in found] == [each["state"] for each in whole]
    for step in (6, 9):
        unbroken, resumed = state_of(folder, step), state_of(tmp_path / "run", step)
        assert unbroken == resumed
        assert sum(name.startswith("unsent-rank-") for name in unbroken) >= num_ranks
    mine = [
        state_of(tmp_path / "run", 9)[
            f"unsent-rank-{rank}.safetensors/unsent/{rank}/loss/hidden.0.weight"
        ]
        for rank in (0, 1)
    ]
    assert mine[0] != mine[1]


@pytest.mark.slow
def test_a_run_that_forgets_what_was_not_sent_is_seen_to(
    kinds: tuple[Path, dict[str, Any]], tmp_path: Path
) -> None:
    whole = kinds[1]["powersgd"]

    def job(rank: int, most: int | None) -> Any:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(unsent, "_add", lambda *_: None)
            return train(tmp_path / "run", Wide(), given("powersgd"), most=most)

    for number, most in enumerate((5, None)):
        found = run_ranks(2, lambda rank, most=most: job(rank, most), tmp_path / f"b{number}")
    assert found[0]["losses"] != whole[0]["losses"][-len(found[0]["losses"]) :]


@pytest.mark.slow
def test_of_another_number_of_ranks_the_sum_of_what_was_not_sent_stays_and_it_is_said(
    tmp_path: Path,
) -> None:
    def job(rank: int, folder: Path) -> Any:
        with Run(given("powersgd"), Wide(), folder=folder, quiet=True) as run:
            ranks = run.assembly.engine.steps.collectives.ranks
            if ranks is None:
                return [list(run.assembly.told)]
            names = {
                id(parameter): name
                for name, parameter in run.model.named_parameters(remove_duplicate=False)
            }
            return [
                run.assembly.told,
                {
                    name: each.residual.tolist()
                    for name, each in unsent.powersgd_state_of(ranks, names).items()
                },
            ]

    run_ranks(
        4, lambda rank: train(tmp_path / "run", Wide(), given("powersgd"), most=5), tmp_path / "a"
    )
    saved = manifest.step_folder(tmp_path / "run", manifest.steps(tmp_path / "run")[-1])
    parts = [load_file(saved / f"unsent-rank-{rank}.safetensors") for rank in range(4)]
    shutil.copytree(tmp_path / "run", tmp_path / "copy")
    first, second = run_ranks(2, lambda rank: job(rank, tmp_path / "run"), tmp_path / "b")
    assert any(
        "the saved PowerSGD residuals of 4 ranks are summed on rank 0: 2 ranks resume" in each
        for each in first[0]
    )
    for name, rows in first[1].items():
        total = sum(part[f"unsent/{rank}/{name}"] for rank, part in enumerate(parts))
        assert torch.equal(torch.tensor(rows, dtype=torch.float64), total)  # type: ignore[arg-type]
        assert torch.tensor(second[1][name]).count_nonzero() == 0
    (alone,) = run_ranks(1, lambda rank: job(rank, tmp_path / "copy"), tmp_path / "c")
    assert any("the saved PowerSGD residuals of 4 ranks are dropped" in each for each in alone[0])


def test_a_save_that_one_rank_is_asked_for_is_made_by_all(tmp_path: Path) -> None:
    def job(rank: int) -> Any:
        given_ = given("powersgd").replace(checkpoint={"every": "never"})
        with Run(given_, Wide(), folder=tmp_path / "run", quiet=True) as run:
            for report in run.steps():
                if report.step == 4 and rank == 1:
                    run.session.keeper.ask()
        return run.step

    assert run_ranks(2, job, tmp_path / "ranks") == [9, 9]
    assert manifest.steps(tmp_path / "run") == [4, 9]


def test_a_run_that_compresses_is_another_run_and_one_rank_says_that_it_does_nothing(
    tmp_path: Path,
) -> None:
    assert spec().id != given("bf16").id
    assert spec().id == spec(layout={"check_every": "1 step"}).id

    def job(rank: int) -> Any:
        with Run(given("powersgd"), Wide(), folder=tmp_path / "run", quiet=True) as run:
            return run.assembly.told

    (notes,) = run_ranks(1, job, tmp_path / "one")
    assert "layout.compress = 'powersgd' has no effect: the run has one rank" in json.dumps(notes)


def test_layouts_are_not_verified_with_compression_which_computes_something_else_on_purpose() -> (
    None
):
    with pytest.raises(SpecError, match="sends less than the gradients") as caught:
        as_trial(RunSpec(task={"use": "digits"}, layout={"compress": "bf16"}), [Layout(2)], 2)
    assert caught.value.hint == "verify with --set layout.compress=none"
