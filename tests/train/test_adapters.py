"""A callback that records and saves the runs of another trainer through the session of `attach`."""

from __future__ import annotations

import inspect
import subprocess
import sys
from pathlib import Path
from typing import Any, Self

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import surefoot
from surefoot.contract import events
from surefoot.core.errors import RunFolderError
from surefoot.train.attach.opening import LoopRequest, open_loop

REASON = "needs the Trainer of Hugging Face: pip install transformers accelerate"
pytest.importorskip("accelerate", reason=REASON)
transformers = pytest.importorskip("transformers", reason=REASON)


class RunRecorder(transformers.TrainerCallback):
    """Record the training of a `transformers.Trainer` in a run folder, and save it there.

        with RunRecorder("runs/mine") as recorder:
            Trainer(..., callbacks=[recorder]).train()

    No callback receives the loss of a step. Like other trackers, this one takes the mean loss that
    the Trainer logs, so that a record covers the steps of one log. It saves when the Trainer saves.
    An error in training is recorded by the `with` block, or at the end of the process.
    """

    def __init__(self, folder: str | Path) -> None:
        self.folder, self.session = Path(folder), None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        if self.session is not None:
            self.session.leave(error)

    def on_train_begin(self, args: Any, state: Any, control: Any, **given: Any) -> None:
        request = LoopRequest(
            model=given["model"],
            optimizer=given["optimizer"],
            data=given["train_dataloader"],
            folder=self.folder,
            every=state.logging_steps,
            save=None,
            state={"schedule": given["lr_scheduler"]},
            resumes_itself=True,
        )
        session = self.session = open_loop(request, sys._getframe())
        session.end_at_exit()
        if session.progress.step != state.global_step:
            words = (
                f"{self.folder} is at step {session.progress.step:,}, but the Trainer is at step "
                f"{state.global_step:,}"
            )
            session.end("stopped", words)
            hint = "resume the Trainer from its checkpoint of that step, or give another folder"
            raise RunFolderError(words, hint=hint)

    def on_step_end(self, args: Any, state: Any, control: Any, **given: Any) -> None:
        loader, progress = given["train_dataloader"], self.session.progress
        num_batches = round(state.epoch * len(loader))
        num_epochs, place = divmod(num_batches, len(loader))
        num_rows = min(len(loader.dataset), len(loader) * args.train_batch_size)
        num_samples = num_epochs * num_rows + min(place * args.train_batch_size, num_rows)
        self.session.step_done(
            None, num_samples - progress.num_samples, num_batches - progress.num_batches
        )

    def on_log(self, args: Any, state: Any, control: Any, logs: Any, **given: Any) -> None:
        if "loss" in logs:
            self.session.close_window(logs["loss"])

    def on_save(self, args: Any, state: Any, control: Any, **given: Any) -> None:
        self.session.save()

    def on_train_end(self, args: Any, state: Any, control: Any, **given: Any) -> None:
        self.session.finish()


NUM_ROWS, BATCH, EPOCHS = 42, 8, 3  # 6 batches in an epoch, of which the last has 2 rows


class TrainerModel(nn.Module):
    """Classifier with dropout, in the form that the Trainer expects."""

    def __init__(self) -> None:
        super().__init__()
        self.hidden, self.head = nn.Linear(4, 8), nn.Linear(8, 3)

    def forward(self, inputs: Tensor, labels: Tensor | None = None) -> dict[str, Tensor]:
        logits = self.head(F.dropout(self.hidden(inputs).relu(), 0.2, self.training))
        return {"logits": logits} | (
            {} if labels is None else {"loss": F.cross_entropy(logits, labels)}
        )


class Break(transformers.TrainerCallback):
    """Callback that raises before the step after `step`."""

    def __init__(self, step: int) -> None:
        self.step = step

    def on_step_begin(self, args: Any, state: Any, control: Any, **given: Any) -> None:
        if state.global_step == self.step:
            raise ValueError("the training broke")


