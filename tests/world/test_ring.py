"""The all-reduce by hand of examples/ring_all_reduce.py.

The sums of the built-in one, for the bytes that the lesson says.
"""

from __future__ import annotations

import importlib.util
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
import torch.distributed as dist

from surefoot.runtime.comm.group import Group
from tests.world.ranks import together

FILE = Path(__file__).resolve().parents[2] / "examples" / "ring_all_reduce.py"
# among them fewer numbers than ranks, and sizes that no number of ranks divides
SIZES = (1, 2, 3, 4, 5, 7, 12, 1000, 1001)


def load() -> ModuleType:
    spec = importlib.util.spec_from_file_location("example_ring_all_reduce", FILE)
    assert spec is not None
    assert spec.loader is not None
    made = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(made)
    return made


@pytest.mark.parametrize("num_ranks", [2, 3, 4])
def test_the_ring_gives_the_sums_of_the_built_in_for_the_bytes_it_says(
    num_ranks: int, tmp_path: Path
) -> None:
    ring = load()

    def job(group: Group) -> Any:
        rows = []
        for size in SIZES:
            mine = torch.randn(
                size, dtype=torch.float64, generator=torch.Generator().manual_seed(group.rank)
            )
            # whole numbers: no order of summation changes a bit
            whole = torch.arange(size, dtype=torch.float64) * (group.rank + 1)
            by_hand, built_in, whole_built_in = mine.clone(), mine.clone(), whole.clone()
            sent = ring.ring_all_reduce(by_hand)
            ring.ring_all_reduce(whole)
            dist.all_reduce(built_in)
            dist.all_reduce(whole_built_in)
            rows.append(
                [
                    sent,
                    by_hand.tolist(),
                    float((by_hand - built_in).abs().max()),
                    torch.equal(whole, whole_built_in),
                ]
            )
        return rows

    found = together(num_ranks, job, tmp_path)
    for index, size in enumerate(SIZES):
        rows = [rank[index] for rank in found]
        assert all(row[3] for row in rows), size
        assert max(row[2] for row in rows) < 1e-14 * num_ranks
        assert all(row[1] == rows[0][1] for row in rows)  # the same bits on every rank
        exact = 2 * (num_ranks - 1) / num_ranks * 8 * size
        # on average over ranks exact, whatever the size
        assert sum(row[0] for row in rows) == 2 * (num_ranks - 1) * 8 * size
        # and a rank is off by less than two numbers
        assert all(abs(row[0] - exact) < 2 * 8 for row in rows)
        if size % num_ranks == 0:
            assert [row[0] for row in rows] == [exact] * num_ranks
