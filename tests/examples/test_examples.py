"""Every example runs as the script that it is and learns.

Every task among them trains by its name.
"""

from __future__ import annotations

import ast
import re
import runpy
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import surefoot
from surefoot import Loss, Run, RunSpec
from surefoot.cli.main import build_verbs
from surefoot.components.data.sources.arrays import Arrays
from surefoot.contract import events, spec_file
from surefoot.contract.events import Ended, Evaluated, Event, Started
from surefoot.core.errors import TaskError
from tests.examples.loaded import FOLDER, load

LINES = 150  # short enough to copy
TASKS = {
    "image_classifier": "ImageClassifier",
    "language_model": "LanguageModel",
    "hf_causal_lm": "HfCausalLM",
    "gan": "Gan",
    "detector": "Detector",
    "contrastive": "Halves",
    "own_optimizer": "OwnOptimizer",
    "ema_state": "HardClasses",
    "bring_your_data": "AnyData",
}
LOOPS = ("attach", "loss_scaler", "plain_loop")
READERS = ("read_checkpoint",)  # tried by tests/cli/test_checkpoint.py
LESSONS = ("ring_all_reduce",)  # tried by tests/world/test_ring.py


@pytest.fixture(autouse=True)
def has_its_extras(request: pytest.FixtureRequest) -> None:
    pytest.importorskip("sklearn", reason="needs scikit-learn: the extra demo")
    if "hf_causal_lm" in request.node.name or "transformers" in request.node.name:
        pytest.importorskip("transformers", reason="needs transformers: the extra hf")


def run_script(
    name: str, folder: Path, monkeypatch: pytest.MonkeyPatch, *arguments: str
) -> list[list[Event]]:
    """Run `python examples/<name>.py` with `folder` as the working folder.

    Gives the events of each run that it made, oldest first.
    """
    monkeypatch.chdir(folder)
    monkeypatch.setattr(sys, "argv", [f"{name}.py", *arguments])
    threads = torch.get_num_threads()
    runpy.run_path(str(FOLDER / f"{name}.py"), run_name="__main__")
    torch.set_num_threads(threads)
    return [
        list(events.read(path))
        for path in sorted(folder.glob("runs/*"))
        if (path / events.FILE).is_file()
    ]


def bits_of_single_bytes(text: bytes) -> float:
    """The entropy of the bytes of `text` by themselves.

    A model that does not look at what came before reaches no less.
    """
    shares = np.bincount(np.frombuffer(text, dtype=np.uint8), minlength=256) / len(text)
    return float(-(shares[shares > 0] * np.log2(shares[shares > 0])).sum())


def bits_of_test_text() -> float:
    module = load("language_model")
    return bits_of_single_bytes(
        b"".join(Path(each.__file__).read_bytes() for each in module.FILES["test"])
    )


def perplexity_of_test_lines() -> float:
    rows = load("hf_causal_lm").HfCausalLM().data("test").read(np.arange(200))
    return float(2 ** bits_of_single_bytes(bytes(rows["labels"][rows["labels"] >= 0].tolist())))


def distance_of_the_mean_image() -> float:
    """What a generator reaches that always draws the mean of all digits."""
    module = load("gan")
    train, test = module.Gan().data("train"), module.Gan().data("test")
    real = test.read(np.arange(len(test)))["images"]
    mean = train.read(np.arange(len(train)))["images"].mean(0)
    return float(module.Moments.of(real, mean.expand_as(real)).value())


def pixels_off_in_the_middle() -> float:
    """How far off the places are for a net that says the mean place of each cell."""
    rows = load("detector").Detector().data("test").read(np.arange(200))
    places = rows["places"][rows["classes"] > 0]
    return float((places - places.mean(0)).abs().mean()) * 8


# each metric, and what it must be better than: chance or the best that does not look, with room
MUST: dict[str, dict[str, Callable[[], float]]] = {
    "image_classifier": {"accuracy": lambda: 0.9},  # chance 0.1
    "language_model": {"bits per byte": lambda: 0.9 * bits_of_test_text()},
    "hf_causal_lm": {"perplexity": lambda: 0.7 * perplexity_of_test_lines()},
    "gan": {"moment distance": lambda: 0.7 * distance_of_the_mean_image()},
    # chance 0.1
    "detector": {
        "digits named": lambda: 0.3,
        "pixels off": lambda: 0.5 * pixels_off_in_the_middle(),
    },
    "contrastive": {"found at once": lambda: 0.25},  # chance 1/60
    "own_optimizer": {"accuracy": lambda: 0.85},  # chance 0.1
    "ema_state": {"accuracy": lambda: 0.9},  # chance 0.1
}
LOWER_IS_BETTER = ("bits per byte", "perplexity", "moment distance", "pixels off")


