"""Numbers that are not: a skipped step moves nothing, and a run that cannot come back ends."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from surefoot.components.data.blocks import Order
from surefoot.components.data.feed import Feed
from surefoot.components.observe.meter import Meter
from surefoot.components.optim.buffers import LiveBuffers
from surefoot.components.optim.build import build as build_optimizer
from surefoot.components.optim.groups import build_groups, find_trained
from surefoot.components.optim.update import GuardedUpdate
from surefoot.components.stability.guard import Guard
from surefoot.contract import manifest
from surefoot.contract.spec import RunSpec, StabilityTable
from surefoot.contract.state import StepReport
from surefoot.contract.task import Loss
from surefoot.core.errors import NumbersError
from surefoot.train.run import Run
from tests.train.small import (
    BATCH,
    OPTIMIZERS,
    SAMPLES,
    Odd,
    Small,
    assert_same,
    end_of,
    faults_of,
    spec,
    state_of,
)


def step_of(sample: int, seed: int = 0) -> int:
    """The step of the first epoch that consumes a sample."""
    ids = Feed(Small().data("train"), Order(SAMPLES, seed), batch=BATCH)
    return next(
        number + 1 for number in range(SAMPLES // BATCH) if sample in ids.window(number).ids
    )


# ---- skipped steps


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_a_sample_that_is_not_a_number_costs_its_step_and_moves_nothing(
    name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    poisoned = next(sample for sample in range(SAMPLES) if step_of(sample) == 3)
    table = {**OPTIMIZERS[name], "lr": 0.05, "ema": 0.9}
    before: dict[str, Tensor] = {}
    with Run(
        spec(8, optim=table),
        Small(norm=True, poison=(poisoned,)),
        folder=tmp_path / "a",
        quiet=True,
    ) as run:
        for report in run.steps():
            if report.step == 2:
                before, rates = state_of(run), run.assembly.updates[0].guarded.rates
            if report.step == 3:
                assert not report.applied
                assert math.isnan(report.loss)
                assert_same(before, state_of(run))
                # the schedule did not move either
                assert run.assembly.updates[0].guarded.rates == rates
            else:
                assert report.applied
    faults = faults_of(tmp_path / "a")
    assert [(fault.step, fault.fault, fault.action) for fault in faults] == [
        (3, "nonfinite", "the step was skipped, no weight changed")
    ]
    assert "the loss is nan" in faults[0].detail
    # also when quiet
    assert f"surefoot: step 3: {faults[0].detail}; {faults[0].action}\n" in capsys.readouterr().err
    assert end_of(tmp_path / "a").outcome == "finished"
    assert run.num_skipped == 1
    assert all(bool(torch.isfinite(tensor).all()) for tensor in state_of(run).values())


@pytest.mark.parametrize("skipped", [1, 3])
def test_a_run_with_a_skipped_step_equals_one_that_never_had_that_batch(
    skipped: int, tmp_path: Path
) -> None:
    """The reference: the same steps by hand through torch's own calls, that one left out."""
    poisoned = next(sample for sample in range(SAMPLES) if step_of(sample) == skipped)
    task = Small(norm=True, poison=(poisoned,))
    table = {"name": "sgd", "lr": 0.05}
    with Run(
        spec(6, optim=table, schedule={"name": "linear"}), task, folder=tmp_path / "a", quiet=True
    ) as run:
        for _ in run.steps():
            pass
    torch.manual_seed(0)
    model = task.model()
    optimizer = torch.optim.SGD(
        build_groups(find_trained(model), weight_decay=0.01), lr=0.05, momentum=0.9
    )
    _feed, applied = run.assembly.feed, 0
    for number in range(6):
        if number + 1 == skipped:
            continue
        for group in optimizer.param_groups:
            group["lr"] = 0.05 * run.assembly.schedule(applied)
        batch = run.assembly.engine.steps.reader.loader.read(number + 1).batches[0]
        optimizer.zero_grad()
        F.cross_entropy(model(batch[0]), batch[1]).backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        applied += 1
    for mine, other in zip(
        run.model.state_dict().values(), model.state_dict().values(), strict=True
    ):
        torch.testing.assert_close(mine, other, rtol=2e-5, atol=1e-6)


