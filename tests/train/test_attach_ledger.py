"""The ledger of an attached loop.

Every sample once a pass over any stops, and what is not so is found.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import surefoot
from surefoot.contract import ledger, loop_ledger, manifest
from surefoot.contract.loop_ledger import Batch, LoopGuarantee, LoopLedger
from surefoot.core.errors import RunFolderError
from surefoot.train.attach.loop_keeper import LoopKeeper
from tests.train.test_attach_resume import DATA, Left, shuffled, train

PASSES, SAMPLES = 4, 20


def left_at(folder: Path, data: Callable[[], Any], *stops: int) -> loop_ledger.LoopConsumed:
    """A loop that is left after each of these steps, then comes to its end; what it consumed."""
    for stop in stops:
        with pytest.raises(Left):
            train(folder, data(), leave_at=stop)
    train(folder, data())
    return loop_ledger.check(folder)


@pytest.mark.quick("own")
@pytest.mark.parametrize("data", [shuffled, lambda: shuffled(own=True)], ids=["global", "own"])
def test_every_sample_is_consumed_once_a_pass_over_any_stops(
    data: Callable[[], Any], tmp_path: Path
) -> None:
    found = left_at(tmp_path / "a", data, 4, 8, 14)
    assert found.holds
    assert found.attempts == (1, 2, 3, 4)
    assert (found.num_passes, found.num_samples, found.num_batches) == (
        PASSES,
        PASSES * SAMPLES,
        PASSES * SAMPLES // 4,
    )
    train(tmp_path / "b", data(), save=None)
    ids = [
        [batch.ids for batch in ledger.consumed(loop_ledger.read(tmp_path / name))[0]]
        for name in "ab"
    ]
    assert ids[0] == ids[1]
    uses = loop_ledger.find_sample(tmp_path / "a", 7)
    assert [use.number_of_pass for use in uses] == [0, 1, 2, 3]


def test_the_recorded_samples_are_those_that_the_loop_was_given(tmp_path: Path) -> None:
    rows = torch.arange(SAMPLES, dtype=torch.float32)[:, None]
    model = nn.Linear(1, 1)
    data = DataLoader(TensorDataset(rows), batch_size=6, shuffle=True, num_workers=2)
    run = surefoot.attach(
        model=model,
        optimizer=torch.optim.SGD(model.parameters(), 0.1),
        data=data,
        folder=tmp_path / "a",
    )
    given = []
    for _ in range(2):
        for number, (batch,) in enumerate(run.batches()):
            given.append(tuple(batch[:, 0].int().tolist()))
            if number % 2:  # two batches a step
                run.step_done(0.0)
    run.close()
    batches = list(loop_ledger.read(tmp_path / "a"))
    assert [batch.ids for batch in batches] == given
    assert [batch.step for batch in batches] == [1, 1, 2, 2, 3, 3, 4, 4]
    assert loop_ledger.check(tmp_path / "a").holds


def test_a_batch_sampler_that_draws_a_sample_twice_promises_nothing(tmp_path: Path) -> None:
    drawn = torch.utils.data.RandomSampler(range(SAMPLES), replacement=True)
    data = DataLoader(
        shuffled().dataset, batch_sampler=torch.utils.data.BatchSampler(drawn, 4, drop_last=False)
    )
    found = left_at(tmp_path / "a", lambda: data, 4)
    assert not found.promise.once
    assert found.holds


def test_a_loader_that_comes_in_another_order_after_a_stop_is_told_and_found(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    class Unseeded(torch.utils.data.Sampler[int]):
        def __iter__(self) -> Any:
            return iter(random.SystemRandom().sample(range(SAMPLES), SAMPLES))

        def __len__(self) -> int:
            return SAMPLES

    def data() -> Any:
        return DataLoader(shuffled().dataset, batch_size=4, sampler=Unseeded())

    left_at(tmp_path / "a", data, 9)
    assert (
        "contain different samples than those that the run was trained on" in capfd.readouterr().err
    )


@pytest.mark.quick("by number")
@pytest.mark.parametrize("kind", [name for name in DATA if not name.startswith("shuffled")])
def test_of_other_data_the_places_of_the_batches_are_recorded(kind: str, tmp_path: Path) -> None:
    found = left_at(tmp_path / "a", DATA[kind], 4, 9)
    assert found.holds
    assert (found.promise, found.num_samples, found.num_batches) == (
        LoopGuarantee(digests=True),
        0,
        20,
    )


def test_a_commit_between_two_passes_goes_on_with_the_next_pass(tmp_path: Path) -> None:
    def loop(folder: Path, leave_after: int | None = None) -> Any:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(3, 2), nn.Dropout(0.3))
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        run = surefoot.attach(
            model=model, optimizer=optimizer, data=shuffled(own=True), folder=folder, save=None
        )
        for number in range(run.first_pass, 3):
            for x, y in run.batches():
                loss = nn.functional.cross_entropy(model(x), y)
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
                run.step_done(loss)
            run.save()
            if number == leave_after:
                run.session.telling.close()
                raise Left
        run.close()
        return model[0].weight.detach().clone()

    whole = loop(tmp_path / "whole")
    with pytest.raises(Left):
        loop(tmp_path / "left", leave_after=0)
    assert torch.equal(loop(tmp_path / "left"), whole)
    assert loop_ledger.check(tmp_path / "left").num_passes == 3


def test_no_commit_is_made_while_gradients_are_being_gathered(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # when the first of two batches was read
    monkeypatch.setattr(LoopKeeper, "is_due", lambda self, step: self.position % 2 == 1)
    model = nn.Linear(1, 1)
    data = DataLoader(TensorDataset(torch.zeros(SAMPLES, 1)), batch_size=5)
    run = surefoot.attach(
        model=model,
        optimizer=torch.optim.SGD(model.parameters(), 0.1),
        data=data,
        folder=tmp_path / "a",
    )
    for number, _ in enumerate(run.batches()):
        if number % 2:
            run.step_done(0.0)
    run.close()
    assert manifest.steps(tmp_path / "a") == [2]


# ---- what is found in a ledger

PLANTED: dict[str, tuple[str, Callable[[list[Batch]], Any]]] = {
    "a sample twice": (
        "twice",
        lambda rows: rows.__setitem__(3, rows[3]._replace(ids=(*rows[3].ids[:-1], rows[2].ids[0]))),
    ),
    "a sample that never came": (
        "lost",
        lambda rows: rows.__setitem__(4, rows[4]._replace(ids=rows[4].ids[:-1])),
    ),
    "an epoch that was left": ("left", lambda rows: rows.__setitem__(slice(3, 5), [])),
    "a batch that is gone": ("lost", lambda rows: rows.pop(2)),
    "a batch twice": ("twice", lambda rows: rows.insert(2, rows[2])),
    "a step that is gone": (
        "lost",
        lambda rows: rows.__setitem__(
            slice(6, None), [row._replace(step=row.step + 1) for row in rows[6:]]
        ),
    ),
}


@pytest.mark.parametrize("name", PLANTED)
def test_a_planted_fault_is_found(name: str, tmp_path: Path) -> None:
    rows = [
        Batch(
            number + 1, 1, number // 5, number % 5, tuple(range(number % 5 * 4, number % 5 * 4 + 4))
        )
        for number in range(12)
    ]
    kind, plant = PLANTED[name]
    for where in ("sound", "spoiled"):
        (tmp_path / where).mkdir()
        # the second attempt goes back to where the ninth row was written
        for generation, first in ((1, 0), (2, 8)):
            book = LoopLedger(
                tmp_path / where, LoopGuarantee(samples=SAMPLES, once=True, all=True), generation
            )
            for row in rows[first:]:
                book.add(row.step, row.number_of_pass, row.place, row.ids)
            book.sync()
            book.close()
        plant(rows)
    sound = loop_ledger.check(tmp_path / "sound")
    assert (sound.holds, sound.num_overruled, sound.num_batches) == (True, 4, 12)
    assert kind in {fault.kind for fault in loop_ledger.check(tmp_path / "spoiled").faults}


def test_half_a_batch_at_the_end_is_taken_away_by_the_next_attempt_and_other_data_are_refused(
    tmp_path: Path,
) -> None:
    promise = LoopGuarantee(samples=8, once=True, all=True)
    for generation, step in ((1, 1), (2, 2)):
        book = LoopLedger(tmp_path, promise, generation)
        book.add(step, 0, step - 1, range(step * 4 - 4, step * 4))
        book.sync()
        book.close()
        with (tmp_path / "ledger.bin").open("ab") as file:
            file.write(b"\3\0\0\0\1\0\0\0\0\0\0\0\2\0\0\0\4\0\0\0\7\0\0\0")
    assert [batch.step for batch in loop_ledger.read(tmp_path)] == [1, 2]
    assert loop_ledger.check(tmp_path).holds
    with pytest.raises(RunFolderError, match="was written for other data"):
        LoopLedger(tmp_path, LoopGuarantee(samples=9, once=True, all=True), 3)


class Shaken(torch.utils.data.Dataset[Any]):
    """Augments with torch's global stream."""

    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, number: int) -> Any:
        return number + torch.rand(3) / 4, number % 2


