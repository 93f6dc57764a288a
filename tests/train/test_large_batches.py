"""What goes with large batches.

The rate that follows them, BatchNorm under accumulation, a batch that grows.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import surefoot
from surefoot.components.data import consumed
from surefoot.components.data.sources.arrays import Arrays
from surefoot.components.stability.noise import GradientNoise
from surefoot.contract import ledger
from surefoot.contract.events import Evaluated, Started, Step
from surefoot.core.errors import SpecError
from surefoot.prove.whatif.noise import gradient_of
from surefoot.train.preflight import norms
from surefoot.train.run import Run, drive
from tests.train.small import SAMPLES, Small, records, spec
from tests.train.test_resume import Left


def notes(folder: Path) -> tuple[str, ...]:
    started = records(folder)[0]
    assert isinstance(started, Started)
    return tuple(started.notes)


def finish(folder: Path, task: Any = None, **tables: dict[str, Any]) -> Run:
    with Run(spec(**tables), task or Small(), folder=folder, quiet=True) as run:
        drive(run)
    return run


# ---- the rate


def rates(folder: Path) -> list[float]:
    return [event.learning_rates["loss"] for event in records(folder) if isinstance(event, Step)]


@pytest.mark.parametrize(("rule", "factor"), [("linear", 4.0), ("sqrt", 2.0)])
def test_the_rate_is_scaled_to_the_batch_where_that_is_asked_for_and_it_is_said(
    rule: str, factor: float, tmp_path: Path
) -> None:
    more = {"observe": {"every": "1 step"}, "optim": {"lr": 0.01}}
    finish(tmp_path / "plain", **more)
    finish(
        tmp_path / "scaled",
        **{**more, "optim": {"lr": 0.01, "reference_batch": 1, "scaling": rule}},
    )
    assert rates(tmp_path / "scaled") == pytest.approx(
        [factor * rate for rate in rates(tmp_path / "plain")]
    )
    assert (
        f"the learning rate is x {factor:g} for a batch of 4: optim.lr is for 1 ({rule})"
        in notes(tmp_path / "scaled")
    )
    assert not any("the learning rate is x" in note for note in notes(tmp_path / "plain"))


def test_a_batch_of_more_samples_than_there_are_scales_the_rate_by_those(tmp_path: Path) -> None:
    finish(
        tmp_path / "run",
        train={"batch": 96},
        optim={"lr": 0.01, "reference_batch": 12},
        observe={"every": "1 step"},
    )
    assert rates(tmp_path / "run")[0] == pytest.approx(0.02)
    assert "the learning rate is x 2 for a batch of 24: optim.lr is for 12 (linear)" in notes(
        tmp_path / "run"
    )


@pytest.mark.parametrize(
    ("train", "told"),
    [
        (
            {"batch": 25},
            (
                "train.batch is 25, but the training set has 24 samples: a step trains on "
                "all 24, which is one epoch"
            ),
        ),
        ({"batch": 24}, ""),
        ({"batch": 64, "microbatch": 16}, "set train.batch to 24 or less"),
        ({"batch": 32, "ramp": ((0, 4), (24, 32))}, "train.batch is 32, but"),
    ],
)
def test_a_batch_of_more_samples_than_there_are_is_told_before_the_run(
    train: dict[str, Any], told: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with Run(spec(2, train=train), Small(), folder=tmp_path / "run") as run:
        assert [report.num_samples for report in run.steps()] == [
            min(24, train["batch"] if "ramp" not in train else 4)
        ] * 2
    before = capsys.readouterr().err.partition("step 1")[0]
    assert (
        (told or "the training set has") in before if told else "the training set has" not in before
    )


def test_a_rule_without_a_batch_to_scale_from_is_refused() -> None:
    with pytest.raises(
        SpecError, match=r'optim\.scaling = "sqrt" has no effect without optim\.reference_batch'
    ):
        spec(optim={"scaling": "sqrt"})


class Wide(Small):
    def data(self, split: str) -> Arrays:
        return Arrays(torch.zeros(8200, 4), torch.arange(8200) % 3)


@pytest.mark.parametrize(
    ("batch", "schedule", "optimizer", "says"),
    [
        (8200, {"name": "cosine"}, "sgd", 'warmup = "5 epochs", and name optim.name = "lars"'),
        (8200, {"name": "cosine"}, "lamb", 'set schedule.warmup = "5 epochs"'),
        (8200, {"name": "cosine", "warmup": "3 steps"}, "sgd", None),
        (8200, {"name": "one_cycle"}, "sgd", None),
        (8192, {"name": "cosine"}, "sgd", None),
    ],
)
def test_above_8192_without_warm_up_the_start_warns(
    batch: int, schedule: dict[str, Any], optimizer: str, says: str | None, tmp_path: Path
) -> None:
    tables: dict[str, Any] = {
        "train": {"batch": batch},
        "schedule": schedule,
        "optim": {"name": optimizer},
    }
    with Run(spec(12, **tables), Wide(), folder=tmp_path / "run", quiet=True):
        pass
    warned = [note for note in notes(tmp_path / "run") if "without warm-up" in note]
    assert len(warned) == (says is not None)
    assert says is None or says in warned[0]
    assert ("lars" in "".join(warned)) == (says is not None and "lars" in says)


# ---- BatchNorm


class Normed(nn.Module):
    """Convolutions and a BatchNorm that the data make sensitive to who stands beside whom."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.norm, self.head = nn.Conv1d(1, 16, 3), nn.BatchNorm1d(16), nn.Linear(16, 3)

    def forward(self, x: Tensor) -> Tensor:
        made: Tensor = self.head(self.norm(self.conv(x[:, None])).relu().mean(2))
        return made


