"""Between two attempts a change of what a dataset holds is seen; one of its settings is none."""

from __future__ import annotations

import argparse
import sys
from collections import deque
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.data import ConcatDataset, DataLoader, Dataset, Subset

import surefoot
from surefoot.components.data.sources.batch_digest import digest_of_content
from surefoot.core.errors import OtherDataError
from surefoot.train.run import Run
from tests.train.small import Small, faults_of, spec


class Held(Dataset[Any]):
    """A dataset of the user's, with the content, a setting, a cache and a folder."""

    def __init__(self, rows: Any, **more: Any) -> None:
        self.rows = rows
        vars(self).update(more)

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, number: int) -> Any:
        return torch.full((4,), float(self.rows[number])), number % 3


ROWS = [1.0] * 24
MADE: dict[str, Callable[[float], Any]] = {
    "numbers": lambda x: [0.0, 1.0, x],
    "texts": lambda x: ["a" * 50, f"b{x}"],
    "dicts": lambda x: [{"text": "a", "label": x, "more": {"deep": (1, 2)}}] * 3000,
    "dict": lambda x: {"a": 1, "b": [x]},
    "keys": lambda x: {"a": 1, f"b{x}": 2},
    "tuple": lambda x: (1, 2, (3, x)),
    "deque": lambda x: deque([1, x]),
    "objects": lambda x: np.array(["a", {"b": x}], dtype=object),
    "tensors": lambda x: [torch.zeros(3), torch.full((2,), x)],
    "tensor": lambda x: torch.full((2000, 30), x),
    "names of files": lambda x: [f"/data/{x}.png"],
}
AROUND: dict[str, Callable[[Any], Any]] = {
    "itself": lambda rows: rows,
    "dataset": Held,
    "loader": lambda rows: DataLoader(Held(rows)),
    "subset": lambda rows: Subset(Held(rows), [0]),
    "concat": lambda rows: DataLoader(ConcatDataset([Held([1]), Held(rows)])),
}


@pytest.mark.parametrize("around", AROUND)
@pytest.mark.parametrize("kind", MADE)
def test_other_content_has_another_digest(kind: str, around: str) -> None:
    make = AROUND[around]
    first, again, other = (digest_of_content(make(MADE[kind](x))) for x in (1.0, 1.0, 2.0))
    assert first == again != other


def test_settings_caches_and_the_folder_of_the_data_are_no_content() -> None:
    rows = ["/here/a.png", Path("/here/b.png")]
    one = Held(
        rows, root="/here", epoch=0, cache={}, transform=nn.Identity(), rng=np.random.default_rng()
    )
    moved = ["/there/a.png", Path("/there/b.png")]
    other = Held(
        moved,
        root="/there",
        epoch=3,
        cache={1: 2},
        transform=nn.Identity(),
        rng=np.random.default_rng(),
    )
    assert digest_of_content(one) == digest_of_content(other)


class Settings(dict[str, Any]):
    """A dict of a library for settings."""


SETTINGS: dict[str, Callable[[bool], Any]] = {
    "arguments": lambda again: vars(argparse.Namespace(lr=0.1, resume=again, out=f"runs/{again}")),
    "none": lambda again: {"seed": 1, "checkpoint": "runs/1/last.pt" if again else None},
    "nested": lambda again: {"data": {"root": "x", "size": 8}, "train": {"resume": again}},
    "list": lambda again: {"betas": [0.9, 0.99], "lr": 0.1, "resume": again},
    "subclass": lambda again: Settings(name="x", started=2.0 if again else 1.0),
}


@pytest.mark.parametrize("kind", SETTINGS)
def test_a_dict_of_settings_is_no_content(kind: str) -> None:
    one, other = (Held([1.0], settings=SETTINGS[kind](again)) for again in (False, True))
    assert digest_of_content(one) == digest_of_content(other)
    rows = (Held([SETTINGS[kind](again)] * 9) for again in (False, True))
    assert digest_of_content(next(rows)) != digest_of_content(next(rows))


def test_what_stands_beside_settings_is_content() -> None:
    one, other = (Held([1.0], settings={"lr": 0.1, "name": "a", "rows": [x]}) for x in (1, 2))
    assert digest_of_content(one) != digest_of_content(other)


@pytest.mark.parametrize("found", [{"cat": 0, "dog": 1}, {"cat": "a", "dog": "b"}, {1: 2, 3: "a"}])
def test_a_dict_of_classes_is_content(found: dict[Any, Any]) -> None:
    turned = dict(zip(found, reversed(found.values()), strict=True))
    one, other = (Held([1.0], classes=each) for each in (found, turned))
    assert digest_of_content(one) != digest_of_content(other)


def test_a_large_list_takes_no_longer_than_a_batch() -> None:
    calls = []
    for length in (2_000, 20_000):
        held = Held([{"text": "word " * 400, "ids": list(range(100))} for _ in range(length)])
        calls.append(0)

        def count(*called: object) -> None:
            calls[-1] += 1

        sys.setprofile(count)
        try:
            digest_of_content(held)
        finally:
            sys.setprofile(None)
    assert calls[1] <= 1.1 * calls[0]


def test_a_list_that_changes_between_two_attempts_of_a_loop_is_reported(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for last in (1.0, 1.0, 5.0):
        model = nn.Linear(4, 3)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        loader = DataLoader(Held([1.0] * 19 + [last]), 4)
        run = surefoot.attach(
            model=model, optimizer=optimizer, data=loader, folder=tmp_path, save="1 steps"
        )
        for inputs, _ in run.batches():
            run.step_done(model(inputs).sum())
            break  # the last row is not read
        run.save()
        run.session.end("stopped")
        printed = " ".join(capsys.readouterr().err.split())
        assert ("the content of the data" in printed) == (last == 5.0)
    faults = faults_of(tmp_path)
    assert [each.fault for each in faults] == ["other-data"]


class OfLists(Small):
    def data(self, split: str) -> Any:
        return Held(ROWS) if split == "train" else super().data(split)


def test_a_list_that_changes_between_two_attempts_of_a_run_needs_a_word(tmp_path: Path) -> None:
    def train(steps: int, last: float, *, accept_data: bool = False) -> None:
        ROWS[-1] = last
        with Run(
            spec(12), OfLists(), folder=tmp_path / "a", quiet=True, accept_data=accept_data
        ) as run:
            for report in run.steps():
                if report.step == steps:
                    break

    train(2, 1.0)
    train(4, 1.0)
    with pytest.raises(OtherDataError, match="content of the data"):
        train(6, 5.0)
    train(8, 5.0, accept_data=True)
    assert [fault.fault for fault in faults_of(tmp_path / "a")] == ["other-data"]
    train(10, 5.0)
