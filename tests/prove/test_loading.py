"""`surefoot tune-loader`: what it measures of loaders whose speed is known, and which it chooses."""

from __future__ import annotations

from pathlib import Path

import pytest

from surefoot.contract.spec import RunSpec
from surefoot.prove.bench.loading import Tried, choose, tune

TASK = f"{Path(__file__).parent / 'slow_data.py'}:Slow"


def spec(read_s: float, compute_s: float, **loader: object) -> RunSpec:
    task = {"use": TASK, "read_s": read_s, "compute_s": compute_s}
    return RunSpec(task=task, train={"batch": 8, "length": "9 steps"}, evaluate={"split": "train"}, loader=loader)


def tried(workers: int, supply: float, together: float, waiting: float, prefetch: int = 2) -> Tried:
    return Tried(
        workers=workers, kind="thread", prefetch=prefetch, pinned=False, supply_per_s=supply, samples_per_s=together, waiting=waiting
    )  # fmt: skip


def test_the_cheapest_setting_with_which_steps_do_not_wait_is_chosen() -> None:
    found = tune(spec(0.06, 0.03), seconds=0.25, most=4)
    assert found.demand_per_s == pytest.approx(8 / 0.03, rel=0.25)
    alone = {each.workers: each.supply_per_s for each in found.tried}
    assert alone[0] == pytest.approx(8 / 0.06, rel=0.25)
    assert alone[4] == pytest.approx(4 * alone[1], rel=0.3)
    waiting = {each.workers: each.waiting for each in found.tried}
    assert waiting[0] == pytest.approx(0.67, abs=0.12)
    assert waiting[1] == pytest.approx(0.5, abs=0.12)
    assert found.chosen.workers == 4
    assert "do not wait" in found.why
    assert [each.workers for each in found.tried] == [0, 1, 2, 4]


def test_without_anything_to_wait_for_no_worker_is_chosen() -> None:
    found = tune(spec(0.0001, 0.1), seconds=0.3)
    assert [each.workers for each in found.tried] == [0]
    assert found.chosen.workers == 0


def test_a_little_that_workers_cannot_hide_is_not_a_fifth_to_spare() -> None:
    no, one, two = tried(0, 100, 50, 0.5), tried(1, 105, 99, 0.01), tried(2, 200, 100, 0.0)
    assert choose([no, one, two], 100)[0] is two
    chosen, why = choose([no, tried(1, 80, 79, 0.2), tried(2, 81, 80, 0.2)], 100)
    assert chosen.workers == 1
    assert why.startswith("none gives what the steps could take")
    assert choose([two, tried(2, 200, 100, 0.0, prefetch=4)], 100)[0] is two
