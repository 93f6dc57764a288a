"""Any number of workers, the run and its workers killed at random.

Each step reads what it reads in the unbroken run with none.
"""

from __future__ import annotations

import os
import random
import shutil
from pathlib import Path
from typing import Any

import pytest

from surefoot.components.data import consumed
from tests.components.test_bad_records import write_photos
from tests.faults.loader_run import (
    SETTINGS,
    STEPS,
    attempt,
    fork,
    kill_until_done,
    nothing_leaks,
    read_seen,
)

Golden = tuple[Path, dict[int, list[Any]], dict[str, str]]
FEW, MANY, EACH = 20, 200, 5  # kills; of one run


@pytest.fixture(scope="module")
def golden(tmp_path_factory: pytest.TempPathFactory) -> Golden:
    """The unbroken run.

    It is made in this process, so that what a first run loads is there for those that are forked.
    """
    # a kill loses nothing of what was written
    memory = Path("/dev/shm") if os.access("/dev/shm", os.W_OK) else None
    folder = (
        tmp_path_factory.mktemp("photos")
        if memory is None
        else memory / f"surefoot-loader-campaign-{os.getpid()}"
    )
    folder.mkdir(exist_ok=True)
    write_photos(folder, bad=(), num_samples=45)
    states = attempt(folder, folder / "golden", {"workers": 0})
    return folder, read_seen(folder, folder / "golden"), states


@pytest.fixture(scope="module", autouse=True)
def cleared(golden: Golden) -> Any:
    yield
    shutil.rmtree(golden[0], ignore_errors=True)


def campaign(golden: Golden, kills: int, seed: int) -> tuple[int, int]:
    """So many kills of runs; gives how many fell on runs and on workers."""
    folder, seen, states = golden
    drawn, runs, workers, number = random.Random(seed), 0, 0, 0
    with nothing_leaks():
        while runs < kills:
            number += 1
            run_folder = folder / f"run-{seed}-{number}"
            last, fell, lost = kill_until_done(folder, run_folder, drawn, min(EACH, kills - runs))
            runs, workers = runs + fell, workers + lost
            assert last == states
            assert read_seen(folder, run_folder) == seen
            found = consumed.check(run_folder)
            assert found.holds, found.faults
            assert found.last == STEPS
    return runs, workers


@pytest.mark.quick("7 process", "2 thread")
@pytest.mark.parametrize(
    "loader", SETTINGS[1:], ids=lambda each: f"{each['workers']} {each['kind']}"
)
def test_a_run_that_is_left_alone_reads_the_same_with_any_workers(
    loader: dict[str, Any], golden: Golden
) -> None:
    folder, seen, _ = golden
    run_folder = folder / f"alone-{loader['workers']}-{loader['kind']}"
    forked = fork(lambda: attempt(folder, run_folder, loader), folder / "alone.json")
    assert forked.wait() == 0, forked.result.read_text()
    assert read_seen(folder, run_folder) == seen


@pytest.mark.slow
def test_few_kills_of_runs_and_workers_change_nothing(golden: Golden) -> None:
    runs, workers = campaign(golden, FEW, 1)
    assert runs == FEW
    assert workers > 0  # how many are there to be killed, a busy machine says


@pytest.mark.faults
def test_many_kills_of_runs_and_workers_change_nothing(golden: Golden) -> None:
    runs, workers = campaign(golden, MANY, 2)
    assert runs == MANY
    assert workers >= MANY // 2
