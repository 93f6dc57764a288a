"""Tests of `surefoot check`.

A run folder is whole where all is there that its log tells of, and nothing of it is damaged.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import surefoot
from surefoot.contract import manifest
from surefoot.contract.run_folder import removals
from tests.cli.conftest import Answer, Command
from tests.cli.test_a_run import documented
from tests.train.small import FEW, call, write_task

EVERY = ("--set", "checkpoint.every=2 steps", "--quiet")


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Runs of 8 and 12 steps with commits every 2, and one run of another seed.

    Of the commits retention left the newest three and the best.
    """
    root = tmp_path_factory.mktemp("made")
    task = write_task(root)
    with pytest.MonkeyPatch.context() as patch:
        assert call(patch, "train", task, *FEW, *EVERY, "--run", str(root / "run")) == 0
        assert (
            call(patch, "train", task, *FEW, *EVERY, "--steps", "12", "--run", str(root / "long"))
            == 0
        )
        assert (
            call(patch, "train", task, *FEW, *EVERY, "--seed", "7", "--run", str(root / "other"))
            == 0
        )
        assert (
            call(
                patch,
                "train",
                task,
                *FEW,
                "--set",
                "checkpoint.every=4 steps",
                "--quiet",
                "--run",
                str(root / "few"),
            )
            == 0
        )
    return root


@pytest.fixture
def runs(made: Path, surefoot: Command, tmp_path: Path) -> Path:
    """Copies of them, which is how each of these tests also judges a copied folder."""
    return shutil.copytree(made, tmp_path / "copied")


def commit(run: Path, step: int) -> Path:
    return manifest.step_folder(run, step)


def flip(path: Path, place: int) -> None:
    data = bytearray(path.read_bytes())
    data[place] ^= 0x80
    path.write_bytes(bytes(data))


def states(answer: Answer) -> dict[Any, str]:
    row = answer.row
    return {
        each.get("part", each.get("step")): each["state"]
        for each in (*row["parts"], *row["commits"])
    }


def not_whole(answer: Answer) -> dict[Any, str]:
    return {
        name: state for name, state in states(answer).items() if state not in ("whole", "removed")
    }


def test_a_copied_run_is_whole_and_what_retention_deleted_is_no_loss(
    runs: Path, surefoot: Command
) -> None:
    for name in ("run", "long", "other", "few"):
        answer = surefoot("check", runs / name, "--json")
        assert answer.code == 0
        assert not_whole(answer) == {}
        assert answer.row["ok"]
        assert surefoot("check", runs / name).out.splitlines()[-1] == "the run folder is whole"
        assert surefoot("checkpoint", "check", runs / name).code == 0
    found = states(surefoot("check", runs / "long", "--json"))
    assert found[2] == "removed"
    assert [found[step] for step in (8, 10, 12)] == ["whole"] * 3
    row = surefoot("check", runs / "long", "--json").row
    assert {*row, *row["parts"][0], *row["commits"][0]} == documented("check")


def remove_all(run: Path) -> None:
    shutil.rmtree(run / "checkpoints")


def set_aside(run: Path) -> None:
    commit(run, 8).rename(commit(run, 8).with_name(f".bad-{commit(run, 8).name}"))


def damage_log(run: Path) -> None:
    flip(run / "events.jsonl", 10)


def change_spec(run: Path) -> None:
    text = (run / "spec.toml").read_text()
    assert "batch = 4" in text
    (run / "spec.toml").write_text(text.replace("batch = 4", "batch = 6"))


def take_other_ledger(run: Path) -> None:
    shutil.copy(run.parent / "other" / "ledger.bin", run)


def cut_ledger(run: Path) -> None:
    data = (run / "ledger.bin").read_bytes()
    (run / "ledger.bin").write_bytes(data[:-16])


def cut_log(run: Path, kept: int = 2) -> None:
    """Keep the first `kept` lines and a part of the next, as an interrupted copy does."""
    lines = (run / "events.jsonl").read_bytes().splitlines(keepends=True)
    (run / "events.jsonl").write_bytes(b"".join(lines[:kept]) + lines[kept][:20])


