"""Numbers that are not: a step that is skipped moves nothing, evaluation leaves no trace, and a run repeats bit for bit."""

from __future__ import annotations

import copy
import math
import random
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from surefoot.components import optim
from surefoot.components.data import Arrays, Feed, Order
from surefoot.components.metrics import bits_per_byte, perplexity
from surefoot.components.observe import Meter
from surefoot.components.stability import Guard
from surefoot.contract import manifest, spec_file
from surefoot.contract.events import Evaluated, Fault
from surefoot.contract.spec import RunSpec, StabilityTable
from surefoot.contract.state import StepReport
from surefoot.contract.task import Loss, resolve
from surefoot.core.errors import NumbersError, SpecError, UserCodeError
from surefoot.core.place import child_environment
from surefoot.train.drive import drive
from surefoot.train.evaluate import evaluate
from surefoot.train.quiet import untouched
from surefoot.train.run import Run
from surefoot.train.step import LiveUpdate, Stepper
from tests.train.small import BATCH, SAMPLES, Small, end_of, records, spec

OPTIMIZERS = {
    "adamw": {"name": "adamw"}, "adam": {"name": "adam", "decay": 0.1}, "sgd": {"name": "sgd", "momentum": 0.9, "nesterov": True},
    "plain sgd": {"name": "sgd", "momentum": 0.0}, "muon": {"name": "muon"},
}  # fmt: skip


def state_of(run: Run) -> dict[str, Tensor]:
    """All that a step may move: weights, buffers, optimiser state, averages."""
    found = {f"model.{name}": tensor for name, tensor in run.model.state_dict().items()}
    for update in run.assembly.updates:
        for number, optimizer in enumerate(update.guarded.optimizers):
            for key, row in optimizer.state_dict()["state"].items():
                found |= {f"{number}.{key}.{name}": torch.as_tensor(value) for name, value in row.items()}
    average = run.assembly.engine.average
    if average is not None:
        found |= {f"average.{number}": tensor for number, tensor in enumerate(average.averages)}
        found["average.t"] = torch.tensor(average.num_updates)
    return {name: tensor.detach().clone() for name, tensor in found.items()}


def assert_same(one: dict[str, Tensor], other: dict[str, Tensor]) -> None:
    assert one.keys() == other.keys()
    for name, tensor in one.items():
        assert torch.equal(tensor, other[name]), name


