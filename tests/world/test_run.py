"""A run on several ranks: the numbers of one process, one folder, one ledger."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from surefoot.components.data import consumed
from surefoot.components.data.order import Keys
from surefoot.components.data.sources.arrays import Arrays
from surefoot.components.metrics import Mean, accuracy, perplexity
from surefoot.contract import events, manifest
from surefoot.contract.spec import RunSpec
from surefoot.contract.task import Loss, Term, Update
from surefoot.core import place
from surefoot.train.run import Run
from tests.world.ranks import run_ranks

NUM_SAMPLES = 44


class Sentences:
    """Texts of unlike length, whose padding does not count.

    With dropout, BatchNorm, tied, frozen and unused parameters.
    """

    split_loss, differs_in = False, ""

    def model(self) -> nn.Module:
        torch.manual_seed(5)
        model = nn.ModuleDict(
            {
                "table": nn.Embedding(11, 8),
                "norm": nn.BatchNorm1d(8),
                "hidden": nn.Linear(8, 8),
                "drop": nn.Dropout(0.3),
                "head": nn.Linear(8, 11, bias=False),
                "unused": nn.Linear(8, 8),
                "frozen": nn.Linear(8, 8),
            }
        )
        if self.differs_in == "shape":
            model["more"] = nn.Linear(2, 2)
        model["head"].weight = model["table"].weight  # type: ignore[index]
        for each in model["frozen"].parameters():  # type: ignore[index]
            each.requires_grad_(False)
        return model.double()

    def data(self, split: str) -> Any:
        rng = np.random.default_rng(3)
        words = rng.integers(1, 11, size=(NUM_SAMPLES, 7))
        lengths = rng.integers(0 if split == "train" else 1, 8, size=NUM_SAMPLES)
        words[np.arange(7) >= lengths[:, None]] = 0
        is_other = self.differs_in == {"train": "data", "test": "judged"}[split]
        return Arrays(words=torch.from_numpy(words[::-1].copy() if is_other else words))

    def augment(self, batch: dict[str, Tensor], keys: Keys) -> dict[str, Tensor]:
        swapped = torch.where(
            keys.uniform()[:, 0:1] < 0.5, batch["words"], batch["words"].clamp(max=9)
        )
        return {"words": swapped}

    def forward(self, model: Any, batch: dict[str, Tensor]) -> Tensor:
        hidden = model["norm"](model["table"](batch["words"]).flatten(0, 1))
        hidden = hidden + model["frozen"](model["drop"](model["hidden"](hidden)))
        made: Tensor = model["head"](hidden)
        return made

    def loss(self, output: Tensor, batch: dict[str, Tensor]) -> Loss:
        words = batch["words"].flatten()
        nats = F.cross_entropy(output, words, reduction="none")
        real = words != 0
        if self.split_loss:
            size = Term("size", output.square().sum(), output.numel(), 1e-3)
            return Loss(Term("nats", (nats * real).sum(), real.sum()), size)
        return Loss.sum((nats * real).sum(), real.sum())

    def metrics(self, output: Tensor, batch: dict[str, Tensor]) -> dict[str, Mean]:
        words = batch["words"].flatten()
        nats = F.cross_entropy(output, words, reduction="none")
        return {
            "acc" if self.differs_in == "metrics" else "accuracy": accuracy(
                output, torch.where(words != 0, words, -100)
            ),
            "perplexity": perplexity((nats * (words != 0)).sum(), (words != 0).sum()),
        }


class Counted(Sentences):
    """Two terms, whose counts are known before."""

    split_loss = True

    def counts(self, batch: dict[str, Tensor]) -> dict[str, float]:
        return {
            "nats": float((batch["words"] != 0).sum()),
            "size": float(batch["words"].numel() * 11),
        }


def spec(**tables: dict[str, Any]) -> RunSpec:
    stated: dict[str, dict[str, Any]] = {
        "train": {"length": "13 steps", "batch": 8, "microbatch": 2, "threads": 1},
        "optim": {"name": "adamw", "lr": 0.01, "clip": 0.5},
        "evaluate": {"every": "5 steps", "batch": 4},
        "checkpoint": {"every": "3 steps", "keep": 2},
        "observe": {"tensorboard": False, "every": "1 step"},
    }
    return RunSpec(
        **{
            name: {**stated.get(name, {}), **tables.get(name, {})}
            for name in stated.keys() | tables.keys()
        }
    )


def train(
    folder: Path, task: Any = None, given: RunSpec | None = None, most: int | None = None
) -> Any:
    """What a rank makes of a run: losses, norms, scores, weights, and what it read."""
    losses, norms = list[Any](), list[Any]()
    with Run(given or spec(), task or Sentences(), folder=folder, quiet=True) as run:
        for report in run.steps():
            losses.append(report.loss)
            norms.append(report.gradient_norm)
            if run.evaluation_due:
                run.evaluate()
            if most is not None and report.step == most:
                raise KeyboardInterrupt
        found = run.evaluate("test") if given is None else None
        state = {
            name: each.double().flatten().tolist() for name, each in run.model.state_dict().items()
        }
        num_samples, step = run.num_samples, run.step
    return {
        "losses": losses,
        "norms": norms,
        "state": state,
        "num_samples": num_samples,
        "step": step,
        "exit_code": run.exit_code,
        "cause": run.cause,
        "evaluation": None if found is None else [found.loss, found.metrics, found.num_samples],
    }


def apart(one: Any, other: Any) -> float:
    """The largest difference of losses, norms and weights."""
    pairs = [(one["losses"], other["losses"]), (one["norms"], other["norms"])]
    pairs += [(one["state"][name], other["state"][name]) for name in one["state"]]
    return max(float(np.abs(np.subtract(left, right)).max(initial=0.0)) for left, right in pairs)


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> Any:
    return train(tmp_path_factory.mktemp("alone") / "run")


@pytest.mark.quick("3")
@pytest.mark.parametrize("num_ranks", [2, 3, pytest.param(4, marks=pytest.mark.slow)])
def test_so_many_ranks_train_to_the_numbers_of_one_process(
    num_ranks: int, alone: Any, tmp_path: Path
) -> None:
    """Texts of unlike length, a short last batch, padding, clipping, accumulation, dropout.

    And BatchNorm, and tied, frozen and unused weights.
    """
    found = run_ranks(num_ranks, lambda rank: train(tmp_path / "run"), tmp_path / "ranks")
    assert all("losses" in each for each in found), found
    assert max(apart(alone, each) for each in found) < 1e-10
    first = found[0]
    assert all(each == first for each in found)  # the same bits on every rank
    assert first["evaluation"] == alone["evaluation"] or num_ranks  # held below to equal weights
    assert (first["num_samples"], first["step"]) == (alone["num_samples"], 13)
    checked = consumed.check(tmp_path / "run")
    assert checked.holds, checked.faults
    assert manifest.steps(tmp_path / "run")[-1] == 13
    assert sorted(path.name for path in (tmp_path / "run" / "ranks").iterdir()) == [
        str(rank) for rank in range(1, num_ranks)
    ]
    assert not (tmp_path / "run" / "ranks" / "1" / "checkpoints").exists()


def test_several_terms_with_counts_that_are_known_before_are_each_divided_by_their_own(
    tmp_path: Path,
) -> None:
    given = spec(train={"length": "6 steps"})
    whole = train(tmp_path / "one", Counted(), given)
    found = run_ranks(3, lambda rank: train(tmp_path / "run", Counted(), given), tmp_path / "ranks")
    assert all("losses" in each for each in found), found
    assert max(apart(whole, each) for each in found) < 1e-10


def test_several_terms_without_known_counts_are_refused_with_the_reason(tmp_path: Path) -> None:
    class Unknown(Sentences):
        split_loss = True

    found = run_ranks(2, lambda rank: train(tmp_path / "run", Unknown()), tmp_path / "ranks")
    assert all("counts that are not known before" in each["error"] for each in found), found


def test_evaluation_has_the_same_bits_for_any_number_of_ranks(alone: Any, tmp_path: Path) -> None:
    def evaluate(folder: Path) -> Any:
        with Run(spec(), Sentences(), folder=folder, quiet=True) as run:
            found = run.evaluate("test")
            own = run.evaluate("train")
            return [found.loss, found.metrics, found.num_samples, own.loss, own.num_samples]

    whole = evaluate(tmp_path / "one")
    assert whole[2] == NUM_SAMPLES
    for num_ranks in (2, 3):
        found = run_ranks(
            num_ranks,
            lambda rank, n=num_ranks: evaluate(tmp_path / f"run-{n}"),
            tmp_path / f"ranks-{num_ranks}",
        )
        assert found == [whole] * num_ranks


def test_a_run_goes_on_with_other_numbers_of_ranks_and_each_sample_is_read_once(
    alone: Any, tmp_path: Path
) -> None:
    folder = tmp_path / "run"
    for number, (num_ranks, until) in enumerate(((3, 4), (1, 6), (2, None))):
        found = run_ranks(
            num_ranks, lambda rank, until=until: train(folder, most=until), tmp_path / f"{number}"
        )
        assert all(("losses" in each) == (until is None) for each in found), found
    assert all(each["step"] == 13 for each in found)
    kept = alone["state"]
    worst = max(
        float(np.abs(np.subtract(kept[name], found[0]["state"][name])).max(initial=0.0))
        for name in kept
    )
    assert worst < 1e-8
    checked = consumed.check(folder)
    assert checked.holds, checked.faults
    assert checked.last == 13


class Pair:
    """Two updates of one step, both of which pass the generator's BatchNorm."""

    def model(self) -> nn.Module:
        torch.manual_seed(1)
        maker = nn.Sequential(nn.Linear(3, 8), nn.BatchNorm1d(8), nn.Linear(8, 4))
        return nn.ModuleDict({"maker": maker, "critic": nn.Linear(4, 1)}).double()

    def data(self, split: str) -> Any:
        return Arrays(
            noise=torch.randn(
                NUM_SAMPLES, 3, generator=torch.Generator().manual_seed(0), dtype=torch.float64
            )
        )

    def forward(self, model: Any, batch: dict[str, Tensor]) -> Tensor:
        made: Tensor = model["maker"](batch["noise"])
        return made

    def updates(self, model: Any) -> list[Update]:
        def critic(model: Any, batch: dict[str, Tensor]) -> Loss:
            return Loss.sum(
                F.softplus(model["critic"](self.forward(model, batch).detach())).sum(),
                len(batch["noise"]),
            )

        def maker(model: Any, batch: dict[str, Tensor]) -> Loss:
            return Loss.sum(
                F.softplus(-model["critic"](self.forward(model, batch))).sum(), len(batch["noise"])
            )

        return [
            Update("critic", critic, model["critic"].parameters()),
            Update("maker", maker, model["maker"].parameters(), every=2),
        ]

    def metrics(self, output: Tensor, batch: dict[str, Tensor]) -> dict[str, Mean]:
        return {"size": Mean(output.square().sum(), len(output))}


