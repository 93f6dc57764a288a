"""One real run from the command line.

Trained, shown, evaluated, written out, repeated; and what stops one.
"""

from __future__ import annotations

import hashlib
import re
import shlex
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from surefoot.contract import events, manifest
from surefoot.core.place import child_environment
from tests.cli.conftest import Command
from tests.cli.reference import CLI, sections
from tests.train.small import write_task


def weights_sha256(run: Path, step: int) -> str:
    return hashlib.sha256(
        (manifest.step_folder(run, step) / "model.safetensors").read_bytes()
    ).hexdigest()


def documented(verb: str) -> set[str]:
    """The keys that docs/reference/cli.md gives for `--json` of a verb."""
    text = next(
        body for title, body in sections(CLI).items() if title.startswith(f"surefoot {verb}")
    )
    return set(re.findall(r"`([a-z_][a-z0-9_]*)`", text.split("`--json`:")[1].split("\n\n")[0]))


def test_a_run_is_told_evaluated_written_out_and_repeated_bit_for_bit(surefoot: Command) -> None:
    surefoot("init")
    trained = surefoot(
        "train", "my_spec.toml", "--steps", "47", "--run", "runs/a", "--quiet", "--json"
    )
    assert (trained.code, trained.err) == (0, "")
    assert set(trained.row) == documented("train")

    told = surefoot("show", "runs/a")
    repeat = re.search(r"repeat +(surefoot .*)", told.out)
    assert repeat is not None
    assert repeat[1] == "surefoot train runs/a/spec.toml"
    assert "47 (1 epochs)" in told.out

    row = surefoot("evaluate", "runs/a", "--fp32", "--json").row
    assert set(row) == documented("evaluate")
    assert (row["precision"], set(row["fp32"]["gaps"].values())) == ("fp32", {0.0})
    assert row["value"] == pytest.approx(trained.row["value"])
    row = surefoot("predict", "runs/a", "--output", "out.npz", "--json").row
    assert set(row) == documented("predict")
    assert np.load("out.npz")["output"].shape == tuple(row["shapes"]["output"]) == (1000, 3)

    assert surefoot("train", "runs/a/spec.toml", "--run", "runs/b", "--quiet").code == 0
    assert weights_sha256(Path("runs/a"), 47) == weights_sha256(Path("runs/b"), 47)
    compared = surefoot("compare", "runs/a", "runs/b", "--json").row
    assert (compared["spec"], compared["circumstances"]) == ([], [])
    assert {
        values[0] - values[1] for values in (each["values"] for each in compared["losses"])
    } == {0.0}


def test_an_evaluation_in_fp32_tells_the_gap_of_the_runs_own_precision(surefoot: Command) -> None:
    surefoot("init")
    assert (
        surefoot(
            *shlex.split(
                "train my_spec.toml --set precision.compute=bf16 --steps 48 --run a --quiet"
            )
        ).code
        == 0
    )
    (recorded,) = {
        event.precision for event in events.read(Path("a")) if isinstance(event, events.Evaluated)
    }
    row, plain = (
        surefoot("evaluate", "a", "--fp32", "--json").row,
        surefoot("evaluate", "a", "--json").row,
    )
    assert recorded == row["precision"] == plain["precision"] == "bf16"
    assert row["loss"] == plain["loss"]
    assert 0 < abs(row["fp32"]["gaps"]["loss"]) < 0.01
    assert row["loss"] - row["fp32"]["values"]["loss"] == row["fp32"]["gaps"]["loss"]
    said = surefoot("evaluate", "a", "--fp32").out
    assert re.search(r"in bf16:\nloss .*\n.*\nin fp32:\nloss .* \(bf16 differs by ", said)


