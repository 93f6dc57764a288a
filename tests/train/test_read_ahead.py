"""Loops that read batches ahead of their steps: resumed exactly if declared, else noticed."""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader

import surefoot
from surefoot.contract import events, ledger, loop_ledger
from surefoot.core.errors import InputError
from tests.train.small import call
from tests.train.test_attach_resume import Left, Placed, shuffled

PASSES, BATCHES = 3, 5


def look_ahead(batches: Iterator[Any], ahead: int = 1) -> Iterator[Any]:
    """Yield the batches as a look-ahead or a prefetcher does: `ahead` more are read before."""
    held: deque[Any] = deque()
    for batch in batches:
        held.append(batch)
        if len(held) > ahead:
            yield held.popleft()
    yield from held


class Augmented(torch.utils.data.Dataset[Any]):
    """Draws from torch's global stream in the process of the loop."""

    def __len__(self) -> int:
        return 20

    def __getitem__(self, number: int) -> Any:
        return number + torch.rand(3), number % 2


class Drawing(Placed):
    """Saves its own position, and draws from Python's global stream."""

    def _batch(self, number: int) -> Any:
        x, y = super()._batch(number)
        return x + random.random(), y


DATA: dict[str, Callable[[], Any]] = {
    "shuffled": shuffled,
    "shuffled by its own generator": lambda: shuffled(own=True),
    "augmented": lambda: DataLoader(Augmented(), batch_size=4, shuffle=True),
    "workers": lambda: DataLoader(shuffled().dataset, batch_size=4, shuffle=True, num_workers=2),
    "with a position": Placed,
    "with a position, drawing": Drawing,
    "a list": lambda: list(shuffled()),
}


def train(
    folder: Path,
    data: Callable[[], Any],
    *,
    ahead: int,
    declared: int | None,
    per_step: int = 1,
    leave_at: int | None = None,
    save: str = "1 steps",
) -> tuple[torch.Tensor, dict[int, list[float]]]:
    """Train with `ahead` batches read ahead; return the weights, and what each step consumed."""
    torch.manual_seed(0)
    random.seed(0)
    model = nn.Sequential(nn.Linear(3, 2), nn.Dropout(0.3))
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    given: dict[int, list[float]] = {}
    run = surefoot.attach(model=model, optimizer=optimizer, data=data(), folder=folder, save=save)
    for _ in range(run.first_pass, PASSES):
        batches, sums = run.batches(ahead=declared), list[float]()
        for x, y in look_ahead(batches, ahead) if ahead else batches:
            sums.append(float(x.double().sum()))
            loss = F.cross_entropy(model(x), y)
            loss.backward()
            if len(sums) % per_step:
                continue
            optimizer.step()
            optimizer.zero_grad()
            run.step_done(loss)
            given[run.step], sums = sums, []
            if run.step == leave_at:
                run.session.telling.close()
                raise Left
        if sums:
            optimizer.step()
            optimizer.zero_grad()
            run.step_done(loss)
            given[run.step] = sums
            if run.step == leave_at:
                run.session.telling.close()
                raise Left
    run.close()
    return model[0].weight.detach().clone(), given