class Convolved(Small):
    def model(self) -> nn.Module:
        return Normed()


def weights(run: Run) -> Tensor:
    return torch.cat([parameter.detach().flatten() for parameter in run.model.parameters()])


def trained_weights(folder: Path, **train: Any) -> Tensor:
    made = {"train": {"batch": 12, **train}, "optim": {"name": "sgd", "lr": 0.1}}
    return weights(finish(folder, Convolved(), **made))


def test_batchnorm_itself_does_not_train_accumulated_as_whole(tmp_path: Path) -> None:
    split, whole = (
        trained_weights(tmp_path / "split", microbatch=3),
        trained_weights(tmp_path / "whole"),
    )
    assert (split - whole).abs().max() > 1e-3


@pytest.mark.parametrize("to", ["group", "layer"])
def test_a_converted_model_trains_accumulated_as_whole(to: str, tmp_path: Path) -> None:
    split = trained_weights(tmp_path / "split", microbatch=3, batchnorm=to)
    whole = trained_weights(tmp_path / "whole", batchnorm=to)
    torch.testing.assert_close(split, whole, rtol=0, atol=1e-6)
    model = surefoot.load(tmp_path / "split", "last", task=Convolved())
    assert not any(isinstance(module, nn.BatchNorm1d) for module in model.modules())
    assert any("GroupNorm replaces BatchNorm" in note for note in notes(tmp_path / "split"))


def test_batchnorm_under_accumulation_is_told_with_what_it_does_to_the_gradient(
    tmp_path: Path,
) -> None:
    finish(tmp_path / "run", Convolved(), train={"batch": 12, "microbatch": 3})
    (told,) = (note for note in notes(tmp_path / "run") if note.startswith("BatchNorm normalizes"))
    assert "a microbatch of 3 samples, not the batch of 12" in told
    assert 'train.batchnorm = "group"' in told
    found = re.search(r"of its first 12 samples by ([\d.]+) %", told)
    assert found is not None
    with Run(
        spec(train={"batch": 12, "microbatch": 3}),
        Convolved(),
        folder=tmp_path / "again",
        quiet=True,
    ) as run:
        batches = [run.task.augment(batch, keys) for batch, keys in _first(run)]  # type: ignore[misc]
        whole = tuple(torch.cat(parts) for parts in zip(*batches, strict=True))
        one, other = _gradient(run, [whole]), _gradient(run, batches)
    assert float(found[1]) == pytest.approx(
        100 * float((one - other).norm() / one.norm()), rel=1e-2
    )
    assert float(found[1]) > 1


def test_what_batchnorm_does_is_measured_by_the_first_attempt_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tables = {"train": {"batch": 12, "microbatch": 3}}
    with (
        pytest.raises(KeyboardInterrupt),
        Run(spec(**tables), Convolved(), folder=tmp_path / "run", quiet=True) as run,
    ):
        for report in run.steps():
            if report.step == 2:
                run.save()
                raise KeyboardInterrupt
    assert sum(note.startswith("BatchNorm normalizes") for note in notes(tmp_path / "run")) == 1
    monkeypatch.setattr(
        norms, "_relative_difference", lambda *given: pytest.fail("it was measured again")
    )
    finish(tmp_path / "run", Convolved(), **tables)


