"""`surefoot whatif`: batches and their splits in fresh processes, and the noise of the gradient."""

from __future__ import annotations

import csv
import re
import shlex
from pathlib import Path

import numpy as np
import pytest
import torch

from surefoot.contract import spec_file
from surefoot.core.errors import InputError
from surefoot.prove.whatif.batch import find_splits
from surefoot.prove.whatif.noise import gradient_of, measure_noise
from surefoot.train.assemble import assemble
from tests.cli.conftest import Command, surefoot
from tests.prove.forked import programs_are_forked
from tests.train.small import WHOLE_BATCHES, write_task

__all__ = ["programs_are_forked", "surefoot"]


@pytest.fixture
def spec(tmp_path: Path) -> Path:
    path = tmp_path / "mine.toml"
    path.write_text(
        f'[task]\nuse = "{write_task(tmp_path)}"\n[train]\nbatch = 8\n'
        'length = "99 steps"\n[checkpoint]\nevery = "5 steps"\n'
    )
    return path


@pytest.mark.usefixtures("programs_are_forked")
def test_each_batch_and_split_is_measured_with_its_updates_an_epoch(
    spec: Path, tmp_path: Path, surefoot: Command
) -> None:
    words = (
        "8,5",
        "--microbatch",
        "5,2",
        "--updates",
        "3",
        "--rounds",
        "1",
        "--csv",
        str(tmp_path / "out.csv"),
    )
    answer = surefoot("whatif", "batch", str(spec), *words, "--json")
    assert answer.code == 0, answer.err
    rows = {(row["batch"], row["microbatch"]): row for row in answer.row["rows"]}
    assert list(rows) == [(8, 2), (5, 5)]
    assert [row["num_microbatches"] for row in rows.values()] == [4, 1]
    assert [row["updates_per_epoch"] for row in rows.values()] == [3, 5]
    for row in rows.values():
        assert row["failure"] is None
        assert min(row["peak_bytes"], row["samples_per_s"]) > 0
        assert row["items_per_s"] == pytest.approx(row["samples_per_s"])
        assert row["communications_per_epoch"] == row["updates_per_epoch"]
    with (tmp_path / "out.csv").open() as file:
        written = list(csv.DictReader(file))
    assert [(int(row["batch"]), int(row["microbatch"])) for row in written] == list(rows)


def test_a_batch_that_no_microbatch_divides_is_refused_with_those_that_do(
    spec: Path, surefoot: Command
) -> None:
    answer = surefoot("whatif", "batch", str(spec), "8,9", "--microbatch", "4")
    assert (answer.code, answer.out) == (2, "")
    assert "no microbatch of [4] divides a batch of 9" in answer.err
    assert "these do: [1, 3, 9]" in answer.err


@pytest.mark.parametrize(
    "words",
    [
        ("batch", "8;9"),
        ("batch", "0"),
        ("batch", "8", "--microbatch", "x"),
        ("batch", "8", "--csv", "."),
        ("noise", "--draws", "100"),
        ("noise", "--size", "0"),
        ("fit", "16"),
        ("fit", "0 B"),
        ("fit", "1000 TiB"),
        ("fit", "device", "--set", "train.device=cpu"),
    ],
)
def test_a_question_that_is_none_is_refused(
    words: tuple[str, ...], spec: Path, surefoot: Command
) -> None:
    answer = surefoot("whatif", words[0], str(spec), *words[1:])
    assert (answer.code, answer.out) == (2, "")
    assert "hint:" in answer.err


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ("whatif {}", "whatif has the commands batch, compile, "),
        ("whatif {} --batch 8", "No such"),
        ("whatif batch {}", "Missing argument 'SIZES'"),
        ("whatif fit {}", "Missing argument 'SIZE'"),
        ("whatif fit {} '1 GiB' --rounds 9", "No such option"),
        ("whatif noise {} --updates 3", "No such option"),
    ],
)
def test_a_command_line_that_asks_for_nothing_is_refused(
    words: str, said: str, spec: Path, surefoot: Command
) -> None:
    answer = surefoot(*shlex.split(words.format(shlex.quote(str(spec)))))
    assert (answer.code, answer.out) == (2, "")
    assert said in answer.err


