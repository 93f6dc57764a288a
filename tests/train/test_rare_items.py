"""Batches in which no item counts are rare data.

Their steps are skipped, and no run ends, or is refused, for them.
"""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from surefoot import Loss, RunSpec, Term, Update
from surefoot.components.data.sources.arrays import Arrays
from surefoot.core.errors import TaskError
from surefoot.train.assemble import assemble
from surefoot.train.preflight import check
from surefoot.train.run import Run
from tests.train.small import assert_same, faults_of, state_of

SAMPLES, BATCH, EMPTY = 24, 4, (2, 5)  # the steps of each epoch that have no item


def mask(steps: tuple[int, ...]) -> Tensor:
    """True for the samples of the other steps of an epoch in order."""
    return torch.tensor([sample // BATCH + 1 not in steps for sample in range(SAMPLES)])


class Masked:
    """Labels of -100 are not counted, as cross_entropy ignores them."""

    def __init__(self, empty: tuple[int, ...] = EMPTY) -> None:
        self.empty = empty

    def model(self) -> nn.Module:
        return nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Linear(8, 3))

    def data(self, split: str) -> Any:
        draw = torch.Generator().manual_seed(0)
        labels = torch.where(mask(self.empty), torch.arange(SAMPLES) % 3, -100)
        return Arrays(x=torch.randn(SAMPLES, 4, generator=draw), y=labels)

    def forward(self, model: Any, batch: Any) -> Tensor:
        return model(batch["x"])

    def loss(self, output: Tensor, batch: Any) -> Loss:
        total = F.cross_entropy(output, batch["y"], ignore_index=-100, reduction="sum")
        return Loss.sum(total, count=(batch["y"] != -100).sum())


class Numbers(Masked):
    """The count as a Python number, the total a constant where there is nothing.

    A guard in a task gives it so.
    """

    def loss(self, output: Tensor, batch: Any) -> Loss:
        count = int((batch["y"] != -100).sum())
        return super().loss(output, batch) if count else Loss.sum(torch.zeros(()), 0)


class Undefined(Masked):
    """A mean times its count: not a number where there is nothing."""

    def loss(self, output: Tensor, batch: Any) -> Loss:
        count = (batch["y"] != -100).sum()
        return Loss.sum(F.cross_entropy(output, batch["y"], ignore_index=-100) * count, count)


class Counted(Masked):
    """The counts are known before the forward pass."""

    def counts(self, batch: Any) -> int:
        return int((batch["y"] != -100).sum())


class Two(Masked):
    """Two terms of other counts, both of them empty at times; the second is a constant then."""

    def loss(self, output: Tensor, batch: Any) -> Loss:
        there = batch["y"] != -100
        boxes = output[there].square().sum() if there.any() else torch.zeros(())
        return Loss(
            super().loss(output, batch).terms[0],
            Term("boxes", boxes, int(there.sum()) * 3, weight=0.5),
        )

    def counts(self, batch: Any) -> dict[str, int]:
        many = int((batch["y"] != -100).sum())
        return {"loss": many, "boxes": many * 3}


def spec(length: str = "2 epochs", **tables: Any) -> RunSpec:
    train = {"length": length, "batch": BATCH, "threads": 1, **tables.pop("train", {})}
    optim = {"name": "adamw", "lr": 0.05, "ema": 0.9, **tables.pop("optim", {})}
    quiet = {"evaluate": {"every": "1000 steps"}, "data": {"shuffle": False}}
    return RunSpec(train=train, optim=optim, **quiet, **tables)


@pytest.mark.parametrize("microbatch", [None, 2])
@pytest.mark.parametrize("kind", [Masked, Numbers, Undefined, Counted, Two])
def test_a_step_in_which_no_item_counts_moves_nothing_and_is_recorded(
    kind: Any, microbatch: int | None, tmp_path: Path
) -> None:
    if kind is Undefined and microbatch:
        pytest.skip("a mean of no items is not a number in half of a batch either")
    table = {} if microbatch is None else {"microbatch": microbatch}
    applied, before = [], dict[str, Tensor]()
    with Run(
        spec(train=table, schedule={"name": "linear"}), kind(), folder=tmp_path / "run", quiet=True
    ) as run:
        guarded = run.assembly.updates[0].guarded
        rates = guarded.rates
        for report in run.steps():
            applied.append(report.applied)
            if not report.applied:
                assert report.loss is None or not math.isfinite(report.loss)
                assert_same(before, state_of(run))
                assert guarded.rates == rates  # the schedule stays as well
            before, rates = state_of(run), guarded.rates
    assert run.outcome == "finished"
    assert run.num_skipped == 4
    assert [step for step, moved in enumerate(applied, 1) if not moved] == [2, 5, 8, 11]
    faults = [(each.step, each.fault, each.action) for each in faults_of(tmp_path / "run")]
    many = ["1 such step", "2 such steps", "3 such steps", "4 such steps"]
    assert faults == [
        (step, "no-items", f"the step was skipped, no weight changed; {words} so far")
        for step, words in zip((2, 5, 8, 11), many, strict=True)
    ]


def test_a_run_with_empty_batches_equals_one_without_them(tmp_path: Path) -> None:
    class Without(Masked):
        def data(self, split: str) -> Any:
            whole = super().data(split)
            kept = torch.arange(SAMPLES)[mask(EMPTY)].numpy()
            batch = whole.read(kept)
            return Arrays(x=batch["x"], y=batch["y"])

    states = []
    for name, task in (("empty", Masked()), ("none", Without())):
        with Run(
            spec(schedule={"name": "constant"}), task, folder=tmp_path / name, quiet=True
        ) as run:
            for _ in run.steps():
                pass
            states.append(state_of(run))
    assert_same(*states)


def test_a_run_that_is_left_after_an_empty_step_resumes_to_the_same_bits_and_goes_on_counting(
    tmp_path: Path,
) -> None:
    states = []
    for name, leave in (("whole", 0), ("parts", 2)):
        for stop in (leave, 0)[not leave :]:
            with Run(spec(), Masked(), folder=tmp_path / name, quiet=True) as run:
                for report in run.steps():
                    if report.step == stop:
                        break
        assert run.num_skipped == 4
        states.append(state_of(run))
    assert_same(*states)


@pytest.mark.parametrize("limit", [{"max_skips": 2}, {"nonfinite": "stop"}])
def test_any_number_of_empty_steps_in_a_row_ends_no_run_and_is_printed_at_powers_of_two(
    limit: dict[str, Any], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with Run(
        spec("4 epochs", stability=limit),
        Masked((1, 2, 3, 4, 5)),
        folder=tmp_path / "run",
        quiet=True,
    ) as run:
        assert sum(report.applied for report in run.steps()) == 4
    printed = [line for line in capsys.readouterr().err.splitlines() if "counts 0 items;" in line]
    assert [line.split("; ")[-1] for line in printed] == [
        "1 such step so far",
        "2 such steps so far",
        "4 such steps so far",
        "8 such steps so far",
        "16 such steps so far",
    ]
    assert len(faults_of(tmp_path / "run")) == 20


def test_an_update_without_items_leaves_the_others_their_own(tmp_path: Path) -> None:
    class Pair(Masked):
        def updates(self, model: nn.Module) -> list[Update]:
            first, second = [*model[0].parameters(), *model[1].parameters()], model[2].parameters()  # type: ignore[index]
            whole = lambda model, batch: Loss.sum(model(batch["x"]).square().sum(), len(batch["x"]))  # noqa: E731
            return [
                Update("labels", lambda model, batch: self.loss(model(batch["x"]), batch), first),
                Update("size", whole, second),
            ]

    with Run(
        spec("1 epoch", optim={"ema": None}), Pair(), folder=tmp_path / "run", quiet=True
    ) as run:
        counts = []
        for report in run.steps():
            counts.append([update.guarded.applied_steps for update in run.assembly.updates])
            assert report.empty_updates == (("labels",) if report.step in EMPTY else ())
    assert counts == [[1, 1], [1, 2], [2, 3], [3, 4], [3, 5], [4, 6]]
    assert ["update labels was skipped" in each.action for each in faults_of(tmp_path / "run")] == [
        True
    ] * 2


def test_an_update_inside_the_backward_pass_is_skipped_too(tmp_path: Path) -> None:
    tables = {"memory": {"update_in_backward": True}, "stability": {"nonfinite": "stop"}}
    with Run(
        spec(optim={"clip": 0.0, "ema": None}, **tables),
        Masked(),
        folder=tmp_path / "run",
        quiet=True,
    ) as run:
        assert [report.step for report in run.steps() if not report.applied] == [2, 5, 8, 11]
    assert run.outcome == "finished"


# ---- the check before the run


@pytest.mark.parametrize("empty", [(1,), (1, 2, 3), (1, 2, 3, 4, 5), (2, 4, 6)])
def test_the_check_before_the_run_looks_for_samples_that_count(empty: tuple[int, ...]) -> None:
    assembly = assemble(spec(train={"microbatch": 2}), Masked(empty))
    check(assembly)
    assert not [line for line in assembly.warnings if "counts 0 items" in line]


def test_a_mean_is_found_behind_samples_that_do_not_count() -> None:
    class Mean(Masked):
        def loss(self, output: Tensor, batch: Any) -> Loss:
            count = (batch["y"] != -100).sum()
            return Loss.sum(F.cross_entropy(output, batch["y"], ignore_index=-100), count)

    with pytest.raises(TaskError, match="is a mean, not a sum"):
        check(assemble(spec(), Mean((1, 2, 3))))


def test_a_loss_that_counts_nothing_in_all_of_the_data_is_refused() -> None:
    with pytest.raises(TaskError, match="the loss of update loss returned the count 0"):
        check(assemble(spec(), Masked((1, 2, 3, 4, 5, 6))))


class Fixed(Masked):
    """A model that is built for one size of batch, as one with a hidden state of its own is."""

    def __init__(self, size: int) -> None:
        self.size, self.empty = size, ()

    def model(self) -> nn.Module:
        size = self.size

        class State(nn.Linear):
            def forward(self, x: Tensor) -> Tensor:
                return (
                    super().forward(x + torch.zeros(size, 1))
                    if len(x) == size
                    else super().forward(x.view(size, 4))
                )

        return State(4, 3)


@pytest.mark.parametrize("size", [4, 3, 12, 24])
def test_a_model_that_is_built_for_the_batch_of_the_run_trains(size: int, tmp_path: Path) -> None:
    with Run(
        spec("3 steps", train={"batch": size}), Fixed(size), folder=tmp_path / "run", quiet=True
    ) as run:
        assert [report.applied for report in run.steps()] == [True] * 3
        assert run.evaluate().num_samples == SAMPLES


def test_a_trial_that_fails_says_that_it_is_one_and_of_how_many_samples() -> None:
    with pytest.raises(
        TaskError, match="a trial of update loss on 6 samples before the run failed"
    ):
        check(assemble(spec(train={"batch": 6}), Broken()))


class Broken(Masked):
    def __init__(self) -> None:
        self.empty = ()

    def forward(self, model: Any, batch: Any) -> Tensor:
        return model(batch["x"]) if not torch.is_grad_enabled() else model(batch["x"][:, :2])


# ---- forward passes that take gradients


class Energy(Masked):
    """Forces are the gradient of an energy with respect to places."""

    grad = True

    def __init__(self) -> None:
        self.empty = ()

    def model(self) -> nn.Module:
        return nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1))

    def forward(self, model: Any, batch: Any) -> Any:
        with (
            torch.enable_grad()
            if self.grad
            else torch.no_grad()
            if not torch.is_grad_enabled()
            else torch.enable_grad()
        ):
            places = batch["x"].detach().requires_grad_()
            energy = model(places)
            (force,) = torch.autograd.grad(energy.sum(), places, create_graph=True)
        return force

    def loss(self, output: Any, batch: Any) -> Loss:
        return Loss.sum((output - batch["x"]).square().sum(), count=len(batch["x"]))


class Unprepared(Energy):
    grad = False


def test_a_forward_pass_that_takes_gradients_trains_and_is_evaluated_under_enable_grad(
    tmp_path: Path,
) -> None:
    with Run(spec("1 epoch"), Energy(), folder=tmp_path / "run", quiet=True) as run:
        losses = [report.loss for report in run.steps()]
        assert run.evaluate().num_samples == SAMPLES
    assert all(loss is not None and math.isfinite(loss) for loss in losses)


def test_without_enable_grad_the_trial_names_it() -> None:
    with pytest.raises(TaskError, match="a trial evaluation of a few samples") as caught:
        assemble(spec(), Unprepared())
    assert "with torch.enable_grad():" in str(caught.value.hint)