@pytest.mark.parametrize("verb", ["runs", "show", "compare", "spec show", "spec check", "init"])
def test_the_reference_names_every_key_of_the_json(verb: str, surefoot: Command) -> None:
    from tests.cli import past_runs

    past_runs.write(
        Path("runs/a"),
        [
            past_runs.started(),
            past_runs.step(1, 1.0),
            past_runs.evaluated(1, 0.5),
            past_runs.fault(1),
        ],
    )
    words = {
        "runs": [],
        "show": ["runs/a"],
        "compare": ["runs/a", "runs/a"],
        "spec show": ["digits"],
        "spec check": ["digits"],
        "init": [],
    }
    row = surefoot(*verb.split(), *words[verb], "--json").row
    inner = {
        key
        for value in row.values()
        if isinstance(value, list)
        for each in value
        if isinstance(each, dict)
        for key in each
    }
    missing = {*row, *inner} - documented(verb) - documented("runs")
    assert missing == set()


def test_an_error_in_the_user_s_code_ends_with_its_own_code_and_frame(
    surefoot: Command, tmp_path: Path
) -> None:
    surefoot("init")
    path = tmp_path / "my_task.py"
    head = "    def augment(self, batch: Batch, keys: Keys) -> Batch:\n"
    late = (
        "        self.calls = getattr(self, 'calls', 0) + 1\n"
        "        assert self.calls < 5 or undefined\n"
    )
    path.write_text(path.read_text().replace(head, head + late))
    answer = surefoot("train", "my_spec.toml", "--quiet", "--run", "runs/a")
    assert (answer.code, answer.out) == (3, "")
    assert re.search(r"my_task\.py.*line \d+|my_task\.py:\d+", answer.err)
    assert "undefined" in answer.err
    row = surefoot("show", "runs/a", "--json").row
    assert (row["state"], row["exit_code"]) == ("failed", 3)
    assert "undefined" in row["cause"]


def test_what_is_wrong_before_the_run_leaves_nothing_behind(
    surefoot: Command, tmp_path: Path
) -> None:
    surefoot("init")
    before = sorted(tmp_path.rglob("*"))
    for flag in (
        "task.wdith=3",
        "train.length=-1 steps",
        "optim.lr=nan",
        "evaluate.score=f1",
        "evaluate.split=unknown",
    ):
        answer = surefoot("train", "my_spec.toml", "--set", flag, "--quiet")
        assert (answer.code, answer.out) == (2, ""), flag
        assert answer.err.startswith("error: ")
    assert [
        path for path in sorted(tmp_path.rglob("*")) if "__pycache__" not in path.parts
    ] == before


@pytest.mark.quick(">&- 2>&-")
@pytest.mark.parametrize("closed", [">&-", "2>&-", ">&- 2>&-"])
def test_a_process_without_output_streams_trains_all_the_same(closed: str, tmp_path: Path) -> None:
    words = (
        f"train {shlex.quote(write_task(tmp_path))} --steps 60 --quiet --set train.batch=8 "
        "--set evaluate.every=\"'1000 steps'\" --set observe.tensorboard=false"
    )
    line = (
        f"exec {shlex.quote(sys.executable)} -m surefoot {words} "
        f"--run {shlex.quote(str(tmp_path / 'a'))} {closed}"
    )
    environment = {
        **child_environment(threads=1),
        "PYTHONPATH": str(Path(__file__).resolve().parents[2]),
    }
    done = subprocess.run(["bash", "-c", line], env=environment, check=False)
    assert done.returncode == 0


@pytest.mark.quick("spec schema", "--help")
@pytest.mark.parametrize("words", ["spec show digits", "spec schema", "runs --json", "--help"])
@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs a file that is always full")
def test_an_answer_that_a_full_disk_does_not_take_is_a_failure_of_storage(
    words: str, tmp_path: Path
) -> None:
    environment = {
        **child_environment(threads=1),
        "PYTHONPATH": str(Path(__file__).resolve().parents[2]),
    }
    command = [sys.executable, "-m", "surefoot", *words.split()]
    with open("/dev/full", "w") as full:
        done = subprocess.run(
            command,
            env=environment,
            stdout=full,
            stderr=subprocess.PIPE,
            text=True,
            cwd=tmp_path,
            check=False,
        )
        silent = subprocess.run(
            command, env=environment, stdout=full, stderr=full, cwd=tmp_path, check=False
        )
    assert done.stderr == (
        "error: standard output cannot be written: No space left on device\n"
        "hint: free some space, or write to another disk\n"
    )
    assert (done.returncode, silent.returncode) == (5, 5)