def keep_ledger_alone(run: Path) -> None:
    """Cut the log of a run that has no checkpoint, and whose ledger is far past its first step."""
    cut_log(run)
    shutil.rmtree(run / "checkpoints")


SPOILED: dict[str, tuple[Callable[[Path], object], set[Any], str]] = {
    "all commits gone": (remove_all, {4, 6, 8}, "lost"),
    "the newest gone": (lambda run: shutil.rmtree(commit(run, 8)), {8}, "lost"),
    "one in the middle gone": (lambda run: shutil.rmtree(commit(run, 6)), {6}, "lost"),
    "the newest set aside": (set_aside, {8}, "lost"),
    "a byte of a commit": (
        lambda run: flip(commit(run, 6) / "model.safetensors", -5),
        {6},
        "damaged",
    ),
    "a manifest": (lambda run: (commit(run, 8) / "manifest.json").unlink(), {8}, "damaged"),
    "a line of the log": (damage_log, {"log"}, "damaged"),
    "a log without its end": (cut_log, {"log"}, "damaged"),
    "no spec": (lambda run: (run / "spec.toml").unlink(), {"spec"}, "damaged"),
    "a different spec": (change_spec, {"spec"}, "damaged"),
    "the ledger of another run": (take_other_ledger, {"ledger"}, "damaged"),
    "a ledger without its end": (cut_ledger, {"ledger"}, "damaged"),
    "no ledger": (lambda run: (run / "ledger.bin").unlink(), {"ledger"}, "damaged"),
}


@pytest.mark.parametrize("what", SPOILED)
def test_what_is_damaged_or_missing_is_named_and_nothing_else(
    what: str, runs: Path, surefoot: Command
) -> None:
    spoil, names, state = SPOILED[what]
    spoil(runs / "run")
    answer = surefoot("check", runs / "run", "--json")
    assert answer.code == 1
    assert not_whole(answer) == dict.fromkeys(names, state)
    told = surefoot("check", runs / "run")
    assert (told.code, told.out.splitlines()[-1]) == (1, "the run folder is NOT whole")
    if state == "lost":
        alone = surefoot("checkpoint", "check", runs / "run", "--json")
        assert (alone.code, names <= set(alone.row["gone"])) == (1, True)
        assert "GONE" in surefoot("checkpoint", "check", runs / "run").out


def test_a_cut_log_is_named_as_the_run_resumes_and_stays_damaged_after_it(
    runs: Path, surefoot: Command
) -> None:
    cut_log(runs / "run")
    told = surefoot("check", runs / "run").out
    assert "its records end at step 1, but checkpoints/ has steps 4, 6, 8: records are" in told
    answer = surefoot("resume", runs / "run")
    assert answer.code == 0
    assert "checkpoints/ has steps 4, 6, 8: records are missing" in answer.err
    assert not_whole(surefoot("check", runs / "run", "--json")) == {"log": "damaged"}
    assert "attempt 2 resumed after step 8, but" in surefoot("check", runs / "run").out


def test_a_ledger_far_past_a_cut_log_shows_that_records_are_missing(
    runs: Path, surefoot: Command
) -> None:
    keep_ledger_alone(runs / "long")
    assert not_whole(surefoot("check", runs / "long", "--json")) == {"log": "damaged"}


def test_a_log_without_the_records_of_its_last_saves_is_that_of_a_killed_run(
    runs: Path, surefoot: Command
) -> None:
    path = runs / "run" / "events.jsonl"
    lines = path.read_bytes().splitlines(keepends=True)
    last = max(n for n, line in enumerate(lines) if b'"kind": "step"' in line)
    path.write_bytes(b"".join(lines[: last + 1]) + lines[last + 1][:20])
    assert not_whole(surefoot("check", runs / "run", "--json")) == {}
    assert surefoot("resume", runs / "run", "--quiet").code == 0
    assert not_whole(surefoot("check", runs / "run", "--json")) == {}


def test_the_cut_log_of_an_attached_loop_is_damaged(tmp_path: Path, surefoot: Command) -> None:
    attach_a_loop(tmp_path / "loop")
    cut_log(tmp_path / "loop")
    assert not_whole(surefoot("check", tmp_path / "loop", "--json")) == {"log": "damaged"}