@pytest.mark.parametrize(
    ("steps", "max_skips", "ends_at", "words"),
    [
        (12, 5, 5, "5 steps in a row, before any update was applied"),
        (3, 5, 3, "3 steps in a row, before any update was applied"),
        (1, 5, 1, "1 step in a row, before any update was applied"),
        (12, 1, 1, "1 step in a row, before any update was applied"),
    ],
)
def test_a_run_in_which_no_update_was_applied_ends_with_an_error(
    steps: int, max_skips: int, ends_at: int, words: str, tmp_path: Path
) -> None:
    task = Small(poison=tuple(range(SAMPLES)))
    with (
        pytest.raises(NumbersError, match=f"^step {ends_at}: the loss is nan, {words}") as raised,
        Run(
            spec(steps, stability={"max_skips": max_skips}),
            task,
            folder=tmp_path / "a",
            quiet=True,
        ) as run,
    ):
        for _ in run.steps():
            pass
    assert raised.value.hint
    assert end_of(tmp_path / "a").step == ends_at
    assert manifest.steps(tmp_path / "a") == []


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_an_optimizer_whose_first_step_is_skipped_starts_as_if_it_had_not_been(name: str) -> None:
    made = []
    for is_skipped in (False, True):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 3))
        table = RunSpec(optim={**OPTIMIZERS[name], "lr": 0.05}).optim
        guarded = GuardedUpdate(build_optimizer(table, find_trained(model)).optimizers, clip=1.0)
        if is_skipped:
            for parameter in guarded.parameters:
                parameter.grad = torch.full_like(parameter, torch.nan)
            assert guarded.step_if_finite()[1] is False
        for step in range(3):
            guarded.clear_gradients()
            F.cross_entropy(
                model(torch.randn(4, 4, generator=torch.Generator().manual_seed(step))),
                torch.arange(4) % 3,
            ).backward()
            assert guarded.step_if_finite()[1] is True
        made.append([parameter.detach().clone() for parameter in model.parameters()])
    for one, other in zip(*made, strict=True):
        assert torch.equal(one, other)


@pytest.mark.parametrize(
    "how",
    [
        "inf loss, finite gradient",
        "nan loss, finite gradient",
        "finite loss, inf gradient",
        "one number of one gradient",
    ],
)
@pytest.mark.parametrize("microbatch", [None, 2])
def test_whatever_is_not_finite_skips_the_step(
    how: str, microbatch: int | None, tmp_path: Path
) -> None:
    train = {} if microbatch is None else {"microbatch": microbatch}
    with Run(spec(8, train=train), Odd(how), folder=tmp_path / "a", quiet=True) as run:
        before = state_of(run)
        for report in run.steps():
            after = state_of(run)
            if not report.applied:
                assert_same(before, after)
            before = after
    assert run.num_skipped == 1
    assert run.outcome == "finished"


def test_five_skipped_steps_in_a_row_end_the_run(tmp_path: Path) -> None:
    with (
        pytest.raises(NumbersError, match="5 steps in a row"),
        Run(
            spec(50), Odd("inf loss, finite gradient", 9), folder=tmp_path / "a", quiet=True
        ) as run,
    ):
        for _ in run.steps():
            pass
    end = end_of(tmp_path / "a")
    assert (end.outcome, end.exit_code, end.step) == ("failed", 4, 8)
    assert len(faults_of(tmp_path / "a")) == 5
    assert run.num_skipped == 5
    assert manifest.steps(tmp_path / "a") == []


def test_four_skipped_steps_do_not(tmp_path: Path) -> None:
    with Run(
        spec(12), Odd("inf loss, finite gradient", 4), folder=tmp_path / "a", quiet=True
    ) as run:
        for _ in run.steps():
            pass
    assert (run.outcome, run.num_skipped) == ("finished", 4)


def test_a_run_may_ask_to_stop_at_the_first_one(tmp_path: Path) -> None:
    how = spec(12, stability={"nonfinite": "stop"})
    with (
        pytest.raises(NumbersError, match=r"stability\.nonfinite"),
        Run(how, Odd("nan loss, finite gradient"), folder=tmp_path / "a", quiet=True) as run,
    ):
        for _ in run.steps():
            pass
    assert end_of(tmp_path / "a").step == 4


def test_a_loss_that_reaches_no_parameter_is_said_to_do_so(tmp_path: Path) -> None:
    class Detached(Small):
        def loss(self, output: Tensor, batch: Any) -> Loss:
            return Loss.sum(
                torch.zeros((), requires_grad=True) * len(output) + 1.0 * len(output), len(output)
            )

    with (
        pytest.raises(NumbersError, match="no parameter received a gradient"),
        Run(spec(8), Detached(), folder=tmp_path / "a", quiet=True) as run,
    ):
        for _ in run.steps():
            pass


def test_a_record_of_steps_leaves_what_was_skipped_out_of_its_mean() -> None:
    meter = Meter()
    for step, loss in ((1, 2.0), (2, math.nan), (3, 4.0)):
        row = {"loss": (torch.tensor(loss * 8), 8, 1.0)}
        meter.add(StepReport(step, 0.1 * step, 8, 0.1, row, 1.0, math.isfinite(loss)))
    summary = meter.take()
    assert summary is not None
    assert summary.loss == 3.0
    assert (summary.num_steps, summary.num_applied, summary.num_samples, summary.num_items) == (
        3,
        2,
        24,
        24,
    )


