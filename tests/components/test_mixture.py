"""A mixture gives each source its share, at every step, and resumes at any."""

from __future__ import annotations

import random
from dataclasses import dataclass
from fractions import Fraction
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import Dataset

from surefoot import RunSpec
from surefoot.components.data.blocks import MixtureOrder, MixturePlan
from surefoot.components.data.feed import Feed, Share
from surefoot.components.data.order import find_shares, make_cycle
from surefoot.core.errors import DataError, SpecError
from surefoot.data import Arrays, Concat, Iterated, Mixture, TorchDataset
from surefoot.train.assemble.reading import make_feed

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
    assert find_shares([6e-6, 1e-5]) == (3, 5)
    assert find_shares([1 / 166_000, 1 / 100_000]) == (50, 83)
    assert find_shares([0, 2, 6]) == (0, 1, 3)
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
    for step in (0, 1, 77, feed.steps_per_epoch, feed.steps_per_epoch + 3):
        told = mixture.count(feed, step)
        ids = [feed.window(number).ids for number in range(step)]
        read = mixture.read(np.concatenate([np.empty(0, np.int64), *ids]))[0][:, 0]
        assert [each["samples"] for each in told.values()] == [
            int((read == number).sum()) for number in range(3)
        ]
    assert owners.tolist() != owners_of(mixed((5, 3, 2), sizes, ends=ends), 200).tolist()


@pytest.mark.parametrize("ends", ["repeat", "first", "once"])
@pytest.mark.parametrize("last_batch", ["keep", "drop"])
@pytest.mark.parametrize("sizes", [(500, 500), (600, 470, 30)])
def test_what_is_told_is_what_was_read(ends: Any, last_batch: str, sizes: Any) -> None:
    mixture = mixed([1] * len(sizes), sizes, ends=ends, draws=True)
    feed = feed_of(mixture, 40, data={"last_batch": last_batch})
    read = np.zeros(len(sizes), dtype=int)
    for step in range(3 * feed.steps_per_epoch):
        told = [each["samples"] for each in mixture.count(feed, step).values()]
        assert told == read.tolist()
        owners = mixture.read(feed.window(step).ids)[0][:, 0].long()
        read += np.bincount(owners, minlength=len(sizes))


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


DAMAGED = (
    "",
    "repeat",
    "repeat 1,2",
    "often 1,2 1,1",
    "repeat 1,x 1,1",
    "repeat 40,6 0,0",
    "repeat 4026 7,3",
    "repeat 40,6 7,-3",
    "repeat 0,6 7,3",
    "repeat 40,6 7,3 9:1,1 5:1,1",
    "repeat 40,6 7,3 9:1",
)


@pytest.mark.parametrize("text", DAMAGED)
def test_damaged_text_of_a_mixture_is_no_plan(text: str) -> None:
    with pytest.raises(DataError, match="is no mixture"):
        MixturePlan.from_text(text)


def test_temperature_and_sizes_are_weights() -> None:
    assert mixed(None, (900, 100)).plan.shares == (9, 1)
    assert mixed(None, (900, 100), temperature=2.0).plan.shares == (3, 1)
    assert mixed((0.9, 0.1), (5, 5), temperature=2.0).plan.shares == (3, 1)


@pytest.mark.parametrize("wrong", [-1.0, float("nan"), float("inf")])
def test_a_weight_is_a_number_above_0(wrong: float) -> None:
    with pytest.raises(DataError, match="the weight of 's1' is"):
        mixed((1.0, wrong), (5, 5))
    with pytest.raises(DataError, match="the weight of 's0' is"):
        mixed((1, 2), (5, 5), changes={4: {"s0": wrong, "s1": 1}})
    with pytest.raises(DataError, match="the weight of 's1' is 0"):
        mixed((1, 0), (5, 5))
    with pytest.raises(DataError, match="all weights are 0"):
        mixed((1, 1), (5, 5), changes={4: {"s0": 0, "s1": 0}})


@pytest.mark.parametrize("wrong", ["0.7", None, True, torch.tensor(0.7), np.array(0.7)])
def test_a_weight_of_another_kind_is_named(wrong: Any) -> None:
    with pytest.raises(DataError, match="the weight of 'a' is"):
        Mixture({"a": (torch.ones(3, 1), wrong)})
    with pytest.raises(DataError, match="the weight of 'a' is"):
        Mixture({"a": (0.7, torch.ones(3, 1))})


@dataclass
class Padding:
    """A collate function that has no hash, as those of transformers."""

    value: float = 0.0

    def __call__(self, samples: list[Any]) -> tuple[Tensor, Tensor]:
        return pad(samples)


def test_a_collate_function_may_be_any_object() -> None:
    collate = Padding()
    given = {"a": Numbers(0, 3), "b": Many(9, 3)}
    wrapped = {name: TorchDataset(each, collate) for name, each in given.items()}
    for mixture in (Mixture(given, collate=collate), Mixture(wrapped)):
        assert mixture.read(np.array([1, 5, 0]))[0].shape == (3, 1)


