"""TensorBoard's file: read by TensorBoard itself, and given up, told once, whatever stops it."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import pytest

from surefoot.components.observe.tensorboard import TensorBoard
from surefoot.contract.events import Step
from surefoot.core.errors import StorageError

accumulators = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
records = pytest.importorskip("tensorboard.summary.writer.record_writer")


def step(number: int, **values: Any) -> Step:
    """The record of a step whose loss is its number."""
    same: dict[str, Any] = {
        "time_s": 1_700_000_000.0 + number,
        "epoch": 0.0,
        "num_steps": 1,
        "loss": float(number),
        "terms": {},
        "gradient_norm": None,
        "learning_rates": {"all": 0.5},
        "num_applied": 1,
        "num_samples": 8,
        "num_items": 8.0,
        "elapsed_s": 1.0,
        "waiting_s": 0.0,
        "samples_per_s": 8.0,
        "items_per_s": 8.0,
        "peak_bytes": None,
        "generation": 1,
    }
    return Step(step=number, **{**same, **values})


def write(folder: Path, *steps: Step, purge_step: int | None = None) -> None:
    board = TensorBoard(folder / "tensorboard", wanted=True, purge_step=purge_step)
    for each in steps:
        board.write(each)
    board.close()


def losses(folder: Path) -> list[tuple[int, float, float]]:
    board = accumulators.EventAccumulator(str(folder / "tensorboard"))
    board.Reload()
    return [(each.step, each.value, each.wall_time) for each in board.Scalars("train/loss")]


def test_tensorboard_reads_each_step_with_its_time(tmp_path: Path) -> None:
    write(tmp_path, step(1), step(2), step(3))
    assert losses(tmp_path) == [(n, float(n), 1_700_000_000.0 + n) for n in (1, 2, 3)]


def test_a_resume_takes_the_place_of_the_steps_after_it(tmp_path: Path) -> None:
    write(tmp_path, step(1), step(2), step(3))
    write(tmp_path, step(2, num_steps=7), purge_step=2)
    assert [each[0] for each in losses(tmp_path)] == [1, 2]


def test_a_number_that_is_none_or_no_number_does_not_stop_it(tmp_path: Path) -> None:
    write(tmp_path, step(1), step(2, gradient_norm=float("nan")), step(3, samples_per_s=1e300))
    assert [each[0] for each in losses(tmp_path)] == [1, 2, 3]


@pytest.mark.parametrize(
    "error",
    [MemoryError(), OSError(28, "No space left on device"), RuntimeError("another")],
    ids=repr,
)
@pytest.mark.parametrize("at", [1, 2, 4], ids=lambda at: f"record {at}")
def test_whatever_stops_a_record_is_told_once_and_nobody_waits(
    error: Exception, at: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("surefoot.components.observe.tensorboard.FIRST_WRITE_S", -1.0)
    before, written = records.RecordWriter.write, []

    def refuse(self: Any, data: bytes) -> None:
        written.append(data)
        if len(written) >= at:
            raise error
        before(self, data)

    monkeypatch.setattr(records.RecordWriter, "write", refuse)
    threads = threading.active_count()
    board = TensorBoard(tmp_path / "tensorboard", wanted=True)
    told = 0
    for number in range(1, 40):
        try:
            board.write(step(number))
        except StorageError as said:
            told += str(tmp_path) in str(said)
    board.close()
    assert (told, len(written)) == (1, at)
    assert threading.active_count() == threads
