"""Tests of `surefoot checkpoint export` and `import`.

To other programs and back, with the same outputs, or not at all.
"""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file

from surefoot.contract import manifest
from tests.cli.conftest import Command
from tests.cli.test_a_run import documented
from tests.prove.forked import programs_are_forked
from tests.train.small import write_task

__all__ = ["programs_are_forked"]  # a fixture

SPEC = (
    '[task]\nuse = "{use}"\n[train]\nlength = "4 steps"\nbatch = 4\n[observe]\n'
    "tensorboard = false\n"
)


@pytest.fixture
def spec(tmp_path: Path, surefoot: Command) -> Path:
    path = tmp_path / "mine.toml"
    path.write_text(SPEC.format(use=write_task(tmp_path)))
    return path


@pytest.fixture
def run(spec: Path, surefoot: Command) -> Path:
    assert surefoot("train", spec, "--run", "run", "--quiet").code == 0
    return Path("run")


def test_weights_go_out_and_come_back_and_a_run_begins_with_them(
    run: Path, spec: Path, surefoot: Command
) -> None:
    answer = surefoot("checkpoint", "export", run, "--to", "mine.safetensors", "--json")
    assert answer.code == 0
    assert (answer.row["ok"], answer.row["max_error"], answer.row["format"]) == (
        True,
        0.0,
        "safetensors",
    )
    assert set(answer.row) == documented("checkpoint export")
    stored = load_file("mine.safetensors")
    own = load_file(manifest.step_folder(run, 4) / "model.safetensors")
    assert {name: tensor.tolist() for name, tensor in stored.items()} == {
        name: tensor.tolist() for name, tensor in own.items()
    }

    answer = surefoot(
        "checkpoint", "import", "mine.safetensors", "--to", "back", "--spec", spec, "--json"
    )
    assert answer.code == 0
    assert {*answer.row, "dtype", "shape"} == documented("checkpoint import")
    assert answer.row["tensors"]["0.weight"] == {"dtype": "float32", "shape": [4, 4]}
    assert surefoot("checkpoint", "check", "back").code == 0
    assert surefoot("train", spec, "--weights", "back", "--run", "again", "--quiet").code == 0
    begun = load_file(manifest.step_folder(Path("again"), 0) / "model.safetensors")
    assert all(torch.equal(tensor, own[name]) for name, tensor in begun.items())


def test_a_graph_runs_without_the_code_of_the_task(run: Path, surefoot: Command) -> None:
    answer = surefoot("checkpoint", "export", run, "--to", "mine.pt2")
    assert answer.code == 0
    assert "torch-export" in answer.out
    assert "for any batch size" in answer.out
    graph = torch.export.load("mine.pt2").module()
    weights = load_file(manifest.step_folder(run, 4) / "model.safetensors")
    x = torch.randn(5, 4)
    wanted = (x @ weights["0.weight"].T + weights["0.bias"]).relu() @ weights[
        "2.weight"
    ].T + weights["2.bias"]
    torch.testing.assert_close(graph(x), wanted)


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (("--to", "mine.pth"), "--to mine.pth ends in .pth"),
        (("--to", "mine.pt2", "--format", "torchscript"), "--format is torchscript"),
        (("--to", "nowhere/mine.safetensors"), "nowhere is not a folder"),
        (("--to", "mine.safetensors", "--step", "9"), "holds no checkpoint of step 9"),
    ],
)
def test_an_export_that_cannot_be_made_is_refused(
    words: tuple[str, ...], says: str, run: Path, surefoot: Command
) -> None:
    answer = surefoot("checkpoint", "export", run, *words)
    assert (answer.code, answer.out) == (2, "")
    assert says in answer.err


def test_an_export_changes_no_file_that_is_there_and_nothing_inside_a_commit(
    run: Path, surefoot: Command
) -> None:
    inside = manifest.step_folder(run, 4)
    before = {path: path.read_bytes() for path in (inside / "model.safetensors", run / "spec.toml")}
    for to in (*before, inside / "mine.safetensors"):
        answer = surefoot("checkpoint", "export", run, "--format", "safetensors", "--to", to)
        assert (answer.code, answer.out) == (2, ""), to
        assert ("is inside a checkpoint" if to.parent == inside else "exists already") in answer.err
    assert {path: path.read_bytes() for path in before} == before
    assert surefoot("checkpoint", "check", run).code == 0
    assert not (inside / "mine.safetensors").exists()


def test_an_export_among_the_commits_of_the_run_is_refused(run: Path, surefoot: Command) -> None:
    before = sorted((run / "checkpoints").iterdir())
    answer = surefoot("checkpoint", "export", run, "--to", run / "checkpoints" / "mine.safetensors")
    assert (answer.code, answer.out) == (2, "")
    assert "is inside the checkpoints folder of the run" in answer.err
    assert sorted((run / "checkpoints").iterdir()) == before


@pytest.mark.parametrize("to", ["/proc/mine.safetensors", "/proc/mine.pt2"])
def test_a_disk_that_takes_no_file_is_told_with_its_exit_code(
    to: str, run: Path, surefoot: Command
) -> None:
    answer = surefoot("checkpoint", "export", run, "--to", to)
    assert (answer.code, answer.out) == (5, "")
    assert f"{to} cannot be written" in answer.err


