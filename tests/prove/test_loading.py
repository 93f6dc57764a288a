"""`surefoot tune-loader`: what it measures of loaders of known speed, and which it chooses."""

from __future__ import annotations

from pathlib import Path

from surefoot.components.data.loader.pilot import ENOUGH, GAIN, WorkerTiming, WorkerTuner
from surefoot.contract.spec import RunSpec
from surefoot.prove.bench.loading import LoaderTiming, LoaderTuning, choose_faster, tune

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


def check(found: LoaderTuning, most: int) -> None:
    """No setting too many was tried, and the choice follows from what was measured.

    Whatever a busy machine made of the measurements.
    """
    tuner, rest = WorkerTuner(most), list(found.tried)
    while not tuner.is_done:
        each = rest.pop(0)
        assert each.workers == tuner.workers
        tuner.record(WorkerTiming(each.workers, 1 / each.samples_per_s, each.waiting))
    assert tuner.workers == found.chosen.workers
    assert {each.workers for each in rest} <= {tuner.workers}
    fastest = max(each.samples_per_s for each in found.tried)
    assert found.chosen.samples_per_s >= fastest / (1 + GAIN) / (1 + 1e-9)
    assert ("still wait" in found.why) is (found.chosen.waiting > ENOUGH)


def test_workers_are_added_as_long_as_each_doubling_reads_faster() -> None:
    found = tune(spec(0.1, 0.001, kind="thread", workers=1), seconds=0.25, most=4)
    assert [each.workers for each in found.tried][:4] == [0, 1, 2, 4]
    alone = {each.workers: each.supply_per_s for each in found.tried[:4]}
    assert alone[4] > alone[1]  # four times as much where nothing else is going on
    assert found.chosen.workers
    check(found, most=4)


def test_the_cheapest_setting_with_which_steps_do_not_wait_is_chosen() -> None:
    found = tune(spec(0.04, 0.4), seconds=0.25, most=4)
    assert found.tried[0].waiting > found.tried[1].waiting
    check(found, most=4)


def test_without_anything_to_wait_for_no_worker_is_tried_or_the_steps_waited() -> None:
    found = tune(spec(0.0, 0.3), seconds=0.3, most=4)
    assert len(found.tried) == 1 or found.tried[0].waiting > ENOUGH
    check(found, most=4)


def test_another_setting_is_chosen_only_where_steps_become_faster_by_more_than_noise() -> None:
    before = tried(2, 80, 80, 0.2)
    assert choose_faster(before, tried(2, 90, 82, 0.19, prefetch=4)) is before
    assert choose_faster(before, after := tried(2, 90, 90, 0.1, prefetch=4)) is after
