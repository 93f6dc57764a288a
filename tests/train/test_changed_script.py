"""A resume that meets a changed script names each key with the old and the new value.

It also says what to type for each way to go on.
"""

from __future__ import annotations

import shlex
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader, TensorDataset

import surefoot
from surefoot.contract.events import Started
from surefoot.core.errors import RunFolderError
from surefoot.train.run import Run
from tests.train.small import FEW, Small, call, end_of, records, spec, write_task


@pytest.mark.parametrize(
    ("changed", "named", "words"),
    [
        ("optim.lr=0.5", "optim.lr is 0.5, was 0.001", ()),
        ("train.length=16 steps", "train.length is '16 steps', was '8 steps'", ()),
        ("train.seed=3", "train.seed is 3, was 0", ()),
        ('optim.no_decay=["0.*"]', "optim.no_decay is ('0.*',), was ()", ()),
        ("optim.name=sgd", "optim.name is 'sgd', was 'adamw'", ("--weights-only",)),
    ],
    ids=lambda value: value.partition("=")[0] if isinstance(value, str) and "=" in value else None,
)
def test_another_spec_is_refused_with_its_keys_and_with_commands_that_work_as_typed(
    changed: str,
    named: str,
    words: tuple[str, ...],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: Any,
) -> None:
    monkeypatch.chdir(tmp_path)
    task = write_task(tmp_path)
    few = (*FEW[2:], "--set", "train.length=8 steps") if changed.startswith("train.length") else FEW
    assert call(monkeypatch, "train", task, *few, "--run", "a", "--quiet") == 0
    capsys.readouterr()
    assert call(monkeypatch, "train", task, *few, "--set", changed, "--run", "a", "--quiet") == 2
    told = capsys.readouterr().err
    assert "a is the run of a different spec: " in told
    assert named in told
    assert "train from step 0: give another --run folder, or --fresh" in told
    commands = [
        line.partition(": surefoot ")[2] for line in told.splitlines() if ": surefoot " in line
    ]
    assert len(commands) == 2
    assert all(word in commands[1] for word in words)
    if not words:
        assert "weights" not in commands[1]
        assert ("extend" in told) == changed.startswith("train.length")
    # the run is over: train on
    shortened = ("--set", "train.length=12 steps") if not changed.startswith("train.length") else ()
    for command, more in ((commands[0], ()), (commands[1], shortened)):
        assert call(monkeypatch, *shlex.split(command), *more, "--quiet") == 0
    assert end_of(tmp_path / "NEW").outcome == "finished"


def test_the_call_that_is_named_for_python_goes_on_with_the_new_values(tmp_path: Path) -> None:
    for step in (Run(spec(4), Small(), folder=tmp_path / "a", quiet=True),):
        with step as run:
            for _ in run.steps():
                pass
    longer = spec(8, optim={"lr": 0.5})
    with (
        pytest.raises(RunFolderError) as caught,
        Run(longer, Small(), folder=tmp_path / "a", quiet=True),
    ):
        pass
    named = next(line for line in str(caught.value).splitlines() if "in Python" in line).partition(
        ": "
    )[2]
    run = eval(
        named.replace('"NEW"', "new"),
        {
            "Run": Run,
            "spec": longer,
            "task": Small(),
            "new": tmp_path / "new",
            "Start": surefoot.Start,
            "Path": Path,
        },
    )
    with run:
        assert run.step == 4
        for _ in run.steps():
            pass
    assert end_of(tmp_path / "new").step == 8


Build = Callable[[list[torch.nn.Parameter]], torch.optim.Optimizer]
FIRST: Build = lambda parameters: torch.optim.SGD(parameters, lr=0.1, momentum=0.9)  # noqa: E731


def loop(
    folder: Path, build: Build, batch: int = 2, scheduled: bool = False, by_hand: bool = False
) -> tuple[list[str], float]:
    """A pass of three steps that is left.

    Gives the notes of its start, and the learning rate that it stood at then.
    """
    model = torch.nn.Linear(1, 1)
    optimizer = build(list(model.parameters()))
    schedule = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)
    loader = DataLoader(TensorDataset(torch.ones(24, 1)), batch_size=batch)
    state = {"schedule": schedule} if scheduled else {}
    run = surefoot.attach(model=model, optimizer=optimizer, data=loader, folder=folder, state=state)
    rate = float(optimizer.param_groups[0]["lr"])
    for number, (x,) in enumerate(run.batches()):
        loss = model(x).square().mean()
        loss.backward()
        optimizer.step()
        run.step_done(loss)
        if scheduled:
            schedule.step()
        if by_hand:
            optimizer.param_groups[0]["lr"] *= 0.5
        if number == 2:
            break
    run.save()
    del run
    return list([each for each in records(folder) if isinstance(each, Started)][-1].notes), rate


CHANGES: dict[str, tuple[Build, int, str]] = {
    "the learning rate": (
        lambda p: torch.optim.SGD(p, lr=0.01, momentum=0.9),
        2,
        "optimizer.param_groups[0]['lr'] = 0.01",
    ),
    "the momentum": (
        lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.5),
        2,
        "optimizer.param_groups[0]['momentum'] = 0.5",
    ),
    "the weight decay": (
        lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, weight_decay=0.2),
        2,
        "optimizer.param_groups[0]['weight_decay'] = 0.2",
    ),
    "the batch size": (FIRST, 4, "data.batch_size = 4, but the previous attempt had 2"),
}


@pytest.mark.quick("the learning rate", "the batch size")
@pytest.mark.parametrize("what", CHANGES)
def test_attach_names_what_the_script_changed_and_keeps_what_was_saved(
    what: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    build, batch, named = CHANGES[what]
    loop(tmp_path / "a", FIRST)
    notes, rate = loop(tmp_path / "a", build, batch)
    told = [note for note in notes if "the script sets" in note]
    assert len(told) == 1
    assert named in told[0]
    assert named in capsys.readouterr().err
    assert rate == 0.1
    notes, _ = loop(tmp_path / "a", build, batch)  # said once: the attempt before gave the same
    assert not [note for note in notes if "the script sets" in note]


@pytest.mark.quick("scheduled")
@pytest.mark.parametrize("moved", ["scheduled", "by_hand"])
def test_a_rate_that_the_loop_itself_moves_is_no_change_of_the_script(
    moved: str, tmp_path: Path
) -> None:
    loop(tmp_path / "a", FIRST, **{moved: True})
    notes, rate = loop(tmp_path / "a", FIRST, **{moved: True})
    assert not [note for note in notes if "the script sets" in note]
    assert rate == pytest.approx(0.1 / 8)
