"""A commit exists only when its manifest does.

A manifest is believed only as far as it was checked.
"""

from __future__ import annotations

import hashlib
import json
import math
import shutil
import tracemalloc
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from surefoot.cli.operate import stored
from surefoot.components import checkpoint
from surefoot.contract import commits, manifest
from surefoot.contract.run_folder import retention
from surefoot.core.errors import InputError, NumbersError, RunFolderError, StorageError, TaskError


def commit(
    run: Path, step: int, model: nn.Module | None = None, generation: int = 1, **more: Any
) -> int:
    torch.manual_seed(step)
    stamp = checkpoint.Stamp(generation=generation, spec_id="x", **more)
    return checkpoint.save(run, step, {"model": model or nn.Linear(2, 3)}, stamp).num_bytes


def rewrite(folder: Path, **changes: Any) -> None:
    """Change a manifest as someone would who knows how to give it the right digest."""
    path = folder / manifest.FILE
    row = json.loads(path.read_text())
    row.pop("sha256")
    row |= changes
    digest = hashlib.sha256(json.dumps(row, sort_keys=True).encode()).hexdigest()
    path.write_text(json.dumps({**row, "sha256": digest}))


def test_a_commit_reads_back_with_every_digest(tmp_path: Path) -> None:
    model = nn.Linear(2, 3)
    num_bytes = commit(
        tmp_path, 7, model, score={"name": "accuracy", "value": 0.5, "better": "higher"}
    )
    found = commits.check(manifest.step_folder(tmp_path, 7))
    assert (found.step, found.generation, found.num_bytes) == (7, 1, num_bytes)
    other = nn.Linear(2, 3)
    checkpoint.load_into(other, tmp_path, 7)
    assert torch.equal(other.weight, model.weight)


SCORE = {"name": "accuracy", "value": 0.5, "better": "higher", "split": "test"}
FILE = {"name": "a", "num_bytes": 1, "sha256": "x"}
HOSTILE: dict[str, dict[str, Any]] = {
    "a step of a different type": {"step": "7"},
    "a step of another folder": {"step": 8},
    "a generation of a different type": {"generation": None},
    "a spec of a different type": {"spec_id": 3},
    "a format of a different type": {"format": "1"},
    "a score that is none": {"score": [1]},
    **{
        f"a score of {value}": {"score": {**SCORE, "value": value}}
        for value in (True, math.nan, math.inf, -math.inf, "0.5")
    },
    **{
        f"a score where {better!r} is better": {"score": {**SCORE, "better": better}}
        for better in ("up", "", None, True)
    },
    "a score without a name": {"score": {"value": 1.0, "better": "lower"}},
    "a score without a direction": {"score": {"name": "loss", "value": 1.0}},
    "a world of none": {"layout": {"world_size": 0}},
    "two ranks of 1.0": {"layout": {"world_size": 1.0}},
    "no ranks": {"layout": {}},
    "ranks by another axis alone": {"layout": {"shard": 1}},
    "a name with a newline": {"files": [{**FILE, "name": "a\n", "sha256": "0" * 64}]},
    "an environment that is none": {"environment": 3},
    "a key too many": {"surprise": 1},
    "files that are none": {"files": 3},
    "a file that is none": {"files": [3]},
    "a file without a name": {"files": [{"num_bytes": 1, "sha256": "x"}]},
    "a name that is none": {"files": [{**FILE, "name": 5}]},
    "a size that is none": {"files": [{**FILE, "num_bytes": "1"}]},
    "a negative size": {"files": [{**FILE, "num_bytes": -1}]},
    "a digest that is none": {"files": [{**FILE, "sha256": 1}]},
    "the manifest itself as a file": {"files": [{**FILE, "name": "manifest.json"}]},
    "one file twice": {"files": [FILE, FILE]},
}


