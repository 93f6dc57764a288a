"""Tests of `surefoot checkpoint diff`.

What differs is named, and what is damaged is never called equal.
"""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from surefoot.components import checkpoint
from tests.cli.conftest import Command
from tests.cli.saved_commits import a_model, path_of, rewrite, run, save, saved
from tests.cli.test_a_run import documented
from tests.cli.test_checkpoint_check import DAMAGE

__all__ = ["run", "saved"]  # fixtures


def test_two_commits_of_the_same_state_are_equal_and_times_do_not_count(
    run: Path, surefoot: Command
) -> None:
    save(Path("other"), 6, count=6)
    answer = surefoot("checkpoint", "diff", f"{run}:6", "other")
    assert (answer.code, answer.out.splitlines()[-1].startswith("equal: ")) == (0, True)


def test_the_values_that_differ_are_named_counted_and_measured(
    run: Path, surefoot: Command
) -> None:
    model = a_model()
    with torch.no_grad():
        model.get_parameter("0.weight")[1, 2] += 0.5
        model.get_parameter("0.weight")[0, 0] -= 0.125
        model.get_parameter("1.bias")[0] = float("nan")
        model.get_parameter("1.bias").requires_grad_(False)  # else it is never saved
    save(Path("other"), 6, model, count=60)
    answer = surefoot("checkpoint", "diff", f"{run}:6", "other:6", "--json")
    assert answer.code == 1
    found = {each["name"]: each for each in answer.row["differences"]}
    assert (found["0.weight"]["num_different"], found["0.weight"]["num_values"]) == (2, 12)
    assert found["0.weight"]["max_abs"] == pytest.approx(0.5, abs=1e-7)
    assert (found["1.bias"]["num_different"], found["1.bias"]["max_abs"]) == (1, None)
    assert found["values/count"]["what"] == "6 and 60"
    assert not answer.row["equal"]
    assert {*answer.row, *found["0.weight"]} == documented("checkpoint diff")
    assert "2 of 12" in surefoot("checkpoint", "diff", f"{run}:6", "other:6").out


def test_a_list_of_many_values_is_one_row_with_the_count_of_those_that_differ(
    run: Path, surefoot: Command
) -> None:
    values = list(range(625))
    save(Path("one"), 6, count=values)
    save(Path("two"), 6, count=[*values[:-2], -1, -2])
    answer = surefoot("checkpoint", "diff", "one:6", "two:6", "--json")
    (row,) = answer.row["differences"]
    assert (row["name"], row["num_different"], row["num_values"]) == ("values/count", 2, 625)
    assert "2 of 625" in surefoot("checkpoint", "diff", "one:6", "two:6").out


DTYPES = [
    torch.bool,
    torch.uint8,
    torch.int8,
    torch.int16,
    torch.int32,
    torch.int64,
    torch.uint16,
    torch.uint32,
    torch.uint64,
    torch.float16,
    torch.bfloat16,
    torch.float32,
    torch.float64,
    torch.complex64,
    torch.float8_e4m3fn,
    torch.float8_e5m2,
]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_every_dtype_is_read_without_torch_as_torch_reads_it(
    dtype: torch.dtype, surefoot: Command
) -> None:
    one = torch.tensor([0, 1, 2, 3, 5, 8, 13]).to(dtype)
    other = torch.tensor([0, 1, 2, 3, 5, 8, 21]).to(dtype)
    for number, tensor in enumerate((one, other)):
        checkpoint.save(Path(f"run{number}"), 1, {"values": tensor})
    row = surefoot("checkpoint", "diff", "run0", "run1", "--json").row
    found = [each for each in row["differences"] if each["name"].endswith("values")]
    wanted = float((one.to(torch.complex128) - other.to(torch.complex128)).abs().max())
    if wanted:
        assert (found[0]["num_different"], found[0]["max_abs"]) == (1, wanted)
    else:  # both are true
        assert found == []


def test_tensors_that_only_one_has_or_of_another_shape_are_named(surefoot: Command) -> None:
    save(Path("a"), 1, nn.Linear(3, 4), count=1)
    save(Path("b"), 1, nn.Linear(3, 5, bias=False), count=1)
    row = surefoot("checkpoint", "diff", "a", "b", "--json").row
    found = {each["name"]: each["what"] for each in row["differences"]}
    assert found["weight"] == "shape [4, 3] and [5, 3]"
    assert found["bias"] == "only in a/checkpoints/step-000000000001"


def test_a_difference_is_never_told_of_bytes_that_are_damaged(run: Path, surefoot: Command) -> None:
    save(Path("other"), 6, nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 2)), count=6)
    rewrite(path_of(6), path_of(6).read_bytes()[:-1] + b"\x77")
    answer = surefoot("checkpoint", "diff", f"{run}:6", "other")
    assert answer.code == 2
    assert "is damaged" in answer.err


@pytest.mark.parametrize("which", ["first", "second"])
@pytest.mark.parametrize("damage", DAMAGE[:6], ids=lambda damage: damage.__name__)
def test_what_is_damaged_is_never_called_equal(
    damage: Any, which: str, run: Path, surefoot: Command
) -> None:
    shutil.copytree(path_of(6).parent, Path("whole", "checkpoints", path_of(6).parent.name))
    assert surefoot("checkpoint", "diff", f"{run}:6", "whole:6").code == 0
    name = damage(path_of(6).parent)
    pair = (f"{run}:6", "whole:6") if which == "first" else ("whole:6", f"{run}:6")
    answer = surefoot("checkpoint", "diff", *pair)
    assert (answer.code, answer.out) == (2, "")
    assert name in answer.err