def test_a_source_can_begin_or_end_in_the_middle_of_a_run() -> None:
    mixture = mixed((1, 0), (50, 50), changes={11: {"s0": 0, "s1": np.float32(2)}})
    owners = owners_of(mixture, 20, 4)
    assert owners.tolist() == [0] * 40 + [1] * 40


def test_shuffled_turns_read_each_source_through() -> None:
    feed = feed_of(mixture := mixed((0.7, 0.3), (70, 30), draws=True))
    rows = mixture.read(np.concatenate([feed.window(step).ids for step in range(300)]))[0].long()
    for number, size in enumerate((70, 30)):
        mine = rows[rows[:, 0] == number, 1].tolist()
        for at in range(0, len(mine) - size, size):
            assert sorted(mine[at : at + size]) == [*range(size)]


def test_a_negative_number_is_no_sample() -> None:
    with pytest.raises(DataError, match="sample -1 was requested"):
        mixed().read(np.array([0, -1]))


def test_long_cycles_are_shuffled_by_the_thousand() -> None:
    mixture = mixed(None, (4999, 899), draws=True)
    owners = owners_of(mixture, 20, 250)
    plain = owners_of(mixed(None, (4999, 899)), 20, 250)
    assert owners.tolist() != plain.tolist()
    for end in range(1000, 5001, 1000):
        assert np.bincount(owners[:end]).tolist() == np.bincount(plain[:end]).tolist()


@pytest.mark.parametrize(
    ("how", "what"),
    [
        ({"ends": "never"}, "ends is 'never'"),
        ({"temperature": 0}, "temperature is 0"),
        ({"temperature": float("nan")}, "temperature is nan"),
        ({"changes": {1: {"s0": 1, "s1": 1}}}, "change at step 1"),
        ({"changes": {2.5: {"s0": 1, "s1": 1}}}, "change at step 2.5"),
        ({"changes": {5: {"s0": 1}}}, "from step 5 on are {'s0': 1}"),
        ({"changes": {5: (1, 2)}}, "from step 5 on are"),
        ({"temperature": "2"}, "temperature is '2'"),
        ({"draws": "yes"}, "draws is 'yes'"),
        ({"changes": {5: {"s0": 1, "s1": 1}}, "ends": "once"}, "ends is 'once'"),
        ({"changes": {"5": {"s0": 1, "s1": 1}}}, "change at step '5'"),
    ],
)
def test_settings_that_are_not_possible_are_named(how: Any, what: str) -> None:
    with pytest.raises(DataError, match=what):
        mixed((1, 2), (5, 5), **how)


def test_sources_that_cannot_be_mixed_are_refused() -> None:
    rows = torch.ones(4, 2)
    for nothing in ({}, [rows], None):
        with pytest.raises(DataError, match="no sources by name"):
            Mixture(nothing)  # type: ignore[arg-type]
    with pytest.raises(DataError, match="'b' has none"):
        Mixture({"a": (rows, 0.5), "b": rows})
    with pytest.raises(DataError, match="source 'b' cannot be part of a mixture: 1 batches"):
        Mixture({"a": Numbers(0, 3), "b": Iterated([rows])})
    with pytest.raises(DataError, match="source 'a' cannot be part of a mixture: a mixture"):
        Mixture({"a": Mixture({"b": rows}), "c": rows})
    with pytest.raises(DataError, match="cannot be one of several"):
        Concat([Mixture({"b": rows}), rows])
    with pytest.raises(DataError, match="source 'b': data"):
        Mixture({"a": rows, "b": None})
    with pytest.raises(DataError, match="before it reads one of 's0'"):
        mixed((0.001, 0.999), (50, 5), ends="first")
    with pytest.raises(DataError, match="some sources of the mixture are datasets"):
        Mixture({"a": Numbers(0, 3), "b": rows})
    with pytest.raises(DataError, match="different collate functions"):
        Mixture({"a": TorchDataset(Numbers(0, 3), pad), "b": TorchDataset(Numbers(0, 3))})
    with pytest.raises(DataError, match="a source has no share"):
        mixed((1, 1e-300), (5, 5), temperature=0.01)
    assert mixed((50_000, 10), (5, 5), temperature=0.5).plan.shares[1] == 1
    given = Mixture({"a": TorchDataset(Numbers(0, 3), pad), "b": TorchDataset(Many(9, 3), pad)})
    assert given.read(np.array([0, 4]))[0].shape == (2, 1)
    with pytest.raises(DataError, match=r"source 'a' and source 'c': .* differ"):
        Mixture({"a": rows, "b": rows, "c": rows.double()})
    with pytest.raises(SpecError, match=r"data\.window is 2"):
        feed_of(mixed(), data={"window": 2})
    assert len(Mixture({"a": (rows, torch.ones(4)), "b": (rows, torch.ones(4))})) == 8


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
