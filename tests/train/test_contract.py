"""A step's gradient is the sum over every item of its batch, divided once.

However the batch is split, and whatever is counted.
"""

# B batch, T padded length

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from surefoot import Loss, Run, RunSpec, Term
from surefoot.components.data.blocks import Order
from surefoot.components.data.feed import Feed, SampleWindow
from surefoot.components.data.sources.arrays import Arrays
from surefoot.components.optim.update import GuardedUpdate
from surefoot.contract.task import resolve
from surefoot.core.errors import SurefootError, TaskError
from surefoot.train.step import LiveUpdate, make_parts

Batch = dict[str, Tensor]
LONGEST = 20


class Sequences:
    """Sequences of unequal length.

    Each token is classified (`say`), and of those marked a place is regressed (`place`).
    """

    def __init__(
        self,
        lengths: list[int],
        *,
        counted: Callable[[Any], Any] = int,
        terms: int = 1,
        tells: bool = False,
    ) -> None:
        draw = torch.Generator().manual_seed(len(lengths))
        mask_BT = torch.arange(LONGEST) < torch.tensor(lengths)[:, None]
        self.rows = {
            "inputs": torch.randn(len(lengths), LONGEST, 3, generator=draw, dtype=torch.float64),
            "targets": torch.randint(0, 4, (len(lengths), LONGEST), generator=draw).masked_fill(
                ~mask_BT, -100
            ),
            "places": torch.randn(len(lengths), LONGEST, generator=draw, dtype=torch.float64),
            "marked": mask_BT & (torch.rand(len(lengths), LONGEST, generator=draw) < 0.3),
        }
        self.counted, self.terms = counted, terms
        if tells:
            self.counts = self._counts

    def model(self) -> nn.Module:
        return nn.Linear(3, 5).double()

    def data(self, split: str) -> Arrays:
        return Arrays(**self.rows)

    def forward(self, model: nn.Module, batch: Batch) -> Tensor:
        output: Tensor = model(batch["inputs"])
        return output

    def _counts(self, batch: Batch) -> dict[str, Any]:
        found = {"say": (batch["targets"] >= 0).sum(), "place": batch["marked"].sum()}
        return {name: self.counted(count) for name, count in list(found.items())[: self.terms]}

    def loss(self, output: Tensor, batch: Batch) -> Loss:
        counts = self._counts(batch)
        said = F.cross_entropy(
            output[..., :4].flatten(0, 1), batch["targets"].flatten(), reduction="sum"
        )
        terms = [Term("say", said, counts["say"])]
        if self.terms > 1:
            off = (output[..., 4] - batch["places"])[batch["marked"]].square().sum()
            terms.append(Term("place", off, counts["place"], weight=0.7))
        return Loss(*terms)


class SplitAt(Feed):
    """A feed whose microbatches end where the test says, however uneven."""

    cuts: tuple[int, ...] = ()

    def microbatches(self, window: SampleWindow) -> list[np.ndarray]:
        return [part for part in np.split(window.ids, self.cuts) if len(part)]


def gradient_of_step(task: Sequences, cuts: tuple[int, ...]) -> list[Tensor]:
    """What one step of plain SGD at rate 1 takes off the weights: the gradient that was applied."""
    torch.manual_seed(0)
    model = task.model()
    source = task.data("train")
    feed = SplitAt(source, Order(len(source), seed=0, shuffle=False), batch=len(source))
    feed.cuts = cuts
    update = GuardedUpdate([torch.optim.SGD(model.parameters(), lr=1.0, fused=True)])

    def loss(model: nn.Module, batch: Batch) -> Loss:
        return task.loss(task.forward(model, batch), batch)

    before = [parameter.detach().clone() for parameter in model.parameters()]
    parts = make_parts(
        model=model,
        task=resolve(task),
        feed=feed,
        updates=[LiveUpdate("loss", loss, update)],
        seed=0,
        device=torch.device("cpu"),
    )
    parts.step_function()(1)
    return [old - new.detach() for old, new in zip(before, model.parameters(), strict=True)]


def gradient_by_hand(task: Sequences) -> list[Tensor]:
    """Autograd on the whole batch: each term's sum over its own count."""
    torch.manual_seed(0)
    model = task.model()
    loss = task.loss(task.forward(model, task.rows), task.rows)
    mean = sum(term.weight * term.total / term.count for term in loss.terms if term.count)
    return list(torch.autograd.grad(mean, list(model.parameters())))  # type: ignore[arg-type]


@st.composite
def batches_and_cuts(draw: st.DrawFn) -> tuple[list[int], tuple[int, ...]]:
    lengths = draw(st.lists(st.integers(1, LONGEST), min_size=1, max_size=10))
    cuts = draw(st.sets(st.integers(0, len(lengths))))
    return lengths, tuple(sorted(cuts))