def test_several_updates_of_a_step_move_running_statistics_as_on_one_process(
    tmp_path: Path,
) -> None:
    given = spec(
        train={"length": "6 steps"}, checkpoint={"every": "never"}, evaluate={"every": "9 epochs"}
    )
    (alone,) = run_ranks(1, lambda rank: train(tmp_path / "alone", Pair(), given), tmp_path / "one")
    found = run_ranks(3, lambda rank: train(tmp_path / "run", Pair(), given), tmp_path / "ranks")
    assert all("error" not in each for each in (alone, *found)), found
    for name, kept in alone["state"].items():
        assert np.abs(np.subtract(kept, found[0]["state"][name])).max(initial=0.0) < 1e-8, name


def test_numbers_of_numpy_count_on_several_ranks_as_on_one_and_scores_of_32_bits_have_the_same_bits(
    tmp_path: Path,
) -> None:
    class Unlike(Sentences):
        def loss(self, output: Tensor, batch: dict[str, Tensor]) -> Loss:
            made = super().loss(output, batch).terms[0]
            return Loss(Term("nats", made.total, np.int64(int(made.count))))  # type: ignore[arg-type]

        def metrics(self, output: Tensor, batch: dict[str, Tensor]) -> dict[str, Mean]:
            values = output.detach().exp()
            return {
                "narrow": Mean(values.float().sum(), values.numel()),
                "numpy": Mean(np.float32(values.sum().item()), np.int64(values.numel())),  # type: ignore[arg-type]
            }

    def job(rank: int) -> Any:
        with Run(
            spec(), Unlike(), folder=tmp_path / f"{place.here().world_size}", quiet=True
        ) as run:
            next(run.steps())  # its weights are those of one process but for the order of a sum
            for number, each in enumerate(run.model.state_dict().values()):
                each.fill_(number % 7 / 7)
            return run.evaluate("test").metrics

    (alone,), both = run_ranks(1, job, tmp_path / "one"), run_ranks(2, job, tmp_path / "two")
    assert "error" not in alone, alone
    assert both == [alone] * 2


