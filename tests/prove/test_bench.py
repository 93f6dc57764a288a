"""`surefoot bench step`: what is timed, what is left out of it, and what is refused."""

from __future__ import annotations

import csv
import itertools
import os
import shlex
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from surefoot.contract import spec_file
from surefoot.contract.spec import RunSpec
from surefoot.core.errors import InputError, SpecError
from surefoot.prove.bench.rehearsal import Rehearsal
from surefoot.prove.bench.step import vary
from tests.cli.conftest import Command, surefoot
from tests.prove.forked import programs_are_forked
from tests.train.small import TEXT

__all__ = ["programs_are_forked", "surefoot"]

SLOW_START = "if STEP < 5: import time; time.sleep(0.4)"


@pytest.fixture
def spec(tmp_path: Path) -> Path:
    (tmp_path / "mine.py").write_text(TEXT)
    path = tmp_path / "mine.toml"
    path.write_text('[task]\nuse = "mine.py:Mine"\n[train]\nbatch = 8\nlength = "2 steps"\n')
    return path


def bench(surefoot: Command, *words: str) -> list[dict[str, object]]:
    answer = surefoot(
        "bench",
        "step",
        "mine.toml",
        "--calls",
        "4",
        "--warmup",
        "4",
        "--rounds",
        "1",
        "--json",
        *words,
    )
    assert answer.code == 0, answer.err
    rows: list[dict[str, object]] = answer.row["rows"]
    return rows


def test_a_key_that_is_varied_twice_is_refused() -> None:
    with pytest.raises(SpecError, match=r"--vary train\.batch is given twice"):
        vary(lambda chosen: RunSpec(), ["train.batch=16", "train.batch=32"])


@pytest.mark.usefixtures("programs_are_forked")
def test_a_start_that_is_slow_is_in_the_mean_without_warm_up_and_not_in_the_one_with_it(
    spec: Path, surefoot: Command
) -> None:
    (spec.parent / "mine.py").write_text(TEXT.replace("# FORWARD", SLOW_START))
    (row,) = bench(surefoot, "--mode", "forward")
    assert row["cold_mean_s"] >= 0.4  # type: ignore[operator]
    assert row["first_s"] >= 0.4  # type: ignore[operator]
    assert row["mean_s"] < 0.4  # type: ignore[operator]
    assert row["p50_s"] <= row["p95_s"] <= row["p99_s"]  # type: ignore[operator]


@pytest.mark.slow
def test_every_mode_of_every_combination_has_its_row_in_the_table_the_file_and_the_object(
    spec: Path, surefoot: Command
) -> None:
    words = (
        "--vary",
        "task.width=4,8",
        "--vary",
        "precision.compute=bf16",
        "--mode",
        "forward,step",
        "--csv",
        "times.csv",
    )
    rows = bench(surefoot, *words)
    wanted = [
        (mode, width, dtype)
        for width in ("4", "8")
        for dtype in ("bf16",)
        for mode in ("forward", "step")
    ]
    assert [(row["mode"], *row["values"].values()) for row in rows] == wanted  # type: ignore[attr-defined]
    with (spec.parent / "times.csv").open() as file:
        table = list(csv.DictReader(file))
    assert [(row["mode"], row["task.width"], row["precision.compute"]) for row in table] == wanted
    assert [float(row["mean_s"]) for row in table] == [row["mean_s"] for row in rows]
    assert [row["against"] is None for row in rows] == [True, True, False, False]
    assert {row["against"]["verdict"] for row in rows if row["against"]} == {"too few"}  # type: ignore[index]


