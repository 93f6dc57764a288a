"""The kinds of training of examples/kinds, each held against a plain PyTorch loop.

Also against its microbatches, two ranks, and a resumed run.
"""

from __future__ import annotations

import ast
import functools
import os
import runpy
import signal
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

from surefoot import Run, RunSpec
from surefoot.contract import events
from surefoot.contract.events import Evaluated
from surefoot.core.errors import TaskError
from tests.examples import loaded, plain
from tests.world.ranks import run_ranks

FOLDER = loaded.FOLDER / "kinds"
CODE_LINES = 60  # of each, without blank lines, docstrings and imports
STEPS, LEFT = 6, 3  # of the comparisons
TASKS = {
    "diffusion": "Diffusion",
    "graphs": "Hubs",
    "reinforcement": "Balance",
    "contrastive": "Views",
    "ctc": "Reading",
    "wgan": "Wgan",
    "detection": "Boxes",
    "physics": "Equation",
    "truncated": "Echo",
    "swa": "Averaged",
    "sparse_embeddings": "Words",
    "complex_weights": "Filter",
}
# the metric, what the last evaluation must be better than, and what an untrained model reaches
LEARNED = {
    "diffusion": ("<", 0.6),  # 1 for no noise found
    "graphs": (">", 0.9),
    "reinforcement": (">", 45),  # of 60; about 20 at random
    "contrastive": (">", 0.6),  # chance 0.1
    "ctc": (">", 0.8),
    "wgan": ("<", 0.5),  # 1 for points in the middle
    "detection": (">", 0.6),
    "physics": ("<", 0.05),  # 0.64 for u = 0
    "truncated": (">", 0.9),  # 0.81 without the state
    "swa": (">", 0.9),
    "sparse_embeddings": (">", 0.7),  # chance 0.5
    "complex_weights": ("<", 0.01),
}
LONG = ("reinforcement",)  # whose comparisons but that with the plain loop are slow
# what a resumed run has beside its weights, or a kind of weights, one of each
QUICK = ("contrastive", "wgan", "truncated", "swa", "sparse_embeddings", "complex_weights")
WHOLE_ONLY = ("contrastive", "swa")  # a loss over pairs; a BatchNorm sees its microbatch


@pytest.fixture(autouse=True)
def has_its_extras() -> None:
    pytest.importorskip("sklearn", reason="needs scikit-learn: the extra demo")


def load(name: str) -> ModuleType:
    return loaded.load(f"kinds/{name}")


def spec_of(kind: ModuleType, **train: Any) -> RunSpec:
    tables = kind.SPEC.as_tables()
    tables["train"] = {**tables["train"], "length": f"{STEPS} steps", "threads": 1, **train}
    tables["data"] = {**tables.get("data", {}), "shuffle": False}
    if not hasattr(getattr(kind, TASKS[Path(kind.__file__ or "").stem]), "schedule"):
        tables["schedule"] = {"name": "constant"}
    return RunSpec(
        **{**tables, "evaluate": {"every": "9 epochs"}, "observe": {"tensorboard": False}}
    )


def train(
    name: str,
    folder: Path,
    *,
    until: int | None = None,
    killed: bool = False,
    evaluates: bool = False,
    **given: Any,
) -> plain.Trained:
    """The losses and what was trained.

    `until` leaves the run after that step, or has it killed there.

    With `evaluates` the score is the last of the losses.
    """
    kind = load(name)
    task = getattr(kind, TASKS[name])()
    losses = []
    with Run(spec_of(kind, **given), task, folder=folder, quiet=True) as run:
        for report in run.steps():
            if hasattr(kind, "after_step"):
                kind.after_step(run, task, STEPS)
            losses.append(float(report.loss or 0.0))
            if run.step == until and killed:
                run.save()
            if run.step == (until or 0) + killed and killed:
                os.kill(os.getpid(), signal.SIGKILL)
            if run.step == until and not killed:
                break
        if evaluates:
            losses.append(float(run.evaluate().value or 0.0))
        found = dict(run.model.named_parameters())
        if hasattr(task, "average"):
            found |= {f"average.{key}": each for key, each in task.average.named_parameters()}
        return losses, {key: each.detach().clone() for key, each in found.items()}


def assert_close(found: plain.Trained, expected: plain.Trained, *, rel: float = 1e-4) -> None:
    assert found[0] == pytest.approx(expected[0], rel=rel, abs=1e-6)
    assert found[1].keys() == expected[1].keys()
    for key, value in expected[1].items():
        torch.testing.assert_close(found[1][key], value.detach(), rtol=1e-3, atol=1e-3, msg=key)


def assert_same_bits(found: plain.Trained, expected: plain.Trained) -> None:
    assert found[0] == expected[0][-len(found[0]) :]
    for key, value in expected[1].items():
        assert torch.equal(found[1][key], value), key


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """What a kind trains to, once."""
    made: dict[str, plain.Trained] = {}

    def find(name: str) -> plain.Trained:
        if name not in made:
            made[name] = train(name, tmp_path_factory.mktemp(name) / "run")
        return made[name]

    return find


@pytest.mark.parametrize("name", TASKS)
def test_a_kind_trains_as_a_plain_loop_does(name: str, whole: Any) -> None:
    kind = load(name)
    assert_close(whole(name), plain.train(name, kind, getattr(kind, TASKS[name])(), STEPS))