def step_of(sample: int, seed: int = 0) -> int:
    """The step of the first epoch that consumes a sample."""
    ids = Feed(Small().data("train"), Order(SAMPLES, seed), batch=BATCH)
    return next(number + 1 for number in range(SAMPLES // BATCH) if sample in ids.window(number).ids)


# ---- skipped steps


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_a_sample_that_is_not_a_number_costs_its_step_and_moves_nothing(name: str, tmp_path: Path) -> None:
    poisoned = next(sample for sample in range(SAMPLES) if step_of(sample) == 3)
    table = {**OPTIMIZERS[name], "lr": 0.05, "ema": 0.9}
    before: dict[str, Tensor] = {}
    with Run(spec(8, optim=table), Small(norm=True, poison=(poisoned,)), folder=tmp_path / "a", quiet=True) as run:
        for report in run.steps():
            if report.step == 2:
                before, rates = state_of(run), run.assembly.updates[0].guarded.rates
            if report.step == 3:
                assert not report.applied
                assert math.isnan(report.loss)
                assert_same(before, state_of(run))
                assert run.assembly.updates[0].guarded.rates == rates  # the schedule did not move either
            else:
                assert report.applied
    faults = [event for event in records(tmp_path / "a") if isinstance(event, Fault)]
    assert [(fault.step, fault.fault, fault.action) for fault in faults] == [
        (3, "nonfinite", "the step was skipped, nothing moved")
    ]
    assert "the loss is nan" in faults[0].detail
    assert end_of(tmp_path / "a").outcome == "finished"
    assert run.num_skipped == 1
    assert all(bool(torch.isfinite(tensor).all()) for tensor in state_of(run).values())


def test_a_run_with_a_skipped_step_equals_one_that_never_had_that_batch(tmp_path: Path) -> None:
    """The reference: the same steps by hand through torch's own calls, the third left out."""
    poisoned = next(sample for sample in range(SAMPLES) if step_of(sample) == 3)
    task = Small(norm=True, poison=(poisoned,))
    table = {"name": "sgd", "lr": 0.05}
    with Run(spec(6, optim=table, schedule={"name": "linear"}), task, folder=tmp_path / "a", quiet=True) as run:
        for _ in run.steps():
            pass
    torch.manual_seed(0)
    model = task.model()
    optimizer = torch.optim.SGD(optim.build_groups(optim.find_trained(model), decay=0.01), lr=0.05, momentum=0.9)
    feed, applied = run.assembly.feed, 0
    for number in range(6):
        if number == 2:
            continue
        for group in optimizer.param_groups:
            group["lr"] = 0.05 * run.assembly.course.schedule(applied)
        batch = run.assembly.engine.stepper._read(feed.window(number), feed.window(number).ids)
        optimizer.zero_grad()
        F.cross_entropy(model(batch[0]), batch[1]).backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        applied += 1
    for mine, other in zip(run.model.state_dict().values(), model.state_dict().values(), strict=True):
        torch.testing.assert_close(mine, other, rtol=2e-5, atol=1e-6)


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_an_optimiser_whose_first_step_is_skipped_starts_as_if_it_had_not_been(name: str) -> None:
    made = []
    for is_skipped in (False, True):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 3))
        table = RunSpec(optim={**OPTIMIZERS[name], "lr": 0.05}).optim
        guarded = optim.GuardedUpdate(optim.build(table, optim.find_trained(model)).optimizers, clip=1.0)
        if is_skipped:
            for parameter in guarded.parameters:
                parameter.grad = torch.full_like(parameter, torch.nan)
            assert guarded.step_if_finite()[1] is False
        for step in range(3):
            guarded.clear_gradients()
            F.cross_entropy(
                model(torch.randn(4, 4, generator=torch.Generator().manual_seed(step))), torch.arange(4) % 3
            ).backward()
            assert guarded.step_if_finite()[1] is True
        made.append([parameter.detach().clone() for parameter in model.parameters()])
    for one, other in zip(*made, strict=True):
        assert torch.equal(one, other)


class Odd(Small):
    """Goes wrong from step 4 on, as `how` says, for `steps` steps."""

    def __init__(self, how: str, steps: int = 1) -> None:
        super().__init__(norm=True)
        self.how, self.last, self.now = how, 3 + steps, 0

    def forward(self, model: nn.Module, batch: Any) -> Tensor:
        self.now += model.training
        return super().forward(model, batch)

    def loss(self, output: Tensor, batch: Any) -> Loss:
        loss = super().loss(output, batch)
        (term,) = loss.terms
        if not output.requires_grad or not 4 <= self.now <= self.last:
            return loss
        if self.how == "inf loss, finite gradient":
            return Loss.sum(term.total + math.inf, term.count)
        if self.how == "nan loss, finite gradient":
            return Loss.sum(term.total + math.nan, term.count)
        if self.how == "finite loss, inf gradient":
            output.register_hook(lambda gradient: gradient * math.inf)
        if self.how == "one number of one gradient":
            output.register_hook(lambda gradient: gradient.index_put((torch.tensor(0), torch.tensor(0)), torch.tensor(math.nan)))
        return loss


@pytest.mark.parametrize(
    "how", ["inf loss, finite gradient", "nan loss, finite gradient", "finite loss, inf gradient", "one number of one gradient"]
)
@pytest.mark.parametrize("microbatch", [None, 2])
def test_whatever_is_not_finite_skips_the_step(how: str, microbatch: int | None, tmp_path: Path) -> None:
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
        Run(spec(50), Odd("inf loss, finite gradient", 9), folder=tmp_path / "a", quiet=True) as run,
    ):
        for _ in run.steps():
            pass
    end = end_of(tmp_path / "a")
    assert (end.outcome, end.exit_code, end.step) == ("failed", 4, 8)
    assert len([event for event in records(tmp_path / "a") if isinstance(event, Fault)]) == 5
    assert run.num_skipped == 5
    assert manifest.steps(tmp_path / "a") == []


def test_four_skipped_steps_do_not(tmp_path: Path) -> None:
    with Run(spec(12), Odd("inf loss, finite gradient", 4), folder=tmp_path / "a", quiet=True) as run:
        for _ in run.steps():
            pass
    assert (run.outcome, run.num_skipped) == ("finished", 4)