@pytest.mark.parametrize(
    ("tables", "words"),
    [
        ({"layout": {"replicate": 3}}, "layout.replicate is 3, but there are 2 ranks"),
        (
            {"train": {"batch": 8, "microbatch": 8}},
            "a batch of 8 in microbatches of 8 has 1 microbatch for 2 ranks",
        ),
        ({"memory": {"on_oom": "halve"}}, "memory.on_oom is 'halve', but there are several ranks"),
        ({"data": {"on_bad": "skip"}}, "data.on_bad is 'skip', but there are several ranks"),
        ({"observe": {"noise": True}}, "observe.noise is True, but there are several ranks"),
        ({"evaluate": {"every": "3 s"}}, "evaluate.every is '3 s', but there are several ranks"),
        ({"compile": {"what": "step"}}, "compile.what is 'step', but there are several ranks"),
    ],
)
def test_what_several_ranks_cannot_do_is_refused_in_words(
    tables: Any, words: str, tmp_path: Path
) -> None:
    found = run_ranks(
        2, lambda rank: train(tmp_path / "run", None, spec(**tables)), tmp_path / "ranks"
    )
    assert all(words in each["error"] and each["code"] == 2 for each in found), found
    assert not (tmp_path / "run").exists()


def test_a_run_with_a_joint_batch_norm_has_the_numbers_of_whole_batches_on_one_process(
    tmp_path: Path,
) -> None:
    class Awake(Sentences):
        def model(self) -> nn.Module:
            model = super().model()
            model["drop"] = nn.Identity()  # type: ignore[operator]
            return model

    def given(batchnorm: str) -> RunSpec:
        return spec(
            train={"microbatch": None, "batchnorm": batchnorm, "length": "7 steps"},
            data={"last_batch": "drop"},
        )

    whole = train(tmp_path / "one", Awake(), given("keep"))
    found = run_ranks(
        2, lambda rank: train(tmp_path / "run", Awake(), given("sync")), tmp_path / "ranks"
    )
    assert all("losses" in each for each in found), found
    assert max(apart(whole, each) for each in found) < 1e-10
    refused = run_ranks(
        3,
        lambda rank: train(tmp_path / "other", None, spec(train={"batchnorm": "sync"})),
        tmp_path / "refused",
    )
    assert all('train.batchnorm is "sync", and a batch of' in each["error"] for each in refused), (
        refused
    )


