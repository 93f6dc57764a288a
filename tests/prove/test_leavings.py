"""What two runs of a script left is compared whole.

Tensors, the plain numbers beside them, and files that only look like ours.
"""

from __future__ import annotations

import json
import math
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from surefoot.components.checkpoint.tensor_files import DTYPES
from surefoot.prove.leavings import compare, list_timed, list_unfollowed
from tests.prove.forked import programs_are_forked

__all__ = ["programs_are_forked"]

WEIGHT = {"weight": torch.arange(4.0)}


def pt(value: Any) -> Callable[[Path], None]:
    return lambda folder: torch.save({"model": WEIGHT, "state": value}, folder / "ck.pt")


def tensor(value: torch.Tensor, name: str = "w.safetensors") -> Callable[[Path], None]:
    def write(folder: Path) -> None:
        save_file({"a": value}, folder / name) if name.endswith(".safetensors") else torch.save(
            {"a": value}, folder / name
        )

    return write


def link(target: str) -> Callable[[Path], None]:
    def write(folder: Path) -> None:
        for name in ("a", "b"):
            (folder / name).write_text(name)
        (folder / "latest").symlink_to(target)

    return write


def bits(dtype: torch.dtype, first: int) -> torch.Tensor:
    return torch.tensor([first, *range(15)], dtype=torch.uint8).view(dtype)


def metadata(text: str) -> Callable[[Path], None]:
    return lambda folder: save_file(WEIGHT, folder / "w.safetensors", metadata={"step": text})


def text(name: str, content: str) -> Callable[[Path], None]:
    def write(folder: Path) -> None:
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(content)

    return write


def commit(state: Any, clock: str) -> Callable[[Path], None]:
    def write(folder: Path) -> None:
        for name, content in (
            ("state.json", json.dumps(state)),
            ("manifest.json", clock),
            ("clock.json", clock),
        ):
            text(f"step-{3:012d}/{name}", content)(folder)

    return write


PAIRS: dict[str, tuple[Callable[[Path], None], Callable[[Path], None], str | None]] = {
    "a plain number in a .pt": (
        pt({"seen": 7}),
        pt({"seen": 8}),
        "ck.pt: state/seen differs: 7 and 8",
    ),
    "a number that one lacks": (
        pt({"seen": 7}),
        pt({"lr": 7}),
        "ck.pt: state/lr is in one of them alone",
    ),
    "nan, and nan": (pt({"best": math.nan}), pt({"best": math.nan}), None),
    "streams that are not seeded": (pt({"random": 1}), pt({"random": 2}), None),
    "a tensor": (
        pt({"x": torch.tensor(1.0)}),
        pt({"x": torch.tensor(1.5)}),
        "ck.pt: state/x differs by 0.5 at most",
    ),
    "what cannot be read": (
        pt({"x": random.Random(1)}),
        pt({"x": random.Random(2)}),
        "ck.pt differs",
    ),
    "metadata of safetensors": (
        metadata("1"),
        metadata("2"),
        'w.safetensors: metadata/step differs: "1" and "2"',
    ),
    "a state.json of its own": (
        text("state.json", "one"),
        text("state.json", "two"),
        "state.json differs",
    ),
    "an events.jsonl of its own": (
        text("events.jsonl", "1"),
        text("events.jsonl", "2"),
        "events.jsonl differs",
    ),
    "a manifest of its own": (
        text("a/manifest.json", "1"),
        text("a/manifest.json", "2"),
        "a/manifest.json differs",
    ),
    "times in a commit of ours": (
        commit({"random": 1, "n": 2}, "1"),
        commit({"random": 5, "n": 2}, "2"),
        None,
    ),
    "a number in a commit of ours": (
        commit({"n": 1}, "1"),
        commit({"n": 2}, "1"),
        f"step-{3:012d}/state.json:  differs",
    ),
}
ONES = torch.ones(4)
A = "w.safetensors: a differs"
PAIRS |= {
    "bf16 beside the same numbers in fp32": (
        tensor(ONES),
        tensor(ONES.bfloat16()),
        f"{A}: float32 and bfloat16",
    ),
    "the same in a .pt": (
        tensor(ONES, "m.pt"),
        tensor(ONES.bfloat16(), "m.pt"),
        "m.pt: a differs: float32 and bfloat16",
    ),
    "fp16 beside fp32": (tensor(ONES.half()), tensor(ONES), f"{A}: float16 and float32"),
    "integers beside numbers": (tensor(ONES.int()), tensor(ONES), f"{A}: int32 and float32"),
    "truth beside bytes": (tensor(ONES.bool()), tensor(ONES.byte()), f"{A}: bool and uint8"),
    "a different shape": (tensor(ONES), tensor(ONES.reshape(2, 2)), f"{A}: [4] and [2, 2]"),
    "no numbers of a different shape": (
        tensor(torch.ones(0, 2)),
        tensor(torch.ones(0, 3)),
        f"{A}: [0, 2] and [0, 3]",
    ),
    "truth": (
        tensor(torch.tensor([True, True])),
        tensor(torch.tensor([True, False])),
        f"{A} in 1 of its 2 values",
    ),
    "float8 of 3 bits": (
        tensor(ONES.to(torch.float8_e4m3fn)),
        tensor((2 * ONES).to(torch.float8_e4m3fn)),
        f"{A} by 1 at most",
    ),
    "float8 in a .pt": (
        tensor(ONES.to(torch.float8_e5m2), "m.pt"),
        tensor((3 * ONES).to(torch.float8_e5m2), "m.pt"),
        "m.pt: a differs by 2 at most",
    ),
    "complex": (tensor(ONES.to(torch.complex64)), tensor(ONES + 2j), f"{A} by 2 at most"),
    "integers of 64 bits that float64 rounds to one": (
        tensor(torch.tensor([1 << 62])),
        tensor(torch.tensor([(1 << 62) + 1])),
        f"{A} by 1 at most",
    ),
    "integers of 16 bits without a sign": (
        tensor(torch.tensor([1], dtype=torch.uint16)),
        tensor(torch.tensor([9], dtype=torch.uint16)),
        f"{A} by 8 at most",
    ),
    "nan in one": (
        tensor(torch.tensor([math.nan, 1.0])),
        tensor(torch.tensor([1.0, 2.0])),
        f"{A}: 1 of its 2 numbers is nan in one of them alone",
    ),
    "nan in both": (
        tensor(torch.tensor([math.nan, 1.0])),
        tensor(torch.tensor([math.nan, 2.0])),
        f"{A} by 1 at most",
    ),
    "inf in both": (
        tensor(torch.tensor([math.inf, 1.0])),
        tensor(torch.tensor([math.inf, 2.0])),
        f"{A} by 1 at most",
    ),
    "0 and -0": (
        tensor(torch.tensor(0.0)),
        tensor(torch.tensor(-0.0)),
        f"{A} in the bits of equal numbers",
    ),
    "the same link": (link("a"), link("a"), None),
    "a link to another file": (link("b"), link("a"), "latest is a link to b, and is a link to a"),
    "a link to another folder": (
        link("/one"),
        link("/two"),
        "latest is a link to /one, and is a link to /two",
    ),
}


