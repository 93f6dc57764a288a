"""Streams, states and generators of a user's own under a run.

What a check reads, what is saved, what is noticed.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.utils.data import DataLoader, IterableDataset

from surefoot import Run, RunSpec
from surefoot.components.data.sources.iterated import Iterated
from surefoot.contract import loop_ledger
from surefoot.core.errors import DataError
from tests.train.test_loader_resume import (
    BATCH,
    LOADERS,
    NUMBERS,
    SAMPLES,
    UNSAVED,
    Left,
    Task,
    own_generator,
    resumed,
    spec_for,
    train,
)


class Whole(IterableDataset[float]):
    """Gives all of its samples to every worker."""

    def __len__(self) -> int:
        return 16

    def __iter__(self) -> Iterator[float]:
        return iter([float(number) for number in range(16)])


@pytest.mark.parametrize(("workers", "told"), [(2, True), (1, False), (0, False)])
def test_workers_that_each_read_the_whole_stream_are_reported(
    workers: int, told: bool, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    train(tmp_path / "run", Task(DataLoader(Whole(), 4, num_workers=workers)), 8, every=UNSAVED)
    said = capfd.readouterr().err
    assert ("returns more batches than its length, 4" in said) is told
    assert ("torch.utils.data.get_worker_info()" in said) is told


class Counting:
    """A stream that keeps its own place, and has no way to put it back."""

    def __init__(self, length: int = 12) -> None:
        self.length, self.next = length, 0

    def __len__(self) -> int:
        return self.length

    def __iter__(self) -> Iterator[Tensor]:
        while self.next < self.length:
            self.next += 1
            yield torch.full((2, 1), float(self.next))
        self.next = 0


class Stateful(Counting):
    def state_dict(self) -> dict[str, Any]:
        return {"next": self.next}

    def load_state_dict(self, held: dict[str, Any]) -> None:
        self.next = held["next"]


@pytest.mark.parametrize(
    "make", [Counting, Stateful, lambda: Iterated(Counting()), lambda: Iterated(Stateful())]
)
def test_the_checks_and_evaluations_take_no_batch_from_the_training(
    make: Callable[[], Any], tmp_path: Path
) -> None:
    task = Task(make(), judged=make())
    with Run(spec_for(24, every=UNSAVED), task, folder=tmp_path / "run", quiet=True) as run:
        for report in run.steps():
            if report.step in (1, 5, 12):
                assert run.evaluate().num_samples == 24
    assert [seen[0] for seen in task.seen] == [float(number) for number in range(1, 13)] * 2


def test_the_state_of_an_iterable_is_saved_without_being_named(tmp_path: Path) -> None:
    class Drawing(Stateful):
        """Every pass has other batches, which follow from its state alone."""

        total = 0

        def __iter__(self) -> Iterator[Tensor]:
            for _ in range(self.next, self.length):
                self.next += 1
                self.total += 1
                yield torch.full((2, 1), float(self.total))
            self.next = 0

        def state_dict(self) -> dict[str, Any]:
            return {"next": self.next, "total": self.total}

        def load_state_dict(self, held: dict[str, Any]) -> None:
            self.next, self.total = held["next"], held["total"]

    unbroken = train(tmp_path / "whole", Task(Drawing(5)), 15, every=UNSAVED)
    assert [seen[0] for seen in unbroken] == [float(number) for number in range(1, 16)]
    assert resumed(tmp_path / "stopped", lambda: Drawing(5), 15, 3, 6, 9) == unbroken


def test_a_state_that_no_checkpoint_can_hold_is_replayed_and_reported(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    class Token:
        def __deepcopy__(self, memo: Any) -> Any:
            return self

    class Opaque(Stateful):
        def state_dict(self) -> dict[str, Any]:
            return {"next": self.next, "token": Token()}

    unbroken = train(tmp_path / "whole", Task(Opaque(5)), 8)
    assert "returns values that a checkpoint cannot store" in capfd.readouterr().err
    assert resumed(tmp_path / "stopped", lambda: Opaque(5), 8, 3) == unbroken


def test_an_evaluation_leaves_a_generator_that_both_loaders_share(tmp_path: Path) -> None:
    def make() -> Task:
        generator = own_generator()
        loaders = [DataLoader(NUMBERS, BATCH, shuffle=True, generator=generator) for _ in range(2)]  # type: ignore[arg-type]
        return Task(*loaders)

    seen = []
    for name, when in (("with", (2, 7)), ("without", ())):
        task = make()
        with Run(spec_for(15, every=UNSAVED), task, folder=tmp_path / name, quiet=True) as run:
            for report in run.steps():
                if report.step in when:
                    run.evaluate()
        seen.append(task.seen)
    assert seen[0] == seen[1]
    assert len({str(seen[0][at : at + 5]) for at in (0, 5, 10)}) == 3


def test_a_fork_of_a_run_with_a_loader_reads_on_where_it_stood(tmp_path: Path) -> None:
    from surefoot.train.resume.start import Start

    make = LOADERS["shuffled by a generator"]
    unbroken = train(tmp_path / "whole", Task(make()), 10, every=UNSAVED)
    train(tmp_path / "parent", Task(make()), 7, every=UNSAVED)
    task = Task(make())
    with Run(
        spec_for(10),
        task,
        folder=tmp_path / "fork",
        quiet=True,
        start=Start(tmp_path / "parent", 7),
    ) as run:
        for _ in run.steps():
            pass
    assert task.seen == unbroken[7:]
    assert loop_ledger.check(tmp_path / "fork").num_batches == 10


def test_a_sized_iterable_dataset_is_read_forwards(tmp_path: Path) -> None:
    class Batches(IterableDataset[Tensor]):
        def __len__(self) -> int:
            return 3

        def __iter__(self) -> Iterator[Tensor]:
            return (torch.full((2, 1), float(number)) for number in range(3))

    seen = train(tmp_path / "run", Task(Batches()), 6, every=UNSAVED)
    assert [values[0] for values in seen] == [0.0, 1.0, 2.0] * 2


def test_an_iterable_that_ends_early_says_so_each_time() -> None:
    source = Iterated([torch.zeros(1)] * 3, num_batches=5)
    for _ in range(2):
        with pytest.raises(DataError, match="ended after 3 batches of 5"):
            source.read(np.array([4]))


def test_batches_of_a_loader_are_accumulated_and_resumed_between_them(tmp_path: Path) -> None:
    def run_of(folder: Path, leave_at: int | None = None) -> tuple[list[list[float]], list[float]]:
        task = Task(LOADERS["shuffled"]())
        spec = RunSpec(
            **{
                **spec_for(6).as_tables(),
                "train": {"length": "6 steps", "threads": 1, "batch": 2, "microbatch": 1},
            }
        )
        with pytest.raises(Left) if leave_at else contextlib.nullcontext():  # noqa: SIM117
            with Run(spec, task, folder=folder, quiet=True) as run:
                for report in run.steps():
                    if report.step == leave_at:
                        raise Left
        return task.seen, [float(value) for value in run.model.state_dict()["weight"].flatten()]

    seen, weights = run_of(tmp_path / "whole")
    # five batches an epoch, two a step
    assert [len(batch) for batch in seen] == [4, 4, 4, 4, 2, 4, 4, 4, 4, 2]
    run_of(tmp_path / "left", leave_at=3)
    assert run_of(tmp_path / "left")[1] == weights
    assert loop_ledger.check(tmp_path / "left").num_samples == 2 * SAMPLES
