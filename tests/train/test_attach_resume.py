"""A loop of the user's own that was left anywhere goes on with the bits of one that never was."""

from __future__ import annotations

import contextlib
import gc
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import BatchSampler, DataLoader, RandomSampler, TensorDataset

import surefoot
from surefoot.contract import manifest
from surefoot.contract.events import Committed, Started, Step
from surefoot.core.errors import RunFolderError, TaskError
from surefoot.train.attach import AttachedLoop
from tests.train.small import end_of, records

PASSES, BATCHES = 4, 5


class Left(Exception):
    """As a kill: nothing is saved on the way out."""


class Placed:
    """A loader that saves and restores its own place."""

    def __init__(self) -> None:
        self.at = 0

    def __iter__(self) -> Any:
        while self.at < BATCHES:
            self.at += 1
            yield self._batch(self.at)
        self.at = 0

    def _batch(self, number: int) -> Any:
        generator = torch.Generator().manual_seed(number)
        return torch.randn(4, 3, generator=generator), torch.arange(4) % 2

    def state_dict(self) -> dict[str, int]:
        return {"at": self.at}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.at = state["at"]


class Numbered:
    """A loader whose batches can be read by number, in the same order each time."""

    def __len__(self) -> int:
        return BATCHES

    def __iter__(self) -> Any:
        return (self[number] for number in range(BATCHES))

    def __getitem__(self, number: int) -> Any:
        if number >= BATCHES:
            raise IndexError
        return Placed()._batch(number + 1)


def shuffled(*, own: bool = False) -> DataLoader[Any]:
    x, y = torch.randn(20, 3, generator=torch.Generator().manual_seed(1)), torch.arange(20) % 2
    return DataLoader(
        TensorDataset(x, y),
        batch_size=4,
        shuffle=True,
        generator=torch.Generator().manual_seed(2) if own else None,
    )


def shuffled_in_batches() -> DataLoader[Any]:
    dataset = shuffled().dataset
    sampler = RandomSampler(dataset, generator=torch.Generator().manual_seed(3))  # type: ignore[arg-type]
    return DataLoader(dataset, batch_sampler=BatchSampler(sampler, 4, drop_last=False))


DATA = {
    "shuffled by the global generator": shuffled,
    "shuffled by its own": lambda: shuffled(own=True),
    "shuffled by a batch sampler's own": shuffled_in_batches,
    "by number": Numbered,
    "that saves its own place": Placed,
}


def train(
    folder: Path, data: Any, *, leave_at: int | None = None, save: str | None = "3 steps"
) -> dict[str, Any]:
    """A plain loop with dropout, two optimizers and a schedule of epochs."""
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Linear(3, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Dropout(0.3), nn.Linear(8, 2)
    )
    first = torch.optim.AdamW(model[0].parameters(), lr=0.01)
    second = torch.optim.SGD(model[1:].parameters(), lr=0.1, momentum=0.9)
    schedule = torch.optim.lr_scheduler.StepLR(first, 1, gamma=0.5)
    run = surefoot.attach(
        model=model,
        optimizer=[first, second],
        data=data,
        folder=folder,
        every=1,
        save=save,
        state={"schedule": schedule},
    )
    for _ in range(run.first_pass, PASSES):
        for x, y in run.batches():
            loss = F.cross_entropy(model(x), y)
            for each in (first, second):
                each.zero_grad()
            loss.backward()
            for each in (first, second):
                each.step()
            run.step_done(loss)
            if run.step == leave_at:
                run.session.telling.close()  # as a kill would: nothing more is written
                raise Left
        schedule.step()
    run.close()
    return {**model.state_dict(), "rate": first.param_groups[0]["lr"], "draw": torch.rand(3)}


