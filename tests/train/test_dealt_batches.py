"""Batches of a DataLoader, divided into microbatches, are those that the DataLoader returns.

The weights are those of whole batches, and a stopped run resumes to the bits of one that was not.
"""

from __future__ import annotations

import itertools
import pickle
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, IterableDataset, Subset

from surefoot import Run, RunSpec
from surefoot.components.data.feed import Share
from surefoot.components.data.loader.dealt import DealtLoader
from surefoot.components.data.loader.division import Deal, make_deal
from surefoot.components.data.loader.streams import SeededIds, streams_of_epoch
from surefoot.components.data.sources.iterated import Iterated
from surefoot.contract import loop_ledger
from surefoot.core.errors import OtherDataError, SpecError, SurefootError
from tests.train.test_loader_resume import (
    BATCH,
    LOADERS,
    NUMBERS,
    SAMPLES,
    Augmented,
    ByEpoch,
    Left,
    Task,
)

EPOCHS = 3


def train(
    folder: Path, loader: Any, leave_at: int | None = None, **tables: dict[str, Any]
) -> tuple[list[list[float]], list[Tensor]]:
    """The samples of each pass of the run, and the weights at its end."""
    task = Task(loader)
    spec = RunSpec(
        **{
            "train": {"length": f"{EPOCHS} epochs", "threads": 1} | tables.pop("train", {}),
            "optim": {"lr": 0.01},
            "evaluate": {"every": "1000 steps"},
            "checkpoint": {"every": "1 steps", "background": False},
            "observe": {"tensorboard": False},
            **tables,
        }
    )
    weights = list[Tensor]()
    try:
        with Run(spec, task, folder=folder, quiet=True) as run:
            for report in run.steps():
                if report.step == leave_at:
                    raise Left
            weights = [each.detach().clone() for each in run.model.parameters()]
    except Left:
        pass
    return task.seen, weights


def joined(passes: list[list[float]], sizes: list[int]) -> list[list[float]]:
    """The passes, joined into batches of these sizes."""
    values = [each for one in passes for each in one]
    ends = np.cumsum([0, *sizes]).tolist()
    return [values[begin:end] for begin, end in itertools.pairwise(ends)]


WITHOUT_A_SIZE = {"by epoch"}
DRAWING = {"augmented", "augmented by workers", "workers and a generator"}
OWN = {"with a generator of its own"}  # whose draws no index determines


@pytest.mark.quick("shuffled", "by epoch", "workers that stay and a generator")
@pytest.mark.parametrize("kind", sorted(LOADERS.keys() - OWN))
def test_the_parts_of_a_batch_are_the_batch(kind: str, tmp_path: Path) -> None:
    make = LOADERS[kind]
    divide: dict[str, Any] = (
        {"layout": {"virtual_ranks": 2}} if kind in WITHOUT_A_SIZE else {"train": {"microbatch": 3}}
    )
    whole, weights = train(tmp_path / "whole", make())
    parts, others = train(tmp_path / "parts", make(), **divide)
    assert len(parts) > len(whole)
    if kind not in DRAWING:
        assert joined(parts, [len(batch) for batch in whole]) == whole
        torch.testing.assert_close(others, weights, rtol=1e-6, atol=1e-7)
    found = loop_ledger.check(tmp_path / "parts")
    assert found.holds
    assert found.num_samples == loop_ledger.check(tmp_path / "whole").num_samples


@pytest.mark.quick("augmented by workers", "weighted", "by epoch")
@pytest.mark.parametrize("kind", sorted(LOADERS.keys() - OWN))
def test_a_stopped_run_resumes_to_the_same_bits(kind: str, tmp_path: Path) -> None:
    make = LOADERS[kind]
    divide: dict[str, Any] = (
        {"layout": {"virtual_ranks": 2}} if kind in WITHOUT_A_SIZE else {"train": {"microbatch": 3}}
    )
    size = len(make())
    _, weights = train(tmp_path / "whole", make(), **divide)
    for stop in (2, size + 1, 2 * size + 1):
        train(tmp_path / "stopped", make(), leave_at=stop, **divide)
    seen, others = train(tmp_path / "stopped", make(), **divide)
    assert seen
    assert all(map(torch.equal, weights, others))
    assert loop_ledger.check(tmp_path / "stopped").holds


