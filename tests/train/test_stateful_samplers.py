"""Samplers and datasets with a state_dict inside a plain DataLoader resume with their state."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import BatchSampler, DataLoader, Dataset, TensorDataset

import surefoot
from surefoot.components.data.sources.watched import ObservedLoader
from tests.train.test_loader_resume import Task, resumed, train

SAMPLES, BATCH, EPOCHS = 12, 2, 4
PER_EPOCH = SAMPLES // BATCH


def order(seed: int) -> list[int]:
    return torch.randperm(SAMPLES, generator=torch.Generator().manual_seed(seed)).tolist()


class Kept:
    """An object whose state is the attributes that `KEYS` names."""

    KEYS: tuple[str, ...] = ()

    def state_dict(self) -> dict[str, Any]:
        return {key: getattr(self, key) for key in self.KEYS}

    def load_state_dict(self, held: dict[str, Any]) -> None:
        for key in self.KEYS:
            setattr(self, key, held[key])

    def __len__(self) -> int:
        return SAMPLES


class CountsEpochs(Kept):
    KEYS = ("epochs",)

    def __init__(self) -> None:
        self.epochs = 0

    def __iter__(self) -> Iterator[int]:
        self.epochs += 1
        yield from order(self.epochs)


class KeepsPosition(Kept):
    """Starts at its position, and counts the epochs when one ends."""

    KEYS = ("epoch", "place")

    def __init__(self) -> None:
        self.epoch = self.place = 0

    def __iter__(self) -> Iterator[int]:
        while self.place < SAMPLES:
            self.place += 1
            yield order(self.epoch)[self.place - 1]
        self.epoch, self.place = self.epoch + 1, 0


class KeepsOrder(Kept):
    """Changes its last order, which it keeps in a list, in each epoch."""

    KEYS = ("last",)

    def __init__(self) -> None:
        self.last = order(0)

    def __iter__(self) -> Iterator[int]:
        self.last = [self.last[number] for number in order(1)]
        yield from self.last


class SkipsOnce(Kept):
    """As a sampler of torchdata: a loaded state skips the samples that it counted, once."""

    def __init__(self) -> None:
        self.count, self.skip = 0, 0

    def __iter__(self) -> Iterator[int]:
        start, self.skip = self.skip, 0
        self.count = start
        for number in order(0)[start:]:
            self.count += 1
            yield number

    def state_dict(self) -> dict[str, Any]:
        return {"count": self.count}

    def load_state_dict(self, held: dict[str, Any]) -> None:
        self.skip = held["count"]


class SetsEpoch(Kept):
    """Has the number of the epoch from the loop, and saves it."""

    KEYS = ("epoch",)

    def __init__(self) -> None:
        self.epoch = 0

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __iter__(self) -> Iterator[int]:
        yield from order(self.epoch)


class Batches(CountsEpochs):
    """A batch sampler with a state."""

    def __iter__(self) -> Iterator[list[int]]:  # type: ignore[override]
        self.epochs += 1
        yield from (list(part) for part in torch.tensor(order(self.epochs)).split(BATCH))

    def __len__(self) -> int:
        return PER_EPOCH


class Noisy(Kept, Dataset[Tensor]):
    """A dataset whose samples depend on the number of the reads before."""

    KEYS = ("reads",)

    def __init__(self) -> None:
        self.reads = 0

    def __getitem__(self, number: int) -> Tensor:
        self.reads += 1
        return torch.tensor([number + self.reads / 1000])


def data() -> Dataset[Any]:
    return TensorDataset(torch.arange(float(SAMPLES))[:, None])


LOADERS: dict[str, Callable[[], DataLoader[Any]]] = {
    "counts epochs": lambda: DataLoader(data(), BATCH, sampler=CountsEpochs()),
    "keeps its position": lambda: DataLoader(data(), BATCH, sampler=KeepsPosition()),
    "keeps its order": lambda: DataLoader(data(), BATCH, sampler=KeepsOrder()),
    "skips once": lambda: DataLoader(data(), BATCH, sampler=SkipsOnce()),
    "is told the epoch": lambda: DataLoader(data(), BATCH, sampler=SetsEpoch()),
    "a batch sampler": lambda: DataLoader(data(), batch_sampler=Batches()),
    "in a batch sampler": lambda: DataLoader(
        data(), batch_sampler=BatchSampler(CountsEpochs(), BATCH, drop_last=False)
    ),
    "a dataset": lambda: DataLoader(Noisy(), BATCH, shuffle=True),
    "in a worker": lambda: DataLoader(data(), BATCH, sampler=CountsEpochs(), num_workers=1),
}
STOPS = {"in an epoch": PER_EPOCH + 2, "between epochs": 2 * PER_EPOCH}


def batch_values(batch: Any) -> list[float]:
    found = batch if isinstance(batch, Tensor) else batch[0]
    return [float(value) for value in found.flatten()]


def set_epoch(loader: DataLoader[Any], epoch: int) -> None:
    if isinstance(loader.sampler, SetsEpoch):
        loader.sampler.set_epoch(epoch)


def plain(loader: DataLoader[Any]) -> list[list[float]]:
    """The batches of a plain loop."""
    torch.manual_seed(7)
    found = []
    for epoch in range(EPOCHS):
        set_epoch(loader, epoch)
        found += [batch_values(batch) for batch in loader]
    return found


def attached(loader: DataLoader[Any], folder: Path, steps: int) -> list[list[float]]:
    torch.manual_seed(7)
    model = nn.Linear(1, 1)
    torch.manual_seed(7)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    run = surefoot.attach(model=model, optimizer=optimizer, data=loader, folder=folder)
    found: list[list[float]] = []
    for epoch in range(run.first_pass, EPOCHS):
        set_epoch(loader, epoch)
        for batch in run.batches():
            found.append(batch_values(batch))
            run.step_done(0.0)
            if len(found) == steps and steps % PER_EPOCH:
                run.save()
                return found
        if len(found) == steps:
            run.save()
            return found
    run.close()
    return found


@pytest.mark.quick(
    "counts epochs-in an epoch",
    "keeps its position-between epochs",
    "is told the epoch-between epochs",
)
@pytest.mark.parametrize("stop", STOPS)
@pytest.mark.parametrize("name", LOADERS)
def test_an_attached_loop_resumes_with_the_batches_of_a_plain_loop(
    name: str, stop: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    first = attached(LOADERS[name](), tmp_path, STOPS[stop])
    again = attached(LOADERS[name](), tmp_path, -1)
    assert first + again == plain(LOADERS[name]())
    told = capsys.readouterr().err
    assert "read again" not in told
    assert "different samples" not in told


@pytest.mark.quick(
    "a batch sampler-between epochs", "keeps its position-in an epoch", "a dataset-in an epoch"
)
@pytest.mark.parametrize("stop", STOPS)
@pytest.mark.parametrize("name", LOADERS)
def test_a_run_resumes_with_the_batches_of_a_plain_loop(
    name: str, stop: str, tmp_path: Path
) -> None:
    steps = EPOCHS * PER_EPOCH
    found = resumed(tmp_path / "a", LOADERS[name], steps, STOPS[stop])
    whole = train(tmp_path / "b", Task(LOADERS[name]()), steps, every="1000 steps")
    assert found == whole
    if name not in ("a dataset", "in a worker"):  # whose order follows from the seed of the run
        assert found == [[round(each, 5) for each in batch] for batch in plain(LOADERS[name]())]


def test_a_loaded_state_that_would_skip_samples_is_left_out() -> None:
    loader = LOADERS["skips once"]()
    watched = ObservedLoader(loader)
    list(loader)
    before = dict(vars(loader.sampler))
    assert not [name for name in watched.pass_states() if name.startswith("state of")]
    assert vars(loader.sampler) == before


def test_a_container_that_nothing_has_changed_is_not_written() -> None:
    class Watched(list[int]):
        def clear(self) -> None:
            raise AssertionError("cleared")

        def __setitem__(self, *given: Any) -> None:
            raise AssertionError("written")

    loader = LOADERS["skips once"]()
    loader.sampler.order = Watched(order(0))  # type: ignore[attr-defined]
    list(loader)
    assert not ObservedLoader(loader).part_states()


def test_a_source_may_have_parts_of_its_own(tmp_path: Path) -> None:
    class InParts(surefoot.data.Arrays):
        parts = ("a.bin", "b.bin")

    class OfParts(Task):
        def data(self, split: str) -> Any:
            return InParts(torch.arange(float(SAMPLES))[:, None])

    assert len(train(tmp_path, OfParts(data()), 2)) == 2


def test_a_state_that_no_checkpoint_can_store_is_left_out(tmp_path: Path) -> None:
    class Opaque(CountsEpochs):
        def state_dict(self) -> dict[str, Any]:
            return {"epochs": self.epochs, "seen": {1, 2}}

    def make() -> DataLoader[Any]:
        return DataLoader(data(), BATCH, sampler=Opaque())

    assert not ObservedLoader(make()).pass_states()
    found = attached(make(), tmp_path / "a", 2)
    assert found == plain(make())[:2]
    assert train(tmp_path / "b", Task(make()), 2) == plain(make())[:2]
