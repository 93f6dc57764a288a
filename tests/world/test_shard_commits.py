"""Commits that ranks write in parts: what is linked, damaged, refused and loaded."""

from __future__ import annotations

import hashlib
import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from surefoot.components import checkpoint
from surefoot.components.data import consumed
from surefoot.contract import commits, manifest
from surefoot.core.errors import RunFolderError, StorageError
from surefoot.train.resume.start import Start
from surefoot.train.run import Run
from tests.world.ranks import run_ranks
from tests.world.test_run import spec
from tests.world.test_shard import Stacked, final_weights, sharded, train_until, worst

pytestmark = pytest.mark.usefixtures("loaded_for_shards")


def test_each_rank_links_what_has_not_changed_of_its_part(tmp_path: Path) -> None:
    """The rows of the frozen layer; when the older commit goes, the newer one still holds them."""
    given = sharded({"shard": 2, "zero_stage": 3}, checkpoint={"every": "1 step", "keep": 2})
    run_ranks(2, lambda rank: train_until(tmp_path / "run", given, 4), tmp_path / "ranks")
    newest = max(manifest.steps(tmp_path / "run"))
    assert 1 not in manifest.steps(tmp_path / "run")
    folder = manifest.step_folder(tmp_path / "run", newest)
    files = {
        each.name: (folder / each.name).stat()
        for each in manifest.read(folder).files
        if each.name.endswith(".safetensors")
    }
    frozen = [
        each.name for each in manifest.read(folder).files if "frozen.weight" in (each.tensors or {})
    ]
    assert len(frozen) == 2  # a file of each rank
    written = {name: status.st_mtime_ns for name, status in files.items()}
    moved = [stamp for name, stamp in written.items() if name not in frozen]
    assert all(written[name] < min(moved) for name in frozen)  # by an earlier commit, which is gone
    assert commits.check(folder).step == newest
    weights = final_weights(tmp_path / "run", newest)
    assert (
        worst(
            {"frozen.weight": weights["frozen.weight"]},
            {"frozen.weight": Stacked().model().state_dict()["frozen.weight"]},
        )
        == 0.0
    )


def test_a_commit_of_which_a_rank_s_part_is_damaged_is_set_aside_and_the_one_before_it_taken(
    tmp_path: Path,
) -> None:
    folder, given = tmp_path / "run", sharded({"shard": 2, "zero_stage": 1})
    run_ranks(2, lambda rank: train_until(folder, given, 7), tmp_path / "first")
    newest = manifest.steps(folder)[-1]
    part = manifest.step_folder(folder, newest) / "optimizer.rank-00001.safetensors"
    content = bytearray(part.read_bytes())
    content[-9] ^= 4
    part.write_bytes(content)
    with pytest.raises(RunFolderError, match=r"rank-00001.safetensors is damaged"):
        commits.check(manifest.step_folder(folder, newest))
    found = run_ranks(2, lambda rank: train_until(folder, given, None), tmp_path / "second")
    assert all("losses" in each for each in found), found
    assert len(found[0]["losses"]) == 13 - 6  # after step 6, not 7
    assert consumed.check(folder).holds


