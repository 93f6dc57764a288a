"""A mixture gives each source its share, at every step, and resumes at any."""

from __future__ import annotations

import random
from fractions import Fraction
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import Dataset

from surefoot import Loss, Run, RunSpec
from surefoot.components.data import consumed
from surefoot.components.data.blocks import MixtureOrder, MixturePlan
from surefoot.components.data.feed import Feed, Share
from surefoot.components.data.order import find_shares, make_cycle
from surefoot.contract import events, ledger
from surefoot.core.errors import DataError, SpecError, SurefootError
from surefoot.data import Arrays, Concat, Iterated, Mixture
from surefoot.train.assemble.reading import make_feed
from surefoot.train.run import drive
from tests.world.ranks import run_ranks

SIZES = (997, 400, 50, 7, 1)
WEIGHTS = (0.4, 0.3, 0.2, 0.07, 0.03)
BATCH = 8


def sources(sizes: Any = SIZES) -> dict[str, Arrays]:
    """Each sample is (number of its source, its number)."""
    return {
        f"s{number}": Arrays(
            torch.stack([torch.full((size,), number), torch.arange(size)], 1).float()
        )
        for number, size in enumerate(sizes)
    }


def mixed(weights: Any = WEIGHTS, sizes: Any = SIZES, **how: Any) -> Mixture:
    parts = sources(sizes)
    if weights is None:
        return Mixture(parts, **how)
    return Mixture(
        {name: (part, weight) for (name, part), weight in zip(parts.items(), weights, strict=True)},
        **how,
    )


def feed_of(mixture: Mixture, batch: int = BATCH, **tables: Any) -> Feed:
    spec = RunSpec(train={"batch": batch, "length": "10 steps"}, **tables)
    return make_feed(spec, mixture, Share())


def owners_of(mixture: Mixture, steps: int, batch: int = BATCH, **tables: Any) -> np.ndarray:
    """The source of each sample of the first steps."""
    feed = feed_of(mixture, batch, **tables)
    ids = np.concatenate([feed.window(step).ids for step in range(steps)])
    return mixture.read(ids)[0][:, 0].numpy().astype(int)


def deviation(owners: np.ndarray, shares: Any) -> np.ndarray:
    """Samples of each source after each position, minus the exact ones."""
    counts = np.cumsum(owners[:, None] == np.arange(len(shares)), axis=0)
    exact = np.arange(1, len(owners) + 1)[:, None] * np.array(shares, dtype=float)
    return counts - exact / sum(shares)