def test_a_schedule_that_turns_to_nan_ends_the_run_before_the_weights_do(tmp_path: Path) -> None:
    class Turning(Small):
        def schedule(self, step: int, total_steps: int) -> float:
            return math.nan if step == 5 else 1.0

    with (
        pytest.raises(NumbersError, match="schedule returned nan after 5 updates"),
        Run(spec(12), Turning(), folder=tmp_path / "a", quiet=True) as run,
    ):
        for _ in run.steps():
            pass
    assert all(bool(torch.isfinite(parameter).all()) for parameter in run.model.parameters())
    assert end_of(tmp_path / "a").exit_code == 4


def test_weights_that_became_infinite_are_not_committed_and_end_the_run(tmp_path: Path) -> None:
    how = spec(12, checkpoint={"every": "2 steps", "keep": 9, "background": False})
    with (
        pytest.raises(NumbersError, match=r"4\.bias is not finite"),
        Run(how, Small(), folder=tmp_path / "a", quiet=True) as run,
    ):
        for report in run.steps():
            if report.step == 4:
                with torch.no_grad():
                    run.model.get_parameter("4.bias")[0] = math.inf
    assert manifest.steps(tmp_path / "a") == [2]
    end = end_of(tmp_path / "a")
    assert (end.exit_code, end.step) == (4, 4)


def report_of(step: int, loss: float, *, applied: bool = True) -> StepReport:
    return StepReport(step, 0.0, 1, 0.1, {"loss": (torch.tensor(loss), 1, 1.0)}, 1.0, applied)


@pytest.mark.parametrize(
    ("losses", "ends_at"),
    [
        ([1.0] + [2e4] * 5, 6),
        ([1.0] + [2e4] * 4 + [1.0] + [2e4] * 4, None),
        ([1.0] + [9e3] * 20, None),
        ([0.0] + [2e4] * 5, 6),
        ([-3.0] + [-5e4] * 5, 6),
        ([1e-6] + [0.5] * 20, None),
    ],
)
def test_a_loss_is_diverged_when_it_stays_out_of_all_proportion(
    losses: list[float], ends_at: int | None
) -> None:
    guard = Guard(StabilityTable())
    ended = None
    for step, loss in enumerate(losses, 1):
        guard.watch(report_of(step, loss))
        guard.judge(step)
        try:
            guard.raise_if_over(step)
        except NumbersError:
            ended = step
            break
    assert ended == ends_at


class Counting(nn.Module):
    """Buffers changed in place, replaced, constant, of whole numbers, filled, grown and cast in the
    pass, resized in place, and no tensor yet."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 3)
        self.register_buffer("in_place", torch.zeros(2))
        self.register_buffer("replaced", torch.zeros(2))
        self.register_buffer("constant", torch.ones(2))
        self.register_buffer("steps", torch.zeros((), dtype=torch.int64))
        self.register_buffer("absent", None)
        self.register_buffer("filled", None)
        self.register_buffer("grown", torch.zeros(0, 4))
        self.register_buffer("cast", torch.zeros(2))
        self.register_buffer("resized", torch.zeros(1))

    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            self.get_buffer("in_place").add_(x.detach().mean())
            self.replaced = self.replaced + x.detach().mean()
            self.get_buffer("steps").add_(1)
            mean = x.detach().mean(0)
            self.filled = mean if self.filled is None else self.filled + mean
            self.grown = torch.cat([self.grown, mean[None]])
            self.cast = self.cast.double() + mean[0]
            self.get_buffer("resized").resize_(len(self.grown)).fill_(mean[0])
        output: Tensor = self.linear(x)
        return output


@pytest.mark.parametrize("on_device", [False, True])
@pytest.mark.parametrize("skipped", [(2, 3), (0, 1, 3)])
def test_buffers_of_every_kind_are_as_before_a_skipped_step_and_as_after_an_applied_one(
    skipped: tuple[int, ...], on_device: bool
) -> None:
    torch.manual_seed(0)
    model = Counting()
    buffers = LiveBuffers(model)
    for step in range(6):
        before = {name: tensor.clone() for name, tensor in model.named_buffers()}
        is_skipped = step in skipped
        buffers.keep()
        model(torch.full((2, 4), math.nan) if is_skipped else torch.ones(2, 4))
        after = {name: tensor.clone() for name, tensor in model.named_buffers()}
        buffers.restore_unless(torch.tensor(not is_skipped) if on_device else not is_skipped)
        assert_same(before if is_skipped else after, dict(model.named_buffers()))
    assert model.get_buffer("steps") == 6 - len(skipped)
    assert "absent" not in dict(model.named_buffers())
