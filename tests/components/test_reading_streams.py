"""What a dataset draws while it is read is its own.

The user's global stream of numpy goes on as if nothing had been read.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from numpy.random import mtrand

from surefoot.components.data.loader import streams


@pytest.fixture(autouse=True)
def _same_stream() -> Iterator[None]:
    generator, state = mtrand.get_bit_generator(), mtrand.get_state(legacy=False)
    yield
    mtrand.set_bit_generator(generator)
    mtrand.set_state(state)


def draw(seed: int, *, reads: bool) -> list[float]:
    """What a user draws between batches whose reading draws as well, in an order set by `seed`."""
    choice, found, kept = random.Random(seed), [], mtrand.get_state()
    for _ in range(400):
        kind, count, key = choice.randrange(8), choice.randrange(5), choice.getrandbits(60)
        if kind < 3 and reads:
            with streams.streams_of(key):
                mtrand.randn(count)
        elif kind == 3:
            found.extend(mtrand.randn(count))
        elif kind == 4:
            found.append(mtrand.rand())
        elif kind == 5:
            found.append(mtrand.standard_normal())
        elif kind == 6:
            kept = mtrand.get_state()  # with or without the second of a pair
        elif kind == 7 and count == 0:
            mtrand.set_state(kept)
    return found


@pytest.mark.parametrize("seed", range(6))
def test_the_user_draws_the_same_whether_batches_are_read_between(seed: int) -> None:
    found = []
    for reads in (False, True):
        mtrand.seed(seed)
        found.append(draw(seed, reads=reads))
    assert found[0] == found[1]


@pytest.mark.parametrize(
    "generator", [np.random.PCG64, np.random.SFC64], ids=lambda kind: kind.__name__
)
def test_another_generator_of_the_user_goes_on_as_well(generator: Any) -> None:
    found = []
    for reads in (False, True):
        mtrand.set_bit_generator(generator(7))
        drawn: list[float] = []
        for number in range(50):
            if reads:
                with streams.streams_of(number):
                    mtrand.randn(number % 3)
            drawn.extend(mtrand.randn(number % 4))
        found.append(drawn)
    assert found[0] == found[1]


def test_a_batch_draws_the_same_whatever_the_user_has_drawn() -> None:
    found = []
    for count in (0, 1, 2, 3):
        mtrand.randn(count)
        with streams.streams_of(11):
            found.append(mtrand.randn(3).tolist())
    assert found[0] == found[1] == found[2] == found[3]


def test_reads_within_reads_keep_each_other_s_streams() -> None:
    with streams.streams_of(1):
        alone = mtrand.randn(3).tolist()
    with streams.streams_of(1):
        found = [mtrand.standard_normal()]
        with streams.streams_of(2):
            mtrand.randn(1)
        found += mtrand.randn(2).tolist()
    assert found == alone


def test_where_the_words_of_the_state_lie_elsewhere_numpy_is_asked(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(streams, "_words_of", lambda generator: None)
    mtrand.seed(5)
    wanted = draw(5, reads=False)
    mtrand.seed(5)
    assert draw(5, reads=True) == wanted
