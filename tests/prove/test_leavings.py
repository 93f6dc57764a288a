"""What two runs of a script left is compared whole: tensors, the plain numbers beside them, and files that only look like ours."""

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

from surefoot.prove.leavings import compare, list_timed

WEIGHT = {"weight": torch.arange(4.0)}


def pt(value: Any) -> Callable[[Path], None]:
    return lambda folder: torch.save({"model": WEIGHT, "state": value}, folder / "ck.pt")


def metadata(text: str) -> Callable[[Path], None]:
    return lambda folder: save_file(WEIGHT, folder / "w.safetensors", metadata={"step": text})


def text(name: str, content: str) -> Callable[[Path], None]:
    def write(folder: Path) -> None:
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(content)

    return write


def commit(state: Any, clock: str) -> Callable[[Path], None]:
    def write(folder: Path) -> None:
        for name, content in (("state.json", json.dumps(state)), ("manifest.json", clock), ("clock.json", clock)):
            text(f"step-{3:012d}/{name}", content)(folder)

    return write


PAIRS: dict[str, tuple[Callable[[Path], None], Callable[[Path], None], str | None]] = {
    "a plain number in a .pt": (pt({"seen": 7}), pt({"seen": 8}), "ck.pt: state/seen differs: 7 and 8"),
    "a number that one lacks": (pt({"seen": 7}), pt({"lr": 7}), "ck.pt: state/lr is in one of them alone"),
    "nan, and nan": (pt({"best": math.nan}), pt({"best": math.nan}), None),
    "streams that are not seeded": (pt({"random": 1}), pt({"random": 2}), None),
    "a tensor": (pt({"x": torch.tensor(1.0)}), pt({"x": torch.tensor(1.5)}), "ck.pt: state/x differs by 0.5 at most"),
    "what cannot be read": (pt({"x": random.Random(1)}), pt({"x": random.Random(2)}), "ck.pt differs"),
    "metadata of safetensors": (metadata("1"), metadata("2"), 'w.safetensors: metadata/step differs: "1" and "2"'),
    "a state.json of its own": (text("state.json", "one"), text("state.json", "two"), "state.json differs"),
    "an events.jsonl of its own": (text("events.jsonl", "1"), text("events.jsonl", "2"), "events.jsonl differs"),
    "a manifest of its own": (text("a/manifest.json", "1"), text("a/manifest.json", "2"), "a/manifest.json differs"),
    "times in a commit of ours": (commit({"random": 1, "n": 2}, "1"), commit({"random": 5, "n": 2}, "2"), None),
    "a number in a commit of ours": (commit({"n": 1}, "1"), commit({"n": 2}, "1"), f"step-{3:012d}/state.json:  differs"),
}


@pytest.mark.parametrize("what", PAIRS)
def test_what_two_runs_left_differs_where_it_does(what: str, tmp_path: Path) -> None:
    *writers, expected = PAIRS[what]
    for name, write in zip(("one", "two"), writers, strict=True):
        (tmp_path / name).mkdir()
        write(tmp_path / name)  # type: ignore[operator]
    found, by_digest = compare(tmp_path / "one", tmp_path / "two")
    assert (found or "").startswith(expected or "")
    assert (found is None) == (expected is None)
    assert bool(by_digest) == (expected is not None and expected.endswith((".pt differs", ".json differs", ".jsonl differs")))


def test_a_log_is_ours_only_beside_our_lock(tmp_path: Path) -> None:
    for name in ("ours/events.jsonl", "ours/run.lock", "theirs/events.jsonl"):
        text(name, "")(tmp_path)
    assert list_timed(tmp_path) == ("ours/events.jsonl", "ours/run.lock")