@pytest.mark.parametrize("what", HOSTILE)
def test_a_manifest_of_other_types_is_refused_in_words(what: str, tmp_path: Path) -> None:
    commit(tmp_path, 7)
    folder = manifest.step_folder(tmp_path, 7)
    rewrite(folder, **HOSTILE[what])
    with pytest.raises(RunFolderError, match=r"manifest\.json") as caught:
        manifest.read(folder)
    assert len(str(caught.value)) < 1000


def test_a_layout_and_a_score_may_gain_keys(tmp_path: Path) -> None:
    commit(tmp_path, 7)
    folder = manifest.step_folder(tmp_path, 7)
    rewrite(
        folder, layout={"world_size": 1, "shard": 1}, score={**SCORE, "value": None, "unit": "%"}
    )
    assert commits.check(folder).layout["shard"] == 1


@pytest.mark.parametrize(
    ("whole", "offset"), [([8, 2], [0, 0]), ([8, 2], [5, 0]), ([3, 3], [0, 1])]
)
def test_a_part_whose_other_rows_are_not_there_is_refused_by_whoever_reads_its_manifest(
    whole: list[int], offset: list[int], tmp_path: Path
) -> None:
    commit(tmp_path, 7)
    folder = manifest.step_folder(tmp_path, 7)
    files = json.loads((folder / manifest.FILE).read_text())["files"]
    piece = next(entry for entry in files if entry["name"] == "model.safetensors")["tensors"][
        "weight"
    ]
    assert piece["shape"] == [3, 2]
    piece |= {"whole": whole, "offset": offset}
    rewrite(folder, files=files)
    wanted = r"rows of weight are missing|the parts of weight are not consecutive rows"
    for read in (
        commits.check,
        manifest.read,
        lambda _: checkpoint.load_into(nn.Linear(2, 3), tmp_path, 7),
    ):
        with pytest.raises(RunFolderError, match=wanted):
            read(folder)


@pytest.mark.parametrize(
    "score",
    [{**SCORE, "better": "up"}, {**SCORE, "value": True}, {"value": 1.0, "better": "lower"}],
)
def test_a_score_that_no_reader_takes_is_not_written(score: dict[str, Any], tmp_path: Path) -> None:
    with pytest.raises(TaskError, match="a checkpoint cannot have this score"):
        commit(tmp_path, 7, score=score)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    "text", ["", "spam", "[]", "3", "{}", "[" * 100_000, "\0" * 100, '{"sha256": "x"}']
)
def test_a_file_that_is_no_manifest_is_refused_in_words(text: str, tmp_path: Path) -> None:
    commit(tmp_path, 7)
    folder = manifest.step_folder(tmp_path, 7)
    (folder / manifest.FILE).write_text(text)
    with pytest.raises(RunFolderError, match=r"manifest\.json"):
        commits.check(folder)


def test_a_newer_format_and_a_giant_file_are_refused(tmp_path: Path) -> None:
    commit(tmp_path, 7)
    folder = manifest.step_folder(tmp_path, 7)
    rewrite(folder, format=2)
    with pytest.raises(RunFolderError, match="newer"):
        manifest.read(folder)
    with (folder / manifest.FILE).open("wb") as file:
        file.truncate(manifest.MAX_BYTES + 1)
    with pytest.raises(RunFolderError, match="larger than 64 MiB"):
        manifest.read(folder)


def test_only_whole_commits_with_their_own_names_are_steps(tmp_path: Path) -> None:
    assert manifest.steps(tmp_path) == []
    commit(tmp_path, 12)
    commit(tmp_path, 7)
    folder = tmp_path / manifest.FOLDER
    for name in (
        ".draft-step-000000000009",
        "step-9",
        "step-000000000010",
        "notes",
        "step-0000000000111",
    ):
        (folder / name).mkdir()
    (folder / "step-000000000013").write_text("a file")
    # digits of another script; a line
    for name in ("step-" + "\u0660" * 9 + "\u0661\u0665\u0660", "step-000000000014\n"):
        shutil.copytree(folder / "step-000000000012", folder / name)
    assert manifest.steps(tmp_path) == [7, 12]
    assert [path.name for path in stored.step_folders(tmp_path)] == [
        f"step-{step:012d}" for step in (7, 10, 12, 13)
    ]


