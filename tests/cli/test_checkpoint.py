"""Tests of `surefoot checkpoint`.

What it lists is there, what it finds damaged is damaged, what it deletes need not stay.
"""

from __future__ import annotations

import errno
import json
import os
import runpy
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from surefoot.components import checkpoint
from surefoot.contract import commits, manifest
from surefoot.contract.manifest import NAME
from tests.cli.conftest import Command
from tests.cli.saved_commits import ROOT, RUN, flip, path_of, rewrite, run, save, saved
from tests.cli.test_a_run import documented

__all__ = ["run", "saved"]  # fixtures

# ---- list, show


def test_list_tells_each_commit_its_best_and_what_is_linked(run: Path, surefoot: Command) -> None:
    answer = surefoot("checkpoint", "list", run)
    assert answer.code == 0
    lines = answer.out.splitlines()
    assert lines[0].split() == ["step", "attempt", "size", "linked", "score", "age"]
    assert [line.split()[0] for line in lines[1:]] == ["1", "2", "3", "4", "5", "6"]
    assert [line.endswith("best") for line in lines[1:]] == [
        False,
        False,
        True,
        False,
        False,
        False,
    ]
    row = surefoot("checkpoint", "list", run, "--json").row
    assert "model.safetensors" in row["commits"][1]["linked"]
    assert row["commits"][0]["linked"] == []
    assert {*row, *row["commits"][0], "error"} == documented("checkpoint list")


def test_list_tells_what_kills_left_and_what_cannot_be_read(run: Path, surefoot: Command) -> None:
    (run / "checkpoints" / ".draft-step-000000000007").mkdir()
    flip(path_of(2, manifest.FILE), 40)
    answer = surefoot("checkpoint", "list", run)
    assert answer.code == 0
    assert "unfinished or set aside: run/checkpoints/.draft-step-000000000007" in answer.err
    assert "manifest.json" in answer.out


@pytest.mark.parametrize(
    "harm", [lambda path: flip(path, 40), Path.unlink], ids=["damaged", "missing"]
)
def test_show_tells_that_the_newest_cannot_be_read_and_shows_the_one_before(
    harm: Any, run: Path, surefoot: Command
) -> None:
    newest = path_of(6, manifest.FILE)
    harm(newest)
    answer = surefoot("checkpoint", "show", run, "--json")
    assert (answer.code, answer.row["step"]) == (0, 5)
    assert answer.err.startswith(f"warning: {newest} ")
    assert answer.err.endswith("; the checkpoint before it is shown\n")
    assert surefoot("checkpoint", "show", f"{run}:6").code == 2
    for step in range(1, 6):
        path_of(step, manifest.FILE).unlink()
    assert surefoot("checkpoint", "show", run).code == 2


def test_show_tells_files_tensors_shapes_and_dtypes(run: Path, surefoot: Command) -> None:
    for words in (
        (f"{run}:3",),
        (run, "--step", "3"),
        (run, "--step", "best"),
        (path_of(3).parent,),
    ):
        answer = surefoot("checkpoint", "show", *words)
        assert answer.code == 0
        assert "step-000000000003" in answer.out
        assert "accuracy 0.9" in answer.out
        assert "0.weight  F32    [4, 3]" in answer.out
    row = surefoot("checkpoint", "show", run, "--json").row
    assert row["step"] == 6
    (weights,) = [each for each in row["files"] if each["name"] == "model.safetensors"]
    assert weights["tensors"]["1.weight"]["shape"] == [2, 4]
    assert {"spec_id", "format", "layout", "environment", "files"} <= set(row)


@pytest.mark.parametrize("verb", ["list", "show", "check", "prune"])
def test_a_folder_without_commits_is_refused(verb: str, surefoot: Command) -> None:
    Path("empty").mkdir()
    answer = surefoot("checkpoint", verb, "empty")
    assert (answer.code, answer.out) == (2, "")
    assert "empty has no checkpoints" in answer.err


def test_a_step_that_is_not_there_is_told_with_those_that_are(run: Path, surefoot: Command) -> None:
    answer = surefoot("checkpoint", "show", f"{run}:9")
    assert answer.code == 2
    assert "1, 2, 3, 4, 5, 6" in answer.err