def double_loss(output: Any, labels: Tensor, num_items_in_batch: Any = None) -> Tensor:
    return 2 * F.cross_entropy(output["logits"], labels)


def make_trainer(
    folder: Path,
    recorder: RunRecorder | None,
    *,
    breaks_after: int | None = None,
    loss: Any = None,
    **others: Any,
) -> Any:
    inputs = torch.randn(NUM_ROWS, 4, generator=torch.Generator().manual_seed(1))
    labels = inputs[:, :3].argmax(1)
    settings = {
        "num_train_epochs": EPOCHS,
        "per_device_train_batch_size": BATCH,
        "learning_rate": 0.05,
        "logging_steps": 1,
        "save_strategy": "no",
        "report_to": "none",
        "disable_tqdm": True,
        "use_cpu": True,
        "log_level": "error",
        **others,
    }
    torch.manual_seed(0)
    return transformers.Trainer(
        model=TrainerModel(),
        args=transformers.TrainingArguments(output_dir=str(folder), **settings),
        train_dataset=[
            {"inputs": row, "labels": label} for row, label in zip(inputs, labels, strict=True)
        ],
        callbacks=[
            *([] if recorder is None else [recorder]),
            *([] if breaks_after is None else [Break(breaks_after)]),
        ],
        compute_loss_func=loss,
    )


def train(folder: Path, **others: Any) -> Any:
    """Train with a recorder in `folder / "run"`, and return the Trainer."""
    with RunRecorder(folder / "run") as recorder:
        trainer = make_trainer(folder / "hf", recorder, **others)
        trainer.train()
    return trainer


def steps_of(folder: Path) -> list[events.Step]:
    return [each for each in events.read(folder / "run") if isinstance(each, events.Step)]


def logged_losses(trainer: Any) -> list[tuple[int, float, float]]:
    return [
        (log["step"], pytest.approx(log["epoch"]), log["loss"])
        for log in trainer.state.log_history
        if "loss" in log
    ]


def are_equal(one: Any, other: Any) -> bool:
    """Return whether two states of a module or an optimizer have the same bits."""
    if isinstance(one, Tensor):
        return torch.equal(one, other)
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(are_equal(one[key], other[key]) for key in one)
    if isinstance(one, list):
        return len(one) == len(other) and all(map(are_equal, one, other))
    return bool(one == other)


def test_the_adapter_of_another_trainer_fits_into_80_lines() -> None:
    assert len(inspect.getsource(RunRecorder).splitlines()) <= 80


@pytest.mark.parametrize(
    "settings",
    [
        pytest.param({}, id="a log of each step"),
        pytest.param({"logging_steps": 4, "logging_first_step": True}, id="means of four steps"),
        pytest.param({"logging_strategy": "epoch"}, id="means of an epoch"),
        pytest.param({"gradient_accumulation_steps": 4}, id="accumulation with a remainder"),
        pytest.param({"loss": double_loss}, id="a loss that the model does not return"),
        pytest.param({"dataloader_drop_last": True, "max_steps": 7}, id="the middle of an epoch"),
        pytest.param({"save_strategy": "steps", "save_steps": 3, "logging_steps": 3}, id="saves"),
    ],
)
def test_the_records_have_the_steps_and_losses_that_the_trainer_logs(
    tmp_path: Path, settings: dict[str, Any]
) -> None:
    trainer = train(tmp_path, **settings)
    found = [(each.step, each.epoch, each.loss) for each in steps_of(tmp_path) if each.loss]
    assert found == logged_losses(trainer)
    assert sum(each.num_steps for each in steps_of(tmp_path)) == trainer.state.global_step
    drops = settings.get("dataloader_drop_last", False)
    num_samples = 7 * BATCH if drops else NUM_ROWS * EPOCHS
    assert sum(each.num_samples for each in steps_of(tmp_path)) == num_samples
    started, *_, ended = events.read(tmp_path / "run")
    assert isinstance(started, events.Started)
    assert started.data["guarantee"] == "none"
    assert "the trainer reads them itself" in " ".join(started.notes)
    assert isinstance(ended, events.Ended)
    assert (ended.outcome, ended.step) == ("finished", trainer.state.global_step)
    assert ended.summary["epochs"] == pytest.approx(trainer.state.epoch)


