"""A stream without a length trains for the length of the run, and begins again when it ends."""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader, IterableDataset, get_worker_info

from surefoot import Run, RunSpec
from surefoot.contract import events, loop_ledger
from surefoot.core.errors import SpecError, SurefootError
from surefoot.data import Iterated
from tests.train.test_loader_resume import Left, Task

SAMPLES = 14


class Stream(IterableDataset[Any]):
    """Samples in an order that depends on the epoch that it is told, with a random part."""

    epoch = 0

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __iter__(self) -> Iterator[float]:
        info = get_worker_info()
        start, step = (0, 1) if info is None else (info.id, info.num_workers)
        order = random.Random(self.epoch).sample(range(SAMPLES), SAMPLES)
        for number in order[start::step]:
            yield number + torch.rand(()).item() / 8


class Stateful(IterableDataset[Any]):
    """Keeps its place."""

    def __init__(self) -> None:
        self.at, self.passes = 0, 0

    def __iter__(self) -> Iterator[float]:
        while self.at < SAMPLES:
            self.at += 1
            yield self.at + 100.0 * self.passes
        self.at, self.passes = 0, self.passes + 1

    def state_dict(self) -> dict[str, Any]:
        return {"at": self.at, "passes": self.passes}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.at, self.passes = state["at"], state["passes"]


class Infinite(IterableDataset[Any]):
    def __iter__(self) -> Iterator[float]:
        return map(float, itertools.count())


class Batches:
    """Any iterable of batches."""

    def __iter__(self) -> Iterator[Any]:
        return iter(torch.arange(12.0).split(5))


class Batched(IterableDataset[Any]):
    def __iter__(self) -> Iterator[Any]:
        return iter(Batches())


STREAMS: dict[str, Callable[[], Any]] = {
    "a stream": lambda: DataLoader(Stream(), 4),
    "with workers": lambda: DataLoader(Stream(), 4, num_workers=2),
    "with workers that stay": lambda: DataLoader(
        Stream(), 4, num_workers=2, persistent_workers=True
    ),
    "that keeps its place": lambda: DataLoader(Stateful(), 4),
    "without an end": lambda: DataLoader(Infinite(), 4),
    "any iterable": Batches,
    "batched by itself": lambda: DataLoader(Batched(), batch_size=None),
}


def spec_of(steps: int, **train: Any) -> RunSpec:
    return RunSpec(
        train={"length": f"{steps} steps", "threads": 1} | train,
        checkpoint={"every": "1 steps", "background": False},
        observe={"tensorboard": False},
    )


def train(
    folder: Path, make: Callable[[], Any], steps: int, leave_at: int | None = None, **tables: Any
) -> list[list[float]]:
    task = Task(make())
    try:
        with Run(spec_of(steps, **tables), task, folder=folder, quiet=True) as run:
            for report in run.steps():
                if report.step == leave_at:
                    raise Left
    except Left:
        pass
    return task.seen


@pytest.mark.quick("a stream", "that keeps its place", "with workers that stay")
@pytest.mark.parametrize("kind", STREAMS)
def test_it_begins_again_and_resumes_with_the_same_batches(kind: str, tmp_path: Path) -> None:
    make = STREAMS[kind]
    unbroken = train(tmp_path / "whole", make, 11)
    assert len(unbroken) == 11
    seen: list[list[float]] = []
    for stop in (2, 5, 9, None):
        done = train(tmp_path / "stopped", make, 11, leave_at=stop)
        first = [
            event.first_step
            for event in events.read(tmp_path / "stopped")
            if isinstance(event, events.Started)
        ][-1]
        seen[first - 1 :] = done
    if kind != "with workers that stay":  # draws in workers differ after a restart, as is told
        assert seen == unbroken
    assert [len(each) for each in seen] == [len(each) for each in unbroken]
    assert loop_ledger.check(tmp_path / "stopped").holds


def test_each_pass_is_told_its_number(tmp_path: Path) -> None:
    seen = train(tmp_path / "run", STREAMS["a stream"], 8)
    passes = [[int(value) for batch in seen[at : at + 4] for value in batch] for at in (0, 4)]
    assert [sorted(each) for each in passes] == [list(range(SAMPLES))] * 2
    assert passes[0] != passes[1]


def test_it_accumulates(tmp_path: Path) -> None:
    seen = train(tmp_path / "run", STREAMS["without an end"], 3, accumulate=2)
    assert [value for batch in seen for value in batch] == [float(n) for n in range(24)]


def test_it_is_evaluated_twenty_times_or_as_the_spec_says(tmp_path: Path) -> None:
    def evaluated(name: str, **tables: Any) -> list[int]:
        spec = spec_of(40).replace(**tables)
        with Run(spec, Task(STREAMS["a stream"]()), folder=tmp_path / name, quiet=True) as run:
            return [report.step for report in run.steps() if run.evaluation_due]

    assert evaluated("default") == list(range(2, 41, 2))
    assert evaluated("given", evaluate={"every": "15 steps"}) == [15, 30, 40]


def test_an_evaluation_reads_a_stream_to_its_end(tmp_path: Path) -> None:
    task = Task(STREAMS["a stream"](), judged=STREAMS["a stream"]())
    with Run(spec_of(3), task, folder=tmp_path / "run", quiet=True) as run:
        for _ in run.steps():
            assert run.evaluate().num_samples == SAMPLES


class Once:
    """Has nothing left for a second pass."""

    def __init__(self) -> None:
        self.left = iter(torch.arange(8.0).split(4))

    def __iter__(self) -> Iterator[Any]:
        return self.left


class Empty:
    def __iter__(self) -> Iterator[Any]:
        return iter(())


@pytest.mark.parametrize("make", [Once, Empty])
def test_a_stream_that_returns_nothing_ends_the_run(
    make: Callable[[], Any], tmp_path: Path
) -> None:
    with pytest.raises(SurefootError, match="returned no batch"):
        train(tmp_path / "run", make, 9)


@pytest.mark.parametrize("length", ["2 epochs", "64 samples"])
def test_a_run_over_it_needs_a_length_of_its_own(length: str, tmp_path: Path) -> None:
    spec = RunSpec(train={"length": length})
    with (
        pytest.raises(SpecError, match="Loader has no length") as caught,
        Run(spec, Task(STREAMS["a stream"]()), folder=tmp_path / "run", quiet=True),
    ):
        pass
    assert 'train.length = "1000 steps"' in (caught.value.hint or "")
    whole = Iterated(STREAMS["a stream"](), num_batches=4)
    spec = RunSpec(train={"length": "2 epochs"}, evaluate={"every": "never"})
    with Run(spec, Task(whole), folder=tmp_path / "given", quiet=True) as run:
        assert sum(1 for _ in run.steps()) == 8


def test_a_time_is_a_length(tmp_path: Path) -> None:
    spec = RunSpec(
        train={"length": "1 s"},
        schedule={"name": "constant"},
        evaluate={"every": "never"},
        observe={"tensorboard": False},
    )
    task = Task(STREAMS["without an end"]())
    with Run(spec, task, folder=tmp_path / "run", quiet=True) as run:
        assert sum(1 for _ in run.steps()) > 3