@pytest.mark.quick("unknown count", "two terms")
@pytest.mark.parametrize(
    ("terms", "tells"),
    [(1, False), (1, True), (2, True)],
    ids=["unknown count", "known count", "two terms"],
)
@settings(max_examples=40)
@given(drawn=batches_and_cuts())
def test_any_split_into_microbatches_gives_the_gradient_of_the_one_batch(
    terms: int, tells: bool, drawn: tuple[list[int], tuple[int, ...]]
) -> None:
    lengths, cuts = drawn
    task = Sequences(lengths, terms=terms, tells=tells)
    torch.testing.assert_close(
        gradient_of_step(task, cuts), gradient_by_hand(task), rtol=1e-12, atol=1e-12
    )


def test_lengths_1_3_7_20_in_four_microbatches_equal_one_batch_a_mean_of_means_does_not() -> None:
    task = Sequences([1, 3, 7, 20])
    whole = gradient_by_hand(task)
    torch.testing.assert_close(gradient_of_step(task, (1, 2, 3)), whole, rtol=1e-12, atol=1e-12)
    each = [gradient_by_hand(_part(task, row)) for row in range(4)]
    mean_of_means = [torch.stack(parts).mean(0) for parts in zip(*each, strict=True)]
    assert max(float((a - b).abs().max()) for a, b in zip(mean_of_means, whole, strict=True)) > 1e-2


def _part(task: Sequences, row: int) -> Sequences:
    one = Sequences([1])
    one.rows = {name: rows[row : row + 1] for name, rows in task.rows.items()}
    return one