# ---- check


def test_a_sound_run_passes_and_says_after_which_step_it_goes_on(
    run: Path, surefoot: Command
) -> None:
    answer = surefoot("checkpoint", "check", run)
    assert answer.code == 0
    assert answer.out.splitlines()[-1] == "a run resumes after step 6"
    assert surefoot("checkpoint", "check", f"{run}:2").code == 0


def test_what_moves_commits_waits_for_nobody_and_is_refused_while_the_run_trains(
    run: Path, surefoot: Command
) -> None:
    from surefoot.contract.runlock import RunLock

    flip(path_of(5, "state.json"), 3)
    with RunLock(run):
        for words in (("check", run, "--repair"), ("prune", run, "--keep", "2")):
            answer = surefoot("checkpoint", *words)
            assert answer.code == 2
            assert "is being written by process" in answer.err
    assert len(manifest.steps(run)) == 6


def test_names_that_steer_a_terminal_are_shown_harmless(surefoot: Command) -> None:
    name = "\x1b[31mred"
    made = checkpoint.save(RUN, 1, {name: torch.ones(3)})
    (pieces,) = [entry.tensors for entry in made.files if entry.tensors]
    flip(
        path_of(1, "state.safetensors"),
        pieces[f"state/values/{name}"].start - sum(p.num_bytes for p in pieces.values()),
    )
    for words in (("show", RUN), ("check", RUN), ("diff", RUN, RUN)):
        answer = surefoot("checkpoint", *words)
        assert "\x1b" not in answer.out + answer.err, words
    assert "?[31mred" in surefoot("checkpoint", "show", RUN).out


# ---- prune


def test_prune_keeps_the_newest_the_best_and_multiples_and_touches_no_foreign_name(
    run: Path, surefoot: Command
) -> None:
    (run / "checkpoints" / "notes").mkdir()
    (run / "checkpoints" / "step-7").mkdir()
    told = surefoot(
        "checkpoint", "prune", run, "--keep", "2", "--keep-every", "4 steps", "--dry-run"
    )
    assert told.out.splitlines() == ["would be deleted: step 1, step 2"]
    assert manifest.steps(run) == [1, 2, 3, 4, 5, 6]
    row = surefoot(
        "checkpoint", "prune", run, "--keep", "2", "--keep-every", "4 steps", "--json"
    ).row
    assert row["deleted"] == [1, 2]
    assert set(row) == documented("checkpoint prune")
    assert manifest.steps(run) == [3, 4, 5, 6]
    assert sorted(
        path.name for path in (run / "checkpoints").iterdir() if not path.name.startswith("step-0")
    ) == ["notes", "step-7"]
    assert surefoot("checkpoint", "check", run).code == 0


def test_prune_verifies_the_newest_checkpoint_also_where_nothing_is_to_be_deleted(
    run: Path, surefoot: Command
) -> None:
    assert surefoot("checkpoint", "prune", run, "--keep", "9").code == 0
    path = run / "checkpoints" / "step-000000000006" / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-1] + b"?")
    answer = surefoot("checkpoint", "prune", run, "--keep", "9")
    assert answer.code == 1
    assert "nothing was deleted, because the newest checkpoint is damaged" in answer.err


@pytest.mark.parametrize("every", ["0 s", "0 steps", "0 epochs"])
def test_multiples_of_nothing_are_refused(every: str, run: Path, surefoot: Command) -> None:
    answer = surefoot("checkpoint", "prune", run, "--keep", "2", "--keep-every", every)
    assert (answer.code, answer.out) == (2, "")
    assert f"--keep-every must be more than 0; got '{every}'" in answer.err
    assert len(manifest.steps(run)) == 6