def test_weights_of_a_damaged_commit_never_reach_the_model(tmp_path: Path) -> None:
    commit(tmp_path, 7)
    path = manifest.step_folder(tmp_path, 7) / "model.safetensors"
    whole = bytearray(path.read_bytes())
    whole[-1] ^= 1
    path.write_bytes(whole)
    model = nn.Linear(2, 3)
    before = model.weight.detach().clone()
    with pytest.raises(RunFolderError, match="damaged"):
        checkpoint.load_into(model, tmp_path, 7)
    assert torch.equal(before, model.weight)


@pytest.mark.parametrize(
    "other", [nn.Linear(3, 2), nn.Linear(2, 3, bias=False), nn.Sequential(nn.Linear(2, 3))]
)
def test_weights_of_another_model_are_refused_by_name(other: nn.Module, tmp_path: Path) -> None:
    commit(tmp_path, 7)
    with pytest.raises(RunFolderError, match="do not fit the model") as caught:
        checkpoint.load_into(other, tmp_path, 7)
    assert "weight" in str(caught.value) or "bias" in str(caught.value)


def test_the_best_is_by_score_the_last_by_step_and_a_number_is_itself(tmp_path: Path) -> None:
    for step, value in ((1, 0.5), (2, 0.9), (3, 0.9), (4, None), (5, 0.1)):
        score = None if value is None else {"name": "accuracy", "value": value, "better": "higher"}
        commit(tmp_path, step, score=score)
    assert [checkpoint.find_step(tmp_path, which) for which in ("best", "last", 4)] == [2, 5, 4]
    with pytest.raises(RunFolderError, match="holds no checkpoint of step 9"):
        checkpoint.find_step(tmp_path, 9)
    with pytest.raises(RunFolderError, match="does not exist"):
        checkpoint.find_step(tmp_path / "elsewhere", "last")
    (tmp_path / "empty").mkdir()
    with pytest.raises(RunFolderError, match="empty holds no checkpoint"):
        checkpoint.find_step(tmp_path / "empty", "last")


@pytest.mark.parametrize("step", ["²", "٤", "-4", "4.0", "", "9" * 5000])
def test_a_step_that_only_looks_like_a_number_is_told(step: str, tmp_path: Path) -> None:
    commit(tmp_path, 4)
    assert [checkpoint.find_step(tmp_path, which) for which in ("4", "0004")] == [4, 4]
    with pytest.raises(RunFolderError, match="holds no checkpoint of step") as caught:
        checkpoint.find_step(tmp_path, step)
    assert len(caught.value.message) < len(str(tmp_path)) + 100


def test_retention_keeps_the_newest_and_the_best_and_touches_nothing_foreign(
    tmp_path: Path,
) -> None:
    for step in range(1, 7):
        commit(tmp_path, step, score={"name": "loss", "value": abs(step - 3.0), "better": "lower"})
    (tmp_path / manifest.FOLDER / "step-000000000001" / "mine.txt").write_text("beside the weights")
    (tmp_path / manifest.FOLDER / "notes").mkdir()
    with pytest.raises(InputError, match="keep must be at least 1; got 0"):
        checkpoint.retain(tmp_path, keep=0)
    assert checkpoint.retain(str(tmp_path), keep=2) == [1, 2, 4]
    assert manifest.steps(tmp_path) == [3, 5, 6]
    assert (tmp_path / manifest.FOLDER / "notes").is_dir()
    assert not list((tmp_path / manifest.FOLDER).glob(".*"))