@pytest.mark.parametrize(("step", "state"), [(4, "lost"), (8, "lost")])
def test_without_a_record_of_removals_what_retention_keeps_is_lost(
    step: int, state: str, runs: Path, surefoot: Command
) -> None:
    assert not (runs / "few" / removals.FILE).exists()
    shutil.rmtree(commit(runs / "few", step))
    assert not_whole(surefoot("check", runs / "few", "--json")) == {step: state}


def test_the_run_of_an_older_surefoot_loses_nothing_by_its_retention(
    runs: Path, surefoot: Command
) -> None:
    (runs / "long" / removals.FILE).unlink()
    answer = surefoot("check", runs / "long", "--json")
    assert answer.code == 0
    assert states(answer)[2] == "removed"


def test_a_line_that_a_full_disk_cut_costs_the_record_of_that_line_alone(runs: Path) -> None:
    path = runs / "long" / removals.FILE
    before = removals.read(runs / "long")
    path.write_text(path.read_text() + '\n{"step": 8, "gen')
    assert removals.read(runs / "long") == before
    assert removals.record(runs / "long", [10])
    assert [each.step for each in removals.read(runs / "long")] == [
        *(each.step for each in before),
        10,
    ]


def test_prune_and_a_fork_leave_folders_that_are_whole(runs: Path, surefoot: Command) -> None:
    assert surefoot("checkpoint", "prune", runs / "run", "--keep", "2", "--json").row["deleted"]
    assert surefoot("check", runs / "run").code == 0
    assert (
        surefoot("resume", runs / "few", "--fork", runs / "fork", "--steps", "12", "--quiet").code
        == 0
    )
    assert surefoot("check", runs / "fork").code == 0


def test_a_committed_step_that_was_deleted_written_again_and_lost_is_lost(
    runs: Path, surefoot: Command
) -> None:
    run = runs / "run"
    with (run / removals.FILE).open("a") as file:
        file.write(json.dumps({"step": 6, "generation": 0, "others": []}) + "\n")
    shutil.rmtree(commit(run, 6))
    assert not_whole(surefoot("check", run, "--json")) == {6: "lost"}


def test_the_run_of_an_attached_loop_is_whole_and_its_lost_commit_is_named(
    tmp_path: Path, surefoot: Command
) -> None:
    attach_a_loop(tmp_path / "loop")
    answer = surefoot("check", tmp_path / "loop", "--json")
    assert (answer.code, not_whole(answer)) == (0, {})
    assert answer.row["commits"][0]["state"] == "removed"
    shutil.rmtree(commit(tmp_path / "loop", 10))
    assert not_whole(surefoot("check", tmp_path / "loop", "--json")) == {10: "lost"}


def test_epochs_that_a_loop_has_left_are_no_damage(tmp_path: Path, surefoot: Command) -> None:
    attach_a_loop(tmp_path / "loop", limit=2)
    assert surefoot("ledger", tmp_path / "loop").code == 1
    assert surefoot("check", tmp_path / "loop").code == 0


def attach_a_loop(folder: Path, limit: int | None = None) -> None:
    torch.manual_seed(0)
    model = nn.Linear(3, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    loader = DataLoader(TensorDataset(torch.randn(20, 3)), batch_size=4, shuffle=True)
    with surefoot.attach(
        model=model, optimizer=optimizer, data=loader, folder=folder, save="2 steps"
    ) as run:
        for _ in range(2):
            for number, (x,) in enumerate(run.batches(), 1):
                loss = model(x).square().mean()
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
                run.step_done(loss)
                if number == limit:
                    break


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (Path.mkdir, "is not a run: it holds no"),
        (Path.touch, "is not a run: it is a file"),
        (lambda path: None, "does not exist"),
    ],
)
def test_what_is_no_run_is_refused(
    make: Callable[[Path], object], words: str, tmp_path: Path, surefoot: Command
) -> None:
    make(tmp_path / "nothing")
    answer = surefoot("check", tmp_path / "nothing")
    assert answer.code == 2
    assert f"nothing {words}" in answer.err