def test_a_run_may_ask_to_stop_at_the_first_one(tmp_path: Path) -> None:
    how = spec(12, stability={"nonfinite": "stop"})
    with (
        pytest.raises(NumbersError, match="stability.nonfinite"),
        Run(how, Odd("nan loss, finite gradient"), folder=tmp_path / "a", quiet=True) as run,
    ):
        for _ in run.steps():
            pass
    assert end_of(tmp_path / "a").step == 4


def test_a_loss_that_reaches_no_parameter_is_said_to_do_so(tmp_path: Path) -> None:
    class Detached(Small):
        def loss(self, output: Tensor, batch: Any) -> Loss:
            return Loss.sum(torch.zeros((), requires_grad=True) * len(output) + 1.0 * len(output), len(output))

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
    assert (summary.num_steps, summary.num_applied, summary.num_samples, summary.num_items) == (3, 2, 24, 24)


def test_a_schedule_that_turns_to_nan_ends_the_run_before_the_weights_do(tmp_path: Path) -> None:
    class Turning(Small):
        def schedule(self, step: int, total_steps: int) -> float:
            return math.nan if step == 5 else 1.0

    with (
        pytest.raises(NumbersError, match="schedule gives nan after 5 updates"),
        Run(spec(12), Turning(), folder=tmp_path / "a", quiet=True) as run,
    ):
        for _ in run.steps():
            pass
    assert all(bool(torch.isfinite(parameter).all()) for parameter in run.model.parameters())
    assert end_of(tmp_path / "a").exit_code == 4


def test_weights_that_became_infinite_are_not_committed_and_end_the_run(tmp_path: Path) -> None:
    how = spec(12, checkpoint={"every": "2 steps", "keep": 9})
    with pytest.raises(NumbersError, match=r"4\.bias is not finite"), Run(how, Small(), folder=tmp_path / "a", quiet=True) as run:
        for report in run.steps():
            if report.step == 4:
                with torch.no_grad():
                    run.model.get_parameter("4.bias")[0] = math.inf
    assert manifest.steps(tmp_path / "a") == [2]
    end = end_of(tmp_path / "a")
    assert (end.exit_code, end.step) == (4, 4)


def report_of(step: int, loss: float, *, applied: bool = True) -> StepReport:
    return StepReport(step, 0.0, 1, 0.1, {"loss": (torch.tensor(loss), 1, 1.0)}, 1.0, applied)


@pytest.mark.parametrize(("losses", "ends_at"), [
    ([1.0] + [2e4] * 5, 6), ([1.0] + [2e4] * 4 + [1.0] + [2e4] * 4, None), ([1.0] + [9e3] * 20, None), ([0.0] + [2e4] * 5, 6),
    ([-3.0] + [-5e4] * 5, 6), ([1e-6] + [0.5] * 20, None),
])  # fmt: skip
def test_a_loss_is_diverged_when_it_stays_out_of_all_proportion(losses: list[float], ends_at: int | None) -> None:
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


# ---- the way without host waits, forced on a CPU


def curve(step: int) -> float:
    return 0.5 ** (step / 4)


