"""Ranks whose microbatch has no gradient of a term train as a plain loop over the whole batch."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.train.constant_terms import KINDS, Only, assert_alike, plain, spec, train
from tests.world.ranks import run_ranks

pytestmark = pytest.mark.usefixtures("loaded_for_shards")


@pytest.mark.quick("0-None", "3-2")
@pytest.mark.parametrize("microbatch", [None, 2])
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_a_constant_term_on_a_rank_adds_its_value_and_no_gradient(
    stage: int, microbatch: int | None, tmp_path: Path
) -> None:
    layout = {"shard": 2, "zero_stage": stage} if stage else {}
    # stages 2 and 3 gather weights in each backward pass, so that each needs a gradient
    kinds = [kind for kind in KINDS if stage < 2 or kind is not Only]

    def job(rank: int) -> Any:
        return {
            kind.__name__: train(tmp_path / kind.__name__, kind(), spec(microbatch, layout=layout))
            for kind in kinds
        }

    for found in run_ranks(2, job, tmp_path / "ranks"):
        assert "error" not in found, found
        for kind in kinds:
            assert_alike(found[kind.__name__], plain(kind()))


@pytest.mark.parametrize("stage", [2, 3])
def test_stages_that_gather_in_the_backward_pass_name_a_microbatch_without_a_gradient(
    stage: int, tmp_path: Path
) -> None:
    layout = {"shard": 2, "zero_stage": stage}
    found = run_ranks(
        2,
        lambda rank: train(tmp_path / "run", Only(), spec(layout=layout)),
        tmp_path / "ranks",
    )
    assert any("the loss of a batch is a constant" in str(each) for each in found), found