@pytest.mark.quick(
    "1-1-workers",
    "1-2-shuffled by its own generator",
    "1-1-augmented",
    "2-2-with a position, drawing",
    "2-1-a list",
)
@pytest.mark.parametrize("kind", DATA)
@pytest.mark.parametrize(("ahead", "per_step"), [(1, 1), (2, 1), (1, 2), (2, 2)])
def test_a_declared_read_ahead_resumes_exactly(
    kind: str, ahead: int, per_step: int, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    def run(folder: str, leave_at: int | None = None) -> Any:
        return train(
            tmp_path / folder,
            DATA[kind],
            ahead=ahead,
            declared=ahead,
            per_step=per_step,
            leave_at=leave_at,
            # what no later run goes on from is saved seldom: saves take most of the time
            save="1 steps" if leave_at else "5 steps",
        )

    weights, given = run("whole")
    for stop in (2, 5, 7):
        with pytest.raises(Left):
            run("left", stop)
    again, last = run("left")
    assert torch.equal(again, weights)
    assert last == {step: given[step] for step in last}
    rows = [
        [(row.step, row.number_of_pass, row.place, row.ids) for row in kept]
        for kept in (
            ledger.consumed(loop_ledger.read(tmp_path / name))[0] for name in ("whole", "left")
        )
    ]
    assert rows[0] == rows[1]
    steps = [-(-(batch % BATCHES + 1) // per_step) for batch in range(PASSES * BATCHES)]
    per_epoch = -(-BATCHES // per_step)
    assert [row[0] for row in rows[0]] == [
        step + number // BATCHES * per_epoch for number, step in enumerate(steps)
    ]
    for name in ("whole", "left"):
        assert loop_ledger.check(tmp_path / name).holds
        assert not faults_of(tmp_path / name)
    assert "(ahead=" not in capfd.readouterr().err


def faults_of(folder: Path) -> list[events.Fault]:
    return [
        each
        for each in events.read(folder, events.Fault)
        if isinstance(each, events.Fault) and each.fault == "read-ahead"
    ]


def test_the_first_batch_of_a_resumed_look_ahead_is_the_one_in_hand(tmp_path: Path) -> None:
    with pytest.raises(Left):
        train(tmp_path / "a", shuffled, ahead=1, declared=1, leave_at=3)
    model = nn.Sequential(nn.Linear(3, 2), nn.Dropout(0.3))
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    run = surefoot.attach(
        model=model, optimizer=optimizer, data=shuffled(), folder=tmp_path / "a", save=None
    )
    assert (run.step, run.first_batch) == (2, 2)
    # the loop need not read ahead any more
    assert len(list(run.batches())) == BATCHES - 2


@pytest.mark.quick("2-1", "1-2")
@pytest.mark.parametrize(("ahead", "per_step"), [(1, 1), (2, 1), (1, 2)])
def test_an_undeclared_read_ahead_is_noticed_and_never_certified(
    ahead: int,
    per_step: int,
    tmp_path: Path,
    capfd: pytest.CaptureFixture[str],
) -> None:
    def run(folder: str, leave_at: int | None = None) -> Any:
        return train(
            tmp_path / folder,
            shuffled,
            ahead=ahead,
            declared=None,
            per_step=per_step,
            leave_at=leave_at,
        )

    words = f"the loop reads {'1 batch' if ahead == 1 else '2 batches'} ahead of its steps"
    hint = f"run.batches(ahead={ahead})"
    run("whole")
    told = capfd.readouterr().err
    assert (told.count(words), told.count(hint)) == (1, 1)
    assert loop_ledger.check(tmp_path / "whole").holds  # it lost nothing
    assert ledger_of(tmp_path / "whole") == 0
    capfd.readouterr()
    with pytest.raises(Left):
        run("left", 2)
    run("left")
    told = capfd.readouterr().err
    assert words in told
    assert hint in told
    assert ledger_of(tmp_path / "left") == 1
    told = capfd.readouterr().out
    assert "read ahead" in told
    assert "exactly once:" not in told


def ledger_of(folder: Path) -> int:
    with pytest.MonkeyPatch.context() as patch:
        return call(patch, "ledger", str(folder))


def test_a_likely_read_ahead_is_reported_when_the_loop_resumes(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    for stop in (4, 6):
        with pytest.raises(Left):
            train(tmp_path / "a", shuffled, ahead=1, declared=None, leave_at=stop)
    told = capfd.readouterr().err
    assert "the first step of the epoch read 1 batch more than each later step" in told
    assert "run.batches(ahead=1)" in told
    assert ledger_of(tmp_path / "a") == 1


@pytest.mark.parametrize(("ahead", "declared"), [(0, 1), (1, 2), (2, 1)])
def test_a_wrong_declaration_is_noticed(
    ahead: int, declared: int, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    train(tmp_path / "a", shuffled, ahead=ahead, declared=declared)
    told = capfd.readouterr().err
    assert f"{'1 batch' if ahead == 1 else f'{ahead} batches'} ahead of its steps, not" in told
    assert f"run.batches(ahead={ahead})" in told


@pytest.mark.parametrize("declared", [-1, 1.0, True])
def test_a_declaration_that_is_no_number_of_batches_is_refused(
    declared: Any, tmp_path: Path
) -> None:
    with pytest.raises(InputError, match="is not a number of batches"):
        train(tmp_path / "a", shuffled, ahead=0, declared=declared)


# batches before each step of an epoch of five: 0 is a second step on one batch
PLAIN = {
    "one each": [1, 1, 1, 1, 1],
    "accumulation": [2, 2, 1],
    "variable accumulation": [2, 1, 2],
    "a skipped batch": [1, 2, 1, 1],
    "two steps on each batch": [1, 0, 1, 0, 1, 0, 1, 0, 1, 0],
    "two steps on the last batch": [1, 1, 1, 1, 1, 0],
}


@pytest.mark.quick("variable accumulation", "a skipped batch", "two steps on the last batch")
@pytest.mark.parametrize("kind", PLAIN)
def test_a_loop_that_does_not_read_ahead_raises_no_alarm(
    kind: str, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    num_steps = len(PLAIN[kind])
    stops = () if 0 in PLAIN[kind] else (num_steps - 1, num_steps + 2)
    for stop in (*stops, None):
        model = nn.Linear(3, 2)
        torch.manual_seed(0)
        run = surefoot.attach(
            model=model,
            optimizer=torch.optim.SGD(model.parameters(), 0.1),
            data=shuffled(),
            folder=tmp_path / "a",
            save="1 steps",
        )
        for _ in range(run.first_pass, 2):
            batches = iter(run.batches())
            for count in PLAIN[kind][run.step % num_steps :]:
                if run.step == stop:
                    break
                for _ in range(count):
                    next(batches)
                run.step_done(0.0)
            else:
                assert next(batches, None) is None
            if run.step == stop:
                break
        if stop is None:
            run.close()
        else:
            run.session.telling.close()
    assert "(ahead=" not in capfd.readouterr().err
    assert loop_ledger.check(tmp_path / "a").faults == ()
    assert ledger_of(tmp_path / "a") == 0