def test_a_disk_that_is_full_leaves_no_draft_and_is_told(
    run: Path, surefoot: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(state: object, path: str, metadata: object) -> None:
        Path(path).write_bytes(b"half")
        raise SafetensorError(
            "Error while serializing: I/O error: No space left on device (os error 28)"
        )

    monkeypatch.setattr("surefoot.components.checkpoint.export.save_file", full)
    before = sorted(Path().iterdir())
    answer = surefoot("checkpoint", "export", run, "--to", "mine.safetensors")
    assert (answer.code, answer.out) == (5, "")
    assert "mine.safetensors cannot be written" in answer.err
    assert "No space left" in answer.err
    assert sorted(Path().iterdir()) == before


def test_a_model_whose_outputs_changed_leaves_no_file_and_ends_with_1(
    run: Path, spec: Path, surefoot: Command
) -> None:
    """What is built anew differs from what was trained in something that no state_dict holds."""
    task = spec.parent / "mine.py"
    odd = (
        "        made = nn.Sequential(nn.Linear(4, self.width), "
        "nn.Softplus(beta=1 + len(BUILT)), nn.Linear(self.width, 3))\n"
    )
    text = task.read_text().replace("STEP = 0\n", "STEP = 0\nBUILT = []\n")
    before, line, after = text.partition("        return nn.Sequential(")
    task.write_text(
        before + odd + "        BUILT.append(1)\n        return made\n" + after.partition("\n")[2]
    )
    assert line
    answer = surefoot("checkpoint", "export", run, "--to", "mine.safetensors")
    assert answer.code == 1
    assert "the file was deleted" in answer.out
    assert not Path("mine.safetensors").exists()


@pytest.mark.usefixtures("programs_are_forked")
def test_weights_of_another_model_are_refused_with_both_sides_and_nothing_is_written(
    spec: Path, surefoot: Command
) -> None:
    save_file({"0.weight": torch.zeros(7, 4), "other": torch.zeros(1)}, "other.safetensors")
    answer = surefoot("checkpoint", "import", "other.safetensors", "--to", "back", "--spec", spec)
    assert answer.code == 2
    assert "missing: 0.bias, 2.weight, 2.bias" in answer.err
    assert "unexpected: other" in answer.err
    assert "of a different shape: 0.weight [7, 4], now [4, 4]" in answer.err
    assert not Path("back").exists()


@pytest.mark.usefixtures("programs_are_forked")
@pytest.mark.parametrize("name", ["a.pt", "a.safetensors"])
def test_a_key_of_a_file_whose_weights_stand_at_its_top_is_told(
    name: str, surefoot: Command
) -> None:
    weights = {"0.weight": torch.ones(2)}
    save_file(weights, name) if name.endswith("safetensors") else torch.save(weights, name)
    answer = surefoot("checkpoint", "import", name, "--key", "x", "--to", "back")
    assert (answer.code, answer.out) == (2, "")
    assert "all tensors are at the top level" in answer.err
    assert "leave --key out" in answer.err
    assert not Path("back").exists()


@pytest.mark.usefixtures("programs_are_forked")
def test_a_file_that_is_no_checkpoint_and_a_folder_that_is_taken_are_refused(
    surefoot: Command,
) -> None:
    Path("text.pt").write_text("hello")
    answer = surefoot("checkpoint", "import", "text.pt", "--to", "back")
    assert answer.code == 2
    assert "text.pt" in answer.err
    assert not Path("back").exists()
    save_file({"a": torch.zeros(1)}, "a.safetensors")
    Path("taken").mkdir()
    Path("taken", "x").write_text("mine")
    answer = surefoot("checkpoint", "import", "a.safetensors", "--to", "taken")
    assert answer.code == 2
    assert "taken exists already" in answer.err
    assert [path.name for path in Path("taken").iterdir()] == ["x"]


@pytest.mark.usefixtures("programs_are_forked")
def test_half_a_model_is_refused_and_what_was_left_is_told_without_the_weights(
    surefoot: Command,
) -> None:
    torch.save({"model": {"a": torch.ones(2)}, "epoch": 3}, "a.pt")
    assert (
        surefoot("checkpoint", "import", "a.pt", "--to", "back").err
        == "other contents of the file: epoch\n"
    )
    torch.save({"model": {"a": torch.ones(2), "f": torch.ones(2, dtype=torch.complex128)}}, "a.pt")
    answer = surefoot("checkpoint", "import", "a.pt", "--to", "half")
    assert (answer.code, answer.out) == (2, "")
    assert "model/f (a tensor of torch.complex128" in answer.err
    assert not Path("half").exists()


def test_a_folder_that_cannot_be_made_is_told_before_the_file_is_read(surefoot: Command) -> None:
    Path("file").touch()
    Path("link").symlink_to("gone")
    before = sorted(Path().iterdir())
    for to in ("file/x", "/proc/x", "a" * 300, "link"):
        answer = surefoot("checkpoint", "import", "not-read.pt", "--to", to)
        assert answer.code == 2
        assert f"{to} cannot be created" in answer.err or f"{to} exists already" in answer.err
    assert sorted(Path().iterdir()) == before