def worked(
    name: str, on_device: bool, *, clip: float, clip_value: float | None, bad: tuple[int, ...]
) -> tuple[list[Tensor], list[Any], int]:
    """Twelve updates by one way, with gradients that are not finite at the steps `bad`."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 8), nn.LayerNorm(8), nn.ReLU(), nn.Linear(8, 3))
    table = RunSpec(optim={**OPTIMIZERS[name], "lr": 0.05, "clip": 0.0, "rates": {"3.*": 0.5}}).optim
    built = optim.build(table, optim.find_trained(model))
    guarded = optim.GuardedUpdate(
        built.optimizers, clip=clip, clip_value=clip_value, curve=curve, total_steps=12, on_device=on_device
    )
    assert guarded.on_device is on_device
    told = []
    for step in range(12):
        guarded.clear_gradients()
        inputs = torch.randn(6, 4, generator=torch.Generator().manual_seed(step))
        F.cross_entropy(model(inputs), torch.arange(6) % 3, reduction="sum").backward()
        if step in bad:
            guarded.parameters[0].grad[0] = math.inf  # type: ignore[index]
        norm, applied = guarded.step_if_finite(torch.tensor(1 / 6) if on_device else 1 / 6)
        assert isinstance(applied, Tensor) is on_device
        told.append((float(norm), bool(applied), [float(group["lr"]) for group in guarded.groups] if applied else []))
    rates = guarded.rates
    assert rates == [base * curve(12 - len(bad)) for base in guarded._base_rates]
    return [tensor.detach().clone() for tensor in model.state_dict().values()], told, guarded.applied_steps


@pytest.mark.parametrize("name", ["adamw", "adam", "sgd", "plain sgd"])
@pytest.mark.parametrize(("clip", "clip_value"), [(0.0, None), (0.3, None), (0.0, 0.02)])
@pytest.mark.parametrize("bad", [(), (0, 5, 6)])
def test_deciding_on_the_device_gives_the_weights_of_deciding_on_the_host(
    name: str, clip: float, clip_value: float | None, bad: tuple[int, ...]
) -> None:
    host, told, applied = worked(name, False, clip=clip, clip_value=clip_value, bad=bad)
    device, told_too, applied_too = worked(name, True, clip=clip, clip_value=clip_value, bad=bad)
    assert applied == applied_too == 12 - len(bad)
    for one, other in zip(host, device, strict=True):
        torch.testing.assert_close(one, other, rtol=2e-6, atol=1e-7)
    for (norm, was_applied, rates), (norm_too, was_applied_too, rates_too) in zip(told, told_too, strict=True):
        assert norm == pytest.approx(norm_too, rel=1e-5, nan_ok=True)
        assert was_applied is was_applied_too
        assert rates == pytest.approx(rates_too, rel=1e-6)  # what a report shows is what was used


def stepped(on_device: bool, task: Small, steps: int = 10) -> tuple[dict[str, Tensor], list[StepReport], optim.WeightAverage]:
    """A whole step loop by one way: feed, loss, guard, buffers, average."""
    torch.manual_seed(0)
    model = task.model()
    feed = Feed(task.data("train"), Order(SAMPLES, 0), batch=BATCH)
    resolved = resolve(task)
    # not Adam: it blows up the gradient of a bias before BatchNorm, which is rounding alone
    built = optim.build(RunSpec(optim={"name": "sgd", "lr": 0.05}).optim, optim.find_trained(model))
    guarded = optim.GuardedUpdate(built.optimizers, clip=1.0, curve=curve, total_steps=steps, on_device=on_device)
    average = optim.WeightAverage(list(model.parameters()), 0.9)
    update = LiveUpdate("loss", lambda model, batch: task.loss(task.forward(model, batch), batch), guarded)
    stepper = Stepper(
        model=model, task=resolved, feed=feed, updates=[update], seed=0, device=torch.device("cpu"), average=average
    )
    reports = [stepper(number) for number in range(1, steps + 1)]
    return {name: tensor.detach().clone() for name, tensor in model.state_dict().items()}, reports, average


@pytest.mark.parametrize("how", ["none", "inf loss, finite gradient", "nan loss, finite gradient", "finite loss, inf gradient"])
def test_a_step_decided_on_the_device_equals_one_decided_on_the_host(how: str) -> None:
    host, told, average = stepped(False, Odd(how, 2))
    device, told_too, average_too = stepped(True, Odd(how, 2))
    for name, tensor in host.items():
        torch.testing.assert_close(tensor, device[name], rtol=1e-5, atol=1e-6, msg=lambda text, name=name: f"{name}: {text}")
    assert [report.applied for report in told] == [report.applied for report in told_too]
    assert [report.applied for report in told].count(False) == (0 if how == "none" else 2)
    assert average.num_updates == average_too.num_updates == (10 if how == "none" else 8)
    for one, other in zip(average.averages, average_too.averages, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-6)
    for one_report, other_report in zip(told, told_too, strict=True):
        if one_report.applied:
            assert float(one_report.learning_rate) == pytest.approx(float(other_report.learning_rate), rel=1e-6)


def test_nothing_of_a_step_decided_on_the_device_is_read_before_the_report_is(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(self: Tensor) -> Any:
        raise AssertionError("the host waited for the device")

    for name in ("item", "__bool__", "__float__", "__int__"):
        monkeypatch.setattr(Tensor, name, refuse)
    _, reports, _ = stepped(True, Small(norm=True), steps=4)
    monkeypatch.undo()
    assert all(report.applied for report in reports)


def test_a_schedule_that_is_not_finite_is_refused_where_it_is_read_beforehand() -> None:
    model = nn.Linear(2, 2)
    made = torch.optim.AdamW(model.parameters(), lr=0.1, fused=True)
    with pytest.raises(SpecError, match="after 3 updates"):
        optim.GuardedUpdate([made], curve=lambda step: math.inf if step == 3 else 1.0, total_steps=5, on_device=True)


# ---- evaluation


def test_training_after_an_evaluation_is_the_same_bit_for_bit(tmp_path: Path) -> None:
    class Drawing(Small):
        """An evaluation that draws from every stream there is."""

        def metrics(self, output: Tensor, batch: Any) -> Any:
            torch.rand(3), np.random.rand(3), random.random()  # noqa: NPY002
            return super().metrics(output, batch)

        def augment(self, batch: Any, keys: Any) -> Any:
            return batch[0] + 0.1 * torch.rand_like(batch[0]), batch[1]  # not from its keys: from the stream that was put back

    made = []
    for every in (1000, 2):
        with Run(spec(12), Drawing(norm=True, dropout=0.5), folder=tmp_path / str(every), quiet=True) as run:
            for report in run.steps():
                if report.step % every == 0:
                    run.evaluate()
                    run.evaluate("train")
            made.append(state_of(run))
    assert_same(*made)


@pytest.mark.parametrize("raises", [False, True])
def test_looking_at_a_model_leaves_mode_buffers_and_streams_as_they_were(raises: bool) -> None:
    class Replacing(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("seen", torch.zeros(2))
            self.norm = nn.BatchNorm1d(4)
            self.still = nn.Dropout().eval()

        def forward(self, x: Tensor) -> Tensor:
            self.seen = self.seen + 1  # another tensor in its place
            self.norm.running_mean += 1.0  # type: ignore[operator]
            return self.norm(x)

    model = Replacing()
    model.norm.eval()
    before, seen = copy.deepcopy(model.state_dict()), model.seen
    torch.manual_seed(3), np.random.seed(3), random.seed(3)  # noqa: NPY002
    try:
        with untouched(model):
            assert not model.training
            assert not model(torch.rand(4, 4)).requires_grad
            np.random.rand(), random.random()  # noqa: NPY002
            if raises:
                raise ValueError
    except ValueError:
        pass
    assert [module.training for module in (model, model.norm, model.still)] == [True, False, False]
    assert_same(before, model.state_dict())
    assert model.seen is seen
    drawn = torch.rand(1), np.random.rand(), random.random()  # noqa: NPY002
    torch.manual_seed(3), np.random.seed(3), random.seed(3)  # noqa: NPY002
    assert drawn == (torch.rand(1), np.random.rand(), random.random())  # noqa: NPY002


class Words(Small):
    """A language model's evaluation: counts differ from batch to batch."""

    def data(self, split: str) -> Arrays:
        generator = torch.Generator().manual_seed(3)
        targets = torch.randint(0, 3, (SAMPLES - 1, 5), generator=generator)
        targets[torch.rand(targets.shape, generator=generator) < 0.4] = -100
        return Arrays(torch.randn(SAMPLES - 1, 5, 4, generator=generator), targets)

    def loss(self, output: Tensor, batch: Any) -> Loss:
        return Loss.sum(F.cross_entropy(output.flatten(0, 1), batch[1].flatten(), reduction="sum"), int((batch[1] != -100).sum()))

    def metrics(self, output: Tensor, batch: Any) -> Any:
        (term,) = self.loss(output, batch).terms
        return {
            "perplexity": perplexity(term.total, term.count),
            "bits": bits_per_byte(term.total, term.count),
            **super().metrics(output, batch),
        }