@pytest.mark.parametrize(
    ("num_ranks", "words"),
    [(2, "differ from those of rank 0"), (3, "differ from those of most ranks")],
)
def test_a_bit_that_flips_on_one_replica_is_named_within_the_interval(
    num_ranks: int, words: str, tmp_path: Path
) -> None:
    def job(rank: int) -> Any:
        with Run(
            spec(layout={"check_every": "3 steps"}),
            Sentences(),
            folder=tmp_path / "run",
            quiet=True,
        ) as run:
            for report in run.steps():
                if report.step == 7 and rank == 1:
                    weight = run.model["hidden"].weight  # type: ignore[index]
                    weight.data.view(torch.int64)[0, 0] ^= 1  # the last bit of a number of 64
        return run.step

    found = run_ranks(num_ranks, job, tmp_path / "ranks")
    told = f"step 9: the weights of rank 1 of {num_ranks} {words}: hidden."
    assert all(told in each["error"] and each["code"] == 4 for each in found), found
    assert all("the same weights after step 6" in each["error"] for each in found)


class Remembering(Sentences):
    """Keeps something of its own, which its microbatches move."""

    def __init__(self, *names: str) -> None:
        self.kept = {name: torch.zeros(2) for name in names}

    def state(self) -> dict[str, Tensor]:
        return self.kept


@pytest.mark.quick("names1", "names2")
@pytest.mark.parametrize("names", [("baseline",), ("baseline", "an environment"), ()])
def test_the_state_of_a_task_that_each_rank_has_for_itself_is_named_at_the_start(
    names: tuple[str, ...], tmp_path: Path
) -> None:
    run_ranks(
        2, lambda rank: train(tmp_path / "run", Remembering(*names), most=1), tmp_path / "ranks"
    )
    started = next(
        event for event in events.read(tmp_path / "run") if isinstance(event, events.Started)
    )
    said = [note for note in started.notes if "a separate copy" in note]
    assert len(said) == bool(names)
    assert all(repr(name) in said[0] for name in names)
