"""A buffer that the forward pass fills, registers, resizes or sets to None is restored."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import surefoot
from surefoot import checkpoint
from surefoot.core.errors import RunFolderError
from tests.train.small import Small, spec
from tests.train.test_resume import bits, train

STEPS, STOP = 8, 5


class Seeing(nn.Module):
    """A linear layer that takes something of each batch into its buffers."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 2)
        self.prepare()

    def prepare(self) -> None: ...

    def see(self, x: Tensor) -> Tensor:
        raise NotImplementedError

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x - self.see(x.detach()).float())  # type: ignore[no-any-return]


class Filled(Seeing):
    mean: Any

    def prepare(self) -> None:
        self.register_buffer("mean", None)

    def see(self, x: Tensor) -> Tensor:
        self.mean = x.mean(0) if self.mean is None else self.mean * 0.9 + x.mean(0) * 0.1
        return self.mean  # type: ignore[no-any-return]


class FilledInside(Seeing):
    def prepare(self) -> None:
        self.inner = nn.Sequential(nn.Identity(), Filled())

    def see(self, x: Tensor) -> Tensor:
        return self.inner(x).detach().mean()  # type: ignore[no-any-return]


class FilledHidden(Filled):
    def prepare(self) -> None:
        self.register_buffer("mean", None, persistent=False)


class Counted(Seeing):
    count: Any

    def prepare(self) -> None:
        self.register_buffer("count", None)

    def see(self, x: Tensor) -> Tensor:
        self.count = (torch.zeros((), dtype=torch.int64) if self.count is None else self.count) + 1
        return self.count * 0.1  # type: ignore[no-any-return]


class Grown(Seeing):
    seen: Tensor

    def prepare(self) -> None:
        self.register_buffer("seen", torch.zeros(0, 4))

    def see(self, x: Tensor) -> Tensor:
        self.seen = torch.cat([self.seen, x.mean(0, keepdim=True)])
        return self.seen.sum(0)


class Widened(Seeing):
    mean: Tensor

    def prepare(self) -> None:
        self.register_buffer("mean", torch.zeros(4))

    def see(self, x: Tensor) -> Tensor:
        self.mean = self.mean.double() * 0.9 + x.double().mean(0) / 3
        return self.mean


class Dropped(Seeing):
    start: Any
    mean: Tensor
    is_persistent = True

    def prepare(self) -> None:
        self.register_buffer("start", torch.ones(4), persistent=self.is_persistent)
        self.register_buffer("mean", torch.zeros(4))

    def see(self, x: Tensor) -> Tensor:
        self.mean = x.mean(0) + (self.mean if self.start is None else self.start)
        self.start = None
        return self.mean


class DroppedHidden(Dropped):
    is_persistent = False


class Registered(Seeing):
    mean: Tensor

    def see(self, x: Tensor) -> Tensor:
        if "mean" not in self._buffers:
            self.register_buffer("mean", x.mean(0))
        self.mean.mul_(0.9).add_(x.mean(0))
        return self.mean.clone()


KINDS = [
    Filled,
    FilledInside,
    FilledHidden,
    Counted,
    Grown,
    Widened,
    Dropped,
    DroppedHidden,
    Registered,
]


def follow(make: type[Seeing], folder: Path, *, leave_at: int | None = None) -> dict[str, Any]:
    """Train with attach, and leave the loop after a step; return all buffers and weights."""
    torch.manual_seed(0)
    model = make()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    rows = [torch.randn(3, 4) for _ in range(STEPS)]
    run = surefoot.attach(
        model=model, optimizer=optimizer, data=rows, folder=folder, save="2 steps"
    )
    for batch in run.batches():
        optimizer.zero_grad()
        loss = model(batch).square().mean()
        loss.backward()
        optimizer.step()
        run.step_done(loss)
        if run.step == leave_at:
            run.session.end("stopped")
            break
    else:
        run.close()
    return dict(model.named_parameters()) | dict(model.named_buffers())


@pytest.mark.quick("FilledInside", "Widened", "DroppedHidden", "Registered")
@pytest.mark.parametrize("kind", KINDS)
def test_an_attached_loop_resumes_with_the_bits_of_one_that_was_never_stopped(
    kind: type[Seeing], tmp_path: Path
) -> None:
    whole = follow(kind, tmp_path / "whole")
    follow(kind, tmp_path / "left", leave_at=STOP)
    again = follow(kind, tmp_path / "left")
    assert again.keys() == whole.keys()
    for name, each in whole.items():
        assert again[name].dtype == each.dtype
        assert torch.equal(again[name], each), name


class Given(Small):
    """A task with one of these models."""

    def __init__(self, make: type[Seeing]) -> None:
        super().__init__()
        self.make = make

    def model(self) -> nn.Module:
        return nn.Sequential(self.make(), nn.Linear(2, 3))


@pytest.mark.quick("Filled", "Grown")
@pytest.mark.parametrize("kind", [Filled, Grown, Dropped, Registered])
def test_a_run_resumes_with_the_bits_of_one_that_was_never_stopped(
    kind: type[Seeing], tmp_path: Path
) -> None:
    how = spec(STEPS, checkpoint={"every": "2 steps"})
    train(tmp_path / "whole", how, Given(kind))
    train(tmp_path / "left", how, Given(kind), leave_at=STOP)
    train(tmp_path / "left", how, Given(kind))
    assert bits(tmp_path / "left", STEPS) == bits(tmp_path / "whole", STEPS)


def test_a_checkpoint_of_other_weights_leaves_a_buffer_none(tmp_path: Path) -> None:
    saved = Filled()
    saved(torch.ones(3, 4))
    checkpoint.save(tmp_path, 1, {"model": saved})
    other = Filled()
    other.layer = nn.Linear(4, 3)
    with pytest.raises(RunFolderError, match=r"layer\.weight"):
        checkpoint.load(tmp_path, {"model": other})
    assert other.mean is None
    same = Filled()
    checkpoint.load(tmp_path, {"model": same})
    assert torch.equal(same.mean, saved.mean)


def test_a_buffer_of_another_shape_that_never_changed_is_still_refused(tmp_path: Path) -> None:
    class Table(Seeing):
        size = 4

        def prepare(self) -> None:
            self.register_buffer("table", torch.ones(self.size))

        def see(self, x: Tensor) -> Tensor:
            return self.get_buffer("table").mean()

    follow(Table, tmp_path / "run", leave_at=STOP)
    Table.size = 5
    with pytest.raises(RunFolderError, match="of a different shape: table"):
        follow(Table, tmp_path / "run")


class CountingFromNone(nn.Linear):
    """Counts its forward passes in a buffer that is None before the first."""

    count: Any

    def __init__(self) -> None:
        super().__init__(4, 3)
        self.register_buffer("count", None)

    def forward(self, x: Tensor) -> Tensor:
        self.count = torch.ones(()) if self.count is None else self.count + 1
        return super().forward(x)


def test_the_checks_before_a_run_leave_a_buffer_none(tmp_path: Path) -> None:
    class Counted(Small):
        def model(self) -> nn.Module:
            return CountingFromNone()

    with surefoot.Run(spec(3), Counted(), folder=tmp_path / "run", quiet=True) as run:
        assert run.model.count is None
        steps = len(list(run.steps()))
        assert run.model.count == steps == 3