def test_the_batch_of_an_evaluation_changes_no_number_and_a_plain_loop_gives_the_same() -> None:
    torch.manual_seed(0)
    task = Words(dropout=0.5)
    model, source = task.model(), task.data("test")
    results = [
        evaluate(model, resolve(task), source, split="test", batch=batch, device=torch.device("cpu"))
        for batch in (1, 3, 7, SAMPLES, 100)
    ]
    total, count = 0.0, 0
    model.eval()
    with torch.no_grad():
        for number in range(len(source)):
            inputs, targets = source.read(np.array([number]))
            losses = F.cross_entropy(model(inputs).flatten(0, 1), targets.flatten(), reduction="none")
            total, count = total + float(losses.double().sum()), count + int((targets != -100).sum())
    for result in results:
        assert result.num_samples == len(source)
        assert result.loss == pytest.approx(total / count, rel=1e-6)
        assert result.metrics["perplexity"] == pytest.approx(math.exp(total / count), rel=1e-6)
        assert result.metrics["bits"] == pytest.approx(total / count / math.log(2), rel=1e-6)
        assert result.metrics["accuracy"] == results[0].metrics["accuracy"]


def test_a_perplexity_that_is_no_number_stays_none() -> None:
    assert math.isnan(perplexity(math.nan, 3).value() or 0.0)
    assert perplexity(1e6, 1).value() == math.inf
    assert perplexity(0.0, 0).value() is None


