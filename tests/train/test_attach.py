"""`attach` around a plain loop: what it records, and that it leaves the loop alone."""

from __future__ import annotations

import errno
import itertools
import os
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import surefoot
from surefoot.components.observe import journal
from surefoot.contract import events
from surefoot.contract.events import Ended, Event, Started, Step
from surefoot.core.errors import DataError, InputError, RunFolderError, TaskError
from surefoot.train.attach import AttachedLoop
from surefoot.train.attach.arguments import find_guarantee

ROOT = Path(__file__).resolve().parents[2]


class Loop:
    """A plain loop over 40 rows in batches of 16: 16, 16 and 8."""

    def __init__(self, seed: int = 0) -> None:
        torch.manual_seed(seed)
        inputs = torch.randn(40, 4)
        self.data = DataLoader(
            TensorDataset(inputs, inputs[:, :3].argmax(1)), batch_size=16, shuffle=True
        )
        self.model = nn.Linear(4, 3)
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.5)

    def attach(self, folder: Path, **others: Any) -> AttachedLoop:
        return surefoot.attach(
            model=self.model, optimizer=self.optimizer, data=self.data, folder=folder, **others
        )

    def train_on(self, batch: tuple[Tensor, Tensor]) -> Tensor:
        loss = F.cross_entropy(self.model(batch[0]), batch[1])
        self.optimizer.zero_grad()
        loss.backward()
        self.optimizer.step()
        return loss


def read(folder: Path) -> list[Event]:
    return list(events.read(folder))


def ended(folder: Path) -> Ended:
    last = read(folder)[-1]
    assert isinstance(last, Ended)
    return last


def steps_of(folder: Path) -> list[Step]:
    return [event for event in read(folder) if isinstance(event, Step)]


# ---- what is recorded


def test_a_loop_records_what_began_each_step_and_how_it_ended(tmp_path: Path) -> None:
    loop = Loop()
    run = loop.attach(tmp_path / "run", every=1)
    losses = []
    for _ in range(2):
        for batch in run.batches():
            loss = loop.train_on(batch)
            run.step_done(loss)
            losses.append(loss.item())
    run.close()
    started, *middle, last = read(tmp_path / "run")
    assert isinstance(started, Started)
    assert (
        started.spec_id,
        started.num_parameters,
        started.steps_per_epoch,
        started.generation,
    ) == ("attached", 15, 3, 1)
    assert started.data["describe"] == "3 batches of DataLoader"
    steps = [event for event in middle if isinstance(event, Step)]
    assert [step.num_samples for step in steps] == [16, 16, 8, 16, 16, 8]
    assert [step.epoch for step in steps] == pytest.approx([1 / 3, 2 / 3, 1, 4 / 3, 5 / 3, 2])
    assert [step.loss for step in steps] == pytest.approx(losses, rel=1e-6)
    assert [step.learning_rates for step in steps] == [{"optimizer": 0.5}] * 6
    assert isinstance(last, Ended)
    assert (last.outcome, last.cause, last.step, last.num_samples) == (
        "finished",
        "the loop ended after step 6",
        6,
        80,
    )


@pytest.mark.parametrize("num_first", [0, 1, 3], ids=["before", "after a step", "after an epoch"])
@pytest.mark.parametrize("reads", [False, True], ids=["never", "later"])
def test_a_step_without_batches_starts_with_the_loop_and_not_with_the_machine(
    tmp_path: Path, num_first: int, reads: bool
) -> None:
    started_s = time.perf_counter()
    loop = Loop()
    for _ in range(2):  # the second attempt is a resumed one
        run = loop.attach(tmp_path / "run", every=2)
        for batch in itertools.islice(loop.data, num_first):
            run.step_done(loop.train_on(batch))
        run.step_done(0.0)
        for batch in run.batches() if reads else ():
            run.step_done(loop.train_on(batch))
        run.close()
    took = [step_s for each in steps_of(tmp_path / "run") for step_s in each.step_s]
    assert len(took) == run.step
    assert 0 < sum(took) < time.perf_counter() - started_s


def test_a_loop_without_a_seed_is_read_back_whatever_torch_drew_for_it(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="spilled"), Loop(2**64 - 1).attach(tmp_path / "run"):
        raise ValueError("spilled")
    (started, _) = read(tmp_path / "run")
    assert isinstance(started, Started)
    assert started.seed == 2**64 - 1
    assert Loop().attach(tmp_path / "run").folder == tmp_path / "run"