def test_a_recorded_training_has_the_bits_of_one_that_is_not_recorded(tmp_path: Path) -> None:
    saves = {"save_strategy": "steps", "save_steps": 5, "logging_steps": 5}
    bare = make_trainer(tmp_path / "bare", None, **saves)
    bare.train()
    draw = torch.rand(3)
    recorded = train(tmp_path, **saves)
    assert torch.equal(torch.rand(3), draw)
    assert are_equal(bare.model.state_dict(), recorded.model.state_dict())
    assert are_equal(bare.optimizer.state_dict(), recorded.optimizer.state_dict())
    assert logged_losses(bare) == logged_losses(recorded)


def test_the_run_folder_holds_the_final_weights(tmp_path: Path) -> None:
    trainer = train(tmp_path)
    loaded = TrainerModel()
    assert not are_equal(loaded.state_dict(), trainer.model.state_dict())
    surefoot.checkpoint.load_into(loaded, tmp_path / "run", "last")
    assert are_equal(loaded.state_dict(), trainer.model.state_dict())


def test_an_error_in_training_gives_a_failed_record_and_the_trainer_resumes(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    saves = {"save_strategy": "steps", "save_steps": 5}
    whole = train(tmp_path / "whole", **saves)
    with pytest.raises(ValueError, match="the training broke"):
        train(tmp_path, breaks_after=8, **saves)
    *_, ended = events.read(tmp_path / "run")
    assert isinstance(ended, events.Ended)
    assert (ended.outcome, ended.step) == ("failed", 8)
    assert "ValueError: the training broke" in ended.cause
    with RunRecorder(tmp_path / "run") as recorder:
        resumed = make_trainer(tmp_path / "hf", recorder, **saves)
        resumed.train(resume_from_checkpoint=True)
    assert "the script sets" not in capsys.readouterr().err
    assert are_equal(whole.model.state_dict(), resumed.model.state_dict())
    log = list(events.read(tmp_path / "run"))
    assert [each.first_step for each in log if isinstance(each, events.Started)] == [1, 6]
    found = [(each.step, each.epoch, each.loss) for each in steps_of(tmp_path)]
    assert found[-13:] == logged_losses(whole)[5:]
    assert (log[-1].outcome, log[-1].num_samples) == ("finished", NUM_ROWS * EPOCHS)


def test_a_trainer_that_starts_elsewhere_than_the_folder_is_refused(tmp_path: Path) -> None:
    train(tmp_path, max_steps=4)
    with pytest.raises(RunFolderError, match="run is at step 4, but the Trainer is at step 0"):
        train(tmp_path, max_steps=4)
    *_, ended = events.read(tmp_path / "run")
    assert (ended.outcome, ended.step) == ("stopped", 4)


SCRIPT = """
import sys
from pathlib import Path
from tests.train.test_adapters import RunRecorder, make_trainer

folder = Path(sys.argv[1])
make_trainer(folder / "hf", RunRecorder(folder / "run"), breaks_after=2).train()
"""


@pytest.mark.slow
def test_an_error_without_a_with_block_is_recorded_at_the_end_of_the_process(
    tmp_path: Path,
) -> None:
    command = [sys.executable, "-c", SCRIPT, str(tmp_path)]
    assert subprocess.run(command, check=False, timeout=300).returncode
    *_, ended = events.read(tmp_path / "run")
    assert (ended.outcome, ended.step) == ("failed", 2)
    assert "ValueError: the training broke" in ended.cause
