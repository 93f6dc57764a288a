"""A digest of a batch differs where the batch does, and is the same where it is the same.

It exists for whatever a loader gives.
"""

from __future__ import annotations

import copy
import dataclasses
import datetime
import enum
from collections import deque
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from surefoot.components.data.sources.batch_digest import PassDigest, digest_of
from surefoot.components.data.sources.watched import as_ids


class Kind(enum.Enum):
    CAT = 1
    DOG = 2


class Slots:
    __slots__ = ("value",)

    def __init__(self, value: Any) -> None:
        self.value = value


@dataclasses.dataclass
class Graph:
    x: torch.Tensor
    y: int


def jagged(*lengths: int) -> torch.Tensor:
    return torch.nested.nested_tensor(
        [torch.ones(length) for length in lengths], layout=torch.jagged
    )


APART: dict[str, Callable[[], tuple[Any, Any]]] = {
    "numbers side by side": lambda: ([1, 11], [11, 1]),
    "nesting": lambda: ([[1], [2, 3]], [[1, 2], [3]]),
    "one element": lambda: (
        torch.arange(8.0),
        torch.arange(8.0).index_fill(0, torch.tensor([3]), 9.0),
    ),
    "a dtype": lambda: (torch.zeros(4), torch.zeros(4, dtype=torch.int32)),
    "a shape": lambda: (torch.zeros(4, 1), torch.zeros(1, 4)),
    "bfloat16": lambda: (
        torch.ones(3, dtype=torch.bfloat16),
        torch.full((3,), 2, dtype=torch.bfloat16),
    ),
    "a conjugated tensor": lambda: (
        torch.tensor([1 + 2j], dtype=torch.complex128).conj(),
        torch.tensor([1 + 3j], dtype=torch.complex128).conj(),
    ),
    "a number of NumPy": lambda: (np.float32(1), np.float32(2)),
    "a complex number": lambda: (1j, 2j),
    "a text": lambda: ({"a": "b"}, {"a": "c"}),
    "a key": lambda: ({"a": 1}, {"b": 1}),
    "a set": lambda: ({1, 2}, {1, 3}),
    "a date": lambda: (datetime.date(2020, 1, 1), datetime.date(2020, 1, 2)),
    "a path": lambda: (Path("a"), Path("b")),
    "a bytearray": lambda: (bytearray(b"a"), bytearray(b"b")),
    "a deque": lambda: (deque([1, 2]), deque([2, 1])),
    "slots": lambda: (Slots(1), Slots(torch.ones(2))),
    "a dataclass": lambda: (Graph(torch.ones(2), 1), Graph(torch.zeros(2), 1)),
    "a member of an Enum": lambda: (Kind.CAT, Kind.DOG),
    "an array of objects": lambda: (
        np.array(["a", 1], dtype=object),
        np.array(["a", 2], dtype=object),
    ),
    "an array of texts": lambda: (np.array(["ab"]), np.array(["ac"])),
    "a sparse tensor": lambda: (torch.eye(3).to_sparse(), (2 * torch.eye(3)).to_sparse()),
    "a compressed sparse tensor": lambda: (
        torch.eye(3).to_sparse_csr(),
        (2 * torch.eye(3)).to_sparse_csr(),
    ),
    "a nested tensor": lambda: (jagged(1, 3), jagged(2, 2)),
    "very many parts": lambda: (
        [torch.tensor([number]) for number in range(6000)],
        [torch.tensor([number + 1]) for number in range(6000)],
    ),
    "a scalar tensor": lambda: (torch.tensor(1.0), torch.tensor(2.0)),
    "nothing": lambda: (None, []),
}


@pytest.mark.filterwarnings("ignore:.*(Sparse CSR|nested tensors)")
@pytest.mark.parametrize("name", APART)
def test_a_digest_tells_batches_apart(name: str) -> None:
    one, other = APART[name]()
    assert digest_of(one) != digest_of(other)
    assert digest_of(one) == digest_of(one)
    if name not in ("a nested tensor", "a compressed sparse tensor"):  # which cannot be copied
        assert digest_of(copy.deepcopy(one)) == digest_of(one)


def test_a_path_has_one_digest_whatever_was_asked_of_it() -> None:
    used = Path("a") / "b"
    assert len({used, used.parent}) == 2
    assert (str(used), used.parts) == ("a/b", ("a", "b"))
    assert digest_of([used]) == digest_of([Path("a/b")])


def test_an_empty_and_a_huge_batch_have_a_digest() -> None:
    for batch in (
        torch.zeros(0),
        [],
        {},
        np.zeros((0, 3)),
        torch.zeros(3, 0),
        torch.zeros(1 << 20),
        "x" * 100_000,
    ):
        assert len(digest_of(batch)) == 16


@pytest.mark.parametrize(
    ("samples", "ids"),
    [
        ([1, np.int64(2), torch.tensor(3)], (1, 2, 3)),
        ([1.5, 2.0], ()),
        ([-1], ()),
        ([1 << 32], ()),
        (["a"], ()),
        ([np.array([1, 2])], ()),
        ([torch.tensor([1, 2])], ()),
        ([(1, 2)], ()),
        ([True], (1,)),
    ],
)
def test_samples_are_known_by_whole_numbers_alone(samples: list[Any], ids: tuple[int, ...]) -> None:
    assert as_ids(samples) == ids


def test_a_second_reading_is_told_from_the_first() -> None:
    def seen(rows: list[tuple[list[int], float]]) -> PassDigest:
        made = PassDigest()
        for samples, value in rows:
            made.add(torch.tensor([value]), samples)
        return PassDigest.from_state(made.as_state())

    before = seen([([1, 2], 1.0), ([3], 2.0)])
    assert seen([([1, 2], 1.0), ([3], 2.0)]).compare(before, knows_samples=True) is None
    other = seen([([2, 1], 1.0), ([3], 2.0)]).compare(before, knows_samples=True)
    assert other is not None
    assert not other.same_samples
    values = seen([([1, 2], 1.0), ([3], 2.5)]).compare(before, knows_samples=True)
    assert values is not None
    assert values.same_samples
    assert (
        seen([([1, 2], 1.0), ([3], 2.5)]).compare(before, knows_samples=True, values=False) is None
    )
