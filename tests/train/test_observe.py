"""What a run records of itself, and what recording costs."""

from __future__ import annotations

import io
import json
import re
import time
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from surefoot import Loss, Run, RunSpec
from surefoot.components.data.sources.synthetic import Synthetic
from surefoot.components.metrics import Mean, accuracy
from surefoot.components.observe.console import Console
from surefoot.components.observe.meter import Meter
from surefoot.contract import events
from surefoot.contract.events import Ended, Evaluated, Event, Started, Step
from surefoot.contract.state import StepReport

DELAY_S = 0.004


class Slow:
    """Ten classes of noise, whose samples take a while to read."""

    def __init__(self, delay_s: float = 0.0) -> None:
        self.delay_s = delay_s

    def model(self) -> nn.Module:
        return nn.Sequential(nn.Flatten(), nn.Linear(16, 10))

    def data(self, split: str) -> Synthetic:
        return Synthetic(40, shape=(1, 4, 4), delay_s=self.delay_s)

    def forward(self, model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
        logits: Tensor = model(batch["images"])
        return logits

    def loss(self, output: Tensor, batch: dict[str, Tensor]) -> Loss:
        return Loss.sum(
            F.cross_entropy(output, batch["labels"], reduction="sum"), len(batch["labels"])
        )

    def metrics(self, output: Tensor, batch: dict[str, Tensor]) -> dict[str, Mean]:
        return {"accuracy": accuracy(output, batch["labels"])}


def run_of(folder: Path, task: object, **tables: dict[str, object]) -> list[Event]:
    spec = RunSpec(
        **{"train": {"length": "20 steps", "batch": 8}, "observe": {"every": "5 steps"}, **tables}
    )
    with Run(spec, task, folder=folder, quiet=True) as run:
        for _ in run.steps():
            pass
        run.evaluate()
    return list(events.read(folder))


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("observed") / "run"
    run_of(path, Slow(), observe={"every": "5 steps", "tensorboard": True})
    return path


def test_waiting_is_timed_where_the_batch_is_fetched(tmp_path: Path) -> None:
    steps = [event for event in run_of(tmp_path / "slow", Slow(DELAY_S)) if isinstance(event, Step)]
    waiting_s, elapsed_s = (
        sum(step.waiting_s for step in steps),
        sum(step.elapsed_s for step in steps),
    )
    num_samples = sum(step.num_samples for step in steps)
    assert num_samples == 160
    assert waiting_s >= num_samples * DELAY_S  # a sleep is never shorter
    assert waiting_s <= elapsed_s


def test_a_fast_source_is_not_said_to_be_waited_for(folder: Path) -> None:
    steps = [event for event in events.read(folder) if isinstance(event, Step)]
    assert sum(step.waiting_s for step in steps) < 160 * DELAY_S


def test_started_says_what_where_and_with_which_versions(folder: Path) -> None:
    started = next(event for event in events.read(folder) if isinstance(event, Started))
    assert started.spec["train"] == {
        "length": "20 steps",
        "batch": 8,
        "threads": torch.get_num_threads(),
    }
    assert {"python", "torch", "numpy"} <= set(started.versions)
    assert started.versions["torch"] == torch.__version__
    assert started.machine["cores"] >= 1
    assert started.machine["threads"] == torch.get_num_threads()
    assert started.place["world_size"] == 1
    assert len(started.code_digest) == 64
    assert started.num_parameters == 170
    assert started.total_steps == 20


def test_every_line_is_one_versioned_record_with_units_in_its_names(folder: Path) -> None:
    rows = [json.loads(line) for line in (folder / events.FILE).read_text().splitlines()]
    assert [row["kind"] for row in rows] == [
        "started",
        "step",
        "dtypes",
        *["step"] * 4,
        "evaluated",
        "committed",
        "ended",
    ]
    assert all(
        row["v"] == events.VERSION and row["generation"] == 1 and row["time_s"] > 0 for row in rows
    )
    assert {
        "elapsed_s",
        "waiting_s",
        "samples_per_s",
        "peak_bytes",
        "gradient_norm",
        "loss",
    } <= set(rows[1])


def test_a_step_record_sums_up_its_window_with_its_counts(folder: Path) -> None:
    steps = [event for event in events.read(folder) if isinstance(event, Step)]
    assert [(step.step, step.num_steps, step.num_samples) for step in steps] == [
        (1, 1, 8),
        (5, 4, 32),
        (10, 5, 40),
        (15, 5, 40),
        (20, 5, 40),
    ]


def test_tensorboard_holds_the_numbers_of_the_events(folder: Path) -> None:
    accumulators = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    board = accumulators.EventAccumulator(str(folder / "tensorboard"))
    board.Reload()
    written = {scalar.step: scalar.value for scalar in board.Scalars("train/loss")}
    steps = [event for event in events.read(folder) if isinstance(event, Step)]
    assert written == {step.step: pytest.approx(step.loss, rel=1e-6) for step in steps}
    evaluated = next(event for event in events.read(folder) if isinstance(event, Evaluated))
    assert board.Scalars("test/accuracy")[0].value == pytest.approx(evaluated.metrics["accuracy"])


def test_ended_says_why_and_what_came_of_it(folder: Path) -> None:
    ended = list(events.read(folder))[-1]
    assert isinstance(ended, Ended)
    assert (ended.outcome, ended.step, ended.num_samples, ended.exit_code) == (
        "finished",
        20,
        160,
        0,
    )
    assert ended.summary["score"] == "accuracy"


class Watched:
    """A scalar that notes when somebody waits for it."""

    def __init__(self, value: float) -> None:
        self.value, self.num_reads = value, 0

    def __float__(self) -> float:
        self.num_reads += 1
        return self.value


def test_a_report_waits_for_nothing_until_it_is_read() -> None:
    total, norm = Watched(6.0), Watched(2.0)
    report = StepReport(
        step=1,
        epoch=0.1,
        num_samples=3,
        learning_rate=0.1,
        totals={"loss": (total, 3, 1.0)},
        norm=norm,
        was_applied=True,  # type: ignore[dict-item, arg-type]
    )
    meter = Meter()
    meter.add(report)
    assert (total.num_reads, norm.num_reads) == (0, 0)
    summary = meter.take()
    assert summary is not None
    assert (summary.loss, summary.gradient_norm) == (2.0, 2.0)
    assert total.num_reads > 0


def test_the_mean_of_a_window_weighs_each_step_by_its_count() -> None:
    meter = Meter()
    for total, count in ((2.0, 1), (30.0, 10)):
        meter.add(
            StepReport(1, 0.0, count, 0.1, {"loss": (torch.tensor(total), count, 1.0)}, 1.0, True)
        )
    summary = meter.take()
    assert summary is not None
    assert summary.loss == pytest.approx(32.0 / 11)
    assert meter.take() is None


def test_a_window_of_no_time_has_no_rate() -> None:
    meter = Meter()
    meter.add(StepReport(1, 0.0, 4, 0.1, {"loss": (torch.tensor(1.0), 4, 1.0)}, 1.0, True))
    time.sleep(0.001)
    summary = meter.take()
    assert summary is not None
    assert summary.samples_per_s is not None
    assert summary.items_per_s == summary.samples_per_s


@pytest.mark.parametrize(
    ("quiet", "told"), [(False, "test 30/60 samples\ntest 60/60 samples\n"), (True, "")]
)
def test_how_much_of_an_evaluation_is_done_is_told_unless_quiet(quiet: bool, told: str) -> None:
    stream = io.StringIO()
    console = Console(total_steps=None, unit="samples", quiet=quiet, stream=stream)
    console.reading("test", 30, 60)
    console.reading("test", 45, 60)  # within the same seconds: not said again
    console.reading("test", 60, 60)
    assert stream.getvalue() == told


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.mark.parametrize("width", [120, 80, 60])
def test_the_bar_cuts_no_number_off_and_tells_of_the_steps_again_after_an_evaluation(
    width: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", str(width))
    monkeypatch.setenv("TERM", "xterm")
    stream = Terminal()
    console = Console(total_steps=20_000, unit="samples", stream=stream)
    meter = Meter()
    meter.add(
        StepReport(9_990, 0.5, 4, 0.00123, {"loss": (torch.tensor(1.23456), 1, 1.0)}, 1.0, True)
    )
    summary = meter.take()
    assert summary is not None
    console.step(summary)
    console.evaluated(9_990, 0.5, "accuracy", 0.9543, "%", True)
    console.step(summary)
    console.evaluating("test", 1_000, 12_000)
    console.evaluated(9_990, 0.5, "accuracy", 0.9643, "%", True)
    console.close()
    said = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", stream.getvalue())
    lines = [line for line in re.split(r"[\r\n]+", said) if line.strip()]
    assert all(len(line) <= width and "…" not in line for line in lines)
    assert "9,990/20,000" in lines[-1]
    assert "loss 1.235" in lines[-1]
    assert ("accuracy 96.43 %" in lines[-1]) is (width >= 80)
    assert "test 1,000" not in lines[-1]


def test_an_evaluation_whose_count_is_printed_ends_with_its_last_count() -> None:
    stream = io.StringIO()
    console = Console(total_steps=None, unit="samples", stream=stream)
    for _ in range(2):  # the second one follows at once: nothing of it is printed
        for done in range(8, 65, 8):
            console.evaluating("test", done, 64)
    console.close()
    assert stream.getvalue().splitlines() == ["test 8/64 samples", "test 64/64 samples"]