@pytest.fixture(scope="module")
def in_parts(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run with one commit, which two ranks wrote in parts."""
    folder, given = tmp_path_factory.mktemp("parts"), sharded({"shard": 2, "zero_stage": 1})
    run_ranks(2, lambda rank: train_until(folder / "run", given, 1), folder / "ranks")
    return folder / "run"


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda piece: piece.update(offset=[0, 0]), "are not consecutive rows"),
        (
            lambda piece: piece.update(whole=[piece["whole"][0] + 1, piece["whole"][1]]),
            "the parts of .* differ",
        ),
        (None, "rows of .* are missing"),
    ],
)
def test_a_manifest_whose_parts_are_no_whole_is_refused(
    change: Any, words: str, in_parts: Path, tmp_path: Path
) -> None:
    place = manifest.step_folder(shutil.copytree(in_parts, tmp_path / "run"), 1)
    row = json.loads((place / manifest.FILE).read_text())
    file = next(each for each in row["files"] if each["name"] == "weights.rank-00001.safetensors")
    # the last one: no gap in the file without it
    name = max(file["tensors"], key=lambda name: file["tensors"][name]["start"])
    if change is None:
        file["tensors"].pop(name)
    else:
        name = next(
            name
            for name, piece in file["tensors"].items()
            if piece["offset"][0] and len(piece["whole"]) == 2
        )
        change(file["tensors"][name])
    row.pop("sha256")
    row["sha256"] = hashlib.sha256(json.dumps(row, sort_keys=True).encode()).hexdigest()
    (place / manifest.FILE).write_text(json.dumps(row))
    with pytest.raises(RunFolderError, match=words):
        manifest.read(place)


class Slashed(Stacked):
    """Parameters whose names have a slash: a part of each is on either rank."""

    def model(self) -> nn.Module:
        model: Any = super().model()
        model.named = nn.ParameterDict({"a/b": nn.Parameter(torch.ones(4, 8, dtype=torch.float64))})
        inner = model.forward
        model.forward = lambda words: inner(words) + model.named["a/b"].prod(0).sum()
        return model  # type: ignore[no-any-return]


@pytest.mark.quick("1")
@pytest.mark.parametrize("stage", [1, 3])
def test_moments_of_a_parameter_with_a_slash_in_its_name_are_written_in_parts_too(
    stage: int, tmp_path: Path
) -> None:
    """Without it rank 0's rows of them stood in the commit as if they were all."""
    buckets = {"first_bucket_size": "8 B", "bucket_size": "8 B"} if stage == 1 else {}
    given = spec(layout={"shard": 2, "zero_stage": stage, **buckets}, train={"length": "2 steps"})

    def job(rank: int) -> Any:
        with Run(given, Slashed(), folder=tmp_path / "run", quiet=True) as run:
            return len(list(run.steps()))

    assert run_ranks(2, job, tmp_path / "ranks") == [2, 2]
    held = checkpoint.Commit(tmp_path / "run", 2).read("optimizer.safetensors")
    assert {
        tuple(each.shape) for name, each in held.items() if "/a/b/" in name or ".a/b/" in name
    } >= {(4, 8)}


@pytest.mark.quick("3")
@pytest.mark.parametrize("stage", [1, 3])
def test_ranks_that_hold_a_part_begin_with_the_weights_of_a_commit(
    stage: int, in_parts: Path, tmp_path: Path
) -> None:
    given = spec(
        layout={"shard": 2, "zero_stage": stage},
        train={"length": "1 step"},
        optim={"name": "sgd", "lr": 0.0, "clip": 0.0},
    )

    def job(rank: int) -> Any:
        start = Start(in_parts, 1, weights_only=True)
        with Run(given, Stacked(), folder=tmp_path / "new", quiet=True, start=start) as run:
            return len(list(run.steps()))

    found = run_ranks(2, job, tmp_path / "second")
    assert found == [1, 1], found
    before, after = final_weights(in_parts, 1), final_weights(tmp_path / "new", 1)
    assert (
        worst(
            {name: before[name] for name in before if "norm.r" not in name and "num_b" not in name},
            {name: after[name] for name in before if "norm.r" not in name and "num_b" not in name},
        )
        == 0
    )


@pytest.mark.quick("1")
@pytest.mark.parametrize("refused", [0, 1])
def test_a_save_that_the_disk_refuses_to_one_rank_before_its_part_is_given_up_by_all(
    refused: int, tmp_path: Path
) -> None:
    def job(rank: int) -> Any:
        given = sharded(
            {"shard": 2, "zero_stage": 1, "timeout": 10.0},
            train={"length": "5 steps"},
            checkpoint={"every": "1 step"},
        )
        with Run(given, Stacked(), folder=tmp_path / "run", quiet=True) as run:
            sync = run.session.telling.journal.sync

            def fails() -> None:
                if run.step == 3:
                    raise StorageError("no space")
                sync()

            if rank == refused:
                run.session.telling.journal.sync = fails  # type: ignore[method-assign]
            return len(list(run.steps()))

    assert run_ranks(2, job, tmp_path / "ranks") == [5, 5]
    assert manifest.steps(tmp_path / "run") == [4, 5]
