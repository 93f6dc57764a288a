"""Tests of a batch that grows with the samples seen.

Every sample once an epoch, and every question answered from the step alone.
"""

from __future__ import annotations

from typing import Any, cast

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from surefoot.components.data.blocks import Order
from surefoot.components.data.feed import Feed


def feed(n: int, ramp: tuple[tuple[int, int], ...]) -> Feed:
    return Feed(cast(Any, None), Order(n, seed=3), batch=ramp[-1][1], ramp=ramp)


RAMPS = st.lists(
    st.tuples(st.integers(1, 120), st.integers(1, 40)), min_size=0, max_size=4
).flatmap(
    lambda more: st.integers(1, 40).map(
        lambda first: tuple(
            (sum(gap for gap, _ in more[:i]), size)
            for i, size in enumerate([first, *(s for _, s in more)])
        )
    )
)


def walk(n: int, ramp: tuple[tuple[int, int], ...], steps: int) -> list[tuple[int, int, int]]:
    """Epoch, start and size of each step, counted one after another."""
    rows, seen = [], 0
    for _ in range(steps):
        epoch, start = divmod(seen, n)
        batch = next(size for samples, size in reversed(ramp) if samples <= seen)
        rows.append((epoch, start, min(batch, n - start)))
        seen += rows[-1][2]
    return rows


@given(n=st.integers(1, 60), ramp=RAMPS)
def test_every_step_of_a_ramp_is_where_a_walk_of_it_comes_to(
    n: int, ramp: tuple[tuple[int, int], ...]
) -> None:
    ramped = feed(n, ramp)
    rows = walk(n, ramp, 40)
    seen = 0
    for step, (epoch, start, size) in enumerate(rows):
        window = ramped.window(step)
        assert (window.epoch, window.start, len(window.ids)) == (epoch, start, size)
        assert ramped.samples_after(step) == seen
        assert ramped.epoch_of(step) == pytest.approx(seen / n)
        assert ramped.step_of(epoch, start) == ramped.step_of(epoch, start + size - 1) == step
        assert ramped.steps_for(seen + 1) == ramped.steps_for(seen + size) == step + 1
        seen += size


def test_every_sample_comes_once_an_epoch_while_the_batch_grows() -> None:
    ramped = feed(50, ((0, 4), (30, 8), (110, 32)))
    assert [len(ramped.window(step).ids) for step in range(22)] == [4] * 8 + [8, 8, 2] + [8] * 6 + [
        2
    ] + [8, 8, 32, 2]
    for epoch in range(3):
        ids = [ramped.window(step).ids for step in range(30) if ramped.window(step).epoch == epoch]
        assert sorted(np.concatenate(ids).tolist()) == list(range(50))


def test_a_ramp_of_one_batch_is_no_ramp() -> None:
    plain, ramped = Feed(cast(Any, None), Order(50, seed=3), batch=8), feed(50, ((0, 8),))
    assert plain.steps_per_epoch == 7
    assert ramped.steps_per_epoch is None
    for step in range(20):
        assert np.array_equal(plain.window(step).ids, ramped.window(step).ids)
    assert [plain.steps_for(samples) for samples in range(120)] == [
        ramped.steps_for(samples) for samples in range(120)
    ]