def stopped_and_whole(
    folder: Path, draws: Callable[[Any], object], make: Callable[[], Any], leave_at: int
) -> list[list[Any]]:
    """The batches of a loop over three passes that is left after a step, and of one that is not.

    `draws(loader)` is called in each step.
    """
    seen: list[list[Any]] = []
    for stops in ((), (leave_at,)):
        batches: list[Any] = []
        for stop in (*stops, None):
            torch.manual_seed(0)
            model, loader = nn.Linear(3, 2), make()
            optimizer = torch.optim.SGD(model.parameters(), 0.0)
            run = surefoot.attach(
                model=model,
                optimizer=optimizer,
                data=loader,
                folder=folder / f"{len(stops)}",
                save="1 steps" if stops else None,
            )
            del batches[run.step :]
            for _ in range(run.first_pass, 3):
                for x, _y in run.batches():
                    if run.step == stop:
                        break
                    batches.append(x.tolist())
                    draws(loader)
                    run.step_done(0.0)
                if run.step == stop:
                    break
            if stop is None:
                run.close()
            else:
                run.session.telling.close()
        seen.append(batches)
    return seen


def test_draws_of_the_loop_from_the_loaders_own_generator_are_resumed(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    def make() -> Any:
        return DataLoader(
            shuffled().dataset,
            batch_size=4,
            shuffle=True,
            generator=torch.Generator().manual_seed(3),
        )

    whole, stopped = stopped_and_whole(
        tmp_path, lambda loader: torch.rand(1, generator=loader.generator), make, 8
    )
    assert stopped == whole
    assert "read again" not in capfd.readouterr().err


def test_draws_of_the_model_raise_no_alarm_about_data_that_draw_too(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    whole, stopped = stopped_and_whole(
        tmp_path,
        lambda loader: torch.rand(2),
        lambda: DataLoader(Shaken(), batch_size=4, shuffle=True),
        8,
    )
    assert stopped == whole
    assert "read again" not in capfd.readouterr().err