@pytest.mark.quick(
    "5-shuffled by the global generator", "10-that saves its own place", "9-shuffled by its own"
)
@pytest.mark.parametrize("kind", DATA)
@pytest.mark.parametrize("leave_at", [4, 5, 9, 10, 14])
def test_a_loop_that_was_left_ends_with_the_bits_of_one_that_was_not(
    kind: str, leave_at: int, tmp_path: Path
) -> None:
    whole = train(tmp_path / "whole", DATA[kind](), save=None)
    with pytest.raises(Left):
        train(tmp_path / "left", DATA[kind](), leave_at=leave_at)
    again = train(tmp_path / "left", DATA[kind]())
    for name, value in whole.items():
        assert torch.equal(torch.as_tensor(value), torch.as_tensor(again[name])), name
    starts = [
        event.first_step for event in records(tmp_path / "left") if isinstance(event, Started)
    ]
    assert starts == [1, (leave_at - 1) // 3 * 3 + 1]
    steps = {
        event.step: event.loss for event in records(tmp_path / "left") if isinstance(event, Step)
    }
    assert steps == {
        event.step: event.loss for event in records(tmp_path / "whole") if isinstance(event, Step)
    }


@pytest.mark.parametrize("leave_at", [5, 8])
def test_passes_that_were_left_by_break_lie_behind_as_whole_ones_do(
    leave_at: int, tmp_path: Path
) -> None:
    def loop(
        folder: Path, leave_at: int | None = None, save: str | None = "2 steps"
    ) -> tuple[int, list[float]]:
        torch.manual_seed(0)
        model = nn.Linear(3, 2)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        run = surefoot.attach(
            model=model, optimizer=optimizer, data=shuffled(), folder=folder, save=save
        )
        for _ in range(run.first_pass, PASSES):
            for x, y in run.batches():
                loss = F.cross_entropy(model(x), y)
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
                run.step_done(loss)
                if run.step == leave_at:
                    run.session.telling.close()
                    raise Left
                if run.step % 3 == 0:
                    break
        run.close()
        return run.step, model.weight.flatten().tolist()

    whole = loop(tmp_path / "whole", save=None)
    assert whole[0] == 3 * PASSES
    with pytest.raises(Left):
        loop(tmp_path / "left", leave_at)
    assert loop(tmp_path / "left") == whole


@pytest.mark.parametrize(
    ("kind", "state", "told"),
    [
        (torch.optim.Adam, True, "'optimizer', which was AdamW: the loop passes Adam"),
        (torch.optim.AdamW, False, "'schedule' as StepLR: the loop gives nothing"),
    ],
)
def test_a_loop_that_gives_less_than_was_saved_or_another_kind_is_refused(
    kind: type[torch.optim.Optimizer], state: bool, told: str, tmp_path: Path
) -> None:
    def begin(kind: Any, *, state: bool) -> AttachedLoop:
        model = nn.Linear(3, 2)
        optimizer = kind(model.parameters(), lr=0.1)
        more = {"schedule": torch.optim.lr_scheduler.StepLR(optimizer, 1)} if state else {}
        return surefoot.attach(
            model=model, optimizer=optimizer, data=Numbered(), folder=tmp_path / "a", state=more
        )

    run = begin(torch.optim.AdamW, state=True)
    next(run.batches())
    run.step_done(0.0)
    run.save()
    run.session.telling.close()
    with pytest.raises(RunFolderError, match=told):
        begin(kind, state=state)
    again = begin(torch.optim.AdamW, state=True)
    assert again.step == 1
    again.close()


@pytest.mark.parametrize(
    ("way", "told"),
    [("exit", ("failed", 143)), ("dropped", ("stopped", 0)), ("break", ("stopped", 0))],
)
def test_a_loop_that_was_left_in_its_own_process_goes_on_in_its_folder(
    way: str, told: tuple[str, int], tmp_path: Path
) -> None:
    model = nn.Linear(3, 2)

    def begin() -> AttachedLoop:
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        return surefoot.attach(
            model=model, optimizer=optimizer, data=Numbered(), folder=tmp_path / "a", save="2 steps"
        )

    def leave(run: AttachedLoop) -> None:
        for x, y in run.batches():
            run.step_done(F.cross_entropy(model(x), y))
            if run.step == 3 and way == "break":
                break
            if run.step == 3:
                raise SystemExit(143)  # as a handler of SIGTERM does

    if way == "dropped":
        with contextlib.suppress(SystemExit):
            leave(begin())
        gc.collect()
    else:
        with contextlib.suppress(SystemExit), begin() as run:
            leave(run)
    end = end_of(tmp_path / "a")
    assert (end.outcome, end.exit_code) == told
    with begin() as again:
        assert (again.folder, again.step) == (tmp_path / "a", 3 if way == "break" else 2)


def test_commits_stand_between_steps_the_last_at_the_end(tmp_path: Path) -> None:
    train(tmp_path / "a", Numbered(), save="8 steps")
    assert manifest.steps(tmp_path / "a") == [8, 16, 20]
    assert [event.step for event in records(tmp_path / "a") if isinstance(event, Committed)] == [
        8,
        16,
        20,
    ]


@pytest.mark.parametrize(
    ("state", "told"),
    [({"model": nn.Linear(1, 1)}, "is a reserved name"), ({"count": 3}, "cannot be restored")],
)
def test_a_state_that_cannot_be_kept_is_refused(
    state: dict[str, Any], told: str, tmp_path: Path
) -> None:
    model = nn.Linear(3, 2)
    with pytest.raises(TaskError, match=told):
        surefoot.attach(
            model=model,
            optimizer=torch.optim.SGD(model.parameters(), 0.1),
            data=Numbered(),
            folder=tmp_path / "a",
            state=state,
        )
    assert not (tmp_path / "a").exists()


def test_a_model_with_an_expanded_and_a_conjugated_buffer_goes_on(tmp_path: Path) -> None:
    for number in range(2):
        model = nn.Linear(3, 2)
        model.register_buffer("grid", torch.ones(1).mul(2).expand(3))
        model.register_buffer("turned", torch.tensor([1 + 2j]).conj())
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        with surefoot.attach(
            model=model, optimizer=optimizer, data=shuffled(), folder=tmp_path / "run"
        ) as run:
            assert run.step == number
            run.step_done(0.0)
            run.save()
            run.session.telling.close()
        assert model.turned.tolist() == [1 - 2j]


@pytest.mark.parametrize("kind", ["loader", "list"])
def test_data_that_are_made_at_random_without_a_seed_are_named_as_the_cause_of_a_difference(
    kind: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for attempt in range(2):
        rows = torch.randn(20, 3, generator=torch.Generator().manual_seed(attempt))
        data: Any = DataLoader(list(rows), 4) if kind == "loader" else list(rows.split(4))
        model = nn.Linear(3, 2)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        run = surefoot.attach(
            model=model, optimizer=optimizer, data=data, folder=tmp_path, save="1 steps"
        )
        for batch in run.batches():
            run.step_done(model(batch).square().mean())
            if run.step == 3:
                break
        run.session.lock.release()
    printed = " ".join(capsys.readouterr().err.split())
    assert "call torch.manual_seed(0) before the data are created" in printed


@pytest.mark.quick("()-Numbered", "(5,)-Placed", "(1, 2, 8)-shuffled", "(1, 2, 8)-Numbered")
@pytest.mark.parametrize("data", [Placed, Numbered, shuffled], ids=lambda each: each.__name__)
@pytest.mark.parametrize("ways", [(), (4,), (5,), (1, 2, 8)], ids=str)
def test_a_loop_that_counts_its_batches_resumes_at_the_count(
    ways: tuple[int, ...], data: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The usual accumulation over 2 batches, with a shorter last step of each epoch of 5."""

    def train(folder: Path, stop: int | None, save: str | None = "1 step") -> list[torch.Tensor]:
        torch.manual_seed(0)
        model = nn.Linear(3, 2)
        optimizer = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9)
        with surefoot.attach(
            model=model, optimizer=optimizer, data=data(), folder=folder, save=save
        ) as run:
            for _ in range(run.first_pass, 3):
                for number, (x, y) in enumerate(run.batches(), run.first_batch):
                    loss = F.cross_entropy(model(x), y)
                    loss.backward()
                    if number % 2 == 1 or number + 1 == BATCHES:
                        optimizer.step()
                        optimizer.zero_grad()
                        run.step_done(loss.detach())
                        if run.step == stop:
                            raise Left
        assert run.first_batch == 0
        return [each.detach().clone() for each in model.parameters()]

    whole = train(tmp_path / "whole", None, save=None)
    for stop in ways:
        with contextlib.suppress(Left):
            train(tmp_path / "cut", stop)
    capsys.readouterr()
    made = train(tmp_path / "cut", None)
    assert all(torch.equal(one, other) for one, other in zip(whole, made, strict=True))
    said = "enumerate(run.batches(), run.first_batch)" in capsys.readouterr().err
    # the last step before each stop was within an epoch, except that of 4, which ended one
    assert said == (ways not in [(), (4,)])