def test_the_first_commit_after_each_so_much_training_stays_for_ever(tmp_path: Path) -> None:
    def trained(step: int, clock: bytes) -> None:
        checkpoint.commit(
            tmp_path,
            checkpoint.Content(step=step, tensors={}, texts={"clock.json": clock}),
            checkpoint.Stamp(),
        )

    for step in range(1, 9):
        trained(step, json.dumps({"training_s": step * 25.0}).encode())
    times = {step: step * 25.0 for step in range(1, 9)}
    # 60 s: step 3, 120 s: step 5, 180 s: step 8
    assert checkpoint.retain(tmp_path, keep=2, every_s=60.0) == [1, 2, 4, 6]
    assert retention.read_times(tmp_path, manifest.steps(tmp_path)) == {
        step: times[step] for step in (3, 5, 7, 8)
    }
    for step, said in enumerate(("{}", "NaN", "1e999", "-1e999", "-75.0", "1" + "0" * 400), 9):
        trained(step, said.encode() if said == "{}" else f'{{"training_s": {said}}}'.encode())
    assert checkpoint.retain(tmp_path, keep=2, every_s=60.0) == [7, 9, 10, 11, 12]


def test_a_commit_replaces_that_of_an_earlier_attempt(tmp_path: Path) -> None:
    commit(tmp_path, 7)
    shutil.copytree(manifest.step_folder(tmp_path, 7), manifest.step_folder(tmp_path, 9))
    commit(tmp_path, 7, generation=2)
    assert not list((tmp_path / manifest.FOLDER).glob(".*"))
    assert manifest.read(manifest.step_folder(tmp_path, 7)).generation == 2


class Shared(nn.Module):
    """A tied head, a slice of another tensor, a mask of -inf, complex numbers.

    Also a frozen parameter that is none.
    """

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(4, 3)
        self.head = nn.Linear(3, 4, bias=False)
        self.head.weight = self.embed.weight
        self.register_buffer("whole", torch.arange(6.0).reshape(2, 3))
        self.register_buffer("part", self.get_buffer("whole")[1])
        self.register_buffer("mask", torch.full((2, 2), -math.inf))
        self.register_buffer("turns", torch.polar(torch.ones(3), torch.arange(3.0)))
        self.still = nn.Parameter(torch.tensor([math.nan]), requires_grad=False)


def test_a_model_with_tied_sliced_masked_and_complex_tensors_comes_back_whole(
    tmp_path: Path,
) -> None:
    model, other = Shared(), Shared()
    commit(tmp_path, 7, model)
    checkpoint.load_into(other, tmp_path, 7)
    assert other.head.weight is other.embed.weight
    for name, tensor in model.state_dict().items():
        assert torch.equal(torch.nan_to_num(tensor), torch.nan_to_num(other.state_dict()[name])), (
            name
        )
    assert math.isnan(other.still)


def test_a_trained_parameter_that_is_not_finite_is_not_committed(tmp_path: Path) -> None:
    model = nn.Linear(2, 3)
    with torch.no_grad():
        model.bias[1] = math.inf
    with pytest.raises(NumbersError, match="bias is not finite"):
        commit(tmp_path, 7, model)
    assert manifest.steps(tmp_path) == []
    assert list(tmp_path.iterdir()) == []


def test_a_commit_that_cannot_be_written_leaves_no_trace_of_itself(tmp_path: Path) -> None:
    commit(tmp_path, 7)
    (tmp_path / "b").write_text("a file where a folder should be")
    with pytest.raises(StorageError, match="step 8 could not be saved"):
        commit(tmp_path / "b", 8)
    assert manifest.steps(tmp_path) == [7]


def test_a_small_manifest_is_read_in_little_memory(tmp_path: Path) -> None:
    commit(tmp_path, 1)
    tracemalloc.start()
    try:
        manifest.read(manifest.step_folder(tmp_path, 1))
        assert tracemalloc.get_traced_memory()[1] < 1 << 20
    finally:
        tracemalloc.stop()
