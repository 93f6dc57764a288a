"""Ranks that would not compute the same are refused before step 1, with the field and the rank."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest

from tests.world.ranks import run_ranks
from tests.world.test_run import Sentences, spec, train


@pytest.mark.parametrize(
    ("field", "words"),
    [
        ("lr", "spec: rank 1 has"),
        ("shape", "parameters: rank 1 has"),
        ("data", "data: rank 1 has"),
        ("judged", "data of the evaluation: rank 1 has"),
        ("metrics", "metrics: rank 1 has acc, perplexity, rank 0 has accuracy, perplexity"),
        ("folder", "run folder: rank 1 has "),
        ("world", "rank 0 has WORLD_SIZE 2, rank 1 has WORLD_SIZE 3"),
    ],
)
def test_a_rank_that_would_compute_something_else_is_refused_before_the_first_step(
    field: str, words: str, tmp_path: Path
) -> None:
    def job(rank: int) -> Any:
        task = Sentences()
        task.differs_in = field if rank == 1 else ""
        if task.differs_in == "world":
            os.environ["WORLD_SIZE"] = "3"
        folder = tmp_path / ("another" if task.differs_in == "folder" else "run")
        return train(folder, task, spec(optim={"lr": 0.5}) if rank == 1 and field == "lr" else None)

    found = run_ranks(2, job, tmp_path / "ranks")
    assert words in found[0]["error"], found
    assert found[0]["code"] == 2
    if field != "world":  # where rank 0 has exited first, the other has nobody to ask
        assert words in found[1]["error"], found
        assert found[1]["code"] == 2
    assert [each.name for each in tmp_path.iterdir()] == ["ranks"]