def test_a_window_of_unequal_batches_is_the_mean_over_its_samples(tmp_path: Path) -> None:
    loop = Loop()
    sums = []
    with loop.attach(tmp_path / "run", every=100) as run:
        for batch in run.batches():
            loss = loop.train_on(batch)
            run.step_done(loss)
            sums.append((loss.item(), len(batch[0])))
    first, rest = steps_of(tmp_path / "run")
    assert (first.num_steps, rest.num_steps, rest.num_samples) == (1, 2, 24)
    assert rest.loss == pytest.approx(sum(loss * count for loss, count in sums[1:]) / 24, rel=1e-6)


def test_a_step_over_several_batches_counts_the_samples_of_all(tmp_path: Path) -> None:
    loop = Loop()
    with loop.attach(tmp_path / "run", every=1) as run:
        for number, batch in enumerate(run.batches()):
            loss = loop.train_on(batch)
            if number == 2:
                run.step_done(loss)
    assert [step.num_samples for step in steps_of(tmp_path / "run")] == [40]


def test_the_loop_computes_the_same_bits_with_and_without(tmp_path: Path) -> None:
    bare, recorded = Loop(seed=3), Loop(seed=3)
    torch.manual_seed(4)
    for batch in bare.data:
        bare.train_on(batch)
    torch.manual_seed(4)
    with recorded.attach(tmp_path / "run") as run:
        for batch in run.batches():
            run.step_done(recorded.train_on(batch))
    torch.testing.assert_close(recorded.model.state_dict(), bare.model.state_dict(), rtol=0, atol=0)


def test_the_batches_are_the_loaders_own_objects(tmp_path: Path) -> None:
    batches = [{"x": torch.zeros(2)}, {"x": torch.zeros(3)}]
    loop = Loop()
    with surefoot.attach(
        model=loop.model, optimizer=loop.optimizer, data=batches, folder=tmp_path / "run"
    ) as run:
        assert all(given is own for given, own in zip(run.batches(), batches, strict=True))


def test_the_loss_is_not_read_before_a_window_ends(tmp_path: Path) -> None:
    class Unread(Tensor):
        """A scalar that says when it is read."""

        reads = 0

        def __float__(self) -> float:
            Unread.reads += 1
            return super().__float__()

        def item(self) -> Any:
            Unread.reads += 1
            return super().item()

    run = Loop().attach(tmp_path / "run", every=5)
    counts = []
    for _ in range(10):
        run.step_done(torch.ones(()).as_subclass(Unread), num_samples=4)
        counts.append(Unread.reads)
    run.close()
    assert counts == [1, 1, 1, 1, 5, 5, 5, 5, 5, 10]


def test_the_time_spent_waiting_for_data_is_told_apart_from_the_step(tmp_path: Path) -> None:
    def slow() -> Iterator[Tensor]:
        for _ in range(3):
            time.sleep(0.02)
            yield torch.zeros(2)

    loop = Loop()
    with surefoot.attach(
        model=loop.model, optimizer=loop.optimizer, data=slow(), folder=tmp_path / "run", every=3
    ) as run:
        for _ in run.batches():
            run.step_done(1.0)
    steps = steps_of(tmp_path / "run")
    assert sum(step.waiting_s for step in steps) >= 0.06
    assert all(step.waiting_s <= step.elapsed_s for step in steps)


def test_several_optimizers_and_groups_are_each_logged(tmp_path: Path) -> None:
    loop = Loop()
    scale, shift = nn.Parameter(torch.zeros(1)), nn.Parameter(torch.zeros(1))
    second = torch.optim.Adam([{"params": [scale], "lr": 0.1}, {"params": [shift], "lr": 0.2}])
    with surefoot.attach(
        model=loop.model,
        optimizer=[loop.optimizer, second],
        data=loop.data,
        folder=tmp_path / "run",
    ) as run:
        run.step_done(0.0)
    assert steps_of(tmp_path / "run")[0].learning_rates == {
        "optimizer": 0.5,
        "optimizer.1": 0.1,
        "optimizer.2": 0.2,
    }


# ---- what can be promised of the data


class Resumable:
    def __iter__(self) -> Iterator[int]:
        return iter(range(2))

    def state_dict(self) -> dict[str, int]:
        return {}

    def load_state_dict(self, state: dict[str, int]) -> None:
        pass


class Pretending(Resumable):
    def state_dict(self) -> dict[str, int]:
        raise AttributeError("built without it")


GUARANTEES: dict[str, tuple[Any, str]] = {
    "a list of batches": ([1, 2], "proven"),
    "a loader that saves its place": (Resumable(), "proven"),
    "a loader that has the methods and raises": (Pretending(), "replayed"),
    "torch's loader": (DataLoader([1, 2]), "replayed"),  # type: ignore[arg-type]
    "an iterator": (iter([1, 2]), "none"),
    "a generator": ((number for number in range(2)), "none"),
    "a set": ({1, 2}, "replayed"),
}