KINDS: dict[str, Callable[[Any], Any]] = {
    "int": int,
    "numpy": lambda count: np.int64(int(count)),
    "numpy float": lambda count: np.float32(int(count)),
    "tensor": lambda count: count,
    "float tensor": lambda count: count.float(),
    "float": float,
}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("tells", [False, True])
@pytest.mark.parametrize("cuts", [(), (1, 3)], ids=["whole", "split"])
def test_a_count_may_be_any_kind_of_number(kind: str, tells: bool, cuts: tuple[int, ...]) -> None:
    task = Sequences([4, 20, 9, 1], counted=KINDS[kind], tells=tells)
    exact = gradient_by_hand(Sequences([4, 20, 9, 1]))
    torch.testing.assert_close(gradient_of_step(task, cuts), exact, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("as_tensor", [False, True])
def test_a_count_below_one_is_a_sum_of_weights_and_divides_like_any_other(as_tensor: bool) -> None:
    whole = Sequences([3, 5])
    lighter = Sequences(
        [3, 5], counted=(lambda c: c * 0.01) if as_tensor else (lambda c: float(c) * 0.01)
    )
    times_100 = [part * 100 for part in gradient_by_hand(whole)]
    torch.testing.assert_close(gradient_of_step(lighter, ()), times_100, rtol=1e-6, atol=1e-12)


class Cells:
    """A two-layer net without normalization or dropout over 640 rows; counts its forward passes."""

    def __init__(self, num_rows: int = 640) -> None:
        self.num_rows, self.passes = num_rows, 0

    def model(self) -> nn.Module:
        return nn.Sequential(nn.Linear(8, 32), nn.Tanh(), nn.Linear(32, 3))

    def data(self, split: str) -> Arrays:
        inputs = torch.randn(self.num_rows, 8, generator=torch.Generator().manual_seed(0))
        return Arrays(inputs, inputs[:, :3].argmax(1))

    def forward(self, model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
        self.passes += model.training
        output: Tensor = model(batch[0])
        return output

    def loss(self, output: Tensor, batch: tuple[Tensor, Tensor]) -> Loss:
        return Loss.sum(F.cross_entropy(output, batch[1], reduction="sum"), len(output))


def spec_of(**train: Any) -> RunSpec:
    return RunSpec(
        optim={"name": "sgd", "lr": 0.1},
        train={"length": "20 steps", **train},
        observe={"tensorboard": False},
        evaluate={"every": "99 steps"},
    )


def weights_after(spec: RunSpec, folder: Path) -> dict[str, Tensor]:
    with Run(spec, Cells(), folder=folder, quiet=True) as run:
        for _ in run.steps():
            pass
    return run.model.state_dict()


@pytest.mark.parametrize(("batch", "microbatch"), [(256, 64), (128, 32)])
@pytest.mark.parametrize("optimizer", ["sgd", "adamw"])
def test_four_microbatches_train_to_the_weights_of_the_large_batch(
    batch: int, microbatch: int, optimizer: str, tmp_path: Path
) -> None:
    optim = {"name": optimizer, "lr": 0.1 if optimizer == "sgd" else 1e-3}
    whole = weights_after(spec_of(batch=batch).replace(optim=optim), tmp_path / "whole")
    split = weights_after(
        spec_of(batch=batch, microbatch=microbatch).replace(optim=optim), tmp_path / "split"
    )
    torch.testing.assert_close(split, whole, rtol=0, atol=1e-6)
    # the sums were really formed in a different order
    assert not torch.equal(split["0.weight"], whole["0.weight"])


def test_ten_microbatches_by_four_are_three_updates_and_the_last_is_over_two(
    tmp_path: Path,
) -> None:
    task = Cells(num_rows=80)
    seen = []
    spec = spec_of(batch=32, microbatch=8, length="2 epochs")
    with Run(spec, task, folder=tmp_path / "run", quiet=True) as run:
        for report in run.steps():
            seen.append((task.passes, report.num_samples, report.epoch))
            task.passes = 0
    assert seen == [
        (4, 32, 1 / 3),
        (4, 32, 2 / 3),
        (2, 16, 1.0),
        (4, 32, 4 / 3),
        (4, 32, 5 / 3),
        (2, 16, 2.0),
    ]


def test_the_last_update_of_an_epoch_is_the_mean_over_what_it_holds_and_leaves_nothing_behind(
    tmp_path: Path,
) -> None:
    spec = spec_of(batch=32, microbatch=8, length="4 steps").replace(
        optim={"momentum": 0.0, "weight_decay": 0.0, "clip": 0.0}, schedule={"name": "constant"}
    )
    task = Cells(num_rows=80)
    with Run(spec, task, folder=tmp_path / "run", quiet=True) as run:
        feed = run.assembly.feed
        by_hand = task.model()
        by_hand.load_state_dict(run.model.state_dict())
        for number, _ in enumerate(run.steps()):
            batch = task.data("train").read(feed.window(number).ids)
            loss = F.cross_entropy(by_hand(batch[0]), batch[1])
            for parameter, gradient in zip(
                by_hand.parameters(),
                torch.autograd.grad(loss, list(by_hand.parameters())),
                strict=True,
            ):
                parameter.data.sub_(gradient, alpha=0.1)
    torch.testing.assert_close(run.model.state_dict(), by_hand.state_dict(), rtol=0, atol=1e-6)


class NotAdditive(Cells):
    def loss(self, output: Tensor, batch: tuple[Tensor, Tensor]) -> Loss:
        (term,) = super().loss(output, batch).terms
        return Loss(term, additive=False)


class TwoTerms(Cells):
    def loss(self, output: Tensor, batch: tuple[Tensor, Tensor]) -> Loss:
        (term,) = super().loss(output, batch).terms
        return Loss(term, Term("size", output.square().sum(), output.numel()))


class OtherCount(TwoTerms):
    def counts(self, batch: tuple[Tensor, Tensor]) -> int:
        return len(batch[0])


class NoSuchTerm(TwoTerms):
    def counts(self, batch: tuple[Tensor, Tensor]) -> dict[str, int]:
        return {"loss": len(batch[0])}


class LearnedWeight(Cells):
    def loss(self, output: Tensor, batch: tuple[Tensor, Tensor]) -> Loss:
        return Loss(
            Term(
                "loss",
                output.square().sum(),
                len(output),
                weight=torch.ones((), requires_grad=True),
            )
        )  # type: ignore[arg-type]


class CountPerSample(Cells):
    def loss(self, output: Tensor, batch: tuple[Tensor, Tensor]) -> Loss:
        return Loss.sum(output.square().sum(), torch.ones(len(output)))


REFUSED: dict[type[Cells], str] = {
    NotAdditive: "not additive",
    TwoTerms: "counts that are not known before the forward pass",
    OtherCount: (
        r"counts\(batch\) returned 8 for the term size of update loss, but its loss counts 24"
    ),
    NoSuchTerm: "names no 'size'",
    LearnedWeight: "the weight of term loss is a Tensor",
    CountPerSample: r"the count of term loss has shape \(8,\)",
}


@pytest.mark.parametrize("kind", REFUSED, ids=lambda kind: kind.__name__)
def test_what_may_not_be_split_is_refused_with_the_reason_before_anything_is_written(
    kind: type[Cells], tmp_path: Path
) -> None:
    with (
        pytest.raises(TaskError, match=REFUSED[kind]),
        Run(spec_of(batch=32, microbatch=8), kind(), folder=tmp_path / "run", quiet=True),
    ):
        pass
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("kind", [NotAdditive, TwoTerms])
def test_the_same_losses_train_where_the_batch_is_whole(kind: type[Cells], tmp_path: Path) -> None:
    losses = []
    try:
        with Run(spec_of(batch=32), kind(), folder=tmp_path / "run", quiet=True) as run:
            losses = [report.loss for report in run.steps()]
    except SurefootError as error:  # pragma: no cover - what the test denies
        pytest.fail(str(error))
    assert losses[-1] < losses[0]