# a process each
SANDBOXED = (
    "a number that one lacks",
    "streams that are not seeded",
    "a tensor",
    "the same in a .pt",
    "float8 in a .pt",
)


@pytest.mark.filterwarnings("error::RuntimeWarning")
@pytest.mark.parametrize(
    "what",
    [pytest.param(name, marks=pytest.mark.slow) if name in SANDBOXED else name for name in PAIRS],
)
@pytest.mark.usefixtures("programs_are_forked")
def test_what_two_runs_left_differs_where_it_does(what: str, tmp_path: Path) -> None:
    *writers, expected = PAIRS[what]
    for name, write in zip(("one", "two"), writers, strict=True):
        (tmp_path / name).mkdir()
        write(tmp_path / name)  # type: ignore[operator]
    found, by_digest = compare(tmp_path / "one", tmp_path / "two")
    assert (found or "").startswith(expected or "")
    assert (found is None) == (expected is None)
    assert bool(by_digest) == (
        expected is not None
        and expected.endswith((".pt differs", ".json differs", ".jsonl differs"))
    )


@pytest.mark.parametrize("dtype", sorted(DTYPES, key=str))
def test_numbers_of_any_dtype_that_a_file_holds_differ_where_a_bit_does(
    dtype: torch.dtype, tmp_path: Path
) -> None:
    for name, first in (("one", 1), ("two", 0), ("again", 1)):
        (tmp_path / name).mkdir()
        tensor(bits(dtype, first))(tmp_path / name)
    assert compare(tmp_path / "one", tmp_path / "again") == (None, ())
    found, by_digest = compare(tmp_path / "one", tmp_path / "two")
    assert (found or "").startswith("w.safetensors: a differs ")
    assert by_digest == ()


def test_a_link_beside_a_file_of_that_name_differs(tmp_path: Path) -> None:
    for name in ("one", "two"):
        (tmp_path / name).mkdir()
    link("a")(tmp_path / "one")
    for name in ("a", "b", "latest"):
        text(name, name[0])(tmp_path / "two")
    assert compare(tmp_path / "one", tmp_path / "two")[0] == "latest is a link to a, and is a file"


def test_a_link_that_leads_out_is_named_and_one_within_is_not(tmp_path: Path) -> None:
    state = tmp_path / "state"
    state.mkdir()
    link("a")(state)
    for name, target in (
        ("whole", state / "b"),
        ("out", tmp_path),
        ("nowhere", "c"),
        ("round", "round"),
    ):
        (state / name).symlink_to(target)
    assert list_unfollowed(state) == ("nowhere", "out", "round")


def test_a_log_is_ours_only_beside_our_lock(tmp_path: Path) -> None:
    ours = ("ours/events.jsonl", "ours/removed.jsonl", "ours/run.lock")
    for name in (*ours, "theirs/events.jsonl", "theirs/removed.jsonl"):
        text(name, "")(tmp_path)
    assert list_timed(tmp_path) == ours
