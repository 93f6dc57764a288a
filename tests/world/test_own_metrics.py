"""Ranks share an evaluation with metrics of one's own.

These are tensors, numbers and text; else a line says that they do not.
"""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from surefoot import Run
from surefoot.components.metrics import Mean
from surefoot.runtime.comm.group import Group
from surefoot.train.record import batch_results
from tests.world.ranks import run_ranks, together
from tests.world.test_run import NUM_SAMPLES, Sentences, spec


class Root(Mean):
    """Its value needs tensors."""

    def value(self) -> float | None:
        assert isinstance(self.total, Tensor)
        return float((self.total / self.count).sqrt())


@dataclasses.dataclass(frozen=True)
class Weighted(Mean):
    scale: float = 1.0

    def merge(self, other: Mean) -> Weighted:
        both = Mean.merge(Mean(self.total, self.count), Mean(other.total, other.count))
        return Weighted(both.total, both.count, self.better, self.unit, self.scale)

    def value(self) -> float | None:
        mean = super().value()
        return None if mean is None else self.scale * mean


@dataclasses.dataclass
class Longest:
    words: int
    better = "higher"

    def merge(self, other: Longest) -> Longest:
        return Longest(max(self.words, other.words))

    def value(self) -> float:
        return float(self.words)


class PerWord:
    """Counts of each word: a vector, and one that comes with the second batch."""

    better = "higher"

    def __init__(self, words: Tensor) -> None:
        self.counts, self.last, self.names = (
            torch.bincount(words.flatten(), minlength=16),
            None,
            "words",
        )

    def merge(self, other: PerWord) -> PerWord:
        made = PerWord(torch.zeros(0, dtype=torch.long))
        made.counts, made.last = self.counts + other.counts, other.counts.sum()  # type: ignore[assignment]
        return made

    def value(self) -> float:
        assert self.counts.dtype == torch.long
        return float((self.counts * torch.arange(len(self.counts))).sum() + (self.last or 0))


class Hoarding(Longest):
    """Holds what no text holds."""

    def __init__(self, words: int) -> None:
        super().__init__(words)
        self.seen = [words]

    def merge(self, other: Any) -> Hoarding:
        return Hoarding(max(self.words, other.words))


class Own(Sentences):
    """Metrics of the user's own, of each kind that other ranks can rebuild, or one they cannot."""

    def __init__(self, shared: bool) -> None:
        super().__init__()
        self.shared = shared
        self.num_calls = 0

    def metrics(self, output: Tensor, batch: dict[str, Tensor]) -> dict[str, Any]:
        self.num_calls += 1
        words = batch["words"]
        longest = int((words != 0).sum(1).max())
        if not self.shared:
            return {"hoarding": Hoarding(longest)}
        total, count = output.square().sum(), output.numel()
        return {
            "longest": Longest(longest),
            "root": Root(total, count),
            "weighted": Weighted(total, count, scale=3.0),
            "words": PerWord(words),
        }


@pytest.mark.parametrize("shared", [True, False])
def test_ranks_share_an_evaluation_with_metrics_of_one_s_own_or_say_that_they_do_not(
    shared: bool, tmp_path: Path
) -> None:
    def job(folder: Path) -> Any:
        with Run(spec(), task := Own(shared), folder=folder, quiet=True) as run:
            before = task.num_calls
            found = run.evaluate("test")
            told = [
                note for note in run.assembly.told if "every rank evaluates all samples" in note
            ]
            return [found.metrics, found.num_samples], task.num_calls - before, told

    whole, num_calls, told = job(tmp_path / "one")
    assert whole[1] == NUM_SAMPLES
    assert told == []
    found = run_ranks(2, lambda rank: job(tmp_path / "run"), tmp_path / "ranks")
    assert all("error" not in each for each in found), found
    assert [each[0] for each in found] == [whole] * 2
    if shared:
        assert sum(each[1] for each in found) == num_calls
        assert [each[2] for each in found] == [[], []]
    else:
        assert all(each[1] >= num_calls for each in found)
        assert all("hoarding" in each[2][0] for each in found)


@pytest.mark.parametrize(("metric", "shares"), [(Mean(1.0, 2), True), (Longest(3), False)])
def test_a_rank_without_a_batch_rebuilds_the_metrics_of_surefoot_alone(
    metric: Any, shares: bool, tmp_path: Path
) -> None:
    def job(group: Group) -> Any:
        parts = batch_results.gather(
            [] if group.rank else [batch_results.BatchResult(4, (), {"mine": metric})], group
        )
        return None if parts is None else [each.metrics["mine"].value() for each in parts]

    assert together(2, job, tmp_path) == [[0.5] if shares else None] * 2