def test_each_source_has_its_share_at_every_step() -> None:
    owners = owners_of(mixed(), 10_000)
    off = deviation(owners, WEIGHTS)
    assert np.abs(off).max() < 1
    assert (off.max(0) - off.min(0)).max() < 2  # in any window
    hundreds = owners[: len(owners) // 100 * 100].reshape(-1, 100)
    for number, weight in enumerate(WEIGHTS):
        assert ((hundreds == number).sum(1) == round(100 * weight)).all()


def test_weights_change_at_a_step() -> None:
    later = (0.1, 0.1, 0.1, 0.35, 0.35)
    names = [f"s{number}" for number in range(5)]
    mixture = mixed(changes={401: dict(zip(names, later, strict=True))})
    owners, at = owners_of(mixture, 1000), feed_of(mixture).samples_after(400)
    assert np.abs(deviation(owners[:at], WEIGHTS)).max() < 1
    assert np.abs(deviation(owners[at:], later)).max() < 1
    assert owners[:at].tolist() == owners_of(mixed(), 400).tolist()


def test_no_share_is_off_by_a_sample_whatever_the_weights() -> None:
    drawn = random.Random(0)
    for _ in range(60):
        weights = [
            drawn.choice([drawn.random(), drawn.randint(1, 9), 10 ** drawn.uniform(-3, 0)])
            for _ in range(drawn.randint(1, 12))
        ]
        shares = find_shares(weights)
        if sum(shares) > 20_000:
            continue
        cycle = make_cycle(shares)
        assert np.abs(deviation(cycle.owners, shares)).max() < 1
        assert np.bincount(cycle.owners, minlength=len(shares)).tolist() == list(shares)


def test_shares_are_those_of_the_weights() -> None:
    assert find_shares([0.7, 0.3]) == (7, 3)
    assert find_shares([1 / 3, 2 / 3]) == (1, 2)
    assert find_shares([10, 30, 60]) == (1, 3, 6)
    assert find_shares([1e-9, 1.0]) == (1, 99_999)
    rounded = find_shares([0.123456789, 1 - 0.123456789, 2**0.5])
    exact = Fraction(0.123456789) / Fraction(1 + 2**0.5)
    assert abs(rounded[0] / sum(rounded) - float(exact)) < 1e-5


def test_a_source_that_ends_is_read_again_in_another_order() -> None:
    feed = feed_of(mixture := mixed())
    rows = mixture.read(np.concatenate([feed.window(step).ids for step in range(400)]))[0].long()
    for number, size in enumerate(SIZES):
        mine = rows[rows[:, 0] == number, 1].tolist()
        passes = [mine[at : at + size] for at in range(0, len(mine), size)]
        assert all(sorted(each) == [*range(size)] for each in passes[:-1])
        assert len(set(passes[-1])) == len(passes[-1])
        if size > 7:
            assert len({tuple(each) for each in passes if len(each) == size}) == len(mine) // size


def test_samples_have_other_numbers_in_each_pass() -> None:
    """So that what `augment` draws differs, although the epoch is the same."""
    feed = feed_of(mixed())
    ids = np.concatenate([feed.window(step).ids for step in range(len(mixed()) // BATCH)])
    assert len(set(ids.tolist())) == len(ids)


def test_once_reads_each_sample_once_and_keeps_the_ratio_of_those_left() -> None:
    mixture = mixed(ends="once")
    owners = owners_of(mixture, -(-len(mixture) // BATCH))
    assert np.bincount(owners).tolist() == list(SIZES)
    ends = [int(np.flatnonzero(owners == number)[-1]) + 1 for number in range(5)]
    first = min(ends)
    assert np.abs(deviation(owners[:first], WEIGHTS)).max() < 1
    feed = feed_of(mixture)
    for epoch in (0, 1):
        steps = range(epoch * feed.steps_per_epoch, (epoch + 1) * feed.steps_per_epoch)
        ids = np.concatenate([feed.window(step).ids for step in steps])
        assert sorted(ids.tolist()) == [*range(len(mixture))]


def test_first_ends_the_epoch_before_a_source_begins_again() -> None:
    mixture = mixed((2, 1), (9, 100), ends="first")
    feed = feed_of(mixture)
    assert feed.order.n == 14  # the tenth sample of the first source would be the 15th
    ids = np.concatenate([feed.window(step).ids for step in range(feed.steps_per_epoch)])
    assert len(set(ids.tolist())) == len(ids) == 14
    assert (mixture.read(ids)[0][:, 0] == 0).sum() == 9
    after = np.concatenate([feed.window(feed.steps_per_epoch + step).ids for step in range(2)])
    assert ids.tolist() != after.tolist()


@pytest.mark.parametrize("ends", ["repeat", "first", "once"])
def test_shuffled_turns_keep_the_shares_of_a_cycle(ends: Any) -> None:
    sizes = (3100, 2500, 1400)
    mixture = mixed((5, 3, 2), sizes, ends=ends, draws=True)
    feed = feed_of(mixture)
    ids = np.concatenate([feed.window(step).ids for step in range(feed.steps_per_epoch)])
    owners = mixture.read(ids)[0][:, 0].numpy().astype(int)
    assert len(set(ids.tolist())) == len(ids)
    if ends == "once":
        assert np.bincount(owners).tolist() == list(sizes)
    whole = owners[:5000].reshape(-1, 1000)
    assert [np.bincount(each).tolist() for each in whole] == [[500, 300, 200]] * 5
    assert len({tuple(each) for each in whole}) == 5
    assert owners.tolist() != owners_of(mixed((5, 3, 2), sizes, ends=ends), 200).tolist()


def test_any_part_of_an_epoch_is_the_same_as_in_order() -> None:
    later = ((37, (1, 1, 1, 1, 1)), (500, (9, 1, 1, 1, 1)))
    for plan in (
        MixturePlan(SIZES, find_shares(WEIGHTS), changes=later),
        MixturePlan(SIZES, find_shares(WEIGHTS), "once", draws=True),
    ):
        order = MixtureOrder(sum(SIZES), 3, plan)
        whole = [order.ids(epoch, 0, order.n) for epoch in range(3)]
        for start, stop in ((0, 1), (30, 60), (499, 502), (1000, order.n)):
            for epoch in (2, 0, 1):
                assert order.ids(epoch, start, stop).tolist() == whole[epoch][start:stop].tolist()
        assert MixturePlan.from_text(plan.as_text()) == plan


@pytest.mark.parametrize("text", ["", "repeat", "repeat 1,2", "often 1,2 1,1", "repeat 1,x 1,1"])
def test_damaged_text_of_a_mixture_is_no_plan(text: str) -> None:
    with pytest.raises(DataError, match="is no mixture"):
        MixturePlan.from_text(text)


def test_temperature_and_sizes_are_weights() -> None:
    assert mixed(None, (900, 100)).plan.shares == (9, 1)
    assert mixed(None, (900, 100), temperature=2.0).plan.shares == (3, 1)
    assert mixed((0.9, 0.1), (5, 5), temperature=2.0).plan.shares == (3, 1)


@pytest.mark.parametrize("wrong", [0, -1.0, float("nan"), float("inf")])
def test_a_weight_is_a_number_above_0(wrong: float) -> None:
    with pytest.raises(DataError, match="the weight of 's1' is"):
        mixed((1.0, wrong), (5, 5))
    with pytest.raises(DataError, match="the weight of 's0' is"):
        mixed((1, 2), (5, 5), changes={4: {"s0": wrong, "s1": 1}})


@pytest.mark.parametrize(
    ("how", "what"),
    [
        ({"ends": "never"}, "ends is 'never'"),
        ({"temperature": 0}, "temperature is 0"),
        ({"temperature": float("nan")}, "temperature is nan"),
        ({"changes": {1: {"s0": 1, "s1": 1}}}, "change at step 1"),
        ({"changes": {2.5: {"s0": 1, "s1": 1}}}, "change at step 2.5"),
        ({"changes": {5: {"s0": 1}}}, "from step 5 on are those of s0"),
        ({"changes": {5: {"s0": 1, "s1": 1}}, "ends": "once"}, "ends is 'once'"),
    ],
)
def test_settings_that_are_not_possible_are_named(how: Any, what: str) -> None:
    with pytest.raises(DataError, match=what):
        mixed((1, 2), (5, 5), **how)


def test_sources_that_cannot_be_mixed_are_refused() -> None:
    rows = torch.ones(4, 2)
    with pytest.raises(DataError, match="no source"):
        Mixture({})
    with pytest.raises(DataError, match="'b' has none"):
        Mixture({"a": (rows, 0.5), "b": rows})
    with pytest.raises(DataError, match="cannot join"):
        Mixture({"a": Iterated([rows])})
    with pytest.raises(DataError, match="differ"):
        Mixture({"a": rows, "b": rows.double()}).read(np.array([0, 5]))
    with pytest.raises(SpecError, match=r"data\.window is 2"):
        feed_of(mixed(), data={"window": 2})
    assert len(Mixture({"a": (rows, torch.ones(4)), "b": (rows, torch.ones(4))})) == 8


# ---- runs


class Numbers(Dataset[Any]):
    """Samples of one length each, with a number that the dataset draws."""

    def __init__(self, start: int, count: int) -> None:
        self.start, self.count = start, count

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int) -> Any:
        number = self.start + index
        return torch.full((1 + index % 3,), float(number)), torch.rand(1)


class Many(Numbers):
    def __getitems__(self, indices: list[int]) -> list[Any]:
        return [self[index] for index in indices]


def pad(samples: list[Any]) -> tuple[Tensor, Tensor]:
    rows = [each for each, _ in samples]
    padded = nn.utils.rnn.pad_sequence(rows, batch_first=True)
    return padded.sum(1, keepdim=True) / 100, torch.stack([drawn for _, drawn in samples])


class Fit:
    def __init__(self, kind: str = "arrays", **how: Any) -> None:
        self.kind, self.how = kind, how
        self.seen: list[Any] = []

    def model(self) -> nn.Module:
        return nn.Linear(1, 1)

    def data(self, split: str) -> Any:
        if self.kind == "datasets":
            return Mixture({"a": (Numbers(0, 40), 0.7), "b": (Many(1000, 6), 0.3)}, **self.how)
        rows = [torch.randn(size, 1, generator=torch.manual_seed(size)) for size in (40, 6)]
        return Mixture(
            {"a": ({"x": rows[0]}, 0.7), "b": ({"x": rows[1]}, 0.3)},
            **self.how,
        )

    def forward(self, model: nn.Module, batch: Any) -> Tensor:
        x = batch["x"] if self.kind == "arrays" else batch[0] + batch[1]
        if model.training:
            self.seen.append(x.flatten().tolist())
        output: Tensor = model(x)
        return output

    def loss(self, output: Tensor, batch: Any) -> Loss:
        return Loss.sum((output - 1).square().sum(), count=len(output))


class Collated(Fit):
    def collate(self, samples: list[Any]) -> Any:
        return pad(samples)


def spec_of(**tables: Any) -> RunSpec:
    return RunSpec(
        **{
            "train": {"length": "30 steps", "batch": 4, "threads": 1, **tables.pop("train", {})},
            "optim": {"name": "sgd", "lr": 0.01},
            "checkpoint": {"every": "1 steps", "background": False},
            "observe": {"tensorboard": False, "every": "10 steps"},
            **tables,
        }
    )


def train(folder: Path, task: Fit, leave_at: int | None = None, **tables: Any) -> Any:
    with Run(spec_of(**tables), task, folder=folder, quiet=True) as run:
        task.seen.clear()
        if leave_at is None:
            drive(run)
        else:
            next(report for report in run.steps() if report.step == leave_at)
            run.save()
        return [each.tolist() for each in run.model.parameters()]


def task_of(kind: str, **how: Any) -> Fit:
    return Collated(kind, **how) if kind == "datasets" else Fit(kind, **how)


CHANGES = {11: {"a": 1, "b": 1}}


@pytest.mark.parametrize("kind", ["arrays", "datasets"])
@pytest.mark.parametrize("workers", [0, 2])
def test_a_run_resumes_at_any_step(kind: str, workers: int, tmp_path: Path) -> None:
    loader = {"loader": {"workers": workers}}
    golden = train(tmp_path / "whole", task_of(kind, changes=CHANGES))
    for leave_at in (3, 10, 11, 17, None):
        found = train(tmp_path / "parts", task_of(kind, changes=CHANGES), leave_at, **loader)
    assert found == golden
    for run in ("whole", "parts"):
        assert consumed.check(tmp_path / run).holds


@pytest.mark.parametrize("kind", ["arrays", "datasets"])
def test_ranks_and_microbatches_train_the_same(kind: str, tmp_path: Path) -> None:
    golden = train(tmp_path / "one", task_of(kind))

    def job(rank: int) -> Any:
        return train(tmp_path / "two", task_of(kind))

    found = [*run_ranks(2, job, tmp_path / "ranks")]
    found.append(train(tmp_path / "cut", task_of(kind), train={"microbatch": 2}))
    for each in found:
        torch.testing.assert_close(
            torch.tensor(each[0]), torch.tensor(golden[0]), rtol=1e-6, atol=1e-7
        )
    assert consumed.check(tmp_path / "two").holds


def test_events_tell_samples_share_and_epochs_of_each_source(tmp_path: Path) -> None:
    train(tmp_path / "run", Fit(changes=CHANGES))
    steps = [each for each in events.read(tmp_path / "run") if isinstance(each, events.Step)]
    assert steps[-1].step == 30
    told = steps[-1].sources
    assert {name: each["samples"] for name, each in told.items()} == {"a": 66, "b": 50}
    assert told["a"]["share"] == pytest.approx(66 / 116)
    assert told["b"]["epochs"] == pytest.approx(50 / 6)
    tenth = next(each for each in steps if each.step == 10).sources
    assert {name: each["samples"] for name, each in tenth.items()} == {"a": 28, "b": 12}


def test_a_dataset_draws_anew_in_each_pass(tmp_path: Path) -> None:
    task = task_of("datasets")
    train(tmp_path / "run", task)
    drawn = [value for batch in task.seen for value in batch]
    assert len(set(drawn)) == len(drawn)  # samples of b come many times, each with another number


def test_the_ledger_finds_each_use_of_a_sample(tmp_path: Path) -> None:
    train(tmp_path / "run", Fit())
    uses = consumed.find_sample(tmp_path / "run", 41)  # the second one of b
    assert len(uses) == 6  # 36 samples of the 6 in b
    assert consumed.find_sample(tmp_path / "run", 45)
    with pytest.raises(Exception, match="no sample 46"):
        consumed.find_sample(tmp_path / "run", 46)


class Thirty(Fit):
    def data(self, split: str) -> Any:
        parts = {f"language {n}": ({"x": torch.randn(1000 + n, 1)}, 1.0 + n) for n in range(30)}
        return Mixture(parts, changes={5: dict.fromkeys(parts, 1.0)})


def test_a_mixture_of_many_sources_has_a_longer_ledger_header(tmp_path: Path) -> None:
    train(tmp_path / "run", Thirty(), 7)
    assert ledger.count_header_bytes(tmp_path / "run") == 512
    train(tmp_path / "run", Thirty())
    found = consumed.check(tmp_path / "run")
    assert found.holds
    assert found.last == 30
    assert found.num_samples == 120


def test_other_weights_are_other_data(tmp_path: Path) -> None:
    train(tmp_path / "run", Fit(), 4)
    for how in ({"temperature": 2.0}, {"ends": "once"}, {"changes": CHANGES}, {"draws": True}):
        with pytest.raises(SurefootError, match="data"):
            train(tmp_path / "run", Fit(**how))
    assert consumed.check(tmp_path / "run").last == 4


def test_a_short_last_batch_is_left_out_by_a_longer_epoch() -> None:
    feed = feed_of(mixed(), 64, data={"last_batch": "drop"})
    assert feed.order.n % 64 == 0
    assert feed.dropped == 0
    owners = owners_of(mixed(), 200, 64, data={"last_batch": "drop"})
    assert np.abs(deviation(owners, WEIGHTS)).max() < 1


def test_an_evaluation_reads_each_sample_once() -> None:
    mixture = mixed((1, 5), (9, 4))
    assert len(mixture) == 13
    assert mixture.read(np.arange(13))[0][:, 1].tolist() == [*range(9), *range(4)]
    assert isinstance(mixture._source, Concat)