@pytest.mark.parametrize("num_workers", [0, 2])
def test_draws_of_a_dataset_depend_on_the_sample_alone(num_workers: int, tmp_path: Path) -> None:
    def sorted_values(folder: str, workers: int, **tables: Any) -> list[list[float]]:
        loader = DataLoader(Augmented(), BATCH, shuffle=True, num_workers=workers)
        seen, _ = train(tmp_path / folder, loader, **tables)
        values = [each for one in seen for each in one]
        return [values[at : at + SAMPLES] for at in range(0, len(values), SAMPLES)]

    whole = sorted_values("whole", 0, data={"draws": "sample"})
    assert sorted_values("parts", num_workers, train={"microbatch": 3}) == whole
    assert sorted(whole[0]) != sorted(whole[1])  # each epoch draws anew


def test_a_resumed_run_reads_no_sample_of_the_steps_before(tmp_path: Path) -> None:
    read = list[int]()

    class Counted(Dataset[Any]):
        def __len__(self) -> int:
            return SAMPLES

        def __getitem__(self, index: int) -> Any:
            read.append(index)
            return float(index), index

    def make() -> Any:
        return DataLoader(Counted(), 2, shuffle=True)

    how: dict[str, Any] = {"data": {"draws": "sample"}}
    _, weights = train(tmp_path / "whole", make(), **how)
    per_run = len(read)
    train(tmp_path / "cut", make(), leave_at=2 * (SAMPLES // 2) - 1, **how)
    read.clear()
    _, others = train(tmp_path / "cut", make(), **how)
    assert all(map(torch.equal, weights, others))
    assert len(read) < per_run - 2 * (SAMPLES - 4)


class Many(Dataset[Any]):
    """Reads the samples of a batch in one call, as those of Hugging Face do."""

    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, index: int) -> Any:
        return float(index), index

    def __getitems__(self, indices: list[int]) -> Any:
        return [(float(index), index) for index in indices]


def padded(samples: list[Any]) -> Any:
    return torch.tensor([float(value) for value, _ in samples]), len(samples)


DATASETS: dict[str, Callable[[], DataLoader[Any]]] = {
    "several at once": lambda: DataLoader(Many(), BATCH, shuffle=True),
    "a subset": lambda: DataLoader(Subset(Many(), range(4, 16)), BATCH, shuffle=True),
    "a collate function": lambda: DataLoader(
        NUMBERS, BATCH, shuffle=True, collate_fn=padded, num_workers=1
    ),
    "a batch larger than the data": lambda: DataLoader(NUMBERS, 50),
    "a last batch of one sample": lambda: DataLoader(NUMBERS[:9], BATCH, shuffle=True),
}


@pytest.mark.parametrize("kind", DATASETS)
@pytest.mark.parametrize("microbatch", [2, 3])
def test_any_dataset_with_samples_by_index_is_divided(
    kind: str, microbatch: int, tmp_path: Path
) -> None:
    whole, weights = train(tmp_path / "whole", DATASETS[kind]())
    parts, others = train(tmp_path / "parts", DATASETS[kind](), train={"microbatch": microbatch})
    assert joined(parts, [len(batch) for batch in whole]) == whole
    assert max(map(len, parts)) <= microbatch
    torch.testing.assert_close(others, weights, rtol=1e-6, atol=1e-7)


class TooLarge(ByEpoch):
    """Batches with more samples than it says."""

    batch_size = 4


class DrawsAtOnce(Many):
    """Draws for all samples of a call, without iterating over the indices."""

    def __getitems__(self, indices: list[int]) -> Any:
        return [
            (float(indices[at]) + torch.rand(()).item() / 8, indices[at])
            for at in range(len(indices))
        ]


def test_a_batch_larger_than_its_batch_size_ends_the_run(tmp_path: Path) -> None:
    loader = DataLoader(NUMBERS, batch_sampler=TooLarge())
    with pytest.raises(SurefootError, match="has 6 samples, more than the 4 of 2 microbatches"):
        train(tmp_path / "run", loader, train={"microbatch": 2})


@pytest.mark.parametrize("num_workers", [0, 2])
def test_draws_for_several_samples_are_named_and_resumed(num_workers: int, tmp_path: Path) -> None:
    def make(num_workers: int = num_workers) -> Any:
        return DataLoader(DrawsAtOnce(), BATCH, shuffle=True, num_workers=num_workers)

    spec = RunSpec(train={"length": "1 steps", "microbatch": 2}, observe={"tensorboard": False})
    with Run(spec, Task(make()), folder=tmp_path / "told", quiet=True) as run:
        assert any("__getitems__ of the dataset" in each for each in run.assembly.warnings)
    how: dict[str, Any] = {"data": {"draws": "sample"}}
    _, weights = train(tmp_path / "whole", make(0), **how)
    train(tmp_path / "cut", make(), leave_at=7, **how)
    _, others = train(tmp_path / "cut", make(), **how)
    assert all(map(torch.equal, weights, others))


def test_nested_subsets_draw_by_sample(tmp_path: Path) -> None:
    def make() -> Any:
        inner = Subset(Augmented(), range(SAMPLES - 2))
        return DataLoader(Subset(Subset(inner, range(1, 15)), range(12)), BATCH, shuffle=True)

    seen = [
        [each for one in train(tmp_path / name, make(), **how)[0] for each in one]
        for name, how in (
            ("whole", {"data": {"draws": "sample"}}),
            ("parts", {"train": {"microbatch": 3}}),
            ("singles", {"train": {"microbatch": 1}}),
        )
    ]
    assert seen[0] == seen[1] == seen[2]


def test_augment_draws_by_sample(tmp_path: Path) -> None:
    class Augmenting(Task):
        def augment(self, batch: Any, keys: Any) -> Any:
            values, labels = batch
            assert len(keys.ids) == len(values)
            return values + keys.uniform(1)[:, 0] / 8, labels

    found = []
    for name, how in (
        ("whole", {"data": {"draws": "sample"}}),
        ("parts", {"train": {"microbatch": 3}}),
    ):
        task = Augmenting(DataLoader(NUMBERS, BATCH, shuffle=True))
        spec = RunSpec(
            **{"train": {"length": "2 epochs"} | how.pop("train", {}), **how},
            observe={"tensorboard": False},
        )
        with Run(spec, task, folder=tmp_path / name, quiet=True) as run:
            assert all(report.loss is not None for report in run.steps())
        found.append([each for one in task.seen for each in one])
    assert found[0] == found[1]


def test_a_step_at_the_end_of_a_shortened_epoch_has_its_own_batches(tmp_path: Path) -> None:
    def make() -> Any:
        return Iterated(DataLoader(NUMBERS, BATCH), num_batches=3)

    how: dict[str, Any] = {"train": {"batch": 2, "microbatch": 1}}
    whole, weights = train(tmp_path / "whole", make(), **how)
    parts, others = train(tmp_path / "parts", make(), layout={"virtual_ranks": 2}, **how)
    assert joined(parts, [len(batch) for batch in whole]) == whole
    torch.testing.assert_close(others, weights, rtol=1e-6, atol=1e-7)


def test_a_microbatch_that_failed_is_read_again_with_those_before_it() -> None:
    class Failing(Many):
        fails = True

        def __getitems__(self, indices: list[int]) -> Any:
            if self.fails and 5 in indices:
                raise OSError("once")
            return super().__getitems__(indices)

    dataset = Failing()
    source = Iterated(DataLoader(dataset, 6))
    dealt = DealtLoader(source, make_deal(source, 2, 1, Share(), 0))
    reading = dealt.at(0, streams_of_epoch(0, 0))
    assert [reading.read(np.array([n]))[1].tolist() for n in (0, 1)] == [[0, 1], [2, 3]]
    with pytest.raises(OSError, match="once"):
        reading.read(np.array([2]))
    dataset.fails = False
    assert [reading.read(np.array([n]))[1].tolist() for n in (2, 3)] == [[4, 5], [6, 7]]


def test_a_changed_order_stops_a_resumed_run(tmp_path: Path) -> None:
    def make(seed: int) -> Any:
        class Seeded(ByEpoch):
            def __iter__(self) -> Any:
                order = torch.randperm(
                    SAMPLES, generator=torch.Generator().manual_seed(seed)
                ).tolist()
                return iter([order[:4], order[4:10], order[10:]])

        return DataLoader(NUMBERS, batch_sampler=Seeded())

    how: dict[str, Any] = {"data": {"draws": "sample"}}
    train(tmp_path / "run", make(1), leave_at=3, **how)
    with pytest.raises(OtherDataError, match="different samples"):
        train(tmp_path / "run", make(2), **how)


class Stream(IterableDataset[Any]):
    def __len__(self) -> int:
        return SAMPLES

    def __iter__(self) -> Any:
        return iter(NUMBERS)


@pytest.mark.parametrize(
    ("loader", "tables", "words", "hint"),
    [
        (
            DataLoader(Stream(), BATCH),
            {"train": {"microbatch": 2}},
            "train.microbatch is 2, but the source gives whole batches, of unknown samples",
            "a map-style dataset",
        ),
        (
            DataLoader(NUMBERS, BATCH, in_order=False),
            {"train": {"microbatch": 2}},
            "of unknown samples",
            "leave in_order out",
        ),
        (
            DataLoader(NUMBERS, batch_size=None),
            {
                "layout": {"virtual_ranks": 2},
                "data": {"draws": "sample"},
                "train": {"microbatch": 2},
            },
            "of unknown samples",
            "give the DataLoader a batch_size",
        ),
        (
            DataLoader(NUMBERS, batch_sampler=ByEpoch()),
            {"train": {"microbatch": 2}},
            "the batch sampler of the DataLoader, a ByEpoch, has no batch_size",
            "leave train.microbatch out",
        ),
        (
            DataLoader(NUMBERS, BATCH),
            {"train": {"microbatch": 2, "batch": 4}},
            "train.batch is 4, but the source gives whole batches",
            "leave train.batch out",
        ),
        (
            DataLoader(NUMBERS, BATCH),
            {"train": {"microbatch": 2}, "data": {"draws": "batch"}},
            'data.draws is "batch", but train.microbatch is 2',
            "leave data.draws out",
        ),
    ],
    ids=["stream", "out of order", "no batch", "no size", "batch", "draws"],
)
def test_what_cannot_be_divided_is_refused(
    loader: Any, tables: dict[str, Any], words: str, hint: str, tmp_path: Path
) -> None:
    with pytest.raises(SpecError, match=words) as raised:
        train(tmp_path / "run", loader, **tables)
    assert hint in raised.value.hint


@pytest.mark.parametrize(
    ("parts", "size", "batches", "total"), [(4, None, 1, 12), (2, None, 3, 14), (6, 3, 1, 12)]
)
@pytest.mark.parametrize("num_samples", [1, 2, 5, 16])
def test_each_microbatch_is_of_one_rank(
    parts: int, size: int | None, batches: int, total: int, num_samples: int
) -> None:
    deals = [Deal(0, Share(rank, 2), parts, size, batches, total) for rank in range(2)]
    numbers = list[int]()
    for deal in deals:
        number = deal.next_own(0)
        while number < total:
            numbers.append(number)
            number = deal.next_own(number + 1)
    assert sorted(numbers) == list(range(total))
    drawn = [list(range(num_samples))] * batches
    cut = [deal.own(deal.cut(drawn)) for deal in deals]
    assert [each for part in (*cut[0], *cut[1]) for each in part] == [*range(num_samples)] * batches
    assert all(len(own) <= len(deal.own_numbers(0)) for own, deal in zip(cut, deals, strict=True))


def test_sending_seeded_ids_draws_nothing() -> None:
    random.seed(3)
    before = random.getstate()
    text = pickle.dumps(SeededIds([4, "name", (1, 2)], key=7))
    assert random.getstate() == before
    sent = pickle.loads(text)
    assert sent.plain() == [4, "name", (1, 2)]
    drawn = [random.random() for _ in sent]
    assert drawn == [random.random() for _ in sent]
    assert drawn[:1] == [random.random() for _ in SeededIds([4], key=7)]