@pytest.mark.quick(*set(TASKS) - {*WHOLE_ONLY, *LONG, "ctc", "detection"})
@pytest.mark.parametrize("name", [name for name in TASKS if name not in WHOLE_ONLY])
def test_a_kind_trains_in_microbatches_as_whole(name: str, whole: Any, tmp_path: Path) -> None:
    assert_close(
        train(name, tmp_path / "run", microbatch=load(name).SPEC.train.batch // 4), whole(name)
    )


def test_a_contrastive_loss_is_refused_with_microbatches(tmp_path: Path) -> None:
    with pytest.raises(TaskError, match="is not additive and cannot be split"):
        train("contrastive", tmp_path / "run", microbatch=32)


@pytest.mark.quick(*QUICK)
@pytest.mark.parametrize("name", TASKS)
def test_a_kind_that_was_left_continues_to_the_same_bits(
    name: str, whole: Any, tmp_path: Path
) -> None:
    train(name, tmp_path / "run", until=LEFT)
    assert_same_bits(train(name, tmp_path / "run"), whole(name))


def on_two_ranks(name: str, folder: Path, **given: Any) -> list[plain.Trained]:
    """What `train` gives on each of two ranks."""

    def job(rank: int) -> None:
        torch.save(train(name, folder / "run", **given), folder / f"{rank}.pt")

    (folder / "run").mkdir(parents=True, exist_ok=True)
    assert run_ranks(2, job, folder / "ranks") == [None, None]
    return [torch.load(folder / f"{rank}.pt") for rank in range(2)]


@pytest.mark.slow
@pytest.mark.parametrize("name", sorted(set(TASKS) - {"swa"}))
def test_a_kind_trains_and_scores_on_two_ranks_as_on_one(name: str, tmp_path: Path) -> None:
    expected = train(name, tmp_path / "one", evaluates=True)
    for found in on_two_ranks(name, tmp_path, evaluates=True):
        assert_close(found, expected)


@pytest.mark.slow
def test_an_average_is_the_same_where_ranks_share_the_statistics_of_batchnorm(
    tmp_path: Path,
) -> None:
    expected = train("swa", tmp_path / "one", evaluates=True)
    for found in on_two_ranks("swa", tmp_path, evaluates=True, batchnorm="sync"):
        assert_close(found, expected)


def test_an_average_is_the_same_in_microbatches_without_batchnorm(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.nn, "BatchNorm1d", functools.partial(torch.nn.GroupNorm, 8))
    whole, parts = (train("swa", tmp_path / str(size), microbatch=size) for size in (64, 16))
    assert_close(parts, whole)


@pytest.mark.slow
@pytest.mark.parametrize("name", TASKS)
def test_two_ranks_that_were_left_continue_to_the_same_bits(name: str, tmp_path: Path) -> None:
    expected = on_two_ranks(name, tmp_path / "whole")
    on_two_ranks(name, tmp_path / "left", until=LEFT)
    for found, each in zip(on_two_ranks(name, tmp_path / "left"), expected, strict=True):
        assert_same_bits(found, each)


@pytest.mark.slow
@pytest.mark.parametrize("name", TASKS)
def test_a_kind_that_was_killed_continues_to_the_same_bits(
    name: str, whole: Any, tmp_path: Path
) -> None:
    pid = os.fork()
    if not pid:
        try:
            train(name, tmp_path / "run", until=LEFT, killed=True)
        finally:
            os._exit(1)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == -signal.SIGKILL
    assert_same_bits(train(name, tmp_path / "run"), whole(name))


@pytest.mark.slow
@pytest.mark.parametrize("name", TASKS)
def test_a_kind_runs_as_a_script_and_learns(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    runpy.run_path(str(FOLDER / f"{name}.py"), run_name="__main__")
    (folder,) = tmp_path.glob("runs/*")
    last = [event for event in events.read(folder) if isinstance(event, Evaluated)][-1]
    (value, (better, bound)) = last.metrics[last.score], LEARNED[name]
    assert value is not None
    assert value < bound if better == "<" else value > bound, value


def test_every_kind_is_short_and_says_how_to_run_it() -> None:
    files = sorted(FOLDER.glob("*.py"))
    assert [path.stem for path in files] == sorted(TASKS)
    for path in files:
        tree, text = ast.parse(path.read_text()), path.read_text()
        told = ast.get_docstring(tree) or ""
        assert f"python examples/kinds/{path.name}" in told
        assert f"surefoot train examples/kinds/{path.name}:{TASKS[path.stem]}" in told
        assert 'if __name__ == "__main__":' in text
        assert 20 <= count_code_lines(tree, text) <= CODE_LINES, path.name


def count_code_lines(tree: ast.Module, text: str) -> int:
    """Lines that are neither blank, nor imports, nor of a docstring."""
    left_out = {
        line
        for node in ast.walk(tree)
        if isinstance(node, ast.Import | ast.ImportFrom)
        or (isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant))
        for line in range(node.lineno, (node.end_lineno or node.lineno) + 1)
    }
    return sum(
        bool(line.strip()) and number not in left_out
        for number, line in enumerate(text.splitlines(), 1)
    )
