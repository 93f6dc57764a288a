"""`surefoot tune-loader`: what it measures of loaders of known speed, and which it chooses."""

from __future__ import annotations

from pathlib import Path

from surefoot.components.data.loader.pilot import ENOUGH
from surefoot.contract.spec import RunSpec
from surefoot.prove.bench.loading import LoaderTiming, LoaderTuning, choose, is_enough, tune

TASK = f"{Path(__file__).parent / 'slow_data.py'}:Slow"


def spec(read_s: float, compute_s: float, **loader: object) -> RunSpec:
    task = {"use": TASK, "read_s": read_s, "compute_s": compute_s}
    return RunSpec(
        task=task,
        train={"batch": 8, "length": "9 steps"},
        evaluate={"split": "train"},
        loader=loader,
    )


def tried(
    workers: int, supply: float, together: float, waiting: float, prefetch: int = 2
) -> LoaderTiming:
    return LoaderTiming(
        workers=workers,
        kind="thread",
        prefetch=prefetch,
        pinned=False,
        supply_per_s=supply,
        samples_per_s=together,
        waiting=waiting,
    )


def check(found: LoaderTuning) -> None:
    """No setting too many was tried, and the choice follows from what was measured.

    Whatever a busy machine made of the measurements.
    """
    numbers = [each.workers for each in found.tried]
    rising = numbers[
        : next(
            (at for at in range(1, len(numbers)) if numbers[at] <= numbers[at - 1]), len(numbers)
        )
    ]
    assert not any(
        is_enough(list(found.tried[:at]), found.demand_per_s) for at in range(1, len(rising))
    )
    assert (found.chosen, found.why) == choose(list(found.tried), found.demand_per_s)


def test_workers_are_added_as_long_as_each_doubling_reads_faster() -> None:
    found = tune(spec(0.1, 0.001, kind="thread", workers=1), seconds=0.25, most=4)
    assert [each.workers for each in found.tried][:4] == [0, 1, 2, 4]
    alone = {each.workers: each.supply_per_s for each in found.tried[:4]}
    assert alone[4] > alone[1]  # four times as much where nothing else is going on
    assert found.chosen.workers
    check(found)


def test_the_cheapest_setting_with_which_steps_do_not_wait_is_chosen() -> None:
    found = tune(spec(0.04, 0.4), seconds=0.25, most=4)
    assert found.tried[0].waiting > found.tried[1].waiting
    check(found)


def test_without_anything_to_wait_for_no_worker_is_tried_or_the_steps_waited() -> None:
    found = tune(spec(0.0, 0.3), seconds=0.3)
    assert len(found.tried) == 1 or found.tried[0].waiting > ENOUGH
    check(found)


def test_a_little_that_workers_cannot_hide_is_not_a_fifth_to_spare() -> None:
    no, one, two = tried(0, 100, 50, 0.5), tried(1, 105, 99, 0.01), tried(2, 200, 100, 0.0)
    assert choose([no, one, two], 100)[0] is two
    chosen, why = choose([no, tried(1, 80, 79, 0.2), tried(2, 81, 80, 0.2)], 100)
    assert chosen.workers == 1
    assert why.startswith("none gives what the steps could take")
    assert choose([two, tried(2, 200, 100, 0.0, prefetch=4)], 100)[0] is two