def _first(run: Run) -> list[tuple[Any, Any]]:
    from surefoot.components.data.order import Keys

    feed = run.assembly.feed
    return [
        (feed.source.read(ids), Keys(run.spec.train.seed, 0, ids))
        for ids in feed.microbatches(feed.window(0))
    ]


def _gradient(run: Run, batches: list[Any]) -> Tensor:
    run.model.zero_grad()
    for x, y in batches:
        (nn.functional.cross_entropy(run.model(x), y, reduction="sum") / 12).backward()
    return torch.cat(
        [
            parameter.grad.flatten()
            for parameter in run.model.parameters()
            if parameter.grad is not None
        ]
    )


@pytest.mark.parametrize(
    "tables", [{"batch": 12}, {"batch": 12, "microbatch": 3, "batchnorm": "group"}]
)
def test_nothing_is_said_of_batchnorm_where_there_is_nothing_to_say(
    tables: dict[str, Any], tmp_path: Path
) -> None:
    finish(tmp_path / "run", Convolved(), train=tables)
    assert not any("BatchNorm normalizes" in note for note in notes(tmp_path / "run"))


def test_a_conversion_without_a_batchnorm_is_refused(tmp_path: Path) -> None:
    with pytest.raises(SpecError, match="the model has no BatchNorm"):
        finish(tmp_path / "run", train={"batchnorm": "group"})


# ---- the ramp

RAMP = [[0, 2], [10, 4], [60, 8]]
GROWING = {"train": {"batch": 8, "microbatch": 2, "ramp": RAMP, "length": "4 epochs"}}


def test_a_run_whose_batch_grows_sees_every_sample_once_an_epoch_and_its_rate_follows_if_asked(
    tmp_path: Path,
) -> None:
    more = {
        "observe": {"every": "1 step"},
        "evaluate": {"every": "1 epoch"},
        "optim": {"lr": 0.01},
        "schedule": {"name": "constant"},
    }
    run = finish(tmp_path / "run", **GROWING, **more)
    steps = [event for event in records(tmp_path / "run") if isinstance(event, Step)]
    assert [event.num_samples for event in steps] == [2] * 5 + [4, 4, 4, 2] + [4] * 6 + [
        4,
        4,
        4,
    ] + [8, 4] + [8] * 3
    assert run.num_samples == 4 * SAMPLES
    assert set(rates(tmp_path / "run")) == {0.01}
    evaluated = [event.step for event in records(tmp_path / "run") if isinstance(event, Evaluated)]
    assert evaluated == [event.step for event in steps if event.epoch in (1.0, 2.0, 3.0, 4.0)]
    found = consumed.check(tmp_path / "run")
    assert (found.holds, found.num_samples, found.epochs) == (True, 4 * SAMPLES, 4.0)
    assert "[[0,2],[10,4],[60,8]]" in (tmp_path / "run" / ledger.FILE).read_bytes()[:256].decode()
    assert [use.epoch for use in consumed.find_sample(tmp_path / "run", 7)] == [1, 2, 3, 4]
    finish(tmp_path / "scaled", **GROWING, **{**more, "optim": {"lr": 0.01, "reference_batch": 8}})
    batches = [2] * 5 + [4] * 13 + [8] * 5
    assert rates(tmp_path / "scaled") == pytest.approx([0.01 * batch / 8 for batch in batches])


def test_a_ledger_of_another_ramp_does_not_hold(tmp_path: Path) -> None:
    finish(tmp_path / "run", **GROWING)
    path = tmp_path / "run" / ledger.FILE
    header = path.read_bytes()
    assert b"[10,4]" in header
    path.write_bytes(header.replace(b"[10,4]", b"[18,4]"))
    assert not consumed.check(tmp_path / "run").holds


