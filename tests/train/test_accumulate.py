"""A step of several batches trains like one batch that holds all of their samples."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.utils.rnn import pad_sequence
from torch.utils.data import DataLoader, IterableDataset

from surefoot import Loss, Run, RunSpec
from surefoot.core.errors import SpecError, SurefootError
from tests.train.test_loader_resume import Left

WORDS, NUM_TEXTS, IGNORED = 11, 22, -100
TEXTS: Any = [
    torch.from_numpy(np.random.default_rng(number).integers(0, WORDS, 3 + number * 5 % 7))
    for number in range(NUM_TEXTS)
]


def pad(texts: list[Tensor]) -> tuple[Tensor, Tensor]:
    """Texts and their targets, (samples, the length of the longest); half of the first are ignored.

    A microbatch therefore has other counts than its neighbors.
    """
    inputs = pad_sequence([text[:-1] for text in texts], batch_first=True)
    targets = pad_sequence([text[1:] for text in texts], True, IGNORED)
    targets[0, ::2] = IGNORED
    return inputs, targets


class Stream(IterableDataset[Any]):
    def __iter__(self) -> Any:
        return iter(TEXTS)

    def __len__(self) -> int:
        return NUM_TEXTS


class Words:
    """A small language model over texts of unequal lengths."""

    def __init__(self, make: Callable[[], Any]) -> None:
        self._make = make

    def model(self) -> nn.Module:
        return nn.Sequential(nn.Embedding(WORDS, 8), nn.Tanh(), nn.Linear(8, WORDS))

    def data(self, split: str) -> Any:
        return self._make() if split == "train" else DataLoader(TEXTS, 4, collate_fn=pad)

    def forward(self, model: nn.Module, batch: Any) -> Tensor:
        return model(batch[0])  # type: ignore[no-any-return]

    def loss(self, output: Tensor, batch: Any) -> Loss:
        targets = batch[1]
        total = functional.cross_entropy(
            output.transpose(1, 2), targets, ignore_index=IGNORED, reduction="sum"
        )
        return Loss.sum(total, count=int((targets != IGNORED).sum()))


def train(
    folder: Path, make: Callable[[], Any], leave_at: int | None = None, **tables: Any
) -> tuple[list[float], list[Tensor]]:
    """The losses of a run, and the weights at its end."""
    spec = RunSpec(
        **{
            "train": {"length": "3 epochs", "threads": 1} | tables.pop("train", {}),
            "optim": {"name": "sgd", "lr": 0.3, "weight_decay": 0.0, "clip": 0.5},
            "schedule": {"name": "constant"},
            "evaluate": {"every": "1000 steps"},
            "checkpoint": {"every": "1 steps", "background": False},
            "observe": {"tensorboard": False},
            **tables,
        }
    )
    losses, weights = list[float](), list[Tensor]()
    try:
        with Run(spec, Words(make), folder=folder, quiet=True) as run:
            for report in run.steps():
                losses.append(float(report.loss))
                if report.step == leave_at:
                    raise Left
            weights = [each.detach().clone() for each in run.model.parameters()]
    except Left:
        pass
    return losses, weights


def train_plainly(start: list[Tensor], sizes: list[int]) -> tuple[list[float], list[Tensor]]:
    """The same as a plain loop of PyTorch, over whole batches of texts in order."""
    model = Words(list).model()
    with torch.no_grad():
        for parameter, value in zip(model.parameters(), start, strict=True):
            parameter.copy_(value)
    optimizer = torch.optim.SGD(model.parameters(), 0.3, momentum=0.9)
    losses = []
    for _ in range(3):
        at = 0
        for size in sizes:
            batches = [
                pad(TEXTS[begin : min(begin + 4, at + size)]) for begin in range(at, at + size, 4)
            ]
            at += size
            count = sum(int((targets != IGNORED).sum()) for _, targets in batches)
            total = sum(
                functional.cross_entropy(
                    model(inputs).transpose(1, 2),
                    targets,
                    ignore_index=IGNORED,
                    reduction="sum",
                )
                for inputs, targets in batches
            )
            loss = total / count
            optimizer.zero_grad()
            loss.backward()
            nn.utils.clip_grad_norm_(model.parameters(), 0.5)
            optimizer.step()
            losses.append(loss.item())
    return losses, [each.detach() for each in model.parameters()]


def in_order(**loader: Any) -> Callable[[], Any]:
    return lambda: DataLoader(TEXTS, 4, collate_fn=pad, **loader)


def test_batches_of_a_loader_train_like_a_plain_loop_over_them(tmp_path: Path) -> None:
    _, start = train(tmp_path / "start", in_order(), optim={"name": "sgd", "lr": 0.0})
    losses, weights = train(tmp_path / "run", in_order(), train={"accumulate": 4})
    # 22 texts are batches of 4, 4, 4, 4, 4 and 2; the last two are a step of their own
    expected, others = train_plainly(start, [16, 6])
    assert len(losses) == len(expected) == 6
    np.testing.assert_allclose(losses, expected, rtol=1e-6)
    torch.testing.assert_close(weights, others, rtol=1e-5, atol=1e-7)


SOURCES: dict[str, Callable[[], Any]] = {
    "loader": in_order(),
    "shuffled": lambda: DataLoader(TEXTS, 4, shuffle=True, collate_fn=pad),
    "workers": lambda: DataLoader(TEXTS, 4, shuffle=True, collate_fn=pad, num_workers=2),
    "stream": lambda: DataLoader(Stream(), 4, collate_fn=pad),
}


def test_a_batch_of_one_is_one_batch_of_the_loader(tmp_path: Path) -> None:
    one = train(tmp_path / "one", in_order(), train={"accumulate": 4, "batch": 1})
    assert one[0] == train(tmp_path / "none", in_order(), train={"accumulate": 4})[0]


@pytest.mark.parametrize("kind", SOURCES)
def test_it_is_the_older_spelling(kind: str, tmp_path: Path) -> None:
    new = train(tmp_path / "new", SOURCES[kind], train={"accumulate": 4})
    old = train(tmp_path / "old", SOURCES[kind], train={"batch": 4, "microbatch": 1})
    assert new[0] == old[0]
    assert all(map(torch.equal, new[1], old[1]))


@pytest.mark.parametrize("kind", ["shuffled", "workers", "stream"])
@pytest.mark.parametrize("stop", [2, 4])
def test_a_stopped_run_resumes_to_the_same_bits(kind: str, stop: int, tmp_path: Path) -> None:
    how = {"train": {"accumulate": 3}}
    _, weights = train(tmp_path / "whole", SOURCES[kind], **how)
    train(tmp_path / "stopped", SOURCES[kind], stop, **how)
    _, others = train(tmp_path / "stopped", SOURCES[kind], **how)
    assert all(map(torch.equal, weights, others))


def test_batches_that_are_cut_train_like_whole_ones(tmp_path: Path) -> None:
    def whole() -> Any:
        return DataLoader(TEXTS, 8, shuffle=True, collate_fn=plain)

    def half() -> Any:
        return DataLoader(TEXTS, 4, shuffle=True, collate_fn=plain)

    expected, weights = train(tmp_path / "whole", whole)
    losses, others = train(tmp_path / "cut", half, train={"accumulate": 2, "microbatch": 1})
    np.testing.assert_allclose(losses, expected, rtol=1e-6)
    torch.testing.assert_close(others, weights, rtol=1e-5, atol=1e-7)


def plain(texts: list[Tensor]) -> tuple[Tensor, Tensor]:
    return (
        pad_sequence([text[:-1] for text in texts], True),
        pad_sequence([text[1:] for text in texts], True, IGNORED),
    )


class Numbers:
    """Samples by number."""

    def model(self) -> nn.Module:
        return nn.Linear(3, 1)

    def data(self, split: str) -> Any:
        x = torch.arange(66.0).reshape(22, 3).sin()
        return x, x.sum(1, keepdim=True)

    def forward(self, model: nn.Module, batch: Any) -> Tensor:
        return model(batch[0])  # type: ignore[no-any-return]

    def loss(self, output: Tensor, batch: Any) -> Loss:
        return Loss.sum((output - batch[1]).square().sum(), count=len(output))


def train_numbers(folder: Path, **tables: Any) -> tuple[list[int], list[Tensor]]:
    """The samples of each step, and the weights at the end."""
    table = {"length": "3 epochs", "threads": 1} | tables.pop("train")
    made = {"evaluate": {"every": "1000 steps"}, "observe": {"tensorboard": False}} | tables
    with Run(RunSpec(train=table, **made), Numbers(), folder=folder, quiet=True) as run:
        sizes = [report.num_samples for report in run.steps()]
        return sizes, [each.detach().clone() for each in run.model.parameters()]


@pytest.mark.parametrize(
    ("given", "same"),
    [
        ({"batch": 4, "accumulate": 3}, {"batch": 12, "microbatch": 4}),
        ({"batch": 4, "accumulate": 3, "microbatch": 2}, {"batch": 12, "microbatch": 2}),
        ({"batch": 3, "accumulate": 2}, {"batch": 6, "microbatch": 3}),
    ],
    ids=["whole", "cut", "odd"],
)
def test_samples_by_number_are_as_one_larger_batch(
    given: dict[str, Any], same: dict[str, Any], tmp_path: Path
) -> None:
    sizes, weights = train_numbers(tmp_path / "given", train=given)
    others = train_numbers(tmp_path / "same", train=same)
    assert sizes == others[0]
    assert sizes[0] == given["batch"] * given["accumulate"]
    assert all(map(torch.equal, weights, others[1]))


def test_the_learning_rate_is_scaled_by_the_batch_of_the_step(tmp_path: Path) -> None:
    optim = {"reference_batch": 4}
    _, weights = train_numbers(tmp_path / "a", train={"batch": 4, "accumulate": 2}, optim=optim)
    _, others = train_numbers(tmp_path / "b", train={"batch": 8, "microbatch": 4}, optim=optim)
    assert all(map(torch.equal, weights, others))


@pytest.mark.parametrize(
    ("make", "tables", "words"),
    [
        (SOURCES["loader"], {"train": {"accumulate": 2, "batch": 4}}, "leave train.batch out"),
        (
            SOURCES["loader"],
            {
                "train": {"accumulate": 2},
                "memory": {"update_in_backward": True},
                "optim": {"clip": 0.0},
            },
            "leave train.accumulate out",
        ),
        (
            SOURCES["loader"],
            {"train": {"accumulate": 2}, "compile": {"what": "step"}},
            "does not support train.accumulate",
        ),
    ],
    ids=["a batch", "in backward", "one graph"],
)
def test_what_cannot_be_accumulated_is_refused(
    make: Callable[[], Any], tables: dict[str, Any], words: str, tmp_path: Path
) -> None:
    with pytest.raises(SpecError) as caught:
        train(tmp_path / "run", make, **tables)
    assert words in f"{caught.value.message} {caught.value.hint}"


def test_a_ramp_says_what_to_give_instead() -> None:
    with pytest.raises(SurefootError, match="use batch = 64 and microbatch = 32"):
        RunSpec(train={"batch": 32, "accumulate": 2, "ramp": [[0, 8], [100, 32]]})
    RunSpec(train={"batch": 64, "microbatch": 32, "ramp": [[0, 32], [100, 64]]})
