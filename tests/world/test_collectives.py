"""What `surefoot bench comm` measures.

Collectives that do what their names say, timed as the slowest rank has it.
"""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist

from surefoot.control.plan import COLLECTIVES, bus_factor
from surefoot.core.errors import NumbersError
from surefoot.core.ranks.layout import Transport
from surefoot.prove.bench import collectives
from surefoot.prove.bench.collectives import TimedCollective, check, fit, measure, time_collective
from surefoot.prove.bench.wanted import Sizes
from surefoot.runtime.comm.collectives import Collective
from surefoot.runtime.comm.group import Group
from tests.world.ranks import RankFailed, together

NEEDED_FOR = {
    "all-reduce": "all_reduce",
    "broadcast": "broadcast",
    "all-to-all": "all_to_all_single",
    "send": "recv",
}


def rows_of(found: tuple[TimedCollective, ...]) -> list[list[Any]]:
    return [
        [row.collective, row.num_bytes, row.elapsed.estimate, row.elapsed.count] for row in found
    ]


@pytest.mark.quick("4-auto", "3-gloo")
@pytest.mark.parametrize(
    ("num_ranks", "transport"), [(2, "auto"), (3, "auto"), (4, "auto"), (3, "gloo")]
)
def test_each_collective_does_what_its_name_says_and_every_rank_has_the_same_rows(
    num_ranks: int, transport: Transport, tmp_path: Path
) -> None:
    def job(group: Group) -> Any:
        right = [
            Collective(name, group, size).is_right()
            for name in COLLECTIVES
            for size in (1, 100, 4096)
        ]
        found = measure(group, Sizes(smallest=100, largest=5000, calls=2, warmup=1))
        return [all(right), rows_of(found), sorted(fit(found))]

    found = together(num_ranks, job, tmp_path, transport=transport)
    assert all(each == found[0] for each in found)
    is_right, rows, fitted = found[0]
    assert is_right
    assert fitted == sorted(COLLECTIVES)
    unit = 4 * num_ranks  # a number for each rank
    assert [row[:2] for row in rows] == [
        [name, -(-size // unit) * unit] for name in COLLECTIVES for size in (100, 400, 1600, 5000)
    ]
    assert all(row[2] > 0 and row[3] == 2 for row in rows)


def test_a_collective_that_gives_wrong_numbers_is_named_with_its_rank(tmp_path: Path) -> None:
    def job(group: Group) -> Any:
        said = []
        for name, function in NEEDED_FOR.items():
            real = getattr(dist, function)

            def spoilt(*given: Any, real: Any = real) -> Any:
                result = real(*given)
                if group.rank == 1:
                    given[0].view(-1)[0] += 1
                return result

            setattr(dist, function, spoilt)
            try:
                check(group, name)
            except NumbersError as error:
                said.append(error.message)
            finally:
                setattr(dist, function, real)
        return said

    expected = [f"{name} returns wrong values on rank 1 of 2" for name in NEEDED_FOR]
    assert together(2, job, tmp_path, transport="gloo") == [expected, expected]


def test_a_sum_in_its_place_does_not_grow_however_often_it_is_repeated(tmp_path: Path) -> None:
    def job(group: Group) -> Any:
        tried, naive = Collective("all-reduce", group, 64), torch.ones(4)
        for number in range(200):
            tried.call(number)
            dist.all_reduce(naive)
        return [float(tried._whole.abs().max()), bool(naive.isinf().all())]

    assert together(2, job, tmp_path) == [[0.0, True]] * 2  # the pitfall is real: 2^200 is no fp32


def test_the_slowest_rank_is_what_counts_and_a_call_is_one_of_a_round(tmp_path: Path) -> None:
    def job(group: Group) -> Any:
        now_s = [0.0]  # a clock of the rank's own: no busy machine makes a call longer

        def late(number: int) -> None:
            now_s[0] += 0.5 * group.rank  # nothing is sent: rank 0 alone would see no time at all

        setattr(collectives, "time", SimpleNamespace(perf_counter=lambda: now_s[0]))  # noqa: B010
        found = []
        for name in ("all-reduce", "broadcast", "send"):
            collective = Collective(name, group, 1 << 10)
            collective.call = late  # type: ignore[method-assign]
            found.append(time_collective(group, collective, 3, 1).elapsed.estimate)
        return found

    first, *others = together(3, job, tmp_path)
    assert others == [first, first]
    assert first == [1.0] * 3  # not three times, nor twice, as long


def test_bandwidth_is_size_over_time_and_what_a_link_carries_of_it(tmp_path: Path) -> None:
    def job(group: Group) -> Any:
        (row,) = measure(
            group, Sizes(collectives=("all-reduce",), smallest=1 << 12, largest=1 << 12, calls=2)
        )
        return [row.bytes_per_s, row.bus_bytes_per_s, row.num_bytes / row.elapsed.estimate]

    per_s, bus, expected = together(4, job, tmp_path)[0]
    assert per_s == expected
    assert bus == pytest.approx(1.5 * per_s)
    assert bus_factor("all-reduce", 4) == 1.5


def test_one_rank_has_no_collective_and_a_lost_one_ends_the_others(tmp_path: Path) -> None:
    def job(group: Group) -> Any:
        if group.rank == 0:
            Collective("all-reduce", group, 64).call(0)
        return None

    with pytest.raises(RankFailed, match="rank 1 has exited, after "):
        together(2, job, tmp_path, timeout_s=2.0)