def test_a_run_left_in_the_middle_of_its_ramp_goes_on_with_the_batch_that_was_due(
    tmp_path: Path,
) -> None:
    how = spec(checkpoint={"every": "3 steps"}, observe={"every": "1 step"}, **GROWING)
    with pytest.raises(Left), Run(how, Small(), folder=tmp_path / "run", quiet=True) as run:
        for report in run.steps():
            if report.step == 11:
                raise Left
    with Run(how, Small(), folder=tmp_path / "run", quiet=True) as run:
        assert run.step == 9
        drive(run)
    assert consumed.check(tmp_path / "run").holds
    assert run.num_samples == 4 * SAMPLES


@pytest.mark.parametrize(
    ("tables", "says"),
    [
        ({"train": {"batch": 8, "ramp": [[5, 2], [9, 8]]}}, "is not a ramp"),
        ({"train": {"batch": 8, "ramp": [[0, 2], [0, 8]]}}, "is not a ramp"),
        ({"train": {"batch": 8, "ramp": [[0, 2], [9, 4]]}}, "at last batch = 8"),
        (
            {"train": {"batch": 8, "microbatch": 4, "ramp": [[0, 2], [9, 8]]}},
            r"does not divide 2, a batch of ramp; use one of \[1, 2\]",
        ),
    ],
)
def test_a_ramp_that_is_none_is_refused(tables: dict[str, Any], says: str) -> None:
    with pytest.raises(SpecError) as caught:
        spec(**tables)
    assert re.search(says, f"{caught.value.message}; {caught.value.hint}")


@pytest.mark.parametrize(
    ("tables", "says"),
    [
        ({"data": {"last_batch": "drop"}}, "another part of every epoch"),
        ({"checkpoint": {"keep_every": "1 epoch"}}, "depends on the position in the run"),
        ({"schedule": {"name": "step", "every": "1 epoch"}}, "schedule.every is '1 epoch'"),
        ({"schedule": {"name": "exponential"}}, "schedule.every is '1 epoch'"),
        (
            {"schedule": {"name": "multi_step", "milestones": ["3 steps", "9 samples"]}},
            "schedule.milestones is '9 samples'",
        ),
        (
            {
                "schedule": {
                    "sequence": [{"name": "constant", "length": "2 epochs"}, {"name": "cosine"}]
                }
            },
            "schedule.length",
        ),
    ],
)
def test_what_needs_steps_of_one_length_is_refused_with_a_ramp(
    tables: dict[str, Any], says: str, tmp_path: Path
) -> None:
    with pytest.raises(SpecError, match=says):
        finish(tmp_path / "run", **GROWING, **tables)
    finish(tmp_path / "warm", **GROWING, schedule={"warmup": "1 epoch"})


# ---- noise


def test_the_noise_of_a_run_is_that_of_its_first_microbatches_against_its_batches(
    tmp_path: Path,
) -> None:
    how = {
        "train": {"batch": 8, "microbatch": 2},
        "optim": {"lr": 0.0, "clip": 0.01},
        "observe": {"noise": True, "every": "4 steps"},
    }
    run = finish(tmp_path / "run", **how)
    by_hand, feed = GradientNoise(), run.assembly.feed
    for step in range(12):
        window = feed.window(step)
        first, whole = (
            gradient_of(run.assembly, ids, window.epoch) for ids in (window.ids[:2], window.ids)
        )
        by_hand.add(float(first.square().sum()), float(whole.square().sum()), 2, 8)
    expected = by_hand.estimate()
    assert expected is not None
    steps = [event for event in records(tmp_path / "run") if isinstance(event, Step)]
    assert [event.noise.get("num_steps") for event in steps] == [None, None, 8, 12]
    assert steps[-1].noise["low"] == pytest.approx(expected.low, rel=1e-4)
    assert steps[-1].noise["scale"] == (
        None if expected.scale is None else pytest.approx(expected.scale, rel=1e-4)
    )
    assert run.summary["noise"]["advice"] == expected.advise(8)
    plain = finish(tmp_path / "plain", **{**how, "observe": {"every": "4 steps"}})
    assert "noise" not in plain.summary
    assert weights(plain).equal(weights(run)), "what is observed changes no number"


@pytest.mark.parametrize("train", [{"batch": 8}, {"batch": 8, "microbatch": 8}])
def test_noise_without_two_batch_sizes_is_refused(train: dict[str, Any], tmp_path: Path) -> None:
    with pytest.raises(SpecError, match="one microbatch of all 8 samples") as caught:
        finish(tmp_path / "run", train=train, observe={"noise": True})
    assert "train.microbatch = 2" in str(caught.value.hint)