@pytest.mark.quick("image_classifier")
@pytest.mark.parametrize("name", MUST)
def test_an_example_runs_as_a_script_and_learns(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (made,) = run_script(name, tmp_path, monkeypatch)
    last, end = [event for event in made if isinstance(event, Evaluated)][-1], made[-1]
    assert isinstance(end, Ended)
    assert end.outcome in ("finished", "stopped")
    for metric, bound in MUST[name].items():
        value, must = last.metrics[metric], bound()
        assert value is not None
        assert value < must if metric in LOWER_IS_BETTER else value > must, metric


@pytest.mark.parametrize("name", TASKS)
def test_a_task_of_an_example_trains_by_its_name(name: str, tmp_path: Path) -> None:
    use = f"{FOLDER / name}.py:{TASKS[name]}"
    arguments = [
        "train",
        use,
        "--run",
        str(tmp_path / "run"),
        "--steps",
        "2",
        "--quiet",
        "--set",
        "observe.tensorboard=false",
    ]
    assert build_verbs()([*arguments, "--set", "evaluate.batch=60"], standalone_mode=False) == 0
    assert isinstance(surefoot.load(tmp_path / "run"), torch.nn.Module)


def test_a_loop_with_surefoot_attached_learns_and_is_recorded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert load("attach").main() > 0.85  # chance 0.1
    made = list(events.read(tmp_path / "runs" / "attached"))
    assert isinstance(made[0], Started)
    assert (made[0].data["guarantee"], made[-1].kind) == ("replayed", "ended")


def test_a_loop_in_fp16_with_a_scaler_of_its_own_learns(capsys: pytest.CaptureFixture[str]) -> None:
    assert load("loss_scaler").main() > 0.85  # chance 0.1
    assert "a gradient overflowed, the step is left out; S is now 2^23" in capsys.readouterr().out


def test_what_attach_adds_to_a_loop_is_three_lines() -> None:
    lines = (FOLDER / "attach.py").read_text().splitlines()
    marked = [line for line in lines if re.search(r"  # \d", line)]
    ours = [
        line
        for line in lines
        if re.search(r"surefoot\.attach\(|run\.(batches|step_done|close)\(", line)
    ]
    assert marked == ours
    assert len(ours) == 3


def test_a_plain_loop_that_was_stopped_goes_on_to_the_same_bits(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    plain = load("plain_loop")
    monkeypatch.setattr(plain, "EPOCHS", 5)
    share = plain.main(tmp_path / "whole")
    assert share > 0.8  # chance 0.1
    plain.main(tmp_path / "stopped", stop_after=90)  # the last commit is at 80
    capsys.readouterr()
    assert plain.main(tmp_path / "stopped") == share
    assert "resuming after step 80" in capsys.readouterr().out
    last = "checkpoints/step-000000000115/model.safetensors"
    assert (tmp_path / "stopped" / last).read_bytes() == (tmp_path / "whole" / last).read_bytes()


@pytest.mark.quick("dataset", "loader", "own_source")
@pytest.mark.parametrize("kind", ["tensors", "dataset", "loader", "own_loader", "own_source"])
def test_each_kind_of_data_trains_the_digits_and_what_cannot_seek_is_named(
    kind: str, tmp_path: Path
) -> None:
    run: Run = load("bring_your_data").main(kind, tmp_path / "run")
    assert run.summary["value"] > 0.85  # chance 0.1
    assert run.num_samples == 8 * 1437
    started = next(iter(events.read(run.folder)))
    assert isinstance(started, Started)
    named = [note for note in started.notes if note.startswith("the training source is replayed")]
    assert len(named) == (kind in ("loader", "own_loader"))


# ---- what each example stands for


def losses_of(task: Any, spec: RunSpec, folder: Path) -> list[float]:
    with Run(spec, task, folder=folder, quiet=True) as run:
        return [report.loss for report in run.steps()]


def spec_of(batch: int, microbatch: int | None = None) -> RunSpec:
    train = {"length": "3 steps", "batch": batch} | (
        {} if microbatch is None else {"microbatch": microbatch}
    )
    return RunSpec(train=train, optim={"name": "sgd", "lr": 0.1}, observe={"tensorboard": False})


@pytest.mark.parametrize(
    ("name", "made"), [("hf_causal_lm", "HfCausalLM"), ("detector", "Detector")]
)
def test_documents_and_canvases_of_unequal_content_accumulate_to_the_whole_batch(
    name: str, made: str, tmp_path: Path
) -> None:
    kind = getattr(load(name), made)
    whole = losses_of(kind(), spec_of(16), tmp_path / "whole")
    assert losses_of(kind(), spec_of(16, microbatch=4), tmp_path / "split") == pytest.approx(
        whole, rel=1e-5
    )


class Encoder:
    """A transformer that tells lines beginning in the alphabet's earlier half from the others."""

    def model(self) -> torch.nn.Module:
        from transformers import BertConfig, BertForSequenceClassification

        sizes = {
            "hidden_size": 32,
            "num_hidden_layers": 1,
            "num_attention_heads": 2,
            "intermediate_size": 64,
        }
        config = BertConfig(
            vocab_size=256,
            max_position_embeddings=24,
            num_labels=2,
            hidden_dropout_prob=0.0,
            **sizes,
        )
        return BertForSequenceClassification(config)

    def data(self, split: str) -> Arrays:
        lines = [
            line.strip()[:24].ljust(24)
            for line in Path(ast.__file__).read_bytes().splitlines()
            if line.strip()
        ]
        ids = np.array([list(line) for line in lines])
        return Arrays(input_ids=ids, labels=(ids[:, 0] < np.median(ids[:, 0])).astype(np.int64))

    def forward(self, model: Any, batch: dict[str, torch.Tensor]) -> torch.Tensor:
        logits: torch.Tensor = model(input_ids=batch["input_ids"]).logits
        return logits

    def loss(self, output: torch.Tensor, batch: dict[str, torch.Tensor]) -> Loss:
        return Loss.sum(
            torch.nn.functional.cross_entropy(output, batch["labels"], reduction="sum"), len(output)
        )


def test_an_encoder_of_transformers_trains_unchanged(tmp_path: Path) -> None:
    task = Encoder()
    labels = task.data("train").read(np.arange(500))["labels"]
    share = float(labels.double().mean())
    # of a net that says how often it is so
    chance = -(share * np.log(share) + (1 - share) * np.log(1 - share))
    spec = RunSpec(
        train={"length": "40 steps", "batch": 64},
        optim={"lr": 1e-2},
        observe={"tensorboard": False},
    )
    losses = losses_of(task, spec, tmp_path / "run")
    assert sum(losses[-10:]) / 10 < 0.6 * chance


def test_a_loss_over_pairs_is_refused_with_microbatches(tmp_path: Path) -> None:
    with pytest.raises(TaskError, match="is not additive and cannot be split"):
        losses_of(load("contrastive").Halves(), spec_of(64, microbatch=16), tmp_path / "run")


def test_the_averaged_weights_are_evaluated_and_saved_and_the_tasks_memory_moves_in_training_alone(
    tmp_path: Path,
) -> None:
    task = load("ema_state").HardClasses()
    spec = RunSpec(
        train={"length": "20 steps", "batch": 64},
        optim={"lr": 5e-3, "ema": 0.9},
        observe={"tensorboard": False},
    )
    with Run(spec, task, folder=tmp_path / "run", quiet=True) as run:
        for _ in run.steps():
            pass
        remembered = task.hardness.clone()
        run.evaluate()
        assert torch.equal(task.hardness, remembered)
        live = {name: tensor.clone() for name, tensor in run.model.named_parameters()}
    assert not torch.equal(remembered, torch.ones(10))
    saved = dict(surefoot.load(tmp_path / "run").named_parameters())
    assert all(not torch.equal(saved[name], tensor) for name, tensor in live.items())


def test_a_run_of_an_example_repeats_from_its_own_spec(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (first,) = run_script("own_optimizer", tmp_path, monkeypatch)
    (folder,) = tmp_path.glob("runs/*")
    spec = spec_file.read(str(folder / "spec.toml")).spec
    assert spec.task.use == f"{FOLDER / 'own_optimizer.py'}:OwnOptimizer"
    again = losses_of(None, spec, tmp_path / "again")
    assert again[0] == next(event.loss for event in first if event.kind == "step")  # type: ignore[attr-defined]


def test_every_example_is_short_says_how_to_run_it_and_is_tried_here() -> None:
    files = sorted(path for path in FOLDER.iterdir() if path.suffix == ".py")
    assert sorted(path.stem for path in files) == sorted([*TASKS, *LOOPS, *READERS, *LESSONS])
    for path in files:
        text = path.read_text()
        assert len(text.splitlines()) < LINES, path.name
        told = ast.get_docstring(ast.parse(text)) or ""
        assert f"python examples/{path.name}" in told
        if path.stem in TASKS:
            assert f"surefoot train examples/{path.name}:{TASKS[path.stem]}" in told
        assert 'if __name__ == "__main__":' in text