@pytest.mark.parametrize("words", [("prune", "--keep", "2"), ("check", "--repair")])
def test_a_disk_that_is_read_only_is_told_without_flags_that_are_not_there(
    words: tuple[str, ...], run: Path, surefoot: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    flip(path_of(5), -1)
    (run / "run.lock").write_text("{}")

    def refused(*given: object) -> int:
        raise OSError(errno.EROFS, os.strerror(errno.EROFS))

    monkeypatch.setattr("surefoot.contract.runlock.RunLock._open", refused)
    answer = surefoot("checkpoint", words[0], run, *words[1:])
    assert (answer.code, answer.out) == (2, "")
    assert "run cannot be written: Read-only file system" in answer.err
    assert "--run" not in answer.err
    assert "--fresh" not in answer.err


def test_steps_are_ordered_as_numbers_and_not_as_text(surefoot: Command) -> None:
    for step in (8, 9, 10, 11, 12):
        save(RUN, step, count=step)
    surefoot("checkpoint", "prune", RUN, "--keep", "3")
    assert manifest.steps(RUN) == [10, 11, 12]


def test_nothing_is_deleted_while_the_newest_is_not_sound(run: Path, surefoot: Command) -> None:
    flip(path_of(6, "state.json"), 3)
    answer = surefoot("checkpoint", "prune", run, "--keep", "2")
    assert answer.code == 1
    assert "nothing was deleted" in answer.err
    assert len(manifest.steps(run)) == 6


def test_the_rules_are_those_of_the_run_s_own_spec(run: Path, surefoot: Command) -> None:
    (run / "spec.toml").write_text('[task]\nuse = "digits"\n[checkpoint]\nkeep = 4\n')
    surefoot("checkpoint", "prune", run)
    assert manifest.steps(run) == [3, 4, 5, 6]


# ---- without torch


LIGHT = """
import sys
from surefoot.cli.main import main
for words in {words!r}:
    sys.argv = ["surefoot", "checkpoint", *words]
    try:
        main()
    except SystemExit as left:
        assert left.code in (0, 1), words
heavy = sorted({{"torch", "sklearn", "safetensors"}} & set(sys.modules))
assert not heavy, heavy
"""


def test_looking_at_checkpoints_needs_no_torch(run: Path, surefoot: Command) -> None:
    words = [
        ["list", "run"],
        ["show", "run"],
        ["check", "run"],
        ["diff", "run:1", "run:6"],
        ["prune", "run", "--keep", "2"],
    ]
    done = subprocess.run(
        [sys.executable, "-c", LIGHT.format(words=words)],
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert len(manifest.steps(run)) == 3


# ---- a second reader


def test_a_reader_of_numpy_and_json_alone_finds_the_same_tensors_and_the_same_damage(
    run: Path, surefoot: Command
) -> None:
    model = nn.Linear(3, 3).to(torch.bfloat16)
    save(RUN, 7, model, empty=torch.empty(0), huge=torch.arange(2_500_000), count=np.float32(3))
    script = ROOT / "examples" / "read_checkpoint.py"
    done = subprocess.run(
        [sys.executable, script, path_of(7).parent], capture_output=True, text=True, check=True
    )
    assert "model.safetensors:weight  uint16 [3, 3]" in done.stdout
    assert "state.safetensors:state/values/huge  int64 [2500000]" in done.stdout
    read = runpy.run_path(str(script))["read"]
    for name in ("model.safetensors", "state.safetensors", "state.json", manifest.FILE):
        whole = path_of(7, name).read_bytes()
        for position in (9, len(whole) // 2, len(whole) - 3):
            flip(path_of(7, name), position)
            with pytest.raises((AssertionError, json.JSONDecodeError, UnicodeDecodeError)):
                read(path_of(7).parent)
            rewrite(path_of(7, name), whole)
    read(path_of(7).parent)


def test_names_and_bounds_of_the_reference_are_those_of_the_code() -> None:
    text = (ROOT / "docs" / "reference" / "checkpoints.md").read_text()
    assert f"`{NAME.pattern}`" in text
    assert f"`{' '.join(manifest.ITEM_BYTES)}`" in text
    assert f"at most {manifest.MAX_BYTES >> 20} MiB" in text
    assert f"more than {manifest.MAX_DIMS} dimensions" in text
    assert manifest.MAX_COUNT == 2**48
    row = json.loads(
        manifest.Manifest(step=1, generation=1, spec_id="", files=(), environment={}).as_text()
    )
    rows = {
        line.split("`")[1]
        for line in text.split("## manifest.json")[1].split("Each of")[0].splitlines()
        if line.startswith("| `")
    }
    assert rows == set(row)
    assert commits.LENGTH_BYTES == 8
