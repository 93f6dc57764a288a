"""What a loop of one's own saves by hand, changes and saves again is what is on the disk.

A fork that is killed is a fork, or no run.
"""

from __future__ import annotations

import itertools
import os
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from surefoot.components.checkpoint import Commit
from surefoot.contract import ledger, manifest
from surefoot.contract.events import Committed, Started
from surefoot.core.errors import RunFolderError
from surefoot.runtime.staging import Staging
from surefoot.train.resume.start import Start
from surefoot.train.run import Run
from tests.train.small import Small, records, spec

BIAS = "4.bias"


def saved(folder: Path, step: int) -> list[float]:
    """The numbers of the last bias as the commit of `step` has them."""
    held: Tensor = Commit(folder, step).read("model.safetensors")[BIAS]
    return held.tolist()


def fill(run: Run, value: float) -> None:
    with torch.no_grad():
        run.model.get_parameter(BIAS).fill_(value)


@pytest.mark.parametrize("by_hand", [True, False], ids=["saved by hand", "saved by the run"])
@pytest.mark.parametrize("first", [Run.save, Run.evaluate], ids=["saved", "the best so far"])
def test_a_step_that_was_saved_before_is_saved_again_where_it_has_changed(
    first: Any, by_hand: bool, tmp_path: Path
) -> None:
    with Run(spec(3), Small(), folder=tmp_path / "a", quiet=True) as run:
        for report in run.steps():
            if report.step == 3:
                first(run)
                fill(run, 7.0)
                if by_hand:
                    run.save()
    assert saved(tmp_path / "a", 3) == [7.0] * 3
    assert sum(isinstance(event, Committed) for event in records(tmp_path / "a")) == 2


def test_a_step_is_saved_once_where_nothing_has_changed_and_before_the_first_step_when_asked_for(
    tmp_path: Path,
) -> None:
    with Run(
        spec(3, checkpoint={"every": "3 steps"}), Small(), folder=tmp_path / "a", quiet=True
    ) as run:
        run.save()
        for report in run.steps():
            if report.step == 3:
                run.evaluate()
    assert manifest.steps(tmp_path / "a") == [0, 3]
    assert sum(isinstance(event, Committed) for event in records(tmp_path / "a")) == 2


def test_the_best_weights_are_those_that_were_evaluated_whatever_the_loop_does_with_them_next(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    copy = Staging.copy

    def slow(self: Staging) -> dict[str, Tensor]:
        time.sleep(0.3)
        return copy(self)

    monkeypatch.setattr(Staging, "copy", slow)
    with Run(spec(3), Small(), folder=tmp_path / "a", quiet=True) as run:
        for report in run.steps():
            if report.step == 2:
                run.evaluate()
                evaluated = run.model.get_parameter(BIAS).tolist()
                run.model.get_parameter(BIAS).data.fill_(7.0)  # which no counter of versions sees
    assert saved(tmp_path / "a", 2) == evaluated != [7.0] * 3


@pytest.mark.quick("4")
@pytest.mark.parametrize("stride", [1, 4])
def test_a_fork_that_is_killed_as_it_begins_is_a_fork_or_no_run(
    stride: int, tmp_path: Path
) -> None:
    """The process dies at each sync in turn, or at each fourth, until it lives to the end."""
    old, how = tmp_path / "old", spec(9, checkpoint={"every": "3 steps"})
    with Run(spec(6, checkpoint={"every": "3 steps"}), Small(), folder=old, quiet=True) as run:
        for _ in run.steps():
            pass
    was_fork = []
    for count in itertools.count(0, stride):
        new = tmp_path / f"new-{count}"
        child = os.fork()
        if child == 0:
            _die_at_a_sync(count, Run(how, Small(), folder=new, quiet=True, start=Start(old, 3)))
        if os.waitpid(child, 0)[1] == 0:
            break
        is_fork = bool(manifest.steps(new))
        was_fork.append(is_fork)
        if not is_fork and (new / "spec.toml").exists():
            with pytest.raises(
                RunFolderError, match="a fork that was interrupted before its first checkpoint"
            ):
                Run(how, Small(), folder=new, quiet=True).__enter__()
        again = Run(how, Small(), folder=new, quiet=True, start=None if is_fork else Start(old, 3))
        with again:
            assert next(again.steps()).step == 4
        parents = [event.parent for event in records(new) if isinstance(event, Started)]
        assert all(parent["step"] == 3 for parent in parents)
        assert [row.step for row in ledger.consumed(ledger.read(new))[0]] == [1, 2, 3, 4]
    assert was_fork == sorted(was_fork)
    assert {True, False} == set(was_fork)


def _die_at_a_sync(count: int, run: Run) -> None:
    sync, calls = os.fsync, itertools.count()

    def die(descriptor: int) -> None:
        if next(calls) == count:
            os._exit(9)
        sync(descriptor)

    try:
        os.fsync = die  # this process is a child that nobody looks at again
        with run:
            os.fsync = sync
    finally:
        os._exit(0)