def test_an_evaluation_that_is_no_number_is_recorded_and_never_the_best(tmp_path: Path) -> None:
    class Sick(Small):
        def metrics(self, output: Tensor, batch: Any) -> Any:
            return {"perplexity": perplexity(math.nan, 3)}

    with Run(spec(4), Sick(), folder=tmp_path / "a", quiet=True) as run:
        drive(run)
    (found,) = [event for event in records(tmp_path / "a") if isinstance(event, Evaluated)]
    assert not found.best
    value = found.metrics["perplexity"]
    assert isinstance(value, float)
    assert math.isnan(value)


# ---- repetition

AGAIN = """
import sys
from surefoot.contract import spec_file
from surefoot.train.drive import drive
from surefoot.train.run import Run
from safetensors.torch import save_file
with Run(spec_file.read(sys.argv[1]).spec, folder="again", quiet=True) as run:
    for report in run.steps():
        if report.step in (10, 15, 20):
            save_file(run.model.state_dict(), f"{report.step}.safetensors")
"""


def test_a_run_repeats_from_its_own_spec_in_a_fresh_process_bit_for_bit(tmp_path: Path) -> None:
    from safetensors.torch import load_file

    kept: dict[int, dict[str, Tensor]] = {}
    task = Small(norm=True, dropout=0.5)
    how = spec(
        20, optim={"lr": 0.02, "ema": 0.9}, schedule={"name": "cosine", "warmup": "3 steps"}, train={"microbatch": 2, "seed": 7}
    )
    with Run(how, task, folder=tmp_path / "a", quiet=True) as run:
        for report in run.steps():
            if report.step % 7 == 0:
                run.evaluate()
            kept[report.step] = copy.deepcopy(run.model.state_dict())
    root = str(Path(__file__).resolve().parents[2])
    environment = {**child_environment(threads=torch.get_num_threads()), "PYTHONPATH": root}
    subprocess.run([sys.executable, "-c", AGAIN, str(tmp_path / "a" / "spec.toml")], cwd=tmp_path, env=environment, check=True)
    for step in (10, 15, 20):
        assert_same(kept[step], load_file(tmp_path / f"{step}.safetensors"))


def test_the_spec_of_a_run_means_the_same_wherever_it_lies(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A relative path in a spec built in Python is relative to where it was built, and its run folder lies elsewhere."""
    from tests.train.small import write_task

    write_task(tmp_path)
    monkeypatch.chdir(tmp_path)
    how = RunSpec(task={"use": "mine.py:Mine"}, train={"length": "2 steps", "batch": 4}, observe={"tensorboard": False})
    with Run(how, folder=tmp_path / "deep" / "a", quiet=True) as run:
        for _ in run.steps():
            pass
    monkeypatch.chdir("/")
    again = spec_file.read(str(tmp_path / "deep" / "a" / "spec.toml")).spec
    assert again.task.use == f"{tmp_path / 'mine.py'}:Mine"
    assert again.id == how.id


def test_an_error_in_an_evaluation_that_the_reader_catches_changes_nothing_of_the_training(tmp_path: Path) -> None:
    made = []
    for is_tried in (False, True):

        class Failing(Small):
            fails = False

            def metrics(self, output: Tensor, batch: Any) -> Any:
                if self.fails:
                    raise ValueError
                return super().metrics(output, batch)

        task = Failing(norm=True, dropout=0.5)
        with Run(spec(8, optim={"ema": 0.9}), task, folder=tmp_path / str(is_tried), quiet=True) as run:
            for report in run.steps():
                task.fails = is_tried and report.step == 4
                if task.fails:
                    with pytest.raises(UserCodeError):
                        run.evaluate()
            made.append(state_of(run))
    assert_same(*made)