@pytest.mark.usefixtures("programs_are_forked")
def test_a_spec_that_does_not_run_has_its_error_in_its_row(spec: Path, surefoot: Command) -> None:
    answer = surefoot(
        "whatif",
        "batch",
        str(spec),
        "8",
        "--microbatch",
        "4",
        "--rounds",
        "1",
        "--set",
        "task.width=-1",
    )
    assert answer.code == 3
    assert re.search(r"no row could be measured: (?!hint)\S.*-1", answer.err), answer.err


def test_the_batches_of_a_dataloader_cannot_be_varied_and_nothing_is_measured(
    tmp_path: Path, surefoot: Command
) -> None:
    answer = surefoot("whatif", "batch", write_task(tmp_path, change=WHOLE_BATCHES), "8,16")
    assert (answer.code, answer.out) == (2, "")
    assert (
        "train.batch cannot be varied, but the source gives whole batches: 3 batches of DataLoader"
        in answer.err
    )
    assert "another batch_size; surefoot bench step" in answer.err


def test_without_a_microbatch_the_batch_is_halved_three_times() -> None:
    assert find_splits([12], []) == [(12, 12), (12, 6), (12, 3)]
    with pytest.raises(InputError, match="rows are too many"):
        find_splits(range(1, 100), [1])


# ---- noise


def test_the_variance_of_the_gradient_falls_as_one_over_the_batch_and_its_mean_is_the_full_gradient(
    spec: Path,
) -> None:
    made = spec_file.read(str(spec)).spec
    lab = measure_noise(made, size=2, draws=512)
    assert lab.slope == pytest.approx(-1.0, abs=0.1)
    assert [level.batch for level in lab.levels[:4]] == [2, 4, 8, 16]
    assembly = assemble(made)
    whole = gradient_of(assembly, np.arange(24))
    single = torch.stack([gradient_of(assembly, np.array([number])) for number in range(24)])
    torch.testing.assert_close(single.mean(0), whole)
    # S: that of one sample, with replacement
    variance = float((single - whole).square().sum(1).mean())
    assert lab.levels[0].variance == pytest.approx(variance / 2, rel=0.1)
    assert lab.mean_norm == pytest.approx(
        float(whole.norm()), abs=3 * (variance / (2 * 512)) ** 0.5
    )
    assert lab.noise is not None
    assert lab.noise.scale == pytest.approx(variance / float(whole.square().sum()), rel=0.3)


@pytest.mark.usefixtures("programs_are_forked")
def test_the_noise_of_a_run_is_that_at_its_weights(
    spec: Path, tmp_path: Path, surefoot: Command
) -> None:
    assert (
        surefoot(
            "train", str(spec), "--run", "run", "--steps", "40", "--set", "optim.lr=0.1", "--quiet"
        ).code
        == 0
    )
    begun = surefoot("whatif", "noise", str(spec), "--size", "4", "--json").row
    ended = surefoot("whatif", "noise", "run", "--size", "4", "--json").row
    assert begun["slope"] == pytest.approx(-1, abs=0.25)
    assert ended["mean_norm"] < begun["mean_norm"]
    assert ended["noise"]["low"] > 0
    assert begun["advice"]
    answer = surefoot("whatif", "noise", "run", "--set", "optim.lr=1.0")
    assert answer.code == 2
    assert "a run is measured with its own spec" in answer.err
    (row,) = surefoot(
        *shlex.split("whatif batch run 8 --microbatch 4 --rounds 1 --updates 2 --json")
    ).row["rows"]
    assert (row["batch"], row["microbatch"], row["failure"]) == (8, 4, None)  # of the run's spec


@pytest.mark.slow
def test_a_batch_of_more_samples_than_there_are_has_no_row_of_its_own(
    spec: Path, surefoot: Command
) -> None:
    words = (
        "24,32",
        "--microbatch",
        "8",
        "--updates",
        "2",
        "--rounds",
        "1",
        "--json",
        "--set",
        "observe.noise=true",
    )
    rows = surefoot("whatif", "batch", str(spec), *words).row["rows"]
    assert [row["failure"] for row in rows] == [
        None,
        "there are 24 samples, fewer than one batch of 32",
    ]
    assert rows[1]["samples_per_s"] is None
