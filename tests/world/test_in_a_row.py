"""Runs that follow each other in the processes of one launch."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from surefoot.train.run import Run
from tests.world.ranks import run_ranks
from tests.world.test_run import Sentences, spec, train


@pytest.mark.slow
def test_one_run_follows_the_other_in_the_same_processes(tmp_path: Path) -> None:
    """As in a script that trains several seeds.

    The first one's objects still stand while the second joins.
    """

    def both(rank: int) -> list[Any]:
        with Run(spec(), Sentences(), folder=tmp_path / "first", quiet=True) as first:
            losses = [report.loss for report in first.steps()]
        return [losses, train(tmp_path / "second", given=spec())["losses"], first.step]

    found = run_ranks(2, both, tmp_path / "ranks")
    assert found[0] == found[1]
    assert found[0][0] == found[0][1]