@pytest.mark.parametrize("kind", GUARANTEES)
def test_data_are_labeled_by_what_going_on_in_them_would_take(kind: str, tmp_path: Path) -> None:
    data, label = GUARANTEES[kind]
    assert find_guarantee(data)[0] == label
    loop = Loop()
    surefoot.attach(
        model=loop.model, optimizer=loop.optimizer, data=data, folder=tmp_path / "run"
    ).close()
    started = read(tmp_path / "run")[0]
    assert isinstance(started, Started)
    assert started.data["guarantee"] == label
    assert f"the data are {label}" in started.notes[-1]


def test_the_folder_of_a_run_with_a_spec_is_refused(tmp_path: Path) -> None:
    (tmp_path / "notes.txt").write_text("mine")
    with pytest.raises(RunFolderError, match="is not empty and is not a run folder"):
        Loop().attach(tmp_path)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["notes.txt"]


@pytest.mark.parametrize(
    "held", ["its lines are kept in memory until it can", "the loop continues without records"]
)
def test_a_full_disk_never_ends_the_loop(
    held: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    gives_up = "without records" in held
    loop = Loop()
    run = loop.attach(tmp_path / "run", every=1)
    run.step_done(1.0)

    def full(descriptor: int, line: bytes) -> int:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "write", full)
    if gives_up:
        monkeypatch.setattr(journal, "MAX_HELD_BYTES", 0)
    for batch in run.batches():
        run.step_done(loop.train_on(batch))
    monkeypatch.undo()
    run.close()
    kinds = [event.kind for event in read(tmp_path / "run")]
    assert kinds == (
        ["started", "step"] if gives_up else ["started", *["step"] * 4, "committed", "ended"]
    )
    assert capsys.readouterr().err.count(f"No space left on device; {held}") == 1


class Holding:
    def __init__(self, held: object) -> None:
        self.held = held

    def state_dict(self) -> dict[str, object]:
        return {"held": self.held}

    def load_state_dict(self, state: dict[str, object]) -> None:
        self.held = state["held"]


def with_buffer(tensor: torch.Tensor, name: str = "b") -> nn.Module:
    made = nn.Linear(1, 1)
    made.register_buffer(name, tensor)
    return made


BAD: dict[str, tuple[dict[str, Any], type[InputError], str]] = {
    "data that cannot be iterated": (
        {"data": 3},
        DataError,
        "data must be iterable; got a int",
    ),
    "an optimizer that is none": ({"optimizer": "adam"}, TaskError, "which has no param_groups"),
    "a model without shapes": (
        {"model": torch.nn.LazyLinear(2)},
        TaskError,
        "weight, bias of the model has no shape yet",
    ),
    "a save every nothing": ({"save": "0 steps"}, TaskError, "cannot be saved every '0 steps'"),
    "a state of no plain name": (
        {"state": {"my ema": torch.nn.Linear(1, 1)}},
        TaskError,
        "the name of a module is 'my ema'",
    ),
    "a state of a name that is taken": (
        {"state": {"manifest": torch.nn.Linear(1, 1)}},
        TaskError,
        "the name of a module is 'manifest'",
    ),
    "a state that holds a set": (
        {"state": {"x": Holding({1})}},
        TaskError,
        "state/values/x/held is a set",
    ),
    "a model with a wide buffer": (
        {"model": with_buffer(torch.ones(1, dtype=torch.complex128))},
        TaskError,
        "b is a tensor of torch.complex128",
    ),
    "a model with a sparse buffer": (
        {"model": with_buffer(torch.ones(1).to_sparse())},
        TaskError,
        "torch.sparse_coo",
    ),
    "a model with a name of the format": (
        {"model": with_buffer(torch.ones(1), "__metadata__")},
        TaskError,
        "'__metadata__'",
    ),
    "no optimizer": ({"optimizer": []}, TaskError, "which has no param_groups"),
}


@pytest.mark.parametrize("what", BAD)
def test_what_cannot_be_attached_to_is_refused_and_nothing_written(
    what: str, tmp_path: Path
) -> None:
    given, error, says = BAD[what]
    loop = Loop()
    arguments = {
        "model": loop.model,
        "optimizer": loop.optimizer,
        "data": loop.data,
        "folder": tmp_path / "run",
        **given,
    }
    with pytest.raises(error, match=says):
        surefoot.attach(**arguments)
    assert not (tmp_path / "run").exists()


def test_a_loss_per_sample_is_refused_with_what_to_do(tmp_path: Path) -> None:
    with (
        Loop().attach(tmp_path / "run") as run,
        pytest.raises(TaskError, match=r"a loss of shape \(4,\)\nhint: give its mean"),
    ):
        run.step_done(torch.ones(4))