def test_each_mode_does_what_it_says_and_no_more(
    spec: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(spec.parent)
    with Rehearsal(
        RunSpec(task={"use": "mine.py:Mine"}, train={"batch": 8, "length": "2 steps"}), steps=9
    ) as rehearsal:
        parameters = list(rehearsal.assembly.model.parameters())
        before = [each.detach().clone() for each in parameters]

        def moved() -> bool:
            return any(
                (each.detach() != old).any() for each, old in zip(parameters, before, strict=True)
            )

        rehearsal.take("forward")
        assert [each.grad for each in parameters] == [None] * len(parameters)
        rehearsal.take("backward")
        once = [each.grad.clone() for each in parameters if each.grad is not None]
        rehearsal.take("backward")
        again = [each.grad for each in parameters if each.grad is not None]
        assert len(once) == len(parameters)
        # not gathered over calls
        assert all((one == other).all() for one, other in zip(once, again, strict=True))
        assert not moved()
        rehearsal.take("step")
        assert moved()


def test_a_spec_that_is_shorter_than_the_measurement_is_made_longer(
    spec: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(spec.parent)
    for stated, steps, wanted in (("2 steps", 9, 9), ("12 steps", 9, 12)):
        with Rehearsal(
            RunSpec(task={"use": "mine.py:Mine"}, train={"batch": 8, "length": stated}), steps=steps
        ) as rehearsal:
            assert rehearsal.assembly.course.total_steps == wanted


@pytest.mark.usefixtures("programs_are_forked")
def test_a_task_that_fails_has_its_row_and_ends_the_verb_with_its_own_words(
    spec: Path, surefoot: Command
) -> None:
    (spec.parent / "mine.py").write_text(
        TEXT.replace("# FORWARD", "raise ValueError('out of luck')")
    )
    answer = surefoot(
        *shlex.split("bench step mine.toml --mode forward --calls 2 --rounds 1 --quiet")
    )
    assert answer.code == 3
    assert answer.err.startswith("error: forward failed: ")
    assert "ValueError: out of luck" in answer.err
    assert "mine.py:" in answer.err
    assert "n/a" in answer.out


@pytest.mark.parametrize("verb", [("bench", "step"), ("ladder",)])
def test_sigterm_leaves_no_folder_of_a_process_that_was_measured(
    verb: tuple[str, ...], spec: Path
) -> None:
    (spec.parent / "mine.py").write_text(TEXT.replace("# FORWARD", "import time; time.sleep(60)"))
    scratch = spec.parent / "scratch"
    scratch.mkdir()
    words = [sys.executable, "-m", "surefoot", *verb, "mine.toml", "--quiet"]
    process = subprocess.Popen(
        words, cwd=spec.parent, env={**os.environ, "TMPDIR": str(scratch)}, stderr=subprocess.PIPE
    )
    try:
        while not any(scratch.rglob("stderr")):  # the process that is measured has begun
            assert process.poll() is None, process.communicate()[1]
            time.sleep(0.05)
    finally:
        process.terminate()
        said = process.communicate(timeout=600)[1]
    assert (process.returncode, said) == (143, b"")
    assert not any(scratch.iterdir())


def test_a_value_may_hold_commas(spec: Path) -> None:
    def make(chosen: Sequence[tuple[str, Any, str]]) -> RunSpec:
        return spec_file.read(str(spec), chosen).spec

    variants = vary(
        make,
        ["optim.betas=[0.9, 0.99],[0.8,0.9]", "precision.compute=fp32,bf16", "task.width=4, 8"],
    )
    found = [
        (each.spec.optim.betas, each.spec.precision.compute, each.spec.task.parameters["width"])
        for each in variants
    ]
    assert found == list(itertools.product([(0.9, 0.99), (0.8, 0.9)], ["fp32", "bf16"], [4, 8]))
    assert variants[0].values == {
        "optim.betas": "[0.9, 0.99]",
        "precision.compute": "fp32",
        "task.width": "4",
    }


BAD = {
    "a mode that there is not": (
        ("--mode", "sideways"),
        "give one or more of forward,backward,step",
    ),
    "no calls": (("--calls", "0"), "use --calls 2 or more"),
    "no rounds": (("--rounds", "0"), "and 1 round or more"),
    "a list without values": (("--vary", "task.width="), "--vary task.width=64,128"),
    "a list with a hole": (("--vary", "task.width=4,,8"), "--vary task.width=64,128"),
    "a list without a key": (
        ("--vary", "width=4,8"),
        "--vary 'width=4,8' is not table.key=value,value",
    ),
    "a value twice": (("--vary", "task.width=4,4"), "give each value once"),
    "a file that is there": (
        ("--csv", "mine.py"),
        "error: mine.py already exists and is not overwritten",
    ),
    "a file in no folder": (
        ("--csv", "mine.py/times.csv"),
        "error: there is no folder mine.py for times.csv",
    ),
    "a key that there is not": (("--vary", "train.bath=4,8"), "did you mean 'batch'?"),
    "more than anybody waits for": (
        ("--vary", f"task.width={','.join(map(str, range(4, 60)))}"),
        "100 together at most",
    ),
}


@pytest.mark.parametrize("what", BAD)
def test_bad_input_is_refused_before_any_process_starts(
    what: str, spec: Path, surefoot: Command
) -> None:
    words, says = BAD[what]
    answer = surefoot("bench", "step", "mine.toml", *words)
    assert (answer.code, answer.out) == (2, "")
    assert says in answer.err


def test_a_mode_that_there_is_not_is_refused_by_the_rehearsal_too(
    spec: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(spec.parent)
    with (
        Rehearsal(
            RunSpec(task={"use": "mine.py:Mine"}, train={"length": "2 steps"}), steps=1
        ) as rehearsal,
        pytest.raises(InputError, match="sideways"),
    ):
        rehearsal.take("sideways")  # type: ignore[arg-type]


LOADERS = {
    "a list": "DataLoader([(torch.randn(4), i % 3) for i in range(24)], batch_size=6)",
    "tensors": "DataLoader(TensorDataset(torch.randn(24, 4), torch.arange(24) % 3), batch_size=6)",
}
OWN = """
from torch.utils.data import DataLoader, TensorDataset

class Mine(Base):
    def data(self, split):
        return {}
"""


@pytest.mark.parametrize("source", LOADERS)
def test_the_samples_of_a_step_over_a_loader_are_counted_and_not_its_batches(
    source: str, tmp_path: Path
) -> None:
    text = TEXT.replace("class Mine:", "class Base:") + OWN.format(LOADERS[source])
    (tmp_path / "batches.py").write_text(text)
    given = spec_file.read(f"{tmp_path}/batches.py:Mine").spec
    with Rehearsal(given.replace(train={"length": "2 steps"}), steps=2) as rehearsal:
        assert rehearsal.num_samples == 6
