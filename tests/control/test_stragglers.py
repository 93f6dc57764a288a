"""Who was waited for, out of the records of a run."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from surefoot.contract.events import Event, Fault, Step
from surefoot.control.diagnose import find_waits
from surefoot.core.ranks.stragglers import Pace

ROW = {
    "last": (1.0, 9.0),
    "waited_s": (0.01, 0.9),
    "data_s": (0.1, 0.2),
    "compute_s": (1.0, 2.0),
    "other_s": (0.0, 0.1),
    "num_samples": (40.0, 40.0),
    "num_items": (400.0, 400.0),
    "num_numbers": (800.0, 800.0),
}


def step(number: int, ranks: dict[str, Any]) -> Step:
    return Step(
        generation=1,
        time_s=0.0,
        step=number,
        epoch=0.0,
        num_steps=10,
        loss=None,
        terms={},
        gradient_norm=None,
        learning_rates={},
        num_applied=10,
        num_samples=80,
        num_items=800.0,
        elapsed_s=2.0,
        waiting_s=0.0,
        samples_per_s=None,
        items_per_s=None,
        peak_bytes=None,
        ranks=ranks,
    )


FAULT = Fault(
    generation=1,
    time_s=0.0,
    step=29,
    fault="straggler",
    rank=0,
    host="",
    action="the run continues; look there",
    detail="rank 1 is slow",
)


def test_records_add_up_to_how_often_each_rank_was_the_last_and_what_it_did() -> None:
    found = find_waits([step(1, {}), step(11, ROW), FAULT, step(21, ROW)])
    assert found is not None
    assert (found.num_steps, [each.num_last for each in found.ranks]) == (20, [2, 18])
    assert [each.waited_s for each in found.ranks] == pytest.approx([0.02, 1.8])
    assert found.ranks[1].pace == pytest.approx(Pace(0.02, 0.2, 0.01, 4.0, 40.0, 80.0))
    assert found.named == ((29, "rank 1 is slow; look there"),)


def test_one_rank_and_older_records_have_nothing_and_damaged_ones_do_no_harm() -> None:
    assert find_waits([step(1, {}), FAULT]) is None
    assert find_waits([step(1, {"last": (1.0,)})]) is None
    events: list[Event] = [replace(step(1, ROW), ranks={**ROW, "data_s": (float("nan"), -1.0)})]
    found = find_waits(events)
    assert found is not None
    assert [each.pace.data_s for each in found.ranks] == [0.0, 0.0]
