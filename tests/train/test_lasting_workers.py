"""Loaders whose workers stay: a resumed run or loop reads the batches of an unbroken one."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch_geometric.loader
from torch import nn
from torch.utils.data import DataLoader, Dataset, get_worker_info

import surefoot
from surefoot import Run
from surefoot.components.data.loader.streams import streams_of_epoch
from surefoot.components.data.sources.iterated import Iterated
from tests.train.test_loader_resume import (
    BATCH,
    UNSAVED,
    Task,
    own_generator,
    spec_for,
)

ROWS: Any = [torch.tensor([float(number)]) for number in range(14)]
EPOCHS = 3


class Renamed(DataLoader[Any]):
    """A subclass that only has a constructor, as that of PyG."""

    def __init__(self, data: Any, **how: Any) -> None:
        super().__init__(data, BATCH, shuffle=True, **how)


class Halved(DataLoader[Any]):
    """A subclass that changes the batches."""

    def _get_iterator(self) -> Any:
        return super()._get_iterator()


class Late(DataLoader[Any]):
    """A subclass that begins when its first batch is requested."""

    def __iter__(self) -> Any:
        for batch in super().__iter__():  # noqa: UP028 - as loaders do that change each batch
            yield batch


class Wrapped:
    """A wrapper of a loader, as that of Accelerate."""

    def __init__(self, loader: DataLoader[Any]) -> None:
        self.base_dataloader = loader

    def __iter__(self) -> Iterator[Any]:
        yield from self.base_dataloader

    def __len__(self) -> int:
        return len(self.base_dataloader)

    def __getattr__(self, name: str) -> Any:
        if name == "base_dataloader":
            raise AttributeError
        return getattr(self.base_dataloader, name)


class BySeed(Dataset[Any]):
    """Adds a number that follows from the seed of the worker, as some augmentations do."""

    def __len__(self) -> int:
        return len(ROWS)

    def __getitem__(self, number: int) -> Any:
        info = get_worker_info()
        assert info is not None
        return ROWS[number] + (info.seed + number) % 97 / 100


LOADERS: dict[str, Callable[..., Any]] = {
    "plain": lambda **how: DataLoader(ROWS, BATCH, shuffle=True, **how),
    "PyG": lambda **how: torch_geometric.loader.DataLoader(ROWS, BATCH, shuffle=True, **how),
    "renamed": lambda **how: Renamed(ROWS, generator=own_generator(), **how),
    "with a method": lambda **how: Halved(ROWS, BATCH, shuffle=True, **how),
    "with a method and a generator": lambda **how: Halved(
        ROWS, BATCH, shuffle=True, generator=own_generator(), **how
    ),
    "late": lambda **how: Late(ROWS, BATCH, shuffle=True, **how),
    "one by one": lambda **how: DataLoader(ROWS[:4], batch_size=None, shuffle=True, **how),
    "wrapped": lambda **how: Wrapped(DataLoader(ROWS, BATCH, shuffle=True, **how)),
}
LASTING = {"num_workers": 1, "persistent_workers": True}
HOW: dict[str, dict[str, Any]] = {
    "no workers": {},
    "two workers": {"num_workers": 2},
    "workers that stay": LASTING,
}


def read(
    source: Iterated, first: int, last: int, streams: Any = lambda epoch: streams_of_epoch(0, epoch)
) -> list[Any]:
    """The batches of these steps, each read as a Run reads it."""
    found = []
    for step in range(first, last):
        epoch, number = divmod(step, len(source))
        with streams(epoch)(number):
            batch = source.at(epoch, streams(epoch)).read(np.array([number]))
        found.append(batch.flatten().tolist())
    return found


def check(source: Iterated) -> None:
    """Read batch 0 as the checks before a run do."""
    streams = streams_of_epoch(0, 0)
    with streams(0):
        source.at(0, streams, keep=True).read(np.array([0]))


def read_broken(make: Callable[[], Any], stop: int, last: int) -> list[Any]:
    source = Iterated(make())
    check(source)
    found = read(source, 0, stop)
    held = source.state_dict()
    source.close()
    source = Iterated(make())
    check(source)
    source.load_state_dict(held)
    source.seek(stop // len(source), stop % len(source), lambda epoch: streams_of_epoch(0, epoch))
    assert source.notices == []
    return found + read(source, stop, last)


@pytest.mark.quick(
    "PyG-workers that stay",
    "late-workers that stay",
    "one by one-workers that stay",
    "with a method and a generator-no workers",
    "with a method and a generator-workers that stay",
)
@pytest.mark.parametrize("how", HOW.values(), ids=list(HOW))
@pytest.mark.parametrize("kind", LOADERS)
def test_a_source_that_is_resumed_reads_the_batches_of_an_unbroken_one(
    kind: str, how: dict[str, Any]
) -> None:
    def make() -> Any:
        return LOADERS[kind](**how)

    source = Iterated(make())
    size = len(source)
    whole = read(source, 0, EPOCHS * size)
    assert len({str(whole[at : at + size]) for at in range(0, EPOCHS * size, size)}) == EPOCHS
    for stop in (2, size, size + 2, 2 * size):
        assert read_broken(make, stop, EPOCHS * size) == whole, stop


def loop(folder: Path, data: Any, leave_at: int | None = None) -> dict[int, list[float]]:
    """The samples of each step of an attached loop, which is left after a step as by a kill."""
    torch.manual_seed(0)
    model = nn.Linear(1, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    run = surefoot.attach(
        model=model, optimizer=optimizer, data=data, folder=folder, save="1 steps"
    )
    found: dict[int, list[float]] = {}
    for _ in range(run.first_pass, EPOCHS):
        for batch in run.batches():
            optimizer.zero_grad()
            loss = model(batch.reshape(-1, 1) / 100).square().mean()
            loss.backward()
            optimizer.step()
            run.step_done(loss)
            found[run.step] = batch.flatten().tolist()
            if run.step == leave_at:
                run.session.lock.release()
                return found
    run.close()
    return found


@pytest.mark.quick("plain", "one by one")
@pytest.mark.parametrize("kind", LOADERS)
def test_a_loop_that_is_resumed_reads_the_batches_of_an_unbroken_one(
    kind: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def make() -> Any:
        return LOADERS[kind](**LASTING)

    size = len(make())
    whole = loop(tmp_path / "whole", make())
    torch.manual_seed(0)
    nn.Linear(1, 1)
    loader = make()
    plain = [batch.flatten().tolist() for _ in range(EPOCHS) for batch in loader]
    assert list(whole.values()) == plain
    found = loop(tmp_path / "left", make(), leave_at=size)
    found |= loop(tmp_path / "left", make(), leave_at=size + 2)
    found |= loop(tmp_path / "left", make(), leave_at=2 * size)
    assert found | loop(tmp_path / "left", make()) == whole
    assert "read again" not in " ".join(capsys.readouterr().err.split())


@pytest.mark.slow
def test_new_workers_have_the_seeds_of_the_workers_that_were_killed() -> None:
    def make() -> Any:
        return DataLoader(BySeed(), BATCH, shuffle=True, **LASTING)

    size = len(make())
    whole = read(Iterated(make()), 0, EPOCHS * size)
    for stop in (size + 1, 2 * size):
        assert read_broken(make, stop, EPOCHS * size) == whole


class Noisy(Dataset[Any]):
    """Draws from the global generator, as augmentation does."""

    def __len__(self) -> int:
        return len(ROWS)

    def __getitem__(self, number: int) -> Any:
        return ROWS[number] + torch.rand(()) / 2


def read_noisy(stop: int, **how: Any) -> tuple[bool, list[tuple[str, str]]]:
    """Whether the values are those of an unbroken run, and what the source reports."""

    def make() -> Any:
        return Renamed(Noisy(), **LASTING, **how)

    whole = read(Iterated(make()), 0, stop + 1)
    source = Iterated(make())
    check(source)
    read(source, 0, stop)
    held = source.state_dict()
    source.close()
    source = Iterated(make())
    check(source)
    source.load_state_dict(held)
    source.seek(stop // len(source), stop % len(source), lambda epoch: streams_of_epoch(0, epoch))
    (batch,) = read(source, stop, stop + 1)
    assert [int(value) for value in batch] == [int(value) for value in whole[-1]]
    return batch == whole[-1], source.notices


@pytest.mark.quick("2-True")
@pytest.mark.parametrize(("stop", "is_same"), [(2, True), (6, False)])
def test_values_drawn_in_workers_are_repeated_in_the_first_epoch_and_reported_in_others(
    stop: int, is_same: bool
) -> None:
    same, notices = read_noisy(stop)
    assert same is is_same
    assert [hint.startswith("the DataLoader has persistent_workers") for _, hint in notices] == (
        [] if is_same else [True]
    )


def test_a_run_names_at_its_start_that_new_workers_draw_other_numbers(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    said = []
    for name, how in (("lasting", LASTING), ("new", {"num_workers": 1})):
        task = Task(Renamed(ROWS, **how))
        with Run(spec_for(1, every=UNSAVED), task, folder=tmp_path / name) as run:
            for _ in run.steps():
                pass
        printed = capfd.readouterr()
        said.append(" ".join((printed.out + printed.err).split()))
    assert "random numbers that are drawn in workers differ" in said[0]
    assert "drawn in workers" not in said[1]
